"""`--pipeline-schedule auto`: the fastest program for given costs under a memory limit.

A stand-in is the same job under a named schedule. It gives the stages, their costs and the memory of everything but
activations. For each stand-in, `synthesize` searches for the fastest program with its placement, and the fastest of
these programs is the job's. Rank 0 makes it, and the other ranks read it from the rendezvous store. With
`--pipeline-recompute` the search also chooses which microbatches of which stages are recomputed. With
`--pipeline-weights 2bw` it looks for the shortest period of batches that follow one another, and among these programs
for the least memory; a stage then recomputes all microbatches or none. With `--pipeline-moves` activations may wait
elsewhere.

Without a profile there are no costs yet. The job then begins with a named order that keeps the limits, and measures its
own costs (`changes/program_making.py`).

A program that was made for a job is stored beside its checkpoints (`FILE`, `CERTIFICATE`), and a resumed run keeps it
if the run asks for the same.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.documents.files import write_whole
from megatron.documents.tables import ranges_of
from megatron.pipeline.program.weight_policies import weight_policy
from megatron.pipeline.simulate import simulate
from megatron.pipeline.synthesis import Problem, Steady, Synthesis
from megatron.pipeline.synthesis.search import bubble
from megatron.pipeline.synthesis.steady import fullness_of
from megatron.planner.synthesis import AS_SHORT, STAND_INS
from megatron.trainer.arguments import resolve_platform, validate_args
from megatron.trainer.arguments.flags.config import MadeProgram, TrainConfig
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.arguments.flags.specification import Arguments, name_of
from megatron.trainer.arguments.platform import Platform
from megatron.trainer.arguments.rules.experts import moved_activations
from megatron.trainer.arguments.rules.model import freed_activations
from megatron.trainer.arguments.rules.schedule import OF_AUTO, refuse_what_a_program_says
from megatron.trainer.plan.auto_costs import Assumed, CostsOf, costs_of_file
from megatron.trainer.plan.auto_log import beginning, begins_with, lines_of, lines_of_steady
from megatron.trainer.plan.auto_problem import first_of, moving_problems_of, problems_of, search_of, within_limit

if TYPE_CHECKING:
    import torch

FILE, CERTIFICATE = "pipeline_program.csv", "pipeline_program.json"
_WHOLE = "flush"
"""The stand-in of jobs that do not split backwards."""
_ASKED = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout", "pipeline_memory_limit", "micro_batch_size", "global_batch_size", "num_layers",
    "hidden_size", "ffn_hidden_size", "num_experts", "seq_length", "fp16", "bf16", "recompute_granularity",
    "recompute_method", "recompute_num_layers", "recompute_modules", "pipeline_recompute", "pipeline_weights",
    "pipeline_moves",
    "use_distributed_optimizer", "optimizer",
)  # fmt: skip
"""Destinations of the flags that decide stages, costs and memory; if one changes, a new program is made."""
_PROFILE = "the content of --pipeline-profile"
_KEY = "program/auto"
_ROUNDING = 1e-6
"""The fraction of a batch's time by which a better program must be faster."""


def with_program(args: Arguments, made: MadeProgram) -> Arguments:
    """The arguments of the job with its made program, as if `--pipeline-program` gave it."""
    dropped = ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank")
    given = tuple(each for each in args.given if each not in dropped)
    values = {"pipeline_schedule": "flush", "pipeline_program": AUTO, "made_program": made, "given": given}
    return Arguments(**{**vars(args), "num_virtual_stages_per_pipeline_rank": None, **values})


def require(args: Arguments, *, world_size: int, rank: int = 0) -> None:
    """Raise ValueError if no program can be made for a job, as far as flags and the file of costs show."""
    _stand_ins(args, world_size=world_size, rank=rank)
    if rank == 0 and args.pipeline_profile is not None:
        costs_of_file(args.pipeline_profile, moves=args.pipeline_moves)


def make(
    args: Arguments,
    *,
    world_size: int,
    platform: Platform,
    settled: Callable[[Arguments], TrainConfig] = TrainConfig.of,
) -> MadeProgram:
    """Make the program of a job, or take the program that is stored beside the checkpoint to be loaded.

    Without a profile it is the program with which the job begins (`MadeProgram.measures`).

    Args:
        args: parsed, not validated.
        platform: the machine that trains.
        settled: makes a run's configuration from arguments for this platform.

    Raises:
        ValueError: flags that exclude each other, costs that do not fit the job, or a limit that no program keeps.
    """
    likes = _stand_ins(args, world_size=world_size)
    asked = _asked(args, likes[0])
    lines = []
    if args.load is not None and (Path(args.load) / FILE).is_file():
        kept, line = _kept(Path(args.load), asked)
        if kept is not None:
            return kept
        lines.append(line)
    measures = args.pipeline_profile is None
    costs_of = Assumed() if measures else costs_of_file(args.pipeline_profile, moves=args.pipeline_moves)
    problems, configs, refusal = [], {}, None
    for like in likes:
        if problems and like.pipeline_schedule == _WHOLE:
            break
        try:
            resolve_platform(like, platform)
            config = settled(like)
            problems += problems_of(config, costs_of)
            configs[tuple(config.schedule.rank_of_stage)] = config
        except ValueError as error:
            refusal = refusal or error
    if not problems:
        raise refusal
    weights = weight_policy(args.pipeline_weights)
    if measures:
        begin = first_of(weights, problems)
        line = (
            f"{AUTO}: without --pipeline-profile the job begins with {beginning(begin)}, measures its batches 2 to "
            f"{args.pipeline_measured_batches + 1}, and searches for a faster program while it goes on"
        )
        return MadeProgram(begin.csv, (*lines, line), _certificate(asked, begin), measures=True)
    moving = [each for config in configs.values() for each in moving_problems_of(config, costs_of)]
    best = search_of(args, problems, moving)()
    if weights.drains:
        best = within_limit(configs, costs_of, best)
    return MadeProgram(best.csv, (*lines, *_lines(args, best)), _certificate(asked, best, problems))


def better(
    config: TrainConfig, costs_of: CostsOf, found: Sequence[Synthesis] | Steady, problems: Sequence[Problem]
) -> MadeProgram:
    """The program with which a run continues after it has measured its costs.

    It is the program that the search found, if this is better by the measured costs than the program with which the run
    began; otherwise the latter. Better means faster, or, if batches follow one another, as fast with less memory.
    """
    begun, was = config.made_program, json.loads(config.made_program.certificate)
    now = f"that of {begins_with(was['begun_with'])}, with which the job began, takes"
    if isinstance(found, Steady):
        seconds = simulate(config.schedule.program, found.problem.costs).steady_time_per_batch()
        parts, held = {"period_of_a_microbatch": seconds / found.problem.num_microbatches}, max(was["held"])
        is_leaner = found.fullness < fullness_of(found.problem, was["held"]) * (1 - _ROUNDING)
        is_better = found.seconds < seconds * (AS_SHORT if is_leaner else 1 / AS_SHORT)
        about = ("registered_orders_hold", "least_held_at_this_period")
        now, other = f"{now} up to {held:.3g} GiB on a rank and", "none that is faster or as fast in less memory"
    else:
        found = within_limit({tuple(config.schedule.rank_of_stage): config}, costs_of, found)
        seconds = simulate(config.schedule.program, found.problem.costs).makespan
        parts, about = {"bubble": bubble(found.problem, seconds)}, ("best_registered_order",)
        is_better, other = found.seconds < seconds * (1 - _ROUNDING), "no faster one"
    now = f"{now} {1000 * seconds:.4g} ms"
    if is_better:
        lines = (*_lines(config, found), f"{AUTO}: {now}, {max(0.0, seconds / found.seconds - 1):.1%} more")
        return MadeProgram(found.csv, lines, _certificate(was["asked"], found, problems))
    known = _known(found, problems)
    known = was | {name: known[name] for name in ("bound", "bound_from", "bound_holds_for", *about)}
    line = f"{AUTO}: {now}; {other} was found, and none takes less than {1000 * found.bound:.4g} ms, so it stays"
    return MadeProgram(begun.csv, (line,), json.dumps(known | parts | {"seconds": seconds}, indent=1) + "\n")


def _certificate(asked: dict[str, object], found: Synthesis | Steady, problems: Sequence[Problem] = ()) -> str:
    again = {stage: ranges_of(each) for stage, each in found.problem.recomputed_microbatches.items()}
    known = {"asked": asked, "recomputed_stages": [*again], "recomputed_microbatches": again}
    return json.dumps(known | _known(found, problems), indent=1) + "\n"


def _known(found: Synthesis | Steady, problems: Sequence[Problem]) -> dict[str, object]:
    """The certificate of the program found; its bound holds for all problems that were searched."""
    known, every = found.certificate(), range(found.problem.num_stages)
    sets = sorted({tuple(sorted(each.recomputed)) for each in problems if each.num_stages == len(every)})
    if len(sets) > 1:
        holds = {"recomputed": sets, "recomputes": "all microbatches of one of these sets of stages"}
        if isinstance(found, Synthesis) and (*every,) in sets:
            holds = {"recomputed": [*every], "recomputes": "any microbatches of these stages"}
        known["bound_holds_for"] = known["bound_holds_for"] | holds
    return known


def keep(made: MadeProgram, folder: Path) -> None:
    """Write a program into the folder of the run's checkpoints.

    The certificate is written last: without it, no later run takes the program. Raises OSError.
    """
    (folder / CERTIFICATE).unlink(missing_ok=True)
    write_whole(folder / FILE, made.csv)
    write_whole(folder / CERTIFICATE, made.certificate)


def shared(
    args: Arguments,
    store: "torch.distributed.Store",
    *,
    rank: int,
    patience: timedelta,
    make_it: Callable[[], MadeProgram],
) -> Arguments:
    """The arguments with the program that rank 0 makes. Collective over `store`.

    A process that replaces a lost one later takes the program that the other processes have.

    Raises:
        ValueError: rank 0 could not make a program (on every rank, with the reason), or needed longer than `patience`.
    """
    if rank == 0 and not store.check([_KEY]):
        try:
            made = make_it()
        except ValueError as error:
            store.set(_KEY, json.dumps({"error": str(error)}))
            raise
        store.set(_KEY, json.dumps(asdict(made)))
        return with_program(args, made)
    try:
        store.wait([_KEY], patience + timedelta(seconds=2 * args.pipeline_synthesis_seconds))
    except RuntimeError as error:
        raise ValueError(f"rank 0 has made no program within {patience} and twice the seconds of its search") from error
    answer = json.loads(store.get(_KEY))
    if "error" in answer:
        raise ValueError(answer["error"])
    return with_program(args, MadeProgram(**answer | {"lines": tuple(answer["lines"])}))


# --- the stand-ins


def _stand_ins(args: Arguments, *, world_size: int, rank: int = 0) -> list[Arguments]:
    """The validated arguments under each named schedule that can stand in for the job's program."""
    _require_flags(args)
    found, refusal = [], None
    given = args.num_virtual_stages_per_pipeline_rank
    if args.pipeline_profile is None:
        given = given or 1  # without costs no placement is known to be faster
    if args.pipeline_moves == "pair":
        given = 1
    for virtual, name in (*STAND_INS.items(), (1, _WHOLE)):
        if given is not None and given != virtual:
            continue
        like = Arguments(**vars(args))
        like.pipeline_schedule, like.num_virtual_stages_per_pipeline_rank = name, virtual if virtual > 1 else None
        like.given = tuple(each for each in args.given if each not in OF_AUTO)
        try:
            validate_args(like, world_size=world_size, rank=rank)
            if args.pipeline_moves != "none":
                _refuse_moves(like)
        except ValueError as error:
            refusal = refusal or error
        else:
            found.append(like)
    if not found:
        raise refusal
    sizes = set(found[0].batch_sizes.all_num_microbatches())
    if len(sizes) > 1:
        raise ValueError(
            f"--pipeline-schedule {AUTO} makes a program for batches of one size, and this run has batches of "
            f"{min(sizes)} to {max(sizes)} microbatches; leave out what changes them, or name a schedule"
        )
    return found


def _refuse_moves(like: Arguments) -> None:
    """Refuse to move activations that cannot leave their device, as the rules of schedules that move them do."""
    if like.fp8 is not None:
        raise ValueError(
            f"--pipeline-moves {like.pipeline_moves} does not go with --fp8-format {like.fp8}: weights in FP8 would be "
            "moved with activations; leave one of the two out"
        )
    moving = Arguments(**{**vars(like), "moves_activations": True})
    moved_activations(moving)
    freed_activations(moving)


def _require_flags(args: Arguments) -> None:
    named = f"--pipeline-schedule {AUTO}"
    if args.pipeline_program is not None:
        raise ValueError(f"{named} makes a program, and --pipeline-program {args.pipeline_program} is one; give one")
    refuse_what_a_program_says(with_program(args, MadeProgram("", (), "")))
    if args.pipeline_model_parallel_size < 2:
        raise ValueError(f"{named} is for a pipeline; give --pipeline-model-parallel-size 2 or more, or leave it out")
    if args.num_virtual_stages_per_pipeline_rank not in (None, 2):
        raise ValueError(
            f"{named} puts one stage on each rank, or two in a V, and --num-virtual-stages-per-pipeline-rank is "
            f"{args.num_virtual_stages_per_pipeline_rank}; give 2, or leave it out for the faster of the two"
        )
    if args.pipeline_moves != "none" and args.pipeline_memory_limit is None:
        raise ValueError(
            f"--pipeline-moves {args.pipeline_moves} lets activations leave a device where they would not fit, and "
            "nothing says what fits; add --pipeline-memory-limit, or leave it out"
        )
    if args.pipeline_moves != "none" and not weight_policy(args.pipeline_weights).drains:
        raise ValueError(
            f"--pipeline-weights {args.pipeline_weights} makes a program of batches that overlap, in which nothing "
            "moves; leave --pipeline-moves out"
        )
    if args.pipeline_moves == "pair" and args.num_virtual_stages_per_pipeline_rank == 2:
        raise ValueError(
            "--pipeline-moves pair is for one stage on each rank, since in a V the pair stages of each rank lie on the "
            "rank itself; choose host, or leave --num-virtual-stages-per-pipeline-rank out"
        )
    if args.pipeline_recompute and args.pipeline_memory_limit is None:
        raise ValueError(
            f"--pipeline-recompute lets {named} recompute the stages whose activations would not fit, and nothing says "
            "what fits; add --pipeline-memory-limit, or leave it out"
        )
    if args.pipeline_profile is not None and "pipeline_measured_batches" in args.given:
        raise ValueError(
            f"--pipeline-measured-batches {args.pipeline_measured_batches} is for a job that measures its own costs, "
            f"and --pipeline-profile {args.pipeline_profile} has them; leave out one of the two"
        )


# --- the stored program and the log


def _asked(args: Arguments, like: Arguments) -> dict[str, object]:
    """The inputs for which a program is made, as JSON values."""
    digest = None
    try:
        if args.pipeline_profile is not None:
            digest = hashlib.sha256(Path(args.pipeline_profile).read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"--pipeline-profile {args.pipeline_profile} cannot be read ({error.strerror})") from error
    flags = {name_of(name): getattr(args, name) for name in _ASKED}
    return {_PROFILE: digest, "number of replicas": like.data_parallel_size} | flags


def _kept(folder: Path, asked: dict[str, object]) -> tuple[MadeProgram | None, str]:
    """The program that is stored beside a checkpoint; or None, and the reason why another one is made."""
    path = folder / FILE
    try:
        certificate = (folder / CERTIFICATE).read_text(encoding="utf-8")
        known = json.loads(certificate)
        was, digest = dict(known["asked"]), known["csv_sha256"]
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError):
        return None, f"{AUTO}: {folder / CERTIFICATE} does not say what {path} was made for, so another program is made"
    asked = {name: value for name, value in asked.items() if (name, value) != (_PROFILE, None)}  # None: any profile
    other = [name for name, value in asked.items() if was.get(name) != value]
    if other:
        return None, f"{AUTO}: {path} was made with another {', '.join(other)}, so another program is made"
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return None, f"{AUTO}: {path} is not what {CERTIFICATE} was written for, so another program is made"
    return MadeProgram(text, (f"{AUTO}: the program is {path}, as before",), certificate), ""


def _lines(args: Arguments | TrainConfig, best: Synthesis | Steady) -> Iterator[str]:
    told = lines_of if isinstance(best, Synthesis) else lines_of_steady
    yield from told(best, may_recompute=args.pipeline_recompute)
    if args.save is not None:
        yield f"{AUTO}: the program is in {Path(args.save) / FILE}, what is known of it in {CERTIFICATE}"
