"""Installing the project beside the wheel of megatron-core: neither hides the other, and what users run comes along."""

import functools
import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron.commands.__main__ import COMMANDS
from tests.commands.search_argv import GPT, QUICK

ROOT = Path(__file__).resolve().parents[1]
PIP_OPTIONS = ("--no-deps", "--no-build-isolation", "--no-input", "--quiet", "--disable-pip-version-check")
PROGRAMS = [
    f"megatron.trainer.programs.{path.stem}"
    for path in (ROOT / "megatron" / "trainer" / "programs").glob("*.py")
    if path.stem != "__init__"
]
IMPORT_BOTH = """
from megatron import backend
backend.install()
import megatron.core, megatron.pipeline
print(megatron.pipeline.__path__[0])
print(megatron.core.__path__[0])
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package's sources in a folder of their own, since building writes beside them."""
    target = tmp_path_factory.mktemp("sources") / "copy"
    shutil.copytree(ROOT / "megatron", target / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "requirements", target / "requirements")
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def installed(copy, tmp_path_factory):
    """By option of `pip install`: the interpreter of a virtual environment that sees what is installed here, without a
    network, and has the package."""

    @functools.cache
    def install(option: str | None = None) -> str:
        folder = tmp_path_factory.mktemp("environment")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=120)
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        found = (path for path in sys.path if path.endswith("site-packages"))
        (packages / "parent.pth").write_text("\n".join(found) + "\n")
        python = str(folder / "venv" / "bin" / "python")
        run(python, "-I", "-m", "pip", "install", *PIP_OPTIONS, *filter(None, [option]), str(copy), cwd=folder)
        return python

    return install


def run(*command: str, cwd: Path, status: int = 0) -> str:
    # -I: neither PYTHONPATH nor the working directory may make the packages importable.
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout if status == 0 else result.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "option", [pytest.param("--editable", marks=pytest.mark.full), None], ids=["editable", "regular"]
)
def test_both_packages_can_be_imported(copy, installed, tmp_path, option):
    """After `pip install` in either way, megatron.pipeline is the project's and megatron.core the wheel's."""
    python = installed(option)
    ours, core = run(python, "-I", "-c", IMPORT_BOTH, cwd=tmp_path).splitlines()
    expected = copy if option else Path(python).parents[1]
    assert Path(ours).is_relative_to(expected)
    assert "site-packages" in core and not Path(core).is_relative_to(copy)


@pytest.mark.full
def test_wheel_holds_our_subpackages_only(copy, tmp_path):
    """The wheel has every subpackage, no megatron/__init__.py, nothing of megatron.core, and names its needs."""
    run(sys.executable, "-m", "pip", "wheel", *PIP_OPTIONS, "-w", str(tmp_path), str(copy), cwd=tmp_path)
    (wheel,) = tmp_path.glob("megatron_pipeline-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    sources = {
        str(path.relative_to(ROOT))
        for kind in ("py", "json", "yaml", "css", "js")
        for path in (ROOT / "megatron").rglob(f"*.{kind}")
    }
    assert sources <= names
    assert "megatron/__init__.py" not in names
    assert not any(name.startswith("megatron/core/") for name in names)
    assert "Requires-Dist: torch>=2.6" in metadata
    core = [line for line in metadata.splitlines() if "megatron" in line and line.startswith("Requires-Dist:")]
    assert core == ['Requires-Dist: megatron-core==0.16.1; extra == "core"']


def test_commands_and_programs_need_no_checkout(installed, tmp_path):
    """After `pip install` the console script has every command, and torchrun's `-m` finds every training program. What
    a search writes starts from a checkout, and asks for one."""
    python = installed()
    loaded = "print(all(callable(each.load()) for each in distribution('megatron-pipeline').entry_points))"
    assert run(python, "-I", "-c", f"from importlib.metadata import distribution; {loaded}", cwd=tmp_path) == "True\n"
    console = (python, "-I", str(Path(python).parent / "megatron-pipeline"))
    assert run(*console, "schedule", "check", "--schedule", "2bw", cwd=tmp_path).startswith("correct\n")
    assert "COMMAND: invalid choice: 'schedul'" in run(*console, "schedul", cwd=tmp_path, status=2)
    argv = map(str, [*GPT, *QUICK, "--cluster", "V100-16", "--output", "plan"])
    run(*console, "grid_search", "search", *argv, cwd=tmp_path)
    needs = 'cd "${PIPELINE_HOME:?has to name a checkout'
    assert needs in (tmp_path / "plan" / "best.sh").read_text()
    for program in (*PROGRAMS, "megatron.finetuning.finetune"):
        error = run(python, "-I", "-m", program, "--no-such-flag", cwd=tmp_path, status=2)
        assert error.startswith(f"{program.rpartition('.')[2]}.py: error: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_main(name):
    """What the console script and the doors call."""
    assert callable(importlib.import_module(f"megatron.commands.{name}").main)


def test_the_doors_are_one_file():
    """tools/COMMAND.py is the same for every command, and there is one for each."""
    doors = {path.stem: path.read_text() for path in (ROOT / "tools").glob("*.py")}
    assert len({doors[name] for name in COMMANDS}) == 1
    assert {name for name, text in doors.items() if text == doors["schedule"]} == set(COMMANDS)
