"""The quickstart: its corpus and tokenizer, and the whole script with few iterations."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sentencepiece

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))

import make_corpus
import train_tokenizer


def test_no_paragraph_stands_twice():
    """Held-out documents share no paragraph with those trained on, though CPython's topics repeat each other."""
    seen = set()
    for topic in make_corpus.paragraphs():
        for paragraph in topic:
            key = " ".join(paragraph.split())
            assert key not in seen
            seen.add(key)
    assert len(seen) > 1000


def test_corpus_is_the_same_on_every_call():
    """The documents and their order are fixed, so a rerun and a resumed run see the same split."""
    assert make_corpus.documents() == make_corpus.documents()


def test_tokenizer_gives_the_text_back():
    """Tokenizing loses nothing: indentation, newlines and characters that it has never seen come back."""
    texts = make_corpus.documents()[:60]
    model = train_tokenizer.train(texts, vocab_size=600)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in [*texts[:10], "  two  spaces\n\n\ttab, 漢字 and \N{SNOWMAN}\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_id() >= 0


def run_quickstart(output: Path, **environment: str) -> str:
    """Its output; the project is importable already, so that nothing is installed."""
    environment = {**os.environ, "OUTPUT": str(output), "PYTHONPATH": str(ROOT), **environment}
    command = ["bash", str(ROOT / "examples" / "quickstart.sh")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    result = subprocess.run(command, env=environment, text=True, timeout=500, **options)
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_quickstart_from_text_to_pictures(tmp_path):
    """The script trains under 2bw, with predictions, on two ranks and leaves checkpoint, metrics and pictures."""
    output = tmp_path / "out"
    assert "Results in" in run_quickstart(output, ITERATIONS="4", EXPECTED_FALL="")
    assert (output / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "4"
    for picture in ("loss.png", "timeline/timeline.png"):
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
    assert json.loads((output / "timeline" / "trace.json").read_text())
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in metrics if "lm_loss" in record] == [1, 2, 3, 4]


@pytest.mark.full
def test_quickstart_learns_in_four_minutes(tmp_path):
    """As it stands, the script takes under 4 minutes and fails unless the validation loss has clearly fallen; a rerun
    trains nothing."""
    start = time.monotonic()
    assert "The validation loss has fallen by" in run_quickstart(tmp_path / "out")
    assert time.monotonic() - start < 240
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    assert "Trained already" in run_quickstart(tmp_path / "out")
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before
