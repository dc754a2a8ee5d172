"""Rules of `--pipeline-program`, whose file is read and must agree with the other flags, and of weights that live on
the host (`--pipeline-schedule l2l`): how they do, and what they exclude."""

import argparse

from megatron.documents import counted
from megatron.pipeline.program.lane_order import DEFERRED, EAGER, Residency
from megatron.pipeline.schedules import OtherRun, ProgramSchedule, read_schedule
from megatron.trainer.arguments.flags.config import choice_of, num_replicas
from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.specification import name_of

# --- a program from a file --------------------------------------------------------------------------------------------

_SAYS_ITSELF = {
    "pipeline_schedule": "is what runs",
    "num_layers_per_virtual_pipeline_stage": "says how many stages each rank has",
    "num_virtual_stages_per_pipeline_rank": "says how many stages each rank has",
    "microbatch_group_size_per_virtual_pipeline_stage": "says what each rank computes next",
    "pipeline_extra_warmup": "says how far ahead each rank runs",
    "balance_activations": "says which activations move",
    "pipeline_2bw_provisional": "says which weights each computation uses",
    "pipeline_2bw_provisional_microbatches": "says which weights each computation uses",
    "pipeline_2bw_provisional_reduce": "says which weights each computation uses",
    "pipeline_2bw_error_feedback": "says which weights each computation uses",
    "l2l_update": "keeps weights on the device",
    "l2l_resident_stages": "keeps weights on the device",
    "l2l_stash": "keeps weights on the device",
    "l2l_fetch": "keeps weights on the device",
    "freeze_training": "is for the stages that it names, all trained to the end",
    "elastic_pipeline": "is for the ranks that it has",
    "activation_cache": "is for stages that are all trained",
}
"""Destination -> what the program does itself, or never does, about the subject of that flag."""

_REMEDIES = {
    ("recompute", True): "or leave out --pipeline-recompute",
    ("recompute", False): "or add --pipeline-recompute",
    ("tied_embeddings", True): "or add --untie-embeddings-and-output-weights",
    ("tied_embeddings", False): "or leave out --untie-embeddings-and-output-weights",
    ("data_parallel", True): "or use as many ranks as one replica takes",
    ("data_parallel", False): "or give the job the ranks of several replicas",
}


def pipeline_program(args: argparse.Namespace) -> list[str]:
    """Fills `program`: the schedule of the file, or None; and `pipeline_program_sha256`, its hash."""
    args.program = args.pipeline_program_sha256 = None
    if args.pipeline_program is None:
        return []
    named = f"--pipeline-program {args.pipeline_program}"
    if not args.pipeline_program:
        raise ValueError("--pipeline-program is empty; name a file or leave the flag out")
    for name, what in _SAYS_ITSELF.items():
        if name in args.given and getattr(args, name) not in (False, None, "off"):
            value = getattr(args, name)
            given = name_of(name) if value is True else f"{name_of(name)} {value}"
            raise ValueError(f"{given}: the program of {named} {what}; leave one of the two out")
    schedule = args.program = _read(args)
    args.pipeline_program_sha256 = schedule.sha256
    _require_ranks(args, schedule, named)
    if not schedule.graph.is_chain:
        raise ValueError(
            f"{named}: its stages have the edges {' '.join(map(str, schedule.edges))}, and this program's models are a "
            "chain; leave out the line # edges, or train with the library"
        )
    if schedule.weights.refreshes:
        raise ValueError(
            f"{named}: under weights {schedule.weights.name} each stage steps by itself, and this program's models "
            "step as a whole; use weights flush, 2bw or stash"
        )
    return _notes(args, schedule)


def _read(args: argparse.Namespace) -> ProgramSchedule:
    ties = not args.untie_embeddings_and_output_weights and args.architecture not in CLASSIFIERS
    ties = ties or bool(args.mtp_num_layers)
    try:
        return read_schedule(
            args.pipeline_program,
            recompute=args.pipeline_recompute,
            tied_embeddings=ties,
            data_parallel=num_replicas(args) > 1,
            tensor=args.tensor_model_parallel_size,
            data=num_replicas(args),
        )
    except OtherRun as error:
        remedy = _REMEDIES.get((error.fact, error.is_asked))
        raise ValueError(f"--pipeline-program {error}{f', {remedy}' if remedy else ''}") from error
    except ValueError as error:
        raise ValueError(f"--pipeline-program {error}") from error


def _require_ranks(args: argparse.Namespace, schedule: ProgramSchedule, named: str) -> None:
    p = args.pipeline_model_parallel_size
    if schedule.num_ranks != p:
        raise ValueError(
            f"{named} has rows for {counted(schedule.num_ranks, 'rank')}, and "
            f"--pipeline-model-parallel-size is {p}; make it {schedule.num_ranks}, or bring a program for {p}"
        )


def _notes(args: argparse.Namespace, schedule: ProgramSchedule) -> list[str]:
    """Notes on how the rows of a program continue, which the user may have meant otherwise."""
    fill, period = schedule.repetition.num_fill, schedule.repetition.num_period
    which = "all batches" if period == 1 else f"every {period} batches"
    behind = f" behind the first{f' {fill}' if fill > 1 else ''}" if fill else ""
    drains = "; the pipeline drains with them, since the rows repeat as a whole only" * schedule.drains_between_periods
    return [f"program {args.pipeline_program}, sha256 {schedule.short_hash}: {which}{behind} run alike{drains}"]


RULES = (pipeline_program,)


# --- weights on the host ----------------------------------------------------------------------------------------------


def residency_of(args: argparse.Namespace) -> Residency | None:
    """How the weights live on the host, as `args` ask; None where they live on the device."""
    if choice_of(args).residency is None:
        return None
    update = args.l2l_update
    if update == "auto":
        update = DEFERRED if _waits_for(args) else EAGER
    return Residency(args.l2l_resident_stages, update, args.l2l_stash)


def relay(args: argparse.Namespace) -> None:
    """Refuse what the relay excludes, and its flags where there is no relay."""
    schedule = choice_of(args).flag
    if choice_of(args).residency is None:
        for name in ("l2l_update", "l2l_resident_stages", "l2l_stash", "l2l_fetch"):
            if name in args.given:
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(args, name)} is about weights on the host, and "
                    f"{schedule} has them on the device; use l2l, or leave it out"
                )
        return
    if args.l2l_update == EAGER and (decides := _waits_for(args)):
        raise ValueError(
            f"--l2l-update eager updates a stage before all gradients are known, and {decides} depends on them all; "
            "use deferred, or leave out the latter (as by --clip-grad 0 or --bf16)"
        )
    if args.l2l_fetch == "shares" and num_replicas(args) == 1:
        raise ValueError(
            "--l2l-fetch shares gathers a stage's weights from replicas on the node, and there is one replica; leave "
            "it out"
        )
    for name, (is_asked, reason) in {
        "--use-distributed-optimizer": (
            args.use_distributed_optimizer,
            "shards the optimizer's state on the devices, and here each replica's host has it whole",
        ),
        "--recompute-granularity full": (
            args.recompute_granularity == "full",
            "recomputes within what is recomputed already",
        ),
        "--balance-activations": (
            args.balance_activations,
            "moves saved activations to ranks that save few, and with weights on the host ranks save alike",
        ),
        "--pipeline-extra-warmup": (args.pipeline_extra_warmup, "extends a warm-up, and stages in turn have none"),
        "--microbatch-group-size-per-virtual-pipeline-stage": (
            args.microbatch_group_size_per_virtual_pipeline_stage is not None,
            "cuts a batch into groups, and a stage takes a whole batch",
        ),
        "--log-saved-activations": (
            args.log_saved_activations,
            "counts what graphs hold, and cannot tell it from weights that come and go",
        ),
    }.items():
        if is_asked:
            raise ValueError(f"{name} does not go with {schedule}: it {reason}; leave it out")


def _waits_for(args: argparse.Namespace) -> str | None:
    """The flag for which an update has to know the gradients of all stages, if there is one."""
    if args.clip_grad > 0:
        return f"--clip-grad {args.clip_grad:g}"
    if args.calculate_per_token_loss:
        return "--calculate-per-token-loss"
    return "--fp16" if args.fp16 else None
