"""What the ranks of the relay's tests run, in the processes of `tests.workers`: the model of `reference`, whose stages
come from the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.contract.trace import RankTrace, Tracer, gather_traces
from megatron.pipeline.runtime.engine import PipelineEngine
from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.relay.node_replicas import NodeReplicas
from megatron.pipeline.runtime.stages.module.rank_update import ModuleRelayUpdate
from megatron.pipeline.schedules import Schedule
from tests.pipeline.runtime.stages.module import module_cases, reference
from tests.pipeline.runtime.stages.module.reference import Training


@dataclass
class RelayOutcome:
    """One rank's view of a run. `parameters`: the newest, by name in the whole model. `host_bytes`: of its store and
    its optimizer's moments. `mappings`: what the system says that it has mapped for these: bytes by file.
    """

    reports: list[BatchReport]
    parameters: dict[str, Tensor]
    evaluations: list[dict] = field(default_factory=list)
    num_fetched: int = 0
    num_bytes_fetched: int = 0
    num_unread_sends: int = 0
    num_saved_at_end: int = 0
    num_batches_at_end: int = 0
    num_connections: int = 0
    num_offloaded: int = 0
    num_bytes_offloaded: int = 0
    peak_saved: dict[int, int] = field(default_factory=dict)
    peak_saved_on_rank: int = 0
    executed: list[str] = field(default_factory=list)
    in_lanes: dict[str, list[str]] = field(default_factory=dict)
    traces: list[RankTrace] | None = None
    host_bytes: int = 0
    mappings: dict[str, int] = field(default_factory=dict)


class Relay(module_cases.Groups):
    """Engine, stages and update of this rank; replicas are blocks of p successive ranks. `hosts`: of each replica, else
    they are on one.
    """

    def __init__(
        self,
        training: Training,
        *,
        num_virtual_stages: int,
        residency: Residency,
        tracing: bool = False,
        timeout: timedelta = timedelta(seconds=20),
        backend: str = "gloo",
        hosts: tuple[str, ...] = (),
        gathers: bool = False,
        optimizer=reference.make_optimizer,
        device: str = "cpu",
    ) -> None:
        super().__init__(training)
        p = self.num_ranks
        self.schedule = Schedule.preset(
            "l2l",
            num_stages=p * num_virtual_stages,
            num_virtual_stages=num_virtual_stages,
            residency=residency,
            data_parallel=training.num_replicas > 1,
            tied_embeddings=training.tied,
            norm_decides=bool(training.clip_grad),
        )
        modules = module_cases.modules_of(self.schedule, training, self.rank)
        parameters = {stage: dict(module.named_parameters()) for stage, module in modules.items()}
        of_this_part = range(self.rank, p * training.num_replicas, p)
        host = hosts[self.replica] if hosts else None
        replicas = NodeReplicas(of_this_part, host=host, timeout=timeout)
        self.store = HostStore(parameters, replicas=replicas, gathers=gathers, device=device)
        made = optimizer(self.store.parameters.values(), training)
        self.update = ModuleRelayUpdate(
            modules,
            self.store,
            residency=residency,
            optimizer=made,
            scheduler=reference.make_scheduler(made, training),
            clip_grad=training.clip_grad,
            data_parallel_group=self.replicas,
            counts_in_norm=self.replica == 0,
            job_group=self.job,
            tied=self.tied(self.schedule, self.store.parameters) if training.tied else None,
            device=device,
        )
        self.stages = [
            module_cases.make_stage(
                self.schedule,
                training,
                module,
                self.update.weights.of_stage(stage),
                stage=stage,
                replica=self.replica,
                device=torch.device(device),
            )
            for stage, module in modules.items()
        ]
        self.engine = PipelineEngine(
            self.schedule,
            self.stages,
            self.update,
            ranks=range(self.replica * p, (self.replica + 1) * p),
            timeout=timeout,
            backend=backend,
            device=device,
            tracer=Tracer(num_batches=64) if tracing else None,
        )

    def close(self) -> None:
        self.engine.close()
        self.update.weights.close()
        self.destroy()


def run(
    training: Training,
    *,
    num_virtual_stages: int = 1,
    resident: int = 2,
    host_update: str = "deferred",
    stash: str = "device",
    drains: tuple[int, ...] = (),
    evaluate: int = 0,
    tracing: bool = False,
    **options,
) -> RelayOutcome:
    """Train; after each batch in `drains` drain, and evaluate on `evaluate` microbatches if not 0."""
    residency, mapped = Residency(resident, host_update, stash), shared_files()
    relay = Relay(training, num_virtual_stages=num_virtual_stages, residency=residency, tracing=tracing, **options)
    engine, reports, evaluations = relay.engine, [], []
    for batch, num_microbatches in enumerate(training.batches):
        reports += engine.run_batch(num_microbatches, num_microbatches * reference.MICROBATCH_SIZE)
        if batch in drains:
            reports += engine.drain()
            relay.update.show_newest()  # as a checkpoint does
            if evaluate:
                evaluations.append(engine.evaluate(evaluate))
    reports += engine.drain()
    relay.update.show_newest()
    mapped = {file: size for file, size in shared_files().items() if file not in mapped}
    named = {name: each for stage in relay.stages for name, each in stage.module.named_parameters()}
    dist.barrier()
    relay.close()
    spans = engine.trace().spans if tracing else ()
    lanes = ("host to device", "device to host", "host optimizer", "chain")
    return RelayOutcome(
        reports=reports,
        parameters={name: each.detach().cpu().clone() for name, each in named.items()},
        evaluations=evaluations,
        num_fetched=relay.update.weights.num_fetched,
        num_bytes_fetched=relay.update.weights.num_bytes_fetched,
        num_unread_sends=engine.num_unread_sends(),
        num_saved_at_end=sum(len(stage.activations) for stage in relay.stages),
        num_batches_at_end=len(relay.update._batches),
        num_connections=len({each.group for each in (relay.store.replicas, relay.update._tied_replicas) if each}),
        num_offloaded=engine.stash.num_offloaded if engine.stash else 0,
        num_bytes_offloaded=engine.stash.num_bytes_offloaded if engine.stash else 0,
        peak_saved=engine.saved.peaks,
        peak_saved_on_rank=engine.saved.peak_on_rank,
        executed=[str(span.instruction) for span in spans if span.track == "compute"],
        in_lanes={lane: [str(span.instruction) for span in spans if span.track == lane] for lane in lanes},
        traces=gather_traces(engine.trace()) if tracing else None,
        host_bytes=relay.store.num_bytes + relay.update._host.moments.num_bytes,
        mappings=mapped,
    )


def shared_files() -> dict[str, int]:
    """Shared mappings of this process: inode and name -> bytes."""
    found = {}
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, flags, _, _, inode, *name = line.split()
            if flags.endswith("s"):
                start, end = (int(address, 16) for address in addresses.split("-"))
                found[f"{inode} {' '.join(name)}"] = end - start
    return found


def run_mutated(drop: tuple[str, ...], *, unchecked: bool = False, stash: str = "device") -> tuple[str, list[bool]]:
    """Two batches of two microbatches on four stages, whose rows lack these words where they stand last. `unchecked`:
    stages do not ask whether their weights are there. What the run raises, and whether each batch's loss was NaN.
    """
    relay = Relay(Training(batches=(2, 2)), num_virtual_stages=4, residency=Residency(stash=stash))
    if unchecked:
        for stage in relay.stages:
            stage.load_version = lambda version: None
    executor, reports, message = relay.engine._executor, [], ""
    execute = executor.run

    def run_without(row):
        left = list(row)
        for text in drop:
            last = max((at for at, each in enumerate(left) if str(each) == text), default=None)
            if last is not None:
                del left[last]
        return execute(left)

    executor.run = run_without
    try:
        for num_microbatches in (2, 2):
            reports += relay.engine.run_batch(num_microbatches, num_microbatches)
    except (AssertionError, TypeError) as error:
        message = f"{error} ({error.pipeline_instruction})"
    relay.close()
    return message, [report.nan for report in reports]
