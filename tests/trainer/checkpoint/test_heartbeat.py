"""The process that gives a job's sign of life: it counts, ends with the job, is replaced, and says what is wrong."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.trainer.checkpoint.ownership import DIGITS, Heartbeat

BEGINS = '{"of": "this", "beat": "'
OWNER = """
import sys
from pathlib import Path
from megatron.trainer.checkpoint.ownership import Heartbeat
beat = Heartbeat(Path(sys.argv[1]), sys.argv[2], 0.05)
beat.start()
print(beat._child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mark(tmp_path):
    path = tmp_path / "mark"
    path.write_text(f'{BEGINS}{"0" * DIGITS}"}}')
    return path


def comes(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def counts(path):
    before = path.read_text()
    comes(lambda: path.read_text() != before)


def exists(process):
    return Path(f"/proc/{process}").exists()


def is_over(process):
    """Ended; who has adopted it may not have looked yet."""
    return not exists(process) or Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def test_it_counts_until_it_is_stopped_and_leaves_no_process(mark):
    beat = Heartbeat(mark, BEGINS, 0.05)
    beat.start()
    child = beat._child.pid
    counts(mark)
    assert mark.read_text().startswith(BEGINS) and len(mark.read_text()) == len(BEGINS) + DIGITS + 2
    beat.stop()
    comes(lambda: not exists(child))  # no zombie either


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_owner(mark, kind):
    with subprocess.Popen([sys.executable, "-c", OWNER, str(mark), BEGINS], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as owner:  # fmt: skip
        child = int(owner.stdout.readline())
        counts(mark)
        owner.send_signal(kind)
    comes(lambda: is_over(child))


def test_one_that_somebody_ended_is_replaced(mark, caplog):
    """As where a cluster's scheduler tells all processes of a job that its time is nearly over."""
    beat = Heartbeat(mark, BEGINS, 0.05)
    beat.start()
    first = beat._child.pid
    os.kill(first, signal.SIGTERM)
    comes(lambda: beat._child.pid != first)
    counts(mark)
    beat.stop()
    assert "has ended (status -15)" in caplog.text


def test_what_is_not_its_mark_stays_as_it_is(mark):
    """Another job's, made under the same name; and none is made where there is none."""
    text = mark.read_text().replace("this", "that")
    mark.write_text(text)
    beat = Heartbeat(mark, BEGINS, 0.02)
    beat.start()
    time.sleep(0.5)
    assert mark.read_text() == text
    mark.unlink()
    time.sleep(0.2)
    assert not mark.exists()
    beat.stop()


def test_a_sign_that_cannot_be_written_is_told_once(tmp_path, caplog):
    beat = Heartbeat(tmp_path, BEGINS, 0.02)  # a directory
    beat.start()
    comes(lambda: caplog.records)
    time.sleep(0.3)
    beat.stop()
    assert len(caplog.records) == 1
    assert "cannot be written into" in caplog.text and "Is a directory" in caplog.text
