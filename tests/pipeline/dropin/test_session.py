"""The session's decisions, on an engine that is made up."""

from types import SimpleNamespace

import pytest
import torch

from megatron import backend

backend.install()

from megatron.pipeline.dropin.session import Session
from megatron.pipeline.dropin.start import prepare
from megatron.pipeline.dropin.updates import EngineUpdate
from megatron.pipeline.runtime.contract.stage import BatchReport
from tests.pipeline.dropin.arguments import arguments


class Engine:
    """Drains once, with a report; notes the mode in which it does."""

    def __init__(self, chunk, report):
        self.is_drained, self.next_batch, self.stop_requests = False, 4, 0
        self._chunk, self._report = chunk, report

    def drain(self):
        self.mode = self._chunk.training
        self.is_drained = True
        return [self._report]


@pytest.fixture
def made():
    """A session under 2bw in the middle of a run."""

    def make(report):
        args = arguments("--pipeline-schedule 2bw")
        session, chunk = Session(args, prepare(args)), torch.nn.Linear(1, 1)
        session._chunks = [chunk]
        session._ours = EngineUpdate.__new__(EngineUpdate)
        session._ours.newest, session._ours._engine_acts = None, False
        session._ours.update = SimpleNamespace(show_newest=lambda: None)
        session._rank = SimpleNamespace(engine=Engine(chunk, report))
        return session, chunk

    return make


@pytest.mark.parametrize("training", [True, False])
def test_what_is_left_of_batches_trains(training, made):
    """An evaluation has put the model into its mode by then, and finds it there again."""
    session, chunk = made(BatchReport(batch=3, grad_norm=1.0))
    chunk.train(training)
    session.drain()
    assert session._rank.engine.mode and chunk.training is training
    session.drain()
    assert list(session._drains) == [4] and session._ours.newest.batch == 3


def test_a_request_travels_with_the_engine_and_comes_back_in_a_report(made):
    """This rank's is not acted on before all have it."""
    session, _ = made(BatchReport(batch=3, stop_requests=1))
    assert not session.agrees_to_stop(False) and session._rank.engine.stop_requests == 0
    assert not session.agrees_to_stop(True) and session._rank.engine.stop_requests == 1
    session.drain()
    assert session.agrees_to_stop(False)


def test_a_gradient_that_is_not_finite_ends_the_job(made, capsys, monkeypatch):
    """With a sentence, where Megatron-LM's flag says so; nothing is drained behind it."""
    monkeypatch.delenv("RANK", raising=False)
    session, _ = made(BatchReport(batch=3, grad_norm=float("nan"), nan=True))
    with pytest.raises(SystemExit) as raised:
        session.drain()
    assert raised.value.code == 2
    assert "the gradient of iteration 4 is not finite (norm nan); lower --lr" in capsys.readouterr().err
    session.finish()  # is refused, and so returns at once

    session, _ = made(BatchReport(batch=3, grad_norm=float("nan"), nan=True))
    session._args.check_for_nan_in_loss_and_grad = False
    session.drain()


def test_arguments_are_prepared_once(made):
    """A program may validate them twice, and ranks are exchanged once."""
    session, _ = made(BatchReport(batch=3))
    assert session.is_of(session._args) and not session.is_of(arguments("--pipeline-schedule 2bw"))
