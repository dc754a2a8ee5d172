"""The tasks of a batch: what overlaps, what shows, and the order in which PyTorch's FSDP2 issues its collectives."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.planner.sharded import GpuLane, Seconds, ShardedCosts, batch_seconds, batch_tasks, ends
from tests import workers

COSTS = ShardedCosts(
    embedding=Seconds(1.0, 1.0), layer=Seconds(10.0, 20.0), head=Seconds(2.0, 4.0), gather=3.0, reduce=6.0,
    root_gather=5.0, root_reduce=7.0, num_layers=4, contention=0.0, regathers=True, keeps_last=True, step=0.5,
)  # fmt: skip


def network(costs: ShardedCosts, num_microbatches: int = 1) -> list[str]:
    return [task.name for task in batch_tasks(costs, num_microbatches) if task.lane is GpuLane.NETWORK]


def test_what_computation_hides_does_not_show():
    """Beside computing only the first gathers and the root's reduction are seen, and the last layer's reduction as far
    as the embedding's backward is shorter."""
    shown = 5.0 + max(0.0, 3.0 - 1.0) + (6.0 - 1.0) + 7.0
    assert batch_seconds(COSTS, 1) == pytest.approx(COSTS.busy + shown + COSTS.step)


def test_a_network_that_is_slower_decides():
    """Where each gather and reduction takes longer than its layer, the network's lane is full from the first one on."""
    slow = replace(COSTS, gather=100.0, reduce=200.0)
    tasks = batch_tasks(slow, 1)
    busy = sum(task.seconds for task in tasks if task.lane is GpuLane.NETWORK)
    computed = slow.layer.forward + sum(slow.head)  # of the last layer, and the head: nothing is to be sent meanwhile
    assert max(ends(tasks)) == pytest.approx(busy + computed, rel=0.02)


@pytest.mark.parametrize("changes", [
    {}, {"regathers": False}, {"regathers": False, "keeps_batch": False}, {"gather": 30.0}, {"reduce": 50.0},
    {"contention": 0.25}, {"keeps_last": False}, {"host": 2.0, "times_again": 2}, {"num_layers": 1},
    {"num_layers": 2, "gather": 15.0},
])  # fmt: skip
def test_many_microbatches_are_extrapolated_exactly(changes):
    """From two and three microbatches; the whole batch takes as long."""
    costs = replace(COSTS, **changes)
    for count in (2, 3, 4, 9):
        assert batch_seconds(costs, count) == pytest.approx(max(ends(batch_tasks(costs, count))) + costs.step)


def test_stage_2_gathers_once_a_batch():
    """Or once a microbatch, as FSDP2 without resharding; gradients are reduced for every microbatch all the same."""
    for keeps_batch, times in ((True, 1), (False, 3)):
        names = network(replace(COSTS, regathers=False, keeps_batch=keeps_batch), 3)
        assert sum(name.startswith("gather") for name in names) == 5 * times
        assert sum(name.startswith("reduce") for name in names) == 3 * 5


def test_products_lose_time_to_collectives_beside_them():
    """A quarter of the collective's time, and no more than a quarter of their own."""
    slower = batch_seconds(replace(COSTS, contention=0.25), 1) - batch_seconds(COSTS, 1)
    forward = 3 * 3.0  # three layers beside a gather; what the embedding loses is hidden by one that is longer than it
    backward = 3.0 + 2 * (3.0 + 6.0) + 6.0  # the last layer beside a gather, the first beside a reduction, others both
    assert slower == pytest.approx(0.25 * (forward + backward))
    long = replace(COSTS, gather=1000.0, contention=0.25)
    tasks = {task.name: task.seconds for task in batch_tasks(long, 1)}
    assert tasks["forward 2"] == 12.5


def test_the_host_is_waited_for():
    """Where the host is busy before each collective, both lanes wait: one gather in a forward, and with recomputation
    two in a backward, beside its reduction."""
    busy = replace(COSTS, host=1.0, times_again=2)
    computing = [task for task in batch_tasks(busy, 1) if task.lane is GpuLane.COMPUTE]
    seconds = {task.name: task.seconds for task in computing}
    assert seconds["forward 2"] == 11.0 and seconds["backward 2"] == 23.0


class _Model(nn.Module):
    """Embedding, layers that all differ in size, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4 * n), nn.Linear(4 * n, 4)) for n in (1, 2, 3, 4))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def issued_by_fsdp2(num_microbatches: int, reshards: bool) -> list[str]:
    """The collectives that `fully_shard` issues, by what they gather or reduce."""
    from torch.distributed.fsdp import fully_shard
    from torch.utils._python_dispatch import TorchDispatchMode

    model, found = _Model(), []
    sizes = {sum(each.numel() for each in layer.parameters()): layer for layer in model.layers}
    names = {size: f"layer {number}" for number, size in enumerate(sizes, start=1)}
    last = model.layers[-1]
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshards and layer is not last)
    fully_shard(model)

    class Issued(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            for word, kind, place in (("_allgather_base_", "gather", 0), ("_reduce_scatter_base_", "reduce", 1)):
                if word in str(function):
                    found.append(f"{kind} {names.get(args[place].numel(), 'root')}")
            return function(*args, **(kwargs or {}))

    with Issued():
        for _ in range(num_microbatches):
            model(torch.zeros(2, dtype=torch.long)).sum().backward()
    return found


@pytest.mark.parametrize("reshards", [True, False])
def test_collectives_are_in_the_order_of_fsdp2(reshards):
    """What the network's lane has is what PyTorch's own FSDP2 issues, on two ranks, in that order: as stage 3, and as
    stage 2 without resharding."""
    costs = replace(COSTS, regathers=reshards, keeps_batch=False)
    expected = [name.removesuffix(" again") for name in network(costs, 2)]
    for issued in workers.run(2, f"{__name__}:issued_by_fsdp2", num_microbatches=2, reshards=reshards):
        assert issued == expected
