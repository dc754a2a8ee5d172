"""Optimistic steps through the training door: the same bits as without them, whatever the norm turns out to be."""

import pytest

from megatron.trainer.plan.from_flags import training_state
from tests.trainer.arguments.command_line import arguments
from tests.trainer.run.run_case import table, train

P2 = "--pipeline-model-parallel-size 2"
V2 = "--num-virtual-stages-per-pipeline-rank 2"
FLAG = "--optimistic-steps"
STATE = "tests.trainer.run.validated_steps:state_and_validations"
SCALED = "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1"
BREAKS = "--lr 1e30 --no-check-for-nan-in-loss-and-grad --untie-embeddings-and-output-weights"
MEASURED = ("time", "memory", "per_second", "flop", "tokens_per")


def numbers(results: list[dict]) -> list[dict]:
    """What the log has of each iteration, but for what is measured."""
    return [
        {name: value for name, value in record.items() if not any(part in name for part in MEASURED)}
        for record in results[-1]["records"]
    ]


def same(one: list[dict], other: list[dict]) -> None:
    """The same weights, masters, moments, counters and random states, to the last bit."""
    for first, second in zip(one, other, strict=True):
        assert first["watched"]["state"] == second["watched"]["state"]
        assert first["generator"].equal(second["generator"])


# name: (ranks, flags, whether each step was right)
RUNS = {
    "zbv, clipped batches": (2, f"{P2} --pipeline-schedule zbv {V2} --clip-grad 0.8", "no no no no yes no"),
    "zb-h1, fp16 that overflows": (2, f"{P2} --pipeline-schedule zb-h1 {SCALED}", "no no no no yes yes"),
    "zbv, not a number": (2, f"{P2} --pipeline-schedule zbv {V2} {BREAKS}", "no no no no no no"),
    "flush, bf16, recompute": (2, f"{P2} --pipeline-schedule flush --bf16 --pipeline-recompute", None),
    "zbv of four ranks": (
        4, f"--pipeline-model-parallel-size 4 --pipeline-schedule zbv {V2} --num-layers 8 --clip-grad 0.85", None,
    ),
    "flush, replicas": (4, f"{P2} --pipeline-schedule flush --clip-grad 0.85", None),
    "flush, tensor ranks": (4, f"{P2} --pipeline-schedule flush --tensor-model-parallel-size 2 --clip-grad 0.85", None),
    "gpipe, a ramp-up": (
        2, f"{P2} --pipeline-schedule gpipe --global-batch-size 8 --rampup-batch-size 4 2 24 --clip-grad 0.85", None,
    ),
}  # fmt: skip


@table("num_ranks, flags, right", RUNS, usual=2)
def test_no_bit_changes(num_ranks, flags, right):
    """Losses, norms, loss scales, skipped steps and all state, in batches that clip, overflow or are not finite. The
    copy of the state is as large as the planner says."""
    plain, optimistic = (train(num_ranks, f"{flags}{each}", watch=STATE) for each in ("", f" {FLAG}"))
    assert numbers(plain) == numbers(optimistic)
    same(plain, optimistic)
    found = [result["watched"]["validations"] for result in optimistic]
    assert found == [found[0]] * num_ranks and not plain[0]["watched"]["validations"]
    is_off = found[0].count(False) > 5
    state = training_state(arguments(f"{flags} {FLAG}", world_size=num_ranks))
    for result in optimistic if state.data * num_ranks == 2 else ():  # tensor ranks report whole weights
        count = sum(weight.numel() for weight in result["weights"].values())
        assert result["watched"]["copied"] == (0 if is_off else state.kept_state(count))
    words = ["yes" if each else "no" for each in found[0]]
    assert "no" in words and right in (None, " ".join(words))


def test_evaluations_saves_and_resumes_change_nothing(tmp_path):
    """A run that drains, evaluates and saves has the bits of one without the flag; and so has one that goes on from its
    checkpoint, with the flag or without."""
    flags = f"{P2} --pipeline-schedule zbv {V2} --clip-grad 0.85"
    whole = train(2, flags, watch=STATE)
    first = train(2, f"{flags} {FLAG} --eval-iters 1 --eval-interval 2 --save {tmp_path} --exit-interval 3"
                  f" --pipeline-timeline {tmp_path}/timeline", watch=STATE)  # fmt: skip
    assert first[-1]["iteration"] == 3 and [*(tmp_path / "timeline").iterdir()]
    for more in ("", f" {FLAG}"):
        resumed = train(2, f"{flags} --load {tmp_path}{more}", watch=STATE)
        assert first[-1]["losses"] | resumed[-1]["losses"] == whole[-1]["losses"]
        same(whole, resumed)


def test_too_many_refused_steps_end_them():
    """Where each of the first six batches clips, the run goes on without optimistic steps, and says so."""
    flags = f"{P2} --pipeline-schedule flush --clip-grad 0.01 --train-iters 9"
    plain, optimistic = (train(2, f"{flags}{each}", watch=STATE) for each in ("", f" {FLAG}"))
    assert numbers(plain) == numbers(optimistic)
    same(plain, optimistic)
    assert optimistic[0]["watched"]["validations"] == [False] * 6
    said = [line for line in optimistic[-1]["lines"] if "optimistic" in line]
    assert said == [
        "optimistic steps are off from iteration 7 on: 6 of the last 100 were refused, and each makes a batch begin "
        "again"
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            f"{P2} --pipeline-schedule 2bw",
            "--pipeline-schedule 2bw takes its steps beside later batches already; leave",
        ),
        (f"{P2} --pipeline-schedule l2l", "--pipeline-schedule l2l steps on the host, where no copy of the state is"),
        (f"{P2} --pipeline-schedule bpipe", "balanced activations would be on their way between two ranks"),
        (f"{P2} --use-distributed-optimizer", "gathers the weights of a step from all replicas"),
        (f"{P2} --calculate-per-token-loss", "divides gradients by a number of tokens that comes with the norm"),
        (f"{P2} --num-experts 2", "--num-experts 2 has routers whose counts and biases are not undone"),
        (
            f"{P2} --mtp-num-layers 1 --position-embedding-type rope",
            "--mtp-num-layers 1 has losses that are not undone",
        ),
        (f"{P2} --optimizer sgd", "--optimizer sgd is not tried with them: they step AdamW of 32-bit moments"),
        (f"{P2} --log-saved-activations", "is not tried with activations that are dropped"),
        (
            f"{P2} --freeze-training --freeze-interval 2 --untie-embeddings-and-output-weights",
            "--freeze-training has ranks that run ahead of the others",
        ),
        ("", "--pipeline-model-parallel-size 1 has no other rank for which a step could wait"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(flags, message):
    """With reason and remedy."""
    with pytest.raises(ValueError, match="--optimistic-steps: ") as error:
        arguments(f"{FLAG} {flags}", world_size=2 if flags else 1)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_program_of_a_file_has_no_words_to_go_back(tmp_path):
    (tmp_path / "pairs.csv").write_text("0F0,0B0\n1F0,1B0\n")
    with pytest.raises(ValueError, match=r"--optimistic-steps: the program of .* has no words for steps that are"):
        arguments(f"{P2} {FLAG} --pipeline-program {tmp_path}/pairs.csv", world_size=2)
