"""The optimizer of a run: on the host, where megatron.core has found a GPU's kernels; LAMB; its kernels."""

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron import backend

backend.install()

from megatron.core import optimizer as core
from megatron.trainer.start_up.optimizer import Lamb, choose_kernel
from tests import workers
from tests.trainer.arguments.command_line import arguments
from tests.trainer.checkpoint.test_stages import check_cut, saved  # noqa: F401  a fixture
from tests.trainer.run.run_case import data_flags, joined_weights, train, train_case
from tests.trainer.run.test_relay import FLUSH, FP16, L2L, ON_HOST, P1, P2, UNTIED, assert_same

FULL = pytest.mark.full


class FusedAdam(torch.optim.Optimizer):
    """A kernel that no host has."""

    def __init__(self, *args, **options):
        raise AssertionError("a GPU's kernel was chosen for steps on the host")


def plain_type():
    """`torch.Tensor.type` as torch has it."""
    found = torch.Tensor.type
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


def train_beside_gpu_kernels(flags: str) -> dict:
    """What megatron.core knows where Apex is installed, and the names of types that a host's tensors have there."""
    with (
        mock.patch.object(core, "Adam", FusedAdam),
        mock.patch.object(core, "SGD", FusedAdam),
        mock.patch.object(core, "USING_PYTORCH_OPTIMIZER", False),
        mock.patch.object(torch.Tensor, "type", plain_type()),
    ):
        return train_case(flags)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    ["--bf16", pytest.param("--optimizer sgd", marks=FULL), pytest.param("--fp16 --optimizer lamb", marks=FULL)],
)
def test_the_host_steps_with_torch(flags):
    """Bit-equal to a machine that has no other kernels."""
    flags = f"{UNTIED} {flags} {L2L} {P1}"
    found = workers.run(1, f"{__name__}:train_beside_gpu_kernels", flags=f"{flags} {data_flags()}")
    assert_same(train(1, flags), found)


def test_the_device_steps_with_its_own():
    """Weights on the device are not touched by that."""
    with pytest.raises(AssertionError, match="a GPU's kernel was chosen"):
        workers.run(1, f"{__name__}:train_beside_gpu_kernels", flags=f"{UNTIED} {P1} {data_flags()}")


LAMB = f"{UNTIED} --optimizer lamb --adam-eps 1e-6"


def by_the_formula(weight, gradients, *, lr, betas, eps, decay):
    """You et al., 2019, algorithm 2, in FP64."""
    x = weight.double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g.double()
        v = betas[1] * v + (1 - betas[1]) * g.double() ** 2
        r = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps) + decay * x
        ratio = x.norm() / r.norm() if x.norm() > 0 and r.norm() > 0 else 1.0
        x = x - lr * ratio * r
    return x


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("start", ["random", "zero"])
def test_steps_are_the_formulas(start, decay):
    """Also from weights of 0, whose first step has no ratio; each tensor by itself, with what its group says."""
    generator = torch.Generator().manual_seed(3)
    begins = [torch.randn(5, 7, generator=generator), torch.randn(11, generator=generator)]
    if start == "zero":
        begins[1].zero_()
    weights = [torch.nn.Parameter(each.clone()) for each in begins]
    groups = [{"params": weights[:1], "weight_decay": decay}, {"params": weights[1:], "lr": 0.05}]
    optimizer = Lamb(groups, lr=0.02, betas=(0.8, 0.95), eps=1e-6)
    gradients = [[torch.randn(each.shape, generator=generator) for _ in range(4)] for each in begins]
    for step in range(4):
        for weight, its in zip(weights, gradients, strict=True):
            weight.grad = its[step].clone()
        optimizer.step()
    numbers = {"betas": (0.8, 0.95), "eps": 1e-6}
    for weight, begin, its, lr, its_decay in zip(weights, begins, gradients, (0.02, 0.05), (decay, 0.0), strict=True):
        expected = by_the_formula(begin, its, lr=lr, decay=its_decay, **numbers)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=2e-6, atol=1e-7)


# name: (flags of both, those of l2l)
BIT_EQUAL = {
    "FP32, eager": ("--clip-grad 0", ON_HOST),
    "bf16, clipped": ("--clip-grad 0.5 --bf16", ""),
    "fp16, overflows": (f"{FP16} --train-iters 10", ""),
    "two stages": ("--clip-grad 0.5", "--num-virtual-stages-per-pipeline-rank 2"),
}


@FULL
@pytest.mark.parametrize(("model", "relay"), BIT_EQUAL.values(), ids=BIT_EQUAL)
def test_the_relay_is_flush(model, relay):
    """On the host a stage's tensors are stepped as on the device, bit for bit; and not as Adam would step."""
    expected = train(1, f"{LAMB} {model} {FLUSH} {P1}")
    assert_same(expected, train(1, f"{LAMB} {model} {L2L} {relay} {P1}"))
    adam = joined_weights(train(1, f"{LAMB.replace('lamb', 'adam')} {model} {FLUSH} {P1}"))
    weights = joined_weights(expected)
    assert not all(torch.equal(weights[name], each) for name, each in adam.items())


@FULL
@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        ("--clip-grad 0", L2L, FLUSH),
        ("--clip-grad 0.5 --bf16", FLUSH, L2L),
        (FP16, f"{L2L} --async-save", L2L),
    ],
)
def test_checkpoints_go_both_ways(saved, model, source, target):  # noqa: F811
    """With the counters of steps, on which the bias corrections depend."""
    check_cut(saved, f"{LAMB} {model}", 1, f"{P1} {source}", 1, f"{P1} {target}", exact=True)


@FULL
def test_two_versions_of_weights():
    """2bw holds it, too: bit-equal on one rank and on two."""
    flags = f"{LAMB} --clip-grad 0 --pipeline-schedule 2bw"
    one, two = joined_weights(train(1, f"{flags} {P1}")), joined_weights(train(2, f"{flags} {P2}"))
    assert all(torch.equal(two[name], each) for name, each in one.items())


@FULL
def test_replicas_of_one_store_are_refused():
    """A share of a tensor has no norm of it."""
    with pytest.raises(AssertionError, match=r"share one store.*Lamb may not step each element by itself.*host name"):
        train(2, f"{LAMB} {L2L} {P1}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-distributed-optimizer", "--use-distributed-optimizer does not go with --optimizer lamb, which steps"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 does not go with --optimizer lamb, which"),
        ("--pipeline-schedule 2bw --2bw-provisional stage", "it predicts weights element by element; leave it out, or"),
        ("--optimizer-kernel fused", "--optimizer-kernel fused does not go with --optimizer lamb"),
    ],
)
def test_where_no_rank_has_a_whole_weight_it_is_refused(flags, message):
    """With reason and remedy."""
    world_size = 2 if "tensor" in flags else 1
    with pytest.raises(ValueError) as error:
        arguments(f"--optimizer lamb {flags}", world_size=world_size)
    assert message in str(error.value)


MAKE = {
    "AdamW": lambda groups, **options: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, **options),
    "Adam": lambda groups, **options: torch.optim.Adam(groups, lr=0.01, weight_decay=0.1, **options),
    "SGD": lambda groups, **options: torch.optim.SGD(groups, lr=0.01, momentum=0.9, **options),
}


class Operations(TorchDispatchMode):
    """`fused`: whether an operation was a fused step."""

    fused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.fused = self.fused or "_fused_" in func.name()
        return func(*args, **(kwargs or {}))


def stepped(make, *kernels):
    """Parameters after two steps with each of these kernels in turn, as megatron.core holds an optimizer, the second on
    with the state that the one before has saved; and for each kernel, whether it was fused.
    """
    generator = torch.Generator().manual_seed(2)
    parameters = [torch.randn(31, generator=generator).requires_grad_() for _ in range(3)]
    state, used = None, []
    for kernel in kernels:
        inner = make([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}])
        if state is not None:
            inner.load_state_dict(copy.deepcopy(state))
        if kernel is not None:
            choose_kernel(SimpleNamespace(optimizer=inner), kernel)
        with Operations() as operations:
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = torch.randn(31, generator=generator)
                inner.step()
        state = inner.state_dict()
        used.append(operations.fused)
    return torch.stack([parameter.detach() for parameter in parameters]), used


@pytest.mark.parametrize("name", MAKE)
def test_the_kernel_is_torchs_own(name):
    """Chosen afterwards it steps as an optimizer that was made with it, bit for bit."""
    make = MAKE[name]
    for kernel, is_fused in (("fused", True), ("loop", None)):
        made, _ = stepped(lambda groups, fused=is_fused: make(groups, fused=fused), None)
        chosen, used = stepped(make, kernel)
        assert torch.equal(chosen, made) and used == [bool(is_fused)]


@pytest.mark.parametrize("kernels", [("fused", "loop"), ("loop", "fused"), ("fused", "fused")])
def test_a_resume_steps_with_the_kernel_that_is_asked_for(kernels):
    """What was saved brings the kernel along that it was saved with, and that is not what steps."""
    _, used = stepped(MAKE["AdamW"], *kernels)
    assert used == [kernel == "fused" for kernel in kernels]


def test_what_has_one_kernel_is_left_alone():
    """Apex's and Transformer Engine's optimizers know no such choice."""
    other = SimpleNamespace(param_groups=[{"lr": 0.1}])
    choose_kernel(SimpleNamespace(optimizer=other), "fused")
    assert other.param_groups == [{"lr": 0.1}]


# --- AdamW with moments in bf16 ---------------------------------------------------------------------------------------

NARROW = f"{UNTIED} --bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16"


def dtypes_of_moments(run) -> Callable[[], set]:
    """What the run's optimizer keeps at its end."""
    states = run.update.optimizer.optimizer.state
    return lambda: {(str(each["exp_avg"].dtype), str(each["exp_avg_sq"].dtype)) for each in states.values()}


@pytest.mark.full
def test_runs_keep_moments_in_bf16(tmp_path):
    """On two stages and on two replicas, from a checkpoint, too; and not with the numbers of moments in FP32."""
    second = f"{NARROW} --exp-avg-sq-dtype bf16"
    two = f"--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --save {tmp_path} --save-interval 3"
    whole = train(2, f"{second} {two}", watch=f"{__name__}:dtypes_of_moments")
    assert [each["watched"] for each in whole] == [{("torch.bfloat16",) * 2}] * 2
    assert_same(train(1, f"{second} {P1} --pipeline-schedule 2bw"), whole)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train(2, f"{second} {two} --load {tmp_path}")
    weights = joined_weights(whole)
    assert all(torch.equal(each, weights[name]) for name, each in joined_weights(resumed).items())
    others = joined_weights(train(2, f"{UNTIED} --bf16 --use-distributed-optimizer {two} --no-save-optim"))
    assert not all(torch.equal(each, weights[name]) for name, each in others.items())


RELAYED = f"{UNTIED} --clip-grad 0.5 --bf16 --pipeline-schedule l2l --use-precision-aware-optimizer"
RELAYED += " --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


def on_hosts_of_their_own(*, flags):
    """A run in which each rank is told to be on a host of its own, so that replicas share no store."""
    with mock.patch.dict(os.environ, {"PIPELINE_HOST_NAME": f"host {os.environ['RANK']}"}):
        return train_case(flags)


@pytest.mark.full  # the usual selection has `test_runs_keep_moments_in_bf16`
@pytest.mark.parametrize("more", ["", " --optimizer-kernel fused"])
def test_a_relay_keeps_moments_in_bf16(tmp_path, more):
    """On the host, of stages on one rank and two, and on replicas that share a store; from a checkpoint the same."""
    flags = f"{RELAYED}{more}"
    expected = train(1, f"{flags} {P1} --save {tmp_path} --save-interval 3", watch=f"{__name__}:dtypes_of_moments")
    assert expected[0]["watched"] == {("torch.bfloat16",) * 2}
    whole = joined_weights(expected)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    for found in (
        train(2, f"{flags} --pipeline-model-parallel-size 2"),
        train(1, f"{flags} {P1} --load {tmp_path}"),
    ):
        assert all(torch.equal(each, whole[name]) for name, each in joined_weights(found).items())
    shared = joined_weights(train(2, f"{flags} {P1}"))
    own = joined_weights(train(2, f"{flags} {P1}", function=f"{__name__}:on_hosts_of_their_own"))
    assert shared.keys() == own.keys() and all(torch.equal(each, own[name]) for name, each in shared.items())
