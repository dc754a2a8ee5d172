"""What a layer with experts does, against the model's operations and by hand."""

from dataclasses import replace
from itertools import combinations

import pytest

from megatron.planner.job.software import FLEX, MEGATRON_CORE
from megatron.planner.memory.architecture import ExpertDegrees
from megatron.planner.time.expert_work import ExpertLayerWork
from megatron.planner.time.work import LayerWork, Work
from tests.planner.memory.expert_layers import LENGTH, shape_of

FLASH = replace(MEGATRON_CORE, flash_attention=True)
H, F, E = 128, 96, 4
TOKENS = 2 * LENGTH


def work(
    tensor: int = 1, *, shape=None, parallel: int = 1, expert_tensor: int = 1, context: int = 1, software=FLASH
) -> LayerWork:
    return ExpertLayerWork(
        shape or shape_of(), software, degrees=ExpertDegrees(parallel=parallel, tensor=expert_tensor), tensor=tensor,
        micro_batch_size=2, sequence_parallel=tensor > 1, context=context,
    )  # fmt: skip


@pytest.mark.parametrize("degrees", [(1, 1, 1, 1), (2, 4, 1, 1), (2, 2, 2, 1), (4, 1, 4, 1), (2, 2, 1, 2)])
@pytest.mark.parametrize("shared", [0, 64])
def test_operations_of_all_ranks_are_the_models(degrees, shared):
    """Tensor ranks and ranks that share sequences together do what `Architecture.operations` counts for the layers,
    wherever the experts are: those alone that a token goes to."""
    tensor, parallel, expert_tensor, context = degrees
    shape = shape_of(num_layers=1, shared_ffn_hidden_size=shared)
    each = work(tensor, shape=shape, parallel=parallel, expert_tensor=expert_tensor, context=context)
    # Flash attention's backward runs half of its products again, which the model's operations do not have.
    again = 0.5 * 4 * TOKENS * LENGTH * shape.query_width
    both = each.forward + each.backward
    products = both.operations + both.grouped_operations + 2 * both.attended  # half of the scores, as it is causal
    done = tensor * context * products - again
    head = 6 * TOKENS * H * shape.vocabulary_size
    assert done == pytest.approx(shape.operations(2) - head, rel=1e-12)


def test_each_expert_of_a_rank_takes_products_of_its_own():
    """Two matrices of each: halved by ep, not by etp."""
    counts = [work(parallel=ep).forward.calls for ep in (1, 2, 4)]
    assert counts[0] - counts[1] == 2 * 2 and counts[1] - counts[2] == 2 * 1
    assert work(2, expert_tensor=2).forward.calls == work(2, expert_tensor=1).forward.calls
    assert work(parallel=2).backward.calls - work(parallel=4).backward.calls == 2 * 2


def test_copies_between_ranks_by_hand():
    """4 tokens' copies: 2 all-to-alls in each direction; what ranks share of an expert they gather and scatter."""
    copies = TOKENS * 2 * 2 * H  # to 2 experts, in 2 bytes
    assert work().forward.dispatched == 0 == work().forward.spread
    apart = work(parallel=4)
    assert apart.forward.dispatched == apart.backward.dispatched == 2 * copies * 3 / 4
    half = work(2, parallel=2, expert_tensor=2)
    assert half.forward.dispatched == 2 * copies / 2 / 2 and half.forward.spread == 2 * copies / 2
    padded = work(shape=shape_of(capacity_factor=1.25), parallel=4)
    assert padded.forward.dispatched == pytest.approx(1.25 * apart.forward.dispatched)


def test_only_the_projections_and_a_shared_expert_are_summed_by_tensor_ranks():
    """Half of a dense layer's sums without one, and all of them with one."""
    dense = LayerWork(shape_of(), FLASH, tensor=2, micro_batch_size=2, sequence_parallel=True)
    without, shared = work(2), work(2, shape=shape_of(shared_ffn_hidden_size=64))
    for part in ("forward", "backward", "backward_weight"):
        of_dense, of_without, of_shared = (getattr(each, part) for each in (dense, without, shared))
        assert of_shared.exchanged == of_dense.exchanged == 2 * of_without.exchanged > 0, part
        assert of_shared.overlapped == of_dense.overlapped == 2 * of_without.overlapped


def test_weights_gradients_are_added_for_all_experts_of_a_rank():
    """Whether a token went there or not: 4 bytes read and written an element. The rest grows with the tokens."""
    matrix = 3 * H * F
    one, all_ = work(parallel=4), work(parallel=1)
    sorting = 4 * TOKENS * 2 * 2 * H  # a rank with one expert sorts nothing
    assert all_.backward.traffic - one.backward.traffic == pytest.approx(3 * 2 * 4 * matrix + sorting)
    assert all_.backward_weight.traffic - one.backward_weight.traffic == pytest.approx(3 * 2 * 4 * matrix)


def test_halves_are_the_whole():
    each = work(2, parallel=2, shape=shape_of(shared_ffn_hidden_size=64))
    both = each.backward_input + each.backward_weight
    whole = each.backward
    for name in ("operations", "grouped_operations", "grouped_bytes", "calls", "traffic", "dispatched"):
        assert getattr(both, name) == pytest.approx(getattr(whole, name)), name
    assert both.exchanged == pytest.approx(whole.exchanged + whole.overlapped)
    assert isinstance(both, Work)


def test_a_token_is_sent_once_to_each_rank_that_has_one_of_its_experts():
    """DeepEP's dispatcher, of 4 experts and 2 for a token: counted over all 6 choices."""
    shape, flex = shape_of(), replace(FLASH, dispatcher=FLEX)
    choices = list(combinations(range(4), 2))
    for ranks in (1, 2, 4):
        reached = [len({expert * ranks // 4 for expert in chosen}) for chosen in choices]
        mean = sum(reached) / len(reached)
        assert shape.experts.reached(ranks) == pytest.approx(mean)
        once, each = (work(parallel=ranks, software=software).forward for software in (flex, FLASH))
        assert once.dispatched == pytest.approx(2 * TOKENS * mean * 2 * H * (ranks - 1) / ranks)
        assert each.traffic - once.traffic == pytest.approx(2 * H * TOKENS * (6 + 8 * (ranks < 4) - 2 * (mean + 2)))


def test_experts_multiply_in_groups_whose_matrices_are_read_in_each_product():
    """In 2 bytes an element, and in FP8 in one; the other linears do not change kind but with them."""
    matrices = 3 * H * F
    for software, size in ((FLASH, 2), (replace(FLASH, fp8=True), 1)):
        each = work(parallel=2, software=software)
        assert each.forward.grouped_bytes == size * 2 * matrices
        assert each.backward.grouped_bytes == 2 * each.forward.grouped_bytes
        assert each.forward.grouped_operations == 2 * TOKENS * 2 * matrices
    dense, fp8 = work(), work(software=replace(FLASH, fp8=True))
    router = 2 * TOKENS * H * E
    assert fp8.forward.fp8_operations == 2 * TOKENS * shape_of().projections
    assert dense.forward.operations - fp8.forward.operations == pytest.approx(fp8.forward.fp8_operations)
    assert fp8.forward.operations - fp8._core_forward().operations == pytest.approx(router)


def test_casts_of_experts():
    """In FP8 a kernel for each matrix of each expert of a rank, and for the attention's two: of what copies of tokens
    bring and what an activation makes of it, or of gradients of both outputs."""
    for backward, columns in ((False, F), (True, 2 * F)):
        found = [work(parallel=ep, software=replace(FLASH, fp8=True))._casts(backward=backward) for ep in (1, 2)]
        assert found[0].kernels - found[1].kernels == 2 * 2
        attention = H + shape_of().query_width + 2 * shape_of().key_width * backward
        assert found[0].traffic == found[1].traffic == 4 * TOKENS * (attention + 2 * (H + columns))


def test_padding_for_products_in_fp8():
    """Copies are read and written once more on their way in and out, unless a capacity makes experts alike."""
    fp8 = replace(FLASH, fp8=True)
    for software in (FLASH, replace(FLASH, dispatcher=FLEX)):
        moved = [work(software=replace(software, fp8=each), parallel=2)._moved for each in (False, True)]
        assert moved[1] - moved[0] == 4 * 2
    even = shape_of(capacity_factor=1.0)
    assert work(shape=even, software=fp8)._moved == work(shape=even)._moved == work()._moved
    assert work(2, parallel=2, expert_tensor=2, software=fp8)._moved - work(2, expert_tensor=2)._moved == 4 * 2 * 2
