"""What a layer does, against the papers' counts."""

from dataclasses import replace

import pytest

from megatron.planner import Architecture
from megatron.planner.job.software import MEGATRON_2021, MEGATRON_CORE, MEGATRON_V3, TORCHTITAN
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.work import LayerWork

H, A, S = 4096, 32, 2048
SHAPE = Architecture.gpt3(
    num_layers=8, hidden_size=H, num_attention_heads=A, sequence_length=S, vocabulary_size=51200
)  # fmt: skip


def work(tensor: int = 1, size: int = 1, *, split: bool = False, software=MEGATRON_V3, shape=SHAPE) -> LayerWork:
    return LayerWork(shape, software, tensor=tensor, micro_batch_size=size, sequence_parallel=split)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_operations_of_all_ranks_are_the_models(tensor):
    """All tensor ranks together, layers and head, do what `Architecture.operations` counts, 3 times a forward."""
    each = work(tensor, 2)
    layers = SHAPE.num_layers * (each.forward.operations + each.backward.operations)
    head = sum(part.operations for part in each.head)
    assert tensor * (layers + head) == pytest.approx(SHAPE.operations(2), rel=1e-12)
    assert each.backward.operations == pytest.approx(2 * each.forward.operations)


def test_recomputation():
    each = work(4)
    assert each.recomputed(RecomputeScope.NONE).operations == 0
    assert each.recomputed(RecomputeScope.LAYER) == each.forward
    attention = each.recomputed(RecomputeScope.ATTENTION)
    assert attention.operations == pytest.approx(4 * S * S * H / 4)  # two products of the scores (Korthikanti, 5)
    assert attention.exchanged == 0 and each.forward.exchanged > 0


def test_fused_softmax_needs_a_multiple_of_four():
    """32 heads: 8 ranks have 4 each, 16 have 2; microbatches of 2 make that 4 again."""
    assert work(8).softmax_is_fused and not work(16).softmax_is_fused and work(16, 2).softmax_is_fused
    scores = A / 16 * S * S
    slow, fast = work(16), work(16, 2)
    saved = slow.forward.traffic - fast.forward.traffic / 2
    assert saved == pytest.approx((37 - 4) * scores)
    weights = 2 * 2 * 12 * H * H / 16  # gradients of weights are added once whatever the microbatch
    assert slow.backward.traffic - (fast.backward.traffic + weights) / 2 == pytest.approx((41 - 6) * scores)


def test_flash_attention_leaves_no_scores():
    flash = work(16, software=replace(MEGATRON_CORE, flash_attention=True))
    assert flash.forward.traffic < work(16).forward.traffic - 37 * A / 16 * S * S
    assert flash.recomputed(RecomputeScope.ATTENTION).traffic == 0


def test_sequences_that_are_split():
    """As many bytes in the forward; the backward gathers what it did not keep, and norms and dropout are divided."""
    whole, split = work(8), work(8, split=True)
    all_reduce = 2 * 7 / 8 * 2 * S * H
    assert whole.forward.exchanged == split.forward.exchanged == pytest.approx(2 * all_reduce)
    assert (whole.backward.exchanged, whole.backward.overlapped) == (0, pytest.approx(2 * all_reduce))
    assert split.backward.exchanged == pytest.approx(all_reduce)
    assert whole.forward.traffic - split.forward.traffic == pytest.approx((1 - 1 / 8) * (8 + 14) * S * H)


def test_software_that_waits():
    """In 2021 tensor ranks waited for sums, and gradients were added in a pass of their own."""
    old, new = work(8, software=MEGATRON_2021), work(8)
    assert old.backward.overlapped == 0 and old.backward.exchanged == pytest.approx(new.backward.overlapped)
    assert old.backward.traffic - new.backward.traffic == pytest.approx(2 * 2 * 12 * H * H / 8)


def test_one_rank_sends_nothing():
    each = work()
    for part in (each.forward, each.backward, *each.embedding, *each.head):
        assert (part.exchanged, part.overlapped, part.collectives) == (0, 0, 0)


def test_gated_layers_and_grouped_queries():
    """Llama's shape: operations are those of its matrices."""
    shape = replace(SHAPE, gated=True, ffn_hidden_size=11008, num_query_groups=8)
    each = work(2, shape=shape)
    matrices = H * (H + 2 * H // 4) + H * H + 3 * H * 11008
    assert each.forward.operations == pytest.approx((2 * S * matrices + 4 * S * S * H) / 2)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tensor", [1, 4])
def test_halves_do_what_the_whole_does(tensor, split):
    """Operations, calls, bytes and kernels of I and W are the whole backward's, of a layer and of the head. W has the
    linears' products alone, as many as a forward has; the attention's core is in I."""
    each = work(tensor, 2, split=split, software=MEGATRON_CORE)
    pairs = ((each.backward, each.backward_input, each.backward_weight), (each.head[1], *each.head_halves))
    for whole, of_input, of_weight in pairs:
        both = of_input + of_weight
        for name in ("operations", "calls", "traffic", "kernels"):
            assert getattr(both, name) == pytest.approx(getattr(whole, name)), name
        assert both.exchanged == pytest.approx(whole.exchanged + whole.overlapped) and both.overlapped == 0
    linears = 2 * 2 * S * SHAPE.layer_matrices / tensor
    assert each.backward_weight.operations == pytest.approx(linears)
    assert each.backward_input.operations - linears == pytest.approx(4 * 2 * 2 * S * S * H / tensor)


def test_what_halves_send_by_themselves():
    """Of 8 ranks: without split sequences W sends nothing; with them it gathers the inputs that a whole backward
    gathers under products, as many bytes as half of what is hidden there."""
    plain, split = (work(8, split=split, software=MEGATRON_CORE) for split in (False, True))
    assert plain.backward_weight.exchanged == 0 and plain.backward_input.exchanged == plain.backward.overlapped
    assert split.backward_weight.exchanged == pytest.approx(split.backward.overlapped / 2)
    assert split.backward_weight.collectives > plain.backward_weight.collectives == 0


def test_heads_that_are_not_aligned():
    """Of 108 elements, where the products of scores have rows of 216 bytes; of 112 none is, nor of any with flash
    attention, whose kernels fill heads up."""
    shapes = [replace(SHAPE, kv_channels=width) for width in (108, 112)]
    uneven, even = (work(shape=shape) for shape in shapes)
    products = 4 * A * S * S
    assert uneven.forward.unaligned == pytest.approx(108 * products) and even.forward.unaligned == 0
    assert uneven.backward.unaligned == 2 * uneven.forward.unaligned
    assert even.forward.operations - uneven.forward.operations == pytest.approx(112 * products + 32 * A * H * S)
    assert work(shape=shapes[0], software=replace(MEGATRON_CORE, flash_attention=True)).forward.unaligned == 0


LLAMA = replace(
    SHAPE, hidden_size=4096, ffn_hidden_size=14336, num_query_groups=8, sequence_length=8192, gated=True,
    hidden_dropout=False, attention_dropout=False, linear_biases=False, norm_vectors=1, tied_embeddings=False,
)  # fmt: skip


def test_eager_operators_take_a_pass_each():
    """Of a Llama's layer in 16 bits, bytes of a token: norms, residuals, gate and product, rotary embeddings, and keys
    and values for every query. Compiled, what Megatron's own kernels take, without the context's copy."""
    eager, compiled = (
        work(software=replace(TORCHTITAN, fuses_elementwise=fused), shape=LLAMA).forward for fused in (False, True)
    )
    q, k = 4096, 1024
    expected = 2 * 32 * 4096 + 2 * 6 * 4096 + 10 * 14336 + 20 * (q + k) + 4 * (q + k)
    assert eager.traffic == pytest.approx(8192 * expected)
    assert compiled.traffic == pytest.approx(8192 * (2 * 4 * 4096 + 2 * 6 * 4096 + 6 * 14336))
    assert eager.operations == compiled.operations


def test_selective_recomputation_of_torchtitan():
    """Keys, the projection and the MLP's up are multiplied again, and everything but the attention's core is passed
    over again."""
    each = work(software=TORCHTITAN, shape=LLAMA)
    again = each.recomputed(RecomputeScope.ATTENTION)
    assert again.operations == 2 * 8192 * 4096 * (1024 + 4096 + 14336)
    assert again.traffic == each.forward.traffic


def shared(context: int, *, shape=SHAPE, **software: object) -> LayerWork:
    """With flash attention on 2 tensor ranks."""
    chosen = replace(MEGATRON_CORE, flash_attention=True, **software)
    return LayerWork(shape, chosen, tensor=2, micro_batch_size=1, sequence_parallel=True, context=context)


def test_ranks_that_share_sequences_do_a_part_each():
    """Operations of all of them are those of one rank; a rank sends keys and values cp - 1 times, in the backward with
    their gradients, while it computes all steps but the last."""
    alone, four = shared(1), shared(4)
    for part in ("forward", "backward"):
        for name in ("operations", "attended"):
            assert 4 * getattr(getattr(four, part), name) == pytest.approx(getattr(getattr(alone, part), name)) != 0
    passed = 3 * 2 * (H / 2) * 2 * S / 4  # 3 steps, K and V, 2 bytes
    assert four.forward.ring == passed and four.backward.ring == 2 * passed
    core = 4 * S * S * H / 2 / 4 / 2  # of 2 tensor ranks, of 4 parts of a sequence, of the half that is causal
    assert four.forward.ring_operations == pytest.approx(3 / 4 * core)
    assert four.forward.ring_calls == 3 / 4 * 4 * 2 and four.forward.calls == 4 + 4 * 2
    assert alone.forward.ring == alone.backward.ring == alone.forward.gathered == 0


def test_flash_attention_leaves_out_later_tokens():
    """Half of the products, but where tokens attend to all, as BERT's do; in the backward 2.5 times as many."""
    causal, both_ways = shared(1), shared(1, shape=replace(SHAPE, masked_head=True))
    assert both_ways.forward.attended == 2 * causal.forward.attended == 4 * S * S * H / 2
    assert causal.backward.attended == 2.5 * causal.forward.attended
    assert causal.forward.operations == 2 * S * SHAPE.layer_matrices / 2


def test_products_in_pieces_hide_what_they_would_wait_for():
    """Of 4 ranks a quarter stays exposed, in both directions; without split sequences nothing is in pieces."""
    software = replace(MEGATRON_CORE, overlaps_in_pieces=True)
    whole, pieces = (work(4, split=True, software=each) for each in (MEGATRON_CORE, software))
    for part in ("forward", "backward"):
        before, after = getattr(whole, part), getattr(pieces, part)
        assert after.exchanged == pytest.approx(before.exchanged / 4)
        assert after.exchanged + after.overlapped == pytest.approx(before.exchanged + before.overlapped)
    assert work(4, split=False, software=software).forward == work(4, split=False, software=MEGATRON_CORE).forward


def test_grouped_queries_pass_on_less():
    grouped = replace(SHAPE, num_query_groups=A // 4)
    assert shared(4, shape=grouped).forward.ring == shared(4).forward.ring / 4


def test_gathered_keys_are_waited_for():
    """As many bytes, and nothing beside them; the core is computed at once."""
    ring, gathered = shared(4), shared(4, gathers_keys=True)
    assert (gathered.forward.gathered, gathered.forward.ring) == (ring.forward.ring, 0)
    assert (gathered.backward.gathered, gathered.backward.ring) == (ring.backward.ring, 0)
    assert gathered.forward.calls == shared(1).forward.calls


def test_recomputed_layers_pass_keys_on_again():
    four = shared(4)
    assert four.recomputed(RecomputeScope.LAYER).ring == four.forward.ring
    assert four.recomputed(RecomputeScope.ATTENTION).ring == four.forward.ring
