"""Runs saved and loaded through megatron.core: same degrees, other degrees, other programs, and what can go wrong."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from megatron.trainer.checkpoint import checkpoint
from tests import workers
from tests.trainer.run import run_case

CASES = "tests.trainer.checkpoint.checkpoint_cases:"
TWO_STAGES = {"pipeline_model_parallel_size": 2}
TWO_TENSOR_RANKS = {"tensor_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints by ranks and arguments, each written once: directory, then by rank later losses and last weights."""
    written = {}

    def get(world_size, **changes):
        key = (world_size, tuple(sorted(changes.items())))
        if key not in written:
            directory = str(tmp_path_factory.mktemp("checkpoint"))
            results = workers.run(world_size, CASES + "save_and_go_on", directory=directory, changes=changes)
            written[key] = (directory, results)
        return written[key]

    return get


def test_resumed_run_equals_the_uninterrupted_one(saved):
    """With dropout, at p=2: after a load losses and weights are bit-equal to those of the run that went on."""
    changes = {**TWO_STAGES, "hidden_dropout": 0.1}
    directory, uninterrupted = saved(2, **changes)
    resumed = workers.run(2, CASES + "load_and_go_on", directory=directory, changes=changes)
    for (losses, weights), (position, losses_again, weights_again) in zip(uninterrupted, resumed, strict=True):
        assert losses_again == losses
        assert equal(weights, weights_again)
        assert position == {
            "iteration": 3,
            "consumed_train_samples": 12,
            "consumed_valid_samples": 8,
            "num_floating_point_operations_so_far": 1e12,
        }


def test_stages_with_and_without_replicas_save_together(tmp_path):
    """After a loss one stage may have a replica and another none: the save ends, and has the tensors of both."""
    expected = {f"stage {stage}": torch.full((4,), float(stage)) for stage in (0, 1)}
    saved = workers.run(3, CASES + "save_with_unequal_copies", directory=str(tmp_path))
    assert all(equal(of_rank, expected) for of_rank in saved)


FULL = pytest.mark.full
BF16 = {"bf16": True, "swiglu": True, "untie_embeddings_and_output_weights": True}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("writers", "source", "readers", "target", "tolerance"),
    [
        pytest.param(2, TWO_STAGES, 1, {}, 1e-6, id="p=2 to p=1"),
        pytest.param(1, DISTRIBUTED, 2, TWO_STAGES, 1e-6, id="distributed optimizer to p=2 without it"),
        pytest.param(2, TWO_TENSOR_RANKS, 1, {}, 1e-6, id="t=2 to t=1"),
        pytest.param(2, DISTRIBUTED, 2, {**TWO_STAGES, **DISTRIBUTED}, 1e-6, id="distributed d=2 to p=2"),
        pytest.param(1, {}, 2, TWO_TENSOR_RANKS, 1e-6, id="t=1 to t=2"),
        pytest.param(2, BF16, 1, {**BF16, **DISTRIBUTED}, 1e-4, id="bf16 plain to distributed"),
        pytest.param(2, {**BF16, **DISTRIBUTED}, 1, BF16, 1e-4, id="bf16 distributed to plain"),
        pytest.param(2, {**BF16, **TWO_STAGES}, 2, {**BF16, **TWO_TENSOR_RANKS}, 1e-3, id="bf16 p=2 to t=2"),
    ],
)
def test_other_degrees_go_on_with_the_same_losses(saved, writers, source, readers, target, tolerance):
    """Weights, optimizer state and schedule arrive at other degrees, with or without the distributed optimizer."""
    directory, uninterrupted = saved(writers, **source)
    resumed = workers.run(readers, CASES + "load_and_go_on", directory=directory, changes=target)
    for _, losses, _ in resumed:
        assert losses == pytest.approx(uninterrupted[0][0], rel=tolerance)


@pytest.mark.full
def test_what_is_not_loaded_starts_fresh(saved):
    """--no-load-optim keeps the position, --finetune takes the weights alone; both then train differently."""
    directory, ((uninterrupted, _),) = saved(1)
    ((position, losses, _),) = workers.run(
        1, CASES + "load_and_go_on", directory=directory, changes={}, no_load_optim=True
    )
    assert (
        position["iteration"] == 3
        and losses[0] == uninterrupted[0]
        and losses[2] != pytest.approx(uninterrupted[2], rel=1e-4)
    )
    ((position, losses, _),) = workers.run(1, CASES + "load_and_go_on", directory=directory, changes={}, finetune=True)
    assert position["iteration"] == 0 and losses[0] == uninterrupted[0]
    ((position, _, _),) = workers.run(1, CASES + "load_and_go_on", directory=directory + "/none", changes={})
    assert position is None


def test_other_learning_rate_schedule_says_so(saved):
    """A run made longer has another schedule: the error names both flags that settle which one holds."""
    directory, _ = saved(1)
    arguments = {"directory": directory, "changes": {}, "decay_steps": 500}
    ((message, _),) = workers.run(1, CASES + "load_error", **arguments)
    assert "500" in message and "400" in message
    assert "--override-opt_param-scheduler" in message and "--use-checkpoint-opt_param-scheduler" in message


def test_masters_that_an_fp32_run_lacks(saved):
    """The optimizer state of a BF16 run is refused in an FP32 run, which names both ways out; its weights load."""
    directory, _ = saved(1, bf16=True)
    ((message, untouched),) = workers.run(1, CASES + "load_error", directory=directory, changes={})
    assert "was saved with --bf16" in message and "--no-load-optim" in message and untouched
    ((message, _),) = workers.run(1, CASES + "load_error", directory=directory, changes={}, no_load_optim=True)
    assert message is None


def test_checkpoint_without_optimizer_says_so(tmp_path):
    """--no-save-optim: a load that wants the optimizer names the flag that does without; with it the weights load."""
    directory = str(tmp_path)
    workers.run(1, CASES + "save_and_go_on", directory=directory, changes={}, no_save_optim=True, no_save_rng=True)
    ((message, untouched),) = workers.run(1, CASES + "load_error", directory=directory, changes={})
    assert "optimizer.state.exp_avg" in message and "--no-load-optim" in message and untouched
    ((message, _),) = workers.run(1, CASES + "load_error", directory=directory, changes={}, no_load_optim=True)
    assert message is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", [TWO_STAGES, {"bf16": True, "swiglu": True}], ids=["p=2", "d=2"])
def test_both_weight_versions_are_restored(tmp_path, degrees):
    """2bw gets both versions back; flush takes the newest; 2bw takes a flush checkpoint's weights for both."""
    directory = str(tmp_path)
    saved = workers.run(2, CASES + "save_two_versions", directory=directory, changes=degrees)
    two_and_one = workers.run(2, CASES + "load_versions", directory=directory, changes=degrees, windows=(2, 1))
    anew = workers.run(2, CASES + "load_versions", directory=directory, changes=degrees, windows=(2,), finetune=True)
    for before, found, [(fresh, _, _)] in zip(saved, two_and_one, anew, strict=True):
        (after, slots, scales), (newest, _, _) = found
        assert after.keys() == {2, 3} and equal(after[2], before[2]) and equal(after[3], before[3])
        assert slots == 2 and scales == {"4": 1024.0}
        assert newest.keys() == {3} and equal(newest[3], before[3])
        assert fresh.keys() == {0} and equal(fresh[0], before[3])


@pytest.mark.sample(1)
@pytest.mark.parametrize("skips", [(2,), (), (3,)])
def test_three_weight_versions_are_restored(tmp_path, skips):
    """A delay of two batches gets all back, skipped steps included; 2bw takes the younger two, flush the newest."""
    saved = workers.run(2, CASES + "save_three_versions", directory=str(tmp_path), changes=TWO_STAGES, skips=skips)
    windows = (3, 2, 1)
    loaded = workers.run(2, CASES + "load_versions", directory=str(tmp_path), changes=TWO_STAGES, windows=windows)
    for before, found in zip(saved, loaded, strict=True):
        for window, (after, slots, _) in zip(windows, found, strict=True):
            versions = range(4 - window, 4)
            assert list(after) == list(versions)
            assert all(equal(after[version], before[version]) for version in versions)
            assert slots == len(set(versions) - {version for version in skips if version > versions[0]})


@pytest.mark.full
def test_older_versions_are_expected(tmp_path):
    """However old, they are no weights that a strict load misses a place for."""
    workers.run(1, CASES + "save_three_versions", directory=str(tmp_path), changes={})
    strict = {"dist_ckpt_strictness": "raise_unexpected", "no_load_optim": True, "no_load_rng": True}
    workers.run(1, CASES + "load_versions", directory=str(tmp_path), changes={}, windows=(3, 2, 1), **strict)


def test_two_versions_serve_a_longer_delay(tmp_path):
    """From a checkpoint of 2bw, the version that it lacks is the same weights as the oldest that it has."""
    [before] = workers.run(1, CASES + "save_two_versions", directory=str(tmp_path), changes={})
    [[(after, slots, _)]] = workers.run(1, CASES + "load_versions", directory=str(tmp_path), changes={}, windows=(3,))
    assert list(after) == [1, 2, 3] and slots == 2
    assert equal(after[1], before[2]) and equal(after[2], before[2]) and equal(after[3], before[3])


PIPEDREAM = "--pipeline-schedule pipedream --global-batch-size 1 --clip-grad 0 --untie-embeddings-and-output-weights"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
TWO_BW_D2 = "--pipeline-schedule 2bw --use-distributed-optimizer --hidden-dropout 0.1"


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(4, f"{TWO_BW_D2} --pipeline-model-parallel-size 2 --bf16", id="2bw p=2 d=2 bf16"),
        pytest.param(2, f"{TWO_BW_D2} --pipeline-model-parallel-size 1", id="2bw d=2 distributed optimizer"),
        pytest.param(2, PIPEDREAM, id="pipedream"),
        pytest.param(2, "--pipeline-schedule 2bw --async-save", id="2bw in the background"),
        pytest.param(2, VIRTUAL, id="interleaved"),
        pytest.param(2, "--pipeline-schedule 2bw --fp16 --initial-loss-scale 1e12", id="2bw with overflows"),
        pytest.param(4, f"{PIPEDREAM} --pipeline-model-parallel-size 4 --num-layers 4", id="pipedream p=4"),
        pytest.param(4, f"{VIRTUAL} --use-distributed-optimizer --bf16", id="interleaved d=2 bf16"),
        pytest.param(4, f"{VIRTUAL} --tensor-model-parallel-size 2", id="interleaved t=2"),
        pytest.param(2, "--pipeline-schedule 2bw --decoder-first-pipeline-num-layers 1", id="2bw uneven"),
    ],
)
def test_training_goes_on_through_files(tmp_path, num_ranks, flags):
    """A run that is drained for a checkpoint and goes on, and one that loads it: the same losses, norms, scales and
    weights, bit for bit."""
    whole = run_case.train(num_ranks, f"{flags} --save {tmp_path} --save-interval 3 --train-iters 6")
    flags = flags.replace("--async-save", "")
    rest = run_case.train(num_ranks, f"{flags} --load {tmp_path} --ckpt-step 3 --train-iters 6")
    names = ("iteration", "lm_loss", "grad_norm", "loss_scale", "learning_rate", "consumed_samples")
    records = [[[record[name] for name in names] for record in run[-1]["records"]] for run in (whole, rest)]
    assert records[1] == records[0][3:] and len(records[1]) == 3
    assert all(equal(one["weights"], other["weights"]) for one, other in zip(whole, rest, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["2bw", "flush"])
def test_pipedream_checkpoint_serves_other_schedules(tmp_path, schedule):
    """It holds one version, the newest, which every schedule can start from."""
    model = "--clip-grad 0 --untie-embeddings-and-output-weights --train-iters 6"
    run_case.train(2, f"{model} {PIPEDREAM} --save {tmp_path} --exit-interval 3")
    settings = "--override-opt_param-scheduler --global-batch-size 4"
    results = run_case.train(2, f"{model} --pipeline-schedule {schedule} {settings} --load {tmp_path}")
    assert sorted(results[-1]["losses"]) == [4, 5, 6]


def test_flush_checkpoint_serves_both_versions(saved):
    """From a flush checkpoint both versions of 2bw are the same weights, in one buffer."""
    directory, _ = saved(1)
    [[(versions, slots, _)]] = workers.run(1, CASES + "load_versions", directory=directory, changes={}, windows=(2,))
    assert versions.keys() == {2, 3} and equal(versions[2], versions[3]) and slots == 1


@pytest.mark.full
@pytest.mark.parametrize("changes", [TWO_STAGES, DISTRIBUTED], ids=["p=2", "distributed d=2"])
def test_megatron_lm_checkpoints_load_here(tmp_path, changes):
    """A checkpoint written the way Megatron-LM writes, entry by entry, goes on here exactly."""
    directory = str(tmp_path)
    written = workers.run(2, CASES + "save_as_megatron_lm_does", directory=directory, changes=changes)
    resumed = workers.run(2, CASES + "load_and_go_on", directory=directory, changes=changes)
    for (losses, weights), (position, losses_again, weights_again) in zip(written, resumed, strict=True):
        assert losses_again == losses and equal(weights, weights_again)
        assert (position["iteration"], position["consumed_train_samples"]) == (3, 12)


@pytest.mark.full
@pytest.mark.parametrize("precision", [{"bf16": True}, {}], ids=["bf16", "fp32"])
def test_tied_embeddings_of_the_distributed_optimizer(tmp_path, precision):
    """Their master weights and moments are saved from their own place, also where the bucket before has padding: the
    run goes on exactly at the same degrees and at others, and nobody warns of data corruption."""
    shape = {"hidden_size": 20, "ffn_hidden_size": 80}  # so that the first stage's layers do not fill their bucket
    changes = {**TWO_STAGES, **DISTRIBUTED, **precision, **shape, "untie_embeddings_and_output_weights": False}
    written = workers.run(4, CASES + "save_and_listen", directory=str(tmp_path), changes=changes)
    assert [messages for *_, messages in written] == [[]] * 4
    resumed = workers.run(4, CASES + "load_and_go_on", directory=str(tmp_path), changes=changes)
    for (losses, weights, _), (_, losses_again, weights_again) in zip(written, resumed, strict=True):
        assert losses_again == losses and equal(weights, weights_again)
    alone = {**changes, "pipeline_model_parallel_size": 1, "use_distributed_optimizer": False}
    ((_, losses_alone, _),) = workers.run(1, CASES + "load_and_go_on", directory=str(tmp_path), changes=alone)
    trained = next(losses for losses, *_ in written if losses)
    assert losses_alone == pytest.approx(trained, rel=1e-4 if precision else 1e-6)


def test_weights_beyond_the_model(tmp_path):
    """--dist-ckpt-strictness: those that a checkpoint has beyond the model are left out, or an error that names them;
    optimizer and random states, also where they are not asked for, are none of them."""
    more = [f"mtp.{number}.weight" for number in range(10)]
    strict = {"dist_ckpt_strictness": "raise_unexpected", "no_load_optim": True, "no_load_rng": True}
    workers.run(1, CASES + "save_as_megatron_lm_does", directory=str(tmp_path / "same"), changes={})
    workers.run(1, CASES + "save_as_megatron_lm_does", directory=str(tmp_path / "more"), changes={}, more=more)
    for name, options, said in (
        ("same", strict, None),
        ("more", {}, None),
        ("more", {"dist_ckpt_strictness": "log_unexpected"}, None),
        (
            "more",
            strict,
            "mtp.0.weight, .*, mtp.7.weight and 2 more; leave out --dist-ckpt-strictness raise_unexpected",
        ),
    ):
        directory = str(tmp_path / name)
        ((message, untouched),) = workers.run(1, CASES + "load_error", directory=directory, changes={}, **options)
        assert re.search(said, message) and untouched if said else message is None


@pytest.mark.parametrize("strictness", ["assume_ok_unexpected", "log_unexpected", "ignore_all"])
def test_weights_that_are_left_out_are_named(monkeypatch, strictness):
    """Unless the flag says that they are to be ignored."""
    said = []
    monkeypatch.setattr(checkpoint, "log_once", said.append)
    reader = SimpleNamespace(left_over=lambda model: ["mtp.0.weight"], location=SimpleNamespace(path="there"))
    checkpoint._judge_what_is_left_over(reader, {}, strictness)
    line = "checkpoint there holds weights that the model has no place for: mtp.0.weight"
    assert said == ([] if strictness == "ignore_all" else [line])


@FULL
def test_foreign_distributed_optimizer_is_refused_with_the_way_out(tmp_path):
    """Megatron-LM's default format of the distributed optimizer loads with the distributed optimizer only."""
    workers.run(2, CASES + "save_as_megatron_lm_does", directory=str(tmp_path), changes=DISTRIBUTED)
    ((message, untouched),) = workers.run(1, CASES + "load_error", directory=str(tmp_path), changes={})
    assert "dp_reshardable" in message and "--no-load-optim" in message and untouched


def test_bare_megatron_core_loads_our_checkpoints(saved):
    """With megatron.core's own calls a checkpoint of ours goes on exactly, and its common entries are Megatron-LM's."""
    directory, ((uninterrupted, _),) = saved(1)
    ((common, losses),) = workers.run(1, CASES + "load_as_megatron_lm_does", directory=directory, changes={})
    assert losses == uninterrupted
    assert (common["checkpoint_version"], common["iteration"], common["args"].consumed_train_samples) == (3.0, 3, 12)
    assert {"opt_param_scheduler", "num_floating_point_operations_so_far"} <= common.keys()


def test_truncated_foreign_checkpoint_is_named(tmp_path):
    """Megatron-LM writes no checksums; a shortened or missing shard is still named, before anything is loaded."""
    workers.run(1, CASES + "save_as_megatron_lm_does", directory=str(tmp_path), changes={})
    shard = tmp_path / "iter_0000003" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:5000])
    ((message, untouched),) = workers.run(1, CASES + "load_error", directory=str(tmp_path), changes={})
    assert f"{shard} is truncated: 5000 of at least" in message and untouched


FILES = ["__1_0.distcp", "common.pt", ".metadata", "metadata.json", "checksums.json"]
LEAN = {("flip", "__1_0.distcp"), ("remove", "__1_0.distcp"), ("truncate", "common.pt"), ("flip", ".metadata")}


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        pytest.param(damage, name, marks=() if (damage, name) in LEAN else FULL)
        for damage in ("flip", "truncate", "remove")
        for name in FILES
    ],
)
def test_damage_to_any_file_is_named_on_all_ranks(saved, tmp_path, name, damage):
    """Whichever file is damaged, every rank names it, says whether others exist, and has loaded nothing."""
    directory, _ = saved(2, **TWO_STAGES, hidden_dropout=0.1)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "iter_0000003" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    results = workers.run(2, CASES + "load_error", directory=str(tmp_path), changes=TWO_STAGES)
    for message, untouched in results:
        assert name in message and untouched
        assert any(word in message for word in ("damaged", "truncated", "missing"))
        assert "has no complete checkpoint of another iteration." in message
    assert results[0] == results[1]


def test_other_model_is_refused_before_anything_is_loaded(saved):
    """The first mismatching argument is named."""
    directory, _ = saved(1)
    changes = {"hidden_size": 32, "ffn_hidden_size": 128}
    ((message, untouched),) = workers.run(1, CASES + "load_error", directory=directory, changes=changes)
    assert "hidden_size is 16 there and 32 here" in message and untouched


@pytest.mark.full
@pytest.mark.parametrize("changes", [{}, {"bf16": True, **DISTRIBUTED}], ids=["fp32", "bf16"])
def test_asynchronous_save_holds_the_moment_of_the_call(tmp_path, changes):
    """What training does to the weights while they are written does not reach the checkpoint."""
    saved = workers.run(2, CASES + "save_in_background", directory=str(tmp_path), changes=changes)
    loaded = workers.run(2, CASES + "loaded_weights", directory=str(tmp_path), changes=changes)
    assert all(equal(before, after) for before, after in zip(saved, loaded, strict=True))


def test_directory_that_cannot_be_made_is_told_once(tmp_path):
    """The error of a save names the cause, and not again where the free space should stand."""
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "folder")
    (message,) = workers.run(1, CASES + "save_error", directory=folder, changes={})
    assert message.startswith(f"cannot save the checkpoint of iteration 3 in {folder}: ")
    assert message.count("Not a directory") == 1 and message.endswith("No earlier one existed.")


@pytest.mark.sample(2)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_write_leaves_everything_as_it_was(tmp_path, failing_rank, asynchronous):
    """Where one rank cannot write, all raise the same error naming file and cause; the checkpoint before stays, nothing
    else does, and the next save works."""
    results = workers.run(
        2, CASES + "fail_to_write", directory=str(tmp_path), changes=TWO_STAGES, failing_rank=failing_rank,
        asynchronous=asynchronous,
    )  # fmt: skip
    for message, names, names_later in results:
        assert "cannot save the checkpoint of iteration 2" in message and f"__{failing_rank}_0.distcp" in message
        assert "The checkpoint of iteration 1 is intact" in message
        assert names == ["iter_0000001", "latest_checkpointed_iteration.txt"]
        assert names_later == ["iter_0000001", "iter_0000003", "latest_checkpointed_iteration.txt"]
