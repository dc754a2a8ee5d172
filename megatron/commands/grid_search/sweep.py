"""Search for several numbers of GPUs and several sequence lengths: time against cost, with the knee.

    python tools/grid_search.py sweep --cluster A100-80 --gpus 64,128,256,512 --tokens 300B --price-per-gpu-hour 2 \\
        --model-script train_gpt3.sh --output plan
    python tools/grid_search.py sweep --cluster H100 --gpus 8,16,32 --sequence-lengths 2048,8192 @model.flags

Each point is a `search`, of which the best counts, and takes its options. A batch has equally many tokens at each
sequence length, so it has fewer sequences where they are longer. docs/sweep.md says what the knee is.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron.commands.grid_search.search import Searched, docs_url, nearest_miss, refuse_without_price, search_for
from megatron.commands.grid_search.search_inputs import (
    ClusterInput,
    ModelInput,
    add_search_arguments,
    read_cluster,
    read_model,
)
from megatron.commands.grid_search.search_script import remove_script, script_text, write_topology
from megatron.documents import command_line
from megatron.documents.command_line import add_flags, progress_bars
from megatron.documents.files import write_whole
from megatron.documents.flag_types import counts
from megatron.documents.tables import console
from megatron.planner import Cluster
from megatron.planner.job.cluster import MOST
from megatron.planner.search.notes import beside_ranking, sentences_on_layers, sentences_on_weights
from megatron.planner.search.outcome import Sweep, SweepPoint, amount
from megatron.planner.search.table import unvalidated

TAKES_FLAGS = True  # those of the training programs

_IN_SEQUENCES = {  # flags that count sequences, however long, and what to do about them
    "train_samples": "give --train-iters in its place",
    "rampup_batch_size": "leave it out",
    "step_batch_size_schedule": "leave it out",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser.add_argument_group("sweep", "Lists are separated by commas; give one of them or both."),
        ("--gpus", counts, "LIST", "numbers of GPUs: whole nodes, or a part of one; default: the cluster's"),
        ("--sequence-lengths", counts, "LIST", "tokens of a sequence, in place of --seq-length"),
    )
    add_search_arguments(parser)
    add_flags(
        parser.add_argument_group("output"),
        ("--json", None, None, "print one JSON object"),
        ("--output -o", str, "DIR", "write sweep.json, time_cost.png, report.html and a script for each point there"),
    )


_Found = tuple[SweepPoint, Searched | None]
"""A point and its search; None: the search could not be made."""


def run(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    _refuse(options)
    cluster = read_cluster(options).cluster
    refuse_without_price(options, cluster)
    numbers = sorted(set(options.gpus or (cluster.num_gpus,)))
    machines = [_cluster(options, cluster, num_gpus) for num_gpus in numbers]
    lengths = _lengths(options, read_model(options, cluster))
    models = [read_model(each, cluster) for each in lengths]
    if options.output:
        command_line.require_folder(Path(options.output))
    for note in dict.fromkeys(note for model in models for note in model.notes):
        print(f"note: {note}", file=sys.stderr)
    with progress_bars() as progress:
        found = []
        for each, model in zip(lengths, models, strict=True):
            for machine in machines:
                if progress:
                    progress("searches", len(found), len(models) * len(machines))
                found.append(_search(each, model, machine.cluster))
    sweep = Sweep(
        points=tuple(point for point, _ in found),
        tokens=options.tokens,
        currency=None if cluster.price_per_gpu_hour is None else cluster.currency,
    )
    seconds = time.perf_counter() - started
    notes = (*dict.fromkeys(note for each in machines for note in each.notes), *_notes(sweep))
    if options.output:
        _write(Path(options.output), sweep, found, notes)
    if options.json:
        print(json.dumps(_as_dict(sweep, options, notes, seconds)))
    else:
        _print(sweep, notes, seconds)
    if not any(sweep.curves.values()):
        raise ValueError(f"nothing can run at any of the {len(found)} points; the first: {sweep.points[0].reason}")
    return 0


def _refuse(options: argparse.Namespace) -> None:
    """Raise ValueError for options that make no sweep."""
    if options.gpus is None and options.sequence_lengths is None:
        raise ValueError("a sweep goes over something; give --gpus, --sequence-lengths, or both")
    if options.gpus is not None and options.nodes is not None:
        raise ValueError("--nodes does not go with --gpus, which says how many nodes there are; leave it out")
    if options.max_safe_batch is not None and options.tokens is None:
        raise ValueError(
            "with --max-safe-batch batches differ from point to point, so iterations cannot be compared; give --tokens"
        )


def _cluster(options: argparse.Namespace, cluster: Cluster, num_gpus: int) -> ClusterInput:
    """The cluster with `num_gpus` of its GPUs: whole nodes, or a part of one. Raises ValueError for other numbers."""
    if options.gpus is None:
        return read_cluster(options)
    of_node = cluster.topology.nodes[0].gpus
    if num_gpus > of_node and num_gpus % of_node:
        raise ValueError(
            f"--gpus {num_gpus} do not fill nodes of {of_node}; give a multiple of that, or a part of one node"
        )
    per_node, of_host = min(of_node, num_gpus), cluster.gpus_of_hosts[0]
    if per_node > of_host and per_node % of_host:
        raise ValueError(
            f"--gpus {num_gpus} do not fill hosts of {of_host}; give a multiple of that, or a part of one host"
        )
    if num_gpus // per_node > MOST:
        raise ValueError(f"--gpus {num_gpus} is more than any cluster has; give {MOST * per_node} or less")
    changes = {"nodes": num_gpus // per_node, "gpus_per_node": per_node}
    return read_cluster(argparse.Namespace(**vars(options) | changes))


def _lengths(options: argparse.Namespace, model: ModelInput) -> list[argparse.Namespace]:
    """The options at each sequence length: with its flags, and with batches of equally many tokens.

    Raises ValueError if a batch does not divide into sequences of a length, or if other flags count sequences.
    """
    usual, batch = model.job.shape(1).sequence_length, model.job.global_batch_size
    found = []
    for length in sorted(set(options.sequence_lengths or (usual,))):
        if length == usual:
            found.append(options)
            continue
        for name, remedy in _IN_SEQUENCES.items():
            if model.job.gives(name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"--sequence-lengths {length}: {flag} counts sequences, which have {usual} tokens in the model's "
                    f"flags; {remedy}"
                )
        flags = ["--seq-length", str(length), "--max-position-embeddings", str(length)]
        if batch is not None:
            flags += ["--global-batch-size", str(_sequences("the batch", batch, usual, length))]
        safe = options.max_safe_batch
        changes = {
            "flags": [*options.flags, *flags],
            "max_safe_batch": None if safe is None else _sequences("--max-safe-batch", safe, usual, length),
        }
        found.append(argparse.Namespace(**vars(options) | changes))
    return found


def _sequences(what: str, batch: int, usual: int, length: int) -> int:
    if batch * usual % length:
        raise ValueError(
            f"--sequence-lengths {length}: {what}, {batch} sequences of {usual}, has {batch * usual:,} tokens, which "
            f"do not divide into sequences of {length}; give another length or batch"
        )
    return batch * usual // length


def _search(options: argparse.Namespace, model: ModelInput, cluster: Cluster) -> _Found:
    length, searched = model.job.shape(1).sequence_length, None
    try:
        searched = search_for(options, model, cluster)
        best = searched.outcome.best
        reason = "" if best is not None else nearest_miss(searched.outcome).partition("; give")[0]
    except ValueError as error:  # this number of GPUs, say, has none of the parallel sizes that are asked for
        best, reason = None, str(error)
    point = SweepPoint(num_gpus=cluster.num_gpus, sequence_length=length, best=best, reason=reason)
    return point, searched


# --- what is printed and written


def _notes(sweep: Sweep) -> Iterator[str]:
    for length, points in sweep.fronts.items():
        if length in sweep.knees:
            knee, fastest = sweep.knees[length], points[0]
            yield (
                f"sequences of {length}: the knee is at {knee.num_gpus} GPUs, with {knee.time:.3g} {sweep.time_name} "
                f"and {amount(knee.cost)} {sweep.cost_name}; {fastest.num_gpus} take {fastest.time / knee.time:.2g} "
                f"times as long for {fastest.cost / knee.cost:.3g} times the cost"
            )
        elif len(points) < 3:
            yield f"sequences of {length}: a knee takes three points that are each faster or cheaper than the others"
        else:
            yield f"sequences of {length}: the curve does not bend, so it has no knee"
    best = [point.best for point in sweep.points if point.best is not None]
    yield from (*sentences_on_weights(best), *sentences_on_layers(best), *unvalidated(best))


def _print(sweep: Sweep, notes: tuple[str, ...], seconds: float) -> None:
    from megatron.planner.search.table import sweep_table

    out = console()
    out.print(f"{len(sweep.points)} searches, {seconds:.1f} s\n", markup=False)
    out.print(sweep_table(sweep, plain=not sys.stdout.isatty()))
    for note in notes:
        out.print(f"\nnote: {note}", markup=False, soft_wrap=True)


def _as_dict(sweep: Sweep, options: argparse.Namespace, notes: tuple[str, ...], seconds: float) -> dict:
    from megatron.planner.search.table import sweep_records

    return {
        "objective": options.objective,
        "tokens": sweep.tokens,
        "time_unit": sweep.time_name,
        "cost_unit": sweep.cost_name,
        "knees": {str(length): point.num_gpus for length, point in sweep.knees.items()},
        "points": sweep_records(sweep),
        "notes": notes,
        "seconds": seconds,
    }


def _write(folder: Path, sweep: Sweep, found: list[_Found], notes: tuple[str, ...]) -> None:
    from megatron.documents.picture import as_png
    from megatron.planner.search.report import draw_sweep, sweep_page
    from megatron.planner.search.table import sweep_records

    points = sweep.points
    gpus = [each.num_gpus for each in points]
    title = f"{len(points)} searches: {min(gpus)} to {max(gpus)} GPUs" if len(set(gpus)) > 1 else f"{gpus[0]} GPUs"
    command = shlex.join(["tools/grid_search.py", *sys.argv[1:]])
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("best_*.sh"):
        remove_script(path)
    scripts, topologies = set(), set()
    for point, searched in found:
        best = point.best
        if best is not None:
            name = f"best_{point.num_gpus}_gpus_{point.sequence_length}_tokens.sh"
            job, cluster = searched.model.job, searched.cluster
            topology = f"topology_{cluster.num_gpus}_gpus.yaml"
            others = [*filter(None, [beside_ranking(searched.outcome)])]
            text = script_text(job, best, cluster, command=command, others=others, topology=topology)
            write_whole(folder / name, text)
            scripts.add(name)
            if best.choice.rank_mapping == "optimized":
                write_topology(folder / topology, cluster)
                topologies.add(topology)
    write_whole(folder / "sweep.json", json.dumps(sweep_records(sweep), indent=1) + "\n")
    write_whole(folder / "time_cost.png", as_png(draw_sweep(sweep, title=title)))
    summary = ["Each row is the best of a search; all batches have equally many tokens."]
    write_whole(folder / "report.html", sweep_page(sweep, title=title, summary=summary, notes=notes, docs=docs_url()))
    written = ["sweep.json", "time_cost.png", "report.html"]
    written += [f"{len(scripts)} x best_N_gpus_L_tokens.sh"] if scripts else []
    written += [f"{len(topologies)} x topology_N_gpus.yaml"] if topologies else []
    print(f"wrote {folder}/: {', '.join(written)}", file=sys.stderr)
