"""Run the hour: every part in the order of its value, each in a process of its own, and go on where it stopped.

    bash benchmarks/gpu_hour.sh --minutes 9          # makes importable what a bare torch lacks, then this
    python -m benchmarks.gpu_hour --list             # the parts, and how far they are
    python -m benchmarks.gpu_hour --rehearse         # the same code, tiny, on the CPU
    python -m benchmarks.gpu_hour --only memory l2l  # these parts

A part's crash, hang, or want of memory is a result, and the next part runs. Called again, parts that are done are not
run again, with the same sources, card, torch and Python. A part that was cut off comes first, but behind the others if
that was not for the first time, and those that failed come last. A part is not begun if it is expected to take longer
than is left, unless nothing was begun in this call.
"""

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_hour import attempt
from benchmarks.gpu_hour.machine import identity, sentence
from benchmarks.gpu_hour.parts import PARTS, Part
from benchmarks.gpu_hour.records import (
    DONE,
    FAILED,
    INTERRUPTED,
    ROOT,
    RUNNING,
    SKIPPED,
    Records,
    read_result,
    revision,
    sources,
)
from megatron.documents.files import write_whole
from megatron.processes import end_left

OUT = ROOT / "outputs"
TO_END = 15.0  # seconds of a call that are kept for the end of its last part
REHEARSED = 20.0  # seconds that a part is expected to take at most in a rehearsal
TAIL, STACKS = 15, 200  # lines that are printed of a part that failed, and of stacks


def parse(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_hour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of this call; what is left is for the next one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results; default: gpu_hour in outputs/")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these parts alone")
    parser.add_argument("--again", action="store_true", help="run the parts of --only even if they are done")
    parser.add_argument("--keep", action="store_true", help="parts that are done with other sources count as done")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU; the figures say nothing")
    parser.add_argument("--list", action="store_true", help="show the parts, and how far they are")
    args = parser.parse_args(arguments)
    args.out = args.out or OUT / ("gpu_hour_rehearsal" if args.rehearse else "gpu_hour")
    names = [part.name for part in parts]
    if unknown := sorted(set(args.only or ()) - set(names)):
        parser.error(f"--only names {', '.join(unknown)}; the parts are {', '.join(names)}")
    if args.again and not args.only:
        parser.error("--again needs --only, which names the parts that are to run again")
    if not args.minutes > 0:
        parser.error(f"--minutes is {args.minutes:g}; give more than 0")
    return args


class Hour:
    """One call: its time, its records, and the machine that it runs on."""

    def __init__(self, args: argparse.Namespace, parts: Sequence[Part], say: Callable[[str], None]) -> None:
        self._end = time.monotonic() + 60 * args.minutes
        self._args, self._say = args, say
        self._parts = [part for part in parts if args.only is None or part.name in args.only]
        self.records = Records(args.out)
        others = [name for name, record in self.records.by_name.items() if record["rehearsal"] != args.rehearse]
        if others:
            kind = "measurements, and this is a rehearsal" if args.rehearse else "a rehearsal, and this is none"
            raise ValueError(f"{args.out} holds {kind}; give another --out")
        self._begun, self._too_long = 0, []

    @property
    def left(self) -> float:
        return self._end - time.monotonic() - TO_END

    def run(self) -> int:
        """Run what is to be run. Returns 0 if every part is done or skipped, else 3."""
        args, records = self._args, self.records
        try:
            end_left(args.out.resolve())
        except ValueError as error:
            raise ValueError(f"{error}".replace("--output", "--out")) from error
        records.prepare()
        self._sources, self._revision = sources(), revision()
        self._machine = self._look_at_machine()
        self._say(sentence(self._machine))
        if "card" not in self._machine and not args.rehearse:
            raise ValueError("torch sees no CUDA device; run this on a machine with one, or give --rehearse")
        records.append({"machine": self._machine, "sources": self._sources, "revision": self._revision})
        queue = self._queue()
        self._say(
            f"{len(queue)} of {len(self._parts)} parts to run, {self.left / 60:.1f} minutes; results in {args.out}"
        )
        for number, part in enumerate(queue, start=1):
            self._take(part, f"[{number}/{len(queue)}] {part.name}")
        return self._close()

    def _queue(self) -> list[Part]:
        """What is not done: what was cut off once, what was never begun, what was cut off again, what failed."""
        if self._args.again:
            return list(self._parts)
        places = {part.name: self._place(part) for part in self._parts if self._status(part) != DONE}
        return sorted((part for part in self._parts if part.name in places), key=lambda part: places[part.name])

    def _place(self, part: Part) -> int:
        status = self._status(part)
        if status == INTERRUPTED:
            return 0 if self.records.by_name[part.name]["attempt"] == 1 else 2
        return 3 if status in FAILED else 1

    def _status(self, part: Part) -> str | None:
        """The status of a record that counts; None: there is none."""
        record = self.records.by_name.get(part.name)
        if record is None or record["machine"] != identity(self._machine):
            return None
        counts = record["sources"] == self._sources or (self._args.keep and record["status"] == DONE)
        return record["status"] if counts else None

    def _take(self, part: Part, title: str) -> None:
        record = {
            "part": part.name, "question": part.question, "status": RUNNING, "reason": "", "seconds": 0.0,
            "attempt": self.records.by_name.get(part.name, {}).get("attempt", 0) + 1, "sources": self._sources,
            "revision": self._revision, "machine": identity(self._machine), "rehearsal": self._args.rehearse,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "result": None,
        }  # fmt: skip
        if lack := self._lack(part):
            self.records.put(record | {"status": SKIPPED, "reason": lack})
            self._say(f"{title}: skipped, {lack}")
            return
        expected = min(part.expected, REHEARSED) if self._args.rehearse else part.expected
        if self.left < (expected if self._begun else 1.0):
            self._too_long.append(f"{part.name} ({expected:.0f} s)")
            return
        self._begun += 1
        limit = min(part.limit, self.left)
        self._say(f"{title}: {part.question} (at most {limit:.0f} s)")
        self.records.put(record | self._earlier(part))
        ending = attempt.run(
            self._command(part), log=self.records.folder / "logs" / f"{part.name}.{record['attempt']}.log",
            folder=self._args.out.resolve(), limit=limit, is_own_limit=limit == part.limit,
            environment={"CUDA_VISIBLE_DEVICES": ""} if self._args.rehearse else {},
        )  # fmt: skip
        self._finish(part, record, ending, title)

    def _earlier(self, part: Part) -> dict:
        """Put the results of the attempt before where the part finds them, and keep them in the record."""
        before, file = self.records.by_name.get(part.name), self.records.part_file(part.name)
        file.unlink(missing_ok=True)
        self.records.before_file(part.name).unlink(missing_ok=True)
        if self._status(part) is None or before is None or before.get("result") is None:
            return {}
        write_whole(self.records.before_file(part.name), json.dumps(before["result"]) + "\n")
        return {"result": before["result"], "result_of_attempt": before.get("result_of_attempt", before["attempt"])}

    def _command(self, part: Part) -> list[str]:
        words = [*part.argv, "--json", str(self.records.part_file(part.name).resolve())]
        return [*words, "--rehearse"] if self._args.rehearse else words

    def _finish(self, part: Part, record: dict, ending: attempt.Ending, title: str) -> None:
        result, problem = read_result(self.records.part_file(part.name))
        status, reason = ending.status, ending.reason
        if status == DONE and result is None:
            status, reason = "no result", problem or "it ended well and wrote no file of results"
        elif problem:
            reason = f"{reason}; {problem}"
        kept = {"result": result, "result_of_attempt": record["attempt"]}
        if result is None:  # what an earlier attempt had written is not lost
            kept = {name: value for name, value in self.records.by_name[part.name].items() if name in kept}
        self.records.put(record | {"status": status, "reason": reason, "seconds": round(ending.seconds, 1)} | kept)
        self._show((result or {}).get("lines", ()), mark="   ")
        printed = ending.output.splitlines()
        if status in (INTERRUPTED, "time limit"):
            self._show([line for line in printed if not line.startswith("Extension modules:")][:STACKS])
        elif status != DONE:
            self._show(printed[-TAIL:])
        self._say(f"{title}: {status} after {ending.seconds:.0f} s{', ' + reason if reason else ''}")

    def _show(self, lines: Sequence[str], mark: str = "    |") -> None:
        for line in lines:
            self._say(f"{mark} {line}")

    def _lack(self, part: Part) -> str | None:
        """What the part needs and is not there."""
        for name in part.packages:
            if find_spec(name) is None:
                return f"it needs {name}, which is not installed"
        found = tuple(self._machine.get("capability", (0, 0)))
        if not self._args.rehearse and found < part.capability:
            needed, has = (".".join(map(str, each)) for each in (part.capability, found))
            return f"it needs compute capability {needed}, and the card has {has}"
        return None

    def _look_at_machine(self) -> dict:
        file = self._args.out / "machine.json"
        file.unlink(missing_ok=True)
        attempt.run(
            ["-m", "benchmarks.gpu_hour.machine", "--json", str(file.resolve())], log=self._args.out / "machine.log",
            folder=self._args.out.resolve(), limit=max(1.0, min(120.0, self.left)), is_own_limit=True,
            environment={"CUDA_VISIBLE_DEVICES": ""} if self._args.rehearse else {},
        )  # fmt: skip
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            said = (self._args.out / "machine.log").read_text(errors="replace").strip().splitlines()
            raise ValueError(f"torch does not start here: {said[-1] if said else 'it says nothing'}") from None

    def _close(self) -> int:
        open_parts = [part.name for part in self._parts if self._status(part) not in (DONE, SKIPPED)]
        if self._too_long:
            self._say(f"too long for what is left of this call: {', '.join(self._too_long)}")
        if not open_parts:
            self._say("all parts are done")
            return 0
        self._say(f"not done: {', '.join(open_parts)}; call this again to go on")
        return 3


def show(args: argparse.Namespace, parts: Sequence[Part]) -> None:
    records = Records(args.out)
    for part in parts:
        record = records.by_name.get(part.name, {})
        state = record.get("status", "not run")
        print(f"{part.name:16} {part.expected:4.0f} s, at most {part.limit:4.0f}  {state:14} {part.question}")


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    args = parse(arguments, parts)
    if args.list:
        show(args, parts)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the part's processes are ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - begun), 60)
        print(line := f"{minutes:3d}:{seconds:02d} {text}", flush=True)
        with (args.out / "hour.log").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    try:
        return Hour(args, parts, say).run()
    except ValueError as error:
        print(f"gpu_hour: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
