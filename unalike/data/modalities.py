"""Inputs of several modalities, any of which a sample may lack. Depends on torch only."""

import torch
from torch import Tensor

MARK = "?"  # beside modality `left`, `left?` (n,) says which samples have it; absent: all do


def modalities(x: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
    """Return inputs by modality, without the presence marks; a plain tensor is called "x"."""
    if not isinstance(x, dict):
        return {"x": x}
    return {name: rows for name, rows in x.items() if not name.endswith(MARK)}


def with_masks(x: dict[str, Tensor] | Tensor) -> dict[str, Tensor]:
    """Return every modality (n, ...) with its presence mark (n,): 1 where a sample has it, else 0.

    Rows of samples that lack a modality become 0. A modality without a mark is present in all.

    >>> x = with_masks({"left": torch.tensor([[1.0], [2.0]]), "left?": torch.tensor([True, False])})
    >>> x["left"].tolist(), x["left?"].tolist()
    ([[1.0], [0.0]], [1.0, 0.0])
    """
    marks = x if isinstance(x, dict) else {}
    result: dict[str, Tensor] = {}
    for name, rows in modalities(x).items():
        present = marks.get(name + MARK)
        if present is None:
            # not len(): an export to ONNX would fix the number of rows
            present = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
        else:
            rows = torch.where(present.bool().reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)
        result[name] = rows
        result[name + MARK] = present.to(rows.dtype)
    return result
