"""The options of tools/schedule.py: the program, the costs of its instructions, and the memory sizes of stages."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatron.commands import synthesize
from megatron.documents import command_line
from megatron.documents.command_line import add_flags
from megatron.documents.flag_types import count, count_from_0, counts, positive, time, times
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
         "offload", "reload", "swap_out", "swap_in")  # fmt: skip
_SIZES = tuple(f"{part}_size" for part in (*PARTS, "tied_gradients"))


def costs(options: argparse.Namespace) -> Costs:
    names = {"recompute": "recompute_time", "forward_bytes": "transfer"}
    others = {name: name for name in _COSTS if name not in (*names.values(), "no_overlap")}
    given = {name: getattr(options, flag) for name, flag in (names | others).items()}
    return Costs(**given, bandwidth=1.0, overlap=not options.no_overlap)


def sizes(options: argparse.Namespace) -> MemorySizes | None:
    """The memory sizes of the options, or None if no size is given."""
    given = {name.removesuffix("_size"): getattr(options, name) for name in _SIZES}
    return MemorySizes(**given) if any(given.values()) else None


def add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs", "In any unit of time; one number, or one for each stage or edge.")
    for name, default, meaning in (
        ("--forward", 1.0, "time of a microbatch's forward at a stage (default: 1)"),
        ("--backward", 2.0, "time of its backward, without the recompute (default: 2)"),
        ("--backward-input", None, "time of I in split backwards (default: half of --backward)"),
        ("--backward-weight", None, "time of W in split backwards (default: the rest of --backward)"),
        ("--recompute-time", None, "time of a recompute (default: as --forward)"),
        ("--step", 0.0, "time of the optimizer's step (default: 0, as for all below)"),
        ("--predict", None, "time of a prediction of weights (default: as --step)"),
        ("--hold", 0.0, "time to copy gradients for a prediction"),
        ("--transfer", 0.0, "time for which a transfer occupies its edge"),
        ("--latency", 0.0, "time from the end of the sending to the arrival"),
        ("--evict", 0.0, "time to move a microbatch's saved activations to the pair stage"),
        ("--load", None, "time to move saved activations back (default: as --evict)"),
        ("--reduce-grad", 0.0, "time of the gradients' reduction over replicas"),
        ("--fetch", 0.0, "l2l: time to copy a stage's weights to the device"),
        ("--store", 0.0, "l2l: time to copy a stage's gradients to the host"),
        ("--update", 0.0, "l2l: time of a stage's update on the host"),
        ("--offload", 0.0, "l2l: time to copy the input of a microbatch to the host"),
        ("--reload", None, "l2l: time to copy the input back (default: as --offload)"),
        ("--swap-out", 0.0, "time to copy a microbatch's saved activations to the host"),
        ("--swap-in", None, "time to copy saved activations back (default: as --swap-out)"),
    ):
        add_flags(costs, (name, times, "T[,T...]", meaning, {"default": default}))
    add_flags(
        costs,
        ("--reduce-embed", time, "T", "time of the tied embeddings' reduction", {"default": 0.0}),
        ("--reduce-norm", time, "T", "time of the norm's reduction", {"default": 0.0}),
        ("--no-overlap", None, "", "a transfer occupies its sender, too, which cannot compute meanwhile"),
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the sizes from which each rank's memory over time is computed."""
    memory = parser.add_argument_group(
        "memory",
        "In any unit, such as GiB; one number, or one for each stage or edge. With any of them, memory is shown.",
    )
    meanings = (
        "size of a stage's optimizer state", "size of one version of a stage's weights",
        "size of one buffer of a stage's gradients", "size of a stage's saved activations of one microbatch",
        "size of one microbatch at a stage between I and W (default: as --activations-size)",
        "size of an activation or gradient between stages",
        "size of the tied embeddings' gradients, a copy of which a prediction reads",
    )  # fmt: skip
    for name, meaning in zip(_SIZES, meanings, strict=True):
        default = {"default": None if name == "deferred_size" else 0.0}
        add_flags(memory, (f"--{name.replace('_', '-')}", times, "X[,X...]", meaning, default))


FLAGS = ("recompute", "extra_warmup", "balance", "tied_embeddings", "data_parallel", "optimistic")
_PREDICTIONS = ("provisional_microbatches", "reduce_partial")
_HOST = ("resident_stages", "host_update", "stash")
_HALVES = ("backward_input", "backward_weight", "deferred_size")
_PRESET_ONLY = (
    "provisional", *_PREDICTIONS, "most_on_device", "stages", "virtual_stages", "microbatch_group_size", "batches",
    *_HOST, *FLAGS,
)  # fmt: skip
_MOST = 20_000_000  # computations and transfers of a program; more do not fit into an ordinary machine's memory
_JOB_ONLY = ("tensor", "data", "distributed_optimizer")
_TEXT_ONLY = ("versions", "columns")
_PICTURE_ONLY = ("saved", "lanes", "critical_path", "title", "time_label", "time_scale", "width", *_SIZES)

Command = Callable[[argparse.Namespace], int]


# --- meaning of the options


def schedule(options: argparse.Namespace) -> Schedule:
    flags = {flag: getattr(options, flag) for flag in (*FLAGS, *_PREDICTIONS, "most_on_device")}
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
    """The residency of the preset with the options' changes, or None if the preset keeps weights on the device."""
    asked = {"stages": options.resident_stages, "update": options.host_update, "stash": options.stash}
    given = {name: value for name, value in asked.items() if value is not None}
    chosen = PRESETS[options.schedule].residency
    return None if chosen is None else replace(chosen, **given)


def predicts(options: argparse.Namespace) -> bool:
    return options.provisional or options.provisional_microbatches is not None


def program(options: argparse.Namespace) -> Program:
    """The program of a preset, or of a file.

    Raises:
        ValueError: for incompatible choices, a file that is not a program, or a program too large for memory.
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
    """The notes in a program's file about the run that it is meant for."""
    return csv_text.read_notes(_text(options))


def _text(options: argparse.Namespace) -> str:
    return Path(options.file).read_text(encoding="utf-8-sig")


def degrees_text(options: argparse.Namespace) -> str:
    """The leading lines of a program's file with the degrees of its job; a degree of 1 has no line."""
    degrees = {"tensor": options.tensor, "data": options.data}
    return "".join(f"# {name}: {degree}\n" for name, degree in degrees.items() if degree > 1)


def _require_memory(num_stages: int, num_microbatches: int) -> None:
    num_instructions = 6 * num_stages * num_microbatches  # F, B, and their sends and receives
    if num_instructions > _MOST:
        raise ValueError(
            f"{num_stages} stages and {num_microbatches} microbatches make about {num_instructions:.1e} instructions, "
            f"more than the {_MOST:.0e} that a machine holds; give fewer of either, for a longer run repeats itself"
        )


def _fewest_microbatches(schedule: Schedule) -> int:
    """The least number of microbatches that fills the pipeline and that the schedule accepts.

    The size of a batch if the schedule's weights fix it.
    """
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
        if num_read == 0:
            extras += ", error feedback"
        else:
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
    """Parse the options of a command; wrong options end the process with a message and status 2."""
    options = _parser(description, commands).parse_args(arguments)
    if options.command == "synthesize":
        return options
    _require_one_source(options)
    replicas = {"check": "data", "show": "data", "without": "replicas"}.get(options.command)
    if replicas and options.schedule is not None and getattr(options, replicas) > 1:
        options.data_parallel = True
    _require_subject(options)
    _require_effect(options)
    return options


def _require_one_source(options: argparse.Namespace) -> None:
    """End the process with a message unless the program has exactly one source and all given options apply to it."""
    if (options.file is None) == (options.schedule is None):
        options.parser.error("name either a CSV file or a --schedule")
    if options.schedule is None:
        ignored = [name for name in _PRESET_ONLY if getattr(options, name)]
    else:
        ignored = ["weights"] * bool(options.weights) + ["complete"] * getattr(options, "complete", False)
        ignored += ["batches"] * bool(options.batches and options.microbatches and len(options.microbatches) > 1)
    if ignored:
        source = "a CSV file" if options.schedule is None else "this preset"
        options.parser.error(f"--{ignored[0].replace('_', '-')} has no effect on {source}; leave it out")


def _require_subject(options: argparse.Namespace) -> None:
    """End the process with a message for options of predictions or host weights that the schedule does not have."""
    if options.schedule is None:
        return
    error = options.parser.error
    if predicts(options) and PRESETS[options.schedule].policy != TWO_BW:
        flag = "provisional" if options.provisional else "provisional-microbatches"
        error(f"--{flag} predicts the weights of 2bw, not of {options.schedule}; give --schedule 2bw, or leave it out")
    for name in _HOST:
        if getattr(options, name) and PRESETS[options.schedule].residency is None:
            error(f"--{name.replace('_', '-')} has no effect on weights on the device; give --schedule l2l")
    if options.reduce_partial and not predicts(options):
        error("--reduce-partial has no effect on a program without predictions; add --provisional")
    if options.reduce_partial and not options.data_parallel:
        error("--reduce-partial has no effect on a program without replicas; add --data-parallel")


def _require_effect(options: argparse.Namespace) -> None:
    """End the process with a message for an option whose subject the command does not print or draw."""
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
    elif options.command == "without":
        ignored += [("batches", "any number of batches; leave it out")]
    if options.schedule is not None and options.command != "check":
        without = {"recompute_time": "recompute", "reduce_grad": "data_parallel", "reduce_embed": "tied_embeddings"}
        without |= {"predict": "provisional"} if not predicts(options) else {}
        without |= {"hold": "provisional_microbatches"} if not options.reduce_partial else {}
        if options.command in ("simulate", "draw"):
            without |= {"tied_gradients_size": "tied_embeddings" if predicts(options) else "provisional"}
        without |= dict.fromkeys(("swap_out", "swap_in"), "most_on_device")
        without |= dict.fromkeys(("evict", "load"), "balance") if not PRESETS[options.schedule].balance else {}
        if PRESETS[options.schedule].recompute:
            del without["recompute_time"]
        if PRESETS[options.schedule].residency is None:
            ignored += [(name, "weights on the device; give --schedule l2l") for name in ("fetch", "store", "update")]
        halves = [name for name in _HALVES if getattr(options, name, None) != parser.get_default(name)]
        if halves and not _splits_backward(options):  # the second test takes seconds for a thousand ranks
            ignored += [(name, "whole backwards; give --schedule zb-h1 or zbv") for name in halves]
        ignored += [
            (name, f"a program without it; add --{flag.replace('_', '-')}")
            for name, flag in without.items()
            if not getattr(options, flag)
        ]
    for name, where in ignored:
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} has no effect on {where}")


def _splits_backward(options: argparse.Namespace) -> bool:
    """Whether the preset splits backwards into I and W; True for refused choices, whose error is reported later."""
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
    left = "say what the loss of a rank costs, and make the program of the ranks that are left"
    add_flags(
        _command(commands, "without", run["without"], left),
        ("--replicas", count, "D", "replicas of the pipeline (the data parallel degree)", {"required": True}),
        ("--lost", str, "R.S", "the lost ranks together, each as replica and pipeline rank, such as 1.2 3.0 (default: "
         "every loss of one rank, which is the same in every replica)", {"nargs": "+"}),
        ("--pairs", None, "", "every loss of two ranks, of one replica and of two neighbours"),
        ("--held", count, "N", "microbatches whose activations a rank may hold, over its stages (default: as many as "
         "the fullest rank without a loss)"),
        ("--csv", str, "FILE", "write the program of the ranks that are left ('-': to the terminal)"),
        ("--json", str, "FILE", "write the times, bounds and numbers of the table"),
    )  # fmt: skip
    made = commands.add_parser(
        "synthesize", help=synthesize.SUMMARY, description=synthesize.SUMMARY, allow_abbrev=False
    )
    synthesize.add_options(made)
    made.set_defaults(run=run["synthesize"], command="synthesize", parser=made)
    return parser


def _command(commands: argparse._SubParsersAction, name: str, run: Command, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False,
                                 formatter_class=argparse.HelpFormatter)  # fmt: skip
    parser.add_argument("file", nargs="?", help="CSV file with a row of instructions per rank, instead of a preset")
    add_flags(parser, _MICROBATCHES)
    file = parser.add_argument_group("CSV file")
    file.add_argument("--weights", choices=list(POLICIES), help="weight policy, if the file does not name it")
    preset = parser.add_argument_group("preset")
    preset.add_argument("--schedule", choices=PRESETS, help="name of the preset")
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
    "--microbatches", counts, "M[,M...]",
    "microbatches of each batch; several numbers: batches of a ramp-up (default: as few as fill the pipeline)",
)  # fmt: skip
_PRESET = (
    ("--stages", count, "P", "pipeline stages, one on each rank (default: 4)"),
    ("--virtual-stages", count, "V", "interleaved(-zb), zbv, l2l: number of stages of each rank (default: 2)"),
    ("--microbatch-group-size", count, "N", "interleaved(-zb): microbatches in a row (default: P)"),
    ("--batches", count, "N", "number of batches if --microbatches is one number (default: 3; pipedream: 2P)"),
    ("--resident-stages", count, "K", "l2l: stages of a rank on the device at the same time (default: 2)"),
    ("--host-update", str, None, "l2l: update a stage as soon as its gradients are on the host, or after the step "
     "(default: deferred)", {"choices": (EAGER, DEFERRED)}),
    ("--stash", str, None, "l2l: inputs wait for their recompute on the device, or leave for the host "
     "(default: device)", {"choices": (DEVICE, HOST)}),
    ("--recompute", None, "", "recompute each forward before its backward"),
    ("--extra-warmup", None, "", "2(p-s-1) forwards of warm-up, which hide latency"),
    ("--balance", None, "", "move saved activations between stages x and p-1-x (bpipe does)"),
    ("--most-on-device", count, "N", "microbatches that a rank saves on its device; the others wait on the host"),
    ("--tied-embeddings", None, "", "reduce the gradients of tied embeddings"),
    ("--data-parallel", None, "", "reduce gradients over replicas"),
    ("--optimistic", None, "", "step before the norm is known, and validate the step in the next batch"),
)  # fmt: skip
_PREDICTION = (
    ("--provisional", None, "", "2bw: compute each batch at predicted weights, from all microbatches that each stage "
     "has done"),
    ("--provisional-microbatches", count_from_0, "Q", "2bw: as --provisional, from Q microbatches on every stage; 0: "
     "the last update is taken again (error feedback)"),
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
