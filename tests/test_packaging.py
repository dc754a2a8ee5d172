"""Installing the project beside the wheel of megatron-core: neither hides the other."""

import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIP_OPTIONS = ("--no-deps", "--no-build-isolation", "--no-input", "--quiet", "--disable-pip-version-check")
IMPORT_BOTH = """
from megatron import backend
backend.install()
import megatron.core, megatron.pipeline
print(megatron.pipeline.__path__[0])
print(megatron.core.__path__[0])
"""


@pytest.fixture
def copy(tmp_path):
    """The package's sources in a folder of their own, since building writes beside them."""
    target = tmp_path / "copy"
    shutil.copytree(ROOT / "megatron", target / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "requirements", target / "requirements")
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture
def python(tmp_path):
    """A virtual environment's interpreter that sees what is installed here, without a network."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "parent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return str(tmp_path / "venv" / "bin" / "python")


def run(*command: str, cwd: Path) -> str:
    # -I: neither PYTHONPATH nor the working directory may make the packages importable.
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "option", [pytest.param("--editable", marks=pytest.mark.full), None], ids=["editable", "regular"]
)
def test_both_packages_can_be_imported(copy, python, tmp_path, option):
    """After `pip install` in either way, megatron.pipeline is the project's and megatron.core the wheel's."""
    source = [option, str(copy)] if option else [str(copy)]
    run(python, "-I", "-m", "pip", "install", *PIP_OPTIONS, *source, cwd=tmp_path)
    ours, core = run(python, "-I", "-c", IMPORT_BOTH, cwd=tmp_path).splitlines()
    expected = copy if option else tmp_path / "venv"
    assert Path(ours).is_relative_to(expected)
    assert "site-packages" in core and not Path(core).is_relative_to(copy)


def test_wheel_holds_our_subpackages_only(copy, tmp_path):
    """The wheel has every subpackage, no megatron/__init__.py, nothing of megatron.core, and names its needs."""
    run(sys.executable, "-m", "pip", "wheel", *PIP_OPTIONS, "-w", str(tmp_path), str(copy), cwd=tmp_path)
    (wheel,) = tmp_path.glob("megatron_pipeline-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron").rglob("*.py")}
    assert sources <= names
    assert "megatron/__init__.py" not in names
    assert not any(name.startswith("megatron/core/") for name in names)
    assert "Requires-Dist: torch>=2.6" in metadata and "Requires-Dist: megatron-core==0.16.1" in metadata
