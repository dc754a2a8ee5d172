"""Errors that no message tells, only numbers: each is put back into a copy of the code, and the tests notice it.

They were met when experts, context parallelism, multi-token prediction and FP8 were built: the job runs, its first loss
is right, and what it trains is another model.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from tests.mutants import ROOT, copy_tree

MEGATRON = "pipeline/runtime/stages/megatron"
STAGES = f"tests/{MEGATRON}"
TRAINING = "test_training_equals_one_process"


@dataclass(frozen=True)
class Error:
    """`right` in the file `path` of the package becomes `wrong`, and of these tests at least one fails."""

    path: str
    right: str
    wrong: str
    tests: str


ERRORS = {
    "gradients are reduced without the ranks that share sequences": Error(
        f"{MEGATRON}/groups.py", "get_data_parallel_group(with_context_parallel=True)", "get_data_parallel_group()",
        f"{STAGES}/test_context_parallel.py::{TRAINING}[2bw, masked-(1, 1, 1)]",
    ),
    "each rank divides by its own number of tokens": Error(
        f"{MEGATRON}/losses.py", "loss / _over_context(torch.as_tensor(num_tokens))",
        "loss / torch.as_tensor(num_tokens)",
        f"{STAGES}/test_context_parallel.py::{TRAINING}[2bw, masked-(1, 1, 1)]",
    ),
    "losses of routers lack a factor of the ranks that share sequences": Error(
        f"{MEGATRON}/auxiliary.py", "factor * self._num_shares", "factor",
        f"{STAGES}/test_context_parallel.py::{TRAINING}[2bw, experts, per token-(2, 1, 1)]",
    ),
    "losses of further tokens have no scale": Error(
        f"{MEGATRON}/auxiliary.py", "MTPLossAutoScaler.set_loss_scale(torch.full((), factor,",
        "MTPLossAutoScaler.set_loss_scale(torch.full((), 1.0,",
        f"{STAGES}/test_multi_token.py::{TRAINING}",
    ),
    "the copy of the embedding for further tokens is not reduced": Error(
        "trainer/arguments/rules/schedule.py", "or args.mtp_num_layers is not None", "",
        "tests/trainer/run/test_multi_token.py::test_numbers_do_not_depend_on_the_cut",
    ),
    "two versions of weights share what was cast to FP8": Error(
        f"{MEGATRON}/engine_linears.py", "self._casts[batch] = [{} for _ in self._casting]",
        "self._casts[batch] = next(iter(self._casts.values()), [{} for _ in self._casting])",
        f"{STAGES}/test_engine.py::test_weights_in_fp8_are_those_of_their_batch",
    ),
    "two batches share the counts of experts": Error(
        f"{MEGATRON}/auxiliary.py", "counters = self._batches.get(batch)",
        "counters = next(iter(self._batches.values()), None)",
        f"{STAGES}/test_experts.py::{TRAINING}",
    ),
    "the base of rotary positions is megatron.core's": Error(
        "trainer/models/gpt.py", "rotary_base=args.rotary_base", "rotary_base=10000",
        "tests/trainer/checkpoint/test_hugging_face.py::test_logits_are_those_of_transformers[llama]",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    copy_tree(tree)
    return tree


@pytest.mark.parametrize("name", ERRORS)
def test_the_place_is_still_there(name):
    """Once, so that the test below puts in what it says."""
    error = ERRORS[name]
    assert (ROOT / "megatron" / error.path).read_text(encoding="utf-8").count(error.right) == 1
    assert (ROOT / error.tests.partition("::")[0]).exists()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ERRORS)
def test_the_error_is_noticed(tree, name):
    error = ERRORS[name]
    path = tree / "megatron" / error.path
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(error.right, error.wrong), encoding="utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", "-m", "not full"]
        done = subprocess.run(
            [*command, error.tests], cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True,
            text=True, timeout=800,
        )  # fmt: skip
    finally:
        path.write_text(source, encoding="utf-8")
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout[-3000:]
