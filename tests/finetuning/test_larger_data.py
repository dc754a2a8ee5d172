"""Rows that are several times larger than the memory that a run may take."""

import json
import os
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.finetuning import samples
from megatron.finetuning.data.batches import Rows
from tests import workers
from tests.finetuning import cases

pytest.importorskip("datasets")

CASE = "tests.finetuning.test_larger_data:limited"
ROWS, TOKENS = 48_000, 1024
MORE = 250 * 2**20
"""Bytes of private memory for all that a run needs: capture, training, and the conversion of samples."""


def in_memory(cache, decides, parts, contents) -> Rows:
    """In place of `cached_rows`."""
    made = list(parts())
    tensors = {name: torch.cat([part._tensors[name] for part in made]) for name in made[0]._tensors}
    terms = torch.cat([part._num_terms for part in made])
    return Rows(tensors, ignored=made[0]._ignored, num_terms=terms, targets=made[0]._targets)


def limited(folder: Path, task: str, *, limit: int | None, **options) -> cases.Outcome:
    """A run that may take `limit` more bytes of private memory than its process has at the start (as `ulimit -d`
    counts them); None: one with all rows in memory."""
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the usual one reserves a GiB of addresses
    if limit is None:
        with mock.patch.object(samples, "cached_rows", in_memory):
            return cases.finetune(folder, task, **options)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    taken = 1024 * int(status["VmData"].split()[0])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + limit, before[1]))
    try:
        return cases.finetune(folder, task, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_data_larger_than_memory(tmp_path):
    """750 MiB of rows with 250 MiB for everything: the losses and the model of a run with all rows in memory."""
    texts = [f"w{at % 40} w{at // 40 % 40} w{at // 1600 % 40}" for at in range(ROWS)]
    file = tmp_path / "many.jsonl"
    file.write_text("".join(json.dumps({"source": text, "target": text}) + "\n" for text in texts))
    argv = ["--train_file", file, "--max_source_length", TOKENS, "--max_steps", 4, "--pipeline_schedule", "flush"]
    argv += ["--pad_to_multiple_of", 8]
    argv += ["--partition", cases.partition(tmp_path, "text-to-text", (0, 1), *argv, "--max_train_samples", 9)]
    argv += ["--data_cache", tmp_path / "cache"]
    outcomes = {}
    for name, limit in (("files", MORE), ("memory", None)):
        outcomes[name], *_ = workers.run(
            2,
            CASE,
            folder=tmp_path,
            task="text-to-text",
            argv=tuple(map(str, argv)),
            name=name,
            limit=limit,
            timeout=400,
        )
    [kept] = (tmp_path / "cache").glob("*/rows.arrow")
    assert kept.stat().st_size >= 3 * MORE
    files, memory = outcomes["files"], outcomes["memory"]
    assert files.losses == memory.losses and len(set(files.losses)) == 4
    assert all(torch.equal(tensor, memory.weights[name]) for name, tensor in files.weights.items())
