"""Fine-tuning that goes on without lost ranks: processes of real jobs die and stop, and nothing of the training is
lost."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.finetuning.arguments import changed, parse_args, require_gloo
from megatron.finetuning.lost_ranks import refusal
from megatron.finetuning.plan import planned
from megatron.pipeline.simulate.timeline import Timeline
from tests.finetuning import cases, lora, tiny
from tests.finetuning.test_adapters import CAUSAL, LLAMA
from tests.finetuning.test_adapters import run as run_adapter
from tests.finetuning.test_runs import CLASSES
from tests.finetuning.test_runs import run as run_whole
from tests.reliability import launch
from tests.trainer.run import lost_rank_jobs

REPLICAS = ["--data_parallel_size", 2]
PROGRAM = Path(__file__).with_name("losing_ranks.py")


def run(folder: Path, task: str, argv: list, losses: list, *, max_restarts: int = 0) -> lost_rank_jobs.Finished:
    """A job of four ranks that goes on without lost ranks. `losses`: as losing_ranks.py has them."""
    started = [sys.executable, str(launch.FORKING_LAUNCHER), "--nproc-per-node", "4"]
    started += ["--max-restarts", str(max_restarts), str(PROGRAM), *tiny.command(folder, task, *argv)]
    started += ["--output_dir", "out", "--metrics_file", "metrics.jsonl", "--logging_steps", "1"]
    started += ["--go_on_without_lost_ranks", "--failure_timeout", str(lost_rank_jobs.TIMEOUT)]
    place = folder / "job"
    place.mkdir()
    return lost_rank_jobs.run_command(place, started, losses)


def numbers(lines: list[dict]) -> dict[tuple[int, str], float]:
    """(step, name) -> value. What is recorded twice has to be the same."""
    found: dict[tuple[int, str], float] = {}
    for line in lines:
        for name, value in line.items() if "step" in line else ():
            if not name.endswith("time_ms"):
                value = -1.0 if value is None else value  # an overflow has no norm
                assert found.setdefault((line["step"], name), value) == pytest.approx(value, rel=1e-6)
    return found


def assert_nothing_lost(
    job: lost_rank_jobs.Finished,
    expected: cases.Outcome,
    written_by: Callable[[], dict[str, torch.Tensor]],
    *,
    tolerance: float = 2e-6,
) -> None:
    """It ended well, and all that it records and writes is as without a loss."""
    job.outcome.assert_succeeded()
    written = written_by()
    assert numbers(job.records) == pytest.approx(numbers(expected.lines), rel=tolerance), job.outcome.output
    assert written.keys() == expected.weights.keys()
    for name, weights in expected.weights.items():
        torch.testing.assert_close(written[name], weights, rtol=0, atol=tolerance, msg=name)
    longest = job.longest_recovery()
    assert longest < lost_rank_jobs.TIMEOUT + lost_rank_jobs.MARGIN, job.outcome.output


def test_adapters_lose_nothing(tmp_path):
    """LoRA under 2bw with dropout. Rank 0 has no sums of a batch with which others have stepped, and one of those is
    killed; its place is taken by a new process, which gets adapters, moments and position. Then one is stopped, and
    rank 0, which writes, is killed before a checkpoint has its name: the others write it. A run without any loss goes
    on from there."""
    losses = [
        [0, "without sums", 3, "broken"],
        [3, "stepped", 3, "SIGKILL"],
        [1, "backward", 5, "newcomer"],
        [1, "chain", 8, "SIGSTOP"],
        [0, "commit", 2, "SIGKILL"],
    ]
    base = lora.llama_folder(tmp_path)
    argv = ["--model_name_or_path", base, "--lora_r", 4, "--target_modules", *LLAMA, "--lora_dropout", 0.1]
    argv += ["--pipeline_schedule", "2bw", "--gradient_accumulation_steps", 2, "--no_group_texts"]
    argv += ["--num_train_epochs", 5, "--learning_rate", 1e-2, "--adam_epsilon", 1e-4, "--save_steps", 4]
    argv += ["--do_train", "--do_eval", "--eval_steps", 4, "--early_stopping_patience", 3]
    argv += ["--validation_file", tiny.data_file(tmp_path, CAUSAL, num_samples=7, seed=3)]
    argv += ["--partition", cases.partition(tmp_path, CAUSAL, (0, 1), *argv), *REPLICAS]
    expected = run_adapter(tmp_path, "undisturbed", *argv, task=CAUSAL, ranks=4)
    job = run(tmp_path, CAUSAL, argv, losses, max_restarts=1)
    out = tmp_path / "job" / "out"
    assert_nothing_lost(job, expected, lambda: cases.adapter_of(out, CAUSAL))
    assert [moment.rank for moment in job.moments if moment.is_loss] == [3, 1, 0], job.outcome.output
    changes = {tuple(each["lost_ranks"]): each for each in job.records if "lost_ranks" in each}
    assert {("3",), ("1",), ("0",)} <= changes.keys() and "rank 3 is back" in job.outcome.output
    assert not list(out.glob(".*")), "a save that was broken off leaves nothing"
    begun = shutil.copytree(out / "checkpoint-8", tmp_path / "rest" / "checkpoint-8")
    rest = run_adapter(tmp_path, "rest", *argv, "--resume_from_checkpoint", begun, task=CAUSAL, ranks=4)
    assert rest.losses == pytest.approx(expected.losses[8:], rel=2e-6) and len(rest.losses) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "tolerance"), [([], 2e-6), (["--bf16"], 5e-3), (["--fp16", "--initial_loss_scale", 256], 5e-3)]
)
def test_whole_models_lose_nothing(tmp_path, precision, tolerance):
    """Full fine-tuning under flush, two stages on each rank, and a shorter batch at the end of each epoch, for which
    the program without the lost ranks is made anew. The last loss comes while the model is written. Gradients of 16
    bits are rounded after other sums."""
    losses = [[1, "forward", 2, "SIGKILL"], [2, "finish", 1, "SIGKILL"]]
    train = tiny.data_file(tmp_path, CLASSES, num_samples=14)
    argv = [*precision, "--train_file", train, "--pipeline_schedule", "flush", "--gradient_accumulation_steps", 2]
    argv += ["--num_train_epochs", 3, "--learning_rate", 1e-3, "--adam_epsilon", 1e-4]
    argv += ["--partition", cases.partition(tmp_path, CLASSES, (0, 1, 0, 1), *argv), *REPLICAS]
    expected = run_whole(tmp_path, "undisturbed", *argv, ranks=4)
    job = run(tmp_path, CLASSES, argv, losses)
    assert_nothing_lost(job, expected, lambda: cases.weights_of(tmp_path / "job" / "out", CLASSES), tolerance=tolerance)
    assert [moment.rank for moment in job.moments if moment.is_loss] == [1, 2], job.outcome.output
    assert not list((tmp_path / "job" / "out").glob(".*"))


@pytest.mark.full
def test_a_new_process_has_the_reference_of_preferences(tmp_path):
    """DPO compares with log-probabilities of the model that the run began with, which a new process cannot compute. The
    picture shows the ranks that are left."""
    losses = [[0, "forward", 2, "SIGKILL"], [1, "backward", 3, "newcomer"], [2, "forward", 5, "SIGKILL"]]
    argv = ["--pipeline_schedule", "flush", "--num_train_epochs", 2, "--learning_rate", 1e-3, "--adam_epsilon", 1e-4]
    argv += ["--partition", cases.partition(tmp_path, "dpo", (0, 1), *argv), *REPLICAS]
    expected = run_whole(tmp_path, "undisturbed", *argv, task="dpo", ranks=4)
    job = run(tmp_path, "dpo", [*argv, "--pipeline_timeline", "drawn"], losses, max_restarts=1)
    assert_nothing_lost(job, expected, lambda: cases.weights_of(tmp_path / "job" / "out", "dpo"))
    assert "rank 0 is back" in job.outcome.output
    assert {*Timeline.load(tmp_path / "job" / "drawn" / "measured.json").rank_of_stage} == {0, 1, 2}


@pytest.mark.full
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_a_rank_is_lost_when_all_is_written(tmp_path, what):
    """The others end well, and the launcher waits for no process that is only stopped."""
    argv = ["--pipeline_schedule", "flush", "--partition", cases.partition(tmp_path, CLASSES, (0, 1))]
    job = run(tmp_path, CLASSES, [*argv, *REPLICAS], [[1, "end", 1, what]])
    job.outcome.assert_succeeded()
    assert [moment.rank for moment in job.moments if moment.is_loss] == [1]
    assert cases.weights_of(tmp_path / "job" / "out", CLASSES)


@pytest.mark.full
def test_an_error_of_all_ranks_starts_no_new_process(tmp_path):
    """A loss that is not finite is found by all of them."""
    argv = ["--pipeline_schedule", "flush", "--learning_rate", 1e25, "--optim", "sgd", "--max_grad_norm", 0]
    argv += ["--partition", cases.partition(tmp_path, CLASSES, (0, 1), *argv), *REPLICAS]
    job = run(tmp_path, CLASSES, argv, [], max_restarts=2)
    job.outcome.assert_failed_clearly("is not finite", "lower --learning_rate")
    assert "new process" not in job.outcome.output, job.outcome.output


@pytest.mark.full
def test_a_job_without_a_stage_ends(tmp_path):
    """Both ranks of a stage are lost: the job ends, and says why."""
    argv = ["--pipeline_schedule", "flush"]
    argv += ["--partition", cases.partition(tmp_path, CLASSES, (0, 1), *argv), *REPLICAS]
    job = run(tmp_path, CLASSES, argv, [[1, "forward", 2, "SIGKILL"], [3, "backward", 2, "SIGKILL"]])
    job.outcome.assert_failed_clearly("finetune.py: error: ", "every replica has lost rank 1, so nobody holds")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--minimum_speed", "0.5"], "--minimum_speed is for --go_on_without_lost_ranks"),
        (["--go_on_without_lost_ranks", "--pipeline_schedule", "flush"], "a run with one replica leaves nobody"),
        (["--go_on_without_lost_ranks", "--data_parallel_size", "2"], "ftpipe or pipedream steps each stage by itself"),
        (["--go_on_without_lost_ranks", "--data_parallel_size", "2", "--pipeline_schedule", "l2l"],
         "weights on the host"),
        (["--go_on_without_lost_ranks", "--data_parallel_size", "2", "--pipeline_schedule", "flush", "--do_eval",
          "--validation_file", "F"], "a run with nothing to train"),
    ],
)  # fmt: skip
def test_refused_flags(tmp_path, argv, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_args(["--model_name_or_path", "M", "--task", CLASSES, "--train_file", "F", "--output_dir", "O", *argv])


def test_refused_plans(tmp_path):
    """NCCL; a shared parameter whose value goes from stage to stage; batch norm."""
    argv = ["--pipeline_schedule", "flush"]
    for task, sentence in (("text-to-text", "stages 0 and 1 share a trained parameter"), (CLASSES, None)):
        cut = cases.partition(tmp_path, task, (0, 1), *argv)
        args = tiny.arguments(tmp_path, task, *argv, "--partition", cut, "--devices", 2, "--dry_run")
        _, plan = planned(args)
        assert (refusal(plan) or "").startswith(sentence or "") and (sentence is None) == (refusal(plan) is None)
    with_norm = SimpleNamespace(edge_bytes={}, counted={"mean"}, captured=SimpleNamespace(model_name="CLIP"))
    assert refusal(with_norm).startswith("CLIP has batch norm")
    with pytest.raises(ValueError, match="has not been shown to end the waits of its ranks"):
        require_gloo(changed(args, go_on_without_lost_ranks=True, distributed_backend="nccl"))
