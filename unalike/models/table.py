"""An encoder of tables: numbers and categories in columns, values may be missing (NaN)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.checks import Size, check_positive

Categories = Annotated[int, Field(ge=0)]  # of a column; 0: it holds numbers


class TableEncoder(nn.Module):
    """Columns (B, columns) to features (B, width): numbers as they are, categories embedded.

    A missing number (NaN) counts as 0, the mean of a standardized column, and is marked by a
    second input. A missing category, or one that is not in the list, has an embedding of its own.

    Args:
        shape: (columns,).
        categories: for each column its number of categories, whose values are 0, 1, ..., or 0 if
            it holds numbers, which should be standardized; default: all columns hold numbers.
        embedding: width of the vector of a category.
        hidden: widths of the layers between.
        width: of the features.
    """

    accepts_missing = True  # NaN in its inputs is allowed
    numeric: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        categories: Sequence[Categories] = (),
        embedding: Size = 4,
        hidden: Sequence[Size] = (64,),
        width: Size = 64,
    ):
        super().__init__()
        if len(shape) != 1:
            raise UserError(f"table takes rows of columns, (columns,), got {tuple(shape)}")
        check_positive("table", shape=shape, embedding=embedding, hidden=hidden, width=width)
        categories = list(categories) or [0] * shape[0]
        if len(categories) != shape[0]:
            raise UserError(
                f"table needs the number of categories of each of {shape[0]} columns (0: numbers), "
                f"got {len(categories)}"
            )
        if any(isinstance(size, bool) or size < 0 or size == 1 for size in categories):
            raise UserError(
                f"a column of a table has 0 categories (numbers), or 2 and more, got {categories}"
            )
        self.width = width
        numeric = [column for column, size in enumerate(categories) if size == 0]
        self.register_buffer("numeric", torch.tensor(numeric, dtype=torch.int64), persistent=False)
        self.categorical = [column for column, size in enumerate(categories) if size]
        # the last row of each embedding is for missing and unknown values
        self.embeddings = nn.ModuleList(
            nn.Embedding(categories[column] + 1, embedding) for column in self.categorical
        )
        inputs = 2 * len(self.numeric) + embedding * len(self.categorical)
        layers: list[nn.Module] = []
        for before, after in pairwise([inputs, *hidden, width]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        numbers = x[:, self.numeric]
        missing = numbers.isnan()
        parts = [torch.where(missing, 0.0, numbers), missing.to(x.dtype)]
        for column, vectors in zip(self.categorical, self.embeddings, strict=True):
            assert isinstance(vectors, nn.Embedding)
            unknown = vectors.num_embeddings - 1
            code = x[:, column].nan_to_num(unknown, unknown, unknown).round()
            code = torch.where((code < 0) | (code > unknown), unknown, code)
            parts.append(vectors(code.long()))
        return self.layers(torch.cat(parts, 1))
