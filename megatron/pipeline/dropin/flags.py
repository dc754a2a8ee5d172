"""Our flags, in a group of their own behind those of Megatron-LM, and what they say.

All begin with `--pipeline-` or `--2bw-`, so that they meet no flag of a fork.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron.pipeline.dropin.choice import flag_of, name_of, runnable

STANDARD, PAIR_ADJACENT = "standard", "pair-adjacent"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What our flags say of a run.

    Attributes:
        schedule: what the run calls its schedule: a preset's name, or the path of a program.
        flag: the flag that chooses it, with its value.
        timeline: where the picture of the last iterations goes; None: nothing is traced.
        timeline_iterations: how many it shows at most.
        rank_mapping: `standard`, `pair-adjacent`, or the path of a file.
        counts_activations: say at the end how many bytes of activations each stage has saved at most.
    """

    schedule: str
    flag: str
    timeline: Path | None
    timeline_iterations: int
    rank_mapping: str
    counts_activations: bool


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron-LM's parser; returns it."""
    group = parser.add_argument_group("pipeline schedules", "of megatron.pipeline.dropin")
    group.add_argument(
        "--pipeline-schedule",
        metavar=f"{{{','.join(runnable())}}}",
        default=None,
        help="Train under this pipeline schedule. Without it or a program, nothing of Megatron-LM is touched.",
    )
    group.add_argument(
        "--pipeline-program",
        metavar="FILE",
        default=None,
        help="Train with the rows of this CSV file, one of instructions for each rank, in place of a schedule. They "
        "run for any number of batches: how they repeat is found, and proved.",
    )
    group.add_argument(
        "--2bw-provisional",
        dest="pipeline_2bw_provisional",
        choices=("off", "stage", "uniform"),
        default="off",
        help="With 2bw: compute a batch at a prediction of its weights instead of the weights before, so that training "
        "converges like flush. stage: from all microbatches of the batch before that each stage has done. uniform: "
        "from the same number on every stage.",
    )
    group.add_argument(
        "--2bw-provisional-microbatches",
        dest="pipeline_2bw_provisional_microbatches",
        metavar="N",
        type=int,
        default=None,
        help="With --2bw-provisional uniform: how many microbatches of a replica each prediction reads, at most m-p+1.",
    )
    group.add_argument(
        "--2bw-provisional-reduce",
        dest="pipeline_2bw_provisional_reduce",
        action="store_true",
        help="With --2bw-provisional and replicas: predict from the mean over the replicas, for one more reduction of "
        "the gradients in each batch.",
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


def asks_for_schedule(args: argparse.Namespace) -> bool:
    """Whether the parsed `args` name a schedule or a program."""
    return any(getattr(args, name, None) is not None for name in ("pipeline_schedule", "pipeline_program"))


def options_of(args: argparse.Namespace) -> Options | None:
    """What the parsed `args` say; None where they ask for no schedule."""
    if not asks_for_schedule(args):
        return None
    return Options(
        schedule=name_of(args),
        flag=flag_of(args),
        timeline=None if args.pipeline_timeline is None else Path(args.pipeline_timeline),
        timeline_iterations=args.pipeline_timeline_iterations,
        rank_mapping=args.pipeline_rank_mapping,
        counts_activations=args.pipeline_log_saved_activations,
    )
