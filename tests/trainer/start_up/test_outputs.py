"""Directories that cannot be written are refused before anything is built, and a killed save is mended."""

import shutil

import pytest

from tests import workers
from tests.trainer.checkpoint.test_ownership import holder
from tests.trainer.run.run_case import train


def refusal_case(flags: str) -> str | None:
    """What this rank is told when a run with these flags starts."""
    import torch

    from megatron.trainer.start_up.outputs import prepare_outputs
    from tests.trainer.arguments.command_line import arguments

    try:
        mark = prepare_outputs(arguments(flags, world_size=torch.distributed.get_world_size()))
    except ValueError as error:
        return str(error)
    if mark is not None:
        mark.release()
    return None


def refusals(flags: str) -> list[str | None]:
    return workers.run(2, "tests.trainer.start_up.test_outputs:refusal_case", flags=flags)


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
