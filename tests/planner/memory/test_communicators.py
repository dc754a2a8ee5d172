"""The buffers of communicators, and which estimates have them."""

import pytest

from megatron.pipeline.communicators import Communicator
from megatron.pipeline.schedules import Schedule
from megatron.planner import GIB, Cluster, Configuration, Planner, Software, TrainingState, estimate_memory
from megatron.planner.memory.memory import CONNECTION_BYTES, buffer_bytes
from megatron.planner.memory.schedule_demand import schedule_demand
from tests.planner.memory.test_memory import SHAPE, ActivationSetting


def communicators(name: str, *, data: int = 1, tensor: int = 1, counts: bool = True, **setting) -> list[float]:
    """What the ranks of four stages have, in buffers of one CTA and peer."""
    demand = schedule_demand(Schedule.preset(name, num_stages=4), 16)
    memory = estimate_memory(
        SHAPE, ActivationSetting(micro_batch_size=1, tensor=tensor, **setting), TrainingState(data=data), demand,
        layers=(2, 2, 2, 2), counts_communicators=counts,
    )  # fmt: skip
    return [rank.parts.communicators / CONNECTION_BYTES for rank in memory]


def test_a_connection_has_the_buffers_of_three_protocols():
    """4 MiB, 0.5 MiB and 4.6875 MiB, for each CTA and each peer; a ring has two."""
    assert CONNECTION_BYTES == (4 + 0.5 + 4.6875) * 2**20
    assert buffer_bytes([Communicator("link", "F 0-1", 2)]) == 2 * CONNECTION_BYTES
    assert (
        buffer_bytes([Communicator("chain", "data", 64), Communicator("move", "pair 0-1", 2)]) == 20 * CONNECTION_BYTES
    )


def test_ranks_of_a_pipeline():
    """Links of 2 CTAs, the world's group of 8 to two peers, and the ends' embedding group of 8 to one; moves add 4 for
    each rank with a pair; replicas and split sequences add their groups."""
    plain = [4 + 16 + 8, 8 + 16, 8 + 16, 4 + 16 + 8]
    assert communicators("flush") == plain
    assert communicators("bpipe") == [count + 4 for count in plain]
    assert communicators("flush", data=2) == [count + 8 for count in plain]
    assert communicators("flush", tensor=2) == plain
    assert communicators("flush", tensor=2, sequence_parallel=True) == [count + 8 for count in plain]
    assert communicators("flush", counts=False) == [0.0] * 4


@pytest.mark.parametrize(
    "gpu, own, counted", [("A100-80", True, True), ("A100-80", False, False), ("cpu", True, False)]
)
def test_only_this_project_on_gpus_has_them(gpu, own, counted):
    """Other software's runs, and CPUs, are estimated without; the rest of an estimate is the same."""
    configuration = Configuration(
        tensor=1, pipeline=4, data=1, micro_batch_size=1, global_batch_size=16, schedule="2bw"
    )
    cluster = Cluster(gpu=gpu, nodes=1, gpus_per_node=4)
    memory, without = (
        Planner(SHAPE, cluster, software=Software(own_communicators=each)).memory(configuration)
        for each in (own, False)
    )
    assert all((rank.parts.communicators > 0) == counted for rank in memory)
    for ours, theirs in zip(memory, without, strict=True):
        assert ours.total - ours.parts.communicators == pytest.approx(theirs.total)
    assert max(rank.parts.communicators for rank in memory) < 0.3 * GIB
