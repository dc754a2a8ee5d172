"""The project's flags in Megatron-LM's parser, and the schedule and batches that the parsed arguments ask for.

All flags begin with `--pipeline-` or `--2bw-`, so that no flag equals a flag of a fork.
"""

import argparse
from collections.abc import Sequence
from functools import cache

from megatron.pipeline.program.weight_policies import FLUSH, WeightPolicy
from megatron.pipeline.schedules import PRESETS, ProgramSchedule, Schedule, TooManyRead, read_schedule

_NOT_HERE = {
    "pipedream": "keeps a version of the weights for each microbatch in flight, which Megatron-LM's optimizers and "
    "checkpoints do not; use 2bw",
    "l2l": "keeps weights on the host, and Megatron-LM's optimizers have theirs on the device; use this project's own "
    "pretrain_gpt.py",
}
_IN_A_V = (
    "places two stages on each rank, there and back again, and Megatron-LM's model providers deal them out in turn; "
    "use zb-h1"
)


def reason_against(name: str) -> str | None:
    """The reason why preset `name` cannot run in Megatron-LM's training, with a remedy; None if it can run."""
    preset = PRESETS[name]
    if name in _NOT_HERE:
        return _NOT_HERE[name]
    if preset.placement == "v":
        return _IN_A_V
    if preset.residency is not None or preset.placement != "round-robin":
        return "is not for Megatron-LM's models; use flush, gpipe, bpipe, interleaved, zb-h1 or 2bw"
    return _reason_against_weights(preset.policy)


def _reason_against_weights(weights: WeightPolicy) -> str | None:
    if weights.updates_alone:
        return "has each stage step by itself, and Megatron-LM's optimizers step all together; use 2bw"
    return None


def runnable() -> tuple[str, ...]:
    """The names of the presets that can run in Megatron-LM's training."""
    return tuple(name for name in PRESETS if reason_against(name) is None)


def name_of(args: argparse.Namespace) -> str:
    """The name of the run's schedule: the preset's name, or the file's path."""
    return args.pipeline_schedule if args.pipeline_program is None else args.pipeline_program


def flag_of(args: argparse.Namespace) -> str:
    """The flag that chooses the schedule, with its value."""
    flag = "--pipeline-schedule" if args.pipeline_program is None else "--pipeline-program"
    return f"{flag} {name_of(args)}"


def weights_of(args: argparse.Namespace) -> WeightPolicy:
    """The weight policy of the run, without predictions. Raises ValueError if the program file is no schedule."""
    if args.pipeline_program is None:
        return PRESETS[args.pipeline_schedule].policy
    return _read(args.pipeline_program).weights


def updated_by_megatron(weights: WeightPolicy) -> bool:
    """Whether Megatron-LM makes the updates between batches; otherwise the engine makes them during batches."""
    return weights.drains


def schedule_of(args: argparse.Namespace, *, tied_embeddings: bool) -> Schedule | ProgramSchedule:
    """The schedule that `args` name, for the number of stages in `args`.

    If Megatron-LM updates the weights, a preset's program has no reductions, and the reductions in a file's program do
    nothing.

    Raises:
        ValueError: the schedule cannot run on these stages.
    """
    tied_embeddings = tied_embeddings and args.pipeline_model_parallel_size > 1
    if args.pipeline_program is not None:
        return _schedule_of_file(args, tied_embeddings=tied_embeddings)
    name, num_virtual_stages = args.pipeline_schedule, args.virtual_pipeline_model_parallel_size or 1
    preset = PRESETS[name]
    choices = {}
    if preset.weights != FLUSH.name:
        choices = {
            "data_parallel": args.data_parallel_size > 1,
            "tied_embeddings": tied_embeddings,
            "norm_decides": args.clip_grad > 0.0 or getattr(args, "fp16", False),
            "predict": args.pipeline_2bw_provisional != "off",
            "provisional_microbatches": args.pipeline_2bw_provisional_microbatches,
            "reduce_partial": args.pipeline_2bw_provisional_reduce,
        }
    if preset.interleaves:
        choices["microbatch_group_size"] = getattr(args, "microbatch_group_size_per_vp_stage", None)
    return Schedule.preset(
        name, num_stages=args.pipeline_model_parallel_size * num_virtual_stages,
        num_virtual_stages=num_virtual_stages, **choices,
    )  # fmt: skip


def _schedule_of_file(args: argparse.Namespace, *, tied_embeddings: bool) -> ProgramSchedule:
    facts = {"tensor": args.tensor_model_parallel_size, "data": args.data_parallel_size, "recompute": False}
    if not updated_by_megatron(weights_of(args)):
        facts |= {"tied_embeddings": tied_embeddings, "data_parallel": args.data_parallel_size > 1}
    schedule, named = _read(args.pipeline_program, **facts), flag_of(args)
    if reason := _reason_against_weights(schedule.weights):
        raise ValueError(f"{named} {reason}")
    ranks, stages = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    dealt_out = tuple(stage % ranks for stage in range(ranks * stages))
    if not schedule.graph.is_chain or schedule.rank_of_stage != dealt_out:
        raise ValueError(
            f"{named} has {schedule.num_stages} stages on the ranks {', '.join(map(str, schedule.rank_of_stage))}, and "
            f"this job's model is a chain of {ranks * stages}, dealt out in turn to {ranks}: write the program for "
            "these, or change --pipeline-model-parallel-size or --num-virtual-stages-per-pipeline-rank"
        )
    return schedule


@cache
def _read(path: str, **facts: bool | int) -> ProgramSchedule:
    try:
        return read_schedule(path, **facts)
    except ValueError as error:
        raise ValueError(f"--pipeline-program {error}") from error


def batches_of(args: argparse.Namespace) -> Sequence[int]:
    """The number of microbatches of each batch size of the run, per pipeline, in the order of the run."""
    per_microbatch = args.micro_batch_size * args.data_parallel_size
    sizes = [args.global_batch_size]
    if getattr(args, "rampup_batch_size", None) is not None:
        start, increment = (int(each) for each in args.rampup_batch_size[:2])
        sizes = [*range(start, args.global_batch_size, increment), args.global_batch_size]
    return [size // per_microbatch for size in sizes]


def prove(schedule: Schedule | ProgramSchedule, batches: Sequence[int]) -> None:
    """Build and prove the programs of the run: every batch size, each change to the next size, and the drain.

    The engine proves each batch again when the batch begins, from the proofs that this function caches.

    Raises:
        ValueError: the schedule cannot run a batch.
    """
    stream = schedule.stream()
    for size in dict.fromkeys(batches):
        try:
            schedule.validate(size)
        except TooManyRead as error:
            raise error.under("--2bw-provisional-microbatches") from error
        for _ in range(schedule.settling_batches + 1):
            stream.start_batch(size)
    stream.drain()


STANDARD, PAIR_ADJACENT = "standard", "pair-adjacent"


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the project's flags to Megatron-LM's parser, and return the parser."""
    group = parser.add_argument_group("pipeline schedules", "of megatron.pipeline.dropin")
    group.add_argument(
        "--pipeline-schedule",
        metavar=f"{{{','.join(runnable())}}}",
        help="Train under this pipeline schedule. Without it or a program, nothing of Megatron-LM is touched.",
    )
    group.add_argument(
        "--pipeline-program",
        metavar="FILE",
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
        "--2bw-error-feedback",
        dest="pipeline_2bw_error_feedback",
        action="store_true",
        help="With 2bw: compute a batch at the weights before with their last update taken once more.",
    )
    group.add_argument(
        "--pipeline-timeline",
        metavar="DIR",
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
