"""A file of tests that are marked `gpu`, run to its end, with the outcome of each test written as it comes.

    python -m benchmarks.gpu_hour.gpu_tests tests/pipeline/runtime/cuda/test_host.py --json host.json

A hang then loses what is behind it and nothing before. Where an earlier attempt has left its outcomes beside the file
of results (`NAME.before.json`), tests that have passed there are not run again. A test that hangs is ended by its own
limit, of --test-limit seconds. Figures that tests record are kept; so is pytest's own report, beside the results.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.gpu_hour.result import Result, parser_of


class Recorder:
    """A plugin of pytest that keeps each test's outcome, and leaves out the tests that have passed before."""

    def __init__(self, result: Result, earlier: dict[str, str]) -> None:
        self._result = result
        self.outcomes = result.content["tests"]
        self.outcomes.update({name: outcome for name, outcome in earlier.items() if outcome == "passed"})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        again = [item for item in items if item.nodeid in self.outcomes]
        if again:
            items[:] = [item for item in items if item.nodeid not in self.outcomes]
            config.hook.pytest_deselected(items=again)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = f"failed: {_reason(report)}"
        elif report.skipped:  # a file that needs a package
            self.outcomes[report.nodeid] = f"skipped: {_reason(report)}"

    def pytest_runtest_logstart(self, nodeid: str, location: tuple) -> None:
        self.outcomes[nodeid] = "begun"  # what stays so did not end
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.outcomes.get(report.nodeid)
        if report.failed:
            self.outcomes[report.nodeid] = f"failed: {_reason(report)}"
        elif report.skipped:
            self.outcomes[report.nodeid] = f"skipped: {_reason(report)}"
        elif report.when == "call" and before == "begun":
            self.outcomes[report.nodeid] = "passed"
        if report.when == "call":
            self._result.content["recorded"] += [f"{name}: {value}" for name, value in report.user_properties]
        self._write()

    def _write(self) -> None:
        content, outcomes = self._result.content, self.outcomes
        counts = {word: sum(each.startswith(word) for each in outcomes.values()) for word in ("passed", "failed")}
        counts |= {"skipped": sum(each.startswith("skipped") for each in outcomes.values())}
        content["figures"] = {f"num_{word}": count for word, count in counts.items()}
        content["lines"] = [", ".join(f"{count} {word}" for word, count in counts.items())]
        for nodeid, outcome in outcomes.items():
            if not outcome.startswith(("passed", "skipped")):
                content["lines"].append(f"{nodeid.rpartition('/')[2]} {outcome}")
        reasons = {outcome.partition(": ")[2] for outcome in outcomes.values() if outcome.startswith("skipped")}
        content["lines"] += [f"skipped: {reason}" for reason in sorted(reasons)]
        content["lines"] += content["recorded"]
        self._result.write()


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The sentence of a skip, the first of a failure, or the last of a file that cannot be imported."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines() or ["without a word"]
    return lines[0 if crash is not None else -1].removeprefix("E").strip()[:200]


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("file", help="of tests")
    parser.add_argument("--test-limit", type=float, default=170.0, metavar="SECONDS")
    args = parser.parse_args(arguments)
    earlier: dict[str, str] = {}
    with suppress(OSError, ValueError, AttributeError):
        earlier = json.loads(args.json.with_suffix(".before.json").read_text()).get("tests", {})
    recorder = Recorder(Result(args, tests={}, recorded=[]), earlier)
    words = [
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "--timeout",
        f"{args.test_limit:g}",
        "-rP" if args.rehearse else "-v",
    ]
    words += ["--junitxml", str(Path(args.json).with_suffix(".xml")), args.file]
    status = pytest.main(words, plugins=[recorder])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED and recorder.outcomes:  # all have passed before, or are skipped
        status = 0
    recorder._write()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
