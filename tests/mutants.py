"""Small faults in the code that the tests have to notice: which, and whether they do.

Problem: a suite is made shorter, and nobody knows what it has ceased to notice. Solution: 300 faults (mutants), drawn
once by a seeded generator over schedules, checker, executor, updates, planner and checkpoints and kept in
`mutants.json`. `reach` runs the suite once with a probe at each of them, and one in every function, and writes which
tests come by. `run` puts one fault after another into a copy of the tree and runs these tests, the quickest first,
until one fails.

    python -m tests.mutants draw                     # writes tests/mutants.json anew
    python -m tests.mutants reach --folder FOLDER    # one run of the usual selection
    python -m tests.mutants run --folder FOLDER      # what is killed, by whom, and what survives

A mutant is named by its file, its function, the statement and the change, so it is found again where lines have moved.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.json"
SEED, OF_EACH, OF_A_FUNCTION = 38, 50, 2
SUBJECTS = {
    "schedules": ("megatron/pipeline/schedules", "megatron/pipeline/program"),
    "checker": ("megatron/pipeline/check", "megatron/pipeline/graph"),
    "executor": (
        "megatron/pipeline/runtime/executor.py",
        "megatron/pipeline/runtime/steps.py",
        "megatron/pipeline/runtime/exchange.py",
        "megatron/pipeline/runtime/engine.py",
        "megatron/pipeline/runtime/transport",
        "megatron/pipeline/runtime/activations",
        "megatron/pipeline/runtime/relay",
    ),
    "updates": ("megatron/pipeline/runtime/update", "megatron/pipeline/runtime/stages"),
    "planner": ("megatron/planner",),
    "checkpoints": ("megatron/trainer/checkpoint",),
}
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SILENT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Mutant:
    """A change of one expression or statement: `place` counts equal ones in the same function."""

    subject: str
    path: str
    function: str
    before: str
    after: str
    statement: str
    place: int = 0


@dataclass(frozen=True)
class _Site:
    function: str
    node: ast.AST
    after: str
    statement: ast.stmt  # the one before which a probe can stand
    owner: ast.stmt


def _changes(node: ast.AST) -> Iterator[str]:
    """What may stand in the node's place, as source."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARISONS:
            yield ast.unparse(ast.Compare(left, [_COMPARISONS[type(operator)]()], [right]))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            yield ast.unparse(ast.BinOp(left, _OPERATORS[type(operator)](), right))
        case ast.BoolOp(op=operator, values=values):
            yield ast.unparse(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield ast.unparse(operand)
        case ast.Constant(value=bool() as value):
            yield repr(not value)
        case ast.Constant(value=int() as value):
            yield repr(value + 1)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _CALLS:
            yield ast.unparse(ast.Call(ast.Name(_CALLS[name]), args, keywords))
        case ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.AugAssign(target=target, op=operator, value=value) if type(operator) in _OPERATORS:
            yield ast.unparse(ast.AugAssign(target, _OPERATORS[type(operator)](), value))


def _sites(source: str) -> Iterator[_Site]:
    lines = source.splitlines()

    def starts_its_line(statement: ast.stmt) -> bool:
        return not lines[statement.lineno - 1][: statement.col_offset].strip()

    def in_statement(function: str, node: ast.AST, owner: ast.stmt, anchor: ast.stmt) -> Iterator[_Site]:
        if isinstance(node, _SILENT):
            return
        for after in _changes(node):
            yield _Site(function, node, after, anchor, owner)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.expr_context) and child is not getattr(node, "annotation", None):
                yield from in_statement(function, child, owner, anchor)

    def in_body(
        name: str, body: Sequence[ast.stmt], above: ast.stmt | None, *, is_run: bool = False
    ) -> Iterator[_Site]:
        """The sites of a body; `is_run`: it is that of a function, and not of a class or a module."""
        for statement in body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{statement.name}" if name else statement.name
                yield from in_body(inner, statement.body, None, is_run=isinstance(statement, ast.FunctionDef))
                continue
            is_elif = lines[statement.lineno - 1][statement.col_offset :].startswith("elif")
            anchor = statement if starts_its_line(statement) and not is_elif else above
            if is_run and anchor is not None:
                yield from in_statement(name, statement, statement, anchor)
            for part in ("body", "orelse", "finalbody"):
                yield from in_body(name, getattr(statement, part, []), anchor, is_run=is_run)
            for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
                yield from in_body(name, part.body, None, is_run=is_run)

    yield from in_body("", ast.parse(source).body, None)


def mutants_of(subject: str, path: str, source: str) -> Iterator[tuple[Mutant, _Site]]:
    """All mutants of a file."""
    places: Counter[tuple] = Counter()
    lines = source.encode().splitlines()
    for site in _sites(source):
        owner = site.owner
        end = owner.end_col_offset if owner.end_lineno == owner.lineno else None
        head = lines[owner.lineno - 1][owner.col_offset : end].decode().partition("  #")[0]  # comments change alone
        key = site.function, ast.unparse(site.node), site.after, " ".join(head.split())
        yield Mutant(subject, path, *key, place=places[key]), site
        places[key] += 1


def draw() -> list[Mutant]:
    """`OF_EACH` for each subject, at most `OF_A_FUNCTION` in one function."""
    drawn = []
    for subject, folders in SUBJECTS.items():
        paths = sorted(
            path
            for folder in folders
            for path in ([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
        )
        everything = [
            mutant for path in paths for mutant, _ in mutants_of(subject, str(path.relative_to(ROOT)), path.read_text())
        ]
        random.Random(f"{SEED} {subject}").shuffle(everything)
        in_function: Counter[tuple[str, str]] = Counter()
        chosen = []
        for mutant in everything:
            where = mutant.path, mutant.function
            if in_function[where] < OF_A_FUNCTION and len(chosen) < OF_EACH:
                in_function[where] += 1
                chosen.append(mutant)
        drawn += sorted(chosen, key=lambda each: (each.path, each.function, each.statement, each.before, each.place))
    return drawn


def read() -> list[Mutant]:
    return [Mutant(**each) for each in json.loads(LIST.read_text())]


def _replaced(source: str, node: ast.AST, text: str) -> str:
    """The source with the node's text replaced; columns of `ast` count bytes."""
    lines = source.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = source.encode()
    if not isinstance(node, ast.stmt):
        text = f"({text})"
    return (whole[:start] + text.encode() + whole[end:]).decode()


@lru_cache(maxsize=256)
def _mutants_in(subject: str, path: str, source: str) -> dict[Mutant, _Site]:
    return dict(mutants_of(subject, path, source))


def mutated(mutant: Mutant, root: Path = ROOT) -> str | None:
    """The text of the mutant's file with its fault, or None where the code is no longer there."""
    path = root / mutant.path
    if not path.exists():
        return None
    source = path.read_text()
    site = _mutants_in(mutant.subject, mutant.path, source).get(mutant)
    return None if site is None else _replaced(source, site.node, mutant.after)


# -- which tests come by ----------------------------------------------------------------------------------------------

_PROBE = """
import mmap, os, struct
_seen = set()
_file = os.environ.get("MUTANT_PROBE")
if _file:
    with open(_file, "r+b") as _opened:
        _test = mmap.mmap(_opened.fileno(), 8)
    _log = os.open(_file + ".hits", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def hit(number):
    if _file:
        key = struct.unpack("q", _test[:8])[0], number
        if key not in _seen:
            _seen.add(key)
            os.write(_log, b"%d %d\\n" % key)
"""


def with_probes(tree: Path, mutants: Sequence[Mutant]) -> list[str]:
    """Write a probe before the statement of each mutant, and at the start of each function; return what they name."""
    (tree / "mutant_probe.py").write_text(_PROBE)
    names = [f"mutant {number}" for number in range(len(mutants))]
    for path in sorted((tree / "megatron").rglob("*.py")):
        name = str(path.relative_to(tree))
        source = path.read_text()
        lines = source.splitlines(keepends=True)
        numbered = [(number, mutant) for number, mutant in enumerate(mutants) if mutant.path == name]
        sites = dict(mutants_of(numbered[0][1].subject, name, source)) if numbered else {}
        there = [(sites[mutant].statement, number) for number, mutant in numbered if mutant in sites]
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef):
                body = function.body[1:] if ast.get_docstring(function) is not None else function.body
                if body and not lines[body[0].lineno - 1][: body[0].col_offset].strip():
                    there.append((body[0], len(names)))
                    names.append(f"{name} {function.name} {function.lineno}")
        for statement, number in sorted(there, key=lambda each: -each[0].lineno):
            first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
            lines.insert(first - 1, " " * statement.col_offset + f'__import__("mutant_probe").hit({number})\n')
        path.write_text("".join(lines))
    return names


class ReachPlugin:
    """Tells the probes of this process and of those it starts which test runs."""

    def __init__(self, folder: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._file = folder / worker
        self._file.write_bytes(bytes(8))
        self._tests = open(folder / f"{worker}.tests", "w")  # noqa: SIM115 - as long as the process
        self._number = 0
        os.environ["MUTANT_PROBE"] = str(self._file)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._number += 1
        with open(self._file, "r+b") as opened:
            opened.write(self._number.to_bytes(8, "little"))
        print(self._number, nodeid, file=self._tests, flush=True)


def pytest_configure(config) -> None:
    """With `-p tests.mutants`, where a folder is named."""
    if folder := os.environ.get("MUTANT_FOLDER"):
        config.pluginmanager.register(ReachPlugin(Path(folder)))


def reach(folder: Path, arguments: Sequence[str]) -> None:
    """One run of the suite in a copy of the tree with probes; writes `reach.json`: mutant -> tests."""
    tree, hits = folder / "tree", folder / "hits"
    shutil.rmtree(folder, ignore_errors=True)
    copy_tree(tree)
    hits.mkdir()
    names = with_probes(tree, read())
    environment = os.environ | {"MUTANT_FOLDER": str(hits), "PYTHONPATH": str(tree)}
    report = folder / "junit.xml"
    subprocess.run(
        ["bash", "tests/run.sh", "-p", "tests.mutants", "-q", f"--junitxml={report}", *arguments],
        cwd=tree, env=environment, check=False,
    )  # fmt: skip
    found: dict[str, set[str]] = defaultdict(set)
    for listed in hits.glob("*.tests"):
        tests = dict(line.split(" ", 1) for line in listed.read_text().splitlines())
        log = listed.with_suffix(".hits")
        for line in log.read_text().splitlines() if log.exists() else ():
            test, number = line.split()
            if test in tests:
                found[names[int(number)]].add(tests[test])
    (folder / "reach.json").write_text(json.dumps({name: sorted(found[name]) for name in names}))


def copy_tree(tree: Path) -> None:
    """Copy what git tracks, and what it would."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


# -- who is killed ----------------------------------------------------------------------------------------------------


def _seconds(report: Path) -> dict[str, float]:
    """Seconds of each test, as `file::name` with the last part of its name, from pytest's JUnit report."""
    from xml.etree import ElementTree

    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        seconds[f"{'/'.join(parts)}.py::{case.get('name')}"] = float(case.get("time", 0))
    return seconds


def run_one(tree: Path, mutant: Mutant, tests: Sequence[str], *, limit: float) -> str | None:
    """The first test that fails with the fault in the tree, 'hang' for none in time, or None: it survives."""
    path = tree / mutant.path
    source, fault = path.read_text(), mutated(mutant, tree)
    assert fault is not None
    path.write_text(fault)
    try:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "--timeout=120", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *tests], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True, text=True, timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "hang"
    finally:
        path.write_text(source)
    if done.returncode in (0, 5):
        return None
    failed = [
        line.partition(" ")[2].partition(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    return failed[0] if failed else f"exit {done.returncode}"


def run(
    folder: Path, selected: Sequence[int], *, share: tuple[int, int], results: Path, selection: Path | None
) -> None:
    """Kill mutants one after another; a line of JSON for each in `results`, so that a run may be taken up again."""
    mutants = read()
    reached = json.loads((folder / "reach.json").read_text())
    seconds = _seconds(folder / "junit.xml")
    selected_tests = set(selection.read_text().splitlines()) if selection is not None else None
    tree = folder / f"tree{share[0]}"
    shutil.rmtree(tree, ignore_errors=True)
    copy_tree(tree)
    done = {json.loads(line)["mutant"] for line in results.read_text().splitlines()} if results.exists() else set()
    for number in selected or range(len(mutants)):
        if number in done or number % share[1] != share[0]:
            continue
        mutant = mutants[number]
        tests = [test for test in reached[f"mutant {number}"] if selected_tests is None or test in selected_tests]
        tests.sort(key=lambda test: seconds.get(test, 1.0))
        first: dict[str, str] = {}
        for test in tests:
            first.setdefault(test.split("::")[0], test)
        quick = sorted(first.values(), key=lambda test: seconds.get(test, 1.0))[:20]
        begun, killer = time.monotonic(), None
        if mutated(mutant, tree) is None:
            killer = "gone"
        else:
            for part in (quick[:8], quick[8:], [test for test in tests if test not in set(quick)][:60]):
                killer = killer or (run_one(tree, mutant, part, limit=120) if part else None)
        with results.open("a") as opened:
            record = {"mutant": number, "killer": killer, "tests": len(tests), "s": round(time.monotonic() - begun, 1)}
            print(json.dumps(record), file=opened)
        print(number, mutant.path, mutant.function, "->", killer, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("draw", help=f"draw {OF_EACH} mutants of each subject")
    for name, text in (("reach", "find the tests that come by each"), ("run", "kill them")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--folder", type=Path, required=True)
        if name == "reach":
            command.add_argument("arguments", nargs="*", help="further arguments of tests/run.sh")
        else:
            command.add_argument("--mutants", type=int, nargs="*", default=[])
            command.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("N", "OF"))
            command.add_argument("--results", type=Path, required=True)
            command.add_argument("--selection", type=Path, help="what `pytest --collect-only -q` prints: these alone")
    options = parser.parse_args()
    if options.command == "draw":
        LIST.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in draw()) + "\n]\n")
    elif options.command == "reach":
        reach(options.folder, options.arguments)
    else:
        share = tuple(options.share)
        run(options.folder, options.mutants, share=share, results=options.results, selection=options.selection)


if __name__ == "__main__":
    main()
