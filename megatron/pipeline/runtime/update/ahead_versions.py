"""One weight version, and weights that are ahead of it, for forwards.

These are a set of weights of its own. It is made when a forward first asks for it, and serves until one that is
further, or behind another version, is asked for. Nobody computes a gradient at it. How it is made, by a prediction or
by a provisional step, the update says whose optimizer makes the versions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.pipeline.program.weight_policies import Ahead
from megatron.pipeline.runtime.update.versions import Slot, WeightVersions

Make = Callable[[int, int, Mapping[str, Tensor], Mapping[str, Tensor]], None]


class AheadVersions(WeightVersions):
    """As `WeightVersions` with a window of 1, and `load_ahead`, before which `make_with` says how.

    `ahead`: the policy's.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        ahead: Ahead = Ahead.PREDICTION,
        first_version: int = 0,
        make_slot: Callable[[], Slot] | None = None,
        on_switch: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(parameters, window=1, first_version=first_version, make_slot=make_slot, on_switch=on_switch)
        self.ahead = ahead
        self._make: Make | None = None
        self._made: tuple[int, int] | None = None  # of the weights that there are: version, and how far ahead
        self.num_made = 0

    def make_with(self, make: Make) -> None:
        """`make(version, how far ahead, weights, targets)`, with both by name, writes the targets; the parameters show
        the weights.
        """
        self._make = make

    def load_ahead(self, version: int, far: int) -> None:
        """Show weights ahead of `version`, the newest: predicted `far` steps, or stepped with the gradients of `far`
        microbatches (1 and more).

        Raises ValueError where `version` is not alive.
        """
        assert self._make is not None, "an update says how"
        slot = self.slot_of(version)
        if self._made != (version, far):
            if len(self._slots) == 1:
                self._slots.append(self._make_slot())
            if self._shown_slot != slot:
                self._show(slot)
            self._make(version, far, self._slots[slot], self._slots[_AHEAD])
            self._made = version, far
            self.num_made += 1
        if self._shown_slot != _AHEAD:
            self._show(_AHEAD)

    def restore(self, mapping: Mapping[int, Mapping[str, Tensor]]) -> None:
        self._made = None
        super().restore(mapping)

    def reset(self, *versions: int) -> None:
        assert self._shown_slot != _AHEAD, "what is shown are no weights"
        self._made = None
        super().reset(*versions)


_AHEAD = 1
"""The slot of what is ahead: the weights live in the first one, where optimizers step in place."""
