"""Our flags, in a group of their own behind those of Megatron-LM, and what they say.

All begin with `--pipeline-`, so that they meet no flag of a fork.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron.pipeline.schedules import PRESETS

STANDARD, PAIR_ADJACENT = "standard", "pair-adjacent"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What our flags say of a run.

    Attributes:
        schedule: name of the pipeline schedule.
        timeline: where the picture of the last iterations goes; None: nothing is traced.
        timeline_iterations: how many it shows at most.
        rank_mapping: `standard`, `pair-adjacent`, or the path of a file.
        counts_activations: say at the end how many bytes of activations each stage has saved at most.
    """

    schedule: str
    timeline: Path | None
    timeline_iterations: int
    rank_mapping: str
    counts_activations: bool


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron-LM's parser; returns it."""
    group = parser.add_argument_group("pipeline schedules", "of megatron.pipeline.dropin")
    group.add_argument(
        "--pipeline-schedule",
        choices=tuple(PRESETS),
        default=None,
        help="Train under this pipeline schedule. Without it nothing of Megatron-LM is touched.",
    )
    group.add_argument(
        "--pipeline-timeline",
        metavar="DIR",
        default=None,
        help="Trace the last iterations and write their timeline here: planned above measured, and Perfetto JSON.",
    )
    group.add_argument(
        "--pipeline-timeline-iterations",
        type=int,
        default=4,
        help="How many iterations --pipeline-timeline shows.",
    )
    group.add_argument(
        "--pipeline-log-saved-activations",
        action="store_true",
        help="Say at the end how many bytes of activations each stage has saved at most.",
    )
    group.add_argument(
        "--pipeline-rank-mapping",
        metavar="MAPPING",
        default=STANDARD,
        help=f"Which GPU runs which rank. {STANDARD}: as the launcher counts. {PAIR_ADJACENT}: tensor ranks together, "
        "then stages s and p-1-s, between which bpipe moves activations. Or a JSON or YAML file with the rank of each "
        "slot, as tools/rank_map.py writes it.",
    )
    return parser


def options_of(args: argparse.Namespace) -> Options | None:
    """What the parsed `args` say; None where they ask for no schedule."""
    if getattr(args, "pipeline_schedule", None) is None:
        return None
    return Options(
        schedule=args.pipeline_schedule,
        timeline=None if args.pipeline_timeline is None else Path(args.pipeline_timeline),
        timeline_iterations=args.pipeline_timeline_iterations,
        rank_mapping=args.pipeline_rank_mapping,
        counts_activations=args.pipeline_log_saved_activations,
    )
