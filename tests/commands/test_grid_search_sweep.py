"""tools/grid_search.py sweep: points that are those of searches, what it prints and writes, and what it refuses."""

import json

import pytest

from megatron.commands import grid_search as tool  # noqa: F401  of the fixture `run`
from tests.commands.search_argv import CLUSTER, GPT

MODEL = [*GPT, *CLUSTER, "--schedules", "flush", "--tensor", "1,2", "--pipeline", "1,2,4", "--simulate", 1]
PRICE = ["--tokens", "20B", "--price-per-gpu-hour", 2]


@pytest.mark.full
def test_points_are_the_best_of_searches(run):
    """On parts of a node, whole ones and several; the knee and the front are said."""
    common = [*MODEL, *PRICE, "--global-batch-size", 256, "--network", 50]
    status, out, _ = run("sweep", *common, "--gpus", "32,8,64,16,4", "--json")
    found = json.loads(out)
    points = found["points"]
    assert status == 0 and [each["num_gpus"] for each in points] == [4, 8, 16, 32, 64]
    machines = {4: ["--gpus-per-node", 4], 8: [], 16: ["--nodes", 2], 32: ["--nodes", 4], 64: ["--nodes", 8]}
    for point in points:
        argv = [*common, *machines[point["num_gpus"]], "--json"]
        best = json.loads(run("search", *argv)[1])["best"][0]
        assert {name: point[name] for name in best if name != "rank"} == {
            name: value for name, value in best.items() if name != "rank"
        }
        assert (point["time"], point["cost_of_time"]) == (point["days"], point["cost"])
    assert (found["time_unit"], found["cost_unit"]) == ("days", "USD")
    front = [each for each in points if each["on_front"]]
    assert [each["cost"] for each in sorted(front, key=lambda each: each["days"])] == sorted(
        (each["cost"] for each in front), reverse=True
    )
    knees = [each["num_gpus"] for each in points if each["is_knee"]]
    assert found["knees"] == {"1024": knees[0]} and len(front) == 4 and not points[0]["on_front"]
    assert f"the knee is at {knees[0]} GPUs" in found["notes"][0] and knees[0] in (16, 32)


@pytest.mark.full
def test_parts_of_nodes_have_parts_of_their_network(run):
    """Each point is the search's on as many such nodes, and one note says what they have."""
    common = [*MODEL, "--global-batch-size", 256, "--gpus-per-node", 2, "--json"]
    status, out, _ = run("sweep", *common, "--gpus", "2,8,16")
    found = json.loads(out)
    assert status == 0 and [note for note in found["notes"] if "--network" in note] == [
        "2 of a node's 8 GPUs are assumed to have their share of its network, "
        "0.7812 of 3.125 GB/s; --network changes that"
    ]
    for point in found["points"][1:]:
        argv = [*common, "--nodes", point["num_gpus"] // 2, "--network", 3.125 / 4]
        best = json.loads(run("search", *argv)[1])["best"][0]
        assert point["iteration_seconds"] == best["iteration_seconds"]


def test_sequence_lengths_keep_the_tokens_of_a_batch(run):
    """Half as many sequences of twice the length, with as many positions; the length of the flags stays as it is."""
    argv = [*MODEL, "--gpus", "8", "--sequence-lengths", "2048,1024", "--json"]
    status, out, _ = run("sweep", *argv)
    found = json.loads(out)
    short, long = found["points"]
    assert status == 0 and (short["sequence_length"], short["global_batch_size"]) == (1024, 64)
    assert (long["sequence_length"], long["global_batch_size"]) == (2048, 32)
    alone = ["--seq-length", 2048, "--max-position-embeddings", 2048, "--global-batch-size", 32, "--json"]
    best = json.loads(run("search", *MODEL, *alone)[1])["best"][0]
    assert long["iteration_seconds"] == best["iteration_seconds"] and long["memory_gib"] == best["memory_gib"]
    assert long["iteration_seconds"] > short["iteration_seconds"]
    assert (found["time_unit"], found["cost_unit"]) == ("s/iteration", "GPU hours/iteration")
    assert long["cost_of_time"] == pytest.approx(8 * long["iteration_seconds"] / 3600)
    assert found["notes"][0].startswith("sequences of 1024: a knee takes three points")


def test_a_safe_batch_keeps_its_tokens(run):
    """As the batch does."""
    argv = [*MODEL, "--tokens", "1B", "--gpus", "8", "--sequence-lengths", "1024,2048", "--max-safe-batch", 256]
    short, long = json.loads(run("sweep", *argv, "--json")[1])["points"]
    assert (short["global_batch_size"], long["global_batch_size"]) == (256, 128)


@pytest.mark.full
def test_files(run, tmp_path):
    """A table, a page, a picture, records, and a script for each point; scripts of an earlier sweep go."""
    folder = tmp_path / "plan"
    argv = [*MODEL, *PRICE, "--output", folder]
    assert run("sweep", *argv, "--gpus", "4,8,64")[0] == 0
    status, out, err = run("sweep", *argv, "--gpus", "4,8")
    scripts = ["best_4_gpus_1024_tokens.sh", "best_8_gpus_1024_tokens.sh"]
    names = [*scripts, "report.html", "sweep.json", "time_cost.png"]
    assert status == 0 and sorted(path.name for path in folder.iterdir()) == names
    assert all(name in err for name in names[2:])
    assert (
        "num_gpus=4\n" in (folder / scripts[0]).read_text() and "GPUS_PER_NODE:-4}" in (folder / scripts[0]).read_text()
    )
    head = next(line for line in out.splitlines() if "sequence length" in line)
    assert "USD" in head and out.isascii() and "cheapest" in out
    assert len(json.loads((folder / "sweep.json").read_text())) == 2
    assert "<svg" in (folder / "report.html").read_text()


def test_the_length_of_the_flags_keeps_what_counts_sequences(run):
    """Only another length makes other tokens of them."""
    argv = [*MODEL, "--gpus", 8, "--sequence-lengths", 1024, "--train-samples", 1000, "--json"]
    assert run("sweep", *argv)[0] == 0


def test_parts_of_a_tray(run):
    """2 and 4 of the 72 GPUs of a rack, whose hosts have 4; and two of them."""
    argv = [*MODEL, "--cluster", "GB200", "--gpus", "2,4,8", "--json"]
    status, out, _ = run("sweep", *argv)
    points = json.loads(out)["points"]
    assert status == 0 and [(each["num_gpus"], each["status"]) for each in points] == [
        (2, "kept"), (4, "kept"), (8, "kept"),
    ]  # fmt: skip


def test_what_cannot_run_has_its_reason(run):
    """Beside what can; where nothing can, the status says so."""
    status, out, _ = run("sweep", *MODEL, "--hidden-size", 4096, "--gpus", "1,8", "--json")
    small, large = json.loads(out)["points"]
    assert status == 0 and large["status"] == "kept"
    assert small["status"] == "rejected" and "misses at least" in small["reason"]
    status, out, err = run("sweep", *MODEL, "--hidden-size", 4096, "--gpus", "1")
    assert status == 1 and "nothing can run at any of the 1 points; the first: the nearest" in err and " misses " in out
    status, _, err = run("sweep", *MODEL, "--tensor", 3, "--gpus", "4,8")
    assert status == 1 and "the first: 4 GPUs do not divide by tensor 3" in err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "a sweep goes over something; give --gpus, --sequence-lengths, or both"),
        (["--gpus", "12"], "--gpus 12 do not fill nodes of 8; give a multiple of that, or a part of one node"),
        (["--gpus", "8", "--nodes", "2"], "--nodes does not go with --gpus, which says how many nodes there are"),
        (["--gpus", "8", "--objective", "cost"], "--objective cost needs a price; give --price-per-gpu-hour, or"),
        (["--gpus", "8", "--max-safe-batch", "128"], "so iterations cannot be compared; give --tokens"),
        (["--sequence-lengths", "3000"], "--sequence-lengths 3000: the batch, 64 sequences of 1024, has 65,536 tokens, "
         "which do not divide into sequences of 3000; give another length or batch"),
        (["--gpus", "524296"], "--gpus 524296 is more than any cluster has; give 524288 or less"),
        (["--sequence-lengths", "1024,2048", "--train-samples", "1000"], "--sequence-lengths 2048: --train-samples "
         "counts sequences, which have 1024 tokens in the model's flags; give --train-iters in its place"),
        (["--sequence-lengths", "2048", "--rampup-batch-size", "16", "16", "1000"], "--sequence-lengths 2048: "
         "--rampup-batch-size counts sequences, which have 1024 tokens in the model's flags; leave it out"),
        (["--gpus", "8", "--expert-parallel-sizes", "2,4"], "--expert-parallel-sizes 2,4 share experts, and the model "
         "has none; give --num-experts, or leave --expert-parallel-sizes out"),
        (["--gpus", "6", "--cluster", "GB200"], "--gpus 6 do not fill hosts of 4; give a multiple of that, or a part"),
    ],
)  # fmt: skip
def test_refusals(run, argv, reason):
    """One sentence, before anything is searched."""
    status, out, err = run("sweep", *MODEL, *argv)
    assert status == 1 and not out and reason in err.splitlines()[-1]


def test_points_at_which_ranks_share_have_scripts(run, tmp_path):
    """Two ranks share sequences, or experts, at each point, and the scripts have the flags."""
    argv = [*GPT, "--cluster", "A100-80", "--schedules", "flush", "--tensor", "1", "--simulate", 1, "--gpus", "4,8"]
    status, _, err = run("sweep", *argv, "--context-parallel-size", 2, "--output", tmp_path)
    assert status == 0 and len([*tmp_path.glob("best_*.sh")]) == 2
    assert "2 x best_N_gpus_L_tokens.sh" in err
    experts = ["--num-experts", 4, "--disable-bias-linear", "--expert-model-parallel-size", 2]
    status, *_ = run("sweep", *argv, *experts, "--output", tmp_path)
    scripts = [path.read_text() for path in tmp_path.glob("best_*.sh")]
    assert status == 0 and len(scripts) == 2
    for script in scripts:
        assert "--expert-model-parallel-size 2" in script and "--moe-token-dispatcher-type alltoall" in script
