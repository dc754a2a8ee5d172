"""A search in a process of its own."""

from functools import partial
from pathlib import Path

import pytest

from megatron.pipeline.simulate.costs import Costs
from megatron.pipeline.synthesis import Problem, synthesize
from megatron.pipeline.synthesis.search_process import SearchProcess

PROBLEM = Problem(rank_of_stage=(0, 1), num_microbatches=4, costs=Costs(forward=[1.0, 2.0], backward=[2.0, 4.0]))


def test_it_finds_what_a_search_here_finds():
    """Where both reach the bound, at the same order; and nothing of it is left."""
    search = SearchProcess(partial(synthesize, PROBLEM, seconds=10.0))
    found, folder = search.result(), Path(search._temporary.name)
    assert search.is_over and found == synthesize(PROBLEM, seconds=10.0)
    search.close()
    assert not folder.exists()


def test_a_search_that_is_killed_says_so():
    search = SearchProcess(partial(synthesize, PROBLEM, seconds=10.0))
    search._process.kill()
    with pytest.raises(ValueError, match="the process of the search ended with status -9"):
        search.result()
    search.close()


def test_a_search_under_way_can_be_ended():
    """At once; a process that outlived it would go on for ten minutes."""
    larger = Problem(
        rank_of_stage=(0, 1, 2, 3), num_microbatches=12, costs=Costs(forward=[1.0, 1.1, 1.2, 2.3]), limits=2.5
    )
    search = SearchProcess(partial(synthesize, larger, seconds=600.0))
    assert not search.is_over
    search.close()
    assert search.is_over
