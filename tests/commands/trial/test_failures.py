"""Runs that failed are told apart by what they left in their logs."""

import pytest

from megatron.commands.grid_search.trial_results import Status
from megatron.commands.grid_search.trial_runs import classify
from megatron.processes import End

LAUNCHER = """
E1121 20:00:00.0 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: {code}) local_rank: 0 (pid: 12)
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : {code} (pid: 12)
  error_file: <N/A>
"""

CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB\n"
    "rank 0 (stage 0) stops: rank 0 (stage 0) failed in 0F3@0: OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 2.00 GiB.\n"
    "rank 1 (stage 1) stops: rank 0 (stage 0) failed in 0F3@0: OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 2.00 GiB.\n" + LAUNCHER.format(code=1)
)
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)\n"
)
KILLED = (
    "rank 0 (stage 0) stops: rank 1 (stage 1) ended without an error message (killed, or crashed); last seen in 1F2@0\n"
    + LAUNCHER.format(code=-9)
)
REFUSED = "pretrain_gpt.py: error: --num-attention-heads 3 is not divisible by --tensor-model-parallel-size 2\n"
STUCK = (
    "rank 0 (stage 0) stops: rank 0 (stage 0) failed in 0STEP@1: TimeoutError: 0REDUCE_NORM@1 has not ended after 60 "
    "s: another rank has not joined it; rank 1 (stage 1) is in 1F0@0\n" + LAUNCHER.format(code=1)
)
RAISED = (
    "Traceback (most recent call last):\n"
    '  File "model.py", line 3, in forward\n'
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)\n" + LAUNCHER.format(code=1)
)
DEAF = RAISED + "W1121 Unable to shutdown process 13 via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL\n"
LATER = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    "[rank0]: torch.distributed.DistBackendError: connection closed by peer\n" + LAUNCHER.format(code=1)
)
SILENT = (
    "rank 0 (stage 0) stops: rank 1 (stage 1) ended without an error message (killed, or crashed); last seen in 1F2@0\n"
)
WATCHDOG = (
    "[rank1]:[E1121 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 300014 milliseconds before timing out.\n" + SILENT
)
CASES = {
    "CUDA's allocator": (1, CUDA, Status.OUT_OF_MEMORY, "rank 0 (stage 0) failed in 0F3@0: OutOfMemoryError: CUDA out"),
    "the CPU's": (1, CPU, Status.OUT_OF_MEMORY, "RuntimeError: [enforce fail"),
    "the system killed a rank": (1, KILLED, Status.OUT_OF_MEMORY, "a rank was killed (signal 9)"),
    "a process that loads data": (
        1,
        "RuntimeError: DataLoader worker (pid 5) is killed by signal: Killed. \n",
        Status.OUT_OF_MEMORY,
        "a rank was killed (signal 9)",
    ),
    "C++'s": (
        1,
        "terminate called after throwing an instance of 'std::bad_alloc'\n" + SILENT,
        Status.OUT_OF_MEMORY,
        "'std::bad_alloc'",
    ),
    "memory of one, a consequence of another": (1, LATER, Status.OUT_OF_MEMORY, "CUDA out of memory"),
    "an exception, and a launcher that has to kill": (1, DEAF, Status.ERROR, "RuntimeError: mat1 and mat2 shapes"),
    "NCCL's watchdog": (1, WATCHDOG, Status.HANG, "OpType=ALLREDUCE) ran for 300014 milliseconds"),
    "a crash": (1, SILENT, Status.ERROR, "rank 1 (stage 1) ended without an error message"),
    "a refused flag": (2, REFUSED, Status.ERROR, "--num-attention-heads 3 is not divisible"),
    "a collective that did not end": (1, STUCK, Status.HANG, "0REDUCE_NORM@1 has not ended after 60 s"),
    "an exception": (1, RAISED, Status.ERROR, "RuntimeError: mat1 and mat2 shapes"),
    "nothing": (7, "", Status.ERROR, "ended with status 7 without an error message: 2 of 10 iterations were done"),
    "took too long": (None, "", Status.HANG, "not at its end after 60 s: 2 of 10 iterations were done"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failure_has_its_kind_and_its_own_sentence(case):
    """The sentence is the failing rank's where it left one, and never the launcher's."""
    status, log, kind, words = CASES[case]
    found, sentence = classify(End(status, 60.0), log, progress="2 of 10 iterations were done")
    assert found is kind and words in sentence and "ChildFailedError" not in sentence and "\n" not in sentence


def test_a_run_that_only_mentions_memory_is_no_victim_of_it():
    """A sentence of the rank decides, not what the log says elsewhere."""
    log = "note: nothing is out of memory yet\n" + REFUSED
    assert classify(End(2, 1.0), log, progress="")[0] is Status.ERROR
