"""Dry runs in this process."""

import json

import pytest

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args
from megatron.trainer.dry_run.dry_run import run_dry


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher's environment, as on a laptop."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_words(capsys, tmp_path):
    """Run words dry; returns exit status, standard output, error output, and the JSON, if there is one."""

    def run(given: list[str], **options) -> tuple[int, str, str, dict]:
        file = tmp_path / "dry.json"
        file.unlink(missing_ok=True)
        status = run_dry(parse_args([*given, "--dry-run-json", str(file)], **options), "pretrain_gpt.py")
        return status, *capsys.readouterr(), json.loads(file.read_text()) if file.exists() else {}

    return run
