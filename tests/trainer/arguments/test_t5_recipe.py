"""Megatron-LM's example of a T5, as it is published."""

import re
from pathlib import Path

import pytest

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args
from megatron.trainer.dry_run.dry_run import run_dry
from tests.trainer.arguments.t5_command_line import defaults

RECIPE = Path(__file__).with_name("recipes") / "t5_220m.txt"


@pytest.mark.parametrize(
    "flags", ["", "--pipeline-model-parallel-size 4 --pipeline-schedule 2bw --micro-batch-size 16"]
)
def test_a_dry_run_passes(capsys, monkeypatch, tmp_path, flags):
    """As written, and on four stages under 2bw: proved and estimated, with the parameters that its name says."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    lines = [line for line in RECIPE.read_text().splitlines() if not line.startswith("#")]
    argv = [*" ".join(lines).split(), "--pipeline-schedule", "flush", "--dry-run", "8", *flags.split()]
    assert run_dry(parse_args(argv, defaults=defaults()), "pretrain_t5.py") == 0
    out, _ = capsys.readouterr()
    assert "proved for any number of batches" in out
    (billions,) = re.findall(r"model: (\S+) billion parameters", out)
    assert float(billions) == pytest.approx(0.22 if not flags else 0.22 + 0.0236, rel=0.02)  # with the tied copy
