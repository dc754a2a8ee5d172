"""Layers of Transformer Engine train as those of megatron.core, under every schedule, in whole backwards and in halves.

They are those of a stand-in in plain torch (tests/stand_ins/transformer_engine), which says what it cannot know. The
references are megatron.core's own layers with the same weights, in a plain loop of one process.
"""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from tests import workers
from tests.pipeline.runtime.stages.megatron import (
    engine_cases,
    megatron_provisional_reference,
    megatron_reference,
    split_cases,
)
from tests.pipeline.runtime.stages.megatron.megatron_model import Case
from tests.pipeline.runtime.stages.megatron.test_update import CLOSE, EXACT, SPREAD, Outcomes, Row, check, marked

ENGINE = {"engine": True, "layers": 4, "hidden": 16, "batches": (4,) * 3}
HALVES = ENGINE | {"puts_off": True}
TWO, FOUR, V = ((2, 1, 1),), ((4, 1, 1),), {"v": 2}
MODERN = {"swiglu": True, "normalization": "RMSNorm", "position": "rope"}
SP = {"sequence_parallel": True}
SHARED = {"cp": 2, "exchange": "p2p", "position": "rope", "token_form": True}
PACKED = {"packed": True, "micro_batch_size": 1, "position": "rope"}

TABLE = {
    "flush, fused": Row(ENGINE | {"schedule": "flush", "fused": True}, layouts=TWO),
    "gpipe": Row(ENGINE | {"schedule": "gpipe"}, layouts=TWO),
    "interleaved": Row(ENGINE | V | {"schedule": "interleaved", "drains": (1,)}, layouts=TWO),
    "2bw, full recompute, fused": Row(
        ENGINE | {"schedule": "2bw", "recompute_granularity": "full", "dropout": 0.1, "fused": True}, layouts=TWO
    ),
    "2bw, modern": Row(ENGINE | MODERN | {"schedule": "2bw", "clip": 0.5}, layouts=FOUR),
    "2bw, recompute instructions": Row(ENGINE | {"schedule": "2bw", "recompute": True, "dropout": 0.1}, layouts=TWO),
    "2bw, balanced (bpipe)": Row(ENGINE | {"schedule": "2bw", "balance": True}, layouts=FOUR),
    "2bw, sequence parallel": Row(ENGINE | SP | {"schedule": "2bw"}, layouts=((2, 2, 1),), allowed=SPREAD),
    "pipedream": Row(ENGINE | {"schedule": "pipedream", "batches": (1,) * 6}, layouts=TWO),
    "bert": Row(ENGINE | {"schedule": "flush", "bert": True}, layouts=TWO),
    "flush, layers that could put off": Row(HALVES | {"schedule": "flush"}, layouts=TWO),
    "zb-h1": Row(HALVES | {"schedule": "zb-h1", "clip": 0.5}, layouts=TWO),
    "zb-h1, modern, four stages": Row(HALVES | MODERN | {"schedule": "zb-h1"}, layouts=FOUR),
    "zb-h1, full recompute": Row(
        HALVES | {"schedule": "zb-h1", "recompute_granularity": "full", "dropout": 0.1}, layouts=TWO
    ),
    "zb-h1, recompute instructions": Row(
        HALVES | {"schedule": "zb-h1", "recompute": True, "dropout": 0.1}, layouts=TWO
    ),
    "zb-h1, tied": Row(HALVES | {"schedule": "zb-h1", "tied": True}, layouts=TWO, allowed=CLOSE),
    "zb-h1, replicas": Row(
        HALVES | {"schedule": "zb-h1", "distributed_optimizer": True}, layouts=((1, 1, 2),), allowed=CLOSE
    ),
    "zb-h1, tensor parallel": Row(HALVES | {"schedule": "zb-h1"}, layouts=((1, 2, 1),), allowed=SPREAD),
    "zb-h1, sequence parallel": Row(HALVES | SP | {"schedule": "zb-h1"}, layouts=((1, 2, 1),), allowed=SPREAD),
    "zbv, fused": Row(HALVES | V | {"schedule": "zbv", "fused": True, "drains": (1,)}, layouts=TWO),
    "zb-h1, experts": Row(HALVES | {"schedule": "zb-h1", "experts": 4, "swiglu": True}, layouts=TWO),
    "2bw, context parallel": Row(ENGINE | SHARED | {"schedule": "2bw"}, layouts=TWO, allowed=SPREAD),
}  # fmt: skip
FULL = {
    "interleaved", "pipedream", "zb-h1, recompute instructions", "zb-h1, tied", "zb-h1, replicas", "gpipe",
    "2bw, recompute instructions", "zb-h1, tensor parallel", "zb-h1, modern, four stages",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    return Outcomes(TABLE, f"{engine_cases.__name__}:train")


@pytest.mark.sample(1, "zb-h1, sequence parallel-(1, 2, 1)")
@pytest.mark.parametrize(("name", "layout"), marked(TABLE, full=FULL), ids=str)
def test_layers_of_the_engine_train_as_those_of_core(outcomes, name, layout):
    """Losses, norms and weights of both versions: bit-equal, where the sums run in the same order."""
    check(outcomes[name, layout], TABLE[name].allowed)


def fp8(recipe: str, **fields) -> dict:
    return {"attention": tuple({"fp8": "hybrid", "fp8_recipe": recipe, **fields}.items())}


DELAYED = fp8("delayed", fp8_amax_history_len=64, fp8_amax_compute_algo="max")
GROUPED = {"experts": 4, "swiglu": True, "router": (("moe_grouped_gemm", True),)}
IN_FP8 = {
    "2bw, delayed, fused": Row(ENGINE | DELAYED | {"schedule": "2bw", "clip": 0.5, "fused": True}, layouts=TWO),
    "2bw, tensorwise, recompute instructions": Row(
        ENGINE | fp8("tensorwise") | {"schedule": "2bw", "recompute": True, "dropout": 0.1}, layouts=TWO
    ),
    "2bw, predicted, delayed, packed": Row(
        ENGINE | DELAYED | PACKED | {"schedule": "2bw", "predict": True}, layouts=TWO
    ),
    "2bw, predicted, delayed, context parallel": Row(
        ENGINE | DELAYED | SHARED | {"schedule": "2bw", "predict": True, "reduce_partial": True}, layouts=TWO,
        allowed=SPREAD,
    ),
    "zb-h1, delayed, tensor parallel": Row(
        HALVES | DELAYED | {"schedule": "zb-h1"}, layouts=((1, 2, 1),), allowed=SPREAD
    ),
    "2bw, delayed, context parallel": Row(
        ENGINE | DELAYED | SHARED | {"schedule": "2bw", "clip": 0.5}, layouts=TWO, allowed=SPREAD
    ),
    "flush, delayed, context parallel": Row(
        ENGINE | DELAYED | SHARED | {"schedule": "flush"}, layouts=((1, 1, 1),), allowed=SPREAD
    ),
    "2bw, tensorwise, context parallel": Row(
        ENGINE | fp8("tensorwise") | SHARED | {"schedule": "2bw"}, layouts=TWO
    ),
    "flush, blockwise, packed": Row(ENGINE | fp8("blockwise") | PACKED | {"schedule": "flush"}, layouts=TWO),
    "interleaved, delayed": Row(ENGINE | V | DELAYED | {"schedule": "interleaved"}, layouts=TWO),
    "flush, delayed, fused": Row(ENGINE | DELAYED | {"schedule": "flush", "fused": True}, layouts=TWO),
    "flush, the latest values": Row(ENGINE | fp8("delayed", fp8_margin=1) | {"schedule": "flush"}, layouts=TWO),
    "2bw, mxfp8, modern": Row(ENGINE | MODERN | fp8("mxfp8") | {"schedule": "2bw", "hidden": 32}, layouts=FOUR),
    "gpipe, blockwise, full recompute": Row(
        ENGINE | fp8("blockwise") | {"schedule": "gpipe", "recompute_granularity": "full", "dropout": 0.1}, layouts=TWO
    ),
    "zb-h1, tensorwise, experts": Row(HALVES | GROUPED | fp8("tensorwise") | {"schedule": "zb-h1"}, layouts=TWO),
    "zb-h1, delayed, bf16": Row(HALVES | DELAYED | {"schedule": "zb-h1", "dtype": "bfloat16"}, layouts=TWO),
    "bert, tensorwise": Row(ENGINE | fp8("tensorwise") | {"schedule": "2bw", "bert": True}, layouts=TWO),
    "pipedream, tensorwise": Row(
        ENGINE | fp8("tensorwise") | {"schedule": "pipedream", "batches": (1,) * 6}, layouts=TWO
    ),
}  # fmt: skip
USUAL = 3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (place >= USUAL)) for place, name in enumerate(IN_FP8)]
)
def test_weights_in_fp8_are_those_of_their_batch(name):
    """Bit-equal to a plain loop that casts weights for the first microbatch of each batch. Of two batches at once the
    weights are kept in FP8 where weights are delayed, and else of one. Tensor ranks share their largest values, so
    that their scales are those of whole tensors.
    """
    row = IN_FP8[name]
    [(p, t, d)] = row.layouts
    case = Case(**row.options, p=p, t=t, d=d)
    found = workers.run(case.num_ranks, f"{engine_cases.__name__}:train_in_fp8", device="engine", **vars(case))
    plain = megatron_provisional_reference if case.predict else megatron_reference
    alone = row.allowed == EXACT and case.cp  # scales are those of a rank's own tokens, so that the loop has as many
    expected, *_ = workers.run(alone or 1, f"{plain.__name__}:reference", device="engine", **vars(case))
    check((case, expected, [each.result for each in found]), row.allowed)
    if "pipedream" not in name:
        assert max(each.num_kept for each in found) == (2 if case.schedule == "2bw" else 1)


def test_evaluations_cast_the_newest_weights():
    """And not what the batch before has left."""
    case, options = f"{engine_cases.__name__}:evaluated", fp8("tensorwise")
    kept, fresh = (workers.run(1, case, device="engine", kept=kept, **options) for kept in (True, False))
    assert kept == fresh


@pytest.mark.parametrize("abandons", [False, True])
def test_a_batch_that_begins_again_casts_its_new_weights(abandons):
    """After a rollback and after a lost rank, the batch of the same number finds nothing of the weights of before."""
    case, options = f"{engine_cases.__name__}:begun_again", {"abandons": abandons} | fp8("tensorwise")
    [kept], [fresh] = (workers.run(1, case, device="engine", kept=kept, **options) for kept in (True, False))
    assert kept == fresh and kept[1] == 0


def test_a_step_that_may_be_undone_has_no_histories_of_scales():
    """They have moved on with the forwards of the batch that begins again."""
    options = {"tensorwise": fp8("tensorwise"), "delayed": DELAYED}
    case = f"{engine_cases.__name__}:is_optimistic"
    found = {name: workers.run(1, case, device="engine", **each) for name, each in options.items()}
    assert found == {"tensorwise": [True], "delayed": [False]}


def test_replicas_have_the_same_scales():
    """Largest values are those of all replicas of a stage, while the chain reduces gradients beside; those of two
    stages differ.
    """
    options = ENGINE | DELAYED | {"schedule": "2bw", "distributed_optimizer": True, "p": 2, "d": 2}
    found = workers.run(4, f"{engine_cases.__name__}:train_in_fp8", device="engine", **options)
    first, _, last, _ = (each.scales for each in found)
    assert len(first) == len(last) == 2 * 4 * 2 and first != last
    assert [each.scales for each in found] == [first, first, last, last]


def test_halves_in_bf16_are_whole_backwards():
    case, options = f"{split_cases.__name__}:deviations", HALVES | {"dtype": "bfloat16", "p": 2}
    for each in workers.run(2, case, device="engine", whole="flush", split="zb-h1", **options):
        assert each == {"numbers": 0.0, "weights": 0.0, "decisions": 0.0}


def test_halves_of_two_batches_at_once():
    """Under 2bw the first I of a batch stand before the last W of the one before, and each adds to its own buffer."""
    options = HALVES | {"batches": (4,) * 5, "clip": 0.5, "fused": True}
    case = f"{split_cases.__name__}:deviations"
    for each in workers.run(2, case, device="engine", whole="2bw", split="2bw-split-late", p=2, **options):
        assert each == {"numbers": 0.0, "weights": 0.0, "decisions": 0.0}


def run(order: str, **options) -> tuple[dict, dict]:
    case = f"{engine_cases.__name__}:gradients"
    [found] = workers.run(1, case, device="engine", order=tuple(order.split()), **options)
    return found


def unlike(found: dict, expected: dict) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, gradient in expected.items() if not torch.equal(found[name], gradient)]


@pytest.fixture(scope="module")
def whole():
    return run("B0 B1")[0]


TWO_AT_ONCE = "I0 I1 W0 W1"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("release", ["2.3.0", "2.6.0", None])
def test_w_has_what_the_layers_put_off_and_i_all_else(whole, release, fused):
    """Weights, and the biases that are added inside their product, have gradients after W, and not before; norms and
    other biases after I. Two microbatches are put off at once. All releases, which set `.grad` in different ways.
    """
    split, kept = run(TWO_AT_ONCE, release=release, puts_off=True, fused=fused)
    late = {name for name in whole if "linear" in name and (name.endswith("weight") or "qkv.bias" in name)}
    assert kept["before W"] == whole.keys() - late - {"output_layer.weight"}
    assert len(late) == 2 * (4 + 1)
    assert not unlike(split, whole)
    assert min(kept["bytes"]) > 0 and kept["bytes at the end"] == [0, 0]


def test_what_is_kept_for_w_is_counted(whole):
    """The factors in the queues, each storage once, beside those of megatron.core's output layer; as local layers."""
    tokens, hidden, vocabulary = 16 * 2, 32, 64
    of_layer = (1 + 3) + (1 + 1) + (1 + 2) + (2 + 1)  # inputs and outputs of its linears, in hidden sizes
    _, kept = run(TWO_AT_ONCE, puts_off=True)
    assert kept["bytes"] == [4 * tokens * (2 * of_layer * hidden + hidden + vocabulary)] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_whole_backwards_do_not_touch_the_queues(whole, fused):
    """A whole backward between an I and its W gives the same gradients, added in another order."""
    split, _ = run("I0 B1 W0", puts_off=True, fused=fused)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-5, atol=1e-6)


def test_frozen_weights_put_nothing_off(whole):
    """Of a layer that is not trained nothing waits, and the gradients of the others do not change."""
    frozen = ("layers.1.mlp.linear_fc1", "layers.2.self_attention.linear_qkv")
    split, _ = run(TWO_AT_ONCE, puts_off=True, frozen=frozen)
    for name, gradient in whole.items():
        expected = torch.zeros_like(gradient) if any(part in name for part in frozen) else gradient
        assert torch.equal(split[name], expected), name


def test_grouped_experts_put_off_as_one_layer():
    """The weights of all experts come with one `backward_dw`, with the bits of a whole backward."""
    options = {"experts": 4, "swiglu": True, "router": (("moe_grouped_gemm", True),)}
    assert not unlike(run(TWO_AT_ONCE, puts_off=True, **options)[0], run("B0 B1", **options)[0])


def test_w_out_of_turn_is_an_error():
    """A queue would give the gradients of another microbatch."""
    with pytest.raises(workers.WorkerError, match="does not begin with the gradients of this W"):
        run("I0 I1 W1 W0", puts_off=True)


def test_layers_that_put_nothing_off_are_refused():
    [said] = workers.run(1, f"{engine_cases.__name__}:refusal_without_queues", device="engine")
    assert "build it with delay_wgrad_compute (Transformer Engine 2.3 or later)" in said
