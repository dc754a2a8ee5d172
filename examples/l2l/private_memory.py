"""Run a command, and write down the most private memory that one of its processes had: what `ulimit -d` limits.

    python examples/l2l/private_memory.py RECORD.json --limit BYTES --depth LAYERS --label NAME -- COMMAND ...

On a CPU, host and "device" are one memory. The l2l store lies in shared mappings, which the limit does not count, so
what a process has of its own stands for the device's memory: Python and torch, activations, and the weights and
gradients that are not in the store. Linux calls it VmData. It is read every 20 ms from outside, so a shorter peak may
be missed; the kernel's limit misses none. Without `--limit` nothing is limited. Ends as the command does.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

INTERVAL = 0.02  # seconds


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def tree(pid: int) -> list[int]:
    """The process and what it started."""
    return [pid, *(each for child in children(pid) for each in tree(child))]


def private_bytes(pid: int) -> int:
    """0 where the process has ended."""
    try:
        found = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--limit", type=int, help="bytes (default: none)")
    parser.add_argument("--depth", type=int, required=True, help="layers, for the record")
    parser.add_argument("--label", required=True, help="for the record")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()

    def limit() -> None:
        if args.limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (args.limit, args.limit))

    most = 0
    process = subprocess.Popen(args.command, stdin=subprocess.DEVNULL, preexec_fn=limit)
    while process.poll() is None:
        most = max([most, *map(private_bytes, tree(process.pid))])
        time.sleep(INTERVAL)
    args.record.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "label": args.label, "depth": args.depth, "limit": args.limit, "private_bytes": most,
        "status": process.returncode,
    }  # fmt: skip
    partial = args.record.with_suffix(".partial")
    partial.write_text(json.dumps(record) + "\n")
    os.replace(partial, args.record)
    sys.exit(process.returncode if process.returncode >= 0 else 128 - process.returncode)


if __name__ == "__main__":
    main()
