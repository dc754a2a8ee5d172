"""tools/preprocess_data.py: Megatron's bytes, whatever the number of workers, and nothing half-written."""

import contextlib
import gzip
import json
import lzma
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron import backend

backend.install()
from megatron.commands import preprocess_data
from tests.full_disk import largest_file

TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"

DOCUMENTS = [[5, 6, 7], [], [8], list(range(1, 60)), [99, 0]]


def write_lines(path: Path, documents: list = DOCUMENTS) -> str:
    path.write_text("".join(json.dumps({"text": " ".join(map(str, ids)), "id": 1}) + "\n" for ids in documents))
    return str(path)


def run_tool(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOL), *argv], capture_output=True, text=True, timeout=120)


def convert(tmp_path: Path, *more: str, name: str = "out") -> Path:
    """Tokenize DOCUMENTS in this process; returns the prefix of the pair."""
    argv = ["--input", write_lines(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / name),
             "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", *more]  # fmt: skip
    preprocess_data.preprocess(preprocess_data.parse_args(argv))
    return tmp_path / f"{name}_text_document"


def test_megatron_core_reads_what_was_written(tmp_path):
    """IndexedDataset gives back the documents in order, with the end-of-document token where asked for."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    plain, ended = (
        IndexedDataset(str(convert(tmp_path))),
        IndexedDataset(str(convert(tmp_path, "--append-eod", name="eod"))),
    )
    filled = [ids for ids in DOCUMENTS if ids]
    assert [part.tolist() for part in plain] == filled
    assert [part.tolist() for part in ended] == [[*ids, 100] for ids in filled]
    assert plain.document_indices.tolist() == [0, 1, 1, 2, 3, 4]
    assert plain.index.dtype is numpy.uint16


def test_same_bytes_whatever_the_workers(tmp_path):
    """One, two and five workers write the same files, also where lines outnumber the chunks."""
    many = [[number % 100] * (number % 7 + 1) for number in range(700)]
    results = []
    for workers in ("1", "2", "5"):
        argv = ["--input", write_lines(tmp_path / "in.jsonl", many), "--output-prefix", str(tmp_path / workers),
                 "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--workers", workers]  # fmt: skip
        preprocess_data.preprocess(preprocess_data.parse_args(argv))
        results.append([(tmp_path / f"{workers}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "1 2"', "in.jsonl:3: not JSON"),
        ('["1 2"]', "in.jsonl:3: not a JSON object but list"),
        ('{"content": "1 2"}', "in.jsonl:3: no text under the key 'text'"),
        ('{"text": "one two"}', "in.jsonl:3: cannot be tokenized"),
        ('{"text": "5 101"}', "in.jsonl:3: the token 101 is none of the vocabulary, whose ids end at 100; mend"),
        ('{"text": "-1"}', "in.jsonl:3: the token -1 is none of the vocabulary"),
        ("[" * 10**5, "in.jsonl:3: not JSON: maximum recursion depth"),
        ("9" * 5000, "in.jsonl:3: not JSON: Exceeds the limit"),
        ('{"text": "caf\udce9"}', "in.jsonl, line 3 is no UTF-8 text"),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_line_is_named_and_leaves_nothing(tmp_path, line, message, workers):
    """The error names file and line, and no file is left, finished or partial."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(('{"text": "1"}\n\n' + line + "\n").encode("utf-8", "surrogateescape"))
    argv = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "NullTokenizer",
             "--vocab-size", "100", "--workers", workers]  # fmt: skip
    with pytest.raises(ValueError, match=message):
        preprocess_data.preprocess(preprocess_data.parse_args(argv))
    assert [found.name for found in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("documents", [2, 20_000])
def test_a_full_disk_is_told_with_the_place_and_leaves_nothing(tmp_path, documents):
    """Whether the tokens meet it or the index; files that are there stay as they are."""
    (tmp_path / "out_text_document.idx").write_bytes(b"earlier")
    path = write_lines(tmp_path / "in.jsonl", [[5, 6, 7]] * documents)
    argv = ["--input", path, "--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "NullTokenizer",
            "--vocab-size", "100"]  # fmt: skip
    reason = f"--output-prefix {tmp_path}/out cannot be written .*make room"
    with largest_file(16), pytest.raises(ValueError, match=reason):
        preprocess_data.preprocess(preprocess_data.parse_args(argv))
    assert sorted(found.name for found in tmp_path.iterdir()) == ["in.jsonl", "out_text_document.idx"]
    assert (tmp_path / "out_text_document.idx").read_bytes() == b"earlier"


def test_ids_of_a_vocabulary_may_have_gaps(tmp_path):
    """The largest one decides on the files' type, and not the number of tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    core = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "[UNK]": 1, "a": 2, "b": 70_000}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "in.jsonl").write_text('{"text": "a b c"}\n')
    for model in (tmp_path, tmp_path / "tokenizer.json"):
        argv = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"),
                "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]  # fmt: skip
        preprocess_data.preprocess(preprocess_data.parse_args(argv))
        found = IndexedDataset(str(tmp_path / "out_text_document"))  # its arrays end with it
        assert found[0].tolist() == [2, 70_000, 1]


def test_a_kill_leaves_no_index_of_other_tokens(tmp_path, monkeypatch):
    """Where files are written anew, the new tokens never lie beside the old index."""
    convert(tmp_path)
    replace = preprocess_data.os.replace

    def killed(source, target):
        if target.endswith(".idx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(preprocess_data.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path)
    assert [path.suffix for path in tmp_path.glob("out*")] == [".bin"]


def test_an_input_may_have_brackets_in_its_name(tmp_path):
    """A file of the very name is read, and not what its name would match as a pattern."""
    (tmp_path / "part1.jsonl").write_text('{"text": "9"}\n')
    for name, tokens in (("part[1].jsonl", 2), ("part[0-9].jsonl", 1)):
        if tokens == 2:
            write_lines(tmp_path / name, [[1, 2]])
        argv = ["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "out"),
                "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]  # fmt: skip
        assert preprocess_data.preprocess(preprocess_data.parse_args(argv))["tokens"] == tokens


def test_compressed_lines_and_a_mark_make_the_same_files(tmp_path):
    """As dumps of text are published, and as programs of Windows write; blank lines make no document."""
    plain, lines = convert(tmp_path), (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "part-0.jsonl.gz").write_bytes(
        gzip.compress(b"\xef\xbb\xbf" + lines[: lines.index(b"\n") + 1] + b"  \n")
    )
    (tmp_path / "part-1.jsonl.xz").write_bytes(lzma.compress(lines[lines.index(b"\n") + 1 :]))
    argv = ["--input", str(tmp_path / "part-*"), "--output-prefix", str(tmp_path / "packed"), "--tokenizer-type",
            "NullTokenizer", "--vocab-size", "100"]  # fmt: skip
    preprocess_data.preprocess(preprocess_data.parse_args(argv))
    for suffix in (".bin", ".idx"):
        packed = tmp_path / f"packed_text_document{suffix}"
        assert packed.read_bytes() == plain.with_suffix(suffix).read_bytes()


def test_what_a_tokenizer_cannot_take_is_named(tmp_path, monkeypatch):
    """Half a character, of which each library has another error, and any error that one of them may raise."""
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n{"text": "bad \\ud800 half"}\n')
    argv = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"), "--tokenizer-model"]
    core = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    core.save(str(tmp_path / "tokenizer.json"))
    args = preprocess_data.parse_args(
        [*argv, str(tmp_path / "tokenizer.json"), "--tokenizer-type", "HuggingFaceTokenizer"]
    )
    with pytest.raises(
        ValueError, match=r"in.jsonl:2: the text under 'text' has the lone surrogate \\ud800 at charact"
    ):
        preprocess_data.preprocess(args)

    def fails(self, text):
        raise KeyError("another error")

    monkeypatch.setattr("megatron.trainer.data.tokenizer.FastTokenizer.tokenize", fails)
    with pytest.raises(ValueError, match=r"in.jsonl:1: cannot be tokenized: 'another error'"):
        preprocess_data.preprocess(args)


def test_several_keys_and_files(tmp_path):
    """Each key becomes a pair of its own; a pattern names several inputs, taken in the order of their names."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (tmp_path / "part-1.jsonl").write_text('{"title": "2", "text": "3 4"}\n')
    (tmp_path / "part-0.jsonl").write_text('{"title": "0", "text": "1"}\n')
    argv = ["--input", str(tmp_path / "part-*.jsonl"), "--output-prefix", str(tmp_path / "out"), "--json-keys",
             "title", "text", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]  # fmt: skip
    counts = preprocess_data.preprocess(preprocess_data.parse_args(argv))
    assert counts == {"documents": 2, "tokens": 5}
    assert [part.tolist() for part in IndexedDataset(str(tmp_path / "out_title_document"))] == [[0], [2]]
    assert [part.tolist() for part in IndexedDataset(str(tmp_path / "out_text_document"))] == [[1], [3, 4]]


def test_sentences(tmp_path):
    """--split-sentences keeps sentences apart in files of that name: of a text, or as a list gives them; long ones are
    cut, and empty texts stay documents."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    long = " ".join(["7"] * 1100)
    texts = ["1 2! 3", ["4 5. 6", "", "7"], "", [long, "8"]]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"!.12345678"]))
    argv = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"), "--tokenizer-type",
             "BertWordPieceLowerCase", "--vocab-file", str(tmp_path / "vocab.txt"), "--split-sentences"]  # fmt: skip
    counts = preprocess_data.preprocess(preprocess_data.parse_args(argv))
    found = IndexedDataset(str(tmp_path / "out_text_sentence"))
    assert counts == {"documents": 4, "tokens": 4 + 5 + 1101}
    assert found.document_indices.tolist() == [0, 2, 4, 4, 8]
    assert [part.tolist() for part in found][:4] == [[7, 8, 5], [9], [10, 11, 6, 12], [13]]
    assert found.sequence_lengths.tolist()[4:] == [367, 367, 366, 1]
    with pytest.raises(ValueError, match="no text under the key 'text'"):
        preprocess_data.preprocess(preprocess_data.parse_args(argv[:-1]))


@pytest.mark.full
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_workers_end_with_the_tool(tmp_path, name):
    """Whatever ends the tool ends its workers; a signal that can be handled leaves one line and no file."""
    number, path = signal.Signals[name], tmp_path / "in.jsonl"
    source = write_lines(path, [list(range(90)) * 5])
    path.write_text(path.read_text() * 20_000)
    argv = ["--input", source, "--output-prefix", str(tmp_path / "out"), "--workers", "3", "--log-interval", "1000000"]
    tool = subprocess.Popen(
        [sys.executable, str(TOOL), *argv, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"],
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    workers = []
    try:
        while len(workers) < 3:
            assert tool.poll() is None, tool.stderr.read()
            workers = psutil.Process(tool.pid).children()
            time.sleep(0.02)
        tool.send_signal(number)
        status = tool.wait(30)
        left = psutil.wait_procs(workers, timeout=10)[1]
        assert not left, left
        error = tool.stderr.read()
    finally:
        tool.kill()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
    if number == signal.SIGKILL:
        assert status == -number
        return
    assert (status, error) == (128 + number, f"ended by {name}; no file is written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_command_line(tmp_path):
    """The tool as a command: a summary and status 0, or one sentence and status 2."""
    good = run_tool("--input", write_lines(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"),
                    "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--log-interval", "2")  # fmt: skip
    assert good.returncode == 0 and "5 documents, 65 tokens" in good.stderr, good.stderr
    bad = run_tool("--input", str(tmp_path / "none"), "--output-prefix", "out", "--tokenizer-type", "NullTokenizer",
                   "--vocab-size", "100")  # fmt: skip
    assert bad.returncode == 2
    assert bad.stderr == f"preprocess_data.py: error: --input {tmp_path}/none does not exist\n"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--tokenizer-typ", "x"], "did you mean --tokenizer-type"),
        (["--keep-newlines"], "--keep-newlines: newlines are always kept"),
        (["--workers", "0"], "must be at least 1"),
        (["--output-prefix", "/nowhere/at/all"], "the directory /nowhere/at does not exist"),
    ],
)
def test_wrong_flags(tmp_path, argv, message):
    """Wrong flags are one sentence."""
    base = ["--input", write_lines(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"),
            "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]  # fmt: skip
    with pytest.raises(ValueError, match=message):
        preprocess_data.parse_args([*base, *argv])
