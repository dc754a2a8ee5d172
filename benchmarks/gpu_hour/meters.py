"""The most bytes of the device: of torch's allocator on CUDA; on a CPU of a meter of all tensors that torch makes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from megatron import backend


class AllocatorMeter(AbstractContextManager):
    """torch's allocator of the current CUDA device, which counts in the order of the host.

    Where weights live on the host, a rank asks for the peak of each batch and begins anew (`RelayLedger`). So within
    the block the peak is noted first whenever `backend` begins anew.

    Attributes:
        reserved: the most bytes that it has had from the driver; None where nothing counts that.
    """

    def __init__(self) -> None:
        self.reserved: int | None = 0
        self._before = 0  # the peak of what was counted before another began anew
        self._noting = mock.patch.object(backend, "reset_peak_memory", self._note)

    def __enter__(self) -> AllocatorMeter:
        torch.cuda.reset_peak_memory_stats()
        self._noting.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._noting.stop()
        self._note()

    def take(self) -> int:
        """The peak since the last call, or the beginning; it is then what there is now."""
        self._note()
        peak, self._before = self._before, 0
        return peak

    def _note(self) -> None:
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        self._before = max(self._before, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    def retries(self) -> int | None:
        """How often the allocator gave memory back to the driver and asked again."""
        return torch.cuda.memory_stats().get("num_alloc_retries")


class CountedMeter(AbstractContextManager):
    """The same of all private storages that torch's operators make in this thread, as papers/l2l counts them."""

    reserved = None

    def __init__(self) -> None:
        from tests.pipeline.runtime.relay.device_meter import DeviceMeter

        self._meter: Any = DeviceMeter()

    def __enter__(self) -> CountedMeter:
        self._meter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._meter.__exit__(*error)

    def take(self) -> int:
        peak = self._meter.peak
        self._meter.set_host_aside()
        return peak

    def retries(self) -> None:
        return None


def meter_of_device() -> AllocatorMeter | CountedMeter:
    return AllocatorMeter() if backend.is_cuda() else CountedMeter()
