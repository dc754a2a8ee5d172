"""What a stage keeps of a microbatch between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class RandomState:
    """The random generators' states at one moment, to run a forward again with the same random numbers."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


@dataclass(slots=True)
class SavedActivations:
    """A microbatch in flight at one stage.

    `input`: the leaf that the input's gradient lands in (None on the first stage). `root`: where the backward starts:
    an edge of the graph, which does not hold the output's storage; None until a recompute where that is due.
    `context`: whatever else the stage needs to recompute. `random_state`: set where a recompute is due.
    """

    input: Tensor | None = None
    root: Any = None
    context: Any = None
    random_state: RandomState | None = None


class ActivationStore:
    """microbatch -> what is saved of it; counts the most that were saved at once."""

    def __init__(self) -> None:
        self._saved: dict[int, SavedActivations] = {}
        self.peak = 0

    def __len__(self) -> int:
        return len(self._saved)

    def put(self, microbatch: int, saved: SavedActivations) -> None:
        assert microbatch not in self._saved, f"microbatch {microbatch} is saved already"
        self._saved[microbatch] = saved
        self.peak = max(self.peak, len(self._saved))

    def get(self, microbatch: int) -> SavedActivations:
        return self._saved[microbatch]

    def take(self, microbatch: int) -> SavedActivations:
        """Remove and return; what it held is freed with it."""
        return self._saved.pop(microbatch)
