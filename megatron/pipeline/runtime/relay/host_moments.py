"""What an optimizer keeps of each element, in the host's memory.

Problem: torch's optimizers make their moments themselves, with the first step or when they load: in the process's own
memory, where nobody else can see them, and which on a CPU is the "device".

Solution: each tensor of a state that has the shape of its parameter gets a place in the store's memory. It is brought
there before a step, where it was loaded, or behind it, where the step has made it; from then on the state shows that
place, and the optimizer goes on in it. Counters and the like stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.relay.flat_layout import FlatLayout

Key = tuple[Tensor, str]
"""One of an optimizer's parameters, and what it keeps for it."""


class HostMoments:
    """The places. `make(shape, dtype)`: the host's memory."""

    def __init__(self, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> None:
        self._make = make
        self._places: dict[Key, Tensor] = {}
        self.num_bytes = 0

    def strangers(self, state: Mapping[Tensor, Mapping[str, Any]], parameters: Iterable[Tensor]) -> dict[Key, Tensor]:
        """What `state` has of each element of these parameters, and not in its place."""
        return {
            (parameter, name): value
            for parameter in parameters
            for name, value in state.get(parameter, {}).items()
            if is_of_each_element(name, value, parameter.shape) and value is not self._places.get((parameter, name))
        }

    def places(self, dtypes: Mapping[Key, torch.dtype]) -> dict[Key, Tensor]:
        """The place of each, in the shape of its parameter; zeroed where it is new."""
        new = {
            key: torch.empty(key[0].shape, dtype=dtype, device="meta")
            for key, dtype in dtypes.items()
            if key not in self._places or self._places[key].dtype != dtype
        }
        if new:
            keys = dict(enumerate(new))
            layout = FlatLayout({str(number): new[key] for number, key in keys.items()})
            views = layout.views(layout.allocate(self._make))
            self._places.update({key: views[str(number)] for number, key in keys.items()})
            self.num_bytes += layout.num_bytes
        return {key: self._places[key] for key in dtypes}


def is_of_each_element(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state's entry has a value for each element of a parameter of this shape. As in torch's optimizers,
    `step` counts, also where the parameter has one element.
    """
    return isinstance(value, Tensor) and value.shape == shape and name != "step"
