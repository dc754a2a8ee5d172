"""Measure a model's blocks on this machine, and write a profile that the planner uses in place of its model of time.

    python tools/profile_model.py --output profile.json --micro-batch-sizes 1,2,4 --tensor-sizes 1,2 \\
        --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 ...
    python tools/profile_model.py --output profile.json --model-script train_gpt.sh

The model is given by flags of pretrain_gpt.py or pretrain_bert.py anywhere on the command line, by files of such flags
(@FILE), by a shell script that runs one of these programs, or by a YAML file. Degrees, batches, schedule and outputs
among the flags are ignored. The command times stages (from which embedding, layer and head follow), the optimizer's
step, transfers between processes and all-reduces; and for weights on the host, the copies from and to the host and the
host's optimizer. If processes share a processor, times are measured with one and with several processes at work.
docs/profiling.md describes the use of the profile.

Exit status: 0; 1 if something is wrong or cannot be measured; 2 if the command line is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron.commands.grid_search.search_inputs import add_model_arguments, read_argv, some_of
from megatron.documents import command_line
from megatron.documents.command_line import add_flags
from megatron.documents.flag_types import count, counts, usual_threads
from megatron.documents.tables import console, lined_table
from megatron.pipeline.program.weight_policies import FLUSH, TWO_BW
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.profile import Profile, Spread, StageTime
from megatron.trainer.plan.command import missing_flags, model_argv
from megatron.trainer.profile.session import ProfilingSession

_POLICIES = {policy.name: policy for policy in (FLUSH, TWO_BW)}
_SCOPES = {scope.value: scope for scope in RecomputeScope}


def main(arguments: Sequence[str] | None = None) -> int:
    return command_line.run(_run, _parse(arguments))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.parser_of(__doc__)
    add_flags(
        parser,
        ("--output", Path, None, "the profile, a JSON file", {"required": True}),
        ("--processes", count, None, "by default as many as GPUs, or 2 without one"),
        ("--threads", count, "N",
         "of each process on a CPU; runs have to have as many (default: OMP_NUM_THREADS, or 1)",
         {"default": usual_threads()}),
        ("--tensor-sizes", counts, "N,N", "tensor degrees, with commas (default: 1)", {"default": (1,)}),
        ("--micro-batch-sizes", counts, "N,N", "microbatch sizes, with commas (default: 1)", {"default": (1,)}),
        ("--recompute", some_of(_SCOPES, _SCOPES.get), "SCOPE,SCOPE", "of none, attention and layer (default: none)",
         {"default": (RecomputeScope.NONE,)}),
        ("--weights", some_of(_POLICIES, _POLICIES.get), "POLICY,POLICY",
         "weight policies whose updates are timed (default: flush,2bw)", {"default": tuple(_POLICIES.values())}),
        ("--layers", count, "N", "in the stages that are timed (default: 1 3); their difference gives a layer",
         {"nargs": 2, "default": (1, 3)}),
        ("--iterations", count, None, "of each block (default: 120)", {"default": 120}),
        ("--rounds", count, None, "that these are spread over (default: 2)", {"default": 2}),
    )  # fmt: skip
    add_model_arguments(parser)
    options, rest = parser.parse_known_args(arguments)
    options.flags = [word for word in rest if word != "--"]
    return options


def _run(options: argparse.Namespace) -> int:
    from megatron import backend  # imports torch

    session = _session(options)
    command_line.require_file(options.output)  # refused before the measurement, which takes half a minute to begin
    backend.require_core()  # the processes that measure need it
    if missing := missing_flags(session.argv, architecture=session.architecture, iterations=session.iterations):
        raise ValueError(f"nothing can be measured: {'; '.join(missing)}")
    with command_line.unwinding("no profile is written"):
        profile = _measure(session)
    profile.save(options.output)
    _show(profile)
    print(f"Profile: {options.output}")
    return 0


def _session(options: argparse.Namespace) -> ProfilingSession:
    argv, architecture, notes = read_argv(options)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return ProfilingSession(
        architecture=architecture,
        argv=model_argv(argv, architecture=architecture),
        sequence_parallel="--sequence-parallel" in argv,
        processes=_processes(options.processes),
        threads=options.threads,
        tensors=tuple(dict.fromkeys(options.tensor_sizes)),
        micro_batch_sizes=tuple(sorted(set(options.micro_batch_sizes))),
        scopes=options.recompute,
        weights=options.weights,
        layers=tuple(options.layers),
        iterations=options.iterations,
        rounds=options.rounds,
    )


def _processes(wanted: int | None) -> int:
    """The number of processes: by default the number of GPUs, or 2 without a GPU.

    Raises ValueError if processes would share a GPU.
    """
    from megatron import backend  # imports torch

    if not backend.is_cuda():
        return wanted or 2
    import torch

    num_devices = torch.cuda.device_count()
    if wanted is not None and wanted > num_devices:
        raise ValueError(f"--processes {wanted} are more than the {num_devices} GPUs here; give {num_devices} or fewer")
    return wanted or num_devices


def _measure(session: ProfilingSession) -> Profile:
    errors = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=errors, disable=not errors.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            if not errors.is_terminal:
                print(f"{done}/{total}: {what}", file=sys.stderr, flush=True)

        return session.run(progress)


def _show(profile: Profile) -> None:
    """Print the measured times: medians, and the range in which 80 % of the times lie."""
    out, machine = console(200, highlight=True), profile.machine
    out.print(
        f"{machine.device}, {profile.processes} processes of {machine.threads} threads, torch {machine.torch}, "
        f"{profile.dtype}, {profile.transformer_impl} layers"
    )
    halves = ("I", "W", "kept between (MiB)") if any(each.halves for each in profile.stages) else ()
    columns = ("stage", "layers", "t", "microbatch", "recompute", "at work", "forward", "backward", *halves)
    rows = [
        (
            each.place.value, str(each.num_layers), str(each.tensor), str(each.micro_batch_size),
            each.recompute.value, str(each.working), _milliseconds(each.forward), _milliseconds(each.backward),
            *_halves(each),
        )
        for each in profile.stages
    ]  # fmt: skip
    title = "milliseconds: median (low-high, eight of ten)"
    out.print(lined_table(title, columns, rows, left=("stage", "recompute")))
    columns = ("stage", "layers", "parameters", "t", "weights", "at work", "zeroing", "norm", "step", "ns a parameter")
    rows = [
        (
            each.place.value, str(each.num_layers), f"{each.num_parameters:,}", str(each.tensor), each.weights,
            str(each.working), _milliseconds(each.zero), _milliseconds(each.norm), _milliseconds(each.step),
            f"{1e9 * each.seconds() / each.num_parameters:.2f}",
        )
        for each in profile.updates
    ]  # fmt: skip
    out.print(lined_table("a batch's update, milliseconds", columns, rows, left=("stage", "weights")))
    groups = dict.fromkeys(each.ranks for each in profile.all_reduces)
    columns = ("bytes", "transfer", *(f"all-reduce over {ranks}" for ranks in groups))
    rows = []
    for each in profile.transfers:
        reduces = [other for other in profile.all_reduces if other.num_bytes == each.num_bytes]
        times = (each.seconds, *(other.seconds for other in reduces))
        rows.append((f"{each.num_bytes:,}", *map(_milliseconds, times)))
    if rows:
        out.print(lined_table("between processes, milliseconds", columns, rows, left=()))
    _show_host(profile, out)


def _halves(stage: StageTime) -> tuple[str, ...]:
    if stage.halves is None:
        return ()
    kept = f"{stage.deferred_bytes / 2**20:.3g}"
    return _milliseconds(stage.backward_input), _milliseconds(stage.backward_weight), kept


def _show_host(profile: Profile, out: Console) -> None:
    rates = {
        (each.num_bytes, each.working, each.direction): each.num_bytes / each.seconds.median / 1e9
        for each in profile.copies
    }
    directions, rows = ("to device", "from device"), []
    for size, working in dict.fromkeys((each.num_bytes, each.working) for each in profile.copies):
        rows.append((f"{size:,}", str(working), *(f"{rates[size, working, each]:.3g}" for each in directions)))
    title = "between device and host, GB/s of one process (from the median)"
    out.print(lined_table(title, ("bytes", "at work", *directions), rows, left=()))
    for each in profile.host_updates:
        each_takes = f"{1e9 * each.seconds.median / each.num_parameters:.3g} ns a parameter ({each.num_parameters:,})"
        out.print(f"host's AdamW, {each.kernel}, {each.working} at work: {each_takes}")


def _milliseconds(spread: Spread) -> str:
    return f"{1e3 * spread.median:.3g} ({1e3 * spread.low:.3g}-{1e3 * spread.high:.3g})"
