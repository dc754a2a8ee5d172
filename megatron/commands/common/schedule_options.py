"""The options of tools/schedule.py: the program, the costs of its instructions, and the sizes that stages hold."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron.commands.common import command_line
from megatron.commands.common.command_line import add_flags, count, positive, time, times
from megatron.pipeline.program import csv_text
from megatron.pipeline.program.lane_order import DEFERRED, DEVICE, EAGER, HOST, Residency
from megatron.pipeline.program.program import Program
from megatron.pipeline.program.weight_policies import POLICIES, TWO_BW, weight_policy
from megatron.pipeline.schedules import Schedule, TooManyRead
from megatron.pipeline.schedules.orders import PRESETS
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.memory_curve import PARTS, MemorySizes

_COSTS = ("forward", "backward", "backward_input", "backward_weight", "recompute_time", "step", "transfer",
         "latency", "no_overlap", "evict", "load",
         "reduce_grad", "reduce_embed", "reduce_norm", "predict", "hold", "fetch", "store", "update",
         "offload", "reload")  # fmt: skip
_SIZES = tuple(f"{part}_size" for part in (*PARTS, "tied_gradients"))


def costs(options: argparse.Namespace) -> Costs:
    names = {"recompute": "recompute_time", "forward_bytes": "transfer"}
    others = {name: name for name in _COSTS if name not in (*names.values(), "no_overlap")}
    given = {name: getattr(options, flag) for name, flag in (names | others).items()}
    return Costs(**given, bandwidth=1.0, overlap=not options.no_overlap)


def sizes(options: argparse.Namespace) -> MemorySizes | None:
    """None where no size is given."""
    given = {name.removesuffix("_size"): getattr(options, name) for name in _SIZES}
    return MemorySizes(**given) if any(given.values()) else None


def add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs", "In any unit of time; one number, or one for each stage or edge.")
    for name, default, meaning in (
        ("--forward", 1.0, "of a microbatch through a stage (default: 1)"),
        ("--backward", 2.0, "likewise, without the recompute (default: 2)"),
        ("--backward-input", None, "of I, where backwards are split (default: half of --backward)"),
        ("--backward-weight", None, "of W (default: the rest of --backward)"),
        ("--recompute-time", None, "of a recompute (default: as --forward)"),
        ("--step", 0.0, "of the optimizer (default: 0, as all below)"),
        ("--predict", None, "of a prediction of weights (default: as --step)"),
        ("--hold", 0.0, "of keeping gradients for a prediction"),
        ("--transfer", 0.0, "for which a transfer occupies its edge"),
        ("--latency", 0.0, "from the end of the sending to the arrival"),
        ("--evict", 0.0, "of moving a microbatch's saved activations to the pair stage"),
        ("--load", None, "of moving them back (default: as --evict)"),
        ("--reduce-grad", 0.0, "of the reduction over replicas"),
        ("--fetch", 0.0, "l2l: of copying a stage's weights to the device"),
        ("--store", 0.0, "l2l: of copying its gradients to the host"),
        ("--update", 0.0, "l2l: of its update there"),
        ("--offload", 0.0, "l2l: of copying the input of a microbatch to the host"),
        ("--reload", None, "l2l: of copying it back (default: as --offload)"),
    ):
        add_flags(costs, (name, times, "T[,T...]", meaning, {"default": default}))
    add_flags(
        costs,
        ("--reduce-embed", time, "T", "of the tied embeddings' reduction", {"default": 0.0}),
        ("--reduce-norm", time, "T", "of the norm's reduction", {"default": 0.0}),
        ("--no-overlap", None, "", "a transfer holds its sender, too: it sends instead of computing"),
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the sizes from which each rank's memory over time is drawn."""
    memory = parser.add_argument_group(
        "memory",
        "In any unit, such as GiB; one number, or one for each stage or edge. With any of them, memory is shown.",
    )
    meanings = (
        "of a stage's optimizer state", "of one version of a stage's weights", "of one buffer of its gradients",
        "that it saves of one microbatch",
        "that it holds of one between I and W (default: as --activations-size)",
        "of an activation or gradient between stages",
        "of the tied embeddings in a buffer of gradients, a copy of which a prediction reads",
    )  # fmt: skip
    for name, meaning in zip(_SIZES, meanings, strict=True):
        default = {"default": None if name == "deferred_size" else 0.0}
        add_flags(memory, (f"--{name.replace('_', '-')}", times, "X[,X...]", meaning, default))


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
_PICTURE_ONLY = ("saved", "lanes", "critical_path", "title", "time_label", "time_scale", "width", *_SIZES)

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
    if schedule.weights.batch_size:
        return schedule.weights.batch_size
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
        ignored += [(name, "the rows; add --timeline") for name in (*_COSTS, "one_based", *_TEXT_ONLY)]
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
    add_flags(
        show,
        ("--csv", str, "FILE", "write the program as CSV, complete ('-': to the terminal)"),
        ("--torch-csv", str, "FILE", "write the CSV of torch.distributed.pipelining, as far as torch has the words"),
        ("--complete", None, "", "of a CSV file, with what a run adds: updates, versions, transfers"),
    )
    add_flags(show.add_argument_group("job that the CSV file is for"), *_DEGREES)
    add_flags(show, ("--timeline", None, "", "print the timeline of a simulation instead of the rows"), *_TEXT)
    summary = "prove the program, for a preset with any number of batches; status 1 where it is wrong"
    check = _command(commands, "check", run["check"], summary)
    add_flags(
        check.add_argument_group("hardware queues"),
        ("--hardware-queues", count, "N", "prove or refute that the job ends on GPUs with N hardware queues "
         "(CUDA_DEVICE_MAX_CONNECTIONS)"),
        *_DEGREES,
        ("--distributed-optimizer", None, "", "a step gathers parameters over replicas"),
    )  # fmt: skip
    summary = "execute the program on a table of costs, and print times and bubbles"
    add_flags(
        _command(commands, "simulate", run["simulate"], summary),
        ("--critical-path", None, "", "print what bounds the makespan, and how much of it each kind takes"),
        ("--json", str, "FILE", "write the timeline, which `draw --measured` reads"),
    )
    optional = {"action": argparse.BooleanOptionalAction}
    draw = _command(commands, "draw", run["draw"], "draw the simulated timeline, alone or above measured ones")
    add_flags(
        draw,
        ("--output -o", str, "FILE", "picture to write: .png, .svg or .pdf"),
        ("--text", None, "", "draw in the terminal"),
        ("--measured", str, "FILE", "timeline of a run, drawn below the plan; may repeat",
         {"action": "append", "default": []}),
        ("--saved", None, "", "below the timeline, the microbatches whose activations each rank holds (default: where "
         "some move)", optional),
        ("--lanes", None, "", "show transfers and reductions that take time"),
        ("--critical-path", None, "", "mark what bounds the makespan of the plan"),
        ("--title", str, None, "title of the picture; default: the schedule"),
        ("--time-label", str, "TEXT", "name of the axis of time (default: %(default)s)", {"default": "time"}),
        ("--time-scale", positive, "X", "units of the axis in one unit of the costs (1000: seconds to ms)",
         {"default": 1.0}),
        ("--width", positive, "INCHES", "width of the picture; default: what the labels need"),
        *_TEXT,
    )  # fmt: skip
    return parser


def _command(commands: argparse._SubParsersAction, name: str, run: Command, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False,
                                 formatter_class=argparse.HelpFormatter)  # fmt: skip
    parser.add_argument("file", nargs="?", help="CSV file with a row of instructions per rank, instead of a preset")
    add_flags(parser, _MICROBATCHES)
    file = parser.add_argument_group("CSV file")
    file.add_argument("--weights", choices=list(POLICIES), help="weight policy, where the file does not say it")
    preset = parser.add_argument_group("preset")
    preset.add_argument("--schedule", choices=PRESETS, help="which one")
    add_flags(preset, *_PRESET)
    add_flags(preset.add_mutually_exclusive_group(), *_PREDICTION)
    add_flags(preset, ("--reduce-partial", None, "", "predict from the mean over the replicas, which is reduced first"))
    if name != "check":
        add_costs(parser)
    if name in ("simulate", "draw"):
        add_sizes(parser)
    parser.set_defaults(run=run, command=name, parser=parser)
    return parser


_MICROBATCHES = (
    "--microbatches", command_line.counts, "M[,M...]",
    "of each batch; several numbers are the batches of a ramp-up (default: as few as fill the pipeline)",
)  # fmt: skip
_PRESET = (
    ("--stages", count, "P", "pipeline stages, one on each rank (default: 4)"),
    ("--virtual-stages", count, "V", "interleaved, zbv, l2l: cut each into V, which the schedule places (default: 2)"),
    ("--microbatch-group-size", count, "N", "interleaved: microbatches in a row (default: P)"),
    ("--batches", count, "N", "where --microbatches is one number (default: 3; pipedream: 2P)"),
    ("--resident-stages", count, "K", "l2l: of a rank, on the device at once (default: 2)"),
    ("--host-update", str, None, "l2l: update a stage as soon as its gradients are on the host, or behind the step "
     "(default: deferred)", {"choices": (EAGER, DEFERRED)}),
    ("--stash", str, None, "l2l: inputs wait for their recompute on the device, or leave for the host "
     "(default: device)", {"choices": (DEVICE, HOST)}),
    ("--recompute", None, "", "recompute each forward before its backward"),
    ("--extra-warmup", None, "", "2(p-s-1) forwards of warm-up, which hide latency"),
    ("--balance", None, "", "move saved activations between stages x and p-1-x (bpipe does)"),
    ("--tied-embeddings", None, "", "reduce the gradients of tied embeddings"),
    ("--data-parallel", None, "", "reduce gradients over replicas"),
)  # fmt: skip
_PREDICTION = (
    ("--provisional", None, "", "2bw: compute each batch at predicted weights, from all microbatches that each stage "
     "has done"),
    ("--provisional-microbatches", count, "Q", "2bw: the same, from Q microbatches on every stage"),
)  # fmt: skip
_DEGREES = (
    ("--tensor", count, "T", "tensor parallel degree (default: 1)", {"default": 1}),
    ("--data", count, "D", "data parallel degree (default: 1)", {"default": 1}),
)
_TEXT = (
    ("--one-based", None, "", "number microbatches from 1, as the paper does"),
    ("--versions", None, "", "in text, write weight versions"),
    ("--columns", count, "N", "width of text that is piped", {"default": 120}),
)
