"""What a schedule may be called with."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from megatron import backend

backend.install()

from megatron.pipeline.dropin import stages
from megatron.pipeline.dropin.stages import OverlappedStage, require_ordinary_call
from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage

CALL = {"seq_length": 32, "micro_batch_size": 2, "num_microbatches": 4}


GROUPS = {"tp": [0], "cp": [0], "pp": [0, 2], "dp_cp": [0, 1]}
"""By the names that megatron.core's collection has; a list of ranks stands for a group."""


@pytest.fixture
def groups(monkeypatch):
    """Those of `parallel_state`."""
    monkeypatch.setattr(stages, "_GROUPS", {name: lambda ranks=ranks: ranks for name, ranks in GROUPS.items()})
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: group)


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"decoder_seq_length": None},
        {"decoder_seq_length": 32},
        {"p2p_communicator": None},
        {"p2p_communicator": SimpleNamespace(pp_group=[0, 2]), "pg_collection": SimpleNamespace(**GROUPS)},
    ],
)
def test_an_ordinary_call(further, groups):
    """Also with the global groups, given as objects."""
    require_ordinary_call({**CALL, **further})


@pytest.mark.parametrize(
    ("further", "sentence"),
    [
        ({"decoder_seq_length": 64}, "sequences of 32 and, behind them, of 64, .*; train it without"),
        ({"adjust_tensor_shapes_fn": max}, "adjust_tensor_shapes_fn, .*, changes the shapes of what travels"),
        ({"p2p_communicator": object()}, "p2p_communicator, .*, has another pp_group than"),
        ({"p2p_communicator": SimpleNamespace(pp_group=[0, 1])}, "p2p_communicator, .*, has another pp_group than"),
        ({"pg_collection": SimpleNamespace(**{**GROUPS, "dp_cp": [0, 2]})}, "pg_collection, .*, has another dp_cp"),
        ({"pg_collection": SimpleNamespace(tp=[0])}, "pg_collection, .*, has another cp than .*; train it without"),
    ],
)
def test_what_ours_do_not_know(further, sentence, groups):
    """Ignored, it would hang or train something else."""
    with pytest.raises(ValueError, match=sentence):
        require_ordinary_call({**CALL, **further})


def test_the_backward_that_may_reduce(monkeypatch):
    """The last of a batch alone, whichever microbatch it is of: only there are the bucket's gradients complete."""
    syncs, made = [True], []

    @contextmanager
    def no_sync():
        syncs.append(False)
        yield
        syncs.pop()

    monkeypatch.setattr(MegatronStage, "backward", lambda stage, microbatch, grad: made.append(syncs[-1]))
    stage = OverlappedStage.__new__(OverlappedStage)
    stage.model = SimpleNamespace(no_sync=no_sync)
    for index in (1, 2, 0, 3, 4, 5):
        stage.backward(SimpleNamespace(index=index, num_microbatches=3), None)
    assert made == [False, False, True] * 2
