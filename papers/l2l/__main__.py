"""The relay (`--pipeline-schedule l2l`): its lanes, its memory, its speed, and the time of the host's optimizer.

    python -m papers.l2l lanes        # about 8 minutes; stages and lanes that sleep
    python -m papers.l2l --help       # the other parts; each has a --help and a --json FILE

lanes      Stages, fetches, stores, reductions and updates sleep on the threads on which the real ones work; engine,
           executor and lanes are real. The table has seconds a batch beside the simulator, the closed form and the
           paper's equation.
memory     Device bytes over the depth of models, by an independent meter; and `flush` beside the relay under one limit
           on private memory (`ulimit -d`).
compute    Seconds a batch of `flush` with full recompute over those of the relay, on one core and on two; and of FSDP2
           and DeepSpeed, which offload, too; with device bytes, bytes moved and losses.
captured   The same of a Llama of transformers, which finetune.py trains, on one core, beside FSDP2 and DeepSpeed with
           activation checkpointing of transformers.
optimizer  Nanoseconds a parameter of the host's AdamW, by kernel and threads, beside the memory's bandwidth.
moments    The loss of a small language model whose AdamW has moments of 16 bits, beside that with FP32.

The exit status is 1 if a requirement is violated; a sentence is printed for each violation.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.results import parser_of, save, set_environment

PARTS = {
    "lanes": "emulated stages and lanes against the simulator and the closed form",
    "memory": "device bytes over depth, and flush beside the relay under a limit on private memory",
    "compute": "real computation over flush with full recompute, beside FSDP2 and DeepSpeed",
    "captured": "real computation of a captured Llama over flush, beside FSDP2 and DeepSpeed",
    "optimizer": "nanoseconds a parameter of the host's AdamW, beside the memory's bandwidth",
    "moments": "the loss with moments of 16 bits, beside that with FP32",
}
"""Subcommand -> its help text. The module of its name adds flags (`add_arguments`), measures rows (`measure`), prints
them (`show`) and returns violated requirements (`complaints`)."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    for name, text in PARTS.items():
        part = parts.add_parser(name, help=text, description=text)
        part.add_argument("--json", type=Path, help="file for every figure")
        importlib.import_module(f"papers.l2l.{name}").add_arguments(part)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    set_environment()
    args = parse(arguments)
    part = importlib.import_module(f"papers.l2l.{args.part}")
    rows = part.measure(args)
    part.show(rows)
    save(args, rows)
    found = part.complaints(rows)
    for sentence in found:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
