"""A stand-in for CUDA that keeps account of order: the real runtime on a CPU, its streams on paper.

Problem: on CUDA the host runs ahead, streams overtake each other, and memory is given away while kernels still read it.
A missing wait shows on some machine, on some day, as a loss that is slightly wrong. Nobody without a GPU sees it.

Solution: the third side of `megatron.backend.streams`. The real executor, engine, chain, links and moves run on it with
CPU tensors; every operation is computed at once, so values are right, and is *noted* as work of the stream that is
current. What is ordered before what is kept in vector clocks (`clocks`), one component for each stream and each host
thread. Two accesses of the same bytes are in order or they are a finding, whichever came first this time. Where the
host asks whether something is done, the answer is late at random, or does not come while it trains. What a thread
learns from such an answer, or from who held a condition before it, counts as order: there one run does not speak for
all.

    ledger      accesses of memory: what is not ordered, what is freed while a stream may still be at it
    device      the face: streams, events, waits; host syncs on the thread that computes
    operations  torch's operations, seen through its dispatcher
    groups      NCCL's process groups, carried by gloo; who uses one, in which order, and when first
    threads     queues and conditions, through which host threads know of each other
    run         all of it in place, for a block
"""

from tests.pipeline.runtime.cuda.recording.device import Recorder
from tests.pipeline.runtime.cuda.recording.run import recording

__all__ = ["Recorder", "recording"]
