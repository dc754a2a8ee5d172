"""FTPipe's weights on several processes are those of a replay in one, bit for bit, however long anything takes."""

from dataclasses import replace

import pytest
import torch

from megatron.pipeline.program.edges import Edge
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.graph_cases import Shape, random_shape
from tests.pipeline.runtime.test_graph import SHARES, SKIPS, assert_same, run

FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("shape", "batches", "recompute", "slow"),
    [
        (SKIPS, (1,) * 8, True, 0.0),
        (SKIPS, (2, 1, 3, 2), False, 0.004),
        (random_shape(1, num_stages=7, num_ranks=2), (2, 2, 2), True, 0.0),
        (SHARES, (2, 1, 3, 2), True, 0.004),
        *(
            pytest.param(
                replace(random_shape(seed, num_stages=3 + seed % 6, num_ranks=2 + seed % 3), shares=shares),
                ((1,) * 9, (2, 2, 2, 2), (5, 5))[seed % 3], seed % 2 == 0, 0.003 * (seed % 2), marks=FULL,
            )
            for shares in (True, False)
            for seed in range(2, 10)
        ),
    ],
    ids=str,
)  # fmt: skip
def test_processes_compute_what_a_replay_does(shape, batches, recompute, slow):
    """Accumulation of 1, 2 and more, one to several stages a rank, skips, with and without recompute, with delays."""
    outcomes = run(shape, preset="stale", batches=batches, recompute=recompute, slow=slow)
    assert_same(outcomes, graph_cases.replayed(shape, batches, recompute=recompute))


def test_a_drain_in_the_middle_is_a_new_beginning():
    """An evaluation after the second batch: from there on forwards are behind by as much as from the start."""
    outcomes = run(SKIPS, preset="stale", batches=(2, 2, 2), recompute=True, evaluate=2)
    assert_same(outcomes, graph_cases.replayed(SKIPS, (2, 2, 2), recompute=True, drains=(1,)))
    assert outcomes[0].evaluations == outcomes[1].evaluations and outcomes[0].evaluations[0]["loss"][1] == 2.0
    straight = graph_cases.replayed(SKIPS, (2, 2, 2), recompute=True)
    assert any(
        not torch.equal(tensor, straight.parameters[name])
        for outcome in outcomes
        for name, tensor in outcome.parameters.items()
    )


@pytest.mark.parametrize("shape", [Shape((), (0,)), SKIPS], ids=["one stage", "no learning rate"])
def test_without_depth_or_steps_it_is_plain(shape):
    """One stage trains as one process does; with a learning rate of 0 nobody is stale."""
    batches = (2, 1, 3)
    lr = 0.1 if len(shape.rank_of_stage) == 1 else 0.0
    outcomes = run(shape, preset="stale", batches=batches, recompute=True, lr=lr)
    if lr:
        assert_same(outcomes, graph_cases.in_one_process(shape, batches))
    else:
        plain = graph_cases.replayed(shape, batches, recompute=False, lr=0.0)
        assert_same(outcomes, plain)
        first = graph_cases.in_one_process(shape, batches[:1]).reports[0]
        assert outcomes[0].reports[0].losses == pytest.approx(first.losses, rel=1e-15)


def test_it_is_another_training_than_flush():
    """So the comparisons above can fail: the weights of a chain of four are not those of one process."""
    chain = Shape((Edge(0, 1), Edge(1, 2), Edge(2, 3)), (0, 1, 0, 1))
    stale, plain = (
        graph_cases.replayed(chain, (1,) * 6, recompute=True),
        graph_cases.in_one_process(chain, (1,) * 6),
    )
    assert not torch.equal(stale.parameters["0.linear.weight"], plain.parameters["0.linear.weight"])
