"""Logical ranks are megatron.core's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.placement.mapping import Degrees
from tests import workers

SIZE = st.integers(1, 6)


@given(SIZE, SIZE, SIZE, st.booleans())
def test_coordinates_and_ranks_are_inverse(tensor, pipeline, data, in_a_row):
    """Every rank has its own place, and every place its rank."""
    degrees = Degrees(tensor=tensor, pipeline=pipeline, data=data, pipelines_in_a_row=in_a_row)
    coordinates = [degrees.coordinates(rank) for rank in range(degrees.world_size)]
    assert len(set(coordinates)) == degrees.world_size
    assert [degrees.rank(tensor=p.tensor, data=p.data, stage=p.stage) for p in coordinates] == list(
        range(len(coordinates))
    )


def groups_of_megatron(*, sizes, order=None):
    """By degrees: the tensor, data and pipeline groups that an order of megatron.core's gives; None: its default."""
    import inspect

    from megatron.core import parallel_state

    if order is None:
        order = inspect.signature(parallel_state.initialize_model_parallel).parameters["order"].default
    found = {}
    for tensor, pipeline, data in sizes:
        generator = parallel_state.RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=1, order=order)
        found[tensor, pipeline, data] = {name: generator.get_ranks(name) for name in ("tp", "dp", "pp")}
    return found


@pytest.mark.parametrize("order", [None, "tp-cp-ep-pp-dp"])
def test_order_is_that_of_megatron_core(order):
    """Its groups are exactly the ranks that agree in the other two coordinates, in the order of the third."""
    sizes = [(1, 4, 1), (2, 4, 2), (4, 2, 3), (3, 5, 2)]
    (found,) = workers.run(1, "tests.pipeline.placement.test_degrees:groups_of_megatron", sizes=sizes, order=order)
    for (tensor, pipeline, data), groups in found.items():
        degrees = Degrees(tensor=tensor, pipeline=pipeline, data=data, pipelines_in_a_row=order is not None)
        for name, own in (("tp", "tensor"), ("dp", "data"), ("pp", "stage")):
            expected = {}
            for rank in range(degrees.world_size):
                found = degrees.coordinates(rank)._asdict()
                found.pop(own)
                expected.setdefault(tuple(found.values()), []).append(rank)
            assert sorted(groups[name]) == sorted(expected.values())


def test_degrees_are_positive():
    """A degree of 0 is named."""
    with pytest.raises(ValueError, match="pipeline parallel size 0 is below 1"):
        Degrees(tensor=1, pipeline=0, data=1)
