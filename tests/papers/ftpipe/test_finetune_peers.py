"""The comparison of fine-tuning with its peers: what it makes of runs, and what it does for torch's tracer."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

from papers.ftpipe import finetune_peer_runs, finetune_peers
from papers.ftpipe.finetune_peer_runs import copies_of_shared, make_contiguous

ROOT = Path(__file__).resolve().parents[3]


def test_seconds_are_those_of_the_steady_state():
    assert finetune_peer_runs.steady_seconds([9.0, 10.0, 10.2, 10.4, 10.5, 10.6, 17.0, 20.0]) == pytest.approx(0.15)
    with pytest.raises(ValueError, match=r"2 batches have no steady state"):
        finetune_peer_runs.steady_seconds([1.0, 2.0])


def test_losses_that_part_are_found():
    """ftpipe's own differ from its second batch on; those of its drained run may not."""
    same = {arm: [3.0, 2.0, 1.0] for arm in finetune_peers.ARMS} | {"ftpipe": [3.0, 2.1, 1.2]}
    finetune_peers.check(same, [3.0, 2.0, 1.0])
    for wrong, drained in (
        (same | {"flush": [3.0, 2.0, 1.0001]}, [3.0, 2.0, 1.0]),
        (same | {"ftpipe": [3.1, 2.0, 1.0]}, [3.0, 2.0, 1.0]),
        (same, [3.0, 2.1, 1.0]),
        (same | {"torch 1F1B": []}, [3.0, 2.0, 1.0]),
    ):
        with pytest.raises(AssertionError):
            finetune_peers.check(wrong, drained)


def test_the_table(capsys):
    seconds = {arm: [1.0, 2.0, 4.0] for arm in finetune_peers.ARMS} | {"naive": [3.0, 4.0, 8.0]}
    finetune_peers.show({
        "t5": {"seconds": seconds, "as it comes": "RuntimeError: it is not"},
        "bert": {"seconds": seconds, "as it comes": None},
    })  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    naive = next(line for line in lines if line.startswith("│ naive"))
    assert [cell.strip() for cell in naive.split("│")[2:5]] == ["4.0", "2.0 to 5.3", "2.00"]
    assert any("RuntimeError" in line and "as above" in line for line in lines)


class Tied(nn.Module):
    """Hands a transposed tensor to its second block, and uses one weight in both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, given):
        return self.second(self.first(given).transpose(0, 1))


def test_what_is_done_for_the_tracer():
    """What crosses is contiguous, the output is the same, and both stages' copies of a tied weight are found."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    whole = nn.Module()
    whole.model = Tied()
    whole.forward = lambda given: whole.model(given)
    given = torch.randn(3, 5, 4)
    expected = whole.model(given)
    pipe = pipeline(whole, (given,), split_spec={"model.second": SplitPoint.BEGINNING})
    first, second = (pipe.get_stage_module(stage) for stage in range(2))
    (before,) = first(given) if isinstance(first(given), tuple) else (first(given),)
    make_contiguous(first, second)
    (after,) = first(given) if isinstance(first(given), tuple) else (first(given),)
    assert not before.is_contiguous() and after.is_contiguous()
    torch.testing.assert_close(second(after), expected)
    received = next(node for node in second.graph.nodes if node.op == "placeholder")
    assert received.meta["val"].is_contiguous()
    for stage in (first, second):
        ((copy, *_),) = copies_of_shared(whole.model, stage)
        torch.testing.assert_close(copy, whole.model.first.weight)


@pytest.mark.full
def test_arms_compute_the_same(tmp_path):
    """The command checks the losses itself; each arm has a time for each turn, and torch alone fails on the T5."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "papers.ftpipe.finetune_peers", "--json", str(result), "--repeats", "1"]
    subprocess.run([*command, "--steps", "8", "--length", "32"], check=True, timeout=550, cwd=ROOT)
    found = json.loads(result.read_text())
    assert set(found) == {"t5", "bert"}
    for each in found.values():
        assert set(each["seconds"]) == set(finetune_peers.ARMS)
        assert all(len(turns) == 1 and turns[0] > 0 for turns in each["seconds"].values())
    assert "contiguous" in found["t5"]["as it comes"] and found["bert"]["as it comes"] is None


@pytest.mark.full
def test_without_the_sum_torch_trains_another_model(tmp_path):
    """The tracer's copies of the T5's embedding part from the first step on, and the losses show it."""
    bench = finetune_peers.Bench(finetune_peers.MODELS[0], tmp_path, Namespace(steps=8, length=32))
    finetune_peers.finetune_models.write_t5(tmp_path, length=32)
    turns = [bench.turn("torch GPipe", mend=("inputs", "contiguous")), bench.turn("naive")]
    apart, expected = (each["losses"] for each in bench.run(turns))
    assert apart[0] == pytest.approx(expected[0], abs=1e-5)
    assert max(abs(one - other) for one, other in zip(apart, expected, strict=True)) > finetune_peers.TOLERANCE
