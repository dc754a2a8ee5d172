"""Relations between the best of two searches: a better machine, or more choices, never has a slower best."""

import pytest

from megatron.planner import Architecture, Cluster
from megatron.planner.job.software import MEGATRON_CORE, MEGATRON_V3, Software
from megatron.planner.search import Outcome, Training
from tests.planner.search.helper import gpt3, run

SCHEDULES = ("flush", "2bw", "interleaved", "bpipe", "gpipe")
SEARCHES = {  # model, machines, batch
    "13B on 16 A100 of 40 GB": (
        gpt3(40, 5120, 40), Cluster(gpu="A100-40", nodes=2, bandwidth={"between_nodes": 100}), 64
    ),
    "13B on 16 A100 on PCIe": (
        gpt3(40, 5120, 40), Cluster(gpu="A100-PCIe-80", nodes=2, bandwidth={"between_nodes": 25}), 64
    ),
    "1B on 8 V100": (gpt3(24, 2048, 16), Cluster(gpu="V100-16", nodes=1), 32),
    "7B on 16 L40S": (gpt3(32, 4096, 32), Cluster(gpu="L40S", nodes=2, bandwidth={"between_nodes": 12.5}), 64),
    "96B on 32 H100": (gpt3(80, 9984, 104), Cluster(gpu="H100", nodes=4, bandwidth={"between_nodes": 400}), 128),
    "175B on 64 B200": (gpt3(96, 12288, 96), Cluster(gpu="B200", nodes=8, bandwidth={"between_nodes": 400}), 256),
    "175B on a rack of GB200": (gpt3(72, 12288, 96), Cluster(gpu="GB200", nodes=1), 144),
}  # fmt: skip
FASTER = ("memory_gib", "memory_bandwidth", "peak_teraflops", "within_node", "between_nodes")


@pytest.fixture(scope="module", params=SEARCHES)
def asked(request: pytest.FixtureRequest) -> tuple[Architecture, Cluster, int]:
    return SEARCHES[request.param]


def best(model: Architecture, cluster: Cluster, batch: int, **space: object) -> float:
    """Sequences a second of the best; 0 where nothing fits. By prices alone."""
    found = outcome(model, cluster, batch, **space)
    return found.best.sequences_per_second if found.best else 0.0


def outcome(model: Architecture, cluster: Cluster, batch: int, **space: object) -> Outcome:
    values = {"schedules": SCHEDULES, "global_batch_size": batch, "num_simulated": 0}
    return run(model, cluster, software_of(cluster), Training(fuses_softmax=False), **values | space)


def software_of(cluster: Cluster) -> Software:
    return MEGATRON_V3 if "A100" in cluster.gpu else MEGATRON_CORE


def changed(cluster: Cluster, **changes: object) -> Cluster:
    links = {name: changes.pop(name) for name in ("within_node", "between_nodes") if name in changes}
    said = cluster.model_dump(exclude_none=True)
    return Cluster(**said | changes | {"bandwidth": said["bandwidth"] | links})


def not_below(high: float, low: float) -> bool:
    return high >= low * (1 - 1e-9)


@pytest.mark.parametrize("part", FASTER)
def test_a_better_machine_has_no_slower_best(asked, part):
    model, cluster, batch = asked
    device = cluster.device
    values = {"within_node": device.link_bandwidth, "between_nodes": cluster.topology.bandwidth.between_nodes}
    better = changed(cluster, **{part: 1.5 * values.get(part, getattr(device, part, 0.0))})
    assert not_below(best(model, better, batch), best(model, cluster, batch))


def test_with_more_memory_all_still_fits(asked):
    model, cluster, batch = asked
    larger = changed(cluster, memory_gib=1.5 * cluster.device.memory_gib)
    found, more = (outcome(model, each, batch, early_stopping=False) for each in (cluster, larger))
    assert {each.choice for each in found.kept} <= {each.choice for each in more.kept}


def test_twice_the_machines_do_no_less_with_a_batch_twice_as_large(asked):
    """With as many replicas more and the same batch for each. With the batch as it was, reductions over a slow network
    may take longer than the halves save, and the search leaves no GPU idle."""
    model, cluster, batch = asked
    network = cluster.bandwidth.between_nodes or 400.0
    twice = changed(cluster, nodes=2 * len(cluster.topology.nodes), between_nodes=network)
    assert not_below(best(model, twice, 2 * batch), best(model, cluster, batch))


@pytest.mark.parametrize(
    ("name", "fewer", "more"),
    [
        ("schedules", ("flush",), SCHEDULES),
        ("schedules", ("flush", "interleaved", "gpipe"), SCHEDULES),
        ("micro_batch_sizes", (1, 2), (1, 2, 4, 8)),
        ("tensor", (4, 8), (1, 2, 4, 8)),
        ("rank_mappings", ("standard",), ("standard", "pair-adjacent")),
        ("distributed_optimizer", (True,), (True, False)),
        ("early_stopping", True, False),
        ("avoids_pressure", True, False),
    ],
)
def test_more_choices_have_no_slower_best(asked, name, fewer, more):
    assert not_below(best(*asked, **{name: more}), best(*asked, **{name: fewer}))


def test_stopping_early_loses_nothing_that_is_worth_a_percent(asked):
    """What it leaves out recomputes or balances more than it has to."""
    assert best(*asked) >= 0.99 * best(*asked, early_stopping=False)
