"""Whether hosts have memory for weights that live there, and directories can be written: refused before the start."""

import shutil
from unittest import mock

import pytest

from megatron import backend

backend.install()

from megatron.planner import GIB
from megatron.trainer.start_up import initialize
from megatron.trainer.start_up.initialize import Need, shortage
from tests import workers
from tests.trainer.checkpoint.test_ownership import holder
from tests.trainer.run.run_case import data_flags, train, train_case

QUIET = "--disable-bias-linear"
FULL = pytest.mark.full
L2L = "--pipeline-schedule l2l --pipeline-model-parallel-size 1"


def need(host, part, *, available, store=2.0, stash=0.5):
    return Need(host, int(available * GIB), part, store * GIB, stash * GIB)


def test_replicas_count_one_store_and_their_own_inputs():
    """Two replicas of two parts on a host: 2 * 2 + 4 * 0.5 GiB, and not a byte less."""
    ranks = [(0, 0, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0)]
    assert shortage([need("a", part, available=6) for part in ranks]) is None
    said = shortage([need("a", part, available=5.99) for part in ranks])
    assert said == (
        "the ranks on a would keep 4 GiB of weights, gradients and optimizer state and 2 GiB of inputs (--l2l-stash "
        "host) in its memory, of which 5.99 GiB are available; give it more memory, spread the pipeline over more "
        "hosts, or train a smaller model"
    )


def test_each_host_counts_by_itself():
    """The one that lacks most is named; a replica elsewhere has a store of its own."""
    assert shortage([need("a", (0, 0, 0), available=3), need("b", (0, 0, 0), available=3)]) is None
    hosts = [
        need("a", (0, 0, 0), available=2.4),
        need("b", (0, 0, 0), available=1.5),
        need("c", (0, 0, 0), available=9),
    ]
    assert shortage(hosts).startswith("the ranks on b would keep 2 GiB of weights, gradients and optimizer state and")


def test_the_least_that_a_rank_of_a_host_has_found_counts():
    """They ask one after the other, and others take memory meanwhile."""
    assert shortage([need("a", (0, 0, 0), available=5), need("a", (1, 0, 0), available=5)]) is None
    assert "of which 4 GiB are available" in shortage(
        [need("a", (0, 0, 0), available=9), need("a", (1, 0, 0), available=4)]
    )


def refused(flags: str, missing: int) -> tuple[int, str]:
    """On this rank: the bytes needed of the host, and the sentence where `missing` of them are not there."""
    found = []

    def watched(needs):
        stores = sum({each.part: each.store + each.stash for each in needs}.values())
        found.append(int(stores))
        there = [Need(each.host, int(stores) - missing, each.part, each.store, each.stash) for each in needs]
        return shortage(there)

    with mock.patch.object(initialize, "shortage", watched):
        try:
            train_case(f"{flags} --train-iters 2")
        except ValueError as error:
            return found[0], str(error)
    return found[0], ""


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (1, "--bf16"),
        pytest.param(1, "--l2l-stash host", marks=FULL),
        pytest.param(2, f"--num-experts 4 --expert-model-parallel-size 2 {QUIET}", marks=FULL),
        pytest.param(2, "--fp16 --initial-loss-scale 8", marks=FULL),
    ],
)
def test_a_run_is_refused_for_want_of_a_byte(num_ranks, flags):
    """On all ranks alike; and what it would have needed is what it reports in its second iteration, when moments are
    there, but for the padding of its tensors.
    """
    results = workers.run(num_ranks, f"{__name__}:refused", flags=f"{L2L} {flags} {data_flags()}", missing=1)
    needed, sentence = results[0]
    assert results == [(needed, sentence)] * num_ranks and "GiB are available; give it more memory" in sentence
    peaks = [each["host_peak_bytes"] for each in train(num_ranks, f"{L2L} {flags}")[-1]["records"]]
    assert peaks[0] < peaks[1] == peaks[2]
    # 16-bit gradients are copied for a stage's step, which no report sees: 4 bytes for up to half of this model, where
    # an element takes 16 in all.
    copies = 0.125 if "fp16" in flags else 0.0
    needed /= 2 if "expert" in flags else 1  # each replica has experts of its own, so a store of its own
    assert needed <= peaks[1][0] * (1 + copies) and peaks[1][0] <= needed * 1.02


def refusal_case(flags: str) -> str | None:
    """What this rank is told when a run with these flags starts."""
    import torch

    from megatron.trainer.start_up.initialize import prepare_outputs
    from tests.trainer.arguments.command_line import arguments

    try:
        mark = prepare_outputs(arguments(flags, world_size=torch.distributed.get_world_size()))
    except ValueError as error:
        return str(error)
    if mark is not None:
        mark.release()
    return None


def refusals(flags: str) -> list[str | None]:
    return workers.run(2, "tests.trainer.start_up.test_room:refusal_case", flags=flags)


@pytest.mark.parametrize("flag", ["--save", "--pipeline-timeline"])
def test_directory_that_cannot_be_written(tmp_path, flag):
    """All ranks name flag, path and cause in one sentence, and nothing is left where it can."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "folder"
    message = f"{flag} {path} cannot be written: Not a directory; name a directory where files can be created"
    assert refusals(f"{flag} {path}") == [message, message]
    assert refusals(f"{flag} {tmp_path}/new/folder") == [None, None]
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_directory_of_another_job(tmp_path):
    """All ranks are refused with one sentence, before the leftovers of a save are touched; so is a whole run."""
    with holder(tmp_path) as owner:
        assert owner.stdout.readline() == "taken\n"
        (tmp_path / ".iter_0000004.0a.incomplete").mkdir()
        first, second = refusals(f"--save {tmp_path}")
        assert first == second and f"in use by another job (process {owner.pid} on" in first
        with pytest.raises(workers.WorkerError, match="in use by another job"):
            train(1, f"--save {tmp_path} --data-path {tmp_path}/missing")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".iter_0000004.0a.incomplete", ".owner_1"]


def test_run_that_fails_gives_its_directory_back(tmp_path):
    """Also where the process goes on after the error."""
    with pytest.raises(workers.WorkerError, match="missing"):
        train(1, f"--save {tmp_path} --data-path {tmp_path}/missing")
    assert list(tmp_path.iterdir()) == []


def test_evaluation_writes_no_checkpoint(tmp_path):
    """With --skip-train nothing is saved, so --save is neither made nor tried."""
    assert refusals(f"--skip-train --save {tmp_path}/new") == [None, None]
    assert not (tmp_path / "new").exists()


def test_run_is_refused_before_it_is_built(tmp_path):
    """A run asks before it reads data."""
    (tmp_path / "file").write_text("")
    with pytest.raises(workers.WorkerError, match=r"--pipeline-timeline .* cannot be written"):
        train(1, f"--pipeline-timeline {tmp_path}/file --data-path {tmp_path}/missing")


@pytest.mark.full
def test_run_goes_on_from_a_checkpoint_between_its_two_names(tmp_path):
    """Killed between the two renames, a checkpoint is loaded from a directory of its own, and moved back by a run that
    saves there; both go on exactly."""
    folder = tmp_path / "checkpoints"
    whole = train(1, f"--save {folder} --save-interval 4")[0]["losses"]
    shutil.rmtree(folder / "iter_0000006")
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    (folder / "iter_0000004").rename(folder / ".iter_0000004.replaced")
    expected = {iteration: whole[iteration] for iteration in (5, 6)}
    assert train(1, f"--load {folder}")[0]["losses"] == expected
    assert (folder / ".iter_0000004.replaced").is_dir(), "a load changes nothing"
    assert train(1, f"--load {folder} --save {folder}")[0]["losses"] == expected
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["iter_0000004", "iter_0000006", "latest_checkpointed_iteration.txt"]
