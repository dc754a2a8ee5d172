"""What ranks of the relay's tests run with megatron.core: the tiny GPT of megatron_model.py, whose stages come from the
host."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from megatron.pipeline.check import check
from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.stages.megatron.relay_update import MegatronRelayUpdate, RelayChunk, show_as_main_grad
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime.stages.megatron.fused_accumulation import stand_in
from tests.pipeline.runtime.stages.megatron.megatron_cases import optimizer_config, scheduler
from tests.pipeline.runtime.stages.megatron.megatron_model import (
    SEQUENCE,
    Case,
    forward_step,
    model_of_stage,
    parallel,
    training_data,
)


@dataclass
class Outcome:
    """`losses`, `norms`, `device_peaks`, `host_peaks`: as the batches' reports say. `stages`: bytes of weights and of
    gradients of each, as the host has them. `boundaries`: the most that the checker proves, and the bytes that the
    ledger counts after the last batch.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    stages: list[tuple[int, int]] = field(default_factory=list)
    num_fetched: int = 0
    num_bytes_fetched: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    num_offloaded: int = 0
    device_peaks: list[int] = field(default_factory=list)
    host_peaks: list[int] = field(default_factory=list)
    boundaries: tuple[int, int] = (0, 0)
    num_batches_at_end: int = 0
    state: dict = field(default_factory=dict)


def chunks_of(
    case: Case, num_stages: int, wrapper: type[DistributedDataParallel], stages: Sequence[int] | None = None
) -> list[DistributedDataParallel]:
    """Chunks of the model of `num_stages` of equally many layers: of these stages, or all."""
    chunks = []
    for stage in range(num_stages) if stages is None else stages:
        model = model_of_stage(case, stage, num_stages)
        config = model.config
        wrapped = Float16Module(config, model) if config.fp16 or config.bf16 else model
        chunks.append(wrapper(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrapped))
    return chunks


def train(
    *,
    num_stages: int,
    resident: int = 2,
    eager: bool = False,
    drop: int | None = None,
    batches=(2, 2),
    stash: str = "device",
    **options,
) -> Outcome:
    """Batches of the relay on one rank. `drop`: a stage's last FETCH and FREE are left out of every row, and stages do
    not ask whether their weights are there.
    """
    case = Case(batches=batches, **options)
    outcome = Outcome()
    with stand_in() if case.fused else nullcontext(), parallel(case):
        chunks = chunks_of(case, num_stages, RelayChunk)
        optimizer = get_megatron_optimizer(optimizer_config(case), chunks)
        residency = Residency(resident, "eager" if eager else "deferred", stash)
        update = MegatronRelayUpdate(
            chunks, optimizer, scheduler(case, optimizer), stages=range(num_stages), residency=residency
        )  # fmt: skip
        stages = [
            MegatronStage(
                chunk, forward_step(case), update, index=index, num_stages=num_stages, seq_length=SEQUENCE,
                micro_batch_size=case.micro_batch_size, data_iterator=training_data(case, 0),
                recompute=index < num_stages - 1,
            )
            for index, chunk in enumerate(chunks)
        ]  # fmt: skip
        schedule = Schedule.preset(
            "l2l", num_stages=num_stages, num_virtual_stages=num_stages, residency=residency,
            tied_embeddings=case.tied and num_stages > 1,
        )  # fmt: skip
        engine = PipelineEngine(schedule, stages, update, ranks=[0], ledger=update.ledger)
        if drop is not None:
            _drop(engine, stages, drop)
        for size in batches:
            for report in engine.run_batch(size, size * case.micro_batch_size):
                outcome.losses.append(report.losses["lm loss"])
                outcome.norms.append(report.grad_norm)
                outcome.device_peaks += map(int, report.rank_metrics["device_peak_bytes"])
                outcome.host_peaks += map(int, report.rank_metrics["host_peak_bytes"])
        engine.drain()
        if engine.stash is not None:
            outcome.num_offloaded = engine.stash.num_offloaded
        engine.close()
        update.close()
    outcome.stages = [
        (stage.layout.num_bytes, stage.gradient_layout.num_bytes) for stage in update.store.stages.values()
    ]
    outcome.num_batches_at_end = len(update._batches)
    outcome.state = update.state_dict()
    update.load_state_dict(None)
    assert update.state_dict()["last_grad_norm"] is None
    update.load_state_dict(outcome.state)
    assert update.state_dict() == outcome.state
    outcome.num_fetched, outcome.num_bytes_fetched = update.resident.num_fetched, update.resident.num_bytes_fetched
    outcome.weight_bytes, outcome.gradient_bytes = update.resident.num_bytes, update.gradients.num_bytes
    left = update.ledger.device_bytes - outcome.weight_bytes - outcome.gradient_bytes
    outcome.boundaries = check(schedule.build(batches)).peak_boundaries_on_rank[0], left
    return outcome


def _drop(engine: PipelineEngine, stages: list[MegatronStage], dropped: int) -> None:
    execute = engine._executor.run
    for stage in stages:
        stage.load_version = lambda version: None

    def run_without(row):
        left = list(row)
        for kind in (Kind.FETCH, Kind.FREE):
            found = [at for at, each in enumerate(left) if (each.kind, each.stage) == (kind, dropped)]
            if found:
                del left[found[-1]]
        return execute(left)

    engine._executor.run = run_without


def gather_on_hosts(hosts: Sequence[str]) -> str:
    """What two replicas on these hosts, which shall gather what they fetch, are told."""
    case = Case(d=2)
    with parallel(case):
        chunks = chunks_of(case, 2, RelayChunk)
        optimizer = get_megatron_optimizer(optimizer_config(case), chunks)
        try:
            MegatronRelayUpdate(
                chunks, optimizer, stages=range(2), residency=Residency(), gathers=True,
                host=hosts[torch.distributed.get_rank()],
            )  # fmt: skip
        except ValueError as error:
            return str(error)
    return ""


def gradients(**options) -> list[list[bool]]:
    """For each chunk: whether each parameter's gradient of three microbatches is that of megatron.core's DDP, bit for
    bit and in its dtype.
    """
    case = Case(**options)
    equal = []
    with parallel(case):
        for ours, theirs in zip(
            chunks_of(case, 1, RelayChunk), chunks_of(case, 1, DistributedDataParallel), strict=True
        ):
            for parameter in ours.module.parameters():
                show_as_main_grad(parameter, torch.zeros(parameter.shape, dtype=torch.float32))
            for chunk in (ours, theirs):
                data = training_data(case, 0)
                for _ in range(3):
                    output, loss = forward_step(case)(data, chunk)
                    loss(output)[0].backward()
            pairs = zip(unwrap_model(ours).parameters(), unwrap_model(theirs).parameters(), strict=True)
            equal.append([torch.equal(mine.main_grad, other.main_grad) and mine.grad is None for mine, other in pairs])
    return equal
