"""Look at a pipeline schedule before running it: print, prove, time and draw its program.

    python tools/schedule.py show  --schedule 2bw --stages 4 --microbatches 4 --batches 3
    python tools/schedule.py check --schedule 2bw --stages 64 --microbatches 512
    python tools/schedule.py draw  --schedule 2bw --stages 4 --microbatches 4 --batches 3 --output 2bw.png
    python tools/schedule.py simulate --schedule flush --stages 8 --microbatches 16 --latency 0.1

Instead of a preset, a CSV file with one row of instructions per rank can be given: this project's text form, or the
compute-only files of torch.distributed.pipelining. Nothing is executed; neither torch nor a GPU is needed.

Exit status: 0, or 1 where the program is wrong, 2 where the command line is.
"""

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.pipeline") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # not installed: run from the sources beside it

from megatron.pipeline.check import CheckReport, check, check_periodic
from megatron.pipeline.costs import Costs
from megatron.pipeline.program import Program, WeightPolicy
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.orders import ORDERS, PRESETS
from megatron.pipeline.simulate import simulate
from megatron.pipeline.timeline import Timeline

_FLAGS = ("recompute", "extra_warmup", "balance", "tied_embeddings", "data_parallel")
_PRESET_ONLY = ("stages", "virtual_stages", "microbatch_group_size", "batches", *_FLAGS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    _require_one_source(parser, options)
    try:
        return options.run(options)
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror}", file=sys.stderr)
        return 2


# --- the four commands


def _show(options: argparse.Namespace) -> int:
    program = _program(options)
    if options.csv:
        _write(options.csv, program.to_csv())
    if options.torch_csv:
        _write(options.torch_csv, program.to_torch_csv())
    if options.timeline:
        _print_timeline(simulate(program, _costs(options)), options)
    elif not options.csv and not options.torch_csv:
        for rank, row in enumerate(program.rows):
            print(f"rank {rank}: " + "  ".join(map(str, row)))
    return 0


def _check(options: argparse.Namespace) -> int:
    program = _program(options)
    print(_describe(_prove(options, program), program))
    if options.schedule and _schedule(options).balance and not any(program.num_evictions):
        print("nothing to balance: every stage keeps within the bound of its pair already")
    if options.schedule and len(set(program.batches)) == 1:
        schedule, size = _schedule(options), program.batches[0]
        many = (size,) * (2 * schedule.num_stages)
        check_periodic(
            schedule.build_periodic(size),
            max_saved=schedule.max_saved_microbatches(many),
            max_saved_on_rank=schedule.max_saved_on_rank(many),
        )
        print("proved for every number of batches: fill, n periods, drain")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    program = _program(options)
    _prove(options, program)
    timeline = simulate(program, _costs(options))
    rows = [("makespan", f"{timeline.makespan:g}"), ("bubble, all ranks", f"{timeline.bubble:.1%}")]
    if len(program.batches) > 2:
        rows.append(("time per batch, steady", f"{timeline.steady_time_per_batch():g}"))
    for rank in range(timeline.num_ranks):
        rows.append((f"rank {rank}: busy, idle", f"{timeline.busy(rank):g}, {timeline.idle(rank):g}"))
    for stage in range(timeline.num_stages):
        rows.append((f"stage {stage}: peak saved microbatches", str(timeline.peak_saved_microbatches(stage))))
    _print_table(rows)
    if options.json:
        timeline.save(options.json)
    return 0


def _draw(options: argparse.Namespace) -> int:
    from megatron.pipeline.draw import draw_timeline

    if options.output is None and not options.text:
        raise ValueError("draw needs --output FILE.png (or .svg), or --text for the terminal")
    program = _program(options)
    _prove(options, program)
    timelines = [simulate(program, _costs(options)).named("planned")]
    timelines += [Timeline.load(path).named(f"measured ({Path(path).name})") for path in options.measured]
    if options.text:
        for timeline in timelines:
            _print_timeline(timeline, options)
    if options.output:
        draw_timeline(
            timelines,
            options.output,
            title=_title(options, program) if options.title is None else options.title,
            one_based=options.one_based,
            saved_microbatches=options.saved,
            lanes=options.lanes,
            time_label=options.time_label,
            time_scale=options.time_scale,
            width=options.width,
        )
        print(f"wrote {options.output}")
    return 0


# --- what the options mean


def _require_one_source(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a message where a program has no source or two, or where an option would be ignored."""
    if (options.file is None) == (options.schedule is None):
        parser.error("name either a CSV file or a --schedule")
    if options.schedule is None:
        ignored = [name for name in _PRESET_ONLY if getattr(options, name)]
    else:
        ignored = ["weights"] * bool(options.weights)
        ignored += ["batches"] * bool(options.batches and options.microbatches and len(options.microbatches) > 1)
    if ignored:
        source = "a CSV file" if options.schedule is None else "this preset"
        parser.error(f"--{ignored[0].replace('_', '-')} says nothing about {source}; leave it out")


def _schedule(options: argparse.Namespace) -> Schedule:
    flags = {flag: getattr(options, flag) for flag in _FLAGS}
    order, _ = PRESETS[options.schedule]
    num_virtual_stages = options.virtual_stages or (2 if ORDERS[order].interleaves else 1)
    return Schedule.preset(
        options.schedule,
        num_stages=(options.stages or 4) * num_virtual_stages,
        num_virtual_stages=num_virtual_stages,
        microbatch_group_size=options.microbatch_group_size,
        **flags,
    )


def _program(options: argparse.Namespace) -> Program:
    if options.schedule is not None:
        schedule = _schedule(options)
        batches = options.microbatches or (_fewest_microbatches(schedule),)
        few = 2 * schedule.num_stages if schedule.weights.rule.updates_alone else 3
        return schedule.build(batches if len(batches) > 1 else batches * (options.batches or few))
    facts = {"batches": options.microbatches, "weights": options.weights and WeightPolicy(options.weights)}
    try:
        text = Path(options.file).read_text(encoding="utf-8-sig")
        return Program.from_csv(text, **{name: value for name, value in facts.items() if value is not None})
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.file} is no text ({error.reason}); give a CSV file") from error
    except ValueError as error:
        raise ValueError(f"{options.file}: {error}") from error


def _fewest_microbatches(schedule: Schedule) -> int:
    """As many as fill the pipeline, or the one that a weight-stashing schedule takes."""
    if schedule.weights.rule.updates_alone:
        return 1
    return (
        2 * schedule.num_stages - 1 if schedule.extra_warmup else schedule.microbatch_group_size or schedule.num_ranks
    )


def _prove(options: argparse.Namespace, program: Program) -> CheckReport:
    """Prove a program; one of a preset also against the activations that its schedule may save."""
    if options.schedule is None:
        return check(program)
    schedule = _schedule(options)
    return check(
        program,
        max_saved=schedule.max_saved_microbatches(program.batches),
        max_saved_on_rank=schedule.max_saved_on_rank(program.batches),
    )


def _costs(options: argparse.Namespace) -> Costs:
    return Costs(
        forward=options.forward,
        backward=options.backward,
        recompute=options.recompute_time,
        step=options.step,
        latency=options.latency,
        forward_bytes=options.transfer,
        bandwidth=1.0,
        evict=options.evict,
        load=options.load,
        reduce_grad=options.reduce_grad,
        reduce_embed=options.reduce_embed,
        reduce_norm=options.reduce_norm,
    )


def _title(options: argparse.Namespace, program: Program) -> str:
    if options.schedule is None:
        return Path(options.file).name
    extras = "".join(f", {flag.replace('_', ' ')}" for flag in _FLAGS if getattr(options, flag))
    sizes = ", ".join(map(str, program.batches)) if len(set(program.batches)) > 1 else str(program.batches[0])
    noun = "microbatch" if sizes == "1" else "microbatches"
    stages = f"{program.num_ranks} stages"
    if program.num_stages > program.num_ranks:
        stages = f"{program.num_ranks} ranks of {program.num_stages // program.num_ranks} stages"
    return f"{options.schedule}: {stages}, batches of {sizes} {noun}{extras}"


# --- what is printed


def _describe(report: CheckReport, program: Program) -> str:
    facts = [
        ("ranks, stages", f"{report.num_ranks}, {report.num_stages}"),
        ("batches of microbatches", ", ".join(map(str, program.batches))),
        ("instructions", str(report.num_instructions)),
        ("transfers", "sends and receives pair up" if report.communicates else "none (compute-only program)"),
        ("peak saved microbatches", ", ".join(map(str, report.peak_saved_microbatches))),
        ("live weight versions", ", ".join(map(str, report.live_versions)) or "none named"),
    ]
    if report.num_stages > report.num_ranks:
        facts.insert(5, ("  of all stages of a rank", ", ".join(map(str, report.peak_saved_on_rank))))
    if any(report.evicted_microbatches):
        facts.append(("evicted microbatches", ", ".join(map(str, report.evicted_microbatches))))
    width = max(len(name) for name, _ in facts)
    return "\n".join(["correct", *(f"  {name:{width}}  {value}" for name, value in facts)])


def _print_table(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


def _print_timeline(timeline: Timeline, options: argparse.Namespace) -> None:
    from rich.console import Console

    from megatron.pipeline.draw import timeline_text

    console = Console()
    width = console.width if console.is_terminal else options.columns
    text = timeline_text(timeline, width=width, one_based=options.one_based, versions=options.versions)
    if console.is_terminal:
        console.print(text, soft_wrap=True, end="")
    else:
        print(text.plain, end="")


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


# --- the command line


def _parser() -> argparse.ArgumentParser:
    summary, _, examples = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    show = _command(
        commands, "show", _show, "print the program, one row of instructions per rank, or write it to a file"
    )
    show.add_argument("--csv", metavar="FILE", help="write the program as CSV, complete ('-': to the terminal)")
    show.add_argument(
        "--torch-csv",
        metavar="FILE",
        help="write the CSV of torch.distributed.pipelining, as far as torch has the words",
    )
    show.add_argument("--timeline", action="store_true", help="print the timeline of a simulation instead of the rows")
    _add_text_options(show)
    _command(
        commands,
        "check",
        _check,
        "prove the program, for a preset with any number of batches; status 1 where it is wrong",
    )
    timed = _command(
        commands, "simulate", _simulate, "execute the program on a table of costs, and print times and bubbles"
    )
    timed.add_argument("--json", metavar="FILE", help="write the timeline, which `draw --measured` reads")
    draw = _command(commands, "draw", _draw, "draw the simulated timeline, alone or above measured ones")
    draw.add_argument("--output", "-o", metavar="FILE", help="picture to write: .png, .svg or .pdf")
    draw.add_argument("--text", action="store_true", help="draw in the terminal")
    draw.add_argument(
        "--measured",
        action="append",
        default=[],
        metavar="FILE",
        help="timeline of a run, drawn below the plan; may repeat",
    )
    draw.add_argument(
        "--saved", action="store_true", help="below the timeline, the microbatches whose activations each stage holds"
    )
    draw.add_argument("--lanes", action="store_true", help="show transfers and reductions that take time")
    draw.add_argument("--title", help="title of the picture; default: the schedule")
    draw.add_argument(
        "--time-label", default="time", metavar="TEXT", help="name of the axis of time (default: %(default)s)"
    )
    draw.add_argument(
        "--time-scale",
        type=_positive,
        default=1.0,
        metavar="X",
        help="units of the axis in one unit of the costs (1000: seconds to ms)",
    )
    draw.add_argument(
        "--width", type=_positive, metavar="INCHES", help="width of the picture; default: what the labels need"
    )
    _add_text_options(draw)
    return parser


def _command(commands: argparse._SubParsersAction, name: str, run: object, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False,
                                 formatter_class=argparse.HelpFormatter)  # fmt: skip
    _add_program_options(parser)
    if name != "check":
        _add_cost_options(parser)
    parser.set_defaults(run=run)
    return parser


def _add_program_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="CSV file with a row of instructions per rank, instead of a preset")
    parser.add_argument(
        "--microbatches",
        type=_counts,
        metavar="M[,M...]",
        help="of each batch; several numbers are the batches of a ramp-up (default: as few as fill the pipeline)",
    )
    file = parser.add_argument_group("CSV file")
    policies = [policy.value for policy in WeightPolicy]
    file.add_argument("--weights", choices=policies, help="weight policy, where the file does not say it")
    preset = parser.add_argument_group("preset")
    preset.add_argument("--schedule", choices=PRESETS, help="which one")
    preset.add_argument("--stages", type=_count, metavar="P", help="pipeline stages, one on each rank (default: 4)")
    preset.add_argument(
        "--virtual-stages",
        type=_count,
        metavar="V",
        help="interleaved: cut each into V, dealt out in turn (default: 2)",
    )
    preset.add_argument(
        "--microbatch-group-size", type=_count, metavar="N", help="interleaved: microbatches in a row (default: P)"
    )
    preset.add_argument(
        "--batches", type=_count, metavar="N", help="where --microbatches is one number (default: 3; pipedream: 2P)"
    )
    preset.add_argument("--recompute", action="store_true", help="recompute each forward before its backward")
    preset.add_argument("--extra-warmup", action="store_true", help="2(p-s-1) forwards of warm-up, which hide latency")
    preset.add_argument(
        "--balance", action="store_true", help="move saved activations between stages x and p-1-x (bpipe does)"
    )
    preset.add_argument("--tied-embeddings", action="store_true", help="reduce the gradients of tied embeddings")
    preset.add_argument("--data-parallel", action="store_true", help="reduce gradients over replicas")


def _add_cost_options(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs", "In any unit of time; one number, or one for each stage or edge.")
    for name, default, meaning in (
        ("--forward", 1.0, "of a microbatch through a stage (default: 1)"),
        ("--backward", 2.0, "likewise, without the recompute (default: 2)"),
        ("--recompute-time", None, "of a recompute (default: as --forward)"),
        ("--step", 0.0, "of the optimizer (default: 0, as all below)"),
        ("--transfer", 0.0, "for which a transfer occupies its edge"),
        ("--latency", 0.0, "from the end of the sending to the arrival"),
        ("--evict", 0.0, "of moving a microbatch's saved activations to the pair stage"),
        ("--load", None, "of moving them back (default: as --evict)"),
        ("--reduce-grad", 0.0, "of the reduction over replicas"),
    ):
        costs.add_argument(name, type=_times, default=default, metavar="T[,T...]", help=meaning)
    costs.add_argument("--reduce-embed", type=_time, default=0.0, metavar="T", help="of the tied embeddings' reduction")
    costs.add_argument("--reduce-norm", type=_time, default=0.0, metavar="T", help="of the norm's reduction")


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--one-based", action="store_true", help="number microbatches from 1, as the paper does")
    parser.add_argument("--versions", action="store_true", help="in text, write weight versions")
    parser.add_argument("--columns", type=_count, default=120, metavar="N", help="width of text that is piped")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number of 0 and more")
    return value


def _times(text: str) -> float | tuple[float, ...]:
    values = tuple(_time(part) for part in text.split(","))
    return values[0] if len(values) == 1 else values


def _positive(text: str) -> float:
    value = _time(text)
    if not value:
        raise argparse.ArgumentTypeError("0 is not positive")
    return value


if __name__ == "__main__":
    sys.exit(main())
