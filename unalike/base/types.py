"""Type names that every layer uses. Imports nothing of ours."""

from torch import Tensor

Parameters = dict[str, Tensor]  # parameters and buffers by name, as in a module's state_dict
