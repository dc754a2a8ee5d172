"""What tools/schedule.py is told that instructions take and stages hold."""

import argparse

from megatron.commands.common.command_line import add_flags, time, times
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.memory_curve import PARTS, MemorySizes

NAMES = ("forward", "backward", "backward_input", "backward_weight", "recompute_time", "step", "transfer",
         "latency", "no_overlap", "evict", "load",
         "reduce_grad", "reduce_embed", "reduce_norm", "predict", "hold", "fetch", "store", "update",
         "offload", "reload")  # fmt: skip
SIZES = tuple(f"{part}_size" for part in (*PARTS, "tied_gradients"))


def costs(options: argparse.Namespace) -> Costs:
    names = {"recompute": "recompute_time", "forward_bytes": "transfer"}
    others = {name: name for name in NAMES if name not in (*names.values(), "no_overlap")}
    given = {name: getattr(options, flag) for name, flag in (names | others).items()}
    return Costs(**given, bandwidth=1.0, overlap=not options.no_overlap)


def sizes(options: argparse.Namespace) -> MemorySizes | None:
    """None where no size is given."""
    given = {name.removesuffix("_size"): getattr(options, name) for name in SIZES}
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
    for name, meaning in zip(SIZES, meanings, strict=True):
        default = {"default": None if name == "deferred_size" else 0.0}
        add_flags(memory, (f"--{name.replace('_', '-')}", times, "X[,X...]", meaning, default))
