"""Train a few batches in a process of its own: what `l2l.py memory` starts, with and without a limit on its memory.

    bash -c 'ulimit -d 600000; PYTHONPATH=. python benchmarks/l2l_limited.py l2l --layers 96'

Prints one line of JSON: the losses, or what the process died of, and its private data (VmData) in bytes after the
imports (`imported`) and at its fullest after a batch. VmData is what `ulimit -d` limits: private memory that can be
written, the stacks of threads included, and no shared mapping.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from l2l_model import Flush, Model, Relay

CONTENDERS = {
    "flush": Flush,
    "l2l": lambda model: Relay(model, update="deferred"),
    "l2l eager": lambda model: Relay(model, update="eager"),
}


def memory_of_process(name: str) -> int:
    """Bytes of a row of /proc/self/status, such as VmData."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[name].split()[0]) * 1024


def train(name: str, model: Model, num_microbatches: int, num_batches: int) -> dict:
    found = {"contender": name, "layers": model.layers, "imported": memory_of_process("VmData"), "losses": []}
    most = found["imported"]
    try:
        contender = CONTENDERS[name](model)
        for _ in range(num_batches):
            found["losses"].append(contender.run(num_microbatches))
            most = max(most, memory_of_process("VmData"))
    except (RuntimeError, MemoryError) as error:
        if "allocate memory" not in str(error) and "start new thread" not in str(error) and str(error):
            raise
        found["died"] = (str(error).splitlines() or [type(error).__name__])[0]
    return {**found, "data": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    for name, default in (
        ("layers", 24), ("hidden", 128), ("sequence", 32), ("microbatches", 4), ("batches", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(layers=args.layers, hidden=args.hidden, sequence=args.sequence)
    print(json.dumps(train(args.contender, model, args.microbatches, args.batches)), flush=True)
    os._exit(0)  # threads of a run that died may wait for ever


if __name__ == "__main__":
    main()
