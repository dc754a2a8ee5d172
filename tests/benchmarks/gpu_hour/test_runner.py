"""The hour's runner: whatever a part does, its record is there, and the hour goes on, also in a later call."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.gpu_hour import __main__ as hour
from benchmarks.gpu_hour import parts as table
from benchmarks.gpu_hour import records as stored
from benchmarks.gpu_hour.records import ROOT, Records
from tests.benchmarks.gpu_hour import fake_hour
from tests.benchmarks.gpu_hour.fake_hour import KILLED, part, run

GOOD = part("good", "note('good'); write('it is 7', answer=7)")


COUNT = "(file.parent.parent / 'notes.txt').read_text().count('slow')"


def statuses(folder):
    return {name: record["status"] for name, record in Records(folder).by_name.items()}


def notes(folder):
    return (folder / "notes.txt").read_text().split()


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def pid_of(folder, name):
    words = notes(folder)
    return int(words[words.index(name) + 1])


def begun(folder):
    """A runner in a process of its own, in the middle of its second part, which has started a child."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu_hour.fake_hour", str(folder)]
    runner = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline, file = time.monotonic() + 60, folder / "notes.txt"
    while not (file.exists() and "child" in file.read_text()):
        assert time.monotonic() < deadline and runner.poll() is None
        time.sleep(0.05)
    return runner


def test_failures_are_results_and_the_hour_goes_on(tmp_path, capsys):
    """An error, a signal, no memory, garbage and no file are told apart; what was done is not run again, what failed
    is, behind the rest.
    """
    failing = [
        part("raises", "note('raises'); write('half'); raise KeyError('no such card')"),
        part("crashes", "note('crashes'); os.kill(os.getpid(), signal.SIGSEGV)"),
        part("fills", "print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'); sys.exit(1)"),
        part("garbles", "file.write_text('{\"lines\": [')"),
        part("misleads", 'file.write_text(\'{"lines": [1], "figures": {}}\')'),
        part("forgets", "print('all is well')"),
    ]
    assert run(tmp_path, [*failing, GOOD]) == 3
    assert statuses(tmp_path) == {
        "raises": "failed", "crashes": "crashed", "fills": "out of memory", "garbles": "no result",
        "misleads": "no result", "forgets": "no result", "good": "done",
    }  # fmt: skip
    records = Records(tmp_path).by_name
    assert records["raises"]["reason"] == "exit status 1; last it said: KeyError: 'no such card'"
    assert records["raises"]["result"]["lines"] == ["half"]  # what it had written is kept
    assert records["crashes"]["reason"].startswith("it was ended by SIGSEGV") and records["crashes"]["result"] is None
    assert "Tried to allocate 2 GiB" in records["fills"]["reason"]
    assert records["misleads"]["reason"].endswith("its lines are no list of sentences")
    assert records["good"]["result"]["figures"] == {"answer": 7}
    printed = capsys.readouterr().out
    assert "KeyError: 'no such card'" in printed and "    it is 7" in printed
    assert "not done: raises, crashes, fills, garbles, misleads, forgets; call this again to go on" in printed

    late = part("late", "note('late'); write('late')")
    mended = [part("raises", "note('raises'); write('mended')"), *failing[1:2], late, GOOD]
    assert run(tmp_path, mended) == 3
    assert notes(tmp_path) == ["raises", "crashes", "good", "late", "raises", "crashes"]
    assert statuses(tmp_path)["raises"] == "done" and Records(tmp_path).by_name["raises"]["attempt"] == 2
    assert run(tmp_path, [mended[0], late, GOOD]) == 0
    assert len(notes(tmp_path)) == 6


@pytest.mark.alone
@pytest.mark.full
def test_a_hang_is_ended_with_stacks(tmp_path, capsys):
    """At its limit the stacks of all threads of a part and of its children are printed, none of them is left, and what
    it had written before is kept.
    """
    child = "import time\ndef waits_in_the_child():\n    time.sleep(100)\nwaits_in_the_child()"
    hangs = part(
        "hangs",
        "import threading\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "def waits_in_a_thread():\n    time.sleep(100)\n"
        "threading.Thread(target=waits_in_a_thread).start()\n"
        "note(str(child.pid)); write('so far')\n"
        "def waits_here():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN); child.wait()\n"
        "waits_here()",
        limit=6.0,
    )  # fmt: skip
    assert run(tmp_path, [hangs, GOOD]) == 3
    record = Records(tmp_path).by_name["hangs"]
    assert (record["status"], record["reason"]) == ("time limit", "it was ended at its limit of 6 s")
    assert record["result"]["lines"] == ["so far"] and statuses(tmp_path)["good"] == "done"
    printed = capsys.readouterr().out
    for function in ("waits_here", "waits_in_a_thread", "waits_in_the_child"):
        assert f"in {function}" in printed
    assert not is_running(int(notes(tmp_path)[0]))


@pytest.mark.alone
def test_a_call_ends_in_its_time(tmp_path, capsys, monkeypatch):
    """A part that the end of a call cuts off is interrupted, not failed; what does not fit is left; and the next call
    begins with the part that was cut off, which finds what it had written.
    """
    cut_off = part(
        "cut_off",
        "before = file.with_suffix('.before.json')\n"
        "if before.exists(): note('again'); write(*json.loads(before.read_text())['lines'], 'rest'); sys.exit()\n"
        "note('begun'); write('a part'); time.sleep(100)",
    )
    monkeypatch.setattr(hour, "TO_END", 10.0)
    start = time.monotonic()
    assert run(tmp_path, [cut_off, part("long", "note('long')", expected=300.0)], "--minutes", "0.22") == 3
    assert time.monotonic() - start < 0.22 * 60
    assert statuses(tmp_path) == {"cut_off": "interrupted"}
    assert "too long for what is left of this call: long (300 s)" in capsys.readouterr().out
    assert run(tmp_path, [GOOD, cut_off]) == 0
    assert notes(tmp_path) == ["begun", "again", "good"]
    assert Records(tmp_path).by_name["cut_off"]["result"]["lines"] == ["a part", "rest"]


@pytest.mark.alone
@pytest.mark.full
def test_what_is_cut_off_twice_holds_up_nothing(tmp_path, monkeypatch):
    """A part that two calls have cut off comes behind those that were never begun, and before those that failed."""
    slow = part("slow", "note('slow'); time.sleep(100 if notes() < 3 else 0); write('x')".replace("notes()", COUNT))
    fails = part("fails", "note('fails'); sys.exit(1)")
    monkeypatch.setattr(hour, "TO_END", 0.0)
    for _ in range(2):
        assert run(tmp_path, [slow], "--minutes", "0.05") == 3
    assert run(tmp_path, [fails]) == 3
    assert run(tmp_path, [fails, slow, GOOD]) == 3
    assert notes(tmp_path) == ["slow", "slow", "fails", "good", "slow", "fails"]


def test_a_killed_runner_loses_nothing(tmp_path):
    """SIGKILL in the middle of a part: the next call ends the processes that it left, keeps what the part had written,
    gives it to its next attempt, and runs the rest; nothing that was done is run again.
    """
    runner = begun(tmp_path)
    runner.kill()
    runner.wait()
    assert statuses(tmp_path) == {"first": "done", "second": "running"}
    child = pid_of(tmp_path, "child")
    assert is_running(child)
    with (tmp_path / "hour.jsonl").open("a") as stream:
        stream.write('{"part": "third", "status": "do')  # a line that the kill has torn
    assert run(tmp_path, KILLED) == 0
    assert not is_running(child)
    assert notes(tmp_path).count("first") == 1 and set(statuses(tmp_path).values()) == {"done"}
    assert Records(tmp_path).by_name["second"]["result"]["lines"] == ["all", "half of it"]
    lines = [json.loads(line) for line in (tmp_path / "hour.jsonl").read_text().splitlines() if not line.endswith("do")]
    assert [line["status"] for line in lines if line.get("part") == "second"] == ["interrupted", "done"]


def test_sources_are_told_apart_by_their_contents(tmp_path, monkeypatch):
    """A number that is the same in any copy, and another with any Python file that changes or moves."""
    monkeypatch.setattr(stored, "ROOT", tmp_path)
    (tmp_path / "megatron").mkdir()
    file = tmp_path / "megatron" / "one.py"
    found = []
    for text in ("1", "1", "2"):
        file.write_text(text)
        found.append(stored.sources())
    file.rename(file.with_name("two.py"))
    assert found[0] == found[1] and len({*found, stored.sources()}) == 3


def test_one_file_is_enough_to_go_on(tmp_path):
    """`hour.jsonl` alone, carried to a folder elsewhere, says what is done and with which results."""
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    assert run(first, [GOOD]) == 0
    (first / "hour.jsonl").rename(second / "hour.jsonl")
    assert run(second, [GOOD]) == 0
    assert not (second / "notes.txt").exists()
    assert Records(second).by_name["good"]["result"]["lines"] == ["it is 7"]


def test_what_is_not_there_is_a_reason_to_skip(tmp_path, capsys):
    """A package, and a card's capability; a rehearsal asks for no card."""
    needy = [
        part("apex", "write('x')", packages=("no_such_package",)),
        part("new", "write('x')", capability=(9, 0)),
        part("old", "write('x')", capability=(8, 0)),
    ]
    assert run(tmp_path / "card", needy) == 0
    records = Records(tmp_path / "card").by_name
    assert records["apex"]["reason"] == "it needs no_such_package, which is not installed"
    assert records["new"]["reason"] == "it needs compute capability 9.0, and the card has 8.0"
    assert records["old"]["status"] == "done"
    assert run(tmp_path / "rehearsal", needy[1:], "--rehearse") == 0
    assert statuses(tmp_path / "rehearsal") == {"new": "done", "old": "done"}
    assert run(tmp_path / "none", needy, machine={"torch": "2"}) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_other_sources_and_machines_are_run_again(tmp_path, monkeypatch, capsys):
    """Results go together with one revision of the sources on one kind of machine, unless --keep says otherwise; and
    measurements never with a rehearsal.
    """
    assert run(tmp_path, [GOOD]) == 0
    monkeypatch.setattr(fake_hour, "SOURCES", "others")
    assert run(tmp_path, [GOOD], "--keep") == 0
    assert len(notes(tmp_path)) == 1
    assert run(tmp_path, [GOOD]) == 0
    assert run(tmp_path, [GOOD], machine={"card": "Another", "card bytes": 1}) == 0
    assert len(notes(tmp_path)) == 3
    assert run(tmp_path, [GOOD], "--only", "good", "--again", machine={"card": "Another", "card bytes": 1}) == 0
    assert len(notes(tmp_path)) == 4
    assert run(tmp_path, [GOOD], "--rehearse") == 1
    assert f"{tmp_path} holds measurements, and this is a rehearsal; give another --out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--only", "gold"), "--only names gold; the parts are good"),
        (("--again",), "--again needs --only"),
        (("--minutes", "0"), "--minutes is 0; give more than 0"),
    ],
)
def test_flags_are_refused_by_name(tmp_path, capsys, flags, said):
    """Each in one sentence that says what to do."""
    with pytest.raises(SystemExit):
        run(tmp_path, [GOOD], *flags)
    assert said in capsys.readouterr().err


def test_the_table_is_in_order(tmp_path, capsys):
    """Each part has a name of its own, and a limit above what is expected, within a command of ten minutes; every
    file with tests marked `gpu` has a row; the first call of nine minutes holds the first five; `--list` shows them.
    """
    names = [each.name for each in table.PARTS]
    assert len(set(names)) == len(names) and names[0] == "floor"
    for each in table.PARTS:
        assert each.expected < each.limit <= 9 * 60 - hour.TO_END and each.question.endswith("?")
        assert each.argv[0] == "-m"
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark." + "gpu" in path.read_text()]
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    files -= {"tests/benchmarks/gpu_hour/test_parts.py", "tests/tools/test_pack_wheels.py"}  # they only speak of it
    assert files == {word for each in table.PARTS for word in each.argv if word.endswith(".py")}
    first = [each for each in table.PARTS if each.name in ("floor", "one_stage", "schedules", "tests_order", "memory")]
    assert tuple(first) == table.PARTS[:5] and sum(each.expected for each in first) < 9 * 60 - hour.TO_END
    assert hour.main(["--list", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == names and "not run" in shown


def test_a_runner_that_is_asked_to_end_takes_its_part_along(tmp_path):
    """At SIGTERM no process of the part is left, and the next call goes on with it."""
    runner = begun(tmp_path)
    runner.terminate()
    assert runner.wait(timeout=30) == 128 + signal.SIGTERM
    assert not any(is_running(pid_of(tmp_path, name)) for name in ("second", "child"))
    assert run(tmp_path, KILLED) == 0 and Records(tmp_path).by_name["second"]["attempt"] == 2
