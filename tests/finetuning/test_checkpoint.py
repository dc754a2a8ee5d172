"""Which checkpoints stay, from which a run may go on, and where it may write."""

import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest

from megatron.finetuning import checkpoint
from megatron.finetuning.checkpoint import SavedProgress
from megatron.finetuning.job import checkpoint_to_resume
from tests.finetuning import tiny

CLASSES = "sequence-classification"


def checkpoints(folder: Path, *numbers: int) -> Path:
    for number in numbers:
        (folder / f"checkpoint-{number}").mkdir(parents=True)
        (folder / f"checkpoint-{number}" / "progress.json").write_text("{}")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_the_oldest_go(tmp_path):
    """By their numbers; what has another name is nobody's checkpoint."""
    output = checkpoints(tmp_path, 2, 10, 9)
    (output / "checkpoint-old").mkdir()
    assert checkpoint.latest(output).name == "checkpoint-10"
    checkpoint.prune(output, None)
    assert len(names(output)) == 4
    checkpoint.prune(output, 2)
    assert names(output) == ["checkpoint-10", "checkpoint-9", "checkpoint-old"]
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_of_a_link_only_itself_goes(tmp_path):
    """The folder to which it leads stays, whole; a link to nothing goes, too, and so does what an older run left."""
    output, elsewhere = checkpoints(tmp_path / "out", 3, 4), checkpoints(tmp_path / "elsewhere", 1)
    for name, target in (("checkpoint-1", "checkpoint-1"), ("checkpoint-2", "nothing"), (".checkpoint-1.removed", "")):
        (output / name).symlink_to(elsewhere / target)
    checkpoint.prune(output, 2)
    assert names(output) == ["checkpoint-3", "checkpoint-4"]
    assert (elsewhere / "checkpoint-1" / "progress.json").is_file()


def test_a_run_begun_again_keeps_its_own(tmp_path):
    """With the later ones of the run before gone, the newest is this run's."""
    output = checkpoints(tmp_path, 2, 3, 4, 8)
    checkpoint.drop_others(output, after=2, but=output / "checkpoint-3")
    assert names(output) == ["checkpoint-2", "checkpoint-3"]


def test_what_a_killed_run_left_goes(tmp_path):
    """A checkpoint that it wrote or removed; nobody takes it for one."""
    output = checkpoints(tmp_path, 2)
    for name in (".checkpoint-4.partial", ".checkpoint-1.removed"):
        (output / name).mkdir()
        (output / name / "model-00001.safetensors").touch()
    assert checkpoint.latest(output).name == "checkpoint-2"
    checkpoint.drop_unfinished(output)
    assert names(output) == ["checkpoint-2"]


def killed_at(number: int, folder: Path, partial: Path) -> bool:
    """Whether kill -9 ends `replace_folder`, in a process of its own, before its change `number` to the file system."""
    child = os.fork()
    if child == 0:
        left = number

        def count(event: str, arguments: tuple) -> None:
            nonlocal left
            if event in ("os.rename", "os.remove", "os.rmdir"):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(count)
        checkpoint.replace_folder(folder, partial)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("is_link", [False, True])
def test_a_kill_while_a_checkpoint_is_replaced_loses_none(tmp_path, is_link):
    """At each change to the file system. Whoever starts finds the earlier checkpoint or the new one, whole.

    A link stays, and nothing stays beside the folder to which it leads.
    """
    found, number, killed = [], 0, True
    while killed:
        output = checkpoints(tmp_path / str(number), 4)
        elsewhere = output / "elsewhere"
        if is_link:
            elsewhere.mkdir()
            (output / "checkpoint-4").rename(elsewhere / "kept")
            (output / "checkpoint-4").symlink_to(elsewhere / "kept")
        folder, partial = checkpoint.places(output / "checkpoint-4")
        for place, said in ((folder, "old"), (partial, "new")):
            place.mkdir(exist_ok=True)
            for file in ("one", "two"):
                (place / file).write_text(said)
        killed = killed_at(number, folder, partial)
        last = begin(tmp_path, "--output_dir", output, "--resume", "auto")
        assert last == output / "checkpoint-4"
        one, two = ((last / file).read_text() for file in ("one", "two"))
        assert one == two
        found.append(one)
        checkpoint.drop_unfinished(output)
        assert names(output) == ["checkpoint-4", *["elsewhere"] * is_link]
        assert last.is_symlink() == is_link
        number += 1
    assert not is_link or names(elsewhere) == ["kept"]
    assert found[:2] == ["old", "old"] and set(found[2:]) == {"new"} and len(found) > 4


def test_a_checkpoint_that_is_named_gets_its_name_back(tmp_path):
    """Also from the folder of another run; several ranks look for it at once."""
    elsewhere = checkpoints(tmp_path / "elsewhere", 2)
    (elsewhere / "checkpoint-2").rename(elsewhere / ".checkpoint-2.replaced")
    argv = ["--resume_from_checkpoint", elsewhere / "checkpoint-2"]
    assert begin(tmp_path, *argv) == begin(tmp_path, *argv) == elsewhere / "checkpoint-2"
    assert names(elsewhere) == ["checkpoint-2"]


def begin(folder: Path, *argv: object) -> Path | None:
    return checkpoint_to_resume(tiny.arguments(folder, CLASSES, *argv))


def test_where_a_run_goes_on(tmp_path):
    output = tmp_path / "out"
    assert begin(tmp_path) is None and output.is_dir()
    checkpoints(output, 2, 4)
    last = output / "checkpoint-4"
    assert begin(tmp_path, "--resume_from_checkpoint") == begin(tmp_path, "--resume_from_checkpoint", last) == last
    with pytest.raises(ValueError, match=r"has checkpoints of another run \(checkpoint-4\)"):
        begin(tmp_path)
    assert begin(tmp_path, "--overwrite_output_dir") is None
    earlier = ["--resume_from_checkpoint", output / "checkpoint-2"]
    with pytest.raises(ValueError, match=r"--overwrite_output_dir to drop those that this run does not go on from"):
        begin(tmp_path, *earlier)
    assert begin(tmp_path, *earlier, "--overwrite_output_dir") == output / "checkpoint-2"


def test_an_evaluation_goes_on_without_a_folder_of_its_own(tmp_path):
    args = tiny.arguments(tmp_path, CLASSES, "--do_eval", "--validation_file", "v", "--resume_from_checkpoint", "there")
    args.output_dir = None
    assert checkpoint_to_resume(args) == Path("there")
    args.resume_from_checkpoint = "last"
    with pytest.raises(ValueError, match=r"there is no --output_dir; name a checkpoint, or leave it out"):
        checkpoint_to_resume(args)


def test_a_folder_that_cannot_be_written(tmp_path):
    """Before anything is trained."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output_dir .*file cannot be made: File exists; give another"):
        begin(tmp_path, "--output_dir", tmp_path / "file")


def test_what_a_resumed_run_must_have_alike(tmp_path):
    """All that decides how it goes on; an evaluation needs no flags of training."""
    made = SavedProgress(3, 6, "graph", "stages", "flush", 42, "adamw", "", 20, 8, {"learning_rate": 0.1},
                         contents={"train_file": "one"})  # fmt: skip
    made.require_same(dataclasses.replace(made, batches=0), tmp_path, trains=True)
    for changes, sentence in (
        ({"signature": "other"}, r"another graph of the model .* \(graph\) than this run's \(other\)"),
        ({"stages": "other"}, r"another cut into stages .* devices of a replica decide\) \(stages\) than this run's"),
        ({"seed": 7}, r"was made with another seed \(42\) than this run's \(7\)"),
        ({"batch_size": 16}, r"another number of samples of a batch .* \(8\) than this run's \(16\)"),
        ({"samples": 21}, r"another number of samples \(20\) than this run's \(21\)"),
        ({"flags": {"learning_rate": 0.2}}, r"another --learning_rate \(0.1\) than this run's \(0.2\); give the flags"),
        ({"contents": {"train_file": "two"}}, r"another --train_file \(one\) than this run's \(two\); give the flags"),
    ):
        other = dataclasses.replace(made, **changes)
        with pytest.raises(ValueError, match=sentence):
            made.require_same(other, tmp_path, trains=True)
    made.require_same(dataclasses.replace(made, contents={}), tmp_path, trains=True)  # a later rank of the host
    earlier = dataclasses.replace(made, flags=made.flags | {"train_file": "of both ends"}, contents={})
    earlier.require_same(made, tmp_path, trains=True)
    made.require_same(dataclasses.replace(made, samples=None, flags={}), tmp_path, trains=False)
    later = dataclasses.replace(made, flags={"learning_rate": 0.1, "a flag of a later version": 12})
    made.require_same(later, tmp_path, trains=True)
    with pytest.raises(ValueError, match=r"another --a flag of a later version \(12\) than this run's \(None\)"):
        later.require_same(dataclasses.replace(later, flags=later.flags | {"a flag of a later version": None}),
                           tmp_path, trains=True)  # fmt: skip


@pytest.mark.parametrize("content", ["[1, 2]", "no json", '{"batches": 1}'])
def test_what_is_no_checkpoint(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    with pytest.raises(ValueError, match=r"is no checkpoint to go on from .*; give a checkpoint-N"):
        SavedProgress.read(tmp_path)
