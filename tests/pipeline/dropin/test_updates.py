"""What surrounds the user's forward step: marks of the first microbatch, and the losses that go back.

What Megatron-LM's objects say while the engine steps.

What is left to Megatron-LM when a batch is through the pipeline.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from megatron import backend

backend.install()

from megatron.pipeline.dropin import updates
from megatron.pipeline.dropin.updates import EngineUpdate, ForwardStep, MegatronUpdate
from megatron.pipeline.program.weight_policies import predicting, weight_policy
from megatron.pipeline.runtime.contract.stage import BatchInfo, BatchReport
from megatron.pipeline.runtime.stages.megatron import reduction
from megatron.pipeline.schedules import Schedule


class Chunk(torch.nn.Module):
    """Notes each batch's first microbatch."""

    def __init__(self):
        super().__init__()
        self.firsts = 0

    def set_is_first_microbatch(self):
        self.firsts += 1


def user(data, model):
    """As a user's: the loss function hands back what it is told to."""
    outputs = next(data)
    return torch.tensor(1.0), lambda output: outputs


def run(step, model, *outputs):
    step.begin_batch(user)
    data = iter(outputs)
    for _ in outputs:
        output, loss_function = step(data, model)
        loss_function(output)


def test_tokens_are_counted_where_a_loss_function_says_them():
    """Summed over the batch, and begun anew with the next."""
    model = Chunk()
    step = ForwardStep(model, chunk=None, is_last=True)
    run(step, model, (1.0, torch.tensor(5), {}), (1.0, torch.tensor(7), {}))
    assert int(step.num_tokens) == 12
    run(step, model, (1.0, {}))
    assert step.num_tokens == 0


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

    monkeypatch.setattr(updates, "MegatronWeightUpdate", make)
    monkeypatch.setattr(updates, "_warm_up", lambda: None)
    chunk = SimpleNamespace(zero_grad_buffer=method("zero_grad_buffer"))
    optimizer = SimpleNamespace(zero_grad=method("zero_grad"), step=method("step"))
    scheduler = SimpleNamespace(step=method("scheduler"))
    update = EngineUpdate(
        [chunk], optimizer, scheduler, schedule=Schedule.preset("2bw", num_stages=2), stage=0,
        timeout=timedelta(minutes=1),
    )  # fmt: skip
    return update, chunk, optimizer, scheduler, calls


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


def config(**values):
    called = []

    def finish(*args, **named):
        called.append((args, named))

    return called, SimpleNamespace(
        **{"finalize_model_grads_func": finish, "grad_scale_func": None, "calculate_per_token_loss": False, **values}
    )


def test_gradients_are_finished_as_their_schedules_do():
    """With the chunks, no tokens, and of the call what matters to it alone."""
    called, settings = config()
    update = MegatronUpdate(["chunk"], settings)
    update.finish_batch([], {"seq_length": 8, "force_all_reduce": False, "pg_collection": None})
    update.finish_batch([], {"force_all_reduce": True})
    assert called == [((["chunk"], None), {}), ((["chunk"], None), {"force_all_reduce": True})]


def test_tokens_where_all_of_a_batch_count_alike():
    """Those of the rank's last stage; others have counted none."""
    called, settings = config(calculate_per_token_loss=True)
    steps = [SimpleNamespace(num_tokens=0), SimpleNamespace(num_tokens=torch.tensor(12))]
    MegatronUpdate(["first", "last"], settings).finish_batch(steps, {})
    [((chunks, num_tokens), _)] = called
    assert chunks == ["first", "last"] and int(num_tokens) == 12 and num_tokens.dtype is torch.int


@pytest.mark.parametrize(("scale", "expected"), [(None, 1.0), (lambda loss: loss * 4096.0, 4096.0)])
def test_the_loss_scale_is_theirs_when_the_batch_begins(scale, expected):
    _, settings = config(grad_scale_func=scale)
    update = MegatronUpdate(["chunk"], settings)
    update.begin_batch(BatchInfo(3, 2, 4))
    settings.grad_scale_func = lambda loss: loss
    assert update.loss_scale(3) == expected and update.step(4).loss_scale == expected
