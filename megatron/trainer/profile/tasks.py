"""The tasks of the pool's processes: they become ranks of a job, build its parts, and measure."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.planner.job.configuration import Configuration
from megatron.planner.memory.architecture import Architecture
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.profile import StagePosition
from megatron.trainer.arguments.flags.config import TrainConfig
from megatron.trainer.plan.command import PROGRAMS

if TYPE_CHECKING:
    from megatron.trainer.start_up.program import TrainingProgram


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The plan to time one stage. `argv`: flags of the model; see `plan.command.model_argv`."""

    architecture: str
    argv: tuple[str, ...]
    place: StagePosition
    num_layers: int
    tensor: int
    micro_batch_size: int
    recompute: RecomputeScope
    weights: WeightPolicy
    sequence_parallel: bool
    num_microbatches: int
    num_batches: int
    num_warmup: int

    def arguments(self) -> argparse.Namespace:
        """The parsed flags of a run with this stage. Raises ValueError for invalid flags."""
        from megatron.trainer.arguments import parse_args

        configuration = Configuration(
            tensor=self.tensor,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.micro_batch_size * self.num_microbatches,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel and self.tensor > 1,
        )
        length = ("--num-layers", str(self.num_layers), "--train-iters", str(self.num_batches), "--eval-iters", "0")
        return parse_args(
            [*self.argv, *configuration.argv(), *length],
            defaults=PROGRAMS[self.architecture][1],
        )

    def time(self, *, store: object, start: Callable[[], None]) -> tuple[dict[str, list[float]], int, int]:
        """Build and time the stage; called on each rank.

        Returns the samples, the number of the rank's parameters, and the bytes that a microbatch keeps between the
        halves of its backward (0 for layers of Transformer Engine, whose backwards are not split).
        """
        from megatron.trainer.profile.measurements import build_lone_stage, time_stage

        args = prepare(self.arguments(), store)
        lone = build_lone_stage(args, training_program(self.architecture), self.place, self.weights)
        try:
            samples = time_stage(
                lone, num_microbatches=self.num_microbatches, num_batches=self.num_batches,
                num_warmup=self.num_warmup, start=start, halves=args.transformer_impl == "local",
            )  # fmt: skip
        finally:
            lone.close()
        return samples, lone.num_parameters, lone.deferred_bytes

    def describe(self, *, store: object, start: Callable[[], None]) -> dict:
        """The profile's fields about the model and the machine; called on one rank."""
        from megatron.trainer.profile.measurements import describe

        args = prepare(self.arguments(), store)
        start()
        return describe(args)


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """The plan to time transfers between two ranks, or all-reduces over several. `sizes`: numbers of bytes."""

    sizes: tuple[int, ...]
    num_iterations: int
    num_warmup: int

    def time_transfers(self, *, store: object, start: Callable[[], None]) -> dict[int, list[float]]:
        from megatron.trainer.profile.measurements import time_transfers

        return self._time(time_transfers, 2, store, start)

    def time_all_reduces(self, *, store: object, start: Callable[[], None]) -> dict[int, list[float]]:
        from megatron.trainer.profile.measurements import time_all_reduces

        return self._time(time_all_reduces, int(os.environ["WORLD_SIZE"]), store, start)

    def _time(self, measure: Callable, world_size: int, store: object, start: Callable) -> dict[int, list[float]]:
        import torch

        from megatron import backend
        from megatron.trainer.start_up import initialize

        rank, _, local_rank = initialize.environment_ranks()
        if backend.is_cuda():
            torch.cuda.set_device(local_rank)
        torch.distributed.init_process_group(
            backend.process_group_backend(), store=store, rank=rank, world_size=world_size
        )
        start()
        return measure(self.sizes, num_iterations=self.num_iterations, num_warmup=self.num_warmup)


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """The plan to time copies between host and device, and the host's optimizer.

    `sizes`: numbers of bytes to copy. `model`, `dtype`: model of the layer that is updated, and dtype of its weights.
    """

    sizes: tuple[int, ...]
    model: Architecture
    dtype: str
    num_iterations: int
    num_warmup: int

    def time(self, *, store: object, start: Callable[[], None]) -> tuple[dict, int, dict[str, list[float]]]:
        """Time copies and updates; called in each process.

        Returns the seconds of copies, the number of parameters, and the seconds of their updates.
        """
        import torch

        from megatron import backend
        from megatron.trainer.profile.measurements import time_copies, time_updates
        from megatron.trainer.start_up import initialize

        if backend.is_cuda():
            torch.cuda.set_device(initialize.environment_ranks()[2])
        often = {"num_iterations": self.num_iterations, "num_warmup": self.num_warmup}
        start()
        return time_copies(self.sizes, **often), *time_updates(self.model, self.dtype, **often)


def training_program(architecture: str) -> TrainingProgram:
    """The training program of an architecture."""
    name = PROGRAMS[architecture][0].removesuffix(".py")
    return importlib.import_module(f"megatron.trainer.programs.{name}").program()


def prepare(parsed: argparse.Namespace, store: object | None) -> TrainConfig:
    """Complete the configuration, and join a job through `store`; None if this process is a rank already.

    Raises ValueError for invalid arguments.
    """
    from megatron.trainer.run.pretraining import complete
    from megatron.trainer.start_up import initialize

    args, _ = complete(parsed)
    if store is not None:
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        initialize.join_process_group(store, args.distributed_backend, timeout)
    return initialize.set_up(args)
