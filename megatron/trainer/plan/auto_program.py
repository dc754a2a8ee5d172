"""`--pipeline-schedule auto`: the program that measured costs and a memory limit ask for.

A stand-in is the same job under a named schedule. It tells the stages, their costs and the memory of everything but
activations. `synthesize` searches for the fastest program with the stand-in's placement, for each stand-in, and the
fastest of these is the job's. Rank 0 makes it, and the others read it from the store by which the ranks meet.

A program that was made for a job stands beside its checkpoints (`FILE`, `CERTIFICATE`), and a run that resumes keeps it
where it asks for the same.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.documents.files import write_whole
from megatron.pipeline.simulate.costs import Costs, measured_costs
from megatron.pipeline.simulate.timeline import Timeline
from megatron.pipeline.synthesis import Problem, Synthesis, synthesize
from megatron.planner import Configuration
from megatron.planner.memory.encoder_decoder import activations_of
from megatron.planner.memory.memory import estimate_memory
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.memory.schedule_demand import proved_demand
from megatron.planner.synthesis import STAND_INS, problem_of
from megatron.planner.time.profile import Profile, load_profile
from megatron.planner.time.profiled import ProfiledCosts, shape_of
from megatron.trainer.arguments import resolve_platform, validate_args
from megatron.trainer.arguments.flags.config import MadeProgram, TrainConfig, assumed_vocabulary, padded_vocabulary
from megatron.trainer.arguments.flags.parallel import AUTO
from megatron.trainer.arguments.flags.specification import name_of
from megatron.trainer.arguments.platform import Platform
from megatron.trainer.arguments.rules.schedule import OF_AUTO, refuse_what_a_program_says
from megatron.trainer.plan import from_flags

if TYPE_CHECKING:
    import torch

FILE, CERTIFICATE = "pipeline_program.csv", "pipeline_program.json"
_WHOLE = "flush"
"""The stand-in of jobs whose backwards have no halves."""
_ASKED = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout", "pipeline_memory_limit", "micro_batch_size", "global_batch_size", "num_layers",
    "hidden_size", "ffn_hidden_size", "num_experts", "seq_length", "fp16", "bf16", "recompute_granularity",
    "recompute_method", "recompute_num_layers", "recompute_modules", "use_distributed_optimizer", "optimizer",
)  # fmt: skip
"""Destinations of the flags that decide stages, costs and memory: where they change, a program is made anew."""
_KEY = "program/auto"


def with_program(args: argparse.Namespace, made: MadeProgram) -> argparse.Namespace:
    """Return the arguments of the job whose program was made: as with `--pipeline-program`."""
    dropped = ("pipeline_schedule", "num_virtual_stages_per_pipeline_rank")
    given = tuple(each for each in args.given if each not in dropped)
    values = {"pipeline_schedule": "flush", "pipeline_program": AUTO, "made_program": made, "given": given}
    return argparse.Namespace(**{**vars(args), "num_virtual_stages_per_pipeline_rank": None, **values})


def require(args: argparse.Namespace, *, world_size: int, rank: int = 0) -> None:
    """Raise ValueError for a job for which no program can be made, as far as flags and the file of costs tell."""
    _stand_ins(args, world_size=world_size, rank=rank)
    if rank == 0:
        _costs_reader(args.pipeline_profile)


def make(
    args: argparse.Namespace,
    *,
    world_size: int,
    platform: Platform,
    settled: Callable[[argparse.Namespace], TrainConfig] = TrainConfig.of,
) -> MadeProgram:
    """Make the program of a job, or take the one that stands beside the checkpoint to be loaded.

    Args:
        args: parsed, and not validated.
        platform: the machine that trains.
        settled: makes a run's configuration of arguments for this platform.

    Raises:
        ValueError: flags that do not go together, costs that do not fit the job, or a limit under which none fits.
    """
    likes = _stand_ins(args, world_size=world_size)
    asked = _asked(args, likes[0])
    lines = []
    if args.load is not None and (Path(args.load) / FILE).is_file():
        kept, line = _kept(Path(args.load), asked)
        if kept is not None:
            return kept
        lines.append(line)
    costs_of = _costs_reader(args.pipeline_profile)
    problems, refusal = [], None
    for like in likes:
        if problems and like.pipeline_schedule == _WHOLE:
            break
        try:
            resolve_platform(like, platform)
            problems.append(_problem(settled(like), costs_of, limit=args.pipeline_memory_limit))
        except ValueError as error:
            refusal = refusal or error
    if not problems:
        raise refusal
    found = [synthesize(each, seconds=args.pipeline_synthesis_seconds / len(problems)) for each in problems]
    best = min(found, key=lambda each: each.seconds)
    certificate = json.dumps({"asked": asked} | best.certificate(), indent=1) + "\n"
    return MadeProgram(best.csv, (*lines, *_lines(args, best, min(each.bound for each in found))), certificate)


def keep(made: MadeProgram, folder: Path) -> None:
    """Write a program beside the checkpoints to come; the certificate last, without which it is not taken again.

    Raises OSError.
    """
    (folder / CERTIFICATE).unlink(missing_ok=True)
    write_whole(folder / FILE, made.csv)
    write_whole(folder / CERTIFICATE, made.certificate)


def shared(
    args: argparse.Namespace,
    store: "torch.distributed.Store",
    *,
    rank: int,
    patience: timedelta,
    make_it: Callable[[], MadeProgram],
) -> argparse.Namespace:
    """Return the arguments with the program that rank 0 makes. Collective over `store`.

    Raises:
        ValueError: rank 0 could not make it, on every rank with its reason; or it took longer than `patience`.
    """
    if rank == 0:
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
    return with_program(args, MadeProgram(answer["csv"], tuple(answer["lines"]), answer["certificate"]))


# --- the stand-ins


def _stand_ins(args: argparse.Namespace, *, world_size: int, rank: int = 0) -> list[argparse.Namespace]:
    """Return the validated arguments under each named schedule that the job could have."""
    _require_flags(args)
    found, refusal = [], None
    given = args.num_virtual_stages_per_pipeline_rank
    for virtual, name in (*STAND_INS.items(), (1, _WHOLE)):
        if given is not None and given != virtual:
            continue
        like = argparse.Namespace(**vars(args))
        like.pipeline_schedule, like.num_virtual_stages_per_pipeline_rank = name, virtual if virtual > 1 else None
        like.given = tuple(each for each in args.given if each not in OF_AUTO)
        try:
            validate_args(like, world_size=world_size, rank=rank)
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


def _require_flags(args: argparse.Namespace) -> None:
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
    if args.pipeline_recompute:
        raise ValueError(
            f"--pipeline-recompute does not go with {named}, which keeps all activations of a microbatch; recompute "
            "in layers (--recompute-granularity full), or name a schedule"
        )
    if args.pipeline_profile is None:
        raise ValueError(
            f"{named} has no costs; give --pipeline-profile FILE, which tools/profile_model.py writes, or the "
            "measured.json of a short run with --pipeline-timeline"
        )


# --- costs


@dataclass(frozen=True)
class _Measured:
    """The costs of a run's timeline."""

    path: str
    timeline: Timeline

    def __call__(self, config: TrainConfig, layers: Sequence[int]) -> Costs:
        placement, own = tuple(self.timeline.rank_of_stage), config.schedule.rank_of_stage
        if placement != tuple(own):
            raise ValueError(
                f"--pipeline-profile {self.path} was measured with stages on the ranks {_numbers(placement)}, and the "
                f"job's are on {_numbers(own)}; measure a run of as many ranks, under zb-h1 or zbv"
            )
        costs = measured_costs(self.timeline)
        missing = "halves" if config.schedule.splits_backward else "whole backwards"
        if not any(costs.backward_input if config.schedule.splits_backward else costs.backward):
            raise ValueError(f"--pipeline-profile {self.path} has no times of {missing}; measure a run that has them")
        return costs


@dataclass(frozen=True)
class _Profiled:
    """The costs of a profile's blocks."""

    path: str
    profile: Profile

    def __call__(self, config: TrainConfig, layers: Sequence[int]) -> Costs:
        shape = from_flags.architecture(self.with_vocabulary(config))
        configuration = Configuration(
            tensor=config.tensor_model_parallel_size, pipeline=config.pipeline_model_parallel_size,
            data=config.data_parallel_size, virtual=config.virtual_pipeline_model_parallel_size or 1,
            micro_batch_size=config.micro_batch_size, global_batch_size=config.global_batch_size,
            recompute=_scope(config), schedule=config.pipeline_schedule, layers=tuple(layers),
            sequence_parallel=config.sequence_parallel and config.tensor_model_parallel_size > 1,
            distributed_optimizer=config.use_distributed_optimizer, context=config.context_parallel_size,
            expert=config.expert_model_parallel_size,
        )  # fmt: skip
        try:
            return ProfiledCosts(self.profile, shape, from_flags.software(config)).costs(configuration, layers)
        except ValueError as error:
            raise ValueError(f"--pipeline-profile {self.path}: {error}") from error

    def with_vocabulary(self, config: TrainConfig) -> TrainConfig:
        rows = shape_of(self.profile, num_layers=1, tensor=config.tensor_model_parallel_size).vocabulary_size
        return replace(config, padded_vocab_size=rows)


def _costs_reader(path: str) -> _Measured | _Profiled:
    """Return what reads the costs from a file of either kind."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ValueError(
            f"--pipeline-profile {path} cannot be read ({reason}); give a profile of tools/profile_model.py, or the "
            "measured.json of a run with --pipeline-timeline"
        ) from error
    if isinstance(content, dict) and "machine" in content:
        return _Profiled(path, load_profile(path))
    return _Measured(path, Timeline.load(path))


def _scope(config: TrainConfig) -> RecomputeScope:
    modules = config.recompute_modules or ["core_attn"]
    for scope, is_it in (
        (RecomputeScope.NONE, config.recompute_granularity is None),
        (RecomputeScope.ATTENTION, config.recompute_granularity == "selective" and modules == ["core_attn"]),
        (RecomputeScope.LAYER, config.recompute_granularity == "full" and config.recompute_method == "uniform"
         and config.recompute_num_layers in (None, 1)),
    ):  # fmt: skip
        if is_it:
            return scope
    raise ValueError(
        f"a profile has no times of --recompute-granularity {config.recompute_granularity} with these modules or "
        "layers; recompute core_attn or each layer, or give the measured.json of a run"
    )


# --- the problem


def _problem(config: TrainConfig, costs_of: _Measured | _Profiled, *, limit: float | None) -> Problem:
    """Return the problem that has a stand-in's placement. Sizes are in GiB."""
    from megatron.trainer.models.core_config import transformer_config  # imports torch

    if isinstance(costs_of, _Profiled):
        config = costs_of.with_vocabulary(config)
    else:
        config = replace(config, padded_vocab_size=padded_vocabulary(config, assumed_vocabulary(config)))
    layers = from_flags.layers_of_stages(transformer_config(replace(config, **from_flags.WITHOUT_ENGINE)))
    (num_microbatches,) = set(config.batch_sizes.all_num_microbatches())
    shape, setting = from_flags.architecture(config), from_flags.activation_setting(config)
    schedule = config.schedule
    memory = None
    if limit is not None:
        memory = estimate_memory(
            shape, setting, from_flags.training_state(config), proved_demand(schedule, num_microbatches),
            layers=layers, counts_communicators=from_flags.uses_nccl(config),
        )  # fmt: skip
    costs, activations = costs_of(config, layers), activations_of(shape, setting)
    try:
        return problem_of(schedule, num_microbatches, costs, activations, layers, memory=memory, limit=limit)
    except ValueError as error:
        if limit is None:
            raise
        raise ValueError(f"--pipeline-memory-limit {limit:g}: {error}") from error


# --- what is kept and said


def _asked(args: argparse.Namespace, like: argparse.Namespace) -> dict[str, object]:
    """Return, as JSON's values, what a program was made for."""
    try:
        digest = hashlib.sha256(Path(args.pipeline_profile).read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"--pipeline-profile {args.pipeline_profile} cannot be read ({error.strerror})") from error
    flags = {name_of(name): getattr(args, name) for name in _ASKED}
    return {"the content of --pipeline-profile": digest, "number of replicas": like.data_parallel_size} | flags


def _kept(folder: Path, asked: dict[str, object]) -> tuple[MadeProgram | None, str]:
    """Return the program that stands beside a checkpoint, or None and why another is made."""
    path = folder / FILE
    try:
        certificate = (folder / CERTIFICATE).read_text(encoding="utf-8")
        was = json.loads(certificate)["asked"]
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError):
        return None, f"{AUTO}: {folder / CERTIFICATE} does not say what {path} was made for, so another program is made"
    other = [name for name, value in asked.items() if was.get(name) != value]
    if other:
        return None, f"{AUTO}: {path} was made with another {', '.join(other)}, so another program is made"
    return MadeProgram(text, (f"{AUTO}: the program is {path}, as before",), certificate), ""


def _lines(args: argparse.Namespace, best: Synthesis, bound: float) -> Iterator[str]:
    placement, place = best.problem.rank_of_stage, "one stage on each rank"
    backwards = "" if best.problem.splits else ", whole backwards"
    if len(placement) > best.problem.num_ranks:
        place = f"stages on ranks {_numbers(placement)}"
    yield (
        f"{AUTO}: a batch takes {1000 * best.seconds:.4g} ms in simulation, without reductions and the step (a bubble "
        f"of {best.bubble:.1%}); no program takes less than {1000 * bound:.4g} ms; {place}{backwards}"
    )
    held = ", ".join(f"{each:.3g}" for each in best.held)
    named = "no named order keeps the limits"
    if best.named is not None:
        named = f"{best.named[0]} takes {1000 * best.named[1]:.4g} ms"
    yield f"{AUTO}: activations on the ranks take at most {held} GiB; of named orders with this placement, {named}"
    if args.save is not None:
        yield f"{AUTO}: the program is in {Path(args.save) / FILE}, what is known of it in {CERTIFICATE}"


def _numbers(values: Sequence[int]) -> str:
    return " ".join(map(str, values))
