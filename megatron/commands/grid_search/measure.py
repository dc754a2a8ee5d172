"""Run configurations for a few iterations each, and put what they took beside what was predicted.

    grid_search.py measure --output runs --search plan/configurations.jsonl --best 3 --model-script train_gpt.sh
    grid_search.py measure --output runs --predict-from profile.json --num-layers 24 --hidden-size 1024 ... \\
        --configuration pipeline=2,micro_batch_size=2,global_batch_size=16,schedule=2bw

The model is given as to `search`; what a configuration decides is left out among its flags. Every run has a directory
in --output with its command, its log and its metrics; results.jsonl there keeps the results, one by one. The same
command goes on where it was killed, and runs nothing twice. A run that fails is classified: out of memory, hang, or
error, with the failing rank's sentence. Flags that every run would miss are told all at once, before the first.

Configurations that need more processes than this machine takes (--processes) are for a cluster: --write-scripts writes
a script for each, and --collect takes their results once they have run.
"""

import argparse
import os
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from megatron.commands.grid_search.search_inputs import add_model_arguments, read_argv
from megatron.commands.grid_search.trial_results import (
    Result,
    ResultsFile,
    Status,
    TrialEntry,
    differences,
    draw,
    predicted_seconds,
    read_entries,
    table_of,
)
from megatron.commands.grid_search.trial_runs import Runs, collect, measure
from megatron.documents import command_line
from megatron.documents.command_line import add_flags
from megatron.documents.flag_types import count, positive, usual_threads
from megatron.documents.tables import console
from megatron.planner.job.configuration import KINDS, Configuration
from megatron.planner.time.profile import Profile, load_profile
from megatron.trainer import programs
from megatron.trainer.arguments import parse_args
from megatron.trainer.plan.command import SEARCHED, missing_flags, model_argv

ROOT = Path(__file__).resolve().parents[3]
TAKES_FLAGS = True  # those of the training programs
RESULTS = "results.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser.add_argument_group("what to run"),
        ("--search", Path, "FILE", "JSONL of `grid_search.py search`"),
        ("--best", count, "K", "of --search (default: 3)", {"default": 3}),
        ("--all", None, None, "all of --search"),
        ("--configuration", _configuration, "NAME=VALUE,...",
         "one more, by the fields of a configuration (layers=3+1); may be given several times",
         {"action": "append", "default": []}),
        ("--predict-from", Path, "FILE", "a profile; predictions are made from it instead of taken from --search"),
    )  # fmt: skip
    add_model_arguments(parser.add_argument_group("model", "Besides, flags of pretrain_gpt.py or pretrain_bert.py."))
    add_flags(
        parser.add_argument_group("how to run"),
        ("--output", Path, None, "directory for commands, logs, metrics and results", {"required": True}),
        ("--iterations", count, "N", "of a run (default: 10)", {"default": 10}),
        ("--warmup", int, "N", "of them, not measured (default: 3)", {"default": 3}),
        ("--timeout", positive, None, "seconds of a run (default: 600)", {"default": 600.0}),
        ("--threads", count, "N", "of each rank on a CPU (default: OMP_NUM_THREADS, or 1)",
         {"default": usual_threads()}),
        ("--processes", count, "N", "that this machine takes (default: as many as GPUs, or else cores)"),
        ("--again", None, None, "run those that failed before once more"),
    )  # fmt: skip
    cluster = parser.add_argument_group("on a cluster").add_mutually_exclusive_group()
    cluster.add_argument("--write-scripts", type=count, metavar="GPUS_PER_NODE",
                         help="write a script for each instead of running it")  # fmt: skip
    cluster.add_argument("--collect", action="store_true", help="take the results of scripts that have run")
    parser.add_argument("--json", action="store_true", help="print results as JSON lines instead of a table")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="predicted against measured")


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if a run failed."""
    argv, architecture, notes = read_argv(options)
    command_line.require_folder(options.output)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    runs = Runs(
        program=_program(SEARCHED[architecture][0]), argv=model_argv(argv, architecture=architecture),
        output=options.output, iterations=options.iterations, warmup=options.warmup, timeout=options.timeout,
        threads=options.threads, topology=_topology(argv, architecture, options.search),
    )  # fmt: skip
    entries = _entries(options, runs)
    missing = missing_flags(runs.argv, architecture=architecture, iterations=options.iterations)
    results = ResultsFile(options.output / RESULTS)
    results.refuse_others(entries, runs.settings)
    assumes = options.search is not None and options.predict_from is None and not {"--bf16", "--fp16"} & set(runs.argv)
    if assumes and (options.write_scripts or _is_cuda()):
        print("note: no precision is given, so runs compute in FP32; `search` assumes what suits the GPU, and its "
              "predictions are then for --bf16 or --fp16", file=sys.stderr)  # fmt: skip
    if options.write_scripts:
        for text in missing:
            print(f"note: runs will refuse their flags: {text}", file=sys.stderr)
        for entry in entries:
            print(runs.write_script(entry, options.write_scripts))
        return 0
    if options.collect:
        for entry in collect(runs, entries, results):
            print(f"note: {entry.name} has not trained to its end", file=sys.stderr)
    else:
        from megatron import backend  # imports torch

        backend.require_core()
        if missing:
            raise ValueError(f"no run could start: {'; '.join(missing)}")
        _refuse_too_large(entries, options.processes or _num_places())
        again = frozenset(Status) - {Status.DONE} if options.again else frozenset()
        with command_line.unwinding("the same command goes on"):
            measure(runs, entries, results, again=again, said=_say(len(entries)))
    return _report(results.of(entries), options)


def _program(name: str) -> Path:
    """The path of a training program: a checkout's, which runs without an installation, else the package's."""
    return next(path for path in (ROOT / name, Path(programs.__path__[0]) / name) if path.exists())


def _topology(argv: list[str], architecture: str, search: Path | None) -> Path | None:
    """The file that optimized rank mappings need: --rank-topology, or the file that a search wrote beside its
    results."""
    program, defaults = SEARCHED[architecture]
    given = parse_args(argv, prog=program, defaults=defaults).rank_topology
    beside = None if search is None else search.parent / "topology.yaml"
    return Path(given) if given else beside if beside is not None and beside.exists() else None


def _configuration(text: str) -> Configuration:
    """Parse a configuration such as `pipeline=2,schedule=2bw`, as a type for argparse."""
    values: dict[str, object] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in KINDS:
            raise argparse.ArgumentTypeError(f"{name!r} is no field; choose from {', '.join(KINDS)}")
        if KINDS[name] in (int, int | None):
            values[name] = count(value)
        elif KINDS[name] is bool:
            if value not in ("true", "false"):
                raise argparse.ArgumentTypeError(f"{name} is true or false, not {value!r}")
            values[name] = value == "true"
        elif KINDS[name] == tuple[int, ...] | None:
            values[name] = tuple(count(each) for each in value.split("+"))
        else:
            values[name] = value
    try:
        return Configuration(**values)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _entries(options: argparse.Namespace, runs: Runs) -> list[TrialEntry]:
    entries = [TrialEntry(configuration=each) for each in options.configuration]
    if options.search is not None:
        found = read_entries(options.search)
        entries = (found if options.all else found[: options.best]) + entries
    if not entries:
        raise ValueError("there is nothing to run; give --search FILE or --configuration")
    entries = list({entry.name: entry for entry in reversed(entries)}.values())[::-1]
    if options.predict_from is None:
        return entries
    profile = load_profile(options.predict_from)
    _refuse_other_profile(profile, options.predict_from, runs)
    num_layers = int(runs.argv[runs.argv.index("--num-layers") + 1])
    return [_predicted(entry, profile, num_layers) for entry in entries]


def _predicted(entry: TrialEntry, profile: Profile, num_layers: int) -> TrialEntry:
    try:
        seconds = predicted_seconds(profile, entry.configuration, num_layers=num_layers)
    except ValueError as error:
        raise ValueError(f"{entry.name} cannot be predicted: {error}") from error
    return replace(entry, predicted_seconds=seconds)


def _refuse_other_profile(profile: Profile, path: Path, runs: Runs) -> None:
    """Raise ValueError for a profile of another model or of other threads; print a note on other versions of
    software."""
    told = differences(profile.flags, runs.argv, but=frozenset({"--num-layers"}))
    if told:
        raise ValueError(f"{path} was taken with other flags: {told}; give those, or profile with these")
    if profile.shares_processor and profile.machine.threads != runs.threads:
        raise ValueError(
            f"{path} was taken with {profile.machine.threads} threads a process, not {runs.threads}; give --threads "
            f"{profile.machine.threads}, or profile with --threads {runs.threads}"
        )
    for name, then in (("torch", profile.machine.torch), ("megatron-core", profile.machine.megatron_core)):
        try:
            now = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # scripts may be written where nothing is trained
        if now != then:
            print(f"note: {path} was taken with {name} {then}, and here is {now}", file=sys.stderr)


def _is_cuda() -> bool:
    from megatron import backend  # imports torch

    return backend.is_cuda()


def _num_places() -> int:
    if _is_cuda():
        import torch

        return torch.cuda.device_count()
    return os.cpu_count() or 1


def _refuse_too_large(entries: list[TrialEntry], places: int) -> None:
    for entry in entries:
        if entry.configuration.num_gpus > places:
            raise ValueError(
                f"{entry.name} needs {entry.configuration.num_gpus} processes, and this machine takes {places}; write "
                "scripts for a cluster (--write-scripts), or raise --processes"
            )


def _say(total: int):
    def said(number: int, entry: TrialEntry, result: Result | None) -> None:
        if result is None:
            text = "running"
        elif result.status is Status.DONE:
            text = f"{result.seconds:.4g} s an iteration"
        else:
            text = f"{result.status.value}: {result.sentence}"
        print(f"{number + 1}/{total} {entry.name}: {text}", file=sys.stderr, flush=True)

    return said


def _report(results: list[Result], options: argparse.Namespace) -> int:
    if options.json:
        for result in results:
            print(result.model_dump_json())
    else:
        console(150, highlight=True).print(table_of(results))
        print(f"Results: {options.output / RESULTS}")
    if options.picture is not None:
        draw(results, options.picture)
    return int(any(result.status is not Status.DONE for result in results))
