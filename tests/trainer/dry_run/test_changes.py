"""What a dry run says of the changes of a pipeline, before there is one."""

import re
from dataclasses import replace

import pytest

from megatron import backend

backend.install()

from megatron.planner import GIB
from megatron.planner.job.estimate import FEWEST, LOST, OPERANDS_OF_LAYER
from megatron.trainer.arguments import parse_args
from megatron.trainer.changes.arrangement_choice import ArrangementChoice
from megatron.trainer.dry_run import changes as room
from megatron.trainer.dry_run.changes import PlannedChange, planned_changes
from megatron.trainer.dry_run.dry_run import run_dry
from tests.trainer.arguments.command_line import arguments, argv
from tests.trainer.run.vision_helper import SMALL, defaults, write_images

FREEZING = "--untie-embeddings-and-output-weights --freeze-training"
FOUR = f"{FREEZING} --pipeline-model-parallel-size 4 --dry-run 4"
LARGE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--global-batch-size 16 --bf16 --freeze-interval 4"
)


@pytest.fixture
def dry(run_words):
    return run_words


def changes(flags: str, *, layers: tuple[int, ...] = (2, 2, 2, 2), world_size: int = 4) -> list[PlannedChange]:
    args = arguments(f"--num-layers {sum(layers)} {FREEZING} --pipeline-model-parallel-size {len(layers)} {flags}",
                     world_size=world_size)  # fmt: skip
    args = replace(args, padded_vocab_size=128)
    return planned_changes(args, layers)


def test_a_line_for_each_change(dry):
    """What is frozen, how ranks share the rest, what they take and send, and what it gains."""
    flags = f"{FOUR} --freeze-interval 2 --freeze-schedule 1,3 --elastic-pipeline --elastic-schedule 4,2"
    status, out, err, found = dry(argv(flags))
    assert (status, err) == (0, "")
    told = out[out.index("changes of the pipeline, at most") :].splitlines()[1:4]
    assert [line.partition(";")[0] for line in told] == [
        "iteration 2: 1 of 4 layers frozen, pipeline 4 x data 1, layers by rank 1 frozen, 1, 1, 1",
        "iteration 4: 3 of 4 layers frozen, pipeline 2 x data 2, layers by rank 3 frozen, 1",
        "",
    ]
    for line, change in zip(told[:2], found["changes"], strict=True):
        sizes = [change[name] / 2**20 for name in ("bytes", "bytes_in_change", "bytes_moved")]
        assert line.partition("; ")[2] == (
            "the fullest rank {:.2f} MiB, while it changes {:.2f} MiB; at most {:.2f} MiB move between ranks; batches "
            "{:.2f} times as fast as without another cut"
        ).format(*sizes, change["speedup"])
    assert found["changes"][0]["bytes_moved"] == 0 and found["changes"][1]["speedup"] > 1


@pytest.mark.parametrize("flags", ["--freeze-interval 100", "--freeze-interval 2 --freeze-schedule 0"])
def test_nothing_changes(dry, flags):
    status, out, _, found = dry(argv(f"{FOUR} {flags}"))
    assert status == 0 and found["changes"] == [] and "\nnothing changes: no interval freezes a layer" in out
    assert ("note: nothing ever changes" in out) == ("100" in flags)


@pytest.mark.parametrize(
    "flags, gpu, iteration, remedy",
    [
        ("--elastic-pipeline --elastic-schedule 1 --freeze-schedule 0", "A100-80", 4, "give more ranks in --elastic-s"),
        ("--elastic-pipeline --elastic-schedule 2,1 --freeze-schedule 0", "100", 8, "give more ranks in --elastic-sch"),
        ("--freeze-schedule 1", "40", 4, "use more GPUs, or share the optimizer's state out to replicas"),
    ],
)
def test_a_change_that_does_not_fit(dry, flags, gpu, iteration, remedy):
    """The pipeline at first fits, so the verdict is of the fullest change, with its iteration."""
    status, out, err, found = dry(argv(f"{FOUR} {LARGE} {flags} --dry-run-gpu {gpu}", "--num-layers"))
    when = (
        rf"(from iteration {iteration} on|while the pipeline changes at iteration {iteration}) pipeline rank . misses"
    )
    assert status == 1 and re.fullmatch(
        rf"pretrain_gpt\.py: error: {when} \S+ GiB of the \S+ GiB of --dry-run-gpu {gpu}; {remedy}.*\n", err
    )
    assert f"{gpu}: fits; stage 0 leaves" in out and re.search(rf"\n{gpu}: out of memory; {when} \S+ GiB\n", out)
    assert (found["verdict"]["word"], found["verdict"]["iteration"]) == ("out of memory", iteration)


def test_measured_times_take_no_pipeline_that_does_not_fit(dry):
    """As in the run, whose device has to have room for the state of before and that of after."""
    given = argv(f"{FOUR} {LARGE} --elastic-pipeline --freeze-schedule 24", "--num-layers")
    sizes = [dry([*given, "--dry-run-gpu", gpu])[3]["changes"][0]["bytes_in_change"] / 2**30 for gpu in ("200", "44")]
    assert sizes[1] <= 44 < sizes[0]


def test_bytes_within_a_change():
    """Weights and moments of before, of which the first rank has most, beside all of after: its gradients, too."""
    (change,) = changes(
        "--freeze-interval 2 --freeze-schedule 0 --elastic-pipeline --elastic-schedule 1", layers=(2, 2), world_size=2
    )
    layer, embedding, head = 12 * 64**2 + 13 * 64, (128 + 32) * 64, 128 * 64 + 2 * 64
    assert change.bytes_in_change == 12 * (2 * layer + embedding) + 16 * (4 * layer + embedding + head)


def test_operands_that_wait_count_behind_a_change():
    """As for the pipeline at first: with split sequences a GPU that has room for tensors and what is lost does not do.
    Within the change nothing is computed, so nothing waits."""
    flags = "--freeze-interval 2 --freeze-schedule 1 --tensor-model-parallel-size 2 --seq-length 128 --vocab-size 128"
    summed, split = (
        changes(f"{flags} {more} --max-position-embeddings 128", layers=(2, 2))[0]
        for more in ("", "--sequence-parallel")
    )
    operand = 128 * 64 * 4  # of all tokens of a microbatch, in FP32
    assert summed.waiting_bytes == 0 and split.waiting_bytes == FEWEST * OPERANDS_OF_LAYER * operand
    assert not split.is_fullest_within and split.most_bytes == split.num_bytes + split.waiting_bytes
    room = split.num_bytes / (1 - LOST) / GIB * 1.001
    assert replace(split, waiting_bytes=0.0).judge(room).fits and split.judge(room).is_borderline
    within = replace(split, bytes_in_change=2 * split.most_bytes)
    room = within.bytes_in_change / (1 - LOST) / GIB
    assert within.is_fullest_within and within.judge(room * 1.001).fits and within.judge(room * 0.999).is_borderline


def test_bytes_that_move():
    """To a pipeline of one rank each process gets what the other had: weights and moments in FP32. What is frozen has
    no moments, and what a rank has it need not get; replicas may have shared their moments out otherwise."""
    whole, frozen, sharded = (
        changes(f"--freeze-interval 2 {flags}", layers=(2, 2), world_size=2)[0].bytes_moved
        for flags in (
            "--freeze-schedule 0 --elastic-pipeline --elastic-schedule 1",
            "--freeze-schedule 3 --elastic-pipeline --elastic-schedule 1",
            "--freeze-schedule 0 --elastic-pipeline --elastic-schedule 1 --use-distributed-optimizer",
        )
    )
    layer = 12 * 64**2 + 13 * 64
    embedding, head = (128 + 32) * 64, 128 * 64 + 2 * 64
    assert whole == 12 * (4 * layer + embedding + head)
    assert frozen == 12 * (layer + head) + 4 * (3 * layer + embedding)
    assert sharded == 4 * (4 * layer + embedding + head) + 8 * (4 * layer + embedding + head)
    assert changes("--freeze-interval 2 --freeze-schedule 1", layers=(2, 2), world_size=2)[0].bytes_moved == 0


@pytest.mark.parametrize(
    "flags",
    [
        "--elastic-pipeline",
        "--elastic-pipeline --elastic-schedule 4,4,2,2,1",
        "--elastic-pipeline --freeze-schedule 0,0,4,4,6 --elastic-micro-batch-size 1,2",
        "--elastic-pipeline --freeze-schedule 0,4 --elastic-schedule 2,2,2,2,1",
        "--elastic-pipeline --elastic-batch grow --train-samples 200",
    ],
)
def test_what_cannot_differ_is_not_decided_anew(flags, monkeypatch):
    """The changes are those of a run that decides at the end of each interval."""
    flags = f"--freeze-interval 1 --train-iters 20 {flags}"
    if "--train-samples" in flags:
        flags = flags.replace("--train-iters 20 ", "")
    args = arguments(f"--num-layers 8 {FREEZING} --pipeline-model-parallel-size 4 {flags}", world_size=4,
                     without="--train-iters --num-layers")  # fmt: skip
    args = replace(args, padded_vocab_size=128)
    found = planned_changes(args, (2, 2, 2, 2))
    monkeypatch.setattr(room._Decisions, "_is_settled", property(lambda self: False, lambda self, value: None), False)
    assert len(found) > 1 and planned_changes(args, (2, 2, 2, 2)) == found


def test_a_run_of_many_intervals(monkeypatch):
    """A decision for each depth and each number of a list, and one that finds nothing better; the rest is skipped."""
    asked, decide = [], ArrangementChoice.decide

    def counted(self, *args, **options):
        asked.append(options["batches_left"])
        return decide(self, *args, **options)

    monkeypatch.setattr(ArrangementChoice, "decide", counted)
    found = changes("--freeze-interval 1 --train-iters 1000000000 --elastic-pipeline")
    assert found[-1].arrangement.num_frozen == 7 and len(asked) <= 2 * len(found)
    asked.clear()
    changes("--freeze-interval 1 --train-iters 1000000000 --freeze-schedule 0,0,3 --elastic-pipeline")
    assert len(asked) <= 4


@pytest.mark.parametrize("flags", ["", "--elastic-pipeline"])
def test_a_cache(dry, tmp_path, flags):
    """It is taken to be used, which is said where times will decide; its folder is not made, nor is a disk measured."""
    images = write_images(tmp_path / "a.npz", 20)
    given = SMALL.replace("--train-iters 10", "--epochs 8").replace("--num-layers 4", "--num-layers 8").split()
    given += f"--data-path {images} {FOUR} --freeze-interval 4 --freeze-schedule 4 {flags}".split()
    given += ["--activation-cache", str(tmp_path / "cache")]
    lines = []
    for use in ("auto", "always"):
        status, out, err, found = dry([*given, "--activation-cache-use", use], defaults=defaults())
        assert (status, err, found["changes"][0]["cached"]) == (0, "", True)
        lines.append(next(line for line in out.splitlines() if line.startswith("iteration 4: 4 of 8")))
    assert lines[0] == f"{lines[1]}; whether the cache is read, measured times decide"
    assert not (tmp_path / "cache").exists()


def test_a_cache_of_data_that_are_elsewhere(dry, tmp_path):
    """Nor is the length of an epoch known then."""
    flags = f"{FOUR} --freeze-interval 2 --freeze-schedule 4 --activation-cache {tmp_path / 'cache'}"
    given = f"{SMALL.replace('--num-layers 4', '--num-layers 8')} --data-path TRAIN {flags}"
    status, _, err, found = dry(given.split(), defaults=defaults())
    assert (status, err, found["changes"][0]["cached"]) == (0, "", True)


def test_a_cache_that_cannot_be(capsys):
    """The run's sentence, and no pipeline before it."""
    flags = f"{SMALL} --data-path TRAIN {FOUR} --freeze-interval 2 --activation-cache /dev/null/x"
    assert run_dry(parse_args(flags.split(), defaults=defaults()), "program.py") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("program.py: error: --activation-cache: /dev/null/x cannot be the folder of")
