"""The parts that need nothing but what is there, in rehearsal; and the whole hour, as it will be run."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from benchmarks.gpu_hour import floor, install, machine, schedules
from benchmarks.gpu_hour.parts import PARTS
from benchmarks.gpu_hour.records import ROOT, Records, problem_with

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def rehearsed(main, tmp_path, *words):
    file = tmp_path / "result.json"
    assert main([*words, "--json", str(file), "--rehearse"]) == 0
    content = json.loads(file.read_text())
    assert problem_with(content) is None and content["rehearsal"] is True
    return content


def test_floor(tmp_path):
    """Each rate is there with all its samples, and is what its operations or bytes and its seconds make."""
    figures = rehearsed(floor.main, tmp_path)["figures"]
    rates = {name for name in figures if name.endswith("_per_second")}
    assert {f"product_{name}_flop_per_second" for name in ("bf16", "fp32", "tf32")} <= rates
    assert {f"copy_{name}_bytes_per_second" for name in ("on_the_card", "to_the_card_pinned")} <= rates
    assert all(len(figures[name]) == floor.REPEATS and min(figures[name]) > 0 for name in rates)
    assert min(figures["launch_seconds"]) > 0 and len(figures["launch_and_wait_seconds"]) == 2


def test_machine_is_said_without_a_card(monkeypatch):
    """What is missing is left out, nvidia-smi included; what identifies the results is there."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = machine.describe()
    assert machine.clocks() == "" and "driver" not in found and found["cores"] >= 1
    assert machine.identity(found) == f"no card, torch {found['torch']}, Python {found['Python']}"
    card = {"card": "A", "card bytes": 3 << 30, "torch": "2", "Python": "3", "driver": "580", "host bytes": 1 << 30}
    assert machine.sentence(card) == "A, 3 GiB, torch 2, Python 3, driver 580; None cores, 1 GiB"


def test_what_nvidia_smi_says(tmp_path, monkeypatch):
    """Its fields by their names; nothing where it fails."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for script, found in (("echo '580.1, 345, 1980, 3201, 3201, 70.1, 700.0, 31'", "345"), ("exit 9", None)):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert machine.asked(machine.ASKED).get("SM MHz") == found


@pytest.mark.parametrize("name", ["2bw", "l2l"])
def test_schedules_are_compared(name):
    """Two ranks have one process's losses; another schedule's they do not have, so the comparison can fail."""
    [comparison] = [each for each in schedules.comparisons() if each.name == name]
    assert schedules.compare(comparison, 2, "cpu") < 1e-5
    other = {"2bw": "flush", "l2l": "2bw"}[name]
    [delayed] = [each for each in schedules.comparisons() if each.name == other]
    assert schedules.compare(replace(comparison, expected=delayed.expected), 2, "cpu") > schedules.TOLERANCE


@pytest.mark.full
def test_all_schedules(tmp_path):
    """On two and four ranks every registered schedule is compared, and none differs."""
    content = rehearsed(schedules.main, tmp_path)
    assert len(content["lines"]) == 2 and len(content["figures"]) == 2 * len(schedules.comparisons())
    assert all(name in content["lines"][1] for name in ("bpipe", "zbv", "pipedream", "l2l", "async", "predicted"))


BARE = {**ENVIRONMENT, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}  # starts in a second
TESTS = """
import time, pytest
pytestmark = pytest.mark.gpu
def note(word):
    open("notes.txt", "a").write(word + "\\n")
def test_passes(record_property):
    note("passes"); record_property("peak", "3 GiB")
def test_fails():
    note("fails"); assert 1 == 2, "one is not two"
def test_skips():
    pytest.skip("needs two CUDA devices")
def test_hangs():
    note("hangs"); time.sleep(60)
def test_is_behind():
    note("behind")
"""


def test_a_hang_in_a_file_of_tests_loses_nothing(tmp_path):
    """Every test's outcome is written; the one that hangs is ended by its limit; and another attempt runs only those
    that have not passed.
    """
    (tmp_path / "test_made_up.py").write_text(TESTS)
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.gpu_hour.gpu_tests", "test_made_up.py", "--json", str(file)]
    command += ["--rehearse", "--test-limit", "1"]

    def run():
        done = subprocess.run(command, cwd=tmp_path, env=BARE, capture_output=True, text=True, timeout=100)
        assert done.returncode == 1, done.stdout + done.stderr
        return json.loads(file.read_text())

    content = run()
    assert problem_with(content) is None and (tmp_path / "result.xml").exists()
    assert content["figures"] == {"num_passed": 2, "num_failed": 2, "num_skipped": 1}
    assert content["lines"][0] == "2 passed, 2 failed, 1 skipped"
    assert any("test_fails failed: AssertionError: one is not two" in line for line in content["lines"])
    assert any("test_hangs failed: Failed: Timeout" in line for line in content["lines"])
    assert content["lines"][-2:] == ["skipped: needs two CUDA devices", "peak: 3 GiB"]
    file.rename(tmp_path / "result.before.json")
    assert run()["lines"][0] == "2 passed, 2 failed, 1 skipped"
    assert (tmp_path / "notes.txt").read_text().split() == ["passes", "fails", "hangs", "behind", "fails", "hangs"]


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("import no_such_package", 2, "test_made_up.py failed: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import pytest; pytest.importorskip('no_such_package', reason='needs it')", 0, "skipped: needs it"),
    ],
)
def test_a_file_without_tests_says_why(tmp_path, program, status, said):
    """One that cannot be imported has failed; one that skips itself has not."""
    (tmp_path / "test_made_up.py").write_text(program)
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.gpu_hour.gpu_tests", "test_made_up.py", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, env=BARE, capture_output=True, text=True, timeout=100)
    assert done.returncode == status
    assert json.loads(file.read_text())["lines"][1] == said


def wheel(folder, name, version="1.0", tag="py3-none-any"):
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as archive:
        archive.writestr(f"{name}.py", "VALUE = 7\n")
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{information}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{information}/RECORD", "")


def test_wheels_serve_only_what_is_not_there(tmp_path, monkeypatch, capsys):
    """A package that is installed is not replaced, a wheel for another Python is not taken, and a second call finds
    nothing to do; what cannot be imported then is said, and where to get it.
    """
    wheels, target = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    wheel(wheels, "made_up_package")
    wheel(wheels, "psutil", "99.0")
    wheel(wheels, "made_up_other", tag="cp27-cp27m-win32")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(install, "NEEDED", ("made_up_package",))
    words = ["--wheels", str(wheels), "--target", str(target)]
    assert install.main(words) == 0
    assert capsys.readouterr().out == f"installed from {wheels}: made-up-package==1.0\n"
    assert (target / "made_up_package.py").exists() and not list(target.glob("psutil*"))
    assert install.main(words) == 0
    assert capsys.readouterr().out == "nothing had to be installed\n"
    monkeypatch.setattr(install, "NEEDED", ("megatron_lacks_this",))
    assert install.main(words) == 1
    assert "megatron_lacks_this cannot be imported, and" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_whole_hour(tmp_path):
    """`gpu_hour.sh` as it will be typed, tiny and on the CPU: every part of the table ends well, and its report is
    refused as a rehearsal.
    """
    script = ["bash", "benchmarks/gpu_hour.sh", "--rehearse", "--minutes", "24", "--out", str(tmp_path)]
    environment = {**ENVIRONMENT, "PYTHON": sys.executable}
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1480)
    records = Records(tmp_path).by_name
    ends = {part.name: records.get(part.name, {}).get("status") for part in PARTS}
    assert ends == dict.fromkeys(ends, "done"), done.stdout + done.stderr
    assert done.returncode == 0
    command = [sys.executable, "-m", "benchmarks.gpu_hour.report", str(tmp_path)]
    refused = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "holds a rehearsal" in refused.stderr
