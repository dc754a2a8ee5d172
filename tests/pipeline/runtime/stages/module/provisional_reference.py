"""Training with provisional weights in a single process, written out as a plain loop.

Batch t is computed at an estimate of version t: the step from version t-1, taken on a copy of model and optimizer with
the gradients that a part of batch t-1 has. The weights themselves are 2BW's: W(t+1) = W(t) - update(g(W^(t))).

Under error feedback, where predictions read nothing, the estimate is version t-1 with its last update taken again.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.pipeline.runtime.stages.module.reference import (
    FIRST_WEIGHT,
    LAST_WEIGHT,
    NUM_LAYERS,
    Outcome,
    Training,
    added,
    build_model,
    data,
    make_optimizer,
    make_scheduler,
)

EXPECTED = 9.0
NumRead = Callable[[str, int], int]  # a parameter's name, microbatches of the batch -> how many are read


@dataclass(frozen=True)
class ByStage:
    """1F1B: stage s of p reads m - (p-1-s); both copies of a tied weight read what the first stage has."""

    num_stages: int
    tied: bool = False

    def __call__(self, name: str, num_microbatches: int) -> int:
        stage = 0 if self._is_tied(name) else self._stage(name)
        return num_microbatches - (self.num_stages - 1 - stage)

    def part(self, name: str) -> str:
        """Parameters of one part are clipped by their common norm."""
        return "tied" if self._is_tied(name) and self.num_stages > 1 else f"stage {self._stage(name)}"

    def _stage(self, name: str) -> int:
        return int(name.split(".")[0]) * self.num_stages // NUM_LAYERS

    def _is_tied(self, name: str) -> bool:
        return self.tied and name in (FIRST_WEIGHT, LAST_WEIGHT)


def train(
    training: Training,
    num_read: NumRead,
    *,
    make: Callable = make_optimizer,
    reduce_partial: bool = False,
    scale_invariant: bool = True,
) -> Outcome:
    """As `reference.train`. Every replica predicts from its own part, unless `reduce_partial`. Sums are divided by what
    a microbatch of the batch counts on average, in predictions by that of the batch stepped before; the first one
    expects `EXPECTED`.
    """
    model = build_model(training.dropout, tied=training.tied)
    parameters = dict(model.named_parameters())
    optimizer = make(parameters.values(), training)
    scheduler = make_scheduler(optimizer, training)
    outcome, clip = Outcome(), None if training.clip_grad else 1.0
    true = _values(parameters)
    predicted = [true] * training.num_replicas
    waiting: dict[str, Tensor] | None = None  # gradients of the batch before
    stepped_from: dict[str, Tensor] | None = None  # what the last step changed; None: it was skipped
    first = 0
    mean_count, waiting_count = EXPECTED if training.sums else 1.0, 1.0

    def step() -> None:
        """Make the next true version from the gradients that wait."""
        nonlocal true, clip, mean_count, stepped_from
        stepped_from, mean_count = None, waiting_count
        norm = torch.nn.utils.get_total_norm(list(waiting.values()))
        outcome.grad_norms.append(norm.item())
        outcome.learning_rates.append(optimizer.param_groups[0]["lr"])
        if not norm.isfinite():
            return
        if training.clip_grad:
            clip = min(1.0, training.clip_grad / (norm.item() + 1e-6))
        _show(parameters, true)
        stepped_from = true
        for name, parameter in parameters.items():
            parameter.grad = waiting[name] * clip if clip < 1.0 else waiting[name].clone()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        true = _values(parameters)

    for num_microbatches in training.batches:
        partial, whole, total, counted = [], [], 0.0, 0
        for replica in range(training.num_replicas):
            _show(parameters, predicted[replica])
            for parameter in parameters.values():
                parameter.grad = None
            read = {name: num_read(name, num_microbatches) for name in parameters}
            seen: dict[str, Tensor] = {}
            for position in range(num_microbatches):
                inputs, targets = data(
                    first + position, replica, poisoned=first + position == training.poisoned_microbatch
                )
                loss, count = added(training, model(inputs), targets)
                (loss / num_microbatches).backward()
                total, counted = total + loss.item(), counted + count
                for name, parameter in parameters.items():
                    if read[name] == position + 1:
                        seen[name] = parameter.grad.clone()
            partial.append(seen)
            whole.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        outcome.losses.append(total / counted)
        first += num_microbatches
        if waiting is not None:
            step()
        waiting_count = counted / (num_microbatches * training.num_replicas)
        waiting = {name: each / waiting_count for name, each in _mean(whole).items()}
        if not num_read(FIRST_WEIGHT, num_microbatches):
            before = stepped_from or true
            again = {name: value + (value - before[name]) for name, value in true.items()}
            predicted = [again] * training.num_replicas
            continue
        if reduce_partial:
            partial = [_mean(partial)] * training.num_replicas
        partial = [{name: each / mean_count for name, each in seen.items()} for seen in partial]
        predicted = [
            _predict(
                true, seen, num_read, num_microbatches, optimizer, training, make, clip, scale_invariant, reduce_partial
            )
            for seen in partial
        ]
    step()
    outcome.parameters = true
    return outcome


def _predict(true, seen, num_read, num_microbatches, optimizer, training, make, clip, scale_invariant, reduce_partial):
    """The step from `true`, on copies of everything."""
    read = {name: num_read(name, num_microbatches) for name in true}
    finite = all(gradient.isfinite().all() for gradient in seen.values())
    if not finite or (clip is None and not scale_invariant):
        return true
    copies = {name: torch.nn.Parameter(value.clone()) for name, value in true.items()}
    stand_in = make(copies.values(), training)
    stand_in.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    parts = {name: read[name] / num_microbatches / (1 if reduce_partial else training.num_replicas) for name in copies}
    at_least = {name: seen[name] * (num_microbatches / read[name] * math.sqrt(parts[name])) for name in copies}
    factors = _clip_factors(at_least, num_read, training.clip_grad, 1.0 if clip is None else clip)
    for name, parameter in copies.items():
        parameter.grad = seen[name] * (num_microbatches / read[name] * factors[name])
    stand_in.step()
    return _values(copies)


def _clip_factors(at_least: dict[str, Tensor], num_read: NumRead, largest: float, last: float) -> dict[str, float]:
    """By name: at most `last`, and under `ByStage` at most what the least that the norm of the part may be asks for."""
    if not largest or not isinstance(num_read, ByStage):
        return dict.fromkeys(at_least, last)
    squares: dict[str, float] = {}
    for name, each in at_least.items():
        part = num_read.part(name)
        squares[part] = squares.get(part, 0.0) + each.double().square().sum().item()
    return {name: min(last, largest / (math.sqrt(squares[num_read.part(name)]) + 1e-6)) for name in at_least}


def _mean(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in gradients]).sum(0) / len(gradients) for name in gradients[0]}


def _values(parameters) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _show(parameters, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
