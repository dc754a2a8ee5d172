"""What another tensor parallel size changes, as docs/design.md says under "What equals what"."""

import pytest

from tests.trainer.run.run_case import BASE, train

SAME = (
    f"{BASE} --pipeline-model-parallel-size 1 --global-batch-size 4 --train-iters 3 --make-vocab-size-divisible-by 64 "
    "--lr 1e-3"
)


def losses(num_ranks: int, flags: str, name: str = "lm_loss") -> list[float]:
    """The loss of each batch at that tensor parallel size, or its `grad_norm`."""
    records = train(num_ranks, f"{SAME} --tensor-model-parallel-size {num_ranks} {flags}")[-1]["records"]
    return [record[name] for record in records]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("flags", "agree"),
    [
        ("--attention-dropout 0 --hidden-dropout 0.1", True),
        ("--attention-dropout 0 --hidden-dropout 0.1 --sequence-parallel", False),
        ("--attention-dropout 0.1 --hidden-dropout 0", False),
        ("--attention-dropout 0 --hidden-dropout 0 --sequence-parallel", True),
    ],
)
def test_losses_at_another_tensor_parallel_size(flags, agree):
    """They agree to rounding, but for dropout that each tensor rank draws for itself."""
    one, two = losses(1, flags), losses(2, flags)
    assert (one == pytest.approx(two, rel=1e-5)) is agree
    assert one == pytest.approx(two, rel=0.05)


@pytest.mark.full
def test_ranks_that_share_a_query_group():
    """One group of keys and values over two ranks: the gradients' norms, of weights that the losses follow, are those
    of one rank."""
    flags = (
        "--group-query-attention --num-query-groups 1 --attention-dropout 0 --hidden-dropout 0 --qk-layernorm "
        "--position-embedding-type rope --sequence-parallel"
    )
    assert losses(1, flags, "grad_norm") == pytest.approx(losses(2, flags, "grad_norm"), rel=1e-5)
