"""What docstrings, comments and pages name is there: files, folders, errors, and what dotted names lead to."""

import gc
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.docs.project_names import Module, Project, read_module
from tests.test_docs import PAGES, ROOT

NOT_OURS = {
    "megatron/planner/job/software.py": ("torchtitan's", {"norms.py", "components/loss.py"}),
    "tests/planner/published/test_sharded_runs.py": ("torchtitan's", {"benchmarks/llama3_h100_202412_torchtitan.md"}),
    "tests/trainer/arguments/published_command_lines.py": (
        "Megatron-LM's",
        {
            "examples/gpt3/train_gpt3_175b_distributed.sh",
            "examples/pretrain_gpt.sh",
            "examples/pretrain_gpt_distributed_with_mp.sh",
            "docs/llama_mistral.md",
        },
    ),
}
"""File -> whose files it names, and which."""

_WORDS = r"(?:\.\./)*[\w.-]+(?:/[\w.-]+)*"
_SUFFIX = r"\.(?:py|sh|md|jsonl?|yaml|txt|csv|png|html|toml|js|css|gz|pt|npy|bin|safetensors)"
_FILE = re.compile(rf"(?<![\w./*}}>~$:@-]){_WORDS}{_SUFFIX}(?![\w/*{{<-]|\.\w)")
_FOLDER = re.compile(rf"(?<=`){_WORDS}/[\w.-]*(?=`)")
_DOTTED = re.compile(rf"""(?<![\w./@*"'\])}}:-])(?!\S+{_SUFFIX}\b)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?![\w/*-])""")
_RAISED = re.compile(r"\b[Rr]aises? (?:an? )?`?([A-Z]\w*[a-z]\w*)")
_COMMENT = re.compile(r"(?:^|\s)# (.*)", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def stale(text: str, project: Project, file: Module | None = None) -> list[str]:
    """What a text names that is not there; `file`: the source that it is from."""
    paths = [*_FILE.findall(text), *_FOLDER.findall(text)]
    found = [path for path in paths if project.lacks(path)]
    found += [name for name in _DOTTED.findall(text) if project.is_stale(name, file)]
    found += [name for name in _RAISED.findall(text) if not project.is_raised(name)]
    return list(dict.fromkeys(found))  # a path in backticks is found twice


@cache
def this_project() -> tuple[Project, dict[str, Module]]:
    """With the modules by their files."""
    folders = [
        ROOT / name
        for name in ("megatron", "benchmarks", "papers", "tools", "tests", "docs", "examples", "requirements")
    ]
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    files = [path.relative_to(ROOT).as_posix() for path in paths if path.suffix != ".pyc"]
    gc.disable()  # over so many trees it takes longer than they do
    try:
        modules = {
            file: read_module(re.sub(r"(/__init__)?\.py$", "", file).replace("/", "."), (ROOT / file).read_text())
            for file in files
            if file.endswith(".py")
        }
    finally:
        gc.enable()
    return Project(modules.values(), files), modules


def texts() -> Iterator[tuple[str, int, str, Module | None]]:
    """File, line, text, and the module if it is one."""
    for page in [*PAGES, ROOT / "benchmarks" / "README.md"]:
        text = _FENCED.sub(lambda block: "\n" * block[0].count("\n"), page.read_text(encoding="utf-8"))
        for line, each in enumerate(text.splitlines(), start=1):
            yield page.relative_to(ROOT).as_posix(), line, each, None
    for file, module in this_project()[1].items():
        if file.startswith(("megatron/", "benchmarks/", "papers/", "tools/", "tests/")):
            source = (ROOT / file).read_text()
            for line, text in module.texts:
                yield file, line, text, module
            for comment in _COMMENT.finditer(source):
                yield file, source.count("\n", 0, comment.start(1)) + 1, comment[1], module


def test_all_that_is_named_is_there():
    """Nothing stale but what NOT_OURS lists; each of that is still named."""
    project, _ = this_project()
    found = [(file, line, name) for file, line, text, module in texts() for name in stale(text, project, module)]
    ours = [f"{file}:{line} {name}" for file, line, name in found if name not in NOT_OURS.get(file, ("", ()))[1]]
    assert not ours, "\n".join(ours)
    assert {(file, name) for file, (_, names) in NOT_OURS.items() for name in names} == {
        (file, name) for file, _, name in found
    }


def test_all_texts_are_read():
    """Docstrings, comments and pages, thousands of each kind, the words after a comment's start included."""
    kinds = [("page" if module is None else "source") for _, _, _, module in texts()]
    assert kinds.count("page") > 1000 and kinds.count("source") > 5000
    assert any(text.startswith("before torch is imported anywhere") for _, _, text, _ in texts())


@pytest.fixture(scope="module")
def made_up() -> Project:
    sources = {
        "megatron.run": "",
        "megatron.run.loop": (
            "import torch\nfrom typing import NamedTuple\n"
            "from megatron.run.costs import Costs\nfrom torch import nn\n"
            "LIMIT = 3\n"
            "def train(steps): return steps.count\n"
            "class Stage(nn.Module):\n    pass\n"
            "class Report(NamedTuple):\n    loss: float\n"
            "class LoopError(ValueError): pass\n"
        ),
        "megatron.run.costs": (
            "if True:\n    RATE = 2\n"
            "class Costs:\n    forward: float\n    def __init__(self): self.backward = 1\n"
            "class Times(Costs):\n    @property\n    def wait(self): ...\n"
            "def read_costs(): ...\n"
        ),
        "tests.test_loop": "",
    }
    files = ["megatron/run/loop.py", "megatron/run/costs.py", "megatron/run/rates/a100.json", "tests/test_loop.py"]
    return Project([read_module(*each) for each in sources.items()], files)


@pytest.mark.parametrize(
    "text, name",
    [
        ("as in `run/lop.py`", "run/lop.py"),
        ("(see verdict.py)", "verdict.py"),
        ("(`train` in run/command_line.py)", "run/command_line.py"),
        ("by [the loop](../megatron/loop.py)", "../megatron/loop.py"),
        ("tested in `tests/run`", "tests/run"),
        ("files of `megatron/run/sharded/`", "megatron/run/sharded/"),
        ("in `run/rates/h100.json`", "run/rates/h100.json"),
        ("`loop.pretrain` does", "loop.pretrain"),
        ("loop.read_costs() does", "loop.read_costs"),
        ("`run.loop.pretrain`", "run.loop.pretrain"),
        ("megatron.run.loops", "megatron.run.loops"),
        ("`megatron.run.costs.Costs.contention`", "megatron.run.costs.Costs.contention"),
        ("`Costs.contention`", "Costs.contention"),
        ("`Times.contention = 2`", "Times.contention"),
        ("`Report.losses`", "Report.losses"),
        ("`loop.Costs.contention`", "loop.Costs.contention"),
        ("`loop.LEVEL`", "loop.LEVEL"),
        ("`rates.read_costs`", "rates.read_costs"),
        ("raises LostError", "LostError"),
        ("Collective: raise Report on every rank", "Report"),
    ],
)
def test_stale_names_are_found(made_up, text, name):
    """Each kind, in a page and in a source."""
    assert stale(text, made_up) == [name]
    assert stale(text, made_up, made_up.modules["megatron.run.costs"]) == [name]


@pytest.mark.parametrize(
    "text",
    [
        "`run/loop.py`, (loop.py), `megatron/run`, `tests/`, `rates/a100.json` and ../megatron/run/loop.py",
        "`run/NAME.py`, `run/*.py`, `/run/x.py`, `run/jobs.jsonl`, `out/x.json`, `megatron/core/optimizer` and `p/q`",
        "`megatron.run.loop.LIMIT`, `loop.train(3)`, run.loop, `costs.RATE`, e.g. `megatron.run.NAME`",
        "`Costs.forward`, `Costs.backward`, `Times.wait`, `Times.forward`, `Report._replace`, `loop.Costs.forward`",
        "`torch.load`, `megatron.core.pretrain`, `nn.Linear`, `typing.Anything`, `sys.argv`, `self.lost`",
        "`Stage.anything`, `stage.anything` and `report.loss`",
        "raises ValueError, raise a LoopError",
    ],
)
def test_what_is_there_or_anothers_is_not_accused(made_up, text):
    """Of the project by any end of its name, of a library, or of something that may have any attribute."""
    assert stale(text, made_up) == []
    assert stale(text, made_up, made_up.modules["megatron.run.loop"]) == []


def test_a_variable_is_no_module(made_up):
    """In a file with a variable of a module's name only an attribute that no source uses is stale."""
    variable = read_module("megatron.run.other", "def run(loop): loop.finish()")
    project = Project([*made_up.modules.values(), variable])
    assert stale("`loop.finish`, `loop.train`", project, variable) == []
    assert stale("`loop.pretrain`", project, variable) == ["loop.pretrain"]
