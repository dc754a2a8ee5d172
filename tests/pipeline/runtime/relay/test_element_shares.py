"""Each element of a stage is stepped by one replica, and each replica steps equally many."""

import pytest
import torch

from megatron.pipeline.runtime.relay.host_store import GRAIN, FlatLayout, share_of


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("shapes", [[(64, 100), (100,), (7, 3), (), (1000, 64)], [(3,), (2,)], [(0,), (130,)], []])
def test_every_element_is_one_replicas(shapes, size):
    """Pieces meet, at multiples of the grain; they are as long as all others, but for a grain at each end."""
    parameters = {str(number): torch.empty(shape, device="meta") for number, shape in enumerate(shapes)}
    shares = [share_of(parameters, index, size) for index in range(size)]
    total = sum(each.numel() for each in parameters.values())
    for name, parameter in parameters.items():
        pieces = [share[name] for share in shares]
        ends = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == ends[:-1] and ends == sorted(ends)
        assert ends[-1] == parameter.numel() and all(end % GRAIN == 0 or end == parameter.numel() for end in ends)
    for share in shares:
        assert abs(sum(piece.stop - piece.start for piece in share.values()) - total / size) <= GRAIN


def test_a_share_is_one_span_of_each_flat_tensor():
    """What STORE_GRAD copies: from its first to its last element, of each dtype; nothing where it has none."""
    parameters = {"a": torch.zeros(10, 20), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(300)}
    layout = FlatLayout(parameters)
    covered = {dtype: torch.zeros(count) for dtype, count in layout.num_elements.items()}
    for index in range(4):
        share = share_of(parameters, index, 4)
        spans = layout.spans(share)
        for name, piece in share.items():
            flat = {dtype: torch.zeros(count, dtype=dtype) for dtype, count in layout.num_elements.items()}
            layout.views(flat)[name].view(-1)[piece] = 1
            assert all(flat[dtype][span].sum() == flat[dtype].sum() for dtype, span in spans.items())
        for dtype, span in spans.items():
            covered[dtype][span] += 1
    assert all(each.max() <= 1 for each in covered.values())
    assert layout.spans({"a": slice(0, 0), "b": slice(0, 0), "c": slice(3, 3)})[torch.bfloat16] == slice(0, 0)
