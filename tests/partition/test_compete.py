"""What comes out of the competition is a partition, as good as these graphs allow, and the same each time."""

import importlib.util

import pytest

from megatron.partition import compete, evaluate, parse_graph
from megatron.partition.coarsen import COARSENINGS
from megatron.partition.refine import PriceBudget, refine
from megatron.partition.units import PartitionState, compiled
from tests.partition import graphs


@pytest.mark.sample(3, "operators")
@pytest.mark.parametrize(
    "graph, over",
    [
        (graphs.chain_with_skips(0), 1.005),
        (graphs.random_dag(3), 1.005),
        (graphs.random_dag(4, speeds=(1, 1, 2, 4)), 1.02),
        (graphs.encoder_decoder(devices=4, layers=12), 1.0),
        (graphs.operators(layers=4), 1.01),
    ],
    ids=["chain", "random", "unequal", "encoder-decoder", "operators"],
)
def test_it_is_near_the_bound(graph, over):
    """No method is worse than the bound times `over`, none breaks a rule, and the choice is the best."""
    found = compete(graph, max_stages_per_device=2, effort=0.2)
    assert found.choice.value.objective_ms <= graph.bound_ms * over * (1 + 1e-9)
    for result in found.results:
        assert evaluate(graph, result.partition) == result.value
        assert result.partition.most_stages_on_a_device() <= 2
        assert found.choice.value.objective_ms <= result.value.objective_ms * 1.0001


@pytest.mark.full
def test_it_is_the_same_each_time():
    one, other = (compete(graphs.random_dag(3), max_stages_per_device=2, effort=0.05) for _ in range(2))
    assert one.choice.partition == other.choice.partition


def test_no_search_where_nothing_can_be_won():
    """Neither where the best so far is the bound, nor for longer than a share of what a run could save, nor behind the
    seconds; and there is a result all the same.
    """
    even = parse_graph(graphs.content([4] * 12, [(i, i + 1) for i in range(11)], devices=3))
    found = compete(even)
    assert found.choice.method == "sequential" and found.choice.value.objective_ms == even.bound_ms
    assert set(found.failures) == {"mixed L=3", "mixed L=6", "mixed L=9"}
    assert all("within 0.01% of the bound" in reason for reason in found.failures.values())
    graph = graphs.random_dag(3)
    for limits, reason in (
        ({"num_microbatches": 1}, "longer than it can save"),
        ({"seconds": 1e-9}, "--seconds are over"),
    ):
        found = compete(graph, **limits)
        assert found.choice.method in ("sequential", "mixed L=4")
        assert reason in found.failures["mixed L=12"]
    assert compete(graph, methods=["mixed"], num_microbatches=1, effort=0.01).results


def test_a_search_takes_from_the_budget_of_all():
    common_budget = PriceBudget(10)
    one, other = PriceBudget(6, of=common_budget), PriceBudget(6, of=common_budget)
    one.left -= 6
    assert one.spent and not other.spent and common_budget.left == 4
    other.left -= 4
    assert other.spent and other.left == 2
    assert PriceBudget(5, ends_at=0.0).spent


def test_only_mixed_fits():
    """Parameters 10, 10, 6, 6 on two devices for 16: no contiguous cut fits, and a mixed one does (section 5.8)."""
    made = graphs.content([1, 1, 1, 1], [(0, 1), (1, 2), (2, 3)], memory=4 * 16_000 + 200)
    for node, params in zip(made["nodes"], (10_000, 10_000, 6_000, 6_000), strict=True):
        node["params"] = params
    found = compete(parse_graph(made), effort=0.1)
    assert {"sequential", "mixed L=2"} <= found.failures.keys()
    assert found.choice.method == "mixed L=4" and found.choice.value.memory_bytes == (64_200, 64_200)


def test_nothing_fits():
    """One sentence with what is missing, and why each method failed."""
    graph = parse_graph(graphs.content([1] * 4, [(0, 1)], memory=5000))
    with pytest.raises(ValueError, match=r"nothing fits: the nodes need .*\(sequential: .*mixed L=2: "):
        compete(graph, effort=0.01)


def test_what_cannot_be_is_refused(monkeypatch):
    """Methods by name, a limit for milp, and METIS only where it is installed."""
    graph = graphs.random_dag(0, size=8, devices=2)
    for change, reason in (
        ({"methods": ["annealing"]}, "'annealing' is no method"),
        ({"methods": []}, "no method"),
        ({"methods": ["milp"]}, "needs a time limit"),
        ({"max_stages_per_device": 0}, "too few"),
    ):
        with pytest.raises(ValueError, match=reason):
            compete(graph, **change)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="metis needs pymetis"):
        compete(graph, methods=["metis"])


def test_metis_divides_evenly():
    """A chain of equal nodes falls into even pieces; on a random graph no device has twice its share."""
    chain = parse_graph(graphs.content([4] * 12, [(i, i + 1) for i in range(11)], devices=3))
    assert compete(chain, methods=["metis"]).choice.value.compute_ms == (16, 16, 16)
    graph = graphs.random_dag(0, size=40, devices=4)
    choice = compete(graph, methods=["metis"]).choice
    assert choice.method == "metis" and max(choice.value.compute_ms) < 2 * sum(choice.value.compute_ms) / 4


def test_milp_is_no_worse_than_what_it_starts_from():
    """Without a search after refinement there is something left for it, and it finds that."""
    graph = graphs.random_dag(5, size=24, devices=3)
    found = compete(graph, methods=["mixed", "milp"], max_stages_per_device=2, milp_seconds=10, effort=0)
    *others, milp = found.results
    assert milp.method == "milp"
    assert milp.value.objective_ms < min(each.value.objective_ms for each in others) * (1 - 1e-6)


def test_the_last_stage_has_its_own_profile():
    """Without recompute the last stage takes more of the chain: 3 + 1/4 each, not 2 and 2 of equal nodes."""
    made = graphs.content([4] * 7, [(i, i + 1) for i in range(6)])
    for node in made["nodes"]:
        node |= {"fwd_plain_ms": 1, "bwd_plain_ms": 2, "mem_plain_bytes": 100}
    found = compete(parse_graph(made), methods=["sequential"])
    assert found.choice.value.compute_ms == (12, 12)
    made["nodes"][6]["mem_plain_bytes"] = 1e13
    with pytest.raises(ValueError, match="would hold"):
        compete(parse_graph(made), methods=["sequential"])


@pytest.mark.parametrize("name", COARSENINGS)
def test_coarsening_makes_no_circle(name):
    """Each way, on each family: stages rise along every tensor; refinement keeps that and never makes it worse."""
    for graph in (graphs.random_dag(6), graphs.operators(layers=3), graphs.encoder_decoder(layers=6, devices=4)):
        units = compiled(graph)
        stages = COARSENINGS[name](units, 8)
        for tensor in units.tensors:
            assert all(stages[tensor.source] <= stages[unit] for unit in tensor.consumers)
        assert sorted(set(stages)) == list(range(1 + max(stages))) and max(stages) >= 1
        state = PartitionState(units, stages, [stage % units.num_devices for stage in range(1 + max(stages))])
        before = state.score()
        after = refine(state, PriceBudget(2000))
        assert not before.better_than(after) and after == PartitionState(units, state.stage_of, state.device_of).score()


@pytest.mark.parametrize("scope", ["M/Block[{layer}]/op{op}", "M/stack/{layer}/part/{op}/op_{layer}"])
def test_coarsening_by_type_cuts_no_block(scope):
    """Whether a path has its numbers in brackets or, as that of a captured graph, between slashes."""
    made = graphs.content([1.0, 5.0, 3.0] * 8, [(i, i + 1) for i in range(23)])
    for node in made["nodes"]:
        node["scope"] = scope.format(layer=node["id"] // 3, op=node["id"] % 3)
    stages = COARSENINGS["type"](compiled(parse_graph(made)), 3)
    assert sorted(set(stages)) == [0, 1, 2]
    assert all(len(set(stages[first : first + 3])) == 1 for first in range(0, 24, 3))
