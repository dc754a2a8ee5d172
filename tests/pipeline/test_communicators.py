"""Which communicators each rank has: as many as the runtime makes, and the same at both ends."""

from collections import Counter

import pytest

from megatron.pipeline.communicators import chain_of_rank, links_of_rank, move_link_of_rank
from megatron.pipeline.schedules import Schedule


def names(communicators) -> list[str]:
    return [each.name for each in communicators]


def rank_of_stage(num_ranks: int, num_virtual: int = 1) -> tuple[int, ...]:
    name = "interleaved" if num_virtual > 1 else "flush"
    options = {"num_stages": num_ranks * num_virtual, "num_virtual_stages": num_virtual}
    return Schedule.preset(name, **options).rank_of_stage


def test_links_in_a_pipeline():
    """One in each direction for each neighbour; a single rank has none."""
    places = rank_of_stage(3)
    assert [names(links_of_rank(places, rank)) for rank in range(3)] == [
        ["F 0-1", "B 1-0"],
        ["F 0-1", "B 1-0", "F 1-2", "B 2-1"],
        ["F 1-2", "B 2-1"],
    ]
    assert links_of_rank(rank_of_stage(1), 0) == ()
    assert {(link.max_ctas, link.num_peers) for link in links_of_rank(places, 1)} == {(2, 1)}


@pytest.mark.parametrize("num_ranks, num_virtual", [(2, 1), (4, 1), (2, 2), (4, 3)])
def test_every_link_has_two_ends(num_ranks, num_virtual):
    """A middle rank with v stages has 4v links; each is that of two ranks."""
    places = rank_of_stage(num_ranks, num_virtual)
    ends = Counter(name for rank in range(num_ranks) for name in names(links_of_rank(places, rank)))
    assert set(ends.values()) == {2} and len(ends) == 2 * (num_ranks * num_virtual - 1)
    if num_ranks > 2:
        assert len(links_of_rank(places, 1)) == 4 * num_virtual


@pytest.mark.parametrize("num_ranks, num_virtual", [(1, 1), (5, 1), (4, 2)])
def test_links_are_those_that_the_runtime_makes(num_ranks, num_virtual):
    """Together the ranks have the edges of `edges_in_order`, but for those inside a rank."""
    channels = pytest.importorskip("megatron.pipeline.runtime.transport.channels", reason="needs torch")
    places = rank_of_stage(num_ranks, num_virtual)
    made = {
        f"{letter} {source}-{destination}"
        for letter, source, destination in channels.edges_in_order(places)
        if places[source] != places[destination]
    }
    assert made == {name for rank in range(num_ranks) for name in names(links_of_rank(places, rank))}


def test_stages_on_one_rank_need_no_link():
    """Where the second half of the stages comes back over the same ranks, the turn is inside a rank."""
    places = (0, 1, 1, 0)
    assert names(links_of_rank(places, 1)) == ["F 0-1", "B 1-0", "F 2-3", "B 3-2"]
    assert move_link_of_rank(places, 0) == ()


def test_pairs_have_one_link():
    """Rank x and rank p-1-x name the same one; the middle of an odd pipeline is its own pair."""
    links = [names(move_link_of_rank(rank_of_stage(5), rank)) for rank in range(5)]
    assert links == [["pair 0-4"], ["pair 1-3"], [], ["pair 1-3"], ["pair 0-4"]]
    assert move_link_of_rank(rank_of_stage(5), 0)[0].max_ctas == 4


def test_groups_of_the_chain():
    """Each group that has members and work: ends of tied pipelines have one more, others none of that."""

    def groups(rank: int, tied: bool, sums: bool) -> dict[str, int]:
        degrees = {"tensor": 2, "pipeline": 4, "data": 8}
        chain = chain_of_rank(rank, **degrees, tied_embeddings=tied, sums_over_tensor=sums)
        return {each.name: each.num_ranks for each in chain}

    assert groups(0, True, True) == {"data": 8, "tensor": 2, "embedding": 2, "world": 64}
    assert groups(1, True, True) == {"data": 8, "tensor": 2, "world": 64}
    assert groups(3, True, False) == {"data": 8, "embedding": 2, "world": 64}
    assert groups(3, False, False) == {"data": 8, "world": 64}
    placed = {"tensor": 1, "pipeline": 3, "data": 1, "tied_embeddings": True, "sums_over_tensor": False}
    for places, holders in (((0, 1, 2, 2, 1, 0), []), ((1, 0, 2), [1, 2])):  # both copies on one rank: no group
        chains = [chain_of_rank(rank, **placed, ends=(places[0], places[-1])) for rank in range(3)]
        assert [rank for rank, chain in enumerate(chains) if "embedding" in names(chain)] == holders
    one = {"tensor": 1, "pipeline": 1, "data": 1, "tied_embeddings": True, "sums_over_tensor": True}
    assert chain_of_rank(0, **one) == ()
    assert [each.num_peers for each in chain_of_rank(0, **(one | {"data": 2}))] == [1, 1]
    assert [each.num_peers for each in chain_of_rank(0, **(one | {"data": 3}))] == [2, 2]
