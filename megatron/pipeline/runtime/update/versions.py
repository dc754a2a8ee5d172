"""Weight versions: which buffer holds which version of a stage's weights.

Problem: without flushes a microbatch must see the same weights in its forward and its backward while newer ones are
already being made, so several versions of the weights are alive at once. Autograd adds a trap: a saved graph refers to
the storage it was built on, and some operators (``x @ w``) look the parameter up again in the backward.

Solution: a table from version to slot. A slot is one full set of weight tensors; `load` points ``param.data`` of every
parameter at the slot of a version, before every forward, recompute and backward. A version that was skipped (overflow)
is an alias: a second name for the slot of the version before. A slot is written only while no live version names it,
so what autograd saved is never changed. Versions retire by a window: when version v is made, v - window is forgotten
(1: flush; 2: 2bw; p - s at stage s: PipeDream's stashing), see PipeDream-2BW (Narayanan et al. 2021), section 3.1.

`AheadVersions` has one version, and for forwards a second set of weights ahead of it, at which no gradient is computed.
The set is made when a forward first asks for it, and serves until a forward asks for weights further ahead or for
another version. The update whose optimizer makes the versions decides how: by a prediction or by a provisional step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.pipeline.program.weight_policies import Ahead

Slot = Mapping[str, Tensor]


class WeightVersions:
    """The live weight versions of one rank's parameters.

    `parameters`: name -> parameter, each once. `window`: how many successive versions may be alive, >= 1.
    `first_version`: the version that the parameters hold now. `make_slot`: allocates another set of tensors of the same
    names, shapes and dtypes (default: one ``empty_like`` each); give it where parameters must be views of one buffer.
    `on_switch(slot)`: called after the parameters have been pointed at another slot (slots count from 0, the original).
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        window: int,
        first_version: int = 0,
        make_slot: Callable[[], Slot] | None = None,
        on_switch: Callable[[int], None] | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"window of weight versions is {window}; at least one version must be alive")
        self._parameters = dict(parameters)
        self._window = window
        self._make_slot = make_slot or self._empty_slot
        self._on_switch = on_switch
        self._slots: list[Slot] = [{name: parameter.data for name, parameter in self._parameters.items()}]
        self._table: dict[int, int] = {first_version: 0}
        self._shown_slot = 0
        self.newest = first_version
        self.peak_live = 1

    def _empty_slot(self) -> Slot:
        return {name: torch.empty_like(parameter.data) for name, parameter in self._parameters.items()}

    @property
    def window(self) -> int:
        return self._window

    @property
    def num_slots(self) -> int:
        """Slots allocated so far; they are made on demand, at most `window`."""
        return len(self._slots)

    def live(self) -> list[int]:
        """The versions that can be loaded, in ascending order."""
        return sorted(self._table)

    def slot_of(self, version: int) -> int:
        """Index of the slot that holds `version`; ValueError if it is not alive."""
        slot = self._table.get(version)
        if slot is None:
            raise ValueError(
                f"weight version {version} is not alive (alive: {self.live()}); it was retired or never made"
            )
        return slot

    def tensors(self, version: int) -> dict[str, Tensor]:
        """name -> tensor of a live version: the slot itself, not a copy."""
        return dict(self._slots[self.slot_of(version)])

    def load(self, version: int) -> None:
        """Point every parameter at the slot of `version`; nothing to do if it is shown already."""
        slot = self._table.get(version)
        if slot != self._shown_slot or slot is None:
            self._show(self.slot_of(version))

    def show_newest(self) -> None:
        """Show the newest weights: for an evaluation or a checkpoint."""
        self.load(self.newest)

    def newest_tensors(self) -> dict[str, Tensor]:
        """name -> tensor of the newest weights: the slot itself, not a copy."""
        return self.tensors(self.newest)

    def _show(self, slot: int) -> None:
        tensors = self._slots[slot]
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]
        self._shown_slot = slot
        if self._on_switch is not None:
            self._on_switch(slot)

    def prepare(self, version: int, *, copy: bool = True) -> dict[str, Tensor]:
        """Retire what the window no longer holds, give `version` a free slot, and point the parameters at it.

        `copy`: fill the slot with the newest version (an optimizer that updates in place needs it; one that writes the
        weights from FP32 masters does not). Returns the slot's tensors. With window 1 the slot is the only one.
        """
        self._check_successor(version)
        source = self._slots[self._table[self.newest]]
        self._retire_before(version - self._window + 1)
        slot = self._free_slot()
        self._table[version] = slot
        self.newest = version
        self.peak_live = max(self.peak_live, len(self._table))
        target = self._slots[slot]
        if copy and target is not source:
            for name, tensor in target.items():
                tensor.copy_(source[name])
        if slot != self._shown_slot:
            self._show(slot)
        return dict(target)

    @contextmanager
    def making(self, version: int, *, copy: bool = True) -> Iterator[dict[str, Tensor]]:
        """`prepare`, then a block in which an optimizer may write the parameters in place.

        The parameters' autograd version counters are put back at the end: a graph in flight has saved the parameter
        with another slot behind it, and would otherwise take the write for a change of its own weights.
        """
        tensors = self.prepare(version, copy=copy)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self._parameters.values())):
            yield tensors

    def alias(self, version: int, *, of: int) -> None:
        """Make `version` another name of the slot of `of`: the step that should have made it was skipped."""
        self._check_successor(version)
        slot = self.slot_of(of)
        self._table[version] = slot
        self.newest = version
        self._retire_before(version - self._window + 1)
        self.peak_live = max(self.peak_live, len(self._table))

    def restore(self, mapping: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Forget all versions and take these (version -> name -> tensor), as a checkpoint holds them.

        Values are copied into the slots; two versions given as one mapping object share a slot. Raises ValueError for
        an empty mapping, more versions than the window, missing names or other shapes.
        """
        if not mapping or len(mapping) > self._window:
            raise ValueError(
                f"cannot restore weight versions {sorted(mapping)}: 1 to {self._window} versions fit this schedule"
            )
        slot_of_mapping: dict[int, int] = {}
        table: dict[int, int] = {}
        detached = {id(weights): self._outside_of_slots(weights) for weights in mapping.values()}
        for version in sorted(mapping):
            weights = mapping[version]
            if id(weights) not in slot_of_mapping:
                slot = slot_of_mapping[id(weights)] = len(slot_of_mapping)
                if slot == len(self._slots):
                    self._slots.append(self._make_slot())
                self._fill(slot, version, detached[id(weights)])
            table[version] = slot_of_mapping[id(weights)]
        self._table = table
        self.newest = max(table)
        self.peak_live = max(self.peak_live, len(table))
        self._show(table[self.newest])

    def reset(self, *versions: int) -> None:
        """Declare that the weights shown now are all of these versions (at least one), and no other is alive."""
        if not versions or len(versions) > self._window:
            raise ValueError(
                f"cannot reset to weight versions {sorted(versions)}: 1 to {self._window} fit this schedule"
            )
        self._table = dict.fromkeys(versions, self._shown_slot)
        self.newest = max(versions)
        self.peak_live = max(self.peak_live, len(self._table))

    def _fill(self, slot: int, version: int, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self._slots[slot].items():
            value = weights.get(name)
            if value is None or value.shape != tensor.shape:
                found = "missing" if value is None else f"of shape {tuple(value.shape)}"
                raise ValueError(f"weight version {version}: {name} is {found}, expected shape {tuple(tensor.shape)}")
            tensor.copy_(value)

    def _outside_of_slots(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights, cloned where they lie in a slot, which restoring is about to overwrite."""
        inside = {tensor.data_ptr() for slot in self._slots for tensor in slot.values()}
        return {name: value.clone() if value.data_ptr() in inside else value for name, value in weights.items()}

    def _check_successor(self, version: int) -> None:
        if version != self.newest + 1:
            raise ValueError(
                f"weight version {version} cannot be made: the newest is {self.newest}, versions follow one by one"
            )

    def _retire_before(self, oldest: int) -> None:
        for version in [version for version in self._table if version < oldest]:
            del self._table[version]

    def _free_slot(self) -> int:
        used = set(self._table.values())
        for slot in range(len(self._slots)):
            if slot not in used:
                return slot
        self._slots.append(self._make_slot())
        return len(self._slots) - 1


Make = Callable[[int, int, Mapping[str, Tensor], Mapping[str, Tensor]], None]


class AheadVersions(WeightVersions):
    """`WeightVersions` with a window of 1, and `load_ahead`, which needs a function set by `make_with`.

    `ahead`: that of the weight policy.
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
        self._made: tuple[int, int] | None = None  # of the weights in the slot ahead: version, and how far ahead
        self.num_made = 0

    def make_with(self, make: Make) -> None:
        """Set the function `make(version, how far ahead, weights, targets)`, which writes the targets. Weights and
        targets are by name; the parameters show the weights.
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
"""The slot of the weights ahead; the true weights live in slot 0, where optimizers step in place."""
