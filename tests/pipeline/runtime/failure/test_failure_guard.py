"""A failing rank ends the job: quickly, on every rank, with the root cause, and with nothing left behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from megatron.pipeline.runtime.failure.failure_guard import Guard
from tests import workers
from tests.pipeline.runtime.failure import failing_job

pytestmark = pytest.mark.alone
JOB = Path(__file__).with_name("failing_job.py")
STARTUP = 120.0  # seconds that the whole job may take on a busy machine
END = 10.0  # seconds from the failure to the end of the job
HANG = 3.0  # the transfer timeout of the mode `hang`


def launch(mode: str, bad_rank: int, *, num_ranks: int, with_torchrun: bool) -> tuple[list[int], str]:
    """Exit codes and the joint output."""
    command = [sys.executable, str(JOB), mode, str(bad_rank)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    if with_torchrun:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        codes, output = _run_scripts([(torchrun + command[1:], environment)])
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        places = [shared | {"RANK": str(rank)} for rank in range(num_ranks)]
        if mode == "none":  # its interpreters shut down, which those of a failed job, and forked ones, do not
            codes, output = _run_scripts([(command, environment | place) for place in places])
        else:
            codes, output = _run_forked(mode, bad_rank, places)
    if when := re.findall(r"goes wrong at ([\d.]+)", output):
        assert time.monotonic() - float(when[0]) < END + (HANG if mode.startswith("hang") else 0)
    return codes, output


def _run_scripts(commands: list[tuple[list[str], dict[str, str]]]) -> tuple[list[int], str]:
    processes = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, environment in commands
    ]
    try:
        output = "\n".join(process.communicate(timeout=STARTUP)[0] for process in processes)
    finally:
        leftover = [process for process in processes if _kill_group(process)]
    assert not leftover, "processes were left behind"
    return [process.returncode for process in processes], output


def _run_forked(mode: str, bad_rank: int, places: list[dict[str, str]]) -> tuple[list[int], str]:
    """Ranks that need not import torch anew, which takes each of them seconds."""
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory, f"{rank}.txt") for rank in range(len(places))]
        processes = [
            workers.fork(failing_job.run, mode, bad_rank, place, str(output))
            for place, output in zip(places, outputs, strict=True)
        ]
        deadline = time.monotonic() + STARTUP
        try:
            for process in processes:
                process.join(deadline - time.monotonic())
            codes = [process.exitcode for process in processes]
        finally:
            leftover = [process for process in processes if _kill_group(process)]
        assert not leftover, "processes were left behind"
        return codes, "\n".join(output.read_text() for output in outputs)


def _kill_group(process: subprocess.Popen | BaseProcess) -> bool:
    """Whether anything of the process's session was still there."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def endings(output: str) -> dict[str, str]:
    """rank -> the root cause that it printed; exactly one line each"""
    lines = re.findall(r"^(rank \d+ \(stage \d+\)) stops: (.*)$", output, flags=re.MULTILINE)
    assert len(lines) == len(dict(lines)), output
    return dict(lines)


@pytest.mark.parametrize("with_torchrun", [False, pytest.param(True, marks=pytest.mark.full)])
def test_an_exception_in_a_forward_names_rank_stage_instruction_and_cause(with_torchrun):
    """Every rank prints one line with the same root cause; the failing one shows its traceback."""
    codes, output = launch("raise", 1, num_ranks=2, with_torchrun=with_torchrun)
    assert all(code != 0 for code in codes)
    cause = "rank 1 (stage 1) failed in 1F5@1: RuntimeError: the disk is on fire"
    assert endings(output) == {"rank 0 (stage 0)": cause, "rank 1 (stage 1)": cause}, output
    assert "Traceback" in output and "failing_forward" in output


def test_ranks_end_whose_output_cannot_be_written():
    """The disk of the log is full, or its reader is gone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    processes = [
        workers.fork(failing_job.run, "raise", 1, shared | {"RANK": str(rank)}, "/dev/full") for rank in range(2)
    ]
    try:
        for process in processes:
            process.join(STARTUP)
        codes = [process.exitcode for process in processes]
    finally:
        leftover = [process for process in processes if _kill_group(process)]
    assert not leftover and codes[0] and codes[1], codes


@pytest.mark.parametrize(("with_torchrun", "bad_rank"), [pytest.param(True, 1, marks=pytest.mark.full), (False, 0)])
def test_a_killed_rank_is_named_by_the_others(with_torchrun, bad_rank):
    """kill -9 leaves no word; the neighbours notice at once, also when the rank that hosts the store is killed."""
    codes, output = launch("kill", bad_rank, num_ranks=2, with_torchrun=with_torchrun)
    assert all(code != 0 for code in codes)
    told = endings(output)
    assert list(told) == [f"rank {1 - bad_rank} (stage {1 - bad_rank})"], output
    assert re.match(rf"rank {bad_rank}.* ended without an error message", told.popitem()[1]), output
    assert "frame #" not in output and "[c10d]" not in output, output
    if not with_torchrun:  # whose own lines follow
        assert output.rstrip().splitlines()[-1].startswith(f"rank {1 - bad_rank} (stage {1 - bad_rank}) stops: "), (
            output
        )


def test_a_mapped_file_that_is_cut_short_is_named_in_a_bus_errors_place():
    """The rank that reads it tells which file, and with how many bytes, before it ends; the other says the same."""
    codes, output = launch("cut", 1, num_ranks=2, with_torchrun=False)
    assert codes == [1, 1], output
    told = endings(output)
    assert len(told) == 2 and len(set(told.values())) == 1, output
    cause = r"rank 1 \(stage 1\) failed: OSError: file \S*cut_short_\S*\.idx was cut short while .*: it has 5000 bytes"
    assert re.match(cause, told["rank 0 (stage 0)"]), output


def test_a_transfer_that_never_comes_names_who_waits_for_whom():
    """After the timeout the waiting rank tells for what it waited, and what the rank it waits for is doing."""
    codes, output = launch("hang", 1, num_ranks=2, with_torchrun=False)
    assert all(code != 0 for code in codes)
    told = endings(output)
    assert set(told) == {"rank 0 (stage 0)", "rank 1 (stage 1)"}, output
    pattern = r"rank 0 \(stage 0\) waited 3 s in (0B\d+@\d) for 0RECV_B\d+ from rank 1 \(stage 1\); .* is in 1F5@1"
    assert all(re.match(pattern, cause) for cause in told.values()), output


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "bad_rank"), [(4, 3), (4, 0), (8, 6)])
def test_a_rank_that_is_killed_in_a_move_is_named_by_the_others(num_ranks, bad_rank):
    """kill -9 while saved activations are on their way: all others end in time, with the same story of who it was and
    what it was doing, be it evictor or acceptor.
    """
    codes, output = launch("kill-in-move", bad_rank, num_ranks=num_ranks, with_torchrun=False)
    assert all(code != 0 for code in codes)
    told = endings(output)
    assert set(told) == {f"rank {rank} (stage {rank})" for rank in range(num_ranks) if rank != bad_rank}, output
    (story,) = set(told.values())
    assert re.match(rf"rank {bad_rank}.* ended without an error message \(killed, or crashed\)", story), output


@pytest.mark.parametrize(
    ("num_ranks", "bad_rank"), [(4, 3), pytest.param(4, 0, marks=pytest.mark.full)], ids=["acceptor", "evictor"]
)
@pytest.mark.full
def test_a_move_that_never_ends_names_who_waits_for_whom(num_ranks, bad_rank):
    """Where one end does not come to a move, the evictor's computation that needs it tells for which move of which rank
    it waits, and what that rank is doing.
    """
    codes, output = launch("hang-in-move", bad_rank, num_ranks=num_ranks, with_torchrun=False)
    assert all(code != 0 for code in codes)
    told = endings(output)
    assert len(told) == num_ranks, output
    (story,) = set(told.values())
    pattern = (
        r"rank 0 \(stage 0\) waited 3 s in 0[FB]\d+@\d for 0(EVICT|LOAD)\d+ (to|from) rank 3 \(stage 3\).*; "
        r"rank 3 \(stage 3\) is in .*, with 3(ACCEPT|RETURN)\d+ under way"
    )
    assert re.match(pattern, story), output


@pytest.mark.full
def test_an_error_in_the_chain_names_the_reduction():
    """A failure on the background thread ends the job though the main threads are busy with transfers."""
    codes, output = launch("chain", 0, num_ranks=2, with_torchrun=False)
    assert all(code != 0 for code in codes)
    cause = "rank 0 (stage 0) failed in 0REDUCE_NORM@3: RuntimeError: the sum does not add up"
    assert set(endings(output).values()) == {cause}, output


@pytest.mark.parametrize("mode", ["raise-in-update", pytest.param("kill-in-update", marks=pytest.mark.full)])
def test_a_failure_in_a_lane_of_the_host_ends_the_job_with_one_sentence(mode):
    """The optimizer's thread raises, or is killed with its process; every other rank says the same."""
    codes, output = launch(mode, 1, num_ranks=2, with_torchrun=False)
    assert all(code != 0 for code in codes)
    told = endings(output)
    if mode == "kill-in-update":
        assert "rank 1 (stage 1)" in told["rank 0 (stage 0)"] and len(told) == 1, output
    else:
        cause = "rank 1 (stage 3) failed in 3UPDATE@3: MemoryError: the host has no room for a moment"
        assert set(told.values()) == {cause} and len(told) == 2, output


@pytest.mark.parametrize(
    "mode",
    [
        "kill-in-shared-update",
        pytest.param("hang-in-shared-update", marks=pytest.mark.full),
        pytest.param("kill-in-shared-fetch", marks=pytest.mark.full),
        pytest.param("hang-in-shared-fetch", marks=pytest.mark.full),
    ],
)
def test_a_replica_that_leaves_the_others_alone_with_a_shared_store_is_named(mode):
    """It is killed, or hangs, before its share of a stage is stepped, or gathered: the other ends in seconds, or after
    the timeout, and nothing of the store is left on the node.
    """
    before = set(os.listdir("/dev/shm"))
    codes, output = launch(mode, 1, num_ranks=2, with_torchrun=False)
    assert all(code != 0 for code in codes)
    told = endings(output)
    if mode.startswith("kill"):
        assert list(told) == ["rank 0 (stage 0)"], output
        assert re.match(r"rank 1 \(stage 0\) ended without an error message", told["rank 0 (stage 0)"]), output
    else:
        word = "FETCH" if mode.endswith("fetch") else "UPDATE@3"
        assert word in told["rank 0 (stage 0)"] and "rank 1" in told["rank 0 (stage 0)"], output
    assert not set(os.listdir("/dev/shm")) - before


@pytest.mark.full
@pytest.mark.parametrize("mode", ["raise", "kill", "hang"])
def test_four_ranks_agree_on_the_root_cause(mode):
    """Ranks that do not talk to the failed one print the same line as its neighbours."""
    codes, output = launch(mode, 2, num_ranks=4, with_torchrun=mode == "raise")
    assert all(code != 0 for code in codes)
    told = endings(output)
    assert len(told) == (3 if mode == "kill" else 4) and len(set(told.values())) == 1, output
    assert "rank 2" in told["rank 0 (stage 0)"], output


@pytest.mark.full
def test_the_same_user_error_on_all_ranks_ends_in_one_story():
    """A ValueError that every rank raises is told once, with its text."""
    codes, output = launch("input", 0, num_ranks=2, with_torchrun=False)
    assert codes == [1, 1]
    stories = re.findall(r"^rank \d stops: rank \d failed: (.*)$", output, flags=re.MULTILINE)
    assert stories == ["ValueError: the sequence length is -1; give a positive one"] * 2, output


@pytest.mark.full
@pytest.mark.parametrize("with_torchrun", [True, False])
def test_a_peaceful_end_is_not_a_failure(with_torchrun):
    """Without a failure every rank leaves the guard and exits 0."""
    codes, output = launch("none", 0, num_ranks=2, with_torchrun=with_torchrun)
    assert all(code == 0 for code in codes), output
    assert output.count("done") == 2 and "stops" not in output


def test_a_signal_to_the_thread_that_ends_the_job_does_not_stop_it(monkeypatch):
    """A launcher terminates the ranks as soon as one is gone, also one that lingers until the others know why."""
    exits, counts = [], []
    monkeypatch.setattr(os, "_exit", exits.append)

    class Board:
        def count(self, name, amount=0):
            if not counts:
                guard._on_terminate(signal.SIGTERM, None)
            counts.append(name)
            return guard.world_size

    guard = object.__new__(Guard)
    guard._name, guard._board, guard._exit_code, guard.world_size = "rank 0", Board(), 3, 2
    guard._hosts_store, guard._ending, guard._is_ending = True, threading.Lock(), False
    guard._end("rank 1 failed")
    assert exits == [3]


@pytest.mark.parametrize(
    ("name", "story", "lingers"),
    [
        ("rank 1 (stage 1)", "rank 1 (stage 3) failed in 3F5@1: RuntimeError: no", True),
        ("rank 1 (stage 1)", "rank 0 (stage 0) failed in 0F5@1: RuntimeError: no", False),
        ("rank 1", "rank 12 failed: RuntimeError: no", False),
    ],
)
def test_the_rank_that_failed_stays_until_the_others_have_read_why(monkeypatch, name, story, lingers):
    """A rank of several stages does so for each of them, and not for another rank whose number begins alike."""
    exits, looks = [], []
    monkeypatch.setattr(os, "_exit", exits.append)

    class Board:
        def count(self, name, amount=0):
            looks.append(amount)
            return len(looks)

    guard = object.__new__(Guard)
    guard.rank, guard._name, guard._board, guard._exit_code, guard.world_size = 1, name, Board(), 3, 16
    guard._hosts_store, guard._ending = False, threading.Lock()
    guard._end(story)
    assert exits == [3] and len(looks) == (16 if lingers else 1)
