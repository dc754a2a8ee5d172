"""What a search says where a part of the nodes would be faster than all of them."""

import json
import re

import pytest

from megatron.commands import grid_search as tool
from tests.commands.in_process import runner

GPT = [
    "--num-layers", 24, "--hidden-size", 2048, "--num-attention-heads", 16, "--seq-length", 1024, "--vocab-size", 51200,
    "--bf16", "--schedules", "flush,2bw", "--network", 12.5,
]  # fmt: skip


@pytest.fixture
def run(capsys):
    """Run the tool in this process, on so many nodes of 8 A100: what it found, and what it says of fewer."""
    search = runner(tool, capsys)

    def found(nodes: int, batch: int = 64, *more: object) -> tuple[dict, str | None]:
        argv = ["search", "--cluster", "A100-80", "--nodes", nodes, *GPT, "--global-batch-size", batch, *more, "--json"]
        status, out, err = search(*argv)
        assert status == 0, err
        content = json.loads(out)
        return content, next((note for note in content["notes"] if " nodes would be " in note), None)

    return found


@pytest.mark.full
def test_a_part_of_the_nodes_may_be_faster(run):
    """The note has the best of the very search that it names, and what it gains; more nodes never make it slower."""
    whole, said = run(32)
    nodes, gain, seconds = re.match(r"(\d+) of the 32 nodes would be ([\d.]+)% faster \(([\d.]+) s", said).groups()
    assert said.endswith(f"search with --nodes {nodes}, or give a larger batch")
    part, again = run(int(nodes))
    best, fewer = whole["best"][0], part["best"][0]
    assert fewer["iteration_seconds"] == pytest.approx(float(seconds), rel=5e-3)
    ratio = best["iteration_seconds"] / fewer["iteration_seconds"]
    assert ratio == pytest.approx(1 + float(gain) / 100, rel=5e-3) and ratio > 1.01
    assert again is None
    degrees = ", ".join(
        f"{letter}={fewer[name]}" for letter, name in zip("tpd", ("tensor", "pipeline", "data"), strict=True)
    )
    assert f"{fewer['schedule']}, {degrees}" in said


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "batch", "more"),
    [
        (32, 8192, []),  # enough to do for all
        (31, 62, []),  # no half
        (1, 64, []),
        (32, 64, ["--objective", "memory"]),
        (32, 64, ["--objective", "cost", "--price-per-gpu-hour", 2]),
    ],
)
def test_nothing_is_said_otherwise(run, nodes, batch, more):
    assert run(nodes, batch, *more)[1] is None


def test_degrees_that_take_all_nodes(run):
    """Half of them cannot be searched, and so there is nothing to say; what was found is."""
    whole, said = run(16, 64, "--tensor", 8, "--pipeline", 16, "--num-layers", 16)
    assert whole["best"] and said is None
