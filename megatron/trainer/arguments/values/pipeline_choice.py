"""What the flags say of the pipeline before there is a schedule: a preset's name, or a file with a program."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules import PLACEMENTS, PRESETS


@dataclass(frozen=True, kw_only=True)
class PipelineChoice:
    """What a run needs to know of its pipeline before the schedule is built.

    Attributes:
        flag: as on the command line, for messages: `--pipeline-schedule 2bw`.
        name: what logs call it.
        policy: which weights a batch uses.
        residency: where they live, if on the host.
        interleaves: ranks have several stages.
        virtual_stages: how many, where it is for one number alone.
        recompute: backwards are preceded by a recompute whatever the flags say.
        placement: (ranks, stages on each) -> the rank of each stage.
        deals_out: whether that is in turn, as megatron.core does.
    """

    flag: str
    name: str
    policy: WeightPolicy
    residency: Residency | None
    interleaves: bool
    virtual_stages: int | None
    recompute: bool
    placement: Callable[[int, int], Sequence[int]]
    deals_out: bool


def choice_of(args: argparse.Namespace) -> PipelineChoice:
    """The choice of `args`, of whose program file `program` is the schedule, or None."""
    schedule = args.program
    if schedule is None:
        preset = PRESETS[args.pipeline_schedule]
        return PipelineChoice(
            flag=f"--pipeline-schedule {args.pipeline_schedule}", name=args.pipeline_schedule, policy=preset.policy,
            residency=preset.residency, interleaves=preset.interleaves,
            virtual_stages=preset.virtual_stages if preset.interleaves else None, recompute=preset.recompute,
            placement=PLACEMENTS[preset.placement], deals_out=preset.placement == "round-robin",
        )  # fmt: skip
    placement = schedule.rank_of_stage
    in_turn = tuple(stage % schedule.num_ranks for stage in range(schedule.num_stages))
    return PipelineChoice(
        flag=f"--pipeline-program {args.pipeline_program}", name=f"program {args.pipeline_program}",
        policy=schedule.weights, residency=None, interleaves=schedule.num_stages > schedule.num_ranks,
        virtual_stages=None,
        recompute=schedule.recompute, placement=lambda *_: placement,
        deals_out=placement == in_turn and schedule.num_stages % schedule.num_ranks == 0 and schedule.num_ranks > 1,
    )  # fmt: skip


def schedule_text(args: argparse.Namespace) -> str:
    """What a run's first lines call the choice: `schedule 2bw`, or `program rows.csv (sha256 0123456789ab)`."""
    if args.program is None:
        return f"schedule {args.pipeline_schedule}"
    return f"program {args.pipeline_program} (sha256 {args.program.short_hash})"
