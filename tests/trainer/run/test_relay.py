"""`--pipeline-schedule l2l` trains what `flush` with full recompute trains, with the weights of few stages at a time.

A rank has as many stages as layers unless the flags say otherwise. Where the sums of the norm or of tied embeddings run
in another order, numbers are equal to rounding; everything else is bit-equal, weights included.
"""

import math

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.trainer.checkpoint.test_stages import check_cut, saved  # noqa: F401  a fixture
from tests.trainer.run.run_case import joined_weights, table, train

FULL = pytest.mark.full
L2L, FLUSH = "--pipeline-schedule l2l", "--pipeline-recompute"
UNTIED, UNCLIPPED = "--untie-embeddings-and-output-weights", "--clip-grad 0"
CLIPPED = f"{UNTIED} --clip-grad 0.5"
EXACT = f"{UNTIED} {UNCLIPPED}"
DAMPED = f"{CLIPPED} --adam-eps 1e-5"  # the noise of gradients that should be 0 stays noise
P1, P2, P4 = (f"--pipeline-model-parallel-size {p}" for p in (1, 2, 4))
V1, V2 = (f"--num-virtual-stages-per-pipeline-rank {v}" for v in (1, 2))
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64"
LAYOUT = "--pipeline-model-parallel-layout"
ON_HOST = "--l2l-stash host"
SHARES = "--l2l-fetch shares"
FP16 = "--fp16 --initial-loss-scale 524288 --hysteresis 1 --loss-scale-window 3"


def reports(results: list[dict], names=("lm_loss", "grad_norm", "learning_rate", "loss_scale")) -> list[dict]:
    """What each iteration reported."""
    return [{name: record.get(name) for name in names} for record in results[-1]["records"] if "iteration" in record]


def assert_same(expected: list[dict], found: list[dict]) -> None:
    """Reports and weights are those of the other run, bit for bit."""
    assert reports(found) == reports(expected)
    one, other = joined_weights(expected), joined_weights(found)
    assert one.keys() == other.keys()
    assert not [name for name, tensor in one.items() if not torch.equal(other[name], tensor)]


BIT_EQUAL = {
    "bf16, replicas that gather": (f"{CLIPPED} --bf16", 2, f"{L2L} {V2} {SHARES}"),
    "inputs on the host, one resident": (EXACT, 1, f"{L2L} {ON_HOST} --l2l-resident-stages 1"),
    "a layer a stage, clipped": (CLIPPED, 1, f"{L2L} --l2l-update deferred"),
    "inputs on the host, bf16": (f"{CLIPPED} --bf16", 1, f"{L2L} {ON_HOST}"),
    "tensor ranks": (f"{CLIPPED} {TENSOR}", 2, L2L),
    "replicas": (CLIPPED, 2, L2L),
    "one stage": ("", 1, f"{L2L} {V1}"),
    "unequal stages, three resident": (CLIPPED, 1, f"{L2L} {LAYOUT} E|t|ttt|L --l2l-resident-stages 3"),
    "one microbatch": (f"{CLIPPED} --global-batch-size 1", 1, L2L),
    "ramp-up": (f"{EXACT} --global-batch-size 8 --rampup-batch-size 2 2 9", 1, L2L),
    "bf16 gradients": (f"{CLIPPED} --bf16 --grad-reduce-in-bf16", 1, L2L),
    "momentum": (f"{CLIPPED} --optimizer sgd", 1, L2L),
    "fused kernel": (f"{CLIPPED} --optimizer-kernel fused", 1, L2L),
    "other learning rates": (f"{CLIPPED} --decoupled-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2", 1, L2L),
    "llama": (
        f"{CLIPPED} --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
        "--qk-layernorm",
        1,
        L2L,
    ),
    "inputs on the host, tensor ranks": (f"{CLIPPED} {TENSOR}", 2, f"{L2L} {ON_HOST}"),
    "recompute within": (f"{CLIPPED} --recompute-activations", 1, f"{L2L} {V2}"),
    "masks": (f"{CLIPPED} --reset-attention-mask --reset-position-ids --eod-mask-loss", 1, L2L),
    "replicas, fused kernel": (f"{EXACT} --bf16 --optimizer-kernel fused", 2, L2L),
    "replicas, overflows": (f"{UNTIED} {FP16} --train-iters 10", 2, L2L),
    "tensor ranks and replicas that gather": (f"{CLIPPED} --bf16 {TENSOR}", 4, f"{L2L} {SHARES}"),
}


@pytest.mark.full
@table("model, num_ranks, relay", BIT_EQUAL, usual=1)
def test_the_relay_is_flush(model, num_ranks, relay):
    """On the ranks of a pipeline of one: losses, norms, learning rates and weights, with dropout, are bit-equal. Two
    replicas have mapped one store: weight, gradient, master and moments.
    """
    expected = train(num_ranks, f"{model} {FLUSH} {P1}")
    found = train(num_ranks, f"{model} {relay} {P1}")
    assert_same(expected, found)
    if num_ranks == 2 and TENSOR not in model and "sgd" not in model:
        first, second = ({file: size for file, size in each["mappings"].items() if "memfd:replicas" in file}
                         for each in found)  # fmt: skip
        num_parameters = sum(each.numel() for each in joined_weights(found).values())
        assert first == second and sum(first.values()) >= num_parameters * (18 if "bf16" in model else 16)
    if V2 in relay and num_ranks == 2:  # each of two stages once in each of six batches
        share = 0.5 if SHARES in relay else 1.0
        for each in found:
            assert each["fetched_bytes"] == pytest.approx(6 * 2 * num_parameters * share, rel=0.05)


ON_RANKS = {
    "p=2": (f"{EXACT} --bf16", 2, P2),
    "p=2 v=1": (EXACT, 2, f"{P2} {V1}"),
    "p=4": (EXACT, 4, P4),
    "p=2, inputs on the host": (f"{EXACT} --num-layers 8", 2, f"{P2} {ON_HOST}"),
    "p=2 d=2": (EXACT, 4, P2),
    "p=2 unequal stages": (EXACT, 2, f"{P2} {LAYOUT} Et|tt||tL"),
}


@pytest.mark.full
@table("model, num_ranks, layout", ON_RANKS, usual=1)
def test_each_rank_relays_its_own_stages(model, num_ranks, layout):
    """p > 1: losses and weights of one process, bit for bit; squares of the norm are added in another order."""
    replicas = num_ranks // int(layout.split()[1])
    expected, found = train(replicas, f"{model} {FLUSH} {P1}"), train(num_ranks, f"{model} {L2L} {layout}")
    for theirs, mine in zip(reports(expected), reports(found), strict=True):
        assert mine.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=1e-12)
        assert mine == theirs
    one, other = joined_weights(expected), joined_weights(found)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (1, P1),
        (1, f"{P1} {UNCLIPPED}"),
        (2, P2),
        (2, P1),
        (4, f"{P2} {TENSOR} --hidden-dropout 0 --attention-dropout 0"),
    ],
)
def test_tied_embeddings_get_the_sum_of_both_gradients(num_ranks, layout):
    """On one rank, too, where the two gradients come at different times: equal to rounding, and the copies equal."""
    model = "--clip-grad 0.5 --adam-eps 1e-5 " + " ".join(layout.split()[2:])
    expected, found = train(1, f"{model.replace(TENSOR, '')} {FLUSH}"), train(num_ranks, f"{model} {L2L} {layout}")
    for theirs, mine in zip(reports(expected), reports(found), strict=True):
        assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-6)
    weights, found_weights = joined_weights(expected), joined_weights(found)
    assert torch.equal(found_weights.pop("output_layer.weight"), found_weights["embedding.word_embeddings.weight"])
    for name, tensor in weights.items():
        torch.testing.assert_close(found_weights[name], tensor, rtol=0, atol=1e-5)


@FULL
def test_tied_embeddings_in_16_bits_are_added_up_in_fp32():
    """As wherever the ends are stages of their own: bit-equal to two ranks of flush. On one, where one weight has both
    uses, autograd adds up its 16-bit gradients.
    """
    model = "--clip-grad 0 --bf16"
    alone, apart = train(1, f"{model} {FLUSH} {P1}"), train(2, f"{model} {FLUSH} {P2}")
    found = train(1, f"{model} {L2L} {P1}")
    losses = [[each["lm_loss"] for each in reports(results)] for results in (alone, apart, found)]
    assert losses[2] == losses[1] != losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=5e-3)


@FULL
def test_an_overflow_leaves_the_batch_out():
    """FP16 from a loss scale that is too large: scales, skipped batches and weights are those of flush."""
    model = f"{UNTIED} {FP16} --train-iters 10 --global-batch-size 8"
    expected = train(1, f"{model} {FLUSH}")
    scales = [record["loss_scale"] for record in reports(expected)]
    assert scales[:3] == [524288, 262144, 131072] and 262144 in scales[3:], "two overflows in a row, and a later one"
    assert_same(expected, train(1, f"{model} {L2L}"))


CUTS = {
    "l2l to flush": (f"{EXACT} --bf16", 1, f"{P1} {L2L}", 1, f"{P1} {FLUSH}", True),
    "flush to l2l": (EXACT, 1, f"{P1} {FLUSH}", 1, f"{P1} {L2L}", True),
    "flush on two ranks to l2l": (EXACT, 2, P2, 2, f"{P2} {L2L} {V1}", True),
    "tied to flush": ("--clip-grad 0.5 --adam-eps 1e-5", 1, f"{P1} {L2L}", 1, P1, False),
    "unclipped, tied, eager": ("--clip-grad 0", 2, f"{P2} {L2L}", 2, f"{P2} {L2L}", True),
    "distributed optimizer to l2l": (DAMPED, 2, f"{P1} --use-distributed-optimizer", 2, f"{P1} {L2L}", False),
    "l2l to distributed optimizer": (DAMPED, 2, f"{P1} {L2L}", 2, f"{P1} --use-distributed-optimizer", False),
    "fp16": (f"{UNTIED} {FP16}", 1, f"{P1} {L2L}", 1, f"{P1} {FLUSH}", True),
    "momentum, beside training": (f"{CLIPPED} --optimizer sgd", 1, f"{P1} {L2L} --async-save", 1, f"{P1} {L2L}", True),
    "fused kernel": (f"{CLIPPED} --optimizer-kernel fused", 1, f"{P1} {FLUSH}", 1, f"{P1} {L2L}", True),
    "replicas to flush": (f"{EXACT} --bf16", 2, f"{P1} {L2L} --async-save", 2, f"{P1} {FLUSH}", True),
    "replicas to one": (f"{DAMPED} --bf16", 2, f"{P1} {L2L}", 1, f"{P1} {FLUSH}", False),
}


@table("model, writers, source, readers, target, exact", CUTS, usual=0)
def test_checkpoints_go_both_ways(saved, model, writers, source, readers, target, exact):  # noqa: F811
    """A run that goes on from a checkpoint of the other schedule has the numbers of the run that went on."""
    check_cut(saved, model, writers, source, readers, target, exact=exact)


@pytest.mark.full
def test_a_checkpoint_is_that_of_flush(saved):  # noqa: F811
    """Keys and shapes, masters and moments among them, are those of one stage with all layers."""
    stored = []
    for schedule in (FLUSH, L2L):
        folder, _ = saved(1, f"{EXACT} --bf16 {P1} {schedule}")
        entries = FileSystemReader(f"{folder}/iter_0000003").read_metadata().state_dict_metadata
        stored.append({key: tuple(getattr(entry, "size", ())) for key, entry in entries.items()})
    assert stored[0] == stored[1]
    assert stored[1]["optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight"] == (4, 128, 32)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["", "--bf16"])
def test_weights_alone_can_be_taken_over(saved, dtype):  # noqa: F811
    """--finetune, and --skip-train: from a checkpoint of flush, masters begin at its weights."""
    model = f"{EXACT} {dtype}"
    folder, _ = saved(1, f"{model} {P1} {FLUSH}")
    flags = f"{model} --load {folder} --finetune"
    assert_same(train(1, f"{flags} {FLUSH}"), train(1, f"{flags} {L2L}"))
    flags = f"{model} --load {folder} --skip-train --eval-iters 2 --eval-interval 1"
    losses = [[each["validation_loss"] for each in train(1, f"{flags} {schedule}")[0]["records"]
               if "validation_loss" in each] for schedule in (FLUSH, L2L)]  # fmt: skip
    assert losses[0] == losses[1] and len(losses[0]) == 1


@pytest.mark.full
def test_evaluations_and_saving_change_nothing(tmp_path):
    """Drains, evaluations and checkpoints on the way, with inputs on the host: losses and weights of a run without any
    of them, and flush's evaluations; and the timeline, with its lanes, is drawn.
    """
    flags, busy = f"{EXACT} --train-iters 5 {L2L}", "--eval-iters 2 --eval-interval 2"
    plain = train(1, flags)
    folder = tmp_path / "timeline"
    found = train(1, f"{flags} {ON_HOST} {busy} --save {tmp_path} --save-interval 3 --pipeline-timeline {folder}")
    assert_same([{**plain[0], "records": [each for each in plain[0]["records"] if "lm_loss" in each]}],
                [{**found[0], "records": [each for each in found[0]["records"] if "lm_loss" in each]}])  # fmt: skip
    flush = train(1, f"{EXACT} --train-iters 5 {FLUSH} {busy}")
    losses = [[each["validation_loss"] for each in run[-1]["records"] if "validation_loss" in each]
              for run in (flush, found)]  # fmt: skip
    assert len(losses[0]) == 3 and losses[0] == losses[1] and all(map(math.isfinite, losses[0]))
    assert sorted(path.name for path in folder.iterdir()) == ["measured.json", "timeline.png", "trace.json"]


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(tmp_path, num_ranks):
    """SIGTERM in the middle, with inputs on the host: a checkpoint, and the next run ends with the weights of one that
    nobody stopped, whose inputs stayed on the device; also of two replicas, of which one is asked.
    """
    flags = f"{CLIPPED} --bf16 {P1} {L2L}"
    stopped = train(num_ranks, f"{flags} {ON_HOST} --save {tmp_path}", stop_after={0: 2})
    assert stopped[0]["iteration"] < 6 and any("exiting on request" in line for line in stopped[0]["lines"])
    rest, whole = train(num_ranks, f"{flags} {ON_HOST} --load {tmp_path}"), train(num_ranks, flags)
    assert rest[0]["iteration"] == 6
    left = whole[-1]["records"][stopped[0]["iteration"] :]
    assert_same([*whole[:-1], {**whole[-1], "records": left}], rest)
