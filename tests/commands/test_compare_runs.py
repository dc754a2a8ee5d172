"""The comparison of a sweep: what it reads, its table and picture, and how it refuses."""

import json
from math import comb

import pytest

from megatron.commands import compare_runs


def write(folder, name, loss):
    records = [
        {"iteration": 1, "lm_loss": 9.0},
        {"iteration": 1, "validation_loss": 8.0},
        {"iteration": 2, "lm_loss": 7.0},
    ]
    last = [{"iteration": 2, "validation_loss": loss}] if loss is not None else []
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records + last))


@pytest.fixture
def sweep(tmp_path):
    """Two rates; three seeds at the first."""
    for seed, (flush, delayed) in enumerate([(4.0, 5.0), (4.0, 4.4), (5.0, 5.5)]):
        write(tmp_path, f"flush_lr1e-3_seed{seed}", flush)
        write(tmp_path, f"2bw_lr1e-3_seed{seed}", delayed)
    write(tmp_path, "flush_lr5e-4_seed0", 4.0)
    write(tmp_path, "2bw_lr5e-4_seed0", 4.02)
    write(tmp_path, "notes", 1.0)
    return tmp_path


def end(*argv):
    with pytest.raises(SystemExit) as found:
        compare_runs.main([str(word) for word in argv])
    return found.value.code


def test_the_table_has_medians_over_seeds(sweep, capsys):
    """Each seed against the same seed; a single one has no spread. The picture lies in the folder."""
    assert end(sweep) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4] == "| 0.0005 | 1 | 4.000 | +0.5% |"
    assert lines[5] == "| 0.001 | 3 | 4.000 | +10.0% (+10.0% to +25.0%) |"
    assert lines[-2] == "| 0.001 | 3 | 4.000 | 0 |"  # of two iterations, between whose losses the line is straight
    assert (sweep / "sweep.png").read_bytes().startswith(b"\x89PNG")


def curve(*losses, seed=0):
    return compare_runs.Run("any", 1e-3, seed, dict(zip((10, 20, 30, 40), losses, strict=True)))


@pytest.mark.parametrize(
    ("losses", "lost"),
    [
        ((9, 8, 7, 3), 0), ((9, 8, 7, 4), 5), ((9, 9, 8, 7), 20), ((9, 9, 9, 9.5), 30),
        ((9, 8, 3, 2), -10), ((9, 6, 4, 2), -5),
    ],
    ids=str,
)  # fmt: skip
def test_iterations_lost(losses, lost):
    """How long before its end the reference was where the run ends, and the run's own lead where it ends below."""
    assert curve(*losses).iterations_lost(curve(9, 7, 5, 3)) == lost


@pytest.mark.parametrize(("num_seeds", "left_out"), [(1, 0), (4, 0), (5, 0), (7, 0), (8, 1), (11, 2)])
def test_the_interval_of_a_median(num_seeds, left_out):
    """From five seeds on it covers the median with at least 90%, and would not if it left out one more at each end."""
    over = {seed: float(seed) for seed in range(num_seeds)}
    found = compare_runs.Comparison("any", 1e-3, over, {})
    assert found.interval == (left_out, num_seeds - 1 - left_out)
    if num_seeds >= 5:
        outside = [2 * sum(comb(num_seeds, k) for k in range(left_out + more + 1)) / 2**num_seeds for more in (0, 1)]
        assert outside[0] <= 0.1 < outside[1]


def test_a_limit_that_is_passed_is_named(sweep, capsys):
    """The median counts, at every rate."""
    assert end(sweep, "--most", "2bw=0.11") == 0
    capsys.readouterr()
    assert end(sweep, "--most", "2bw=0.09") == 1
    assert "2bw at 0.001 lies 10.00% over flush, 9.00% are allowed." in capsys.readouterr().out


def test_a_run_that_ends_without_a_number_lies_over_every_limit(sweep, capsys):
    """The metrics file has null for what is not finite. Over a reference that ends so nothing lies."""
    lost = {"iteration": 2, "validation_loss": None}
    with open(sweep / "2bw_lr5e-4_seed0.jsonl", "a") as stream:
        stream.write(json.dumps(lost) + "\n")
    assert end(sweep, "--most", "2bw=99") == 1
    assert "| 0.0005 | 1 | 4.000 | +inf% |" in (out := capsys.readouterr().out) and "2bw at 0.0005 lies inf%" in out
    (sweep / "flush_lr5e-4_seed0.jsonl").write_text(json.dumps(lost) + "\n")
    assert end(sweep) == 1
    assert "flush with rate 0.0005 and seed 0 ends with a validation loss of inf" in capsys.readouterr().err


def test_a_limit_of_what_is_not_compared_is_refused(sweep, capsys):
    for name in ("2bv", "flush"):
        assert end(sweep, "--most", f"{name}=99", "--most", "2bw=99") == 1
        assert f"--most limits {name}, which is compared with nothing; name one of 2bw" in capsys.readouterr().err


def test_what_cannot_be_compared_is_one_sentence(tmp_path, sweep, capsys):
    """No runs, a run without its reference, one without validation, nothing but the reference, a run that is longer
    than its reference, a limit that is none."""
    (tmp_path / "empty").mkdir()
    assert end(tmp_path / "empty") == 1
    assert "holds no SCHEDULE_lrRATE_seedSEED.jsonl" in capsys.readouterr().err
    assert end(sweep, "--reference", "gpipe") == 1
    assert "gpipe has no run with rate 0.001 and seed 0; 2bw has" in capsys.readouterr().err
    only = tmp_path / "only"
    only.mkdir()
    write(only, "flush_lr1e-3_seed0", 4.0)
    assert end(only) == 1
    assert "there is nothing to compare" in capsys.readouterr().err
    (only / "2bw_lr1e-3_seed0.jsonl").write_text('{"iteration": 1, "lm_loss": 9.0}\n')
    assert end(only) == 1
    assert "holds no validation_loss" in capsys.readouterr().err
    (only / "2bw_lr1e-3_seed0.jsonl").write_text('{"iteration": 3, "validation_loss": 9.0}\n')
    assert end(only) == 1
    assert "seed 0 has its last validation loss at iteration 3, and flush at 2; train both" in capsys.readouterr().err
    assert end(sweep, "--most", "0.01") == 2
    assert "'0.01' is no SCHEDULE=X" in capsys.readouterr().err
