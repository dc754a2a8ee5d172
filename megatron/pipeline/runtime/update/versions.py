"""Weight versions: which buffer holds which version of a stage's weights.

Problem: without flushes, newer weights are made while microbatches are in flight, and a microbatch must see the same
weights in its forward and its backward. So several versions of the weights are alive at once. Autograd adds a trap: a
saved graph refers to the storage on which it was built, but some operators (``x @ w``) look the parameter up again in
the backward.

Solution: a table from version to slot. A slot is one full set of weight tensors. Before every forward, recompute and
backward, `load` points ``param.data`` of every parameter at the slot of a version. If the step to a version was skipped
(overflow), the version is an alias: a second name for the slot of the version before. A slot is written only while no
live version uses it, so tensors that autograd has saved never change. When version v is made, version v - window is
forgotten. The window is 1 under flush, 2 under 2bw, and p - s at stage s under PipeDream's stashing (PipeDream-2BW,
Narayanan et al. 2021, section 3.1).

`AheadVersions` has one version and a second set of weights for forwards, which is ahead of that version. No gradient is
computed at the second set. The weight update makes the set, by a prediction or by a provisional step, when a forward
first asks for it. The set is reused until a forward asks for another version or another distance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd import _unsafe_preserve_version_counter as preserve_counter

from megatron.pipeline.program.weight_policies import Ahead

Slot = Mapping[str, Tensor]

_MANY_AT_ONCE = "tensors" in inspect.signature(preserve_counter).parameters  # torch 2.6 takes one tensor a call


@contextmanager
def overwriting(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a block that may write `parameters` in place, without gradients.

    At the end of the block the parameters get their old autograd version counters back. A graph in flight has saved
    the parameter while it showed another slot. With a new counter, autograd would report that the saved weights were
    changed.
    """
    with torch.no_grad(), ExitStack() as counters:
        for tensors in (tuple(parameters.values()),) if _MANY_AT_ONCE else parameters.values():
            counters.enter_context(preserve_counter(tensors))
        yield


class WeightVersions:
    """The live weight versions of one rank's parameters.

    Args:
        parameters: name -> parameter, each parameter once.
        window: the largest number of successive versions alive at once, at least 1.
        first_version: the version that the parameters hold now.
        make_slot: allocates a slot: name -> tensor with the parameter's shape and dtype. Needed where parameters must
            be views of one buffer; default: ``empty_like`` of each parameter.
        on_switch: called with the number of a slot after the parameters have been pointed at it. Slot 0 has the tensors
            that the parameters had at first.

    Attributes:
        newest: the newest version.
        peak_live: the largest number of versions alive at once so far.

    Raises:
        ValueError: `window` is less than 1.
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
        """The number of slots allocated so far, at most `window`; a slot is allocated when it is first needed."""
        return len(self._slots)

    def live(self) -> list[int]:
        """The live versions in ascending order."""
        return sorted(self._table)

    def slot_of(self, version: int) -> int:
        """The number of the slot that holds `version`.

        Raises:
            ValueError: the version is not alive.
        """
        slot = self._table.get(version)
        if slot is None:
            raise ValueError(
                f"weight version {version} is not alive (alive: {self.live()}); it was retired or never made"
            )
        return slot

    def tensors(self, version: int) -> dict[str, Tensor]:
        """The tensors of a live version by name, not copied.

        Raises:
            ValueError: the version is not alive.
        """
        return dict(self._slots[self.slot_of(version)])

    def load(self, version: int) -> None:
        """Point every parameter at the slot of `version`.

        Raises:
            ValueError: the version is not alive.
        """
        slot = self._table.get(version)
        if slot != self._shown_slot or slot is None:
            self._show(self.slot_of(version))

    def show_newest(self) -> None:
        """Load the newest version, for an evaluation or a checkpoint."""
        self.load(self.newest)

    def newest_tensors(self) -> dict[str, Tensor]:
        """The tensors of the newest version by name, not copied."""
        return self.tensors(self.newest)

    def _show(self, slot: int) -> None:
        tensors = self._slots[slot]
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]
        self._shown_slot = slot
        if self._on_switch is not None:
            self._on_switch(slot)

    def prepare(self, version: int, *, copy: bool = True) -> dict[str, Tensor]:
        """Forget the versions that leave the window, give `version` a free slot, and point the parameters at this slot.

        Args:
            version: the newest version + 1.
            copy: fill the slot with the newest version. An optimizer that updates weights in place needs the copy; an
                optimizer that writes weights from FP32 masters does not.

        Returns:
            The tensors of the slot by name, not copied.

        Raises:
            ValueError: `version` is not the newest version + 1.
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
        """Call `prepare`, then run a block in which an optimizer may write the parameters in place (`overwriting`)."""
        tensors = self.prepare(version, copy=copy)
        with overwriting(self._parameters):
            yield tensors

    def alias(self, version: int, *, of: int) -> None:
        """Make `version` a second name for the slot of version `of`, because the step to `version` was skipped.

        Raises:
            ValueError: `version` is not the newest version + 1, or `of` is not alive.
        """
        self._check_successor(version)
        slot = self.slot_of(of)
        self._table[version] = slot
        self.newest = version
        self._retire_before(version - self._window + 1)
        self.peak_live = max(self.peak_live, len(self._table))

    def restore(self, mapping: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replace all versions by the versions of a checkpoint, and show the newest.

        Args:
            mapping: version -> name -> tensor. The values are copied into slots. Versions with the same mapping object
                share a slot.

        Raises:
            ValueError: `mapping` is empty or has more versions than the window; a name is missing or a shape differs.
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
        """Make each of these versions a name for the weights that are shown now, and forget all others.

        Raises:
            ValueError: no version, or more versions than the window.
        """
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
        """The weights, with those in a slot cloned, since `restore` overwrites the slots."""
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
    """`WeightVersions` with a window of 1 and a second slot for weights ahead of the version.

    An update sets by `make_with` the function that computes the weights ahead; `load_ahead` needs it.

    Args:
        ahead: the attribute of the weight policy.
        parameters, first_version: as for `WeightVersions`.

    Attributes:
        num_made: how often weights ahead have been computed.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        ahead: Ahead = Ahead.PREDICTION,
        first_version: int = 0,
    ) -> None:
        super().__init__(parameters, window=1, first_version=first_version)
        self.ahead = ahead
        self._make: Make | None = None
        self._made: tuple[int, int] | None = None  # the weights in the second slot: version, how far ahead
        self.num_made = 0

    def make_with(self, make: Make) -> None:
        """Set the function `make(version, far, weights, targets)` that writes the weights ahead.

        `far` is the argument of `load_ahead`. `weights` has the tensors of `version` by name, which the parameters show
        during the call. `targets` has the tensors to write by name.
        """
        self._make = make

    def load_ahead(self, version: int, far: int) -> None:
        """Show weights ahead of `version`, which is the newest.

        Args:
            version: the newest version.
            far: at least 1. For predictions the number of steps ahead; for provisional steps the number of microbatches
                whose gradients the step uses.

        Raises:
            ValueError: `version` is not alive.
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
"""The slot of the weights ahead. The true weights are in slot 0, where optimizers step in place."""
