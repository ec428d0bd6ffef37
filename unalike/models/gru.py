"""A recurrent text encoder trained from scratch, and word numbers by hashing."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from unalike.base.errors import UserError

LETTERS = torch.int32  # dtype of texts as code points; other integer dtypes are word numbers
PRIME = 2_147_483_647
BASE = 257


class GRU(nn.Module):
    """A bidirectional GRU over words, averaged over words: (B, words or letters) to (B, width).

    Inputs are word numbers, 0 for padding, or int32 code points. Words of code points are runs of
    letters and digits in any case and are numbered by a hash. Padding does not change the output.

    Args:
        words: size of the vocabulary, padding included.
        length: cut every text to so many words. Batches then have one shape, as CUDA graphs need.

    Reference: Chung et al. 2014, https://arxiv.org/abs/1412.3555
    """

    has_fixed_trunk = True  # the trunk numbers words, which is not learned

    def __init__(
        self,
        shape: Sequence[int],
        words: int = 20001,
        embedding: int = 128,
        width: int = 128,
        depth: int = 1,
        length: int | None = None,
    ):
        super().__init__()
        smallest = min(words - 1, embedding, width, depth, length or 1)
        if len(shape) != 1 or smallest < 1 or length == 0:
            raise UserError(
                f"gru takes texts as rows of numbers, (words,), and sizes of 1 or more, "
                f"2 words at least; got {tuple(shape)}"
            )
        self.width = width
        self.length = length
        self.vectors = nn.Embedding(words, embedding, padding_idx=0)
        self.ahead = nn.GRU(embedding, width, depth, batch_first=True)
        self.back = nn.GRU(embedding, width, depth, batch_first=True)

    def trunk(self, x: Tensor) -> Tensor:
        """Texts as word numbers, (B, words)."""
        words = hash_words(x, self.vectors.num_embeddings, self.length) if x.dtype == LETTERS else x
        return words if self.length is None else pad(words, (0, self.length - words.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        words = self.trunk(x)
        count = (words > 0).sum(1, keepdim=True)  # (B, 1), words of each text
        if self.length is None:
            words = words[:, : max(int(count.max()), 1)]
        # positions of each text's words from its end to its start; padding stays where it is
        position = torch.arange(words.shape[1], device=words.device)
        reversed_position = torch.where(position < count, count - 1 - position, position)[..., None]
        vectors = self.vectors(words)
        backward = self.back(vectors.gather(1, reversed_position.expand_as(vectors)))[0]
        backward = backward.gather(1, reversed_position.expand_as(backward))
        states = (self.ahead(vectors)[0] + backward) / 2  # (B, words, width)
        mask = (words > 0).unsqueeze(-1).to(states.dtype)
        return (states * mask).sum(1) / mask.sum(1).clamp(min=1)


def hash_words(x: Tensor, words: int, longest: int | None = None) -> Tensor:
    """Code points (n, letters) as word numbers (n, longest) from 1 to words - 1, 0 for padding.

    Only the first `longest` words are returned; by default as many as could be there.

    >>> text = lambda string: torch.tensor([list(map(ord, string))], dtype=torch.int32)
    >>> one, other = hash_words(text("A dog, a DOG"), 1000), hash_words(text("a dog a  dog"), 1000)
    >>> one[0, :4].tolist() == other[0, :4].tolist()
    True
    """
    x = x.long()
    longest = (x.shape[1] + 1) // 2 if longest is None else longest
    x = torch.where((x >= 65) & (x <= 90), x + 32, x)  # A-Z to a-z
    is_letter = ((x >= 97) & (x <= 122)) | ((x >= 48) & (x <= 57)) | (x > 127)
    is_start = is_letter & ~torch.cat([torch.zeros_like(is_letter[:, :1]), is_letter[:, :-1]], 1)
    word = is_start.cumsum(1)  # the word that a letter belongs to, from 1
    position = torch.arange(x.shape[1], device=x.device)
    start = torch.where(is_start, position, 0).cummax(1).values
    # polynomial hash: the sum over a word's letters of letter x BASE^(place in the word)
    weight = torch.tensor(_powers(x.shape[1] + 1), device=x.device)[position - start]
    # column 0 collects what is no letter, the last column all words beyond `longest`
    sums = torch.zeros(len(x), longest + 2, dtype=torch.int64, device=x.device)
    column = (word * is_letter).clamp(max=longest + 1)
    sums = sums.scatter_add(1, column, x * weight % PRIME * is_letter)[:, 1:-1]
    is_word = torch.arange(longest, device=x.device) < word[:, -1:]
    return torch.where(is_word, sums % (words - 1) + 1, 0)


@cache
def _powers(count: int) -> list[int]:
    """The first powers of BASE modulo PRIME."""
    powers = [1]
    while len(powers) < count:
        powers.append(powers[-1] * BASE % PRIME)
    return powers
