"""The stand-in of Transformer Engine has the signatures of its releases, and raises for the rest."""

import ast
import importlib.util
import inspect
import itertools
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from megatron.pipeline.start_up.late_weights import engine_keeps_main_grad, engine_puts_off
from tests.stand_ins.pin_transformer_engine import CALLED, DATA, pinned
from tests.stand_ins.transformer_engine import _release, pytorch
from tests.stand_ins.transformer_engine.common import recipe
from tests.stand_ins.transformer_engine.pytorch.module.base import WeightGradStore, set_gradient

RELEASES = json.loads(DATA.read_text(encoding="utf-8"))["releases"]
FUNCTIONS = {
    "Linear.__init__": pytorch.Linear.__init__,
    "Linear.forward": pytorch.Linear.forward,
    "LayerNormLinear.__init__": pytorch.LayerNormLinear.__init__,
    "LayerNormLinear.forward": pytorch.LayerNormLinear.forward,
    "GroupedLinear.__init__": pytorch.GroupedLinear.__init__,
    "GroupedLinear.forward": pytorch.GroupedLinear.forward,
    "GroupedLinear.backward_dw": pytorch.GroupedLinear.backward_dw,
    "DotProductAttention.__init__": pytorch.DotProductAttention.__init__,
    "DotProductAttention.forward": pytorch.DotProductAttention.forward,
    "fp8_autocast": pytorch.fp8_autocast,
    "fp8_model_init": pytorch.fp8_model_init,
    "TransformerEngineBaseModule.backward_dw": pytorch.Linear.backward_dw,
    **{
        name: getattr(WeightGradStore, name.rpartition(".")[2])
        for name in CALLED["module/_common.py"]
    },
}  # fmt: skip
OLDEST = _release.with_signatures()[0]


def test_it_is_not_importable_where_no_test_asks_for_it():
    """A run on this machine finds Transformer Engine only if it is installed."""
    found = importlib.util.find_spec("transformer_engine")
    assert found is None or Path(found.origin).parents[1] != Path(__file__).parent


@pytest.mark.parametrize("version", _release.with_signatures())
def test_signatures_are_those_of_the_release(version):
    """All that megatron.core calls is pinned; what a function takes by name has the release's default, or is newer."""
    newest = _release.newest()
    for name, function in FUNCTIONS.items():
        of_release, own = _release.signature(version, name), inspect.signature(function).parameters
        for parameter in own.keys() & of_release.parameters.keys():
            assert own[parameter].default == of_release.parameters[parameter].default, (name, parameter)
        assert own.keys() <= _release.signature(newest, name).parameters.keys() | {"device"}, name
    assert set(RELEASES[version]["signatures"]) | {"quantization.py"} == set(CALLED)
    assert len(RELEASES[version]["commit"]) == 40


@pytest.mark.parametrize("version", RELEASES)
def test_the_runtime_knows_what_releases_differ_in(version):
    facts = RELEASES[version]["facts"]
    assert engine_puts_off(version) is (facts["weight_grad_is_set"] is not None)
    assert engine_keeps_main_grad(version) is (facts["main_grad_is_read_in"] == "forward")
    assert facts["queue"] in (None, "queue.Queue()")  # first in, first out
    assert facts["apply_bias"] == "bias and (not return_bias)"
    assert facts["adds_bias_apart_if"] == ["self.parallel_mode == 'row' and self.apply_bias"]
    assert "fuse_wgrad_accumulation and (not is_first_microbatch)" in facts["accumulates_if"]
    assert facts["updates_scales_if"] == ["enabled and depth == 0 and (not _graph) and torch.is_grad_enabled()"]


def made(**arguments) -> torch.nn.Module:
    return pytorch.Linear(2, 2, device="cpu", params_dtype=torch.float32, **arguments)


def test_what_it_does_not_have_raises(monkeypatch):
    """Arguments of the release that it does not know, arguments of a newer release, FP8, and fused operators."""
    assert made(save_original_input=False) is not None
    with pytest.raises(NotImplementedError, match=r"Linear.__init__ has no save_original_input, which is True"):
        made(save_original_input=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_argument'"):
        made(no_such_argument=1)
    with pytest.raises(NotImplementedError, match="has no calibrating, which is True"):
        pytorch.fp8_autocast(calibrating=True)
    with pytest.raises(NotImplementedError, match="has no weights in FP8 alone"):
        pytorch.fp8_model_init()
    with pytest.raises(NotImplementedError, match="has no NVFP4BlockScaling"):
        recipe.NVFP4BlockScaling()
    with pytest.raises(NotImplementedError, match="has no Sequential"):
        pytorch.ops.Sequential()
    with pytest.raises(ImportError):
        from tests.stand_ins.transformer_engine.pytorch import optimizers  # noqa: F401
    monkeypatch.setattr(_release, "_version", OLDEST)
    with pytest.raises(TypeError, match="unexpected keyword argument 'save_original_input'"):
        made(save_original_input=False)


@pytest.mark.parametrize(("version", "expected"), [(OLDEST, 5.0), (_release.newest(), 1.0)])
def test_backward_dw_assigns_past_autograd(monkeypatch, version, expected):
    """Old releases leave a gradient that is there, and lose their own; the newest one replaces it. A bias is set only
    if it has none.
    """
    monkeypatch.setattr(_release, "_version", version)
    layer = made(delay_wgrad_compute=True)
    calls = []
    layer.weight.register_post_accumulate_grad_hook(calls.append)
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is None
    calls.clear()
    layer.weight.grad, layer.bias.grad = torch.full((2, 2), 5.0), torch.full((2,), 7.0)
    layer.backward_dw()
    assert not calls
    assert layer.weight.grad.unique().tolist() == [expected] and layer.bias.grad.unique().tolist() == [7.0]
    with pytest.raises(RuntimeError, match="Pop empty queue"):
        layer.backward_dw()


def test_a_bias_outside_of_the_product_has_no_late_gradient():
    """`backward_dw` fails on it where no gradient is left in `.grad`, as in Transformer Engine."""
    layer = made(delay_wgrad_compute=True, return_bias=True)
    layer(torch.ones(1, 2))[0].sum().backward()
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'to'"):
        layer.backward_dw()
    with pytest.raises(AttributeError):
        set_gradient(layer.bias, None, "if None")


def test_the_first_microbatch_overwrites():
    """Fused accumulation sets `main_grad` for the first microbatch, and returns a gradient that nobody may read."""
    layer = made(fuse_wgrad_accumulation=True, bias=False)
    layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.full((2, 2), 5.0), False
    for is_first, expected in ((None, 6.0), (False, 7.0), (True, 1.0)):
        layer(torch.ones(1, 2), is_first_microbatch=is_first).sum().backward()
        assert layer.weight.main_grad.unique().tolist() == [expected]
        assert layer.weight.grad.isnan().all() and layer.weight.grad_added_to_main_grad


def test_in_fp8_the_first_microbatch_is_cast_for_all():
    """Weights that were changed since count again only for a first microbatch, or where it is not said which is."""
    layer, ones = made(bias=False), torch.ones(1, 2)
    outputs = []
    with pytorch.fp8.fp8_autocast():
        for value, is_first in ((1.01, True), (2.0, False), (2.0, None), (2.0, True)):
            layer.weight.data.fill_(value)
            outputs.append(layer(ones, is_first_microbatch=is_first)[0, 0].item())
    assert outputs == [2.0, 2.0, 4.0, 4.0]  # 1.01 is 1 in e4m3


def test_delayed_scaling():
    """A scale is that of the largest value of the forwards before; of the latest, or of so many as are kept. Forwards
    without autograd write values down and move nothing on.
    """
    layer, scales = made(bias=False), []
    layer.weight.data.fill_(7.0)
    for algorithm, inputs in (("most_recent", (4.0, 2.0, 1.0)), ("max", (4.0, 2.0, 1.0))):
        layer.fp8_meta = {"fp8_checkpoint": False}
        of_layer = recipe.DelayedScaling(amax_history_len=2, amax_compute_algo=algorithm, margin=1)
        for value in inputs:
            with torch.no_grad(), pytorch.fp8_autocast(fp8_recipe=of_layer):
                layer(torch.full((1, 2), value / 2))
            with pytorch.fp8_autocast(fp8_recipe=of_layer):
                output = layer(torch.full((1, 2), value))
            output.sum().backward()
            scales.append(layer.fp8_meta["scaling_fwd"].scale[0].item())
    assert scales == [448 / 8, 448 / 4, 448 / 2, 448 / 8, 448 / 8, 448 / 4]
    assert layer.fp8_meta["scaling_fwd"].scale[1] == 448 / 14  # of the weight
    assert layer.fp8_meta["scaling_bwd"].scale[0] == 57344 / 2


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [
        ("Float8CurrentScaling", [[240.0, 1.0], [0.01, 0.01]], [[240.0, 1.0], [0.01, 0.01]]),
        ("MXFP8BlockScaling", [[240.0, 1.0], [0.01, 0.01]], [[240.0, 1.0], [0.0098, 0.01]]),
    ],
)
def test_scales_of_blocks(kind, rows, columns):
    """What is small beside its own block's largest value loses digits, or all."""
    tensor = torch.tensor([[240.0, 1.0], [0.01, 0.01]])
    found = pytorch.fp8.quantize(tensor, getattr(recipe, kind)(), None, 0, "input").get_data_tensors()
    for part, expected in zip(found, (rows, columns), strict=True):
        torch.testing.assert_close(part, torch.tensor(expected), rtol=0.03, atol=1e-3)


SOURCES = {
    "module/linear.py": """
class _Linear:
    def forward(ctx, weight):
        {main_grad}
    def backward(ctx):
        accumulate_wgrad_into_param_main_grad = ctx.fuse
class Linear:
    def __init__(self, a: int, b=1, *, c: str = "x"):
        self.apply_bias = bias
    def forward(self, inp):
        pass
""",
    "module/base.py": """
class TransformerEngineBaseModule:
    def backward_dw(self):
        {weight}
        if bias_tensor.grad is None:
            bias_tensor.grad = b
""",
    "module/_common.py": """
class WeightGradStore:
    def __init__(self):
        self.context = {queue}
""",
}
OF_SOURCES = [
    ({"main_grad": "ctx.main_grad = weight.main_grad", "weight": "weight_tensor.grad = w", "queue": "queue.Queue()"},
     ("forward", "always", "queue.Queue()")),
    ({"main_grad": "ctx.find = lambda: weight.main_grad", "queue": "queue.LifoQueue()",
      "weight": "if weight_tensor.grad is None:\n            weight_tensor.grad = w"},
     ("backward", "if None", "queue.LifoQueue()")),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "expected"), OF_SOURCES)
def test_facts_are_read_off_the_sources(parts, expected):
    signatures, facts = pinned(lambda path: SOURCES[path].format(**parts) if path in SOURCES else None)
    assert signatures["module/linear.py"]["Linear.__init__"] == "(self, a, b=1, *, c='x')"
    assert (facts["main_grad_is_read_in"], facts["weight_grad_is_set"], facts["queue"]) == expected
    assert facts["bias_grad_is_set"] == "if None"


def test_data_holds_signatures_alone():
    """Of Transformer Engine's text nothing else is kept."""
    for record in RELEASES.values():
        assert record.keys() <= {"commit", "facts", "signatures"}
        for names in record.get("signatures", {}).values():
            for text in names.values():
                [function] = ast.parse(f"def function{text}: pass").body
                assert isinstance(function, ast.FunctionDef) and isinstance(function.body[0], ast.Pass)


BORDERS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
PACKED = {"qkv_format": "thd", "cu_seqlens_q": BORDERS, "cu_seqlens_kv": BORDERS, "attn_mask_type": "padding_causal"}


def test_packed_sequences_are_attended_to_one_by_one():
    """As if each were the only one, with their lengths in int32 and their longest given; what does not fit raises."""
    attention = pytorch.DotProductAttention(2, 4)
    tokens = [torch.randn(9, 2, 4) for _ in range(3)]
    found = attention(*tokens, **PACKED, max_seqlen_q=5, max_seqlen_kv=5)
    for begin, end in itertools.pairwise(BORDERS.tolist()):
        alone = attention(*(each[begin:end, None] for each in tokens))
        assert torch.equal(found[begin:end], alone[:, 0])
    turned = pytorch.attention.rope.apply_rotary_pos_emb(
        tokens[0], torch.randn(5, 1, 1, 4), tensor_format="thd", cu_seqlens=BORDERS
    )
    assert turned.shape == (9, 2, 4)
    with pytest.raises(AssertionError, match="int32"):
        attention(*tokens, **{**PACKED, "cu_seqlens_q": BORDERS.long()}, max_seqlen_q=5, max_seqlen_kv=5)
    for longest, size in ((4, 9), (5, 10)):
        with pytest.raises(ValueError, match="do not fill"):
            attention(*(torch.ones(size, 2, 4),) * 3, **PACKED, max_seqlen_q=longest, max_seqlen_kv=longest)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q_padded"):
        attention(*tokens, **PACKED, max_seqlen_q=5, max_seqlen_kv=5, cu_seqlens_q_padded=BORDERS)
    with pytest.raises(NotImplementedError, match="no causal of two lengths"):
        attention(*tokens, **{**PACKED, "attn_mask_type": "causal"}, max_seqlen_q=5, max_seqlen_kv=5)
