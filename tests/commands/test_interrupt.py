"""Ctrl-C at any moment of a tool or a program, its imports included: one line at most, and status 130."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer.arguments.command_line import argv
from tests.trainer.arguments.t5_command_line import SMALL_T5
from tests.trainer.run import vision_helper

ROOT = Path(__file__).parents[2]
TOOLS = {  # a library that each imports, and the words with which it does
    "compare_runs": ("megatron.trainer.report.metrics", ["--help"]),
    "convert_checkpoint": ("megatron.documents.command_line", ["--help"]),
    "environment": ("pip", []),
    "grid_search": ("megatron.commands.grid_search.search", ["search", "--help"]),
    "launch": ("torch", ["--help"]),
    "merge_adapter": ("megatron.documents.command_line", ["--help"]),
    "partition": ("megatron.partition", ["--graph", "none"]),
    "plot_memory": ("megatron.trainer.report.metrics", ["--help"]),
    "plot_changes": ("megatron.trainer.report.metrics", ["--help"]),
    "plot_metrics": ("megatron.trainer.report.metrics", ["--help"]),
    "preprocess_data": ("megatron.trainer.arguments", ["--help"]),
    "profile_model": ("rich", ["--help"]),
    "rank_map": ("megatron.pipeline.placement.cost", ["--help"]),
    "schedule": ("megatron.pipeline.program.program", ["--help"]),
    "text_generation": ("torch", ["--load", "none", "--prompt", "a"]),
}
TEXT = [word for word in argv() if word != "--mock-data"] + ["--data-path", "none", "--vocab-file", "none"]
PROGRAMS = {  # a command line of each
    "finetune_bert": [*TEXT, "--num-classes", "2", "--dry-run", "1"],
    "pretrain_bert": TEXT,
    "pretrain_gpt": TEXT,
    "pretrain_t5": SMALL_T5.split(),
    "pretrain_vision_classify": f"{vision_helper.SMALL} --data-path none".split(),
}

# Stops the import of a library where it is likely to be interrupted, and says so.
SLOW = """
import os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STOP_AT"] and not os.path.exists(os.environ["STOPPED"]):
            open(os.environ["STOPPED"], "w").close()
            try:
                time.sleep(60)
            except BaseException:
                raise ImportError("a library that takes any interruption for its own trouble")
sys.meta_path.insert(0, Slow())
"""


def interrupted(command, tmp_path, stop_at):
    """Status and standard error of a command that gets SIGINT while it imports `stop_at`."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    stopped = tmp_path / "stopped"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "STOP_AT": stop_at, "STOPPED": str(stopped)}
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], env=environment, text=True, stdout=subprocess.PIPE, cwd=tmp_path,
        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not stopped.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stopped.exists(), f"{stop_at} is not imported: {process.communicate(timeout=20)}"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    return process.returncode, error


def test_every_tool_is_among_them():
    """But the one that imports nothing slow, which tests/tools/test_hosts.py interrupts."""
    tools = {path.stem for path in (ROOT / "tools").glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    assert tools == {*TOOLS, "hosts"}


@pytest.mark.sample(7)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_imports(tmp_path, tool):
    stop_at, argv = TOOLS[tool]
    status, error = interrupted([ROOT / "tools" / f"{tool}.py", *argv], tmp_path, stop_at)
    assert status == 130, error
    assert error in ("", "ended by SIGINT\n")


def test_every_program_is_among_them():
    """But finetune.py, which has flags of its own."""
    programs = ROOT / "megatron" / "trainer" / "programs"
    doors = {path.stem for path in programs.glob("*.py") if "entry.run(" in path.read_text()}
    assert doors == set(PROGRAMS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("stop_at", ["megatron.trainer.run.entry", "torch"])
def test_a_program_that_imports(tmp_path, program, stop_at):
    status, error = interrupted([ROOT / f"{program}.py", *PROGRAMS[program]], tmp_path, stop_at)
    assert (status, error) == (130, f"{program}.py: ended by SIGINT\n")


def test_a_fork_of_a_job_ends_without_a_word(tmp_path):
    """Such as a worker that reads data: what the job does before its end is not the worker's, nor is the line."""
    code = (
        "import os, sys\nfrom megatron.pipeline import interrupt\n"
        "interrupt.before_exit.append(lambda: open(sys.argv[1], 'a').write(f'{os.getpid()} '))\n"
        "interrupt.end_at_interrupt(says='over')\n"
        "fork = os.fork()\nif fork == 0:\n    os.kill(os.getpid(), 2)\n    os._exit(1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 130\nos.kill(os.getpid(), 2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "acts")], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "over\n")
    assert (tmp_path / "acts").read_text() == f"{process.pid} "
