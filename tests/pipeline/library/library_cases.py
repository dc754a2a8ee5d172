"""What the ranks of the library's tests run, and the same in one process."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.pipeline import Pipeline
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.schedules import Schedule
from tests import open_tables
from tests.pipeline.runtime import made_up_orders

WIDTH, WORDS = 6, 11


class Words(nn.Module):
    """A first stage: ids in, hidden states and the ids out. Some of it is frozen, some is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.frozen(self.embedding(ids)), ids


class Layer(nn.Module):
    """Stages in the middle: a running mean of their own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return hidden + self.dropout(torch.tanh(self.linear(normed))), ids


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.linear(hidden * (ids > 2).unsqueeze(-1))


class Waves(nn.Module):
    """Real and complex tensors in and out: of the complex ones some are conjugated, or negated, when somebody reads
    them. A stage in front takes real ones alone, and `is_last` hands on one.
    """

    def __init__(self, dtype: torch.dtype, *, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.waves = nn.Linear(WIDTH // 2 + 1, WIDTH // 2 + 1, dtype=dtype.to_complex())
        self.is_last = is_last

    def forward(self, hidden: Tensor, waves: Tensor | None = None, imaginary: Tensor | None = None) -> Any:
        waves = torch.fft.rfft(hidden) if waves is None else waves
        waves = self.waves(waves).conj()
        if imaginary is not None:
            hidden = hidden * (1 + imaginary.sum(-1, keepdim=True))
        if not self.is_last:
            return self.linear(hidden), waves, waves.imag
        return self.linear(hidden) + torch.fft.irfft(waves, n=WIDTH)


def build(
    num_stages: int, *, seed: int = 1, dropout: float = 0.0, plain: bool = False, waves: torch.dtype | None = None
) -> list[nn.Module]:
    """The stages of a model; `plain`: one tensor between two of them. `waves`: `Waves` of that dtype."""
    torch.manual_seed(seed)
    if waves is not None:
        return [Waves(waves, is_last=stage == num_stages - 1) for stage in range(num_stages)]
    if plain:
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(num_stages)]
    return [Words(), *(Layer(dropout) for _ in range(num_stages - 2)), Head()]


def data(
    batch: int, *, size: int = 8, length: int = 5, plain: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    if plain:
        return tuple(torch.randn(size, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    return tuple(torch.randint(WORDS, (size, length), generator=generator) for _ in range(2))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target)
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def sum_of(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Of what counts, which microbatches have different numbers of: about half of the labels, or of the samples."""
    if target.is_floating_point():
        counts = (target[:, :1] > 0).expand_as(target)
        return (counts * (output - target).square()).sum(), counts.sum()
    labels = target.flatten().masked_fill(target.flatten() < WORDS // 2, -100)
    return nn.functional.cross_entropy(output.flatten(0, 1), labels, reduction="sum"), (labels >= 0).sum()


def make_optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


@dataclass
class Outcome:
    """`values`: of the newest parameters and buffers, `stage.name` -> value."""

    losses: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    returned: list[int | None] = field(default_factory=list)  # by step, the batch whose report it gave
    rates: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    timeline: Any = None

    def add(self, report: BatchReport) -> None:
        self.losses.append(report.loss)
        self.norms.append(report.grad_norm)
        self.rates.append(report.learning_rate)
        self.samples.append(report.num_samples)


@dataclass(frozen=True)
class Run:
    """`sizes`: of each batch. `lengths`: of its sequences. `evaluate`: after which batches. `settings`: of Pipeline.
    `waves`: the dtype of stages of `Waves`. `sums`: the loss is `sum_of`. `drains`: after each batch.
    """

    num_stages: int = 4
    sizes: tuple[int, ...] = (8,) * 6
    lengths: tuple[int, ...] = (5,) * 6
    num_microbatches: int = 4
    plain: bool = False
    dropout: float = 0.0
    clip_grad: float = 0.0
    scheduled: bool = False
    evaluate: tuple[int, ...] = ()
    recompute: bool = False
    waves: torch.dtype | None = None
    sums: bool = False
    drains: bool = False

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        sizes = {"size": self.sizes[index], "length": self.lengths[index]}
        return data(index, **sizes, plain=self.plain or self.waves is not None, dtype=self.waves or torch.float32)


EVALUATED = {"size": 16, "length": 3}


def single_process(run: Run, *, delay: int) -> Outcome:
    """Batch j's gradients are taken at version max(j - delay, 0) and applied to version j."""
    modules = build(run.num_stages, plain=run.plain, waves=run.waves)
    trained = [each for module in modules for each in module.parameters() if each.requires_grad]
    optimizer = make_optimizer(trained)
    scheduler = make_scheduler(optimizer) if run.scheduled else None
    versions, outcome = [[each.detach().clone() for each in trained]], Outcome()

    def show(version: int) -> None:
        for parameter, value in zip(trained, versions[version], strict=True):
            parameter.data = value.clone()

    def through(inputs: Tensor) -> Tensor:
        values: Any = inputs
        for module in modules:
            values = module(*values) if isinstance(values, tuple) else module(values)
        return values

    for batch in range(len(run.sizes)):
        show(max(batch - delay, 0))
        optimizer.zero_grad()
        total, counted = 0.0, 0
        for inputs, targets in zip(*(each.chunk(run.num_microbatches) for each in run.batch(batch)), strict=True):
            loss, count = added(run, through(inputs), targets)
            (loss if run.sums else loss / run.num_microbatches).backward()
            total, counted = total + loss.item(), counted + count
        for each in trained if run.sums else ():
            each.grad = None if each.grad is None else each.grad / counted
        outcome.losses.append(total / counted)
        outcome.rates.append(optimizer.param_groups[0]["lr"])
        grads = [each.grad for each in trained if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        outcome.norms.append(norm.item())
        show(batch)
        if run.clip_grad:
            torch.nn.utils.clip_grads_with_norm_(trained, run.clip_grad, norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        versions.append([each.detach().clone() for each in trained])
        if batch in run.evaluate:
            for module in modules:
                module.eval()
            pairs = zip(*(each.chunk(run.num_microbatches) for each in data(99, plain=run.plain, **EVALUATED)),
                        strict=True)  # fmt: skip
            with torch.no_grad():
                losses = [added(run, through(inputs), targets) for inputs, targets in pairs]
            outcome.evaluations.append(sum(loss.item() for loss, _ in losses) / sum(count for _, count in losses))
            for module in modules:
                module.train()
    outcome.values = values_of(dict(enumerate(modules)))
    return outcome


def added(run: Run, output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """What a microbatch adds to its batch's loss, and to what that is divided by."""
    if not run.sums:
        return loss_of(output, targets), 1
    loss, count = sum_of(output, targets)
    return loss, int(count)


def values_of(modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": value.detach().clone()
        for index, module in modules.items()
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }


def make(run: Run, schedule: Any, *, seed: int = 1, order: Sequence[int] | None = None, **settings: Any) -> Pipeline:
    """A pipeline over all ranks, with stages dealt out in turn unless `order` says the rank of each."""
    modules = build(run.num_stages, seed=seed, dropout=run.dropout, plain=run.plain, waves=run.waves)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    size //= settings.get("replicas", 1)
    placed = order or [stage % size for stage in range(run.num_stages)]
    own = [module for module, at in zip(modules, placed, strict=True) if at == rank % size]
    return Pipeline(
        own if len(own) > 1 else own[0], schedule=schedule, num_microbatches=run.num_microbatches,
        loss=sum_of if run.sums else loss_of, optimizer=make_optimizer, clip_grad=run.clip_grad,
        recompute=run.recompute, scheduler=make_scheduler if run.scheduled else None, **settings,
    )  # fmt: skip


def given(pipeline: Pipeline, batch: Any) -> Any:
    return batch if pipeline.takes_batch else None


def train(pipeline: Pipeline, run: Run, outcome: Outcome, batches: Sequence[int]) -> None:
    for index in batches:
        report = pipeline.step(given(pipeline, run.batch(index)))
        outcome.returned.append(None if report is None else report.batch)
        for each in (*([] if report is None else [report]), *(pipeline.drain() if run.drains else ())):
            outcome.add(each)
        if index in run.evaluate:
            evaluated = given(pipeline, data(99, plain=run.plain, **EVALUATED))
            outcome.evaluations.append(pipeline.evaluate(evaluated).loss)


def finish(pipeline: Pipeline, outcome: Outcome) -> None:
    for report in pipeline.drain():
        outcome.add(report)
    outcome.values = values_of(pipeline.modules)


def tables(registered: bool) -> Any:
    """With orders, policies and placements of somebody's own, where that is so."""
    stack = ExitStack()
    if registered:
        stack.enter_context(made_up_orders.registered())
        stack.enter_context(open_tables.registered())
    return stack


def run(run: Run, schedule: Any, *, registered: bool = False, timeline: bool = False, **settings: Any) -> Outcome:
    """Train; what this rank has in the end."""
    outcome = Outcome()
    with tables(registered), make(run, schedule, **settings) as pipeline:
        train(pipeline, run, outcome, range(len(run.sizes)))
        finish(pipeline, outcome)
        outcome.timeline = pipeline.timeline() if timeline else None
    return outcome


def resumed(run: Run, schedule: Any, *, at: int, reads_first: bool, stops: bool = True, **settings: Any) -> Outcome:
    """Train in two pieces: the second is another pipeline, with other weights until it loads. Where it does not stop,
    it drains there. `reads_first`: take the reports of the first piece before its state.
    """
    outcome = Outcome()
    pipeline = make(run, schedule, **settings)
    train(pipeline, run, outcome, range(at))
    if reads_first:
        for report in pipeline.drain():
            outcome.add(report)
    file = io.BytesIO()
    torch.save(pipeline.state_dict(), file)
    if stops:
        pipeline.close()
        torch.manual_seed(99)
        file.seek(0)
        pipeline = make(run, schedule, seed=7, **settings)
        pipeline.load_state_dict(torch.load(file, weights_only=True))
    train(pipeline, run, outcome, range(at, len(run.sizes)))
    finish(pipeline, outcome)
    pipeline.close()
    return outcome


def went_back(run: Run, schedule: Any, *, at: int) -> tuple[Outcome, Outcome]:
    """A run, and the same pipeline again from a state in its midst."""
    pipeline, first = make(run, schedule), Outcome()
    train(pipeline, run, first, range(at))
    state, second = pipeline.state_dict(), copy.deepcopy(first)
    for outcome in (first, second):
        if outcome is second:
            pipeline.load_state_dict(state)
        train(pipeline, run, outcome, range(at, len(run.sizes)))
        finish(pipeline, outcome)
    pipeline.close()
    return first, second


def message(make_error: str) -> str:
    """The ValueError of a case by name, as this rank has it; behind one in a step the pipeline goes on."""
    case: Callable[[], None] = globals()[make_error]
    try:
        case()
    except ValueError as error:
        return str(error)
    return "no error"


def in_a_step(batch_of: Callable[[Pipeline], Any]) -> None:
    run = Run(num_stages=dist.get_world_size(), plain=True)
    with make(run, "2bw") as pipeline:
        pipeline.step(given(pipeline, run.batch(0)))
        try:
            pipeline.step(given(pipeline, batch_of(pipeline)))
        finally:
            pipeline.step(given(pipeline, run.batch(1)))
            assert [report.batch for report in pipeline.drain()] == [1]


def unsplittable() -> None:
    in_a_step(lambda pipeline: data(1, size=7, plain=True))


def missing() -> None:
    in_a_step(lambda pipeline: None)


def triple() -> None:
    in_a_step(lambda pipeline: (*data(1, plain=True), torch.zeros(8)))


def broken_module() -> None:
    in_a_step(lambda pipeline: (torch.zeros(8, WIDTH + 1), torch.zeros(8, WIDTH)))


def different_numbers() -> None:
    make(Run(num_stages=dist.get_world_size(), plain=True, num_microbatches=4 + dist.get_rank()), "flush").close()


def uneven_modules() -> None:
    make(Run(num_stages=3, plain=True), "interleaved").close()


def no_optimizer() -> None:
    def refuse(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        raise ValueError("no optimizer today")

    wanted = refuse if dist.get_rank() == 0 else make_optimizer
    Pipeline(build(2, plain=True)[0], "flush", 4, loss=loss_of, optimizer=wanted).close()


def of_another_rank() -> None:
    run = Run(num_stages=2, plain=True)
    with make(run, "2bw") as pipeline:
        box: list[Any] = [None, None]
        dist.all_gather_object(box, pipeline.state_dict())
        pipeline.load_state_dict(box[1 - dist.get_rank()])


def of_another_rule() -> None:
    run = Run(num_stages=2, plain=True)
    with make(run, "2bw", error_feedback=True) as pipeline:
        state = pipeline.state_dict()
    with make(run, "2bw", provisional=True) as pipeline:
        pipeline.load_state_dict(state)


def two_guesses() -> None:
    Pipeline(
        build(2, plain=True)[0], "2bw", 4, loss=loss_of, optimizer=make_optimizer, provisional=True, error_feedback=True
    ).close()


def feedback_of_flush() -> None:
    schedule = Schedule.preset("flush", num_stages=2)
    Pipeline(build(2, plain=True)[0], schedule, 4, loss=loss_of, optimizer=make_optimizer, error_feedback=True).close()


def l2l() -> None:
    make(Run(num_stages=2, plain=True), "l2l").close()


def pipedream_in_microbatches() -> None:
    make(Run(num_stages=2, plain=True), "pipedream").close()


def clipped_pipedream() -> None:
    make(Run(num_stages=2, plain=True, num_microbatches=1, clip_grad=1.0), "pipedream").close()


def unknown() -> None:
    make(Run(num_stages=2, plain=True), "1f1b-of-mine").close()


def with_loss(loss: Callable[[Tensor, Tensor], Any]) -> None:
    run, module = Run(num_stages=2, plain=True), build(2, plain=True)[0]
    with Pipeline(module, "flush", 4, loss=loss, optimizer=make_optimizer) as pipeline:
        pipeline.step(given(pipeline, run.batch(0)))


def loss_of_no_kind() -> None:
    with_loss(lambda output, target: output - target)


def losses_of_two_kinds() -> None:
    loss = (loss_of, sum_of)[dist.get_rank()]
    pipeline = Pipeline(build(1, plain=True)[0], "flush", 4, loss=loss, optimizer=make_optimizer, replicas=2)
    try:
        pipeline.step(data(0, plain=True))
    finally:
        pipeline.close()


def count_of_no_kind() -> None:
    with_loss(lambda output, target: ((output - target).sum(), "12"))


def with_counts_by_batch(schedule: Any, *, sums: bool) -> Outcome:
    """Six batches without a drain, each of whose microbatches counts 1, 2 or 4; means of the same, unless `sums`."""

    def loss(output: Tensor, targets: tuple[Tensor, Tensor]) -> Any:
        target, counts = targets
        return (loss_of(output, target) * counts[0], counts[0]) if sums else loss_of(output, target)

    outcome, size = Outcome(), 1 if schedule == "pipedream" else 4
    module = build(2, plain=True)[dist.get_rank()]
    with Pipeline(module, schedule, size, loss=loss, optimizer=make_optimizer) as pipeline:
        for index in range(6):
            inputs, target = data(index, plain=True)
            batch = inputs, (target, torch.full((8,), 2 ** (index % 3)))
            if (report := pipeline.step(batch)) is not None:
                outcome.add(report)
        finish(pipeline, outcome)
    return outcome


def late_labels(index: int) -> tuple[Tensor, Tensor]:
    """A batch of four microbatches, of which the first `4 - index` count nothing: batch 0 as a whole."""
    inputs, targets = data(index, plain=True)
    targets[:, 0].abs_()
    targets[: max(8 - 2 * index, 0)] = -1.0
    return inputs, targets


def with_late_labels(first: int) -> Outcome:
    """Provisional weights, from batch `first` on."""
    outcome, module = Outcome(), build(2, plain=True)[dist.get_rank()]
    with Pipeline(module, "2bw", 4, loss=sum_of, optimizer=make_optimizer, provisional=True) as pipeline:
        for index in range(first, 6):
            if (report := pipeline.step(late_labels(index))) is not None:
                outcome.add(report)
        finish(pipeline, outcome)
    return outcome


def late_labels_in_one_process(first: int) -> Outcome:
    """The same in a plain loop: stage 0 predicts from the first three microbatches of a batch, stage 1 from all. A
    prediction divides by what a microbatch counted on average in the last batch that stepped; before that, it is the
    weights as they are.
    """
    modules = build(2, plain=True)
    stages = [[*module.parameters()] for module in modules]
    optimizers = [make_optimizer(parameters) for parameters in stages]

    def step(true: list[list[Tensor]], sums: list[list[Tensor]], count: float) -> list[list[Tensor]]:
        show(true)
        for parameters, optimizer, of_stage in zip(stages, optimizers, sums, strict=True):
            for parameter, gradient in zip(parameters, of_stage, strict=True):
                parameter.grad = gradient / count
            optimizer.step()
        return values()

    def predict(true: list[list[Tensor]], sums: list[list[Tensor]], count: float) -> list[list[Tensor]]:
        before = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        predicted = step(true, sums, count)
        for optimizer, state in zip(optimizers, before, strict=True):
            optimizer.load_state_dict(state)
        return predicted

    def show(values: list[list[Tensor]]) -> None:
        for parameters, of_stage in zip(stages, values, strict=True):
            for parameter, value in zip(parameters, of_stage, strict=True):
                parameter.data = value.clone()

    def values() -> list[list[Tensor]]:
        return [[each.detach().clone() for each in parameters] for parameters in stages]

    outcome, true, predicted = Outcome(), values(), values()
    waiting, last_count = None, 0  # sums and count of the batch before; the count of the last one that stepped
    for index in range(first, 6):
        show(predicted)
        total, count = 0.0, 0
        for parameter in (each for parameters in stages for each in parameters):
            parameter.grad = torch.zeros_like(parameter)
        for position, (inputs, targets) in enumerate(zip(*(each.chunk(4) for each in late_labels(index)), strict=True)):
            loss, counted = sum_of(nn.Sequential(*modules)(inputs), targets)
            loss.backward()
            total, count = total + loss.item(), count + int(counted)
            if position == 2:
                read = [each.grad * (4 / 3) for each in stages[0]]
        sums = [[each.grad for each in parameters] for parameters in stages]
        outcome.losses.append(total / count if count else math.nan)
        if waiting is not None and waiting[1]:
            true, last_count = step(true, *waiting), waiting[1]
        predicted = predict(true, [read, sums[1]], last_count) if last_count else true
        waiting = sums, count
    step(true, *waiting)
    outcome.values = values_of(dict(enumerate(modules)))
    return outcome


def in_groups(run: Run, schedule: Any) -> Outcome:
    """Two replicas of two stages, whose groups say so: rank 0 and 1 have the first stage."""
    rank = dist.get_rank()
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    outcome = Outcome()
    pipeline = Pipeline(
        build(2, plain=run.plain)[rank // 2], schedule, run.num_microbatches, loss=sum_of if run.sums else loss_of,
        optimizer=make_optimizer, data_parallel_group=replicas,
    )  # fmt: skip
    train_replica(pipeline, run, outcome, rank % 2)
    return outcome


def in_replicas(run: Run, schedule: Any) -> Outcome:
    outcome = Outcome()
    pipeline = make(run, schedule, replicas=2)
    train_replica(pipeline, run, outcome, dist.get_rank() // 2)
    return outcome


def train_replica(pipeline: Pipeline, run: Run, outcome: Outcome, replica: int) -> None:
    """Each replica takes every second microbatch, so one process would take them in another order."""
    with nullcontext(pipeline):
        for index in range(len(run.sizes)):
            halves = [each.chunk(2)[replica] for each in run.batch(index)]
            if (report := pipeline.step(given(pipeline, halves))) is not None:
                outcome.add(report)
            for report in pipeline.drain() if run.drains else ():
                outcome.add(report)
        finish(pipeline, outcome)
        pipeline.close()


class Fork(nn.Module):
    """Hands one half of what it makes to stage 1 and the other to stage 2."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, inputs: Tensor) -> dict[int, Tensor]:
        first, second = self.linear(inputs).chunk(2, dim=-1)
        return {1: first, 2: second}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, skipped: Tensor, through: Tensor) -> Tensor:
        return self.linear(skipped + through)


def graph_modules() -> list[nn.Module]:
    torch.manual_seed(1)
    return [Fork(), nn.Linear(WIDTH, WIDTH), Join()]


def over_a_graph(schedule: Any) -> Outcome:
    outcome, chosen = Outcome(), Run(num_stages=3, plain=True)
    with Pipeline(graph_modules()[dist.get_rank()], schedule, 4, loss=loss_of, optimizer=make_optimizer) as pipeline:
        train(pipeline, chosen, outcome, range(6))
        outcome.values = values_of(pipeline.modules)
    return outcome


class Tied(nn.Module):
    """The first or the last stage of a model whose output layer is its embedding."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.is_first = is_first

    def forward(self, received: Tensor) -> Tensor:
        if self.is_first:
            return nn.functional.embedding(received, self.weight)
        return nn.functional.linear(received, self.weight)


def with_tie(schedule: str) -> Outcome:
    outcome, chosen = Outcome(), Run(num_stages=2)
    module = Tied(is_first=dist.get_rank() == 0)
    with Pipeline(module, schedule, 4, loss=loss_of, optimizer=make_optimizer, tied=module.weight) as pipeline:
        train(pipeline, chosen, outcome, range(6))
        finish(pipeline, outcome)
    return outcome


def in_a_part_of_the_world() -> list[float]:
    """Ranks 1 and 2 of four are a pipeline of their own; the others have none."""
    group = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return []
    run, outcome = Run(num_stages=2, plain=True), Outcome()
    module = build(2, plain=True)[dist.get_rank() - 1]
    pipeline = Pipeline(module, "flush", 4, loss=loss_of, optimizer=make_optimizer, group=group)
    train(pipeline, run, outcome, range(6))
    pipeline.close()
    return outcome.losses


class Failing(nn.Linear):
    """Raises in its ninth forward in training: in the third batch of four microbatches, or before."""

    count = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += torch.is_grad_enabled()
        if self.count == 9:
            raise RuntimeError("the ninth is too many")
        return super().forward(inputs)


def with_a_failing_module() -> None:
    module = (nn.Linear if dist.get_rank() == 0 else Failing)(WIDTH, WIDTH)
    with Pipeline(module, "2bw", 4, loss=loss_of, optimizer=make_optimizer) as pipeline:
        for index in range(100):
            pipeline.step(given(pipeline, data(index, plain=True)))
