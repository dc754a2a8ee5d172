"""The lengths of rows: the padding of microbatches, and an order of rows that needs little padding.

Problem: padded to one length, a short text costs as much as the longest.

Solution: a microbatch is padded to the smallest multiple of --pad_to_multiple_of tokens that holds its longest row.
Every rank knows the length of each row and the order of rows, so it knows the shapes of each microbatch without a
message. --group_by_length puts rows of similar lengths into one batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

Widths = tuple[int, ...]
"""The number of tokens to which the rows of a microbatch are padded: of the inputs, and of targets with lengths of
their own (text-to-text)."""

FEWEST = 2
"""The fewest tokens of a microbatch, since torch.export takes a dimension of 1 for a constant."""


class Lengths:
    """The lengths of rows with padding behind their tokens.

    Args:
        of_rows: int64 [rows, 1 or 2], the tokens of each row's inputs, and of its targets where these have lengths of
            their own.
        place_of: name of a tensor of tokens, [rows, tokens] -> its column in `of_rows`.
        longest: the widths of full padding.
        multiple: widths are multiples of this number of tokens, or `longest`; None: all are `longest`.
    """

    def __init__(
        self, of_rows: Tensor, place_of: Mapping[str, int], longest: Widths, *, multiple: int | None = None
    ) -> None:
        self.of_rows, self.place_of, self.longest, self.multiple = of_rows, dict(place_of), longest, multiple

    def widths(self, indices: Sequence[int]) -> Widths:
        """The widths of a microbatch of the rows with the numbers `indices`, as `Rows.batch` takes them."""
        most = self.of_rows[torch.tensor([*indices]) % len(self.of_rows)].amax(0).tolist()
        return tuple(self._width(length, place) for place, length in enumerate(most))

    def all_widths(self) -> list[Widths]:
        """All widths that a microbatch of any rows can have."""
        columns = [
            sorted({self._width(length, place) for length in self.of_rows[:, place].unique().tolist()})
            for place in range(len(self.longest))
        ]
        return list(product(*columns))

    def share(self, microbatches: Collection[Sequence[int]]) -> float:
        """The tokens of the microbatches, as a fraction of their tokens with full padding."""
        found = [sum(self.widths(indices)) * len(indices) for indices in microbatches]
        return sum(found) / (sum(self.longest) * sum(map(len, microbatches)))

    def _width(self, length: int, place: int) -> int:
        if self.multiple is None:
            return self.longest[place]
        return min(max(-(-length // self.multiple) * self.multiple, FEWEST), self.longest[place])

    def cut(self, batch: Mapping[str, Tensor], widths: Widths) -> dict[str, Tensor]:
        """The tensors of a microbatch with the padding behind `widths` left out."""
        return {
            name: tensor[:, : widths[self.place_of[name]]].contiguous() if name in self.place_of else tensor
            for name, tensor in batch.items()
        }

    def padded(self, output: Tensor, place: int) -> Tensor:
        """An output for each token, [rows, tokens, ...], with zeros in the place of the padding left out."""
        missing = self.longest[place] - output.shape[1]
        return torch.cat([output, output.new_zeros((len(output), missing, *output.shape[2:]))], 1)


def order_of(lengths: Tensor, batch_size: int, seed: int) -> list[int]:
    """The rows in the random order of transformers' LengthGroupedSampler. `lengths`: int64 [rows]."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    generator = torch.Generator().manual_seed(seed)
    return get_length_grouped_indices(lengths.tolist(), batch_size, generator=generator)
