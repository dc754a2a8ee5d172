"""Two ranks that run rows with moves of saved activations, in the processes of `tests.workers`."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.pipeline.program.instruction import Instruction
from megatron.pipeline.runtime.contract.stage import BatchInfo
from tests.pipeline.runtime.stages.module.module_cases import Pipeline
from tests.pipeline.runtime.stages.module.reference import Training

ROWS = (
    "0F0@0 0SEND_F0 0F1@0 0SEND_F1 0EVICT0 | 0EVICT1 | 0F2@0 0SEND_F2 0LOAD0 0RECV_B0 0B0@0 0LOAD1 0RECV_B1 0B1@0 "
    "0RECV_B2 0B2@0",
    "1ACCEPT0 1RECV_F0 1F0@0 1ACCEPT1 1RECV_F1 1B0@0 1SEND_B0 1RETURN0 1F1@0 1RECV_F2 1B1@0 1SEND_B1 1RETURN1 1F2@0 "
    "1B2@0 1SEND_B2",
)
"""Two of three microbatches are moved; a bar waits until nothing moves any more."""
MOVES = ("EVICT", "ACCEPT", "RETURN", "LOAD")
NUM_MICROBATCHES = 3


def pieces(rank: int, batch: int, *, moves: bool) -> list[list[Instruction]]:
    """The row of one batch, cut at the bars."""
    return [
        [
            Instruction.parse(text).shifted(microbatches=batch * NUM_MICROBATCHES, versions=0)
            for text in piece.split()
            if moves or not any(word in text for word in MOVES)
        ]
        for piece in ROWS[rank].split("|")
    ]


def wait_until(condition, seconds: float = 20.0) -> None:
    """Fail if `condition` does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.001)


def gradients(*, moves: bool, num_batches: int, device: str = "cpu") -> dict:
    """Gradients of this rank's stage after each batch, and what it counted."""
    torch.manual_seed(dist.get_rank())
    training = Training(batches=(NUM_MICROBATCHES,) * num_batches, dropout=0.2)
    pipeline = Pipeline("flush", training, moves_activations=moves, device=device)
    executor, stage, memory = pipeline.engine._executor, pipeline.stage, pipeline.memory
    result = {"gradients": [], "buffers": [], "at_end": [], "layout": None}
    for batch in range(num_batches):
        executor.add_batch(BatchInfo(batch, NUM_MICROBATCHES, NUM_MICROBATCHES), batch * NUM_MICROBATCHES)
        pipeline.update.begin_backward = lambda info: None
        for piece in pieces(dist.get_rank(), batch, moves=moves):
            executor.run(piece)
            wait_until(lambda: dist.get_rank() == 1 or pipeline.engine.num_unread_sends() == 0)
        result["gradients"] += [parameter.grad.cpu().clone() for parameter in stage.module.parameters()]
        dist.barrier()
        if moves:
            wait_until(lambda: pipeline.engine.num_unread_sends() == 0)
            result["buffers"].append(memory.pool.num_buffers)
            result["at_end"].append(memory.current_bytes)
    result["peak_saved"] = pipeline.engine.saved.peaks[stage.index]
    result["peak_bytes"] = None if memory is None else memory.peak_bytes
    if moves and stage.index == 0:
        result["layout"] = stage._captured.layout
    dist.barrier()
    pipeline.close()
    return result


def gradients_on_cuda(**options) -> dict:
    """All ranks on the first GPU."""
    return gradients(device="cuda:0", **options)


def missing_load() -> str | None:
    """On rank 0: the message of a LOAD whose RETURN never comes."""
    pipeline = Pipeline("flush", Training(batches=(2,)), moves_activations=True, timeout=timedelta(seconds=1))
    executor = pipeline.engine._executor
    executor.add_batch(BatchInfo(0, 2, 2), 0)
    rows = (
        "0F0@0 0SEND_F0 0F1@0 0SEND_F1 0EVICT0 0RECV_B0 0LOAD0 0B0@0",
        "1ACCEPT0 1RECV_F0 1F0@0 1RECV_F1 1F1@0 1B0@0 1SEND_B0",
    )
    message = None
    try:
        executor.run([Instruction.parse(text) for text in rows[dist.get_rank()].split()])
    except RuntimeError as error:
        message = str(error)
    dist.barrier()
    return message


def unposted() -> list[str]:
    """What moves say that lack the one before them, and what runs after them."""
    pipeline = Pipeline("flush", Training(batches=(2,)), moves_activations=True)
    executor, rank = pipeline.engine._executor, dist.get_rank()
    executor.add_batch(BatchInfo(0, 2, 2), 0)
    rows = [
        ("0F0@0 0SEND_F0 0EVICT0", "0F1@0 0SEND_F1 0EVICT0 0EVICT0", "0RECV_B0 0B0@0"),
        ("1RETURN0", "1ACCEPT0 1RECV_F0 1F0@0 1RECV_F1 1F1@0 1B0@0 1SEND_B0"),
    ]
    messages = []
    for text in rows[rank]:
        try:
            executor.run([Instruction.parse(word) for word in text.split()])
            messages.append("ran")
        except (RuntimeError, KeyError) as error:
            messages.append(str(error))
    dist.barrier()
    return messages
