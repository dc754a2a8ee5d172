"""A small model, its data, and single-process training loops that say what every pipeline must reproduce.

`train` computes W(t+1) = W(t) - update(g(W(t - delay))) with a torch optimizer: delay 0 is ordinary training (gpipe,
flush), delay 1 is 2BW. `train_stash` is PipeDream: one update per microbatch, stage s of p uses weights p-1-s updates
old.
"""

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron.pipeline.runtime.update.muon import WHOLE, Muon

WIDTH, NUM_LAYERS, MICROBATCH_SIZE = 6, 8, 3


@dataclass(frozen=True)
class Training:
    """What a run does, for the reference and the pipeline alike."""

    batches: tuple[int, ...]  # microbatches of each batch, per replica
    clip_grad: float = 0.0
    learning_rate: float = 0.02
    weight_decay: float = 0.01
    warmup: int = 0
    dropout: float = 0.0
    same_dropout: float = 0.0  # see SameDropout
    num_replicas: int = 1
    poisoned_microbatch: int = -1  # its inputs are infinite: the gradients of its batch overflow
    fused: bool = False  # torch's fused kernel of the optimizer
    muon: bool = False  # Muon steps matrices, AdamW the rest
    tied: bool = False  # the first and the last layer share their weight
    sums: bool = False  # the loss is `sum_of`


@dataclass
class Outcome:
    """Losses and norms per batch, and the final newest parameters by name in the whole model."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


FIRST_WEIGHT, LAST_WEIGHT = "0.0.weight", f"{NUM_LAYERS - 1}.0.weight"


class SameDropout(nn.Module):
    """Dropout whose mask depends on what comes in and on nothing else, so on neither the order of microbatches nor the
    cut into stages.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        seed = zlib.crc32(input.detach().numpy().tobytes())
        kept = torch.rand(input.shape, generator=torch.Generator().manual_seed(seed)) >= self.rate
        return input * kept / (1 - self.rate)


def build_model(dropout: float = 0.0, *, tied: bool = False, same_dropout: float = 0.0) -> nn.Sequential:
    """The same weights in every process. `tied`: the first and the last layer have one."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        blocks = [
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH),
                nn.Tanh(),
                SameDropout(same_dropout) if same_dropout else nn.Dropout(dropout),
            )
            for _ in range(NUM_LAYERS)
        ]
    if tied:
        blocks[-1][0].weight = blocks[0][0].weight
    return nn.Sequential(*blocks)


def data(microbatch: int, replica: int = 0, *, poisoned: bool = False) -> tuple[Tensor, Tensor]:
    """Input and target of a microbatch, by its index over the whole run."""
    generator = torch.Generator().manual_seed(1000 * (replica + 1) + microbatch)
    pair = torch.randn(2, MICROBATCH_SIZE, WIDTH, generator=generator)
    return (pair[0] * float("inf") if poisoned else pair[0]), pair[1]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def sum_of(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the rows that count, of some microbatches none, and how many elements these have."""
    rows = target[:, 0] > 0
    return (output - target)[rows].square().sum(), rows.sum() * WIDTH


def added(training: Training, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """What a microbatch adds to its batch's loss, and to what that is divided by."""
    if not training.sums:
        return loss_of(output, target), 1
    loss, count = sum_of(output, target)
    return loss, int(count)


def make_optimizer(parameters, training: Training) -> torch.optim.Optimizer:
    if training.muon:
        parameters = list(parameters)
        groups = [
            {"params": [each for each in parameters if each.dim() == 2], "muon": WHOLE},
            {"params": [each for each in parameters if each.dim() != 2]},
        ]
        return Muon(groups, lr=training.learning_rate, weight_decay=training.weight_decay, nesterov=True)
    return torch.optim.AdamW(
        parameters, lr=training.learning_rate, weight_decay=training.weight_decay, fused=training.fused or None
    )


def make_scheduler(optimizer: torch.optim.Optimizer, training: Training):
    if not training.warmup:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / training.warmup))


def train(training: Training, *, delay: int) -> Outcome:
    """Batch j's gradients are taken at version max(j - delay, 0) and applied to version j."""
    model = build_model(training.dropout, tied=training.tied, same_dropout=training.same_dropout)
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters.values(), training)
    scheduler = make_scheduler(optimizer, training)
    outcome = Outcome()
    versions = [_copy(parameters)]
    first_microbatch = 0
    for j, num_microbatches in enumerate(training.batches):
        _show(parameters, versions[max(j - delay, 0)])
        optimizer.zero_grad()
        total, counted = 0.0, 0
        for replica in range(training.num_replicas):
            for index in range(first_microbatch, first_microbatch + num_microbatches):
                inputs, targets = data(index, replica, poisoned=index == training.poisoned_microbatch)
                loss, count = added(training, model(inputs), targets)
                (loss if training.sums else loss / num_microbatches / training.num_replicas).backward()
                total, counted = total + loss.item(), counted + count
        for parameter in parameters.values() if training.sums else ():
            parameter.grad.div_(counted)
        first_microbatch += num_microbatches
        outcome.losses.append(total / counted)
        outcome.learning_rates.append(optimizer.param_groups[0]["lr"])
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters.values()])
        outcome.grad_norms.append(norm.item())
        _show(parameters, versions[j])
        if norm.isfinite():
            if training.clip_grad:
                torch.nn.utils.clip_grads_with_norm_(parameters.values(), training.clip_grad, norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        versions.append(_copy(parameters))
    outcome.parameters = versions[-1]
    return outcome


def train_stash(training: Training, *, num_stages: int, drains: tuple[int, ...] = ()) -> Outcome:
    """PipeDream with weight stashing; `drains`: batches after which the pipeline is drained."""
    model = build_model()
    stages = split(model, num_stages)
    optimizers = [make_optimizer(stage.parameters(), training) for stage in stages]
    versions = [[_copy(dict(stage.named_parameters()))] for stage in stages]
    outcome = Outcome()
    stretch_start = 0
    for k in range(len(training.batches)):
        for s, stage in enumerate(stages):
            _show(dict(stage.named_parameters()), versions[s][max(stretch_start, k - (num_stages - 1 - s))])
            optimizers[s].zero_grad()
        inputs, targets = data(k)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        outcome.losses.append(loss.item())
        for s, stage in enumerate(stages):
            _show(dict(stage.named_parameters()), versions[s][k])
            optimizers[s].step()
            versions[s].append(_copy(dict(stage.named_parameters())))
        if k in drains:
            stretch_start = k + 1
    outcome.parameters = _copy(dict(model.named_parameters()))
    return outcome


def split(model: nn.Sequential, num_stages: int) -> list[nn.Sequential]:
    """Contiguous equal parts; slices of a Sequential keep the names of the whole."""
    size = len(model) // num_stages
    return [model[stage * size : (stage + 1) * size] for stage in range(num_stages)]


def _copy(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _show(parameters: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.data = values[name].clone()
