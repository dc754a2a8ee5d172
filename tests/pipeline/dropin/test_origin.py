"""Where a job's Megatron-LM comes from: read in files that stand for it, with nothing of them run."""

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

from megatron.pipeline.dropin import origin
from megatron.pipeline.dropin.origin import Origin
from megatron.pipeline.start_up.core_version import core_version
from tests.pipeline.dropin import fake_training


def package(folder: Path, *, version: str | None = None, text: str = "raise SystemExit('imported')\n") -> Path:
    """A package that ends whoever imports it."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)
    if version is not None:
        names = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        (folder / "package_info.py").write_text("".join(f"{name} = {number}\n" for name, number in names))
    return folder


def training(root: Path, **files: str | None) -> Path:
    """A `megatron.training` that has what is replaced; `files` gives others their text, None for no file."""
    folder = package(root / "megatron" / "training")
    texts = {
        "arguments": "def add_megatron_arguments(parser): ...\ndef parse_args(): ...\ndef validate_args(args): ...\n",
        "checkpointing": "def generate_state_dict(): ...\ndef _load_base_checkpoint(): ...\n",
        "training": "import os\nfrom x import get_forward_backward_func, load_checkpoint, save_checkpoint\n"
        "def setup_model_and_optimizer(): ...\ndef train(): ...\n",
        **files,
    }
    for name, text in texts.items():
        if text is not None:
            (folder / f"{name}.py").write_text(text)
    return folder


def found(*roots: Path) -> list[str]:
    """What `find`, `check` and `notes` say in a process whose path begins with these folders."""
    program = textwrap.dedent(
        """
        import sys
        from megatron.pipeline.dropin import origin
        try:
            it = origin.find()
            origin.check(it)
            print(it.training, it.core, it.version, *origin.notes(it), sep="\\n")
        except ValueError as error:
            print(error)
        print(sorted(name for name in sys.modules if name.startswith(("megatron.core", "megatron.training", "torch"))))
        """
    )
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (*roots, fake_training.ROOT)))}
    done = fake_training.python("-c", program, cwd=Path.cwd(), **environment)
    assert done.returncode == 0, done.stderr
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    return lines


def test_checkout_is_found_and_nothing_of_it_imported(tmp_path):
    """Training and core come from the folder that is first on the path, in a Python that has a megatron-core, too."""
    package(tmp_path / "megatron" / "core", version="0.16.3")
    training(tmp_path)
    home = tmp_path / "megatron"
    assert found(tmp_path) == [str(home / "training"), str(home / "core"), "(0, 16, 3)"]


def test_training_beside_the_wheels_core(tmp_path):
    """A folder with training only takes the core that is installed; a wheel's training lies beside its core."""
    training(tmp_path)
    lines = found(tmp_path)
    assert lines[0] == str(tmp_path / "megatron" / "training")
    assert "site-packages" in lines[1] and lines[2].startswith("(0, ")


def test_without_training(tmp_path):
    """Where nothing has it, where a folder of that name is no package, and where it is found in no path entry."""
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    for roots in ((), (tmp_path,)):
        (line,) = found(*roots)
        assert line.startswith("there is no Megatron-LM: ") and "PYTHONPATH=/path/to/Megatron-LM" in line


def test_remedy_names_the_checkout_that_the_script_lies_in(tmp_path, monkeypatch):
    """As for a script in examples/, which would append its checkout to the path only when it runs."""
    training(tmp_path)
    script = tmp_path / "examples" / "vision" / "train.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(ValueError, match=f"PYTHONPATH={tmp_path}$"):
        origin.find()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {"training": "def train(): ...\n"},
            "training.py has no get_forward_backward_func, setup_model_and_optimizer, load_checkpoint, "
            "save_checkpoint, which",
        ),
        ({"arguments": ""}, "arguments.py has no add_megatron_arguments, parse_args, validate_args, which"),
        ({"training": None}, "training.py has no get_forward_backward_func"),
        ({"training": "def train(:\n"}, "in line 1; use the Python"),  # of a Megatron-LM for a newer one
    ],
)
def test_training_of_someone_else(files, sentence, tmp_path):
    """A megatron.training without the functions that are replaced is refused, with their names."""
    training(tmp_path, **files)
    (line,) = found(tmp_path)
    assert sentence in line


def test_names_are_seen_where_they_are_bound(tmp_path):
    """Imports, also under another name or in a `try`, assignments, definitions in an `if`; not what is inside a
    function or imported as something else."""
    text = """
        import a.b
        from c import d as e, f
        try:
            from g import h
        except ImportError:
            h = None
            i = j = 1
        else:
            k = 2
        finally:
            l = 3
        if a:
            def m():
                n = 1
        else:
            class o: p = 1
        with a as q:
            async def r(): ...
    """
    file = tmp_path / "module.py"
    file.write_text(textwrap.dedent(text))
    assert origin._names_at_top(file) == set(["a", "e", "f", "h", "i", "j", "k", "l", "m", "o", "q", "r"])


def test_core_from_another_root(tmp_path):
    """A checkout whose own core lies behind another one on the path is refused; PYTHONPATH mends it."""
    package(tmp_path / "first" / "megatron" / "core", version="0.20.0")
    package(tmp_path / "checkout" / "megatron" / "core", version="0.16.1")
    training(tmp_path / "checkout")
    (line,) = found(tmp_path / "first", tmp_path / "checkout")
    assert f"megatron.core from {tmp_path / 'first'}, although {tmp_path / 'checkout'} has one" in line
    assert line.endswith(f"PYTHONPATH={tmp_path / 'checkout'}")
    assert len(found(tmp_path / "checkout", tmp_path / "first")) == 3


def test_without_core(tmp_path, monkeypatch):
    """A checkout of which only training was copied, in a Python without megatron-core."""
    folders = {"megatron.training": tmp_path, "megatron.core": None}
    monkeypatch.setattr(origin, "_package", folders.get)
    with pytest.raises(ValueError, match=r"there is no megatron\.core; take a whole checkout"):
        origin.find()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        *(((0, minor, 0), []) for minor in (14, 15, 16, 20)),
        ((0, 18, 0), ["core 0.18.0 has not been run with these schedules (0.14, 0.15, 0.16 and 0.20 have); c"]),
        (None, ["megatron.core of unknown version has not been run"]),
    ],
)
def test_versions_that_were_not_run_are_noted(version, said):
    """Those that were run are not."""
    notes = list(origin.notes(Origin(Path("/x/megatron/training"), Path("/x/megatron/core"), version)))
    assert len(notes) == len(said)
    assert all(part in note for part, note in zip(said, notes, strict=True))


def test_version_that_lacks_what_is_called(tmp_path):
    """It is refused by name, before anything of it is imported, and nothing else is said of it."""
    package(tmp_path / "megatron" / "core", version="0.13.1")
    training(tmp_path)
    (line,) = found(tmp_path)
    assert line == (
        f"megatron.core 0.13.1 of {tmp_path} is too old: schedules call what it has from 0.14 on; use a newer "
        "Megatron-LM"
    )


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("import absent_package.inner", r"imports absent_package, which .*python\S* has not; pip install absent_"),
        ("raise ModuleNotFoundError(name='yaml')", "imports yaml, which .*; pip install pyyaml$"),
        ("from typing import newest", r"needs a newer Python than 3\.\d+ \(cannot import .*\); use Python >=3.99$"),
        ("from torch import newest", r"cannot be imported \(cannot import name 'newest' from 'torch'.*; install"),
    ],
)
def test_what_it_imports_and_is_not_there(statement, sentence, tmp_path):
    """One sentence: what to install, or which Python to use."""
    (tmp_path / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.99"\n')
    where = Origin(tmp_path / "megatron" / "training", tmp_path / "megatron" / "core", (0, 20, 0))
    with pytest.raises(ImportError) as raised:
        exec(statement)
    said = origin.explain(where, raised.value)
    assert said.startswith(f"Megatron-LM in {tmp_path} ") and re.search(sentence, said)


def test_version_that_does_not_say(tmp_path):
    """No file, another file's text, or a number that is computed: unknown."""
    assert core_version(tmp_path) is None
    file = tmp_path / "package_info.py"
    for text in ("MAJOR = 0\nMINOR = 16\n", "MAJOR = 0\nMINOR = 8 + 8\nPATCH = 1\n", "MAJOR = (\n"):
        file.write_text(text)
        assert core_version(tmp_path) is None
    file.write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = 'rc0'\n")
    assert core_version(tmp_path) == (0, 16, 1)


def test_real_checkout():
    """The user's Megatron-LM is one whose functions can be replaced, and all of it is its own."""
    checkout = fake_training.real_checkout().resolve()
    home = checkout / "megatron"
    assert found(checkout)[:2] == [str(home / "training"), str(home / "core")]
