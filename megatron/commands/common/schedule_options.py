"""The options of tools/schedule.py, and what they mean: a program to look at; its costs are in schedule_costs.py."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron.commands.common import command_line, schedule_costs
from megatron.commands.common.command_line import count, positive
from megatron.pipeline.program import csv_text
from megatron.pipeline.program.lane_order import DEFERRED, DEVICE, EAGER, HOST, Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import POLICIES, TWO_BW, weight_policy
from megatron.pipeline.schedules import Schedule, TooManyRead
from megatron.pipeline.schedules.orders import PRESETS

FLAGS = ("recompute", "extra_warmup", "balance", "tied_embeddings", "data_parallel")
_PREDICTIONS = ("provisional_microbatches", "reduce_partial")
_HOST = ("resident_stages", "host_update", "stash")
_HALVES = ("backward_input", "backward_weight", "deferred_size")
_PRESET_ONLY = (
    "provisional", *_PREDICTIONS, "stages", "virtual_stages", "microbatch_group_size", "batches", *_HOST, *FLAGS
)  # fmt: skip
_MOST = 20_000_000  # computations and transfers of a program; more do not fit into the memory of a common machine
_JOB_ONLY = ("tensor", "data", "distributed_optimizer")
_TEXT_ONLY = ("versions", "columns")
_PICTURE_ONLY = ("saved", "lanes", "critical_path", "title", "time_label", "time_scale", "width", *schedule_costs.SIZES)

Command = Callable[[argparse.Namespace], int]


# --- what the options mean


def schedule(options: argparse.Namespace) -> Schedule:
    flags = {flag: getattr(options, flag) for flag in (*FLAGS, *_PREDICTIONS)}
    num_virtual_stages = options.virtual_stages or (2 if PRESETS[options.schedule].interleaves else 1)
    num_stages = (options.stages or 4) * num_virtual_stages
    _require_memory(num_stages, 1)
    return Schedule.preset(
        options.schedule,
        num_stages=num_stages,
        num_virtual_stages=num_virtual_stages,
        microbatch_group_size=options.microbatch_group_size,
        predict=predicts(options),
        residency=residency(options),
        **flags,
    )


def residency(options: argparse.Namespace) -> Residency | None:
    """Where the preset's weights live on the host, how: as it says, but for what is asked for."""
    asked = {"stages": options.resident_stages, "update": options.host_update, "stash": options.stash}
    given = {name: value for name, value in asked.items() if value is not None}
    chosen = PRESETS[options.schedule].residency
    return None if chosen is None else replace(chosen, **given)


def predicts(options: argparse.Namespace) -> bool:
    return options.provisional or options.provisional_microbatches is not None


def program(options: argparse.Namespace) -> Program:
    """The program of a preset, or of a file.

    Raises:
        ValueError: choices that do not go together, a file that is no program, or a program beyond all memory.
    """
    if options.schedule is not None:
        chosen = schedule(options)
        batches = options.microbatches or (_fewest_microbatches(chosen),)
        few = 2 * chosen.num_stages if chosen.weights.updates_alone else max(3, chosen.weights.delay + 2)
        num_batches = (options.batches or few) if len(batches) == 1 else 1
        _require_memory(chosen.num_stages, sum(batches) * num_batches)
        try:
            return chosen.build(batches * num_batches)
        except TooManyRead as error:
            raise error.under("--provisional-microbatches") from error
    facts = {"batches": options.microbatches, "weights": options.weights and weight_policy(options.weights)}
    try:
        text = _text(options)
        return Program.from_csv(text, **{name: value for name, value in facts.items() if value is not None})
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.file} is no text ({error.reason}); give a CSV file") from error
    except ValueError as error:
        raise ValueError(f"{options.file}: {error}") from error


def notes(options: argparse.Namespace) -> dict[str, int]:
    """What a file, which holds a program, says of the run that it is meant for."""
    return csv_text.read_notes(_text(options))


def _text(options: argparse.Namespace) -> str:
    return Path(options.file).read_text(encoding="utf-8-sig")


def degrees_text(options: argparse.Namespace) -> str:
    """Leading lines of a file that say for which job it is; none for degrees of 1."""
    degrees = {"tensor": options.tensor, "data": options.data}
    return "".join(f"# {name}: {degree}\n" for name, degree in degrees.items() if degree > 1)


def _require_memory(num_stages: int, num_microbatches: int) -> None:
    num_instructions = 6 * num_stages * num_microbatches  # F, B and the transfers that both cause
    if num_instructions > _MOST:
        raise ValueError(
            f"{num_stages} stages and {num_microbatches} microbatches make about {num_instructions:.1e} instructions, "
            f"more than the {_MOST:.0e} that a machine holds; give fewer of either, for a longer run repeats itself"
        )


def _fewest_microbatches(schedule: Schedule) -> int:
    """How many fill the pipeline, or a few more where the schedule wants them; 1 where batches are microbatches."""
    if schedule.weights.updates_alone:
        return 1
    fill = (
        2 * schedule.num_stages - 1 if schedule.extra_warmup else schedule.microbatch_group_size or schedule.num_ranks
    )
    return next(filter(schedule.accepts, range(fill, fill + 4 * schedule.num_stages)), fill)


def title(options: argparse.Namespace, program: Program) -> str:
    if options.schedule is None:
        return Path(options.file).name
    extras = "".join(f", {flag.replace('_', ' ')}" for flag in FLAGS if getattr(options, flag))
    if predicts(options):
        num_read = options.provisional_microbatches
        extras += ", provisional" + (f" from {num_read} microbatch{'es' * (num_read > 1)}" if num_read else "")
        extras += " of all replicas" * options.reduce_partial
    sizes = ", ".join(map(str, program.batches)) if len(set(program.batches)) > 1 else str(program.batches[0])
    if given := residency(options):
        extras += f", {given.stages} resident, {given.update} updates" + ", stash on the host" * given.stashes_on_host
    noun = "microbatch" if sizes == "1" else "microbatches"
    stages = f"{program.num_ranks} stages"
    if program.num_stages > program.num_ranks:
        counts = {len(program.stages_of(rank)) for rank in range(program.num_ranks)}
        each = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        stages = f"{program.num_ranks} rank{'s' * (program.num_ranks > 1)} of {each} stages"
    placement = PRESETS[options.schedule].placement
    stages += f" placed {placement}" if placement != "round-robin" else ""
    return f"{options.schedule}: {stages}, batches of {sizes} {noun}{extras}"


# --- the command line


def parse(description: str, commands: dict[str, Command], arguments: list[str] | None) -> argparse.Namespace:
    """The options of a command, or the end of the process with a message and status 2."""
    options = _parser(description, commands).parse_args(arguments)
    _require_one_source(options)
    if options.command in ("check", "show") and options.schedule is not None and options.data > 1:
        options.data_parallel = True
    _require_subject(options)
    _require_effect(options)
    return options


def _require_one_source(options: argparse.Namespace) -> None:
    """End with a message where a program has no source or two, or where an option would be ignored."""
    if (options.file is None) == (options.schedule is None):
        options.parser.error("name either a CSV file or a --schedule")
    if options.schedule is None:
        ignored = [name for name in _PRESET_ONLY if getattr(options, name)]
    else:
        ignored = ["weights"] * bool(options.weights) + ["complete"] * getattr(options, "complete", False)
        ignored += ["batches"] * bool(options.batches and options.microbatches and len(options.microbatches) > 1)
    if ignored:
        source = "a CSV file" if options.schedule is None else "this preset"
        options.parser.error(f"--{ignored[0].replace('_', '-')} says nothing about {source}; leave it out")


def _require_subject(options: argparse.Namespace) -> None:
    """End with a message where there is nothing to predict, nothing to reduce for it, or nothing on the host."""
    if options.schedule is None:
        return
    error = options.parser.error
    if predicts(options) and PRESETS[options.schedule].policy != TWO_BW:
        flag = "provisional" if options.provisional else "provisional-microbatches"
        error(f"--{flag} predicts the weights of 2bw, not of {options.schedule}; give --schedule 2bw, or leave it out")
    for name in _HOST:
        if getattr(options, name) and PRESETS[options.schedule].residency is None:
            error(f"--{name.replace('_', '-')} says nothing about weights on the device; give --schedule l2l")
    if options.reduce_partial and not predicts(options):
        error("--reduce-partial says nothing about a program without predictions; add --provisional")
    if options.reduce_partial and not options.data_parallel:
        error("--reduce-partial says nothing about a program without replicas; add --data-parallel")


def _require_effect(options: argparse.Namespace) -> None:
    """End with a message where an option would be ignored, because nothing of its kind is printed or drawn."""
    parser, ignored = options.parser, []
    if options.command == "draw":
        if not (options.text or options.output):
            parser.error("draw needs --output FILE.png (or .svg), or --text for the terminal")
        ignored += [(name, "a picture; add --text") for name in _TEXT_ONLY if not options.text]
        ignored += [(name, "text; add --output FILE") for name in _PICTURE_ONLY if not options.output]
    elif options.command == "show" and not options.timeline:
        ignored += [(name, "the rows; add --csv FILE") for name in ("tensor", "data") if not options.csv]
        ignored += [(name, "the rows; add --timeline") for name in (*schedule_costs.NAMES, "one_based", *_TEXT_ONLY)]
    elif options.command == "check" and options.hardware_queues is None:
        ignored += [(name, "the program; add --hardware-queues N") for name in _JOB_ONLY]
    if options.schedule is not None and options.command != "check":
        without = {"recompute_time": "recompute", "reduce_grad": "data_parallel", "reduce_embed": "tied_embeddings"}
        without |= {"predict": "provisional"} if not predicts(options) else {}
        without |= {"hold": "provisional_microbatches"} if not options.reduce_partial else {}
        if options.command != "show":
            without |= {"tied_gradients_size": "tied_embeddings" if predicts(options) else "provisional"}
        without |= dict.fromkeys(("evict", "load"), "balance") if not PRESETS[options.schedule].balance else {}
        if PRESETS[options.schedule].recompute:
            del without["recompute_time"]
        if PRESETS[options.schedule].residency is None:
            ignored += [(name, "weights on the device; give --schedule l2l") for name in ("fetch", "store", "update")]
        halves = [name for name in _HALVES if getattr(options, name, None) != parser.get_default(name)]
        if halves and not _splits_backward(options):  # in this order: of a thousand ranks the second takes seconds
            ignored += [(name, "whole backwards; give --schedule zb-h1 or zbv") for name in halves]
        ignored += [
            (name, f"a program without it; add --{flag.replace('_', '-')}")
            for name, flag in without.items()
            if not getattr(options, flag)
        ]
    for name, where in ignored:
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} says nothing about {where}")


def _splits_backward(options: argparse.Namespace) -> bool:
    """Whether the preset computes backwards in halves; yes where its choices are refused, which is said later."""
    try:
        return schedule(options).splits_backward
    except ValueError:
        return True


def _parser(description: str, run: dict[str, Command]) -> argparse.ArgumentParser:
    parser = command_line.parser_of(description)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    show = _command(
        commands, "show", run["show"], "print the program, one row of instructions per rank, or write it to a file"
    )
    show.add_argument("--csv", metavar="FILE", help="write the program as CSV, complete ('-': to the terminal)")
    show.add_argument(
        "--torch-csv",
        metavar="FILE",
        help="write the CSV of torch.distributed.pipelining, as far as torch has the words",
    )
    show.add_argument(
        "--complete", action="store_true", help="of a CSV file, with what a run adds: updates, versions, transfers"
    )
    _add_degrees(show.add_argument_group("job that the CSV file is for"))
    show.add_argument("--timeline", action="store_true", help="print the timeline of a simulation instead of the rows")
    _add_text_options(show)
    check = _command(
        commands,
        "check",
        run["check"],
        "prove the program, for a preset with any number of batches; status 1 where it is wrong",
    )
    _add_job_options(check)
    timed = _command(
        commands, "simulate", run["simulate"], "execute the program on a table of costs, and print times and bubbles"
    )
    timed.add_argument(
        "--critical-path",
        action="store_true",
        help="print what bounds the makespan, and how much of it each kind takes",
    )
    timed.add_argument("--json", metavar="FILE", help="write the timeline, which `draw --measured` reads")
    draw = _command(commands, "draw", run["draw"], "draw the simulated timeline, alone or above measured ones")
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
        "--saved",
        action=argparse.BooleanOptionalAction,
        help="below the timeline, the microbatches whose activations each rank holds (default: where some move)",
    )
    draw.add_argument("--lanes", action="store_true", help="show transfers and reductions that take time")
    draw.add_argument("--critical-path", action="store_true", help="mark what bounds the makespan of the plan")
    draw.add_argument("--title", help="title of the picture; default: the schedule")
    draw.add_argument(
        "--time-label", default="time", metavar="TEXT", help="name of the axis of time (default: %(default)s)"
    )
    draw.add_argument(
        "--time-scale",
        type=positive,
        default=1.0,
        metavar="X",
        help="units of the axis in one unit of the costs (1000: seconds to ms)",
    )
    draw.add_argument(
        "--width", type=positive, metavar="INCHES", help="width of the picture; default: what the labels need"
    )
    _add_text_options(draw)
    return parser


def _command(commands: argparse._SubParsersAction, name: str, run: Command, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False,
                                 formatter_class=argparse.HelpFormatter)  # fmt: skip
    _add_program_options(parser)
    if name != "check":
        schedule_costs.add_costs(parser)
    if name in ("simulate", "draw"):
        schedule_costs.add_sizes(parser)
    parser.set_defaults(run=run, command=name, parser=parser)
    return parser


def _add_program_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="CSV file with a row of instructions per rank, instead of a preset")
    parser.add_argument(
        "--microbatches",
        type=command_line.counts,
        metavar="M[,M...]",
        help="of each batch; several numbers are the batches of a ramp-up (default: as few as fill the pipeline)",
    )
    file = parser.add_argument_group("CSV file")
    file.add_argument("--weights", choices=list(POLICIES), help="weight policy, where the file does not say it")
    preset = parser.add_argument_group("preset")
    preset.add_argument("--schedule", choices=PRESETS, help="which one")
    preset.add_argument("--stages", type=count, metavar="P", help="pipeline stages, one on each rank (default: 4)")
    preset.add_argument(
        "--virtual-stages",
        type=count,
        metavar="V",
        help="interleaved, zbv, l2l: cut each into V, which the schedule places (default: 2)",
    )
    preset.add_argument(
        "--microbatch-group-size", type=count, metavar="N", help="interleaved: microbatches in a row (default: P)"
    )
    preset.add_argument(
        "--batches", type=count, metavar="N", help="where --microbatches is one number (default: 3; pipedream: 2P)"
    )
    preset.add_argument(
        "--resident-stages", type=count, metavar="K", help="l2l: of a rank, on the device at once (default: 2)"
    )
    preset.add_argument(
        "--host-update",
        choices=(EAGER, DEFERRED),
        help="l2l: update a stage as soon as its gradients are on the host, or behind the step (default: deferred)",
    )
    preset.add_argument(
        "--stash",
        choices=(DEVICE, HOST),
        help="l2l: inputs wait for their recompute on the device, or leave for the host (default: device)",
    )
    preset.add_argument("--recompute", action="store_true", help="recompute each forward before its backward")
    preset.add_argument("--extra-warmup", action="store_true", help="2(p-s-1) forwards of warm-up, which hide latency")
    preset.add_argument(
        "--balance", action="store_true", help="move saved activations between stages x and p-1-x (bpipe does)"
    )
    preset.add_argument("--tied-embeddings", action="store_true", help="reduce the gradients of tied embeddings")
    preset.add_argument("--data-parallel", action="store_true", help="reduce gradients over replicas")
    predictions = preset.add_mutually_exclusive_group()
    predictions.add_argument(
        "--provisional",
        action="store_true",
        help="2bw: compute each batch at predicted weights, from all microbatches that each stage has done",
    )
    predictions.add_argument(
        "--provisional-microbatches",
        type=count,
        metavar="Q",
        help="2bw: the same, from Q microbatches on every stage",
    )
    preset.add_argument(
        "--reduce-partial", action="store_true", help="predict from the mean over the replicas, which is reduced first"
    )


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("hardware queues")
    job.add_argument(
        "--hardware-queues",
        type=count,
        metavar="N",
        help="prove or refute that the job ends on GPUs with N hardware queues (CUDA_DEVICE_MAX_CONNECTIONS)",
    )
    _add_degrees(job)
    job.add_argument("--distributed-optimizer", action="store_true", help="a step gathers parameters over replicas")


def _add_degrees(job: argparse._ArgumentGroup) -> None:
    job.add_argument("--tensor", type=count, default=1, metavar="T", help="tensor parallel degree (default: 1)")
    job.add_argument("--data", type=count, default=1, metavar="D", help="data parallel degree (default: 1)")


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--one-based", action="store_true", help="number microbatches from 1, as the paper does")
    parser.add_argument("--versions", action="store_true", help="in text, write weight versions")
    parser.add_argument("--columns", type=count, default=120, metavar="N", help="width of text that is piped")
