"""Norms of gradients that have left the device, until those of the whole rank are there.

Problem: a stage's norms are taken on the device before its gradients leave, and wait for the other stages'. That is
little, but it grows with the model's depth, and nothing else on the device does.

Solution: they go to the host, too, into one vector with a place for each, and come back in one piece to be added up:
where, and in the order in which, they would have been without that. The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from megatron.backend.streams import streams_of

Key = TypeVar("Key", bound=Hashable)


class NormsOnHost(Generic[Key]):
    """The norms of one batch at a time.

    `keys`: of all that will ever be noted, in the order in which they come back. `dtype`: of the norms. Calls may come
    from several threads, one after the other, with their streams in that order.
    """

    def __init__(self, keys: Iterable[Key], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._places = {key: place for place, key in enumerate(keys)}
        self._device = torch.device(device)
        self._host = streams_of(self._device).kept_host_buffer((len(self._places),), dtype)
        self._noted: set[Key] = set()
        self._version: int | None = None

    def note(self, version: int, norms: Mapping[Key, Tensor]) -> None:
        """Scalars on the device, of the batch that leads to `version`; of what was noted before, the new ones count."""
        assert self._version in (None, version), f"norms of version {self._version} are there, and {version} notes some"
        self._version = version
        self._noted |= norms.keys()
        ordered = sorted(((self._places[key], norm) for key, norm in norms.items()), key=lambda each: each[0])
        first = 0
        for last in range(1, len(ordered) + 1):  # runs of neighbours are one copy
            if last == len(ordered) or ordered[last][0] != ordered[last - 1][0] + 1:
                start, stop = ordered[first][0], ordered[last - 1][0] + 1
                values = torch.stack([norm for _, norm in ordered[first:last]])
                self._host[start:stop].copy_(values, non_blocking=True)
                first = last

    def take(self, version: int) -> dict[Key, Tensor]:
        """All that were noted of the batch, scalars on the device; they are forgotten here."""
        assert self._version in (None, version), f"norms of version {self._version} are there, and not of {version}"
        back = self._host.to(self._device, non_blocking=True, copy=True)
        taken = {key: back[place] for key, place in self._places.items() if key in self._noted}
        self._noted.clear()
        self._version = None
        return taken
