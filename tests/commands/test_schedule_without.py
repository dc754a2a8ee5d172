"""tools/schedule.py without: the table of losses, the program of one, and what it refuses."""

import json

import pytest

from megatron.commands.schedule import main
from megatron.pipeline.check import check
from megatron.pipeline.program.program import Program

JOB = ["without", "--schedule", "flush", "--stages", "4", "--microbatches", "8", "--replicas", "4"]


def test_every_loss_of_one_rank(capsys, tmp_path):
    """One row for each rank of the pipeline, plain in a pipe; 33 while no rank is lost; and the same as JSON."""
    assert main([*JOB, "--json", str(tmp_path / "losses.json")]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "lost" and "slower at least" in head and "\x1b" not in head
    assert [row.split()[0] for row in rows[:4]] == ["0.0", "0.1", "0.2", "0.3"]
    assert "39   18.2%     39            18.2%      4 3 2 1     4 4 4 1" in rows[2]
    assert "a batch takes 33 while no rank is lost" in rows[5]
    found = json.loads((tmp_path / "losses.json").read_text())
    assert [each["lost"] for each in found] == [["0.0"], ["0.1"], ["0.2"], ["0.3"]]
    assert all(each["bound"] <= each["seconds"] <= 1.3 * each["undisturbed"] + 1 for each in found)


def test_the_program_of_a_loss(capsys, tmp_path):
    """Costs as elsewhere; the CSV file holds the proved program, which `check` takes."""
    file = tmp_path / "without.csv"
    costs = ["--forward", "1,2,1,1", "--latency", "0.5", "--held", "6"]
    assert main([*JOB, "--lost", "1.2", "3.0", *costs, "--csv", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("1.2 3.0")
    program = Program.from_csv(file.read_text())
    assert program.num_ranks == 14 and len(program.copies) == 14 and check(program)
    assert main(["check", str(file)]) == 0
    assert "copies of the model's 4" in capsys.readouterr().out
    assert main([*JOB, "--lost", "1.2", "--csv", "-"]) == 0
    assert Program.from_csv(capsys.readouterr().out).num_ranks == 15


def test_pairs_of_two_replicas(capsys):
    """Losses that end the job are told beside the others."""
    job = ["without", "--schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--replicas", "2", "--pairs"]
    assert main(job) == 0
    out = capsys.readouterr().out
    assert [line.split("  ")[0] for line in out.splitlines()[1:5]] == ["0.0 0.1", "0.0 1.0", "0.0 1.1", "0.1 1.1"]
    assert "0.1 1.1: every replica has lost rank 1" in out


def test_a_file(capsys, tmp_path):
    """The rows of a file take the place of a preset."""
    file = tmp_path / "rows.csv"
    assert main(["show", "--schedule", "flush", "--stages", "2", "--microbatches", "2", "--csv", str(file)]) == 0
    assert main(["without", str(file), "--replicas", "3"]) == 0
    assert "0.1" in capsys.readouterr().out


@pytest.mark.full
def test_a_program_with_moves(capsys, tmp_path):
    """bpipe's activations move without a rank, too, unless that takes too long; and the other commands take the
    program, whose copies name their pairs."""
    file = str(tmp_path / "moves.csv")
    for evict, seconds in (("4", 52), ("0", 43), ("2", 45)):
        assert main([*JOB[:2], "bpipe", *JOB[3:], "--lost", "0.0", "--evict", evict, "--csv", file]) == 0
        assert float(capsys.readouterr().out.splitlines()[1].split()[1]) == seconds
        text = (tmp_path / "moves.csv").read_text()
        assert ("EVICT" in text) == ("=12 " in text) == (seconds < 52)
        assert main(["simulate", file, "--evict", evict]) == 0
        assert f" {seconds}" in capsys.readouterr().out
    for command in (["check", file], ["show", file, "--timeline"], ["draw", file, "--output", f"{tmp_path}/moves.png"]):
        assert main(command) == 0


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--csv", "x.csv"], "--csv writes the program of one loss; add --lost"),
        (["--lost", "1.2", "--pairs"], "--pairs takes every loss of two ranks"),
        (["--lost", "1-2"], "'1-2' is no replica and pipeline rank, such as 1.2"),
        (["--lost", "4.0"], "there is no rank 4.0"),
        (["--optimistic"], "drop --optimistic-steps"),
    ],
)
def test_refusals(more: list[str], word: str, capsys):
    status = main([*JOB, *more])
    assert status == 1 and word in capsys.readouterr().err


def test_batches_are_any_number(capsys):
    with pytest.raises(SystemExit):
        main([*JOB, "--batches", "2"])
    assert "--batches has no effect on any number of batches" in capsys.readouterr().err
