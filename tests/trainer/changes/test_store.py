"""The store in memory: what it gives, and what all ranks say where one has a fault."""

import re

import pytest

from tests import workers

LOADS = "tests.trainer.changes.store_cases:loads"


def test_what_is_asked_for_comes():
    """Rows from whoever has them, in messages of a few bytes; objects of other ranks; what rank 0 says for all, with
    what it does not know; an extra state that nobody has is left out."""
    results = workers.run(3, LOADS)
    for rank, (_, notes, common, empty, moved) in enumerate(results):
        assert notes["of"] % 2 == (rank + 1) % 2 and (rank != 2 or notes == {"of": 1})
        assert common == {"count": 3, "only": [1]} and empty == {}
        assert moved["bytes_kept"] == 12 * (4, 2, 5)[rank]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", r"no rank holds 'bias', which is needed under the new degrees"),
        ("no object", r"no rank holds 'diary'"),
        ("part", r"ranks hold only parts of 'part', and rank 1 needs more of it"),
        ("shape", r"'weight' has shape \(8, 3\) and dtype float32 where it is held, and \(9, 3\) and float32 under"),
        ("dtype", r"dtype float32 where it is held, and \(8, 3\) and bfloat16"),
        ("overlap", r"what is asked for lies where something is held"),
        ("damaged run", r"\d+ bytes from rank \d to rank 1 were damaged on their way"),
        ("damage", r"\d+ bytes from rank \d to rank 1 were damaged on their way"),
    ],
)
def test_a_fault_of_one_rank_is_everyones(fault, said):
    """All ranks raise the same error, what is held is as it was, and the next load of the store gives everything."""
    results = workers.run(3, LOADS, fault=fault)
    assert {message for message, *_ in results} == {results[0][0]}
    assert re.search(said, results[0][0])
