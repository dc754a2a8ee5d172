"""Runs with multi-token prediction: equal numbers however the job is cut, losses in the log, checkpoints, refusals."""

import functools

import pytest
import torch

from tests.trainer.arguments.command_line import arguments
from tests.trainer.run.run_case import joined_weights, table, train

FURTHER = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --position-embedding-type rope --clip-grad 0"
UNTIED = "--untie-embeddings-and-output-weights"
SMOOTH = "--hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --adam-eps 1e-5"
DEEP = "--pipeline-model-parallel-size 2"
WIDE = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64"
LAYOUT = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout"
LOSSES = ("lm_loss", "mtp_1_loss", "mtp_2_loss")


def numbers(results: list[dict]) -> dict[str, list[float]]:
    records = [record for record in results[-1]["records"] if "lm_loss" in record]
    return {name: [record[name] for record in records] for name in LOSSES}


@functools.cache
def on_one_rank(flags: str) -> list[dict]:
    return train(1, f"{FURTHER} {flags}")


def check(results: list[dict], expected: list[dict], tolerance: float) -> None:
    ours, theirs = numbers(results), numbers(expected)
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=tolerance, abs=0.0)
    one, other = joined_weights(expected), joined_weights(results)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0.0, atol=5 * tolerance, msg=lambda text, n=name: n + text)


CUTS = {
    "dropout": (2, f"{UNTIED} --adam-eps 1e-5 --pipeline-schedule 2bw", "", 2e-6),
    "l2l": (2, f"{UNTIED} {SMOOTH} --pipeline-schedule l2l", "", 2e-6),
    "another rate": (2, f"{UNTIED} {SMOOTH} --decoupled-lr 5e-3", "", 2e-6),
    "a stage of their own, predicted": (
        4, f"{UNTIED} {SMOOTH} --pipeline-schedule 2bw --2bw-provisional uniform --2bw-provisional-microbatches 1",
        f"{LAYOUT} Et|t*3|mm|L", 2e-6,
    ),
    "predicted, tied": (2, f"{SMOOTH} --pipeline-schedule 2bw --2bw-provisional uniform "
                        "--2bw-provisional-microbatches 1", "", 2e-6),
    "Muon": (2, f"{UNTIED} {SMOOTH} --optimizer muon --muon-fp32-matmul-prec high --disable-bias-linear", "", 2e-6),
    "experts": (2, f"{UNTIED} {SMOOTH} --num-experts 4 --moe-aux-loss-coeff 1e-2", "", 2e-6),
    "tensor ranks": (4, f"{SMOOTH} --pipeline-schedule 2bw", f"{DEEP} {WIDE}", 2e-6),
    "replicas": (4, f"{UNTIED} {SMOOTH}", f"{DEEP} --use-distributed-optimizer", 2e-6),
    "recomputed": (2, f"{UNTIED} {SMOOTH} --recompute-granularity full --recompute-method uniform "
                   "--recompute-num-layers 1", "", 2e-6),
    "zbv": (2, f"{UNTIED} {SMOOTH}", "--pipeline-schedule zbv", 2e-6),
    "a stage of their own": (4, f"{UNTIED} {SMOOTH} --pipeline-schedule 2bw", f"{LAYOUT} Et|t*3|mm|L", 2e-6),
    "a stage of their own, beside the first": (
        2, f"{UNTIED} {SMOOTH}", f"--pipeline-schedule interleaved {LAYOUT.replace('4', '2')} Et|t*3|mm|L", 2e-6
    ),
    "a stage of their own, tensor ranks": (
        6, f"{UNTIED} {SMOOTH}", f"{WIDE} {LAYOUT.replace('4', '3')} Et|tttmm|L --pipeline-schedule zb-h1", 2e-6
    ),
}  # fmt: skip


@table(("ranks", "flags", "cut", "tolerance"), CUTS, usual=1)
def test_numbers_do_not_depend_on_the_cut(ranks, flags, cut, tolerance):
    """Losses of all tokens, and weights, are those of one rank, but for the order in which the embedding's gradients
    are added up."""
    check(train(ranks, f"{FURTHER} {flags} {cut}"), on_one_rank(flags), tolerance)


@pytest.mark.full
def test_losses_of_further_tokens_are_reported():
    """The log and the metrics have them for training, and not for evaluations; recomputing changes nothing."""
    last = train(1, f"{FURTHER} {UNTIED} --eval-iters 1 --eval-interval 3")[-1]
    line = next(line for line in last["lines"] if "iteration        6/" in line)
    assert " mtp_1 loss: 4." in line and " mtp_2 loss: 4." in line
    evaluations = [record for record in last["records"] if "validation_loss" in record]
    assert len(evaluations) == 2 and not any("mtp" in key for key in evaluations[0])
    recomputed = train(1, f"{FURTHER} {UNTIED} --pipeline-recompute")
    assert numbers(recomputed) == numbers([last])


@pytest.mark.full
def test_the_factor_multiplies_the_mean_of_the_losses():
    """With a factor of 0 the layers learn nothing, and the others what they learn without them."""
    flags = f"{UNTIED} {SMOOTH} --weight-decay 0"
    without = train(1, f"--position-embedding-type rope --clip-grad 0 {flags}")
    silent = train(1, f"{FURTHER} {flags}".replace("factor 0.5", "factor 0"))
    weights, kept = joined_weights(without), joined_weights(silent)
    assert all(torch.equal(kept[name], tensor) for name, tensor in weights.items())
    assert {name.split(".")[0] for name in kept.keys() - weights.keys()} == {"mtp"}
    assert numbers(silent)["mtp_1_loss"] != numbers(on_one_rank(flags))["mtp_1_loss"]


RESUMED = {
    "other depth": (2, UNTIED, 1, "", 2e-6),
    "other depth, tied": (1, "", 2, "", 2e-6),
    "other replicas": (2, f"{UNTIED} {SMOOTH}", 4, f"{DEEP} --use-distributed-optimizer", 2e-6),
    "other tensor ranks": (1, SMOOTH, 4, f"{DEEP} {WIDE}", 2e-6),
    "loss on a stage of its own": (1, UNTIED, 4, f"{LAYOUT} Et|t*3|mm|L", 2e-6),
    "same": (2, UNTIED, 2, "", 0.0),
}


@pytest.mark.full
@table(("writers", "flags", "readers", "cut", "tolerance"), RESUMED, usual=1)
def test_a_checkpoint_goes_on_at_other_degrees(tmp_path, writers, flags, readers, cut, tolerance):
    """Weights and moments, in both versions of 2bw; the copy of the embedding is stored once."""
    flags = f"{FURTHER} {flags} --pipeline-schedule 2bw --load {tmp_path}"
    whole = train(writers, flags.replace(f"--load {tmp_path}", ""))
    train(writers, f"{flags} --save {tmp_path} --exit-interval 3")
    found = numbers(train(readers, f"{flags} {cut}"))
    for name, expected in numbers(whole).items():
        assert found[name] == pytest.approx(expected[3:], rel=tolerance, abs=0.0)


ONE = "--mtp-num-layers 1 --position-embedding-type rope"
DEEPSEEK = (  # as published for DeepSeek-V3, on 16 ranks with two stages each
    "--num-layers 61 --untie-embeddings-and-output-weights --pipeline-model-parallel-size 16 --global-batch-size 32 "
    "--pipeline-model-parallel-layout Et*3|(tt|)*29m|L"
)


@pytest.mark.parametrize(
    ("layout", "ranks", "tied_stage"), [("Et*3|(tt|)*29m|L", 16, 30), ("Et*3|(tt|)*29t|mL", 32, None)]
)
def test_layouts_say_where_further_layers_are(layout, ranks, tied_stage):
    """The published layout of DeepSeek-V3 leaves the loss to a stage of its own; programs know which stage has a copy
    of the embedding."""
    flags = DEEPSEEK.replace("16", str(ranks)).replace("Et*3|(tt|)*29m|L", layout)
    if "29t" in layout:
        flags = flags.replace("61", "62")
    args = arguments(f"{ONE} {flags}", world_size=ranks)
    assert args.schedule.tied_embeddings and args.schedule.tied_stage == tied_stage
    program = args.schedule.build((32,))
    with_copies = {
        rank for rank, row in enumerate(program.rows) if any(each.kind.name == "REDUCE_EMBED" for each in row)
    }
    stage = 31 if tied_stage is None else tied_stage
    assert with_copies == {0, stage % ranks}


def test_programs_say_which_stage_has_the_copy(tmp_path):
    """A file whose rows add up the embedding's gradients of another stage than the layout's is refused; with the right
    one, it is the schedule's program."""
    flags = f"{ONE} {UNTIED} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|ttt|m|L"
    program = arguments(flags, world_size=4).schedule.build((8,))
    file, other = tmp_path / "rows.csv", tmp_path / "other.csv"
    file.write_text(program.to_csv())
    assert "# tied_stage: 2" in program.to_csv()
    args = arguments(f"{flags} --pipeline-program {file}", world_size=4)
    assert args.schedule.program.rows == program.rows and args.schedule.tied_stage == 2
    last = flags.replace("Et|ttt|m|L", "Et|tt|t|mL")
    other.write_text(arguments(last, world_size=4).schedule.build((8,)).to_csv())
    assert "tied_stage" not in other.read_text()
    with pytest.raises(
        ValueError, match="and the last, and layers of multi-token prediction are on stage 2; write # t"
    ):
        arguments(f"{flags} --pipeline-program {other}", world_size=4)
    with pytest.raises(
        ValueError, match="of the first stage and 2, and layers of multi-token prediction are on stage 3"
    ):
        arguments(f"{last} --pipeline-program {file}", world_size=4)
    said = other.read_text().replace("# tied_embeddings", "# tied_stage: 3\n# tied_embeddings")
    other.write_text(said)
    assert "# tied_stage: 3" in said
    assert arguments(f"{last} --pipeline-program {other}", world_size=4).schedule.program.tied_stages == (0, 3)
    with pytest.raises(ValueError, match="of the first stage and 2, and the output layer is on stage 3; write # t"):
        arguments(f"--pipeline-model-parallel-size 4 --num-layers 4 --pipeline-program {file}", world_size=4)


def test_no_further_layers_share_no_embedding():
    """0 layers are none."""
    args = arguments(f"--mtp-num-layers 0 --pipeline-model-parallel-size 2 {UNTIED}", world_size=2)
    assert args.mtp_num_layers is None and not args.schedule.tied_embeddings


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--mtp-loss-scaling-factor 0.3", "--mtp-num-layers is not; give both, or neither"),
        ("--mtp-num-layers -1", "--mtp-num-layers -1 must be at least 0"),
        ("--mtp-num-layers 1", "where learned positions are; add --position-embedding-type rope"),
        (f"{ONE} --window-size 3,0 --window-attn-skip-freq [1,1,0,1]", "whether it has a window; give a whole number"),
        (f"{ONE} {UNTIED} --freeze-training", "would freeze with the first layers; leave out the flags that freeze"),
        (
            f"{ONE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            "one by one, not --recompute-num-layers 2 at once; give 1, or use --recompute-method block",
        ),
        (
            f"{ONE} {UNTIED} {DEEP} --pipeline-schedule pipedream --clip-grad 0",
            "the embedding of --mtp-num-layers 1 would part; use flush or 2bw",
        ),
        (f"{ONE} {DEEP} --pipeline-model-parallel-layout Ett|ttL", "write E, 4 times t, 1 times m and L"),
        (f"{ONE} {DEEP} --pipeline-model-parallel-layout Ett|mttL", "decoder layers must be placed before MTP layers"),
        (
            f"{ONE} --mtp-num-layers 2 {DEEP} --pipeline-model-parallel-layout Ett|tt|m|mL",
            "must be in the same one virtual",
        ),
        (
            f"{ONE} {DEEP} --pipeline-model-parallel-layout Ett|tt|m|L",
            "three stages would share the embedding; write mL",
        ),
        (
            f"{ONE} {UNTIED} {LAYOUT.replace('4', '3')} E|tt|tt|m||L",
            "has stages between m and L, which hold nothing; write m|L",
        ),
        (
            f"{ONE} {UNTIED} {DEEP} --pipeline-model-parallel-layout Ett|tt|m|L --pipeline-schedule l2l",
            "weights on the host are updated where the first and the last stage share an embedding",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(flags, reason):
    """In one sentence, with the remedy."""
    ranks = next((size for size in (2, 3) if f"-parallel-size {size}" in flags), 1)
    with pytest.raises(ValueError) as error:
        arguments(flags, world_size=ranks)
    assert reason in str(error.value) and "\n" not in str(error.value)
