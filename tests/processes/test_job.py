"""A job is ended as a whole, and nothing beside it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron.processes import end_left, run_job

FAMILY = """
import os, subprocess, sys, time
child = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
for _ in range(2):  # in sessions of their own, as a launcher's ranks are, and deaf
    process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    print(process.pid, flush=True)
{then}
"""


def run(code, tmp_path, timeout=60.0):
    log = tmp_path / "log.txt"
    end = run_job([sys.executable, "-c", code], log=log, timeout=timeout, directory=tmp_path, folder=tmp_path)
    return end, log.read_text()


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_status_and_output_are_kept(tmp_path):
    end, log = run("import sys; print('out'); sys.stderr.write('err'); sys.exit(3)", tmp_path)
    assert end.status == 3 and "out" in log and "err" in log


def test_launcher_variables_are_not_handed_on(tmp_path, monkeypatch):
    """A measuring that was itself started by a launcher starts jobs of their own."""
    monkeypatch.setenv("RANK", "5")
    assert run("import os; print('RANK' in os.environ)", tmp_path)[1] == "False\n"


@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(0)", "os.kill(os.getpid(), 9)"])
def test_nothing_of_a_job_is_left(tmp_path, then):
    """Whether it hangs, ends or is killed: its deaf grandchildren go, too; a process beside it stays."""
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        end, log = run(FAMILY.format(then=then), tmp_path, timeout=1.5 if "sleep" in then else 60.0)
        pids = [int(line) for line in log.split()]
        deadline = time.monotonic() + 10  # the kernel takes a killed process down after the kill has returned
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(pids) == 2 and not any(map(is_alive, pids))
        assert beside.poll() is None
        assert end.status == {"time": None, "sys.": 0, "os.k": -9}[then[:4]]
    finally:
        beside.kill()
        beside.wait()


def start_measuring(tmp_path, job):
    """A process that measures in `tmp_path` for ever, and the number of its job's process, which runs `job`."""
    code = (
        "from pathlib import Path; from sys import argv, executable; "
        "from megatron.processes import run_job; here = Path(argv[2]); "
        "run_job([executable, '-c', argv[1]], log=here / 'log.txt', timeout=600, directory=here, folder=here)"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    job = f"import os, signal, time; {job}; print(os.getpid(), flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code, job, str(tmp_path)], env=environment)
    log, deadline = tmp_path / "log.txt", time.monotonic() + 60
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return parent, int(log.read_text())


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def assert_ends(pid):
    """A killed process may take a moment."""
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is a signal on Linux only")
def test_a_job_goes_with_the_process_that_measures(tmp_path):
    """Killed without a chance to clean up, it leaves no launcher behind."""
    parent, pid = start_measuring(tmp_path, "pass")
    kill(parent)
    assert_ends(pid)


def test_what_a_killed_measuring_left_is_ended_by_the_next(tmp_path):
    """A job that is deaf stays when its parent is killed; who measures in the same folder after that ends it, and is
    refused before. One in another folder does neither."""
    parent, pid = start_measuring(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with pytest.raises(ValueError, match=f"process {parent.pid} measures in {tmp_path} right now"):
        end_left(tmp_path)
    kill(parent)
    end_left(tmp_path / "other")
    assert is_alive(pid)
    end_left(tmp_path)
    assert_ends(pid)
