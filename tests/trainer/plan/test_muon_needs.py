"""What the planner says that Muon needs, against what torch counts and keeps."""

import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megatron.pipeline.runtime.update.muon import QKV, WHOLE, Muon, Orthogonalization
from megatron.planner.memory.architecture import Architecture, Experts
from megatron.planner.memory.muon import MuonSetting
from megatron.planner.memory.owned_parameters import fullest_part
from megatron.planner.memory.parameters import matrix_parameters, stage_parameters
from megatron.trainer.plan import from_flags
from tests import workers
from tests.trainer.run.run_case import BASE, data_flags, training_program

SHAPE = Architecture(
    num_layers=1, hidden_size=32, ffn_hidden_size=48, num_attention_heads=8, num_query_groups=4, kv_channels=4,
    sequence_length=8, vocabulary_size=64, gated=True,
)  # fmt: skip


@pytest.mark.parametrize("tensor, gathers", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("splits_qkv", [True, False])
def test_operations_are_those_that_torch_counts(tensor, gathers, splits_qkv):
    """Of a layer with fewer keys than queries and a gate; gathered matrices are whole on each tensor rank."""
    heads_of_group, width = SHAPE.num_attention_heads // SHAPE.num_query_groups, SHAPE.kv_channels
    rule = Orthogonalization(
        num_steps=3, qkv_rows=(heads_of_group * width, width, width) if splits_qkv else None, in_bfloat16=False
    )
    t, h = 1 if gathers else tensor, SHAPE.hidden_size
    shapes = {
        ((SHAPE.query_width + 2 * SHAPE.key_width) // t, h): QKV,
        (h, SHAPE.query_width // t): WHOLE,
        (2 * SHAPE.ffn_hidden_size // t, h): WHOLE,
        (h, SHAPE.ffn_hidden_size // t): WHOLE,
    }
    with FlopCounterMode(display=False) as counted:
        for shape, layout in shapes.items():
            rule.direction(torch.randn(shape), layout)
    setting = MuonSetting(num_steps=3, splits_qkv=splits_qkv, gathers=gathers)
    found = setting.layer(SHAPE, tensor, None, experts=False)
    assert found.operations == counted.get_total_flops()
    assert found.calls == 3 * 3 * (6 if splits_qkv else 4)
    assert found.gathered == (2 * SHAPE.layer_matrices if gathers else 0)


def test_experts_have_matrices_of_their_own():
    """Those of the rank's experts, and the shared one's, in the place of the dense layer's."""
    experts = Experts(count=8, topk=2, ffn_hidden_size=16, shared_ffn_hidden_size=24)
    shape = Architecture(**{**vars(SHAPE), "experts": experts})
    found = MuonSetting(num_steps=1).layer(shape, 2, None, experts=True)

    def of_mlp(width):
        return sum(
            4 * small**2 * large + 2 * small**3 for small, large in (sorted((2 * width, 32)), sorted((32, width)))
        )

    dense = MuonSetting(num_steps=1).layer(SHAPE, 2, None, experts=False).operations - of_mlp(48 // 2)
    assert found.operations == dense + of_mlp(24 // 2) + 8 * of_mlp(16 // 2)


class Peak(TorchDispatchMode):
    """The most bytes of tensors made within the block that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[int] = Counter()
        self._now = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        result = func(*args, **(kwargs or {}))
        for each in filter(torch.is_tensor, tree_leaves(result)):
            key, num_bytes = each.untyped_storage()._cdata, each.untyped_storage().nbytes()
            if key in given and key not in self._uses:
                continue  # of before the block
            self._now += 0 if self._uses[key] else num_bytes
            self._uses[key] += 1
            weakref.finalize(each, self._drop, key, num_bytes)
        self.bytes = max(self.bytes, self._now)
        return result

    def _drop(self, key: int, num_bytes: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self._now -= num_bytes


@pytest.mark.sample(4)
@pytest.mark.parametrize("in_bfloat16", [True, False])
@pytest.mark.parametrize("splits_qkv", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, hidden_size=256, ffn_hidden_size=384, kv_channels=32),
        replace(SHAPE, hidden_size=256, ffn_hidden_size=64, num_query_groups=8, kv_channels=32, gated=False),
    ],
    ids=["gated", "wide attention"],
)
def test_bytes_of_a_step_are_those_that_it_holds(shape, splits_qkv, in_bfloat16):
    """What torch holds at the most in a step of a layer's matrices is no more than is said, and not far less."""
    queries, keys = shape.num_attention_heads // shape.num_query_groups * shape.kv_channels, shape.kv_channels
    rows = {
        QKV: [(shape.query_width + 2 * shape.key_width, shape.hidden_size)],
        WHOLE: [
            (shape.hidden_size, shape.query_width),
            (shape.ffn_hidden_size * (2 if shape.gated else 1), shape.hidden_size),
            (shape.hidden_size, shape.ffn_hidden_size),
        ],
    }
    groups = [{"params": [torch.nn.Parameter(torch.randn(each)) for each in own], "muon": layout}
              for layout, own in rows.items()]  # fmt: skip
    rule = Orthogonalization(
        num_steps=2, in_bfloat16=in_bfloat16, qkv_rows=(queries, keys, keys) if splits_qkv else None
    )
    muon = Muon(groups, nesterov=True, orthogonalization=rule)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
            muon.make_state(parameter, group)
    with Peak() as held:
        muon.step()
    said = MuonSetting(splits_qkv=splits_qkv, element_bytes=2 if in_bfloat16 else 4).bytes_of_step(shape, 1)
    assert 0.6 * said < held.bytes <= said


def kept(flags: str) -> tuple[int, float]:
    """The bytes of masters and moments of a run that has stepped once, and what the planner says of them."""
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.run.assembly import assemble
    from megatron.trainer.run.pretraining import complete
    from megatron.trainer.start_up import initialize

    defaults, trained = training_program("pretrain_gpt")
    args, _ = complete(parse_args(flags.split(), defaults=defaults))
    run = assemble(initialize.set_up(args), trained)
    args = run.args
    (core,) = run.optimizer.chained_optimizers
    parameters = [each for group in core.optimizer.param_groups for each in group["params"]]
    for each in parameters:
        each.grad = torch.ones_like(each)
    core.optimizer.step()
    moments = [
        value for each in parameters for name, value in core.optimizer.state[each].items() if name != "step"
    ]  # fmt: skip
    masters = parameters if args.bf16 else []
    shape, state = from_flags.architecture(args), from_flags.training_state(args)
    (count,) = stage_parameters(shape, 1, (args.num_layers,))
    matrices = matrix_parameters(shape, 1, args.num_layers)
    if state.owns_parameters:
        state = replace(state, owned_part=fullest_part(state, shape, 1, (args.num_layers,), (0,)))
    return sum(each.nbytes for each in [*moments, *masters]), state.optimizer(count, num_versions=1, matrices=matrices)


@pytest.mark.parametrize(
    "num_ranks, flags",
    [(1, ""), (1, "--bf16 --accumulate-allreduce-grads-in-fp32"), (2, "--bf16 --use-distributed-optimizer")],
)
def test_bytes_are_those_that_a_run_keeps(num_ranks, flags):
    """One moment of a matrix and two of the rest, to the byte; of owners, those of the fullest replica."""
    results = workers.run(
        num_ranks, f"{__name__}:kept", flags=f"{BASE} {data_flags()} --optimizer muon --swiglu {flags}"
    )
    assert max(found for found, _ in results) == pytest.approx(results[0][1], rel=1e-12)
