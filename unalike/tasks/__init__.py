"""The tasks a client may have, one file each. Knows nothing of clients or methods."""

from unalike.tasks.classification import Classification
from unalike.tasks.multilabel import MultiLabel
from unalike.tasks.segmentation import Segmentation
from unalike.tasks.task import Meter, Task

TASKS = {"classification": Classification, "multilabel": MultiLabel, "segmentation": Segmentation}

__all__ = ["TASKS", "Classification", "Meter", "MultiLabel", "Segmentation", "Task"]
