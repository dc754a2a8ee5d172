"""What tools/schedule.py is told that instructions take and stages hold."""

import argparse

from megatron.commands.common.command_line import time, times
from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.simulate.memory_curve import PARTS, MemorySizes

NAMES = ("forward", "backward", "backward_input", "backward_weight", "recompute_time", "step", "transfer",
         "latency", "no_overlap", "evict", "load",
         "reduce_grad", "reduce_embed", "reduce_norm", "predict", "hold", "fetch", "store", "update",
         "offload", "reload")  # fmt: skip
SIZES = tuple(f"{part}_size" for part in (*PARTS, "tied_gradients"))


def costs(options: argparse.Namespace) -> Costs:
    return Costs(
        forward=options.forward,
        backward=options.backward,
        backward_input=options.backward_input,
        backward_weight=options.backward_weight,
        recompute=options.recompute_time,
        step=options.step,
        predict=options.predict,
        hold=options.hold,
        latency=options.latency,
        forward_bytes=options.transfer,
        bandwidth=1.0,
        overlap=not options.no_overlap,
        evict=options.evict,
        load=options.load,
        reduce_grad=options.reduce_grad,
        reduce_embed=options.reduce_embed,
        reduce_norm=options.reduce_norm,
        fetch=options.fetch,
        store=options.store,
        update=options.update,
        offload=options.offload,
        reload=options.reload,
    )


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
        costs.add_argument(name, type=times, default=default, metavar="T[,T...]", help=meaning)
    costs.add_argument("--reduce-embed", type=time, default=0.0, metavar="T", help="of the tied embeddings' reduction")
    costs.add_argument("--reduce-norm", type=time, default=0.0, metavar="T", help="of the norm's reduction")
    costs.add_argument(
        "--no-overlap", action="store_true", help="a transfer holds its sender, too: it sends instead of computing"
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the sizes from which each rank's memory over time is drawn."""
    memory = parser.add_argument_group(
        "memory",
        "In any unit, such as GiB; one number, or one for each stage or edge. With any of them, memory is shown.",
    )
    for name, meaning in zip(
        SIZES,
        (
            "of a stage's optimizer state",
            "of one version of a stage's weights",
            "of one buffer of its gradients",
            "that it saves of one microbatch",
            "that it holds of one between I and W (default: as --activations-size)",
            "of an activation or gradient between stages",
            "of the tied embeddings in a buffer of gradients, a copy of which a prediction reads",
        ),
        strict=True,
    ):
        default = None if name == "deferred_size" else 0.0
        memory.add_argument(
            f"--{name.replace('_', '-')}", type=times, default=default, metavar="X[,X...]", help=meaning
        )
