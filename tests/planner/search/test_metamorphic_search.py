"""Relations between the best of two searches: a better machine, or more choices, never has a slower best."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import pytest

from megatron.planner import Architecture, Cluster
from megatron.planner.job.software import MEGATRON_CORE, MEGATRON_V3, Software
from megatron.planner.search import Outcome, Training
from tests.planner.search.helper import gpt3, run

SCHEDULES = ("flush", "2bw", "interleaved", "bpipe", "gpipe")
FASTER = ("memory_gib", "memory_bandwidth", "peak_teraflops", "within_node", "between_nodes")


@dataclass(frozen=True, kw_only=True)
class Search:
    """By prices alone. `space`: what is chosen from."""

    model: Architecture
    cluster: Cluster
    batch: int
    software: Software = MEGATRON_CORE
    space: dict = field(default_factory=dict)

    @cached_property
    def outcome(self) -> Outcome:
        values = {"schedules": SCHEDULES, "micro_batch_sizes": (1, 2), "num_simulated": 0}
        values |= self.space | {"global_batch_size": self.batch}
        return run(self.model, self.cluster, self.software, Training(fuses_softmax=False), **values)

    @property
    def best(self) -> float:
        """Sequences a second; 0 where nothing fits."""
        return self.outcome.best.sequences_per_second if self.outcome.best else 0.0

    def on(self, **changes: object) -> "Search":
        """On other machines."""
        links = {name: changes.pop(name) for name in ("within_node", "between_nodes") if name in changes}
        said = self.cluster.model_dump(exclude_none=True)
        return replace(self, cluster=Cluster(**said | changes | {"bandwidth": said["bandwidth"] | links}))

    def among(self, **space: object) -> "Search":
        return replace(self, space=self.space | space)


def machines(gpu: str, nodes: int, network: float) -> Cluster:
    return Cluster(gpu=gpu, nodes=nodes, bandwidth={"between_nodes": network})


SEARCHES = {
    "13B on 16 A100 on PCIe": Search(
        model=gpt3(40, 5120, 40), cluster=machines("A100-PCIe-40", 2, 25), batch=32, software=MEGATRON_V3,
        space={"tensor": (2, 4, 8), "pipeline": (1, 2, 4, 8)},
    ),
    "1B on 8 V100": Search(model=gpt3(24, 2048, 16), cluster=machines("V100-16", 1, 3), batch=16),
    "96B on 32 H100": Search(model=gpt3(80, 9984, 104), cluster=machines("H100", 4, 400), batch=128),
    "175B on a rack of GB200": Search(
        model=gpt3(72, 12288, 96), cluster=machines("GB200", 1, 3600), batch=72,
        space={"tensor": (2, 4), "pipeline": (9, 18)},
    ),
}  # fmt: skip


@pytest.fixture(params=SEARCHES)
def asked(request: pytest.FixtureRequest) -> Search:
    return SEARCHES[request.param]


def is_no_slower(one: Search, other: Search) -> bool:
    return one.best >= other.best * (1 - 1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", FASTER)
def test_a_better_machine_has_no_slower_best(asked, part):
    device, links = asked.cluster.device, asked.cluster.topology.bandwidth
    values = {"within_node": device.link_bandwidth, "between_nodes": links.between_nodes}
    assert is_no_slower(asked.on(**{part: 1.5 * values.get(part, getattr(device, part, 0.0))}), asked)


@pytest.mark.full
def test_with_more_memory_all_still_fits(asked):
    """2bw with two gradient buffers, where it had room for one."""
    found = asked.among(early_stopping=False)
    more = found.on(memory_gib=1.5 * asked.cluster.device.memory_gib)
    few, many = ({replace(each.choice, single_gradient_buffer=None) for each in searched.outcome.kept}
                 for searched in (found, more))  # fmt: skip
    assert few and few <= many


@pytest.mark.sample(2)
def test_twice_the_machines_do_no_less_with_a_batch_twice_as_large(asked):
    """With as many replicas more and the same batch for each. With the batch as it was, reductions over a slow network
    may take longer than the halves save, and the search leaves no GPU idle."""
    twice = replace(asked.on(nodes=2 * len(asked.cluster.topology.nodes)), batch=2 * asked.batch)
    assert is_no_slower(twice, asked)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "fewer", "more"),
    [
        ("schedules", ("flush",), ("flush", "2bw")),
        ("schedules", ("flush", "interleaved"), SCHEDULES),
        ("micro_batch_sizes", (1,), (1, 2)),
        ("tensor", (2,), (2, 4)),
        ("rank_mappings", ("standard",), ("standard", "pair-adjacent")),
        ("distributed_optimizer", (True,), (True, False)),
        ("early_stopping", True, False),
        ("avoids_pressure", True, False),
    ],
)
def test_more_choices_have_no_slower_best(asked, name, fewer, more):
    assert is_no_slower(asked.among(**{name: more}), asked.among(**{name: fewer}))


def test_stopping_early_loses_less_than_a_percent(asked):
    """What it leaves out recomputes or balances more than it has to."""
    assert asked.best >= 0.99 * asked.among(early_stopping=False).best
