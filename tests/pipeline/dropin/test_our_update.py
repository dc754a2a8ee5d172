"""What Megatron-LM's objects say while the engine steps."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megatron import backend

backend.install()

from megatron.pipeline.dropin import our_update
from megatron.pipeline.dropin.our_update import OurUpdate
from megatron.pipeline.program.weight_policies import predicting, weight_policy
from megatron.pipeline.runtime.contract.stage import BatchReport
from megatron.pipeline.runtime.stages.megatron import reduction
from megatron.pipeline.schedules import Schedule


class Versions:
    newest = 0

    def __init__(self):
        self.resets = []

    def reset(self, *versions):
        self.resets.append(versions)


@pytest.fixture
def parts(monkeypatch):
    """(update, chunk, optimizer, scheduler, calls of their methods)."""
    calls = []

    def method(name):
        return lambda *args, **named: calls.append(name)

    def make(chunks, optimizer, scheduler, *, weights, **options):
        return SimpleNamespace(versions=Versions(), weights=weights, scheduler=scheduler)

    monkeypatch.setattr(our_update, "MegatronWeightUpdate", make)
    monkeypatch.setattr(our_update, "_warm_up", lambda: None)
    chunk = SimpleNamespace(zero_grad_buffer=method("zero_grad_buffer"))
    optimizer = SimpleNamespace(zero_grad=method("zero_grad"), step=method("step"))
    scheduler = SimpleNamespace(step=method("scheduler"))
    update = OurUpdate(
        [chunk], optimizer, scheduler, schedule=Schedule.preset("2bw", num_stages=2), stage=0,
        timeout=timedelta(minutes=1),
    )  # fmt: skip
    return update, chunk, optimizer, scheduler, calls


def test_until_the_run_begins_methods_are_theirs(parts):
    """Loading a checkpoint steps the scheduler."""
    _, _, optimizer, scheduler, calls = parts
    scheduler.step(increment=8)
    optimizer.zero_grad()
    assert calls == ["scheduler", "zero_grad"]


def test_the_engine_alone_calls_them(parts):
    """To everybody else they do nothing, and the step says what the newest report says."""
    update, chunk, optimizer, scheduler, calls = parts
    update.begin(0)
    chunk.zero_grad_buffer()
    optimizer.zero_grad()
    scheduler.step(increment=8)
    assert calls == [] and optimizer.step() == (True, None, None)
    with update.engine_acts():
        optimizer.zero_grad(set_to_none=True)
    update.update.scheduler.step(increment=8)
    assert calls == ["zero_grad", "scheduler"]
    optimizer.zero_grad()
    assert len(calls) == 2


def test_a_step_says_what_the_newest_report_says(parts):
    """A skipped batch was not stepped, and its norm is no number."""
    update, _, optimizer, _, _ = parts
    update.begin(0)
    update.note([BatchReport(batch=0, grad_norm=1.0), BatchReport(batch=1, grad_norm=2.0)])
    update.note([])
    assert optimizer.step() == (True, 2.0, None)
    update.note([BatchReport(batch=2, grad_norm=float("inf"), skipped=True)])
    assert optimizer.step() == (False, None, None)


@pytest.mark.parametrize(("iteration", "resets"), [(0, []), (7, [(6, 7)])])
def test_versions_are_counted_as_the_run_counts_batches(iteration, resets, parts):
    """Whatever a checkpoint has said: both versions that are alive are the weights that are there."""
    update, *_ = parts
    update.begin(iteration)
    assert update.update.versions.resets == resets


def test_versions_that_are_predicted_start_anew(parts):
    """The next batch is computed at the weights that are there, whichever their number."""
    update, *_ = parts
    update.update.weights, restarted = predicting(weight_policy("2bw")), []
    update.update.versions = SimpleNamespace(newest=0, restart=restarted.append)
    update.begin(7)
    assert restarted == [7]


def test_a_parameter_is_counted_by_one_argument(monkeypatch):
    """megatron.core before 0.16 takes no other."""
    parameter = torch.nn.Parameter(torch.ones(2))
    monkeypatch.setattr(reduction, "param_is_not_tensor_parallel_duplicate", lambda param: True)
    monkeypatch.setattr(reduction, "named_parameters", lambda chunks: {"weight": parameter})
    counting = reduction.GradientReduction.__new__(reduction.GradientReduction)
    counting._optimizer, counting._distributed, counting._groups = object(), False, SimpleNamespace(data=None)
    assert counting._find_counted([]) == [parameter]
