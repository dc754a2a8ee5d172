"""Where a run that goes on differs from the one before: a longer schedule, other flags or data, an older version."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron.finetuning.data.files import state_of_file
from megatron.finetuning.optimizers import make_scheduler
from tests import workers
from tests.finetuning import cases, tiny
from tests.finetuning.test_runs import CLASSES, run, same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def saved(folder):
    """The flags of a run of 4 batches, and its last checkpoint."""
    argv = ["--pipeline_schedule", "flush", "--save_steps", 2, "--warmup_steps", 1]
    argv += ["--partition", cases.partition(folder, CLASSES, (0,))]
    run(folder, "saved", *argv, "--max_steps", 4, ranks=1)
    return argv, folder / "saved" / "checkpoint-4"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "argv", "ranks"),
    [
        pytest.param("flush", ["--pipeline_schedule", "flush", "--lr_scheduler_type", "cosine", "--bf16"], (0,),
                     marks=pytest.mark.full),
        ("2bw", ["--pipeline_schedule", "2bw", "--warmup_ratio", 0.5, "--gradient_accumulation_steps", 2,
                 "--dataloader_drop_last"], (0, 1)),
        pytest.param("ftpipe", ["--weight_prediction"], (0, 1, 0, 1), marks=pytest.mark.full),
        pytest.param("l2l", ["--pipeline_schedule", "l2l"], None, marks=pytest.mark.full),
        pytest.param("frozen", ["--pipeline_schedule", "flush", "--freeze_training", "--freeze_interval", 2,
                                "--freeze_schedule", "1"], (0, 1), marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_longer_run_has_the_rates_of_its_own_schedule(folder, name, argv, ranks):
    """From its first batch on, where the run before had come to its end with a rate of 0."""
    argv = [*argv, "--save_steps", 2]
    if ranks is not None:
        argv += ["--partition", cases.partition(folder, CLASSES, ranks, *argv)]
    job = {"ranks": len(set(ranks or (0,)))}
    before = run(folder, f"longer-{name}", *argv, "--max_steps", 4, **job)
    after = run(folder, f"longer-{name}", *argv, "--max_steps", 6, "--resume", "auto", **job)
    args = tiny.arguments(folder, CLASSES, *argv)
    for outcome, num_steps in ((before, 4), (after, 6)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
        scheduler, expected = make_scheduler(optimizer, args, num_steps=num_steps), []
        for _ in range(num_steps):
            expected.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        rates = {line["step"]: line["learning_rate"] for line in outcome.lines if "loss" in line}
        assert [rates[step] for step in range(num_steps - 1, num_steps + 1)] == expected[-2:]
    assert rates[5] > 0


@pytest.mark.sample(1, "argv5-was made without --freeze_training; leave it out")
@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["--warmup_steps", 2], r"--warmup_steps \(1\) than this run's \(2\)"),
        pytest.param(["--warmup_ratio", 0.5], "--warmup_ratio", marks=pytest.mark.full),
        (["--lr_scheduler_type", "cosine"], r"--lr_scheduler_type \(linear\) than this run's \(cosine\)"),
        pytest.param(["--max_grad_norm", 0.5], "--max_grad_norm", marks=pytest.mark.full),
        pytest.param(["--text_column", "text"], "--text_column", marks=pytest.mark.full),
        (["--freeze_training", "--freeze_interval", 3], "was made without --freeze_training; leave it out"),
    ],
)
def test_flags_that_a_checkpoint_decides_are_refused(folder, saved, argv, found):
    flags, checkpoint = saved
    with pytest.raises(workers.WorkerError, match=found):
        run(folder, "other", *flags, *argv, "--max_steps", 6, "--resume", checkpoint, ranks=1)


@pytest.mark.full
@pytest.mark.parametrize(
    "cache", [pytest.param([], marks=pytest.mark.full), ["--data_cache", "CACHE"]], ids=["memory", "files"]
)
def test_another_file_with_as_many_rows_is_refused(folder, saved, cache):
    """A row in the middle of a file of several MiB is another one, as long. A copy of the first file is taken."""
    file, copy, other = (folder / f"{name}.jsonl" for name in ("own", "copy", "other"))
    lines = Path(tiny.arguments(folder, CLASSES).train_file).read_text().splitlines(keepends=True)
    lines = [line.replace("{", "{" + " " * 2**18, 1) for line in lines]
    file.write_text("".join(lines))
    shutil.copy(file, copy)
    changed = lines[10].replace('"w', '"v', 1)
    assert changed != lines[10] and len(changed) == len(lines[10])
    other.write_text("".join([*lines[:10], changed, *lines[11:]]))
    argv = [*saved[0], *(str(each).replace("CACHE", str(folder)) for each in cache), "--max_steps", 4]
    name = f"own-{len(cache)}"
    run(folder, name, *argv, "--train_file", file, ranks=1)
    argv += ["--resume", folder / name / "checkpoint-4"]
    run(folder, f"{name}-copied", *argv, "--train_file", copy, ranks=1)
    with pytest.raises(workers.WorkerError, match=r"another --train_file \([0-9]+ bytes, digest [0-9a-f]{16}\) than"):
        run(folder, f"{name}-other", *argv, "--train_file", other, ranks=1)


@pytest.mark.full
def test_a_run_goes_on_with_the_stages_that_it_had(folder):
    """Without --partition, where a second profile would cut the model otherwise: here into one stage."""
    argv = ["--pipeline_schedule", "flush", "--save_steps", 2, "--max_steps", 4]
    whole = run(folder, "stages", *argv, "--partition", cases.partition(folder, CLASSES, (0, 0)), ranks=1)
    rest = run(folder, "stages-on", *argv, "--resume", folder / "stages" / "checkpoint-2", ranks=1)
    assert rest.losses == whole.losses[2:]
    same(rest, whole)


def test_a_checkpoint_of_an_earlier_version_goes_on(folder, saved):
    """It lacks flags that are compared now; the run is that which goes on from the same checkpoint with all of them."""
    flags, checkpoint = saved
    older = shutil.copytree(checkpoint, folder / "older" / checkpoint.name)
    progress = json.loads((older / "progress.json").read_text())
    for name in ("max_seq_length", "warmup_steps", "task"):
        del progress["flags"][name]
    del progress["contents"]
    progress["flags"]["train_file"] = "1234 bytes, digest of the ends"
    (older / "progress.json").write_text(json.dumps(progress))
    runs = [
        run(folder, f"from-{each.parent.name}", *flags, "--max_steps", 6, "--resume", each, ranks=1)
        for each in (checkpoint, older)
    ]
    assert runs[0].losses == runs[1].losses and len(runs[0].losses) == 2
    same(*runs)


def test_what_tells_two_files_apart(tmp_path):
    """Size and every byte; of a folder of `datasets`, its data and no other file."""
    file = tmp_path / "rows"
    states, half = set(), b"a" * 3 * 2**19
    for content in (half * 2 + b"b", b"c" + half * 2, half + b"c" + half, half * 2 + b"c", half * 2):
        file.write_bytes(content)
        states.add(state_of_file(file))
    assert len(states) == 5
    datasets = pytest.importorskip("datasets")
    for name, texts in (("one", ["a", "b"]), ("two", ["a", "c"])):
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / name)
    one = state_of_file(tmp_path / "one")
    (tmp_path / "one" / "cache-0.arrow").write_text("of another program")
    assert state_of_file(tmp_path / "one") == one != state_of_file(tmp_path / "two")
