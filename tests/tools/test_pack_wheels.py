"""Wheels for a machine that has torch and no network: what it lacks, nothing of torch, in whole or not at all."""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "pack_wheels.sh"
LEFT_OUT = set(re.search(r"^left_out=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE)[1].split())
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


def listed() -> list[Requirement]:
    """What the package, its programs and its tests need."""
    texts = ((ROOT / "requirements" / f"{name}.txt").read_text() for name in ("runtime", "core", "test"))
    lines = (line.partition("#")[0].strip() for text in texts for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def pack(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", SCRIPT, *map(str, arguments)],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def make_wheel(folder: Path, name: str, version: str, *needs: str, size: int = 0) -> None:
    """A wheel that pip can read, with nothing in it but `size` bytes."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        metadata = [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
            *(f"Requires-Dist: {each}" for each in needs),
        ]
        file.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata) + "\n")
        file.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{stem}.dist-info/RECORD", "")
        file.writestr("data", bytes(size))


@pytest.fixture
def index(tmp_path):
    """An index on disk with what is needed; of it one wheel needs torch, and another one a third."""
    folder = tmp_path / "index"
    folder.mkdir()
    for each in listed():
        version = next((it.version for it in each.specifier if it.operator == "=="), "1000.0")
        make_wheel(
            folder, each.name, version, *{"megatron-core": ["torch>=2.6.0"], "rich": ["third"]}.get(each.name, [])
        )
    make_wheel(folder, "third", "1.0")
    return folder


def offline(index: Path) -> dict[str, str]:
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}


def test_what_is_left_out_is_a_requirement():
    """So the script's list is none of its own; networkx comes with torch."""
    names = {each.name for each in listed()}
    assert "torch" in LEFT_OUT < names
    assert "networkx" in {Requirement(each).name for each in importlib.metadata.requires("torch")}


def test_all_that_is_needed_is_packed_for_both_pythons(index, tmp_path):
    """The requirements and what they need, without torch, with sums that hold; the same folder again is refused."""
    folder = tmp_path / "new" / "wheels"
    result = pack(folder, **offline(index))
    assert result.returncode == 0, result.stderr
    packed = {path.name.split("-")[0] for path in folder.glob("*.whl")}
    assert packed == {each.name.replace("-", "_") for each in listed() if each.name not in LEFT_OUT} | {"third"}
    lines = (folder / "requirements.txt").read_text().splitlines()
    assert [Requirement(line) for line in lines] == [each for each in listed() if each.name not in LEFT_OUT]
    summed = (folder / "manifest.txt").read_text().split()[1::2]
    assert sorted([*summed, "manifest.txt"]) == sorted(path.name for path in folder.iterdir())
    check = subprocess.run(["sha256sum", "--check", "--quiet", "manifest.txt"], cwd=folder)
    assert check.returncode == 0 and f"{len(packed)} wheels of 0 MiB for Python 3.11 3.12\n" in result.stdout
    again = pack(folder, **offline(index))
    assert again.returncode == 2 and f"{folder} is there already; name another" in again.stderr


def test_a_package_that_is_left_out_can_be_asked_for(index, tmp_path):
    result = pack(tmp_path / "wheels", "--python", "3.12", "--with", "scipy", **offline(index))
    assert result.returncode == 0, result.stderr
    packed = {path.name.split("-")[0] for path in (tmp_path / "wheels").glob("*.whl")}
    assert "scipy" in packed and not packed & (LEFT_OUT - {"scipy"})


@pytest.mark.parametrize("fault", ["missing", "large"])
def test_no_folder_where_it_is_not_whole(index, tmp_path, fault):
    """A wheel that cannot be had, or more than 64 MiB: an error, no folder, and nothing beside it."""
    if fault == "missing":
        next(index.glob("third-*")).unlink()
    else:
        make_wheel(index, "third", "1.0", size=64 << 20)
    result = pack(tmp_path / "wheels", "--python", "3.12", **offline(index))
    assert result.returncode == 1
    expected = {
        "missing": "error: pip could not bring the wheels for Python 3.12\n",
        "large": f"error: the wheels have {{}} bytes, more than {64 << 20}; pack for one Python: --python 3.12\n",
    }[fault]
    assert re.search(re.escape(expected).replace(r"\{\}", r"\d+") + "$", result.stderr), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize(
    "arguments", [(), ("a", "b"), ("--no-such",), ("a", "--python"), ("a", "--with", "torch")], ids=" ".join
)
def test_wrong_arguments_are_refused(tmp_path, arguments):
    result = pack(*arguments)
    assert result.returncode == 2 and result.stderr.startswith("pack_wheels.sh: error: ")


def distributions_with(name: str) -> list[importlib.metadata.Distribution]:
    """This one and what is installed of those that it needs."""
    found, due = {}, [Requirement(name)]
    while due:
        wanted = due.pop()
        try:
            found[wanted.name] = importlib.metadata.distribution(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # it is for another platform
        for each in map(Requirement, found[wanted.name].requires or ()):
            extras = [{"extra": extra} for extra in ("", *wanted.extras)]
            if each.name not in found and (each.marker is None or any(map(each.marker.evaluate, extras))):
                due.append(each)
    return list(found.values())


@pytest.fixture
def bare(tmp_path):
    """The interpreter of a virtual environment that has torch, what torch needs, and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=120)
    (packages,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    for distribution in distributions_with("torch"):
        for top in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(distribution.locate_file(top)).resolve())
    return tmp_path / "bare" / "bin" / "python"


@pytest.mark.full
def test_a_bare_machine_with_the_wheels_runs_what_gpus_need(bare, tmp_path):
    """Without an index the wheels are installed beside torch; then the tests marked `gpu` are collected, those of the
    same files that need no GPU pass (engines on several ranks among them), and the benchmark of GPUs starts.
    """
    wheels = tmp_path / "wheels"
    result = pack(wheels, "--python", MINOR)
    if "is there a network" in result.stderr or "Could not find a version" in result.stderr:
        pytest.skip(f"pip reaches no index:\n{result.stderr}")
    assert result.returncode == 0, result.stderr

    def run(*command: object, timeout: float = 300) -> str:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        result = subprocess.run(
            [bare, *command],
            cwd=ROOT,
            env={**kept, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    pip = [sys.executable, "-m", "pip", "--python", bare, "install", "--no-input", "--no-index", "--find-links", wheels]
    subprocess.run([*pip, "-r", wheels / "requirements.txt"], check=True, timeout=300)
    mark = re.compile(r"^@pytest\.mark\.gpu", re.MULTILINE)
    marked = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if mark.search(path.read_text()))
    assert "test_nothing_is_replaced_on_cuda" in run("-m", "pytest", "-q", "--collect-only", "-m", "gpu", *marked)
    assert " passed" in run(
        "-m", "pytest", "-q", "-m", "not gpu and not full", "-p", "no:cacheprovider", *marked, timeout=1200
    )
    assert "usage: gpu.py" in run("benchmarks/gpu.py", "--help")
