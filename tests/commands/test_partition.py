"""tools/partition.py: tables, the JSON line, the files that it writes, and what it refuses."""

import json

import pytest

from megatron.commands import partition as tool
from tests.partition import graphs, oracle


@pytest.fixture
def made(tmp_path):
    content = graphs.content([4, 4, 4, 1, 1, 1], [(i, i + 1) for i in range(5)], devices=3)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(content))
    return content, path


def test_the_last_line_is_the_partition(run, made, tmp_path):
    """One object whose price is what the oracle says; the same in the file; a picture; a row for each method."""
    content, path = made
    output, picture = tmp_path / "made" / "P.json", tmp_path / "pictures" / "P.png"
    status, out, _ = run("--graph", path, "--json", "--output", output, "--picture", picture)
    assert status == 0
    found = json.loads(out.splitlines()[-1])
    assert set(found) == {"method", "objective_ms", "device_of_node", "stage_of_node"}
    assert json.loads(output.read_text()) == found
    stages = {int(node): stage for node, stage in found["stage_of_node"].items()}
    holds = {stages[int(node)]: device for node, device in found["device_of_node"].items()}
    assert oracle.price(content, stages, [holds[stage] for stage in sorted(holds)]) == found["objective_ms"] == 5
    assert picture.read_bytes().startswith(b"\x89PNG")
    for method in ("sequential", "mixed L=3", "mixed L=6", "mixed L=9"):
        assert method in out
    assert "\x1b" not in out


def test_refusals(run, made, tmp_path):
    """A wrong graph and one that fits nowhere end with 1, a missing file with 2, each with one line."""
    content, path = made
    content["made_by"], content["memory_limit_bytes"] = "me", 5000
    path.write_text(json.dumps(content))
    status, _, err = run("--graph", path)
    assert status == 1 and "keys that mean nothing here: made_by" in err and "error: nothing fits" in err
    content["edges"].append([5, 0])
    path.write_text(json.dumps(content))
    status, _, err = run("--graph", path)
    assert status == 1 and "circle" in err and "\n" not in err.split("error:")[1].strip()
    assert run("--graph", tmp_path / "none.json")[0] == 2
    assert run("--graph", path, "--methods", "annealing")[0] == 2
    for argv, sentence in (
        (("--output", tmp_path), "is a folder; name a file in it"),
        (("--picture", tmp_path / "p.xyz"), "p.xyz is no image that can be written; end its name in"),
        (("--devices", 4), "--devices is for a MODEL, and --graph names its own machine"),
        (("--memory", "1GiB"), "--memory is for a MODEL"),
    ):
        status, _, err = run("--graph", path, *argv)
        assert status == 1 and sentence in err


def test_lines_where_there_is_no_terminal(capsys):
    """What is new at once; of what only counts, a line now and then."""
    texts = [*(f"block {number} of 9" for number in range(1, 5)), "next", "block 5 of 9"]
    for seconds, said in ((1000.0, ["block 1 of 9", "next"]), (0.0, texts)):
        progress = tool.Lines(seconds)
        for text in texts:
            progress(text)
        assert capsys.readouterr().err.splitlines() == said


def test_a_model(run, tmp_path):
    """Profiled on its data, cut, simulated; the file is one that a run takes."""
    from tests.finetuning import tiny

    task = "sequence-classification"
    data = ("--task", task, "--train-file", tiny.data_file(tmp_path, task), "--max_seq_length", 12)
    model, output = tiny.model_folder(tmp_path, task), tmp_path / "P.json"
    machine = ("--devices", 2, "--per-device-train-batch-size", 3, "--memory", "1GiB")
    sequential = ("--methods", "sequential", "--max-stages-per-device", 1)
    status, out, err = run(model, *data, *machine, *sequential, "--json", "--output", output)
    assert status == 0 and "simulated ms" in out
    assert "reading data\ncapturing\nprofiling block 1 of " in err
    found = json.loads(out.splitlines()[-1])
    assert set(found) == {"method", "objective_ms", "device_of_node", "stage_of_node", "simulated_ms"}
    content = json.loads(output.read_text())
    assert content["rank_of_stage"] == [0, 1] and content["micro_batch_size"] == 3
    assert content["device_of_node"] == found["device_of_node"]
    assert run(model, *data, *machine, *sequential, "--memory", "1MB", "--bf16", "--output", output)[0] == 0
    content = json.loads(output.read_text())
    assert (content["dtype"], content["weight_bytes_per_parameter"]) == ("bfloat16", 20)
    for argv, sentence in (
        ((model, "--graph", output), "give a MODEL, or --graph FILE"),
        ((), "give a MODEL, or --graph FILE"),
        ((model, *data), "a MODEL is profiled on real data: give --devices"),
        ((model, *data, *machine, "--memory", "lots"), "'lots' is no amount of memory"),
        ((model, *data, *machine, *sequential, "--memory", "0.01MB"), "nothing fits: the nodes need"),
    ):
        status, _, errors = run(*argv)
        assert status == 1 and sentence in errors, errors


def test_seconds_end_a_search(run, tmp_path):
    """What there is by then counts; what was left out is named."""
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(graphs.content([5, 3, 4, 1, 6, 2], [(i, i + 1) for i in range(5)], devices=3)))
    status, out, _ = run("--graph", path, "--seconds", 1e-9)
    assert status == 0 and "choice: sequential" in out
    assert "mixed L=3: not searched, since --seconds are over" in out
