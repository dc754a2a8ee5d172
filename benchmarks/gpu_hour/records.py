"""The records of an hour: what each part gave, in a folder from which a later call goes on.

A record is written as `NAME.json`, as a whole, and appended to `hour.jsonl`. Either is enough to go on from, so the one
file `hour.jsonl` is all that has to be carried from machine to machine. A record that says `running` belongs to a part
during which the runner itself was killed; what the part had written by then is in `parts/NAME.json`.

Records belong together where the sources and the kind of machine are the same. Sources are told apart by their
contents, since a copy of a checkout need not have its history.
"""

import hashlib
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from megatron.documents.files import write_whole

ROOT = Path(__file__).resolve().parents[2]
RUNNING, DONE, SKIPPED, INTERRUPTED = "running", "done", "skipped", "interrupted"
FAILED = ("failed", "crashed", "out of memory", "time limit", "no result")
"""How a part may end that is not done: an error, a signal, no memory, its own limit, no file of results."""


def sources() -> str:
    """A number that changes when any Python file or the files beside them do."""
    digest = hashlib.sha256()
    for folder in ("benchmarks", "megatron", "papers", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def revision() -> str | None:
    """The commit of the checkout, where it has its history."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout.strip() or None
    return None


def problem_with(content: object) -> str | None:
    """Why a file of results is none; None: it is one."""
    if not isinstance(content, dict):
        return "it holds no object"
    lines, figures = content.get("lines"), content.get("figures")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return "its lines are no list of sentences"
    return None if isinstance(figures, dict) else "its figures are no object"


def read_result(path: Path) -> tuple[dict | None, str | None]:
    """(what a part wrote, why that is nothing); both None where it wrote nothing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"the file of results cannot be read ({error})"
    problem = problem_with(content)
    return (None, f"the file of results is none: {problem}") if problem else (content, None)


class Records:
    """The records in a folder, the newest of each part. Attribute `by_name`: part -> its record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_name: dict[str, dict] = {}
        self.machine: dict = {}
        for line in self._lines():
            if "part" in line:
                self.by_name[line["part"]] = line
            elif "machine" in line:
                self.machine = line["machine"]
        for path in sorted(folder.glob("*.json")):
            record = _object(path.read_text(encoding="utf-8", errors="replace"))
            if record.get("part") == path.stem:
                self.by_name[path.stem] = record

    def prepare(self) -> None:
        """Make the folders, and say of a part during which the runner was killed what it had written."""
        for name in ("parts", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name, record in list(self.by_name.items()):
            if record["status"] == RUNNING:
                result, _ = read_result(self.part_file(name))
                reason = "the runner was ended while it ran"
                self.put(record | {"status": INTERRUPTED, "reason": reason, "result": result or record.get("result")})

    def part_file(self, name: str) -> Path:
        return self.folder / "parts" / f"{name}.json"

    def before_file(self, name: str) -> Path:
        """The file with the results of the attempt before, for a part that goes on from them."""
        return self.folder / "parts" / f"{name}.before.json"

    def put(self, record: dict) -> None:
        """Keep a record in both files. A part that runs is in its own file only."""
        self.by_name[record["part"]] = record
        write_whole(self.folder / f"{record['part']}.json", json.dumps(record, indent=1) + "\n")
        if record["status"] != RUNNING:
            self.append(record)

    def append(self, line: dict) -> None:
        path = self.folder / "hour.jsonl"
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # the runner was killed in a line
        with path.open("a", encoding="utf-8") as stream:
            stream.write(("\n" if torn else "") + json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _lines(self) -> list[dict]:
        path = self.folder / "hour.jsonl"
        if not path.exists():
            return []
        return [_object(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]


def _object(text: str) -> dict:
    """The JSON object of a text; an empty one where it is torn."""
    with suppress(ValueError):
        content = json.loads(text)
        if isinstance(content, dict):
            return content
    return {}
