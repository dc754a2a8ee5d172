"""The benchmarks without a clock: emulated stages run what is to be measured, and memory is what the checker proves."""

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
TINY = "--batches 1 --repeats 2 --forward 1 --backward 2 --payload 4096"


def rows_of(name: str, arguments: str, directory: Path, *, statuses: tuple[int, ...] = (0,)) -> list[dict]:
    """What a benchmark writes, a script of benchmarks/ or a module of papers; it ends with one of these statuses."""
    result = directory / "result.json"
    program = ["-m", name] if "." in name else [str(BENCHMARKS / f"{name}.py")]
    command = [sys.executable, *program, *shlex.split(arguments), "--json", str(result)]
    assert subprocess.run(command, timeout=240, cwd=ROOT).returncode in statuses
    return json.loads(result.read_text())["rows"]


def assert_measured(rows: list[dict], num_repeats: int) -> None:
    for row in rows:
        if row["section"] != "latency":
            assert row["executed_is_program"]
            assert len(row["measured"]) == num_repeats
        assert min(row["measured"]) > 0


@pytest.mark.full
def test_emulated_stages_execute_the_program(tmp_path):
    """Two stages at tiny times: every contender has a time for each repeat, its ideal and a prediction that is not
    below it; on every rank what ran is the program; saved microbatches are the checker's."""
    rows = rows_of("emulated", f"--stages 2 --microbatches 2 4 --only ideal warmup speedup {TINY}", tmp_path)
    assert_measured(rows, 2)
    of = {name: [row for row in rows if row["section"] == name] for name in ("ideal", "warmup", "speedup", "latency")}
    assert {(row["contender"], row["microbatches"]) for row in of["ideal"]} == {
        (name, m) for name in ("flush", "2bw") for m in (2, 4)
    }
    for row in of["ideal"]:
        slots = row["microbatches"] + (1 if row["contender"] == "flush" else 0)
        assert math.isclose(row["ideal"], slots * 0.003)
        assert row["predicted"] >= row["ideal"] * (1 - 1e-9)
        assert row["unhidable"] > 0
    assert [row["saved"] for row in of["warmup"]] == [[2, 1], [3, 1]]
    assert all(row["saved"] == row["saved_by_checker"] for row in of["warmup"])
    (speedup,) = of["speedup"]
    assert math.isclose(speedup["expected_ratio"], 1.5)
    assert len(speedup["reference"]) == 2
    assert len(of["latency"]) == 1


@pytest.mark.full
def test_emulated_predictions(tmp_path):
    """`2bw` with predicted weights stands beside `2bw` without, on every rank as in the program; the simulator adds to
    a batch what a prediction takes, and keeping gradients for it where the first stage has more than one done."""
    rows = rows_of("emulated", f"--stages 2 --only predictions {TINY}", tmp_path)
    assert_measured(rows, 2)
    found = [row for row in rows if row["section"] == "predictions"]
    names = ["without", "from all that is done", "from one microbatch"]
    assert [(row["microbatches"], row["contender"]) for row in found] == [(m, name) for m in (2, 4) for name in names]
    for kept, (without, stage, uniform) in ((0, found[:3]), (1, found[3:])):
        for row, num_updates in ((stage, 1), (uniform, 1 + kept)):
            assert row["reference"] == without["measured"] and math.isclose(row["update"], 5e-5)
            assert math.isclose(row["predicted"] - without["predicted"], num_updates * 5e-5, rel_tol=1e-6)
            assert math.isclose(row["predicted_ratio"], row["predicted"] / without["predicted"])


@pytest.mark.full
def test_emulated_chains_and_instructions(tmp_path):
    """Reductions of four sizes stand beside a run without them, and the simulator says that only the one that exceeds
    the slack stalls; instructions are counted with tracing off and on, for one stage and two."""
    rows = rows_of("emulated", f"--stages 2 --microbatches 4 --only chain executor {TINY}", tmp_path)
    assert_measured(rows, 2)
    chain = [row for row in rows if row["section"] == "chain"]
    assert [row["contender"] for row in chain] == ["without", "25%", "50%", "90%", "150%"]
    assert all(row["replicas"] == 2 for row in chain)
    *within, beyond = [row["predicted_ratio"] for row in chain[1:]]
    assert all(math.isclose(ratio, 1) for ratio in within) and beyond > 1
    executor = [row for row in rows if row["section"] == "executor"]
    assert [(row["stages"], row["contender"]) for row in executor] == [
        (p, f"tracing {state}") for p in (1, 2) for state in ("off", "on")
    ]
    # per microbatch F and B, at p=2 with a send and a receive; per batch a norm and a step
    assert [row["instructions"] for row in executor] == [130, 130, 258, 258]


def assert_as_proved(rows: list[dict]) -> None:
    saved = {row["schedule"]: row["counted"]["microbatches"] for row in rows}
    assert saved == {
        "gpipe": [8, 8, 8, 8],
        "flush": [4, 3, 2, 1],
        "2bw": [4, 3, 2, 1],
        "2bw extra warm-up": [7, 5, 3, 1],
        "zb-h1": [4, 4, 4, 4],
        "pipedream": [4, 3, 2, 1],
    }
    for row in rows:
        assert row["counted"]["deferred"] == ([1, 2, 3, 4] if row["schedule"] == "zb-h1" else [0, 0, 0, 0])
        assert row["counted"] == row["checker"]
        assert min(row["counted"]["bytes"]) > 0


@pytest.mark.full
def test_memory_as_a_command(tmp_path):
    """The same in processes that it starts, as a user does."""
    assert_as_proved(rows_of("memory", "", tmp_path))


@pytest.mark.full
def test_emulated_bubbles(tmp_path):
    """Each schedule runs as its program says, with one stage on each rank or two; the simulator idles as the papers say
    but for what transfers add."""
    rows = rows_of("emulated", f"--stages 2 --microbatches 4 --only bubbles {TINY}", tmp_path)
    assert_measured(rows, 2)
    found = {row["contender"]: row for row in rows if row["section"] == "bubbles"}
    idle = {"flush": 3e-3, "interleaved": 1.5e-3, "zb-h1": 1e-3, "zbv": 0.5e-3, "2bw": 0.0, "zbv, optimistic": 0.0}
    assert list(found) == list(idle)
    for name, seconds in idle.items():
        assert math.isclose(found[name]["work"], 12e-3)
        assert found[name]["predicted"] >= found[name]["work"] + seconds - 1e-9
