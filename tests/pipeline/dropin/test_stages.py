"""What a schedule may be called with."""

import pytest

from megatron import backend

backend.install()

from megatron.pipeline.dropin.stages import require_ordinary_call

CALL = {"seq_length": 32, "micro_batch_size": 2, "num_microbatches": 4}


@pytest.mark.parametrize(
    "further", [{}, {"decoder_seq_length": None}, {"decoder_seq_length": 32}, {"p2p_communicator": None}]
)
def test_an_ordinary_call(further):
    require_ordinary_call({**CALL, **further})


@pytest.mark.parametrize(
    ("further", "sentence"),
    [
        ({"decoder_seq_length": 64}, "sequences of 32 and, behind them, of 64, .*; train it without"),
        ({"adjust_tensor_shapes_fn": max}, "adjust_tensor_shapes_fn, .*, changes the shapes of what travels"),
        ({"p2p_communicator": object()}, "p2p_communicator, .*, sends over channels of its own"),
        ({"pg_collection": object()}, "pg_collection, .*, names other process groups"),
    ],
)
def test_what_ours_do_not_know(further, sentence):
    """Ignored, it would hang or train something else."""
    with pytest.raises(ValueError, match=sentence):
        require_ordinary_call({**CALL, **further})
