"""Search degrees, microbatch, schedule, recompute scope and rank mapping for the fastest training of a model.

    python tools/grid_search.py search --cluster A100-80 --nodes 6 --global-batch-size 192 \\
        --num-layers 84 --hidden-size 11520 --num-attention-heads 120 --seq-length 2048 --vocab-size 51200
    python tools/grid_search.py search --cluster my_cluster.yaml --model-script train_gpt3.sh --output plan
    python tools/grid_search.py search --cluster V100-16 --nodes 4 --model-yaml bert.yaml --max-safe-batch 1024

The model is given by flags of pretrain_gpt.py or pretrain_bert.py, in any place of the command line, by files of them
(@FILE), by a shell script that runs one of these programs, or by a YAML file. Flags that the search chooses (degrees,
microbatch, schedule, ...) are set aside. docs/grid_search.md explains the result.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.commands.grid_search.search_inputs import (
    ModelInput,
    add_search_arguments,
    read_cluster,
    read_model,
)
from megatron.commands.grid_search.search_script import PROGRAM, ROOT, remove_script, script_text, write_topology
from megatron.documents import command_line, counted
from megatron.documents.command_line import add_flags, progress_bars
from megatron.documents.files import write_whole
from megatron.documents.flag_types import count, positive
from megatron.documents.tables import console
from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.planner import Architecture, Cluster
from megatron.planner.job.refusals import refuse_recipe
from megatron.planner.planner import Planner
from megatron.planner.published.interval import Intervals
from megatron.planner.search import SCOPES, Outcome, Space, Training, offered, search
from megatron.planner.search.comparisons import note_on_fewer_nodes
from megatron.planner.search.notes import (
    beside_ranking,
    notes_on_hosted,
    sentences_on_layers,
    sentences_on_weights,
    without_pipeline_record,
    without_pipeline_sentence,
)
from megatron.planner.search.outcome import Budget
from megatron.planner.search.search import Progress
from megatron.planner.search.space import delayed, offer, schedules_on_device
from megatron.planner.search.table import expectation, kept_record, unvalidated, write_csv, write_jsonl
from megatron.planner.time.calibration import load_calibration
from megatron.planner.time.first_principles import FirstPrinciples
from megatron.planner.time.profile import Profile, load_profile
from megatron.planner.time.profiled import ProfiledCosts, shape_of, vocab_size_of
from megatron.processes import num_processors
from megatron.trainer.plan.command import Job

if TYPE_CHECKING:
    from megatron.planner.search.synthesized import Made

TAKES_FLAGS = True  # those of the training programs
_MOST_SEQUENCES = 10_000_000  # the most sequences of a batch, since all divisors of their number are sought


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The outcome of a search, and its inputs. `planner_of`: tensor parallel size -> planner."""

    outcome: Outcome
    planner_of: Callable[[int], Planner]
    model: ModelInput
    cluster: Cluster
    space: Space


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_search_arguments(parser)
    add_flags(
        parser,
        ("--auto", positive, "SECONDS", "search so long for programs that are faster than the best named schedules "
         "(docs/synthesis.md)"),
        ("--auto-moves", str, None, "with --auto: where saved activations may wait if a device has no room for them "
         "(default: %(default)s)", {"choices": ("none", "host", "pair", "best"), "default": "none"}),
    )  # fmt: skip
    add_flags(
        parser.add_argument_group("output"),
        ("--top", count, "N", "rows of the table (default: %(default)s)", {"default": 10}),
        ("--json", None, None, "print one JSON object"),
        ("--output -o", str, "DIR",
         "write configurations.jsonl and .csv, throughput_memory.png, report.html and best.sh there"),
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    if options.auto is not None and options.objective == "memory":
        raise ValueError(
            "--auto looks for faster programs, and --objective memory for less memory; leave one of them out"
        )
    if options.auto is None and options.auto_moves != "none":
        raise ValueError(f"--auto-moves {options.auto_moves} is for programs; add --auto SECONDS, or leave it out")
    machines = read_cluster(options)
    cluster = machines.cluster
    model = read_model(options, cluster)
    if options.output:
        command_line.require_folder(Path(options.output))
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr)
    with progress_bars() as progress:
        found = search_for(options, model, cluster, progress)
        outcome = found.outcome
        fewer = note_on_fewer_nodes(
            outcome, cluster, lambda part: search_for(options, model, part, progress).outcome.best
        )
    made = of_program = None
    if options.auto is not None and outcome.best is not None:
        from megatron.planner.search.synthesized import sentence, synthesized  # other searches start without it

        made = synthesized(
            outcome.ranking, found.planner_of, seconds=options.auto, refuse=model.job.refusal, moves=options.auto_moves
        )
        of_program = sentence(made, outcome.best)
        if made is not None and made.kept.estimate.seconds >= outcome.best.estimate.seconds:
            made = None
    notes = (*machines.notes, *filter(None, [fewer, of_program]), *_notes(outcome))
    seconds = time.perf_counter() - started
    if options.output:
        _write(Path(options.output), found, notes, made)
    if options.json:
        print(json.dumps(_as_dict(outcome, options.top, notes, seconds)))
    else:
        _print(outcome, options.top, notes, seconds)
    if outcome.best is None:
        said = filter(
            None, (beside_ranking(outcome), nearest_miss(outcome), without_pipeline_sentence(outcome, has_script=False))
        )
        which = (
            "the only choice cannot" if len(outcome.rejected) == 1 else f"none of {len(outcome.rejected)} choices can"
        )
        raise ValueError(f"{which} run; {'; '.join(said)}")
    return 0


def search_for(
    options: argparse.Namespace, model: ModelInput, cluster: Cluster, progress: Progress | None = None
) -> Searched:
    """Run the search that the options ask for, of one model on one cluster. Raises ValueError for unfit options."""
    job = model.job
    refuse_without_price(options, cluster)
    refuse_recipe(job.fp8_recipe, cluster.gpu, "--fp8-recipe")
    space = space_of(options, model, cluster)
    _refuse_shared(options, space, job)
    calibration = load_calibration(options.calibrated_on)
    intervals = (
        Intervals.of_calibration(calibration.name, calibration.constants, options.residuals)
        if options.predict_from is None
        else Intervals.of_profile()
    )
    planner_of = planners_for(options, model, cluster)
    training = Training(
        clips_gradients=job.clips_gradients, scales_loss=job.scales_loss, saves_scores=not job.software.flash_attention,
        fuses_softmax=job.software.fuses_softmax,
        saves_scores_with_halves=not (job.software.with_halves or job.software).flash_attention,
    )  # fmt: skip
    outcome = search(
        space, planner_of, training, num_simulated=options.simulate, refuse=job.refusal, progress=progress,
        objective=options.objective, num_processes=num_processors(),
    )  # fmt: skip
    budget = Budget(
        num_gpus=cluster.num_gpus, sequence_length=planner_of(1).model.sequence_length, tokens=options.tokens,
        price_per_gpu_hour=cluster.price_per_gpu_hour, currency=cluster.currency,
    )  # fmt: skip
    outcome = outcome.with_prices(
        lambda each: intervals.of(each.estimate, planner_of(each.choice.tensor).model, cluster, job.software), budget
    )
    return Searched(outcome=outcome, planner_of=planner_of, model=model, cluster=cluster, space=space)


def planners_for(options: argparse.Namespace, model: ModelInput, cluster: Cluster) -> Callable[[int], Planner]:
    """Tensor parallel size -> planner; a function that makes each only once. Raises ValueError for a wrong file."""
    job, calibration = model.job, load_calibration(options.calibrated_on)
    profile = None if options.predict_from is None else load_profile(options.predict_from)

    @cache
    def planner_of(tensor: int) -> Planner:
        shape = _shape(job, profile, tensor)
        cost_model = (
            FirstPrinciples(shape, cluster, job.software, calibration.fitted)
            if profile is None
            else ProfiledCosts(profile, shape, job.software)
        )
        return Planner(shape, cluster, cost_model, job.software)

    return planner_of


def refuse_without_price(options: argparse.Namespace, cluster: Cluster) -> None:
    """Raise ValueError if the objective is cost and the cluster has no price."""
    if options.objective == "cost" and cluster.price_per_gpu_hour is None:
        raise ValueError(
            "--objective cost needs a price; give --price-per-gpu-hour, or price_per_gpu_hour in the cluster's file"
        )


def _refuse_shared(options: argparse.Namespace, space: Space, job: Job) -> None:
    """Raise ValueError if a profile has to predict shared sequences or experts."""
    if options.predict_from and (space.context != (1,) or job.has_experts):
        raise ValueError("--predict-from supports neither context parallelism nor experts; leave it, or these, out")


def _shape(job: Job, profile: Profile | None, tensor: int) -> Architecture:
    """The shape of the model. Its vocabulary is the profile's, which the tokenizer gave, unless the user gives another.

    Raises ValueError for a model with parts that no profile has.
    """
    shape = job.shape(tensor)
    if profile is not None and shape.further is not None:
        raise ValueError("--predict-from has no multi-token prediction; leave it, or --mtp-num-layers, out")
    if profile is None or job.vocab_size not in (None, vocab_size_of(profile)):
        return shape
    rows = shape_of(profile, num_layers=shape.num_layers, tensor=tensor).vocabulary_size
    return replace(shape, vocabulary_size=rows)


def space_of(options: argparse.Namespace, model: ModelInput, cluster: Cluster) -> Space:
    batch = model.job.global_batch_size or options.max_safe_batch
    if batch is None:
        raise ValueError("the batch is not known; give --global-batch-size, or --max-safe-batch")
    least = model.job.global_batch_size or 1
    for flag, number in (("--global-batch-size", least), ("--max-safe-batch", options.max_safe_batch)):
        if number is not None and number > _MOST_SEQUENCES:
            raise ValueError(f"{flag} {number} is more than any batch has; give {_MOST_SEQUENCES} or less")
    split = {"yes": (True,), "no": (False,), "both": (True, False)}[options.distributed_optimizer]
    return Space(
        num_gpus=cluster.num_gpus,
        gpus_per_node=cluster.topology.nodes[0].gpus,
        global_batch_size=least,
        safe_batch_size=options.max_safe_batch,
        schedules=options.schedules or _schedules(cluster),
        unasked=_unasked(options, model.job, cluster),
        tensor=options.tensor,
        pipeline=options.pipeline,
        virtual=options.virtual,
        micro_batch_sizes=options.microbatches,
        scopes=tuple(scope for scope in SCOPES if scope.value in options.recompute),
        distributed_optimizer=split,
        rank_mappings=_rank_mappings(options.rank_mappings, cluster),
        early_stopping=not options.no_early_stopping and options.objective != "memory",
        needs_fused_softmax=options.require_fused_softmax,
        avoids_pressure=options.avoid_pressure,
        predictions=model.job.predictions,
        context=tuple(dict.fromkeys(options.context_parallel_sizes or (model.job.priced.context,))),
        expert=tuple(dict.fromkeys(options.expert_parallel_sizes or (model.job.priced.expert,))),
        expert_tensor=model.job.priced.expert_tensor,
    )


def _rank_mappings(names: tuple[str, ...], cluster: Cluster) -> tuple[str, ...]:
    """The rank mappings that can run on the cluster: without `optimized` if nodes have several hosts.

    The topology file of an optimized mapping names hosts, and cannot describe links between the hosts of a node. Raises
    ValueError if no mapping remains.
    """
    if len(cluster.gpus_of_hosts) == len(cluster.topology.nodes):
        return names
    rest = tuple(name for name in names if name != "optimized")
    if not rest:
        raise ValueError(
            "--rank-mappings optimized needs a node for each host, and nodes of the cluster are several hosts; give "
            "standard or pair-adjacent"
        )
    return rest


def _schedules(cluster: Cluster) -> tuple[str, ...]:
    """The schedules that a search tries by default; those with weights on the host only if hosts' memory is known."""
    if cluster.host_memory_gib is None:
        return schedules_on_device()
    return tuple(name for name, preset in offered().items() if preset.by_default)


def _unasked(options: argparse.Namespace, job: Job, cluster: Cluster) -> tuple[str, ...]:
    """The default schedules that delay weights, unasked. --2bw-provisional asks for those with the weights of 2bw."""
    names = () if options.schedules else delayed(_schedules(cluster))
    return tuple(name for name in names if not job.predictions or offer(name).policy != TWO_BW)


# --- what is printed and written


def _print(outcome: Outcome, top: int, notes: tuple[str, ...], seconds: float) -> None:
    from megatron.planner.search.table import best_table, reasons

    plain, out = not sys.stdout.isatty(), console()

    def say(text: str, style: str = "") -> None:
        out.print(text, style="" if plain else style, markup=False, soft_wrap=True)

    say(f"{_numbers(outcome)}, {seconds:.1f} s")
    if outcome.kept:
        say(f"\nthe {outcome.superlative} (~: estimated; the others were simulated)", "bold")
        out.print(best_table(outcome, outcome.rows[: min(top, len(outcome.ranking))], plain=plain))
        for line in expectation(outcome.best) if outcome.best else ():
            say(f"the best: {line}")
        say(f"\nthe {outcome.superlative} of each schedule", "bold")
        out.print(best_table(outcome, outcome.best_of_schedules(), plain=plain))
        easy = outcome.best_without_pressure
        if outcome.best and outcome.best.estimate.under_pressure and easy is not None:
            say(f"\nthe {outcome.superlative} that no allocator slows down (--avoid-pressure keeps only such)", "bold")
            out.print(best_table(outcome, [easy], plain=plain))
    for note in notes:
        say(f"\nnote: {note}")
    say("\nwhy choices were rejected", "bold")
    for reason, number in reasons(outcome.rejected, 12):
        say(f"{number:6}  {reason}")


def _numbers(outcome: Outcome) -> str:
    kept, rejected = len(outcome.kept), len(outcome.rejected)
    fit, were = "fits" if kept == 1 else "fit", "was" if rejected == 1 else "were"
    return f"{counted(kept, 'configuration')} {fit}, {counted(rejected, 'choice')} {were} rejected"


def _notes(outcome: Outcome) -> tuple[str, ...]:
    others = without_pipeline_sentence(outcome, has_script=outcome.best is not None)
    fixed = "all GPUs are used, so cost ranks as time; `grid_search sweep --gpus` compares numbers of GPUs"
    return (
        *filter(None, [beside_ranking(outcome)]),
        *sentences_on_weights(outcome.kept),
        *sentences_on_layers(outcome.kept),
        *notes_on_hosted(outcome),
        *unvalidated(outcome.kept),
        *((fixed,) if outcome.objective == "cost" else ()),
        *filter(None, [others]),
    )


def _as_dict(outcome: Outcome, top: int, notes: tuple[str, ...], seconds: float) -> dict:
    return {
        "num_kept": len(outcome.kept),
        "num_rejected": len(outcome.rejected),
        "objective": outcome.objective,
        "seconds": seconds,
        "notes": notes,
        "without_pipeline": without_pipeline_record(outcome.without_pipeline),
        "best": [kept_record(each, rank) for rank, each in enumerate(outcome.ranking[:top], start=1)],
        "beside": [
            kept_record(each, rank, outcome.gain(each)) for rank, each in outcome.best_of_schedules() if rank is None
        ],
    }


def nearest_miss(outcome: Outcome) -> str:
    near = [each for each in outcome.rejected if each.missing_gib is not None]
    if not near:
        return (
            f"the first is rejected since {outcome.rejected[0].reason}" if outcome.rejected else "none was considered"
        )
    each = min(near, key=lambda rejected: rejected.missing_gib)
    parts = {name: value for name, value in vars(each.choice).items() if value is not None}
    where = ", ".join(f"{name} {getattr(value, 'value', value)}" for name, value in parts.items())
    return f"the nearest ({where}): {each.reason}; give more GPUs, or GPUs with more memory"


def docs_url() -> str | None:
    """The URL of this checkout's documentation; None for an installed package."""
    folder = ROOT / "docs"
    return folder.as_uri() if (folder / "convergence.md").is_file() else None


def _write(folder: Path, found: Searched, notes: tuple[str, ...], made: "Made | None") -> None:
    from megatron.documents.picture import as_png
    from megatron.planner.search.report import draw_outcome, html_report

    outcome, cluster, job, space = found.outcome, found.cluster, found.model.job, found.space
    title = f"{job.program.removesuffix('.py').removeprefix('pretrain_').upper()} on {cluster.num_gpus} x {cluster.gpu}"
    shape = found.planner_of(1).model
    summary = [
        f"{shape.num_layers} layers, hidden size {shape.hidden_size}, {shape.num_attention_heads} heads, sequences of "
        f"{shape.sequence_length}; " + (
            f"batches of {space.global_batch_size}" if space.safe_batch_size is None
            else f"batches of {space.global_batch_size} to {space.safe_batch_size}"
        ),
        f"{_numbers(outcome)}.",
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(outcome, folder / "configurations.jsonl")
    write_csv(outcome, folder / "configurations.csv")
    script = None
    remove_script(folder / "best.sh")
    if outcome.best is not None:
        command = shlex.join(["tools/grid_search.py", *sys.argv[1:]])
        others = [
            beside_ranking(outcome),
            *sentences_on_layers(outcome.kept),
            without_pipeline_sentence(outcome, has_script=True),
        ]
        best, program = (outcome.best, None) if made is None else (made.kept, PROGRAM)
        script = script_text(
            job, best, cluster, command=command, others=[*filter(None, others)], program=program,
            recomputes=made is not None and made.found.program.recompute,
        )  # fmt: skip
        if made is not None:
            write_whole(folder / PROGRAM, made.found.csv)
        write_whole(folder / "best.sh", script)
        if any(each.choice.rank_mapping == "optimized" for each in outcome.kept):
            write_topology(folder / "topology.yaml", cluster)
    figure = draw_outcome(outcome, memory_gib=cluster.device.memory_gib, title=title)
    write_whole(folder / "throughput_memory.png", as_png(figure))
    page = html_report(
        outcome, found.planner_of, title=title, summary=summary, notes=notes, docs=docs_url(), script=script
    )
    write_whole(folder / "report.html", page)
    print(f"wrote {folder}/: configurations.jsonl, configurations.csv, throughput_memory.png, report.html"
          + (", best.sh" if script else "") + (f", {PROGRAM}" if made else ""), file=sys.stderr)  # fmt: skip
