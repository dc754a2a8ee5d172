"""The optimizer of the host, one stage at a time.

Problem: UPDATE steps one stage as soon as its gradients are on the host, but an optimizer steps all of its parameters.
One optimizer for each stage would look different to users, learning-rate schedules and checkpoints.

Solution: one torch optimizer over all of the host's parameters, whose `step` is never called. A stand-in of the same
type steps the parameters of one stage: it has the optimizer's own state of them, and its groups with these parameters
alone. So after the updates of all stages the optimizer is as if it had stepped once.

The options of the groups (learning rate, weight decay, ...) are read when a batch begins (`settings`), since a schedule
has advanced them by the time of a deferred update. A value that the step itself changes, such as a counter of steps, is
written back to the optimizer's group. The next batch may begin before that, so the value is read with the first update
of the batch, which comes after all updates of the batch before. Torch allocates moments in the process's private
memory, which other processes cannot map, and which on a CPU is the "device"; `HostMoments` moves them to the store's.

Replicas that share the store step their shares of each parameter: a 1-d view of it, with views of the moments, which an
elementwise optimizer steps as any parameter. A share may have no elements; the step then only counts, so that states
have the same entries everywhere. An update is complete when all replicas have made theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.relay.host_store import FlatLayout, HostStage, HostStore
from megatron.pipeline.runtime.update.elementwise_step import RULES
from megatron.pipeline.runtime.update.optimizer_wrappers import HOOKS, copied, settings_of, stand_in, take_step

Settings = list[dict[str, Any]]
"""The options of each group, without its parameters."""


class HostOptimizer:
    """Steps the stages of `store` with `optimizer`.

    `optimizer`: made of the store's parameters, or of others in their place: `stands_for` says of each of these which
    of the store's it stands for. Their own values are not touched; the optimizer has its state under them.

    Raises:
        ValueError: the optimizer has a parameter that is not the store's, or hooks around its step, or the store is
            shared and the optimizer does not work element by element.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: HostStore,
        *,
        stands_for: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.moments = HostMoments(store.make)
        self._store = store
        self._stands_for = dict(stands_for or {})
        stage_of = {store.parameters[name]: stage for stage, place in store.stages.items() for name in place.weights}
        self._name_of = {parameter: name for name, parameter in store.parameters.items()}
        if store.is_shared and type(optimizer) not in RULES:
            raise ValueError(
                f"replicas on {store.replicas.host} share one store, of which each steps a part, and "
                f"{type(optimizer).__name__} may not step each element by itself; use Adam, AdamW or SGD of "
                "torch.optim, or give each a host name of its own (PIPELINE_HOST_NAME in training), with which each "
                "keeps a copy"
            )
        self._settings: Settings | None = None  # of the batch whose updates are made
        self._counters: Settings = []  # what they begin with, of what steps change
        self._changed_by_steps: list[set[str]] = [set() for _ in optimizer.param_groups]
        self._groups: dict[int, list[list[Tensor]]] = {stage: [] for stage in store.stages}  # of the optimizer's
        for group in optimizer.param_groups:
            if not all(self._on_host(parameter) in stage_of for parameter in group["params"]):
                raise ValueError(
                    "the optimizer has parameters that are not the host's, so their stages' updates would miss them; "
                    "make it of the parameters of the HostStore"
                )
            for stage, groups in self._groups.items():
                groups.append([each for each in group["params"] if stage_of[self._on_host(each)] == stage])

    def settings(self) -> Settings:
        """The groups' present options, for the updates of a batch that begins."""
        return [settings_of(group) for group in self.optimizer.param_groups]

    def note_step(self) -> None:
        """Mark the optimizer as stepped, which learning-rate schedules check before they advance."""
        self.optimizer._opt_called = True

    @torch.no_grad()
    def update(self, stage: int, settings: Settings, *, factor: float = 1.0) -> None:
        """Step the parameters of a stage with the gradients that it has on the host, times `factor`, and write its
        weights. `settings`: of the batch, the same object for all stages.
        """
        if any(getattr(self.optimizer, name, None) for name in HOOKS):
            raise ValueError(
                "the optimizer has hooks around its step, and on the host each stage is stepped by itself; remove them"
            )
        place = self._store.stages[stage]
        own = [each for mine in self._groups[stage] for each in mine]
        parts = {each: self._own(place, each, self._on_host(each)) for each in own}
        for each, part in parts.items():
            gradient = self._own(place, each, place.gradients[self._name(each)])
            part.grad = gradient.to(part.dtype)
            if factor != 1.0:
                part.grad.mul_(factor)
        settings = self._counted_on(settings)
        groups = [
            {**settings_of(said), "params": [parts[each] for each in mine]}
            for said, mine in zip(settings, self._groups[stage], strict=True)
        ]
        state = self._state_of(place, parts)
        before = {part: dict(values) for part, values in state.items()}
        take_step(stand_in(self.optimizer, groups, state, shares_tables=True))
        self._keep(place, parts, state, before)
        for part in parts.values():
            part.grad = None
        self._store.write_weights(stage)
        for index, group in enumerate(self.optimizer.param_groups):
            changed = _changed(settings[index], groups[index])
            self._changed_by_steps[index].update(changed)
            group.update(changed)
        if self._store.is_shared:
            self._store.replicas.barrier()

    def _counted_on(self, settings: Settings) -> Settings:
        """These, and what steps change as the batch before has left it."""
        if settings is not self._settings:
            self._settings = settings
            self._counters = [
                {key: copied(group[key]) for key in changed if key in group}
                for group, changed in zip(self.optimizer.param_groups, self._changed_by_steps, strict=True)
            ]
        return [said | counters for said, counters in zip(settings, self._counters, strict=True)]

    def _state_of(self, place: HostStage, parts: Mapping[Tensor, Tensor]) -> defaultdict[Tensor, dict[str, Any]]:
        """What the optimizer has of these parameters, for their parts; what was loaded comes to its place."""
        strangers = self.moments.strangers(self.optimizer.state, parts)
        self._bring_home(place, {key: self._own(place, key[0], value) for key, value in strangers.items()})
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for each, part in parts.items():
            if each in self.optimizer.state:
                state[part] = {
                    name: self._own(place, each, value) if is_of_each_element(name, value, each.shape) else value
                    for name, value in self.optimizer.state[each].items()
                }
        return state

    def _keep(
        self,
        place: HostStage,
        parts: Mapping[Tensor, Tensor],
        state: Mapping[Tensor, dict[str, Any]],
        before: Mapping[Tensor, dict[str, Any]],
    ) -> None:
        """Show in the optimizer's state what a step of these parts has made."""
        made: dict[_Key, Tensor] = {}
        for each, part in parts.items():
            if part not in state:
                continue
            kept, its_before = self.optimizer.state[each], before.get(part, {})
            for name, value in state[part].items():
                if not is_of_each_element(name, value, part.shape):
                    kept[name] = value
                elif value is not its_before.get(name):
                    made[each, name] = value
        self._bring_home(place, made)

    def _bring_home(self, place: HostStage, values: Mapping[_Key, Tensor]) -> None:
        """Have these values of parts of parameters in the store's memory, and the state show that."""
        places = self.moments.places({key: value.dtype for key, value in values.items()})
        for (parameter, name), value in values.items():
            whole = places[parameter, name]
            self._own(place, parameter, whole).copy_(value)
            self.optimizer.state[parameter][name] = whole

    def _own(self, place: HostStage, parameter: Tensor, tensor: Tensor) -> Tensor:
        return place.own(self._name(parameter), tensor)

    def _name(self, parameter: Tensor) -> str:
        return self._name_of[self._on_host(parameter)]

    def _on_host(self, parameter: Tensor) -> Tensor:
        """The store's parameter for which one of the optimizer's stands."""
        return self._stands_for.get(parameter, parameter)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that a step has changed."""
    return {
        key: value for key, value in after.items() if key != "params" and not _equal(before.get(key, _NOTHING), value)
    }


_NOTHING = object()


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)


# --- moments

_Key = tuple[Tensor, str]
"""One of an optimizer's parameters, and what it keeps for it."""


class HostMoments:
    """The places of what an optimizer keeps of each element. `make(shape, dtype)`: the host's memory.

    A tensor of a state that has the shape of its parameter comes there before a step, where it was loaded, or behind
    it, where the step has made it; from then on the state shows that place, and the optimizer goes on in it. Counters
    and the like stay what they are.
    """

    def __init__(self, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> None:
        self._make = make
        self._places: dict[_Key, Tensor] = {}
        self.num_bytes = 0

    def strangers(self, state: Mapping[Tensor, Mapping[str, Any]], parameters: Iterable[Tensor]) -> dict[_Key, Tensor]:
        """What `state` has of each element of these parameters, and not in its place."""
        return {
            (parameter, name): value
            for parameter in parameters
            for name, value in state.get(parameter, {}).items()
            if is_of_each_element(name, value, parameter.shape) and value is not self._places.get((parameter, name))
        }

    def places(self, dtypes: Mapping[_Key, torch.dtype]) -> dict[_Key, Tensor]:
        """The place of each tensor, in the shape of its parameter; zeroed where it is new."""
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
