"""What a run says of its batches."""

import re
import time

import pytest

from megatron import backend

backend.install()

from megatron.finetuning.report import Report
from megatron.pipeline.runtime.stage import BatchReport
from tests.finetuning import tiny


def test_steps_do_not_take_the_time_of_what_is_between_them(tmp_path, capsys):
    """An evaluation and a checkpoint in the middle of an interval; the steps before it count."""
    args = tiny.arguments(tmp_path, "sequence-classification", "--logging_steps", 2)
    report = Report(args, num_steps=2, steps_per_epoch=2)
    for number in range(2):
        time.sleep(0.1)
        report.batch(BatchReport(number, losses={"loss": 1.0}, grad_norm=1.0, learning_rate=1.0), 0.1)
        if number == 0:
            time.sleep(1.0)
            report.evaluation(1, {"loss": 1.0}, 0.6)
            report.checkpoint(1, 0.4)
    output = capsys.readouterr().out
    assert "checkpoint-1 took 0.4 s" in output
    assert float(re.search(r"([0-9.]+) ms", output)[1]) == pytest.approx(100, abs=40)
