"""How a job starts: the path, the main module, what children import, and errors that are said once."""

import json
import sys
from pathlib import Path

import pytest

from megatron.pipeline import dropin
from megatron.pipeline.dropin import cpu, launcher, origin
from megatron.pipeline.dropin.origin import Origin
from tests.pipeline.dropin import fake_training
from tests.pipeline.dropin.fake_training import fork, launch

CPU = {"CUDA_VISIBLE_DEVICES": ""}
"""The same everywhere, also on a machine with a GPU."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return fake_training.write(tmp_path_factory.mktemp("megatron") / "checkout")


def write(checkout: Path, name: str, text: str) -> str:
    (checkout / name).write_text(text)
    return name


def test_usage(monkeypatch, capsys):
    """Without a script to ask, -h says how to name one; behind a script it is the script's."""
    monkeypatch.setattr(sys, "argv", ["dropin", "-h"])
    launcher.main()
    assert capsys.readouterr().out.startswith("usage: ")


def test_help_of_the_script(checkout):
    """-h behind the script reaches it."""
    done = fork("pretrain_small.py", "-h", num_ranks=1, cwd=checkout, **CPU)
    assert done.returncode == 0 and "usage: pretrain_small.py" in done.stdout and "--num-layers" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no script is named; name one"),
        (["--save", "x"], "--save stands before the script; name the script first"),
        (["absent.py"], "there is no file absent.py in "),
        (["."], "there is no file . in "),
    ],
)
def test_command_line_without_a_script(arguments, sentence):
    """Each way of naming none has its sentence."""
    with pytest.raises(ValueError, match=sentence):
        launcher.script_of(arguments)


def test_path_is_the_scripts(tmp_path):
    """The script's folder takes the place of the working directory, links followed, and the rest stays in its order.
    Where only the working directory had this project, it is last, so that nothing of the user's is hidden.
    """
    (tmp_path / "real").mkdir()
    script = tmp_path / "real" / "train.py"
    script.touch()
    (tmp_path / "linked.py").symlink_to(script)
    here, root = Path("/somewhere"), str(launcher.OUR_ROOT)
    folder = str(script.parent)
    for first in ("", "/somewhere"):
        assert launcher.path_for(tmp_path / "linked.py", [first, "/a", root, "/b"], here) == [folder, "/a", root, "/b"]
    assert launcher.path_for(script, ["/a", root, "/somewhere"], here) == [folder, "/a", root, "/somewhere"]
    for first in ("", root):
        assert launcher.path_for(script, [first, "/a"], launcher.OUR_ROOT) == [folder, "/a", root]


SPAWNS = """\
import inspect, json, multiprocessing, os, pickle, sys
import torch
print('top of', __name__, flush=True)
def function(): ...
class Answer:
    def __init__(self): self.devices = torch.cuda.device_count()
def ask(connection): connection.send(Answer())
if __name__ == '__main__':
    main = sys.modules['__main__']
    print(json.dumps([__file__, sys.argv, sys.path[0], main.function is function,
        pickle.loads(pickle.dumps(function)) is function, inspect.getsource(function), os.getcwd(),
        sorted(name for name in vars(main) if not name.startswith('__'))]), flush=True)
    context = multiprocessing.get_context('spawn')
    ours, its = context.Pipe()
    child = context.Process(target=ask, args=(its,)); child.start()
    print('devices', ours.recv().devices, type(Answer()).__module__); child.join()
    print('status', child.exitcode)
"""


@pytest.mark.full
def test_script_is_the_main_module(checkout, tmp_path):
    """Started from elsewhere, it is `__main__` with its own arguments, file, folder and names, and none of the
    launcher's. A child that it spawns finds its classes, with the layer in place, and does not run its main part.
    """
    script = write(checkout, "spawns.py", SPAWNS)
    done = launch(checkout / script, "--a", "-h", "b c", cwd=tmp_path, **CPU)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the CPU layer is installed") == 1  # the child says nothing
    top, said, *spawned = (line for line in done.stdout.splitlines() if not line.startswith("megatron.pipeline."))
    file, argv, path, *same, source, cwd, names = json.loads(said)
    assert top == "top of __main__" and file == str(checkout / script) and path == str(checkout)
    assert argv == [str(checkout / script), "--a", "-h", "b c"] and cwd == str(tmp_path)
    assert all(same) and source == "def function(): ...\n"
    assert names == [*("Answer", "ask", "function", "inspect", "json", "main", "multiprocessing"),
                     *("os", "pickle", "sys", "torch")]  # fmt: skip
    assert spawned == ["top of __mp_main__", "devices 1 __main__", "status 0"]


def test_scripts_own_error_is_its_own(checkout):
    """An exit status and a traceback pass through; a ValueError of the script is not taken for one of ours."""
    assert fork(write(checkout, "exits.py", "raise SystemExit(7)\n"), num_ranks=1, cwd=checkout, **CPU).returncode == 7
    script = write(checkout, "raises.py", "x = 1\nraise ValueError('its own')\n")
    done = fork(script, num_ranks=1, cwd=checkout, **CPU)
    assert done.returncode == 1 and 'raises.py", line 2, in <module>' in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: its own")


def test_error_is_said_once(tmp_path):
    """Two ranks without a Megatron-LM: one sentence, status 2, and no process group."""
    done = fork(write(tmp_path, "train.py", "raise SystemExit('ran')\n"), num_ranks=2, cwd=tmp_path, **CPU)
    assert done.returncode == 2
    assert done.stderr.startswith("megatron.pipeline.dropin: error: ") and done.stderr.count("\n") == 1
    assert "there is no Megatron-LM" in done.stderr


def test_something_is_missing_that_their_modules_import(monkeypatch):
    """A sentence in place of a traceback, from whichever module."""
    monkeypatch.setattr(dropin, "_installed", False)
    monkeypatch.setattr(origin, "find", lambda: Origin(Path("/x/megatron/training"), Path("/x/megatron/core"), None))
    monkeypatch.setattr(origin, "check", lambda found: None)
    monkeypatch.setattr(cpu, "install", lambda **options: exec("import absent_package"))
    with pytest.raises(ValueError, match=r"^Megatron-LM in /x imports absent_package, which"):
        dropin.install(quiet=True)


@pytest.mark.full
def test_installed_by_an_import(checkout):
    """Two lines at the top of the script do the same without the launcher; a second call does and says nothing."""
    text = (checkout / "pretrain_small.py").read_text()
    importing = "import megatron.pipeline.dropin\nfor _ in range(2):\n    megatron.pipeline.dropin.install()\n"
    script = write(checkout, "imports.py", importing + text.partition('"""\n\n')[2])
    done = fork(script, "--train-iters", 2, num_ranks=1, cwd=checkout, through_launcher=False, **CPU)
    assert done.returncode == 0, done.stderr
    assert len(fake_training.losses(done.stdout)) == 2
    assert done.stdout.count("megatron.pipeline.dropin: megatron.training of ") == 1


@pytest.mark.full
def test_training_on_a_cpu(checkout, tmp_path):
    """Their training, which asks for CUDA, nccl and a compiler, trains, evaluates and saves on two stages, and goes on
    from there."""
    arguments = ("pretrain_small.py", "--pipeline-model-parallel-size", 2, "--eval-interval", 2)
    whole = launch(*arguments, "--save", tmp_path, "--save-interval", 2, num_ranks=2, cwd=checkout, **CPU)
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.count("CPU layer is installed") == 1
    assert whole.stdout.count("validation loss") == 3
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    rest = fork(*arguments, "--load", tmp_path, num_ranks=2, cwd=checkout, **CPU)
    assert rest.returncode == 0, rest.stderr
    expected = fake_training.losses(whole.stdout)
    assert [iteration for iteration, *_ in expected] == [1, 2, 3, 4]
    assert fake_training.losses(rest.stdout) == expected[2:]


def test_environment_is_left_alone(checkout):
    """With CUDA, install() neither changes the environment nor installs anything of the CPU layer. Without, it would
    come too late behind that: megatron.core has bound names of torch.cuda, and a sentence says what to do.
    """
    script = write(
        checkout,
        "unchanged.py",
        "import os, sys, torch\n"
        "before = dict(os.environ)\n"
        "torch.cuda.is_available = lambda: True\n"
        "count = torch.cuda.device_count\n"
        "from megatron import backend\n"
        "import megatron.pipeline.dropin as dropin\n"
        "torch.compile = lambda function=None, **_: function or (lambda each: each)\n"  # seconds each, and not run here
        "dropin.install()\n"
        "import megatron.training.initialize as theirs\n"
        "assert os.environ == before and torch.cuda.device_count is count and not backend.is_installed()\n"
        "assert theirs._compile_dependencies.__module__ == theirs.__name__\n"
        "print('unchanged')\n"
        "torch.cuda.is_available, dropin._installed = lambda: False, False\n"
        "dropin.install(quiet=True)\n",
    )
    done = fake_training.python(script, cwd=checkout, **CPU)
    assert done.stdout.splitlines()[-1:] == ["unchanged"], done.stderr
    assert "ValueError: megatron.core was imported before megatron.pipeline.dropin.install()" in done.stderr


REAL = (
    *("--num-layers", 4, "--hidden-size", 64, "--num-attention-heads", 4, "--seq-length", 32),
    *("--max-position-embeddings", 32, "--micro-batch-size", 2, "--global-batch-size", 8, "--train-iters", 4),
    *("--lr", 1e-3, "--min-lr", 1e-4, "--lr-decay-style", "linear", "--lr-decay-iters", 20, "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", 128, "--transformer-impl", "local"),
    *("--hidden-dropout", 0, "--attention-dropout", 0, "--pipeline-model-parallel-size", 2, "--log-interval", 1),
    *("--eval-iters", 1, "--eval-interval", 1000, "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
)
"""A job for the `pretrain_gpt.py` of Megatron-LM that needs no GPU, no kernels and no files."""


def test_real_training_on_a_cpu(tmp_path):
    """Megatron-LM's own pretrain_gpt.py, unchanged: it trains on two stages, saves, and goes on from there."""
    checkout = fake_training.real_checkout()
    whole = launch("pretrain_gpt.py", *REAL, "--save", tmp_path, "--save-interval", 2, num_ranks=2, cwd=checkout, **CPU)
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    rest = launch("pretrain_gpt.py", *REAL, "--load", tmp_path, num_ranks=2, cwd=checkout, **CPU)
    assert rest.returncode == 0, rest.stderr
    expected = fake_training.losses(whole.stdout)
    assert [iteration for iteration, *_ in expected] == [1, 2, 3, 4]
    # Their log's second line behind a start averages two iterations' losses; the norm is its own iteration's.
    resumed = fake_training.losses(rest.stdout)
    assert resumed[0] == expected[2] and resumed[1][2] == expected[3][2]
