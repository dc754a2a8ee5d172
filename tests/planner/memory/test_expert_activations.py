"""What layers with experts save, beside what megatron.core's save."""

import pytest

from megatron.planner import Activations, ActivationSetting
from megatron.planner.memory.activations import by_stage
from megatron.planner.memory.architecture import ExpertDegrees
from megatron.planner.memory.recompute import Recompute, RecomputeScope
from tests import workers
from tests.planner.memory.expert_layers import LENGTH, SIZE, shape_of

CASES = (
    (shape_of(gated=False), False),
    (shape_of(), False),
    (shape_of(), True),
    (shape_of(topk=1, ffn_hidden_size=160, shared_ffn_hidden_size=64), True),
    (shape_of(num_layers=3, layers=2), True),
    (shape_of(num_layers=3, layers=(0, 1, 1)), False),
)


def setting(**changes: object) -> ActivationSetting:
    given = {"micro_batch_size": SIZE, "element_bytes": 4, "residual_bytes": 4, "fused_gate": True}
    return ActivationSetting(**given | changes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_save_as_much_as_estimated(tensor):
    """Each activation, number of experts for a token, shared expert and pattern of layers: to two percent. Of
    norms' means and a few other numbers of a token nothing is counted, which shows in layers as narrow as these."""
    captured = workers.run(tensor, "tests.planner.memory.expert_layers:captured_case", tensor=tensor, cases=CASES)
    for rank in captured:
        for (shape, fused), found in zip(CASES, rank, strict=True):
            # Without fused kernels a shared expert keeps as much as any gated MLP: so the setting says it for both.
            asked = setting(tensor=tensor, sequence_parallel=tensor > 1, fused_gate=fused)
            layers = (shape.num_layers,)
            count = Activations(shape, asked).saved
            (with_experts,) = shape.layers_with_experts(layers)
            expected = count(shape.num_layers, is_first=False, is_last=False, with_experts=with_experts)
            spread = 0.02 if tensor == 1 else 0.06  # with etp the copies of one rank differ from those of the next
            assert found == pytest.approx(expected, rel=spread), (shape.experts, fused)


def test_by_hand():
    """In 16 bits: a token goes to 2 experts of 96 columns, in place of an MLP of 192."""
    shape, dense = shape_of(), shape_of(layers=(0, 0))
    asked = setting(element_bytes=2, residual_bytes=2, saves_scores=False)
    with_experts, without = (
        by_stage(Activations(each, asked).saved, (1, 1), each.layers_with_experts((1, 1)))[0] for each in (shape, dense)
    )
    copies = 2 * 2 * (128 + 3 * 96) + 5 * 4 + 24 * 2  # inputs and columns in 2 bytes, then the router's and indices
    assert with_experts - without == LENGTH * SIZE * (copies - 3 * 2 * 192)


def test_copies_grow_with_the_capacity_and_are_alike_for_any_expert_parallel_size():
    """Of balanced load as many copies come as leave; ranks that share experts have those of all."""

    def saved(shape=None, **degrees: int) -> float:
        shape = shape or shape_of()
        asked = setting(tensor=4, sequence_parallel=True, experts=ExpertDegrees(**degrees))
        return Activations(shape, asked).saved(1, is_first=False, is_last=False, with_experts=1)

    assert saved(parallel=1) == saved(parallel=4) < saved(parallel=2, tensor=2) < saved(tensor=4)
    wider = saved(shape_of(capacity_factor=1.5), parallel=4) - saved(parallel=4)
    assert wider == LENGTH * SIZE / 4 * 4 * (0.5 * 2) * (128 + 3 * 96)


def test_what_is_held_while_copies_move():
    """Those that leave and those that came, once; none where a stage has no experts. Recomputed layers come on top."""
    asked, middle = setting(element_bytes=2, residual_bytes=2), {"is_first": False, "is_last": False}
    activations = Activations(shape_of(), asked)
    copies = 2 * LENGTH * SIZE * 2 * 2 * 128
    assert activations.workspace(2, **middle, with_experts=1) == copies
    assert activations.workspace(2, **middle) == 0
    layer = setting(element_bytes=2, residual_bytes=2, recompute=Recompute.of(RecomputeScope.LAYER))
    recomputed = Activations(shape_of(), layer)
    whole = activations.saved(1, **middle, with_experts=1) - recomputed.boundary
    assert recomputed.workspace(2, **middle, with_experts=1) == whole + copies


def test_halves_of_backwards_keep_inputs_and_gradients():
    """By hand, in 2 bytes: of a layer with experts the projections' as elsewhere, the copies' inputs and results."""
    asked = setting(element_bytes=2, residual_bytes=2)
    activations, middle = Activations(shape_of(), asked), {"is_first": False, "is_last": False}
    attention = 2 * 128 + 128 + 128 + 3 * 128  # inputs of qkv and router; gradient behind; queries' result; of qkv
    routed = 2 * (2 * 128 + 96 + 2 * 96)
    assert activations.deferred(1, **middle, with_experts=1) == LENGTH * SIZE * 2 * (attention + routed)
