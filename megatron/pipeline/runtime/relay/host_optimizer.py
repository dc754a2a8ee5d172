"""The steps of an optimizer on the host, one stage at a time.

Problem: UPDATE steps one stage as soon as its gradients are on the host, but a torch optimizer steps all of its
parameters. If each stage had its own optimizer, users, schedules and checkpoints would have to handle several.

Solution: one torch optimizer over all parameters on the host, whose `step` is never called. A stand-in of the same type
steps the parameters of one stage. It has the groups of the optimizer with these parameters alone, and their state in
the optimizer. So after the updates of all stages the optimizer has the same state as after one step.

Options of groups (learning rate, weight decay, ...) are read when a batch begins (`settings`), since the schedule may
advance them before a deferred update. If the step itself changes an option, such as a counter of steps, the new value
is written to the optimizer's group. The next batch may begin before that. So such an option is read at the first update
of the batch, which comes after all updates of the batch before.

torch allocates moments in the private memory of the process, which other processes cannot map and which on a CPU is the
"device". `HostMoments` moves the moments to the memory of the store.

Replicas that share the store step their shares of each parameter. A share is a 1-d view of the parameter with views of
its moments. An elementwise optimizer can step it like a parameter. A share may be empty; its step only advances the
counter, so that the state has the same entries on all replicas. An update is complete when all replicas have made it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.relay.host_store import FlatLayout, HostStage, HostStore
from megatron.pipeline.runtime.update.elementwise_step import RULES
from megatron.pipeline.runtime.update.narrow_moments import NarrowMoments
from megatron.pipeline.runtime.update.optimizer_wrappers import (
    HOOKS,
    copied,
    settings_of,
    stand_in,
    take_step,
)

Settings = list[dict[str, Any]]
"""The options of each group of an optimizer, without its parameters."""


class HostOptimizer:
    """Steps the stages of `store` with `optimizer`.

    Args:
        optimizer: made from the parameters of `store`, or from other parameters that stand for them.
        store: the stages on the host.
        stands_for: parameter of `optimizer` -> the parameter of `store` for which it stands, where the two differ. A
            step changes the parameter of `store`. The optimizer's state belongs to its own parameter, whose values do
            not change.

    Attributes:
        moments: the memory of the moments.

    Raises:
        ValueError: a parameter of `optimizer` stands for no parameter of `store`; or `store` is shared and `optimizer`
            is not known to be elementwise.
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
        if store.is_shared and type(optimizer) not in (*RULES, NarrowMoments):
            raise ValueError(
                f"replicas on {store.replicas.host} share one store, of which each steps a part, and "
                f"{type(optimizer).__name__} may not step each element by itself; use Adam, AdamW or SGD of "
                "torch.optim, or give each a host name of its own (PIPELINE_HOST_NAME in training), with which each "
                "keeps a copy"
            )
        self._settings: Settings | None = None  # of the batch whose updates are being made
        self._counters: Settings = []  # options that steps change, as they were before the first of these updates
        self._changed_by_steps: list[set[str]] = [set() for _ in optimizer.param_groups]  # names of these options
        self._groups: dict[int, list[list[Tensor]]] = {stage: [] for stage in store.stages}  # stage -> its parameters
        for group in optimizer.param_groups:
            if not all(self._on_host(parameter) in stage_of for parameter in group["params"]):
                raise ValueError(
                    "the optimizer has parameters that are not the host's, so their stages' updates would miss them; "
                    "make it of the parameters of the HostStore"
                )
            for stage, groups in self._groups.items():
                groups.append([each for each in group["params"] if stage_of[self._on_host(each)] == stage])

    def settings(self) -> Settings:
        """The present options of the groups, for the updates of a batch that begins."""
        return [settings_of(group) for group in self.optimizer.param_groups]

    @torch.no_grad()
    def update(self, stage: int, settings: Settings, *, factor: float = 1.0) -> None:
        """Step the parameters of a stage with its gradients on the host, and write its weights.

        Collective over the replicas if the store is shared.

        Args:
            stage: the stage to step.
            settings: the result of `settings` for the batch, the same object for all stages.
            factor: multiplies the gradients.

        Raises:
            ValueError: the optimizer has hooks around its step.
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
        """Return `settings`, but with the options that steps change as the previous batch's last update left them."""
        if settings is not self._settings:
            self._settings = settings
            self._counters = [
                {key: copied(group[key]) for key in changed if key in group}
                for group, changed in zip(self.optimizer.param_groups, self._changed_by_steps, strict=True)
            ]
        return [said | counters for said, counters in zip(settings, self._counters, strict=True)]

    def _state_of(self, place: HostStage, parts: Mapping[Tensor, Tensor]) -> defaultdict[Tensor, dict[str, Any]]:
        """The state of the optimizer for the parts of its parameters: part -> state.

        Moments that are not in the memory of the store, as after a checkpoint was loaded, are moved there first.
        """
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
        """Write the state that a step has made for the parts into the state of the optimizer."""
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
        """Copy moments of parts to the memory of the store, and put the tensors there into the optimizer's state."""
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
        """The parameter of the store for which a parameter of the optimizer stands."""
        return self._stands_for.get(parameter, parameter)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that a step has changed or added."""
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
"""A parameter of an optimizer, and the name of an entry of its state."""


class HostMoments:
    """The memory of the moments: the tensors of an optimizer's state that have the shape of their parameter.

    A moment is moved to this memory before a step if it was loaded from a checkpoint, or after the step that has made
    it. From then on the state refers to the tensor in this memory, and steps change it in place. Other entries of the
    state, such as counters, are not moved.

    `make(shape, dtype)` allocates memory on the host.
    """

    def __init__(self, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> None:
        self._make = make
        self._places: dict[_Key, Tensor] = {}
        self.num_bytes = 0

    def strangers(self, state: Mapping[Tensor, Mapping[str, Any]], parameters: Iterable[Tensor]) -> dict[_Key, Tensor]:
        """The moments of these parameters in `state` that are not in this memory."""
        return {
            (parameter, name): value
            for parameter in parameters
            for name, value in state.get(parameter, {}).items()
            if is_of_each_element(name, value, parameter.shape) and value is not self._places.get((parameter, name))
        }

    def places(self, dtypes: Mapping[_Key, torch.dtype]) -> dict[_Key, Tensor]:
        """The tensors in this memory for these moments, in the shape of their parameters. New tensors are zero."""
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
    """Whether an entry of a state has a value for each element of a parameter of this shape.

    `step` is always a counter. It has the same shape as a parameter that is a scalar.
    """
    return isinstance(value, Tensor) and value.shape == shape and name != "step"
