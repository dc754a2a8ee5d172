"""Flags of a dry run: everything short of the cluster."""

from megatron.trainer.arguments.flags.specification import Group, Role, integer, number, option

GROUP = Group(
    "dry run",
    "Check a command line for a cluster on any machine: one process, no launcher, no GPU. See cluster.md.",
    (
        option(
            "--dry-run",
            integer,
            None,
            "Check the flags for a job of this many GPUs, build and prove its program, estimate its memory, print its "
            "rank map, and exit: 0, or 1 with the reason. Data, tokenizer and checkpoint may be missing.",
            metavar="GPUS",
        ),
        option(
            "--dry-run-gpus-per-node",
            integer,
            8,
            "With --dry-run: GPUs of a node, where no --rank-topology says it.",
        ),
        option(
            "--dry-run-gpu",
            str,
            None,
            "With --dry-run: the GPU, as A100-80, H100, V100-16, or its memory in GiB; a job that does not fit is "
            "refused.",
            metavar="GPU",
        ),
        option(
            "--dry-run-host-memory",
            number,
            None,
            "With --dry-run and l2l: GiB of a node's memory for training; a job that does not fit is refused, and the "
            "largest model of its shape that would fit is said.",
            metavar="GIB",
        ),
        option("--dry-run-json", str, None, "With --dry-run: write everything to this file, too.", metavar="FILE"),
    ),
    Role.CONFIGURATION,
)
