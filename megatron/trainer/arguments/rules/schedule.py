"""Rules of the pipeline's schedule: the program of `--pipeline-program`, weights on the host (`--pipeline-schedule
l2l`), and a schedule's requirements for batches, stages and weights."""

from dataclasses import replace
from functools import lru_cache

from megatron.documents import counted
from megatron.elastic.stages import StageLayers
from megatron.pipeline.program.lane_order import DEFERRED, EAGER, Residency
from megatron.pipeline.program.weight_policies import WeightPolicy
from megatron.pipeline.schedules import OtherRun, ProgramSchedule, Schedule, TooManyRead, read_schedule
from megatron.pipeline.start_up.late_weights import require_predictions, take_error_feedback
from megatron.planner.memory.schedule_demand import representative_sizes
from megatron.trainer.arguments.flags.config import TrainConfig, choice_of, flag_of_program, num_replicas
from megatron.trainer.arguments.flags.model import CLASSIFIERS
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.arguments.flags.specification import Arguments, name_of
from megatron.trainer.arguments.rules.stages import tied_stage

# --- a program from a file --------------------------------------------------------------------------------------------

_SAYS_ITSELF = {
    "pipeline_schedule": "takes its place",
    "num_layers_per_virtual_pipeline_stage": "says how many stages each rank has",
    "num_virtual_stages_per_pipeline_rank": "says how many stages each rank has",
    "microbatch_group_size_per_virtual_pipeline_stage": "says what each rank computes next",
    "pipeline_extra_warmup": "says how far ahead each rank runs",
    "balance_activations": "says which activations move",
    "pipeline_offload_activations": "says which activations wait on the host",
    "pipeline_2bw_provisional": "says which weights each computation uses",
    "pipeline_2bw_provisional_microbatches": "says which weights each computation uses",
    "pipeline_2bw_provisional_reduce": "says which weights each computation uses",
    "pipeline_2bw_error_feedback": "says which weights each computation uses",
    "optimistic_steps": "has no words for steps that are refused",
    "l2l_update": "keeps weights on the device",
    "l2l_resident_stages": "keeps weights on the device",
    "l2l_stash": "keeps weights on the device",
    "l2l_fetch": "keeps weights on the device",
    "freeze_training": "is for the stages that it names, all trained to the end",
    "elastic_pipeline": "is for the ranks that it has",
    "activation_cache": "is for stages that are all trained",
}
"""Destination of a flag -> what the program itself says about the flag's subject, or why it excludes the flag."""

OF_AUTO = (
    "pipeline_profile", "pipeline_memory_limit", "pipeline_synthesis_seconds", "pipeline_measured_batches",
    "pipeline_weights", "pipeline_moves",
)  # fmt: skip
"""Destinations of flags that only `--pipeline-schedule auto` reads."""

_REMEDIES = {
    ("recompute", True): "or leave out --pipeline-recompute",
    ("recompute", False): "or add --pipeline-recompute",
    ("tied_embeddings", True): "or add --untie-embeddings-and-output-weights",
    ("tied_embeddings", False): "or leave out --untie-embeddings-and-output-weights",
    ("data_parallel", True): "or use as many ranks as one replica takes",
    ("data_parallel", False): "or give the job the ranks of several replicas",
}


def pipeline_program(args: Arguments) -> list[str]:
    """Set `program`, the schedule of the program's file or None, and `pipeline_program_sha256`, its hash."""
    args.program = args.pipeline_program_sha256 = None
    if args.pipeline_schedule == AUTO:
        raise ValueError(
            f"--pipeline-schedule {AUTO} makes a program when a training or its --dry-run starts, and nothing trains "
            "here; name a schedule"
        )
    if args.pipeline_program is None:
        return []
    named = flag_of_program(args)
    if not args.pipeline_program:
        raise ValueError("--pipeline-program is empty; name a file or leave the flag out")
    refuse_what_a_program_says(args)
    schedule = args.program = made_or_read(args)
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


def refuse_what_a_program_says(args: Arguments) -> None:
    """Raise ValueError for a flag about a subject that the run's program decides itself or does not support."""
    for name, what in _SAYS_ITSELF.items():
        if name in args.given and getattr(args, name) not in (False, None, "off"):
            value = getattr(args, name)
            given = name_of(name) if value is True else f"{name_of(name)} {value}"
            raise ValueError(f"{given}: the program of {flag_of_program(args)} {what}; leave one of the two out")


def made_or_read(args: Arguments | TrainConfig) -> ProgramSchedule:
    """The schedule of the program that was made for the job, or else of the job's file. Raises ValueError."""
    ties = not args.untie_embeddings_and_output_weights and args.architecture not in CLASSIFIERS
    ties = ties or bool(args.mtp_num_layers)
    flag = flag_of_program(args).split()[0]
    try:
        return read_schedule(
            args.pipeline_program,
            text=None if args.made_program is None else args.made_program.csv,
            recompute=args.pipeline_recompute if args.made_program is None else None,
            tied_embeddings=ties,
            data_parallel=num_replicas(args) > 1,
            tensor=args.tensor_model_parallel_size,
            data=num_replicas(args),
        )
    except OtherRun as error:
        remedy = _REMEDIES.get((error.fact, error.is_asked))
        raise ValueError(f"{flag} {error}{f', {remedy}' if remedy else ''}") from error
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error


def _require_ranks(args: Arguments, schedule: ProgramSchedule, named: str) -> None:
    p = args.pipeline_model_parallel_size
    if schedule.num_ranks != p:
        raise ValueError(
            f"{named} has rows for {counted(schedule.num_ranks, 'rank')}, and "
            f"--pipeline-model-parallel-size is {p}; make it {schedule.num_ranks}, or bring a program for {p}"
        )


def _notes(args: Arguments, schedule: ProgramSchedule) -> list[str]:
    """Notes on how the rows of a program repeat, which may differ from the user's intention."""
    fill, period = schedule.repetition.num_fill, schedule.repetition.num_period
    which = "all batches" if period == 1 else f"every {period} batches"
    behind = f" behind the first{f' {fill}' if fill > 1 else ''}" if fill else ""
    drains = "; the pipeline drains with them, since the rows repeat as a whole only" * schedule.drains_between_periods
    return [f"program {args.pipeline_program}, sha256 {schedule.short_hash}: {which}{behind} run alike{drains}"]


# --- weights on the host ----------------------------------------------------------------------------------------------


def residency_of(args: Arguments) -> Residency | None:
    """How the host keeps the weights under the flags; None if the device keeps them."""
    if choice_of(args).residency is None:
        return None
    update = args.l2l_update
    if update == "auto":
        update = DEFERRED if _waits_for(args) else EAGER
    return Residency(args.l2l_resident_stages, update, args.l2l_stash)


def relay(args: Arguments) -> None:
    """Refuse flags that exclude weights on the host; without weights on the host, refuse the flags about them."""
    schedule = choice_of(args).flag
    if choice_of(args).residency is None:
        for name in ("l2l_update", "l2l_resident_stages", "l2l_stash", "l2l_fetch"):
            if name in args.given:
                raise ValueError(
                    f"{name_of(name)} {getattr(args, name)} is about weights on the host, and "
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


def _waits_for(args: Arguments) -> str | None:
    """The flag that makes an update wait for the gradients of all stages; None if there is none."""
    if args.clip_grad > 0:
        return f"--clip-grad {args.clip_grad:g}"
    if args.calculate_per_token_loss:
        return "--calculate-per-token-loss"
    return "--fp16" if args.fp16 else None


_NOTHING_MOVES = "has nothing to move with these stages and batches: saved activations stay where they are"


# --- the schedule -----------------------------------------------------------------------------------------------------


def schedule(args: Arguments) -> list[str]:
    """Check that the schedule accepts every batch size of the run. Set `schedule` and `moves_activations`."""
    if args.made_program is None and (lone := [each for each in OF_AUTO if each in args.given]):
        raise ValueError(
            f"{name_of(lone[0])} is for --pipeline-schedule {AUTO}, and this is {choice_of(args).name}; use {AUTO}, or "
            "leave it out"
        )
    if args.program is None:
        _stages_of_ranks(args)
    if args.pipeline_offload_activations is not None and (args.freeze_training or args.elastic_pipeline):
        raise ValueError(
            "--pipeline-offload-activations is for stages that are trained to the end on the ranks that they have; "
            "leave it out, or --freeze-training and --elastic-pipeline"
        )
    weights = choice_of(args).policy
    if args.pipeline_2bw_single_gradient_buffer and weights.delay != 1:
        raise ValueError("--2bw-single-gradient-buffer needs --pipeline-schedule 2bw")
    _predictions(args, weights)
    if weights.updates_alone:
        _updates_alone(args)
    try:
        args.schedule, args.moves_activations = settled_schedule(args)
    except TooManyRead as error:
        raise error.under("--2bw-provisional-microbatches") from error
    smallest = min(args.batch_sizes.all_num_microbatches())
    if args.pipeline_2bw_single_gradient_buffer and _interleaves_batches(args.schedule, smallest):
        raise ValueError(
            f"{choice_of(args).flag} comes back to a batch after a backward of the next one, for "
            "which a single gradient buffer has no room; leave out --2bw-single-gradient-buffer"
        )
    if args.schedule.balance and not args.moves_activations:
        flag = "--balance-activations" if args.balance_activations else f"--pipeline-schedule {args.pipeline_schedule}"
        return [f"{flag} {_NOTHING_MOVES}"]
    if (most := args.pipeline_offload_activations) is not None:
        without = replace(args.schedule, most_on_device=None)
        if all(max(without.max_saved_on_rank((each,) * 3)) <= most for each in args.batch_sizes.all_num_microbatches()):
            return [f"--pipeline-offload-activations {most} {_NOTHING_MOVES}"]
    return []


def _stages_of_ranks(args: Arguments) -> None:
    """Check that the schedule fits the number of stages on a rank.

    If a rank has several stages and no schedule is given, choose `interleaved`, as in Megatron-LM.
    """
    v, group = args.virtual_pipeline_model_parallel_size, args.microbatch_group_size_per_virtual_pipeline_stage
    if v is not None and "pipeline_schedule" not in args.given:
        args.pipeline_schedule = "interleaved"
    interleaves, on_host = choice_of(args).interleaves, residency_of(args) is not None
    if v is None and interleaves and not on_host:
        count = choice_of(args).virtual_stages or "2 or more"
        raise ValueError(
            f"--pipeline-schedule {args.pipeline_schedule} needs several stages on each rank; add "
            f"--num-virtual-stages-per-pipeline-rank {count}, or use flush"
        )
    if v is not None and not interleaves:
        raise ValueError(
            f"--pipeline-schedule {args.pipeline_schedule} has one stage on each rank, not {v}; use interleaved, or "
            "leave out the flags that ask for several"
        )
    if v is None and group is not None:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} has no effect where a rank has one stage; "
            "leave it out, or add --num-virtual-stages-per-pipeline-rank"
        )


def settled_schedule(args: Arguments | TrainConfig) -> tuple[Schedule | ProgramSchedule, bool]:
    """The schedule for the currently frozen layers, and whether it moves activations.

    Raises ValueError if the schedule does not accept a batch size of the run.
    """
    sizes = set(args.batch_sizes.all_num_microbatches())
    found = _schedule_of_flags(args) if args.frozen_stages is None else behind_frozen(args, args.frozen_stages)
    for num_microbatches in sorted(sizes):
        found.validate(num_microbatches)
    return found, found.swaps or any(found.evicting_ranks((num_microbatches,)) for num_microbatches in sizes)


def _schedule_of_flags(args: Arguments) -> Schedule | ProgramSchedule:
    if args.program is not None:
        return args.program
    num_virtual_stages = args.virtual_pipeline_model_parallel_size or 1
    residency, reduced = residency_of(args), num_replicas(args)
    has_copies = args.pipeline_model_parallel_size > 1
    if residency is not None:
        has_copies = args.pipeline_model_parallel_size * num_virtual_stages > 1
        reduced *= args.tensor_model_parallel_size  # tensor ranks add up partial gradients stage by stage
    return Schedule.preset(
        args.pipeline_schedule,
        num_stages=args.pipeline_model_parallel_size * num_virtual_stages,
        num_virtual_stages=num_virtual_stages,
        microbatch_group_size=args.microbatch_group_size_per_virtual_pipeline_stage,
        recompute=args.pipeline_recompute,
        extra_warmup=args.pipeline_extra_warmup,
        balance=args.balance_activations,
        most_on_device=args.pipeline_offload_activations,
        data_parallel=reduced > 1,
        tied_embeddings=shares_embedding(args) and has_copies,
        tied_stage=tied_stage(args) if has_copies else None,
        residency=residency,
        predict=args.pipeline_2bw_provisional != "off",
        provisional_microbatches=args.pipeline_2bw_provisional_microbatches,
        reduce_partial=args.pipeline_2bw_provisional_reduce,
        optimistic=args.optimistic_steps,
    )


def behind_frozen(args: Arguments, stages: StageLayers) -> Schedule:
    """The schedule of `args` if some of the `stages` are frozen."""
    return Schedule.preset(
        args.pipeline_schedule,
        num_stages=len(stages.rank_of_stage),
        rank_of_stage=stages.rank_of_stage,
        num_frozen=stages.num_frozen,
        recompute=args.pipeline_recompute,
        extra_warmup=args.pipeline_extra_warmup,
        balance=args.balance_activations,
        data_parallel=num_replicas(args) > 1,
    )


def shares_embedding(args: Arguments) -> bool:
    """Whether the first and the last stage, if they differ, have copies of one embedding.

    They do if the output layer is tied to the embedding, or if layers of multi-token prediction embed tokens.
    """
    return not args.untie_embeddings_and_output_weights or args.mtp_num_layers is not None


@lru_cache(maxsize=64)
def _interleaves_batches(schedule: Schedule | ProgramSchedule, num_microbatches: int) -> bool:
    """Whether a backward of a batch comes after a backward of a later batch.

    A preset schedule is checked with the fewest microbatches that show this, since a search checks thousands of times.
    """
    sizes: tuple[int, ...] = ()
    if isinstance(schedule, Schedule):
        schedule = replace(schedule, balance=False)
        sizes = representative_sizes(
            schedule, num_microbatches, least=2 * schedule.num_ranks, step=schedule.num_ranks, count=1
        )
    return schedule.interleaves_batches((sizes or (num_microbatches,)) * 3)


def _predictions(args: Arguments, weights: WeightPolicy) -> None:
    """Check the requirements and exclusions of predicted weights."""
    take_error_feedback(args)
    require_predictions(args, weights, choice_of(args).name)
    mode = args.pipeline_2bw_provisional
    if mode != "off" and args.pipeline_2bw_single_gradient_buffer:
        reason = f"--2bw-provisional {mode} reads gradients that --2bw-single-gradient-buffer gives away early"
        if args.pipeline_2bw_error_feedback:
            reason = (
                "--2bw-error-feedback takes the update of a STEP again, and --2bw-single-gradient-buffer steps early"
            )
        raise ValueError(f"{reason}; leave one of them out")


def _updates_alone(args: Arguments) -> None:
    """Refuse flags that do not work with stages that update independently."""
    if args.clip_grad > 0:
        raise ValueError(
            f"{choice_of(args).flag} updates each stage by itself, so there is no global norm to "
            "clip with; add --clip-grad 0"
        )
    if args.fp16:
        raise ValueError(
            f"{choice_of(args).flag} updates each stage by itself, so an overflow elsewhere "
            "would be seen too late for --fp16; use --bf16"
        )
    if args.calculate_per_token_loss:
        raise ValueError(
            f"{choice_of(args).flag} updates each stage by itself, before the tokens of a batch are counted, so "
            "--calculate-per-token-loss has no divisor; leave it out"
        )
    if args.mtp_num_layers is not None and args.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"{choice_of(args).flag} gives first and last stage different delays, so that the copies of the embedding "
            f"of --mtp-num-layers {args.mtp_num_layers} would part; use flush or 2bw"
        )
    if not args.untie_embeddings_and_output_weights and args.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"{choice_of(args).flag} gives first and last stage different delays, so their "
            "embeddings cannot stay tied; add --untie-embeddings-and-output-weights"
        )
