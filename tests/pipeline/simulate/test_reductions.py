"""The chain of reductions in the simulator."""

import pytest

from megatron.pipeline.program.instruction import Kind
from megatron.pipeline.simulate import Costs, simulate
from tests.pipeline.simulate.programs import B, F, build


@pytest.mark.parametrize("m", [4, 8])
def test_2bw_hides_the_reduction_chain_within_its_slack(m):
    """A chain up to (m-p+1)(f+b) costs nothing; a longer one does."""
    slack = (m - 3) * (F + B)
    schedule = build("2bw", 4, (m,) * 8, data_parallel=True, tied_embeddings=True)

    def time_per_batch(share):
        costs = Costs(
            reduce_grad=0.3 * share * slack, reduce_embed=0.3 * share * slack, reduce_norm=0.4 * share * slack
        )
        return simulate(schedule, costs).steady_time_per_batch()

    assert time_per_batch(0.99) == pytest.approx(m * (F + B))
    assert time_per_batch(2.0) > m * (F + B) + 0.4 * slack


def test_a_flush_pays_for_its_chain():
    """Under flush the STEP stands right after the chain, so every batch pays for it and for the step."""
    costs = Costs(reduce_norm=0.75, step=0.25)
    assert simulate(build("flush", 4, (4,) * 3), costs).steady_time_per_batch() == pytest.approx(7 * (F + B) + 1.0)


def test_norm_starts_with_its_last_member():
    """The norm's reduction has the same span on every rank: from the last member's post on."""
    timeline = simulate(build("flush", 4, (4,)), Costs(reduce_norm=0.5))
    spans = {(span.start, span.end) for span in timeline.spans if span.instruction.kind is Kind.REDUCE_NORM}
    assert spans == {(21.0, 21.5)}


@pytest.mark.parametrize("data_parallel", [False, True])
def test_pipedream_runs_without_a_bubble(data_parallel):
    """Under weight stashing, with one microbatch per batch, a steady pipeline takes f + b per batch.

    The norm of a batch comes together only when the first stage has ended it; it serves the report, so no STEP waits.
    """
    timeline = simulate(build("pipedream", 4, (1,) * 24, data_parallel=data_parallel))
    assert timeline.steady_time_per_batch() == pytest.approx(F + B)
