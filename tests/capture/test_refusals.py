"""What cannot be cut is refused in one sentence with the path of the module."""

import pytest
import torch
import transformers
from torch import nn

from megatron.capture.export import capture
from megatron.capture.randomness import Draw
from megatron.capture.refusals import remedy_of


class Around(nn.Module):
    """A model with `inner` in a place that has a path."""

    def __init__(self, inner):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([inner])

    def forward(self, x):
        return self.blocks[0](self.first(x)).square().mean()


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * 2


class CountsThroughAView(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        self.calls[1:].view(-1).add_(1)
        return x + self.calls.sum()


class Decides(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class DropsWithoutGradients(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        return x * mask


class Selects(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Maps(nn.Module):
    def forward(self, x):
        return torch.vmap(lambda row: row * 2)(x)


class Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class PassesGradients(nn.Module):
    """A straight-through estimator, whose operators alone have no gradient."""

    def forward(self, x):
        return Rounds.apply(x)


class Hooks(nn.Module):
    def forward(self, x):
        x.register_hook(lambda gradient: 2 * gradient)
        return x


def hooked():
    inner = nn.Identity()
    inner.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))
    return inner


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("inner", "sentence"),
    [
        (
            nn.BatchNorm1d(4, momentum=None),
            r"blocks.0 \(BatchNorm1d\) (writes into blocks.0.(running_mean|num_batches_tracked)|decides)",
        ),
        (Counts(), r"blocks.0 \(Counts\) writes into blocks.0.calls"),
        (CountsThroughAView(), r"blocks.0 \(CountsThroughAView\) writes into blocks.0.calls"),
        (
            Decides(),
            r"blocks.0 \(Decides\) decides by the values .* \[test_refusals.py:[0-9]+: return x \* 2 if x.sum"
            r"\(\) > 0 else x\]; use torch.where or a mask in its place, or, where the model is not yours, choose",
        ),
        (Noise(), r"blocks.0 \(Noise\) draws random numbers \(aten.rand_like.* \[test_refusals.py:[0-9]+: return x"),
        (DropsWithoutGradients(), r"blocks.0 \(DropsWithoutGradients\) draws random numbers .* under torch.no_grad"),
        (Selects(), r"blocks.0 \(Selects\) makes a shape that depends on values"),
        (Maps(), r"blocks.0 \(Maps\) uses torch.vmap.*install transformers>=5"),
        (
            PassesGradients(),
            r"blocks.0 \(PassesGradients\) .*Rounds has a gradient that is written by hand\) "
            r"\[test_refusals.py:[0-9]+: return Rounds.apply\(x\)\]; a captured graph has the gradients of its op",
        ),
        (Hooks(), r"blocks.0 \(Hooks\) .*a hook of a tensor has a gradient that is written by hand"),
        (hooked(), r"blocks.0 \(Identity\) .*BackwardHookFunction has a gradient that is written by hand"),
        (
            Fails(),
            r"blocks.0 \(Fails\) cannot be captured \(RuntimeError: no such luck\) \[test_refusals.py:[0-9]+: raise ",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_refused(inner, sentence, capsys):
    """In one line, and without the operators so far, which torch.export prints."""
    with pytest.raises(ValueError, match=sentence) as caught:
        capture(Around(inner), {"x": torch.randn(3, 4)})
    assert "\n" not in str(caught.value) and "aten" not in capsys.readouterr().err


_SMALL = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 16,
}  # fmt: skip
_TOKENS = torch.randint(16, (2, 5))


def _mixtral():
    config = transformers.MixtralConfig(**_SMALL, num_key_value_heads=2, num_local_experts=2)
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config), {"input_ids": _TOKENS, "labels": _TOKENS}


def _deberta():
    model = transformers.DebertaForSequenceClassification(transformers.DebertaConfig(**_SMALL))
    return model, {"input_ids": _TOKENS, "labels": torch.tensor([0, 1])}


def _opt():
    config = transformers.OPTConfig(
        vocab_size=16, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=8,
        layerdrop=0.5,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config), {"input_ids": _TOKENS, "labels": _TOKENS}


@pytest.mark.full  # which sentence: test_known_causes_are_told_apart
@pytest.mark.parametrize(
    ("make", "sentence", "settings"),
    [
        (_deberta, r"\[modeling_deberta.py:[0-9]+: if label_index.* set problem_type to single_label_classification in",
         {"problem_type": "single_label_classification"}),
        (_mixtral, r"experts \(MixtralExperts\) .* \[modeling_mixtral.py:[0-9]+: for .* set experts_implementation to",
         {"_experts_implementation": "batched_mm"}),
        (_opt, r"decoder \(OPTDecoder\) .*layerdrop.*; set layerdrop, .* to 0.0 in its config", {"layerdrop": 0.0}),
    ],
    ids=["label", "experts", "layerdrop"],
)  # fmt: skip
def test_what_to_set_is_said_and_helps(make, sentence, settings):
    """Models of transformers with a setting that cannot be captured, and with the one that the sentence names."""
    model, batch = make()
    with pytest.raises(ValueError, match=sentence):
        capture(model, batch)
    for name, value in settings.items():
        setattr(model.config, name, value)
    again = type(model)(model.config).train()
    assert capture(again, batch).run(batch, Draw(1, 0))[0].isfinite()


def test_known_causes_are_told_apart():
    """By the class of a module, its line and the reason; the first row that fits."""
    for clues, said in (
        (("SwinDropPath", "a.py:1: torch.rand(shape)", ""), "drop_path_rate to 0"),
        (("Wav2Vec2Encoder", "a.py:1: if not skip_the_layer or synced_gpus:", ""), "layerdrop"),
        (("Phi3RotaryEmbedding", "", "writes"), "rope_type"),
        (("LlamaAttention", "", "FlexAttention does not support"), "attn_implementation to eager or sdpa"),
        (("LongformerSelfAttention", "a.py:1: if is_global_attn:", ""), "without global attention"),
        (("BertLayer", "a.py:1: past_key_values.update(key)", ""), "use_cache to false"),
        (("BatchNorm2d", "", "writes"), "LayerNorm"),
        (("MixtralExperts", "a.py:1: for expert_idx in expert_hit:", ""), "experts_implementation to batched_mm"),
        (("NllbMoeExperts", "a.py:1: for expert_idx in expert_hit:", ""), "no setting changes that"),
        (("MyExpertsAndMore", "a.py:1: if x > 0:", "data-dependent"), "other"),
    ):
        assert said in remedy_of(*clues, otherwise="other")


def test_data_that_is_written_is_refused():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x[:, 0].zero_()
            return (x * self.weight).sum()

    with pytest.raises(ValueError, match=r"Writes writes into x, which is data.*write into a clone of it"):
        capture(Writes(), {"x": torch.randn(3, 4)})


class Recurs(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.rnn = nn.GRU(4, 4, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


def test_recurrent_layers_are_captured_unless_they_drop():
    model, batch = Around(Recurs(0.0)), {"x": torch.randn(3, 5, 4)}
    model(**batch).backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    capture(model, batch).run(batch)[0].backward()
    assert all(torch.equal(each.grad, expected[name]) for name, each in model.named_parameters())
    with pytest.raises(ValueError, match=r"blocks.0.rnn \(GRU\) draws random numbers"):
        capture(Around(Recurs(0.1)), batch)


def test_frozen_statistics_are_captured():
    """A BatchNorm in evaluation mode reads its statistics and writes none."""
    model = Around(nn.BatchNorm1d(4)).train()
    model.blocks[0].eval()
    batch = {"x": torch.randn(3, 4)}
    loss, _ = capture(model, batch).run(batch)
    assert torch.equal(loss, model(**batch))


def test_an_old_torch_is_refused(monkeypatch):
    """Before 2.9 torch exports no guards: said before anything is exported."""
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu126")
    monkeypatch.setattr(torch.export.ExportedProgram, "module", lambda self: None)
    with pytest.raises(ValueError, match=r"torch 2\.8\.0\+cu126 does not export .*; install torch 2\.9 or newer"):
        capture(nn.Linear(4, 4), {"x": torch.ones(2, 4)})
