"""The optimizer of the host, one stage at a time.

Problem: UPDATE is of one stage, as soon as its gradients are there, and an optimizer steps all of its parameters. One
optimizer for each stage would be another thing to a user, to learning-rate schedules and to checkpoints.

Solution: one torch optimizer over all of the host's parameters, which nobody steps. A stand-in of the same kind steps
those of one stage: it has the optimizer's own state of them, and its groups with these parameters alone. So after the
updates of all stages the optimizer is as if it had stepped once.

What the groups say (learning rate, weight decay, ...) is taken when a batch begins (`settings`), since a schedule has
advanced them by the time of a deferred update. A value that the step itself changes, such as a counter of steps, is
written back to the optimizer's group. Moments lie in the store's memory (`host_moments`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline.runtime.host_moments import HostMoments
from megatron.pipeline.runtime.host_store import HostStore
from megatron.pipeline.runtime.optimizer_stand_in import HOOKS, settings_of, stand_in, take_step

Settings = list[dict[str, Any]]
"""Of each group, what it says beside its parameters."""


class HostOptimizer:
    """Steps the stages of `store` with `optimizer`.

    `optimizer`: made of the store's parameters, or of others in their place: `stands_for` says of each of these which
    of the store's it stands for. Their own values are not touched; the optimizer has its state under them.

    Raises:
        ValueError: the optimizer has a parameter that is not the store's, or hooks around its step.
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
        """What the groups say now, for the updates of a batch that begins."""
        return [settings_of(group) for group in self.optimizer.param_groups]

    def note_step(self) -> None:
        """A batch is stepped: learning-rate schedules ask whether their optimizer was, before they advance."""
        self.optimizer._opt_called = True

    @torch.no_grad()
    def update(self, stage: int, settings: Settings, *, factor: float = 1.0) -> None:
        """Step the parameters of a stage with the gradients that it has on the host, times `factor`, and write its
        weights.
        """
        if any(getattr(self.optimizer, name, None) for name in HOOKS):
            raise ValueError(
                "the optimizer has hooks around its step, and on the host each stage is stepped by itself; remove them"
            )
        place = self._store.stages[stage]
        parameters = {name: self._store.parameters[name] for name in place.weights}
        for name, parameter in parameters.items():
            parameter.grad = place.gradients[name].to(parameter.dtype)
            if factor != 1.0:
                parameter.grad.mul_(factor)
        groups = [
            {**settings_of(said), "params": [self._on_host(each) for each in mine]}
            for said, mine in zip(settings, self._groups[stage], strict=True)
        ]
        kept, own = self.optimizer.state, [each for mine in self._groups[stage] for each in mine]
        self._bring_home(own)  # what was loaded
        state = defaultdict(dict, {self._on_host(each): kept[each] for each in own if each in kept})
        take_step(stand_in(self.optimizer, groups, state, shares_tables=True))
        kept.update({each: state[self._on_host(each)] for each in own if self._on_host(each) in state})
        self._bring_home(own)
        for parameter in parameters.values():
            parameter.grad = None
        self._store.write_weights(stage)
        for group, said, stepped in zip(self.optimizer.param_groups, settings, groups, strict=True):
            group.update(_changed(said, stepped))

    def _bring_home(self, parameters: list[Tensor]) -> None:
        """Have the state of these parameters in the store's memory."""
        strangers = self.moments.strangers(self.optimizer.state, parameters)
        places = self.moments.places({key: value.dtype for key, value in strangers.items()})
        for (parameter, name), value in strangers.items():
            place = places[parameter, name]
            place.copy_(value)
            self.optimizer.state[parameter][name] = place

    def _on_host(self, parameter: Tensor) -> Tensor:
        """The store's parameter that one of the optimizer's stands for."""
        return self._stands_for.get(parameter, parameter)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What a step has changed in a group."""
    return {
        key: value for key, value in after.items() if key != "params" and not _equal(before.get(key, _NOTHING), value)
    }


_NOTHING = object()


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)
