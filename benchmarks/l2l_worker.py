"""One contender of `l2l.py compute` in a process of its own, which trains when it is told to.

Reads lines `MICROBATCHES BATCHES` or `meter MICROBATCHES`, and answers each with one line of JSON. The first answer, to
no line, says that it is ready, or why it cannot run here.
"""

import gc
import json
import os
import sys
import time

import torch
from l2l_model import Flush, Model, Relay
from l2l_peers import FullyShard, Zero
from thread_times import thread_times

from tests.pipeline.runtime.relay.device_meter import DeviceMeter

ANSWERS = os.fdopen(os.dup(1), "w")  # what libraries print goes to standard error
os.dup2(2, 1)

CONTENDERS = {
    "flush": Flush,
    "l2l eager": lambda model: Relay(model, update="eager"),
    "l2l deferred": lambda model: Relay(model, update="deferred"),
    "FSDP2, CPUOffloadPolicy": FullyShard,
    "ZeRO-Offload": lambda model: Zero(model, 2),
    "ZeRO-3, all offloaded": lambda model: Zero(model, 3),
}
"""All that can be compared, in the order of the table."""


def answer(**found: object) -> None:
    print(json.dumps(found), file=ANSWERS, flush=True)


def train(contender, num_microbatches: int, num_batches: int) -> dict:
    before, start = thread_times(), time.perf_counter()
    losses = [contender.run(num_microbatches) for _ in range(num_batches)]
    seconds = (time.perf_counter() - start) / num_batches
    threads = thread_times().since(before, per=num_batches)
    return {"seconds": seconds, "losses": losses, "ran": threads.ran, "waited": threads.waited}


class BatchMeter(DeviceMeter):
    """What a batch makes: storages that were there before it do not count."""

    def __init__(self) -> None:
        super().__init__()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        plain = [each for each in tensors if type(each) in (torch.Tensor, torch.nn.Parameter)]
        self._before = {each.untyped_storage().data_ptr() for each in plain}

    def _is_shared(self, address: int) -> bool:
        return address in self._before or super()._is_shared(address)


def metered(contender, num_microbatches: int) -> dict:
    """Device bytes at their most: what a batch makes beyond what was there, and of that what is the device's
    (`state`). And the bytes that a batch moves between host and device, where they are counted, else None.
    """
    gc.collect()
    before = contender.num_bytes_moved
    with BatchMeter() as meter:
        contender.run(num_microbatches)
    moved = None if before is None else contender.num_bytes_moved - before
    return {"made": meter.peak, "state": contender.device_state_bytes, "moved": moved}


def main() -> None:
    name, extent = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        contender = CONTENDERS[name](Model(**extent))
    except Exception as error:
        answer(failed=f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return
    answer(ready=name)
    for line in sys.stdin:
        first, second = line.split()
        answer(**(metered(contender, int(second)) if first == "meter" else train(contender, int(first), int(second))))
    os._exit(0)


if __name__ == "__main__":
    main()
