"""The environment of the scripts: nothing is installed twice, and what is missing is named."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path):
    """The scripts and requirements in a repository of their own."""
    target = tmp_path / "repository"
    (target / "tools").mkdir(parents=True)
    for name in ("environment.sh", "environment.py"):
        shutil.copy(ROOT / "tools" / name, target / "tools" / name)
    shutil.copytree(ROOT / "requirements", target / "requirements")
    return target


def prepare(repository: Path, *, path: str, **environment: str) -> subprocess.CompletedProcess:
    """`prepare_environment core test`, with pip cut off from any index."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(repository), "PATH": path, **environment}
    command = ["bash", "-c", f". {repository}/tools/environment.sh; prepare_environment core test"]
    return subprocess.run(command, env={**kept, **offline}, capture_output=True, text=True, timeout=250)


def active_path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def test_nothing_is_installed_where_all_is_there(copy):
    """In an environment that meets the requirements pip is not called, so a rerun is quick and works offline."""
    result = prepare(copy, path=active_path())
    assert result.returncode == 0 and result.stdout == result.stderr == ""


@pytest.mark.parametrize("requirement", ["no-such-package-of-ours", "pytest>=1000"])
def test_what_is_missing_is_named_offline(copy, requirement):
    """A missing package, or one of another version, is named when pip cannot reach an index, and the script fails."""
    with (copy / "requirements" / "test.txt").open("a") as file:
        file.write(requirement + "\n")
    result = prepare(copy, path=active_path())
    assert result.returncode == 1
    assert f"Installing: {requirement}\n" in result.stdout
    assert result.stderr.endswith(f"still missing (is there a network?):\n  {requirement}\n")


def test_another_file_takes_the_place_of_the_pinned_versions(copy):
    """PINNED names the torch to test with, and the one of requirements/pinned.txt is not asked for."""
    (copy / "other.txt").write_text("torch>=1000\n")
    result = prepare(copy, path=active_path(), PINNED=str(copy / "other.txt"))
    assert result.returncode == 1
    assert result.stderr.endswith("still missing (is there a network?):\n  torch>=1000\n")


@pytest.mark.full
def test_without_an_environment_one_is_made(copy):
    """With no active environment the repository gets its own .venv, whose missing packages are then named."""
    base = Path(sys.base_prefix) / "bin"
    result = prepare(copy, path=f"{base}:/usr/bin:/bin")
    assert result.returncode == 1
    assert "Making a virtual environment in .venv" in result.stdout
    assert (copy / ".venv" / "bin" / "python").exists()
    assert "  torch==2.13.0\n" in result.stderr and "  megatron-core==0.16.1\n" in result.stderr
