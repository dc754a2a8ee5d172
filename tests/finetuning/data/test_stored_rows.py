"""Rows in files: those of memory, made once, and read from folders that others wrote."""

import json
import os
from itertools import islice

import pytest
import torch

from megatron.finetuning.data import stored_rows as stored
from megatron.finetuning.data.files import read_file
from megatron.finetuning.data.stored_rows import StoredRows
from megatron.finetuning.samples import epochs_of, read_data
from tests.finetuning import tiny

datasets = pytest.importorskip("datasets")


def both(folder, task, *argv):
    """The rows in memory, and those in files."""
    cache = ["--data_cache", folder / "cache"]
    return [read_data(tiny.arguments(folder, task, *argv, *more)).training for more in ([], cache)]


@pytest.mark.parametrize(
    ("task", "argv"),
    [
        ("causal-lm", ["--max_seq_length", 7]),
        ("causal-lm", ["--no_group_texts", "--pad_to_multiple_of", 3, "--group_by_length"]),
        ("text-to-text", ["--pad_to_multiple_of", 3]),
        ("sequence-classification", []),
        ("token-classification", []),
        ("question-answering", []),
        ("chat", []),
    ],
)
def test_rows_in_files_are_those_in_memory(tmp_path, monkeypatch, task, argv):
    """Converted three samples at a time; a text of one piece goes on in the next one's rows."""
    monkeypatch.setattr(stored, "PIECE", 3)
    memory, files = both(tmp_path, task, *argv)
    assert isinstance(files, StoredRows) and len(memory) == len(files) > 6
    args = tiny.arguments(tmp_path, task, *argv)
    orders = [list(islice(epochs_of(args, rows).batches(), 9)) for rows in (memory, files)]
    assert orders[0] == orders[1]
    for indices in [indices for batch in orders[0] for indices in batch]:
        batches = [rows.batch(indices, 3) for rows in (memory, files)]
        assert batches[0].keys() == batches[1].keys()
        for name, tensor in batches[0].items():
            assert torch.equal(tensor, batches[1][name]) and tensor.dtype == batches[1][name].dtype, name
        assert memory.num_terms(indices) == files.num_terms(indices)


def test_a_cache_is_made_once_for_what_decides_it(tmp_path, monkeypatch):
    """Other flags, and a file that has changed, make another; one that a process left unfinished is made again."""
    made = []
    monkeypatch.setattr(stored, "write_rows", lambda *given, write=stored.write_rows: made.append(1) or write(*given))

    file = tiny.data_file(tmp_path, "chat").rename(tmp_path / "own.jsonl")

    def count(*argv):
        read_data(tiny.arguments(tmp_path, "chat", "--data_cache", tmp_path / "cache", "--train_file", file, *argv))
        return len(made)

    assert [count(), count(), count("--group_by_length"), count("--max_seq_length", 9)] == [1, 1, 1, 2]
    for folder in [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]:
        folder.rename(f"{folder}.unfinished")
    assert [count(), count()] == [3, 3]
    os.utime(file, ns=(1, 1))
    assert count() == 4


def test_a_sample_that_is_refused_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "PIECE", 3)
    file = tmp_path / "broken.jsonl"
    texts = ["w1 w2"] * 7 + [5]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(ValueError, match=r"sample 2: .text. is 5, .* \(sample 1 of these is sample 7 of the file\)"):
        argv = ["--no_group_texts", "--train_file", file, "--data_cache", tmp_path / "cache"]
        read_data(tiny.arguments(tmp_path, "causal-lm", *argv))
    texts[-1] = "w3 w4"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert len(both(tmp_path, "causal-lm", "--no_group_texts", "--train_file", file)[1]) == 8


def test_a_folder_of_save_to_disk_is_a_file(tmp_path):
    """Whole, one split of several, and refused where the split is not said."""
    samples = read_file(tiny.data_file(tmp_path, "text-to-text")).samples
    made = datasets.Dataset.from_list(samples)
    made.save_to_disk(tmp_path / "saved")
    assert read_file(tmp_path / "saved").samples == samples
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "splits")
    assert read_file(tmp_path / "splits" / "test", limit=3).samples == samples[:3]
    with pytest.raises(ValueError, match="has the splits 'train', 'test'; give one of them"):
        read_file(tmp_path / "splits")
    with pytest.raises(ValueError, match="is no folder that save_to_disk"):
        read_file(tmp_path)
    memory, files = both(tmp_path, "text-to-text", "--train_file", tmp_path / "saved")
    assert torch.equal(memory.batch([3], 1)["input_ids"], files.batch([3], 1)["input_ids"])
