"""`--dry-run` of a job with replicas says what a lost rank would come to, or why the job would end."""

import pytest

from tests.trainer.arguments.command_line import argv
from tests.trainer.arguments.t5_command_line import SMALL_T5, defaults

JOB = "--dry-run 4 --num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 8 --micro-batch-size 1"


@pytest.fixture
def dry(run_words):
    """Run a command line (SMALL and more) dry."""
    return lambda extra, without="": run_words(argv(extra, without))


def test_each_loss_is_shown(dry):
    """In times of a layer's forward: (4 + 1) * 2 * 3 without a loss, and the ranks that are left with 8 each."""
    status, out, err, found = dry(f"{JOB} --pipeline-schedule flush")
    assert (status, err) == (0, "")
    assert "a lost rank, of any replica: batches in times of a layer's forward, 30 while none is lost" in out
    losses = found["lost"]["losses"]
    assert [each["lost"] for each in losses] == [["0.0"], ["0.1"]]
    assert all(each["undisturbed"] == 30 and 48 <= each["bound"] <= each["seconds"] for each in losses)
    assert "more microbatches" in found["lost"]["lines"][0] and found["lost"]["lines"][0] in out


def test_seconds_where_a_gpu_is_named(dry):
    status, out, _, found = dry(f"{JOB} --pipeline-schedule flush --dry-run-gpu H100")
    assert status == 0 and "a lost rank, of any replica: batches in seconds" in out
    assert all(0 < each["undisturbed"] < each["seconds"] < 1 for each in found["lost"]["losses"])


def test_predictions_from_the_mean_of_all_replicas_go_on(dry):
    status, out, _, found = dry(f"{JOB} --pipeline-schedule 2bw --2bw-provisional stage --2bw-provisional-reduce")
    assert status == 0 and [each["lost"] for each in found["lost"]["losses"]] == [["0.0"], ["0.1"]], out
    assert all(each["undisturbed"] < each["bound"] <= each["seconds"] for each in found["lost"]["losses"])


def test_a_t5_has_no_seconds(run_words):
    """The planner prices no cross-attention, so a decoder's layer would count as one of the encoder."""
    words = f"{SMALL_T5} --dry-run 4 --dry-run-gpu H100 --pipeline-model-parallel-size 2 --pipeline-schedule flush"
    status, out, _, _ = run_words(words.split(), defaults=defaults())
    assert status == 0 and "a lost rank, of any replica: batches in times of a layer's forward" in out


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("", "the optimizer's shard is lost with a rank: the others go back to the last checkpoint of --save"),
        ("--redundant-optimizer --go-on-without-lost-ranks", "copies of the optimizer's shards take up to 0.00 GiB of"),
        # 16 bytes for a quarter of 134.9 million dense parameters and a half of 537.0 million of experts
        ("--redundant-optimizer --go-on-without-lost-ranks --num-experts 4 --expert-model-parallel-size 2 --dry-run 8 "
         "--hidden-size 4096 --num-attention-heads 32", "copies of the optimizer's shards take up to 4.50 GiB of"),
    ],
)  # fmt: skip
def test_what_becomes_of_the_optimizers_shards(dry, flags: str, word: str):
    status, out, err, found = dry(f"{JOB} --use-distributed-optimizer {flags}")
    assert (status, err) == (0, "") and len(found["lost"]["losses"]) == 2
    assert any(line.startswith(word) for line in found["lost"]["lines"])
    assert word in out.replace("\n", " ")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--num-experts 2 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2",
         "a lost rank ends this job: a run with --moe-router-load-balancing-type global_aux_loss counts tokens over"),
        ("--pipeline-schedule pipedream --clip-grad 0 --untie-embeddings-and-output-weights --global-batch-size 2",
         "updates after each microbatch (stash); take 2bw or flush"),
        ("--pipeline-schedule 2bw --2bw-provisional stage",
         "a lost rank ends this job: a run with predictions of each replica alone loses that of a lost rank: add"),
        ("--global-batch-size 8192", "takes minutes for 2 replicas of 4096 microbatches"),
    ],
)  # fmt: skip
def test_a_job_that_a_lost_rank_ends(dry, flags: str, word: str):
    """The reason is a sentence, and the dry run is right otherwise."""
    status, out, err, found = dry(f"{JOB} {flags}")
    assert (status, err) == (0, "") and found["lost"]["losses"] == []
    assert word in out.replace("\n", " ")


def test_a_job_without_replicas_has_nothing_to_say(dry):
    status, out, _, found = dry("--dry-run 2 --pipeline-model-parallel-size 2")
    assert status == 0 and "lost" not in found and "a lost rank" not in out
