"""What a run says of its batches."""

import re

from megatron import backend

backend.install()

from megatron.finetuning.trainer import Report
from megatron.pipeline.runtime.contract.stage import BatchReport
from tests.finetuning import tiny


def test_a_line_is_of_the_batches_since_the_last(tmp_path, capsys):
    """Their losses and the time that they took, wherever evaluations stand, and however late the reports come."""
    args = tiny.arguments(tmp_path, "sequence-classification", "--logging_steps", 2)
    report = Report(args, num_steps=5, steps_per_epoch=2)
    for number, seconds in enumerate((0.1, 0.3, 0.5, 0.7, 0.25)):
        made = BatchReport(number, losses={"loss": 1.0 + number}, grad_norm=1.0, learning_rate=1.0)
        report.batch(made, seconds)
        if number == 2:
            report.evaluation(3, {"loss": 1.0}, 100.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    found = [re.search(r"step +(\d)/5 .* loss ([0-9.]+) .* ([0-9.]+) ms$", line).groups() for line in lines]
    assert found == [("2", "1.5000", "200.0"), ("4", "3.5000", "600.0"), ("5", "5.0000", "250.0")]
