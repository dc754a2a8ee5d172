"""What the GPU tests run, in the processes of `tests.workers`; but for what measures a GPU, a CPU can run it too.

Problem: a wait that is missing on CUDA shows itself rarely. Solution: a kernel that only sleeps is queued ahead of the
work that others have to wait for. Whoever does not wait then comes first for certain.
"""

from __future__ import annotations

import functools
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.backend.streams import Milestone, streams_of
from megatron.pipeline.program.instruction import Instruction, Kind
from megatron.pipeline.runtime.activations.saved_activations import BufferPool
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.stages.megatron.groups import ChainGroup
from megatron.pipeline.runtime.stages.megatron.reduction import GradientReduction
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.runtime.transport.channels import Channels
from megatron.pipeline.runtime.transport.links import LINKS
from tests.pipeline.runtime.activations import balance_cases
from tests.pipeline.runtime.stages.megatron import megatron_cases
from tests.pipeline.runtime.stages.megatron.megatron_model import Case, parallel

SLEEP_S = 0.3
_LENGTH = 1 << 20


def begin(place: str) -> torch.device:
    """The device of a case, current on this thread; kernels that sleep are ready."""
    chosen = torch.device(place)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        _cycles_per_second(chosen)
    return chosen


def sleep(seconds: float, device: torch.device) -> None:
    """Give the current stream a kernel that does nothing for `seconds`. On a CPU nothing happens."""
    if device.type == "cuda":
        torch.cuda._sleep(round(seconds * _cycles_per_second(device)))


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """The cycles of the clock that the sleeping kernel counts, measured when the GPU has been woken."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000_000)
    start.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return 50_000_000 / (start.elapsed_time(end) / 1e3)


def settle(device: torch.device) -> None:
    """Nothing is at work on the device any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def over_nccl():
    """The case's default group is one of NCCL, each rank on the GPU of its number."""
    store = dist.PrefixStore("over_nccl", dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    yield


# The parts, one by one.


def behind_a_milestone(place: str) -> tuple[float, bool]:
    """(the least value that a stream reads behind a milestone, the host was there before the device): another thread's
    stream writes ones, after a sleep, and reaches the milestone.
    """
    device = begin(place)
    streams = streams_of(device)
    milestone, value = Milestone(streams), torch.zeros(_LENGTH, device=device)
    settle(device)

    def write() -> None:
        streams.enter_thread()
        with streams.on(streams.make()):
            sleep(SLEEP_S, device)
            value.fill_(1.0)
            milestone.reach()

    thread = threading.Thread(target=write)
    thread.start()
    assert milestone.wait(60)
    read = value.clone()
    is_ahead = not streams.is_done(streams.record())
    thread.join()
    return read.min().item(), is_ahead


def buffer_that_is_taken_again(place: str) -> tuple[bool, float, bool]:
    """(the second taker got the first one's memory, the largest value that the first one's last kernel read, the host
    was ahead): the first one writes ones and reads them after a sleep, the second one writes twos on another stream.
    """
    device = begin(place)
    pool, streams = BufferPool(device), streams_of(device)
    taken = pool.take(_LENGTH)
    read = torch.zeros_like(taken)
    settle(device)
    taken.fill_(1)
    sleep(SLEEP_S, device)
    read.copy_(taken)
    pool.mark_used(taken)
    address = taken.data_ptr()
    del taken
    with streams.on(streams.make()):
        again = pool.take(_LENGTH)
        again.fill_(2)
        is_ahead = not streams.is_done(streams.record())
    settle(device)
    return again.data_ptr() == address, float(read.max().item()), is_ahead


class LateLink:
    """In NCCL's place: a stream of its own writes what arrives (the tag and one more), after a sleep."""

    host_waits = False

    def __init__(self, name, store, *, sends: bool, timeout: timedelta, device: torch.device, on_error) -> None:
        self._device = device
        self._streams = streams_of(device)
        self._stream = self._streams.make()

    def receive(self, spec: TensorSpec, tag: int) -> LateReceive:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        made = self._streams.record()
        with self._streams.on(self._stream):
            self._streams.wait(made)
            sleep(SLEEP_S, self._device)
            tensor.fill_(tag + 1)
            return LateReceive(tensor, self._streams.record(), self._streams)

    def drop_read(self) -> None:
        """Nothing is sent."""


class LateReceive:
    def __init__(self, tensor: Tensor, event, streams) -> None:
        self._tensor, self._event, self._streams = tensor, event, streams

    def wait(self, timeout: timedelta) -> Tensor:
        self._streams.wait(self._event)
        tensor, self._tensor = self._tensor, None
        return tensor


def late_arrivals(place: str, *, count: int) -> dict:
    """Receive `count` tensors that arrive late and drop them; nobody polls meanwhile but once, at the first."""
    device = begin(place)
    streams = streams_of(device)
    stage = SimpleNamespace(index=1, input_spec=TensorSpec((_LENGTH,)), output_spec=None)
    with mock.patch.dict(LINKS, {("nccl", device.type): LateLink}):
        channels = Channels(
            ranks=(0, 1), rank_of_stage=(0, 1), rank=1, stages={1: stage}, timeout=timedelta(seconds=SLEEP_S / 6),
            backend="nccl", device=device, store=None,
        )  # fmt: skip
    used = torch.cuda.memory_allocated if device.type == "cuda" else lambda: 0
    sums, found = torch.zeros(count, device=device), {}
    settle(device)
    before = used()
    for index in range(count):
        channels.post_receive(Kind.RECV_F, 1, index)
        tensor = channels.wait(Kind.RECV_F, 1, index, Instruction.parse(f"1F{index}@0"))
        sums[index] = tensor.mean()
        if index == 0:
            found["is_ahead"] = not streams.is_done(streams.record())
            time.sleep(SLEEP_S / 3)
            found["overdue"] = str(channels.check_overdue() or "")
        del tensor
    found["growth"] = used() - before
    settle(device)
    found["overdue_at_last"] = str(channels.check_overdue() or "")
    found["means"] = sums.tolist()
    return found


# Whole runs in which somebody is late.


def train_with_slow_backwards(place: str, **options) -> balance_cases.Balanced:
    """`balance_cases.train` where the kernels of a backward wait behind one that sleeps, and the host does nothing
    for a while when a backward has returned: so its buffer could be filled again before it is read.
    """
    device = begin(place)
    backward = ModuleStage.backward

    def slow_backward(self, microbatch, output_grad):
        sleep(0.05, device)
        result = backward(self, microbatch, output_grad)
        time.sleep(0.02)
        return result

    with mock.patch.object(ModuleStage, "backward", slow_backward):
        return balance_cases.train(device=str(device), **options)


EARLY = {"schedule": "2bw", "single_gradient_buffer": True, "batches": (4,) * 5, "layers": 2}


def weights_after_a_reduction(place: str, *, seconds: float, reduces: bool = True) -> dict[str, Tensor]:
    """The weights of a single rank with one gradient buffer, where the chain turns gradients round in the place of an
    all-reduce, `seconds` late, and reads nothing of the device.
    """
    device = begin(place)

    def over_tensor(self, slot) -> None:
        sleep(seconds, device)
        for flat in slot.flats if reduces else ():
            flat.neg_()

    def nothing(self, slot) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    with (
        mock.patch.object(GradientReduction, "over_tensor", over_tensor),
        mock.patch.object(GradientReduction, "local_norm_squared", nothing),
    ):
        return _train_gpt(Case(**EARLY), device, backend="gloo", reads_losses=False)


def weights_of_replicas(place: str, *, seconds: float) -> dict[str, Tensor]:
    """The weights of this rank, one of two replicas with one gradient buffer, whose all-reduce begins `seconds` late.
    The second one reads nothing of the device, as a replica of a first stage. `place`: "nccl" for a GPU each.
    """
    over, all_reduce = place == "nccl", ChainGroup.all_reduce
    device = begin(f"cuda:{dist.get_rank()}" if over else place)

    def late_all_reduce(self, tensor, *operation) -> None:
        sleep(seconds, device)
        all_reduce(self, tensor, *operation)

    with over_nccl() if over else nullcontext(), mock.patch.object(ChainGroup, "all_reduce", late_all_reduce):
        reads_losses = dist.get_rank() == 0
        return _train_gpt(Case(**EARLY, d=2), device, backend="nccl" if over else "gloo", reads_losses=reads_losses)


def _train_gpt(case: Case, device: torch.device, *, backend: str, reads_losses: bool) -> dict[str, Tensor]:
    with parallel(case):
        stages, update = megatron_cases.build(case)
        if not reads_losses:
            for stage in stages:
                stage.take_losses = lambda batch: {}
        engine = megatron_cases.engine_of(case, stages, update, device=device, backend=backend)
        for batch in range(len(case.batches)):
            info = megatron_cases.batch_info(case, batch)
            engine.run_batch(info.num_microbatches, info.num_samples)
        engine.drain()
        weights = {name: each.cpu().clone() for name, each in update.versions.tensors(update.versions.newest).items()}
        engine.close()
        update.close()
        return weights
