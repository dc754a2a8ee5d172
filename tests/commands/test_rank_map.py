"""tools/rank_map.py: what it prints, draws and writes, and with which status it ends."""

import json

import pytest

from megatron.commands import rank_map as tool  # noqa: F401  of the fixture `run`
from tests.commands.in_process import ROOT, without

TOOL = ROOT / "tools" / "rank_map.py"

TOPOLOGY = ["--rank-topology", ROOT / "examples" / "topology.yaml"]
FIGURE_5 = [*TOPOLOGY, "--pipeline-model-parallel-size", "16"]
FIGURE_6 = [*TOPOLOGY, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]
LEVELS = ("within a node", "between nodes")
MODEL = [
    "--num-layers", "80", "--hidden-size", "9984", "--num-attention-heads", "104", "--seq-length", "2048",
    "--micro-batch-size", "2", "--global-batch-size", "128", "--recompute", "attention", "--sequence-parallel",
]  # fmt: skip


def test_who_sits_where(run):
    """Figure 6 as plain text where the output is no terminal: no lines, no colours, nothing cut."""
    status, out, _ = run(*FIGURE_6, "--rank-mapping", "pair-adjacent")
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    assert " ".join(lines[0]) == "pair-adjacent: tensor 2 x pipeline 4 x data 2"
    assert " ".join(lines[2]) == (
        "node0 0: PP 0 DP 0 TP 0 1: PP 0 DP 0 TP 1 12: PP 3 DP 0 TP 0 13: PP 3 DP 0 TP 1 "
        "4: PP 1 DP 0 TP 0 5: PP 1 DP 0 TP 1 8: PP 2 DP 0 TP 0 9: PP 2 DP 0 TP 1"
    )
    assert "0 of 4 pairs that move activations cross a node" in out
    assert out.isascii() and "\x1b" not in out


def test_traffic_and_time(run):
    """With the model: bytes and times by kind and level, and the comparison; the JSON holds the same numbers."""
    status, out, _ = run(*FIGURE_5, *MODEL)
    assert status == 0
    assert "7 of 7 pairs that move activations cross a node" in out
    content = json.loads(run(*FIGURE_5, *MODEL, "--json")[1])
    (between,) = [
        row for row in content["traffic_per_iteration"] if (row["kind"], row["level"]) == ("pair", "between nodes")
    ]
    row = next(line.split() for line in out.splitlines() if line.startswith("pair "))
    assert row[3:] == [f"{between['total_bytes'] / 1e9:.3f}", f"{1e3 * between['busiest_seconds']:.2f}"]
    assert list(content["total_transfer_seconds"]) == ["standard", "pair-adjacent"]
    assert content["total_transfer_seconds"]["pair-adjacent"] < content["total_transfer_seconds"]["standard"]
    assert content["slots"][9] == {"slot": 9, "node": "node1", "gpu": 1, "rank": 9, "tensor": 0, "data": 0, "stage": 9}
    assert content["pairs"][0] == {
        "evictor": 0, "acceptor": 15, "moves_activations": True, "num_rank_pairs": 1, "num_crossing": 1,
    }  # fmt: skip


def test_optimized_mapping_can_be_written_and_read(run, tmp_path):
    """--write-mapping gives the file that --rank-mapping takes; both print the same map."""
    path = tmp_path / "map.json"
    first = json.loads(run(*FIGURE_6, *MODEL, "--rank-mapping", "optimized", "--json", "--write-mapping", path)[1])
    second = json.loads(run(*FIGURE_6, *MODEL, "--rank-mapping", path, "--json")[1])
    assert json.loads(path.read_text()) == first["ranks_by_slot"] == second["ranks_by_slot"]
    assert first["total_transfer_seconds"]["optimized"] <= min(first["total_transfer_seconds"].values())


def test_bandwidth_is_judged(run, tmp_path):
    """t=8 on nodes of 8: the reason, the need by appendix B, and whether the network has it; by hand with a measured
    forward, else from what a GPU sustains."""
    topology = tmp_path / "four.json"
    nodes = [{"name": f"n{index}", "gpus": 8} for index in range(4)]
    topology.write_text(json.dumps({"nodes": nodes, "bandwidth": {"within_node": 300, "between_nodes": 100}}))
    argv = [
        "--rank-topology",
        topology,
        "--tensor-model-parallel-size",
        "8",
        "--pipeline-model-parallel-size",
        "4",
        *MODEL,
    ]
    out = run(*argv, "--forward-ms", "143.37")[1]
    assert "for tensor parallel size 8 fills a node of 8 GPUs" in out
    assert "goes at 12.5 GB/s between nodes" in out and "it needs 24.28 GB/s" in out and "too slow" in out
    assert "it is hidden if a forward takes as long" in run(*argv)[1]
    assert "pairs that move" not in run(*argv, "--pipeline-schedule", "flush")[1]
    assert "fit under a forward of" in run(*FIGURE_5, *MODEL)[1]


def test_schedule_decides_what_is_sent(run):
    """flush moves nothing between pairs; several stages on each rank send more, also from last rank to first."""
    argv = [*TOPOLOGY, "--pipeline-model-parallel-size", "8", *MODEL, "--json"]

    def sent(*schedule):
        content = json.loads(run(*argv, *schedule)[1])
        rows = {(row["kind"], row["level"]): row for row in content["traffic_per_iteration"]}
        moving = [pair["evictor"] for pair in content["pairs"] if pair["moves_activations"]]
        total = {kind: sum(rows[kind, level]["total_bytes"] for level in LEVELS) for kind in ("pipeline", "pair")}
        return moving, total["pair"], total["pipeline"]

    moving, pairs, pipeline = sent("--pipeline-schedule", "flush")
    assert (moving, pairs) == ([], 0)
    assert sent("--pipeline-schedule", "flush", "--balance-activations") == sent() == ([0, 1, 2], sent()[1], pipeline)
    assert sent()[1] > 0
    interleaved = sent("--pipeline-schedule", "interleaved", "--num-virtual-stages-per-pipeline-rank", "2")
    assert interleaved == ([], 0, pytest.approx(pipeline * (2 * 8 - 1) / 7))


def test_pictures(run, tmp_path):
    """PNG and SVG by suffix."""
    for name in ("map.png", "map.svg"):
        status, _, err = run(*FIGURE_5, "--output", tmp_path / name)
        assert (status, err) == (0, f"wrote {tmp_path / name}\n")
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--pipeline-model-parallel-size", "4"], "--rank-topology"),
        ([*FIGURE_5, "--num-layers", "8"], "--hidden-size, --num-attention-heads"),
        ([*FIGURE_5, "--rank-mapping", "optimized"], "--rank-mapping optimized needs the model's traffic"),
        ([*FIGURE_5, "--forward-ms", "3"], "--forward-ms says nothing without the model"),
        ([*FIGURE_5, "--forward-ms", "0"], "'0' is no finite number above 0"),
        ([*TOPOLOGY, "--pipeline-model-parallel-size", "0"], "'0' is no positive whole number"),
    ],
)
def test_wrong_command_lines_end_with_status_2(run, arguments, reason):
    """One sentence for each."""
    status, out, err = run(*arguments)
    assert (status, out) == (2, "") and reason in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rank-topology", "none.yaml"], "none.yaml cannot be read"),
        ([*TOPOLOGY, "--pipeline-model-parallel-size", "3"], "16 GPUs cannot be divided into tensor parallel size 1 x"),
        ([*FIGURE_5, "--rank-mapping", "nearest"], "nearest cannot be read"),
        ([*FIGURE_5, "--output", "x.txt"], "x.txt is no image"),
        ([*FIGURE_5, "--pipeline-schedule", "gpipe", "--balance-activations"], "there is nothing to balance"),
        ([*FIGURE_5, "--num-virtual-stages-per-pipeline-rank", "2"], "use order interleaved"),
        (
            [*FIGURE_5, *MODEL, "--global-batch-size", "6", "--pipeline-schedule", "2bw"],
            "needs batches of at least 16 microbatches",
        ),
        ([*FIGURE_6, *MODEL, "--global-batch-size", "3"], "--global-batch-size 3 is not divisible by 2 replicas x"),
    ],
)
def test_what_does_not_work_ends_with_status_1(run, arguments, reason):
    """Files and combinations that cannot be, with the reason."""
    status, _, err = run(*arguments)
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("error: ") and reason in err


def test_it_starts_without_torch(tmp_path):
    """From any directory, not installed: neither torch nor megatron.core nor numpy is imported."""
    argv = [*FIGURE_5, *MODEL, "--rank-mapping", "optimized"]
    slow = "matplotlib,numpy,megatron.trainer"
    assert without(slow, TOOL, *argv, cwd=tmp_path).startswith("optimized: ")
