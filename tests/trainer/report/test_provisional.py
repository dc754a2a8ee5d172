"""`--2bw-provisional` from flags to losses: what is refused, what trains, what is said, and what goes on from files."""

import functools

import pytest
import torch

from megatron import backend

backend.install()

from megatron.pipeline.start_up import late_weights
from megatron.trainer.arguments.flags.config import choice_of
from tests.trainer.arguments.command_line import arguments
from tests.trainer.run import run_case
from tests.trainer.run.test_bert import numbers, train_bert

FULL = pytest.mark.full
STAGE = "--pipeline-schedule 2bw --2bw-provisional stage"
UNIFORM = "--pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-microbatches 3"
FEEDBACK = "--pipeline-schedule 2bw --2bw-error-feedback"
ONE_READ = f"{UNIFORM} --2bw-provisional-microbatches 1"  # which 4 stages have of a batch of 4
SHORT = "--global-batch-size 4"  # microbatches, half of those that other runs have
EXACT = "--untie-embeddings-and-output-weights --clip-grad 0"
UNTIED = f"{EXACT} --global-batch-size 6"  # of which 4 stages have the 3 that UNIFORM reads
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
TWO_REPLICAS = "--pipeline-model-parallel-size 1"
SHARDED = f"{TWO_REPLICAS} --use-distributed-optimizer"
TWO_TENSOR_RANKS = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64"
NAMES = ("iteration", "lm_loss", "grad_norm", "loss_scale", "learning_rate", "consumed_samples")


def train(num_ranks: int, flags: str, **options) -> list[dict]:
    return run_case.train(num_ranks, f"--global-batch-size 8 {flags}", **options)


@functools.cache
def train_once(num_ranks: int, flags: str) -> list[dict]:
    return train(num_ranks, flags)


def losses(results: list[dict]) -> dict[int, float]:
    return results[-1]["losses"]


def records(results: list[dict]) -> list[list]:
    """What was reported of each batch."""
    return [[record[name] for name in NAMES] for record in results[-1]["records"] if "lm_loss" in record]


def same_weights(one: list[dict], other: list[dict]) -> bool:
    pairs = [(left["weights"], right["weights"]) for left, right in zip(one, other, strict=True)]
    return all(left.keys() == right.keys() for left, right in pairs) and all(
        torch.equal(tensor, right[name]) for left, right in pairs for name, tensor in left.items()
    )


# --- the command line


@pytest.mark.parametrize(
    ("world_size", "flags", "message"),
    [
        (1, "--2bw-provisional-microbatches 2", "--2bw-provisional-microbatches 2 has no effect without"),
        (1, "--2bw-provisional-reduce", "--2bw-provisional-reduce has no effect without predictions; add"),
        (1, "--2bw-provisional all", "--2bw-provisional: invalid choice: 'all'"),
        (1, f"{STAGE} --2bw-provisional-microbatches 2", "stage reads what each stage has done; leave out --2bw-prov"),
        (1, "--pipeline-schedule 2bw --2bw-provisional uniform", "needs --2bw-provisional-microbatches, from 0 to m-p"),
        (1, f"{UNIFORM} --2bw-provisional-microbatches -1", "--2bw-provisional-microbatches -1 must be at least 0"),
        (1, f"{FEEDBACK} --2bw-provisional-microbatches 2", "--2bw-error-feedback reads no gradients, and --2bw-prov"),
        (2, f"{FEEDBACK} --2bw-single-gradient-buffer", "and --2bw-single-gradient-buffer steps early; leave one"),
        (1, f"{STAGE} --2bw-error-feedback", "--2bw-error-feedback and --2bw-provisional stage both estimate the"),
        (2, f"{FEEDBACK} --2bw-provisional-reduce", "has nothing to reduce where predictions read no gradients; leave"),
        (1, "--pipeline-schedule flush --2bw-error-feedback", "--2bw-error-feedback goes with the weights of"),
        (2, f"{STAGE} --2bw-provisional-reduce", "needs replicas, and this job has one; leave it out"),
        (2, f"{STAGE} --2bw-single-gradient-buffer", "gives away early; leave one of them out"),
        (1, f"{UNIFORM} --2bw-provisional-microbatches 9", "--2bw-provisional-microbatches 9: with batches of 8 the"),
        (2, f"{UNIFORM} --2bw-provisional-microbatches 8", "8: with batches of 8 the first stage has done 7 when"),
        (4, f"{UNIFORM} --2bw-provisional-microbatches 6", "give 0 to 5, or larger batches"),
        (2, f"{UNIFORM} --rampup-batch-size 2 2 24", "--2bw-provisional-microbatches 3: with batches of 2 the first"),
        (2, f"{UNIFORM} --step-batch-size-schedule 0:2,1K:8", "microbatches 3: with batches of 2 the first"),
        (4, f"{UNIFORM} --pipeline-extra-warmup --2bw-provisional-microbatches 3", "has done 2 when the next"),
        (4, f"{STAGE} --pipeline-extra-warmup --global-batch-size 6", "needs batches of at least 7 microbatches"),
    ],
)  # fmt: skip
def test_what_is_refused(world_size, flags, message):
    """In one sentence with value, reason and remedy."""
    with pytest.raises(ValueError) as error:
        arguments(f"{flags} --pipeline-model-parallel-size {world_size}", world_size=world_size)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("mode", [STAGE, UNIFORM], ids=["stage", "uniform"])
@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("flush", ""),
        ("gpipe", ""),
        ("bpipe", ""),
        ("interleaved", "--num-virtual-stages-per-pipeline-rank 2"),
        ("pipedream", f"--global-batch-size 1 {EXACT}"),
    ],
)
def test_only_2bw_predicts(mode, schedule, flags):
    """Flag and schedule are named, and both remedies."""
    with pytest.raises(ValueError) as error:
        arguments(f"{mode} --pipeline-schedule {schedule} {flags} --pipeline-model-parallel-size 2", world_size=2)
    flag = " ".join(mode.split()[2:4])
    assert str(error.value) == (
        f"{flag} goes with the weights of --pipeline-schedule 2bw, not {schedule}: leave it out, or use 2bw"
    )


@pytest.mark.parametrize(
    ("world_size", "flags", "said"),
    [
        (1, STAGE, "the stage reads 8 of 8 microbatches"),
        (2, "--pipeline-schedule flush", None),
        (2, f"{STAGE} --pipeline-model-parallel-size 2", "stages read 7, 8 of 8 microbatches"),
        (4, f"{UNIFORM} --pipeline-model-parallel-size 4", "every stage reads 3 of 8 microbatches"),
        (4, f"{STAGE} --pipeline-model-parallel-size 2", "stages read 3, 4 of 4 microbatches of each replica"),
        (
            4,
            f"{STAGE} --2bw-provisional-reduce --pipeline-model-parallel-size 2",
            "stages read 3, 4 of 4 microbatches, means over the replicas",
        ),
        (
            4,
            f"{UNIFORM} --2bw-provisional-microbatches 2 --pipeline-extra-warmup --pipeline-model-parallel-size 4",
            "every stage reads 2 of 8 microbatches",
        ),
        (
            4,
            f"{STAGE} --balance-activations --pipeline-recompute --pipeline-model-parallel-size 4 --fp16",
            "stages read 5, 6, 7, 8 of 8 microbatches",
        ),
        (2, f"{STAGE} --optimizer sgd --bf16", "the stage reads 4 of 4 microbatches of each"),
    ],
)
def test_what_is_accepted_and_said(world_size, flags, said):
    """What each stage reads, in words."""
    args = arguments(flags, world_size=world_size)
    (size,) = set(args.batch_sizes.all_num_microbatches())
    found = late_weights.description(args.schedule, choice_of(args).name, size)
    assert found is None if said is None else f"2bw with provisional weights: {said}" in found


# --- training


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (4, ""),
        (2, "--decoder-first-pipeline-num-layers 1"),
        (2, ""),
        (2, "--pipeline-recompute"),
        (4, "--balance-activations"),
        (2, "--pipeline-extra-warmup"),
    ],
)
def test_uniform_losses_do_not_depend_on_the_stages(num_ranks, flags):
    """One process and p stages, cut evenly or not, train to bit-equal losses, with dropout, untied and unclipped."""
    assert losses(train(num_ranks, f"{UNTIED} {UNIFORM} {flags}")) == losses(train_once(1, f"{UNTIED} {UNIFORM}"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (4, ""),
        pytest.param(2, "--fp16 --initial-loss-scale 1e30", id="fp16, overflows", marks=FULL),
        pytest.param(2, "--bf16 --optimizer lamb", id="lamb", marks=FULL),
    ],
)
def test_error_feedback_does_not_depend_on_the_stages(num_ranks, flags):
    """One process and p stages train to bit-equal losses, which are not 2bw's; and the run says what it does."""
    alone, found = (train_once(ranks, f"{UNTIED} {FEEDBACK} {flags}") for ranks in (1, num_ranks))
    assert losses(found) == losses(alone)
    assert any("2bw with error feedback: each batch uses the last update twice" in each for each in found[0]["lines"])
    if not flags:
        assert losses(alone) != losses(train_once(1, f"{UNTIED} --pipeline-schedule 2bw"))


@pytest.mark.parametrize(
    "flags",
    [
        f"{UNTIED} --bf16",
        pytest.param(f"{UNTIED}", marks=FULL),
        pytest.param(f"{SHARDED} --bf16", marks=FULL),
        pytest.param(f"{UNTIED} --fp16 --initial-loss-scale 1e9 --loss-scale-window 2", marks=FULL),
    ],
)
def test_error_feedback_goes_on_from_a_checkpoint(tmp_path, flags):
    """In mid-pipeline, with the prediction and the one that is known besides: as a run that was never stopped, and as
    one that never saved."""
    whole = train(2, f"{flags} {FEEDBACK}")
    saved = train(2, f"{flags} {FEEDBACK} --save {tmp_path} --save-interval 3")
    rest = train(2, f"{flags} {FEEDBACK} --load {tmp_path} --ckpt-step 3")
    assert losses(saved) == losses(whole)
    assert losses(rest) == {iteration: losses(whole)[iteration] for iteration in (4, 5, 6)}
    assert same_weights(rest, whole)


def test_the_modes_differ():
    """So the test above could fail; and what is read is said at the start."""
    flags = (UNIFORM, f"{STAGE} --train-iters 2", "--pipeline-schedule 2bw --train-iters 2")
    runs = [train_once(1, f"{UNTIED} {each}") for each in flags]
    assert len({losses(run)[2] for run in runs}) == 3
    assert len({losses(run)[1] for run in runs}) == 1
    for run, said in zip(runs, ("the stage reads 3 of 6 microbatches\n", "the stage reads 6 of 6", None), strict=True):
        lines = [line for line in run[0]["lines"] if "provisional weights" in line]
        assert all(f"2bw with provisional weights: {said}" in line for line in lines) and len(lines) == bool(said)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(2, "", id="tied, p=2"),
        pytest.param(2, "--pipeline-model-parallel-size 1 --2bw-provisional-reduce", id="d=2, reduced"),
        pytest.param(2, f"{SHARDED} --2bw-provisional-reduce", id="distributed optimizer, reduced"),
        pytest.param(2, f"{TWO_TENSOR_RANKS} --pipeline-model-parallel-size 1", id="t=2"),
        pytest.param(4, f"{TWO_TENSOR_RANKS} --pipeline-model-parallel-size 2", id="t=2, p=2"),
    ],
)
def test_other_degrees_agree_to_rounding(num_ranks, flags):
    """Tied embeddings, tensor ranks, and replicas that read the mean: the losses of one process."""
    same = f"{NO_DROPOUT} {SHORT} {UNIFORM} --2bw-provisional-microbatches " + ("1" if "reduce" in flags else "2")
    # Microbatches are dealt out in turn, so both have the same samples in one and in two.
    alone = f"{same} --micro-batch-size 2" if "reduce" in flags else same
    expected = losses(train_once(1, alone))
    assert losses(train(num_ranks, f"{same} {flags}")) == pytest.approx(expected, rel=2e-5)


@pytest.mark.full
def test_uniform_predictions_are_clipped_alike():
    """By the factor of the step before, whatever a stage's own gradients ask for: one stage has the norm of all. At
    this learning rate norms jump, so the factors would differ."""
    same = f"{NO_DROPOUT} {SHORT} {UNIFORM} --clip-grad 0.5 --optimizer sgd --lr 5"
    assert losses(train(2, same)) == pytest.approx(losses(train_once(1, same)), rel=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("stages", [2, 4])
def test_bert(stages):
    """Training and validation losses of p stages are bit-equal to a single process's."""
    alone, found = (train_bert(num_ranks, f"{SHORT} {ONE_READ}") for num_ranks in (1, stages))
    assert numbers(found) == numbers(alone)
    assert sum(record[3] is not None for record in numbers(found)) == 2
    assert found[-1]["losses"][6] < found[-1]["losses"][1]


# --- through files


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Runs by ranks and flags, each with a checkpoint of iteration 3 and evaluations: directory and results."""

    @functools.cache
    def get(num_ranks: int, flags: str):
        directory = tmp_path_factory.mktemp("checkpoints")
        drains = f"--eval-iters 2 --eval-interval 2 --save {directory} --save-interval 3"
        return directory, train(num_ranks, f"{SHORT} {flags} {drains}")

    return get


def going_on(num_ranks: int, directory, flags: str) -> list[dict]:
    """From the checkpoint of iteration 3."""
    return train(num_ranks, f"{SHORT} {flags} --load {directory} --ckpt-step 3")


def gone_on(num_ranks: int, directory, flags: str) -> dict[int, float]:
    """Losses after the checkpoint of iteration 3."""
    return losses(going_on(num_ranks, directory, flags))


def after(results: list[dict]) -> dict[int, float]:
    return {iteration: loss for iteration, loss in losses(results).items() if iteration > 3}


@pytest.mark.parametrize(
    ("num_ranks", "flags"), [(2, ""), (2, "--bf16"), (2, f"{SHARDED} --bf16"), (2, SHARDED), (2, TWO_REPLICAS)]
)
@pytest.mark.full
def test_evaluations_and_checkpoints_change_nothing(saved, num_ranks, flags):
    """Drains leave losses, weights and the generator bit for bit as they were."""
    plain, (_, busy) = train(num_ranks, f"{SHORT} {STAGE} {flags}"), saved(num_ranks, f"{STAGE} {flags}")
    assert records(plain) == records(busy) and same_weights(plain, busy)
    assert all(torch.equal(one["generator"], other["generator"]) for one, other in zip(plain, busy, strict=True))
    evaluated = [record["iteration"] for record in busy[-1]["records"] if "validation_loss" in record]
    assert evaluated == [2, 4, 6]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(2, TWO_REPLICAS, id="d=2, apart"),
        pytest.param(2, "", id="p=2"),
        pytest.param(2, "--optimizer sgd --clip-grad 0.1", id="clip factor"),
        pytest.param(2, f"{SHARDED} --bf16", id="distributed optimizer, bf16"),
        pytest.param(2, "--bf16 --async-save", id="bf16 in the background"),
        pytest.param(2, "--fp16 --initial-loss-scale 1e12 --clip-grad 0.1", id="fp16 with overflows"),
        pytest.param(2, f"{TWO_REPLICAS} --2bw-provisional-reduce", id="d=2, reduced"),
        pytest.param(2, f"{TWO_REPLICAS} --ckpt-fully-parallel-load", id="d=2, loaded in parallel"),
        pytest.param(2, f"{TWO_REPLICAS} --no-ckpt-fully-parallel-save", id="d=2, saved by the first"),
        pytest.param(4, "--pipeline-model-parallel-size 2 --bf16 --async-save", id="p=2 d=2 bf16"),
        pytest.param(2, f"{TWO_TENSOR_RANKS} --pipeline-model-parallel-size 1", id="t=2"),
        pytest.param(2, "--decoder-first-pipeline-num-layers 1", id="uneven"),
    ],
)
def test_training_goes_on_through_files(saved, num_ranks, flags):
    """A run that is drained for a checkpoint and goes on, and one that loads it: the same losses, norms, scales and
    weights, bit for bit."""
    directory, whole = saved(num_ranks, f"{STAGE} {flags}")
    rest = going_on(num_ranks, directory, f"{STAGE} {flags}".replace("--async-save", ""))
    assert records(rest) == records(whole)[3:] and len(records(rest)) == 3
    assert same_weights(rest, whole)


@pytest.mark.full
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 4)])
def test_other_numbers_of_stages_go_on(saved, writers, readers):
    """With the same number read on every stage the losses are the same to rounding."""
    directory, whole = saved(writers, ONE_READ)
    assert gone_on(readers, directory, ONE_READ) == pytest.approx(after(whole), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("writers", "source", "readers", "target"),
    [
        (1, "", 2, TWO_REPLICAS),
        (1, "", 2, SHARDED),
        (2, SHARDED, 1, ""),
        (2, TWO_REPLICAS, 2, f"{TWO_REPLICAS} --2bw-provisional-reduce"),
        (2, TWO_REPLICAS, 1, ""),
        (2, TWO_REPLICAS, 4, f"{TWO_REPLICAS} --ckpt-fully-parallel-load"),
    ],
)
def test_other_numbers_of_replicas_go_on(saved, writers, source, readers, target):
    """A prediction that all share is everyone's, and the first replica's where each had its own: then the next loss is
    near, as the weights are; predictions of other parts of a batch differ from there on."""
    directory, whole = saved(writers, f"{NO_DROPOUT} {STAGE} {source}")
    found, expected = gone_on(readers, directory, f"{NO_DROPOUT} {STAGE} {target}"), after(whole)
    apart = source == TWO_REPLICAS
    assert found[4] == pytest.approx(expected[4], rel=1e-2 if apart else 1e-6)
    assert found == pytest.approx(expected, rel=1e-2) and found != expected
    assert found[4] != expected[4] or not apart


@pytest.mark.full
def test_each_replica_has_its_own_prediction(saved):
    """In the files, and nowhere else: a distributed optimizer's and a reduced one are stored once."""
    from torch.distributed.checkpoint import FileSystemReader

    for flags, replicas in (
        (TWO_REPLICAS, {"0", "1"}),
        (f"{TWO_REPLICAS} --2bw-provisional-reduce --train-iters 3", {"0"}),
    ):
        directory, _ = saved(2, f"{STAGE} {flags}")
        keys = FileSystemReader(str(directory / "iter_0000003")).read_metadata().state_dict_metadata
        predicted = [key.split(".", 2) for key in keys if key.startswith("provisional_version.")]
        assert {replica for _, replica, _ in predicted} == replicas
        for replica in replicas:
            names = {name for _, own, name in predicted if own == replica}
            assert names <= set(keys) and "embedding.word_embeddings.weight" in names
        assert not any(key.startswith("previous_version") for key in keys)


@pytest.mark.full
def test_other_policies_take_a_checkpoint(saved):
    """2bw goes on with the true weights, also where it allows no unknown ones; with predictions again, the first batch
    after a checkpoint of 2bw uses the newest weights."""
    directory, predicted = saved(2, STAGE)
    strict = "--dist-ckpt-strictness raise_unexpected"
    for flags in (f"--pipeline-schedule 2bw {strict}", "--pipeline-schedule flush"):
        found = gone_on(2, directory, flags)
        assert sorted(found) == [4, 5, 6] and found[4] == pytest.approx(after(predicted)[4], rel=1e-2)
        assert found[4] != after(predicted)[4]
    directory, plain = saved(2, "--pipeline-schedule 2bw")
    found, exact = gone_on(2, directory, STAGE), gone_on(2, directory, "--pipeline-schedule flush")
    assert found[4] == exact[4] != after(plain)[4] and found[5] != exact[5]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_what_is_not_loaded_starts_fresh(saved, precision):
    """--no-load-optim keeps the prediction, and --finetune starts its first batch at the weights themselves."""
    flags = f"{STAGE} {precision}"
    directory, whole = saved(2, flags)
    found, expected = gone_on(2, directory, f"{flags} --no-load-optim"), after(whole)
    assert found[4] == expected[4] and found[5] != expected[5]
    finetuned = f"--finetune --train-iters 2 {precision}"
    anew = [gone_on(2, directory, f"{finetuned} {each}") for each in (STAGE, "--pipeline-schedule flush")]
    assert sorted(anew[0]) == [1, 2]
    assert anew[0][1] == anew[1][1] and anew[0][2] != anew[1][2]
