"""The memory picture: what it reads from metrics files, what it shows, and how it refuses."""

import json

import pytest

from megatron.commands import plot_memory

MIB = 2**20


def write(path, *counts):
    records = [{"iteration": 1, "lm_loss": 2.0}, {"iteration": 1, "validation_loss": 2.0}]
    records += [{"iteration": 2 + index, "saved_activation_bytes": count} for index, count in enumerate(counts)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_fullest_iteration_of_each_rank_counts(tmp_path):
    """Each pipeline rank has its own peak, in whichever iteration; records without counts are passed over."""
    path = write(tmp_path / "run.jsonl", [5, 2], [4, 3])
    assert plot_memory.read_peaks(path, "run").num_bytes == (5, 3)


def test_runs_share_one_picture_and_one_table(tmp_path, capsys):
    """Bars for both runs; the table tells the largest, and how far the ranks lie apart."""
    files = [write(tmp_path / "flush.jsonl", [8 * MIB, 2 * MIB]), write(tmp_path / "bpipe.jsonl", [5 * MIB, 4 * MIB])]
    picture = tmp_path / "made" / "memory.png"
    plot_memory.main([*map(str, files), "--labels", "before", "after", "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["before", "8.0", "2.0", "8.0", "6.0"] in rows and ["after", "5.0", "4.0", "5.0", "1.0"] in rows


def test_files_without_counts_are_refused(tmp_path, capsys):
    """One sentence that names the file and what to do."""
    for path in (
        write(tmp_path / "plain.jsonl"),
        tmp_path / "missing.jsonl",
        write(tmp_path / "two.jsonl", [1], [1, 2]),
        write(tmp_path / "texts.jsonl", ["1", "2"]),
        write(tmp_path / "one.jsonl", 5),
        write(tmp_path / "none.jsonl", []),
        write(tmp_path / "large.jsonl", [10**400]),
    ):
        with pytest.raises(SystemExit) as exit_info:
            plot_memory.main([str(path)])
        assert exit_info.value.code == 1
        assert path.name in capsys.readouterr().err
