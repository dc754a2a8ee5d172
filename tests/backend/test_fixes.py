"""The repairs of megatron.core's wheel, each with the behaviour that it restores."""

import copy
from inspect import signature
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.core.models.gpt import gpt_model
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication
from megatron.core.tensor_parallel.random import HAVE_TE, CheckpointWithoutOutput
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from tests import workers
from tests.pipeline.runtime.stages.megatron.fused_accumulation import stand_in

needs_torch_optimizer = pytest.mark.skipif(HAVE_APEX_OR_TE, reason="another library's optimizer is installed")


def norm_config(sequence_parallel: bool) -> SimpleNamespace:
    return SimpleNamespace(
        sequence_parallel=sequence_parallel,
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        memory_efficient_layer_norm=False,
        normalization="LayerNorm",
    )


def test_a_mask_without_later_tokens_divides_by_one():
    """The last token of a sequence has no later one; where no other counts, megatron.core divides 0 by 0."""
    losses = gpt_model if hasattr(gpt_model, "roll_tensor") else multi_token_prediction
    for mask, expected in (([0.0, 0.0, 1.0], 1), ([1.0, 1.0, 1.0], 2), ([0.0, 1.0, 1.0], 2)):
        rolled, count = losses.roll_tensor(torch.tensor([mask]), shifts=-1, dims=-1, cp_group=None)
        assert rolled.tolist() == [[*mask[1:], 0.0]] and count == expected


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_torch_norm_is_marked_under_sequence_parallelism(sequence_parallel):
    """The norm is built, its parameters are marked only where ranks see parts, and the configuration is as before."""
    config = norm_config(sequence_parallel)
    norm = WrappedTorchNorm(config, 8)
    assert config.sequence_parallel is sequence_parallel
    assert all(getattr(param, "sequence_parallel", False) is sequence_parallel for param in norm.parameters())


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is installed")
def test_checkpoint_without_output_is_not_fp8():
    """`fp8=False` means without FP8."""
    assert CheckpointWithoutOutput(fp8=False).fp8 is False
    assert CheckpointWithoutOutput().fp8 is False


@pytest.mark.skipif(HAVE_TE, reason="Transformer Engine is installed")
def test_a_router_is_torchs_without_transformer_engine():
    """Its logits, and both gradients of them."""
    tokens, weight = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    logits.square().sum().backward()
    found, expected = (tokens.grad, weight.grad), (2 * logits @ weight, (2 * logits).t() @ tokens)
    assert torch.allclose(logits, tokens @ weight.t())
    assert all(torch.allclose(*pair) for pair in zip(found, expected, strict=True))


def test_numbers_of_tokens_are_numbers_where_they_are_asked_for():
    """On a CPU, too; and they stay a tensor where that is asked for."""
    counts = torch.tensor([3, 1])
    assert token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True).tolist() == [3, 1]
    assert not torch.is_tensor(token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True))
    assert token_dispatcher.maybe_move_tensor_to_cpu(counts) is counts


LATER_ARGUMENTS = [1, None][: len(signature(LinearWithGradAccumulationAndAsyncCommunication.forward).parameters) - 10]
"""Of newer versions: the size of a group that shares weights, and the dtype of the output."""


class OwnLinear(LinearWithGradAccumulationAndAsyncCommunication):
    """A user's, which inherits both directions."""


@pytest.mark.parametrize("linear", [LinearWithGradAccumulationAndAsyncCommunication, OwnLinear])
@pytest.mark.parametrize("unpack", [lambda tensor: tensor, torch.Tensor.detach], ids=["parameter", "captured"])
def test_fused_accumulation_adds_to_the_gradient_that_the_parameter_shows(linear, unpack):
    """The backward adds to the `main_grad` of its own time and leaves it in place, also where it unpacks a detached
    weight; DDP's hook finds the parameter's mark, or no gradient to add a second time."""
    weight = torch.nn.Parameter(torch.randn(3, 4))
    at_forward, at_backward = torch.zeros(3, 4), torch.zeros(3, 4)
    weight.grad_added_to_main_grad = False
    input = torch.randn(5, 4, requires_grad=True)
    with stand_in(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        weight.main_grad = at_forward
        output = linear.apply(input, weight, None, True, False, False, None, 0, None, *LATER_ARGUMENTS)
        weight.main_grad = at_backward
        output.sum().backward()
    assert weight.main_grad is at_backward and not at_forward.any()
    torch.testing.assert_close(at_backward, torch.ones(5, 3).t() @ input.detach())
    assert weight.grad_added_to_main_grad or weight.grad is None


@pytest.mark.full
@needs_torch_optimizer
def test_distributed_optimizer_resumes_with_its_own_step_counters():
    """A resumed optimizer makes the same next two steps as the one that was never saved, from the first step on."""
    differences = workers.run(2, f"{__name__}:resume_distributed_optimizer", timeout=100)
    assert differences == [[0.0] * 2] * 2


@needs_torch_optimizer
def test_optimizer_state_can_be_created_for_loading():
    """Before any step, Adam's state has its counter and SGD's its momentum, as loading a checkpoint needs it."""
    assert workers.run(1, f"{__name__}:initial_states", timeout=100) == [{"adam": True, "sgd": True}]


def initial_states() -> dict[str, bool]:
    from tests.pipeline.runtime.stages.megatron import megatron_cases as cases

    result = {}
    for name in ("adam", "sgd"):
        case = cases.Case(optimizer=name, layers=1)
        with cases.parallel(case):
            _, update = cases.build(case)
            inner = update.optimizer.chained_optimizers[0]
            inner.init_state_fn(inner.optimizer, inner.config)
            state = next(iter(inner.optimizer.state.values()))
            wanted = {"adam": {"step", "exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}[name]
            result[name] = set(state) == wanted and len(inner.optimizer.state) == len(inner.get_parameters())
    return result


def resume_distributed_optimizer() -> list[float]:
    """Save after 0 and 1 steps, resume in a new optimizer, take two more steps; the largest difference of each."""
    from tests.pipeline.runtime.stages.megatron import megatron_cases as cases

    case = cases.Case(d=2, layers=1, distributed_optimizer=True, dtype="bfloat16")
    differences = []
    with cases.parallel(case):
        for steps_before in range(2):
            first, second = cases.build(case)[1], cases.build(case)[1]
            for number in range(steps_before):
                step_with_noise(first, number)
            inner, resumed = first.optimizer.chained_optimizers[0], second.optimizer.chained_optimizers[0]
            state = copy.deepcopy(inner.state_dict())
            resumed.load_state_dict(state)
            for param in inner.model_param_gbuf_map:
                twin = dict(zip(inner.model_param_gbuf_map, resumed.model_param_gbuf_map, strict=True))[param]
                tensors = inner._get_main_param_and_optimizer_states(param)
                resumed._set_main_param_and_optimizer_states(twin, {k: v for k, v in tensors.items() if k != "step"})
            for number in range(steps_before, steps_before + 2):
                step_with_noise(first, number)
                step_with_noise(second, number)
            pairs = zip(inner.get_parameters(), resumed.get_parameters(), strict=True)
            differences.append(max((a - b).abs().max().item() for a, b in pairs))
    return differences


def step_with_noise(update, number: int) -> None:
    inner = update.optimizer.chained_optimizers[0]
    generator = torch.Generator().manual_seed(number)
    for param in inner.get_parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    inner.step_with_ready_grads()
