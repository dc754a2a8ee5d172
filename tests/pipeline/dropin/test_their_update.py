"""What is left to Megatron-LM when a batch is through the pipeline."""

from types import SimpleNamespace

import pytest
import torch

from megatron import backend

backend.install()

from megatron.pipeline.dropin.their_update import TheirUpdate
from megatron.pipeline.runtime.contract.stage import BatchInfo


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
    update = TheirUpdate(["chunk"], settings)
    update.finish_batch([], {"seq_length": 8, "force_all_reduce": False, "pg_collection": None})
    update.finish_batch([], {"force_all_reduce": True})
    assert called == [((["chunk"], None), {}), ((["chunk"], None), {"force_all_reduce": True})]


def test_tokens_where_all_of_a_batch_count_alike():
    """Those of the rank's last stage; others have counted none."""
    called, settings = config(calculate_per_token_loss=True)
    steps = [SimpleNamespace(num_tokens=0), SimpleNamespace(num_tokens=torch.tensor(12))]
    TheirUpdate(["first", "last"], settings).finish_batch(steps, {})
    [((chunks, num_tokens), _)] = called
    assert chunks == ["first", "last"] and int(num_tokens) == 12 and num_tokens.dtype is torch.int


def test_nothing_to_finish():
    """A program may finish its gradients itself."""
    _, settings = config(finalize_model_grads_func=None)
    TheirUpdate(["chunk"], settings).finish_batch([], {})


@pytest.mark.parametrize(("scale", "expected"), [(None, 1.0), (lambda loss: loss * 4096.0, 4096.0)])
def test_the_loss_scale_is_theirs_when_the_batch_begins(scale, expected):
    _, settings = config(grad_scale_func=scale)
    update = TheirUpdate(["chunk"], settings)
    update.begin_batch(BatchInfo(3, 2, 4))
    settings.grad_scale_func = lambda loss: loss
    assert update.loss_scale(3) == expected and update.step(4).loss_scale == expected
