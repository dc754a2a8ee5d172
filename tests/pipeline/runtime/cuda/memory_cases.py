"""What a run leaves on the devices: torch's memory, NCCL's, contexts. In the processes of `tests.workers`."""

from __future__ import annotations

import ctypes
import gc
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.backend.streams import shut_down, streams_of
from megatron.pipeline.communicators import COMMUNICATOR_CTAS
from tests.pipeline.runtime.activations import balance_cases
from tests.pipeline.runtime.activations.transfer_cases import wait_until
from tests.pipeline.runtime.cuda.cuda_cases import begin, settle
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.module_cases import Pipeline
from tests.pipeline.runtime.stages.module.reference import Training


def bytes_after_drains(place: str, preset: str, *, num_batches: int, backend: str = "gloo") -> list[int]:
    """Bytes of tensors on this rank's device after each batch, drained. `place`: "each" for a GPU each."""
    device = begin(f"cuda:{dist.get_rank()}" if place == "each" else place)
    pipeline = Pipeline(preset, Training(batches=(4,) * num_batches), device=str(device), backend=backend)
    engine, found = pipeline.engine, []
    for _ in range(num_batches):
        engine.run_batch(4, 4 * reference.MICROBATCH_SIZE)
        engine.drain()
        settle(device)
        wait_until(lambda: engine.num_unread_sends() == 0)
        gc.collect()
        found.append(torch.cuda.memory_allocated(device) if device.type == "cuda" else live_bytes())
    dist.barrier()
    pipeline.close()
    return found


def live_bytes() -> int:
    """Bytes of all tensors of this process that Python sees."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def bytes_of_communicators() -> dict[str, int]:
    """use -> bytes of the device that a communicator of it takes, with all ranks of the case as members, each on the
    GPU of its number; as NCCL gives them, at the first transfers.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    store = dist.distributed_c10d._get_default_store()
    sizes = (8, 1 << 20, 1 << 26)
    tensors = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for num_bytes in sizes]

    def use(group, purpose: str) -> None:
        for tensor in tensors:
            if purpose == "chain" or size == 1:
                group.allreduce([tensor]).wait()
            for sender in {"link": (0,), "move": (0, 1)}.get(purpose, ()) if size > 1 else ():
                (group.send([tensor], 1 - sender, 0) if rank == sender else group.recv([tensor], sender, 0)).wait()
        torch.cuda.synchronize()

    groups, found = [], {}
    for number, purpose in enumerate(("chain", *COMMUNICATOR_CTAS)):  # what NCCL takes but once goes with the first
        dist.barrier()
        before, _ = torch.cuda.mem_get_info()
        prefix = dist.PrefixStore(f"communicators/{number}", store)
        groups.append(
            streams_of(torch.device("cuda")).communicator(
                prefix, rank, size, max_ctas=COMMUNICATOR_CTAS[purpose], timeout=timedelta(seconds=60)
            )
        )  # fmt: skip
        use(groups[-1], purpose)
        found[purpose] = before - torch.cuda.mem_get_info()[0]
    dist.barrier()
    for group in groups:
        shut_down(group)
    return found


def contexts_of_a_run(place: str) -> list[bool]:
    """By GPU, whether this process has a context there, after a run with moves on the one of `place`."""
    begin(place)
    balance_cases.train("bpipe", Training(batches=(8,) * 2), moves=True, drains=(0,), device=place)
    return [has_context(number) for number in range(torch.cuda.device_count())]


def has_context(number: int) -> bool:
    """CUDA's own word on its device `number`, which makes none."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    for status in (
        driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(number)),
        driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)),
    ):
        assert status == 0, f"CUDA's driver answers with error {status}"
    return bool(active.value)
