"""Packed rows: the loss and the gradients of rows of one sequence each, and no sequence that sees another."""

import random

import pytest
import torch
import transformers

from megatron.capture.export import capture
from megatron.capture.randomness import Draw
from megatron.finetuning.data.batches import IGNORED
from megatron.finetuning.data.packing import Tokens, rows_of
from megatron.finetuning.plan import SEPARATES, require_separation
from tests.finetuning import tiny

SHAPE = {"vocab_size": 44, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FEW_KEYS = {**SHAPE, "intermediate_size": 32, "num_key_value_heads": 1, "pad_token_id": 0}
GPT2 = {"vocab_size": 44, "n_embd": 16, "n_layer": 2, "n_head": 2}
WINDOW = {"sliding_window": 4}
EXPERTS = {"experts_implementation": "batched_mm"}
ROTATED = {**GPT2, "rotary_dim": 4}
OWN = {  # kind of model -> what its configuration has besides, or in place of, FEW_KEYS
    "codegen": ROTATED,
    "deepseek_v3": {
        **FEW_KEYS, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 8, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4, **EXPERTS,
    },
    "falcon": {**SHAPE, "alibi": True},
    "gemma2": {**FEW_KEYS, "head_dim": 8, **WINDOW},
    "gemma3_text": {**FEW_KEYS, "head_dim": 8, **WINDOW},
    "gpt2": GPT2,
    "gpt_neo": {
        "vocab_size": 44, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 4,
        "attention_types": [[["global", "local"], 1]],
    },
    "gptj": ROTATED,
    "mistral": {**FEW_KEYS, **WINDOW},
    "mixtral": {**FEW_KEYS, "num_local_experts": 4, **EXPERTS},
    "qwen2": {**FEW_KEYS, "use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {**FEW_KEYS, "head_dim": 8},
    "qwen3_moe": {
        **FEW_KEYS, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **EXPERTS
    },
    "starcoder2": {**FEW_KEYS, **WINDOW},
}  # fmt: skip


def model_of(kind: str, **more) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **OWN.get(kind, FEW_KEYS), **more)
    for name in vars(config):
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config).train()


def sequences_of(*lengths: int) -> list[Tokens]:
    choose = random.Random(0)
    found = []
    for length in lengths:
        ids = choose.choices(range(4, 44), k=length)
        found.append(Tokens(ids, [IGNORED if choose.random() < 0.3 else token for token in ids]))
    return found


def rows(sequences: list[Tokens], *, packing: bool):
    args = tiny.parse_args(
        ["--model_name_or_path", "m", "--task", "chat", "--train_file", "f", "--output_dir", "o", "--max_seq_length",
         "12", *(["--packing"] if packing else [])]
    )  # fmt: skip
    return rows_of(sequences, args, tiny.tokenizer(), lambda labels: lambda predictions, loss: {})


def loss_and_gradients(model, compute) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = compute()
    loss.backward()
    return loss.item(), torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", sorted(SEPARATES))
def test_a_packed_row_is_its_samples(kind):
    """The captured graph on packed rows against transformers on one sequence a row; then nothing of a neighbour shows
    in the logits, to the last bit."""
    model, sequences = model_of(kind), sequences_of(5, 3, 4, 6, 5, 1 + 2)
    alone, packed = rows(sequences, packing=False), rows(sequences, packing=True)
    assert (len(alone), len(packed)) == (6, 3)
    batch = packed.batch(range(3), 3)
    captured = capture(model, batch, keep=("logits",))
    draw = Draw(seed=0, sample=0)
    expected = loss_and_gradients(model, lambda: model(**alone.batch(range(6), 6)).loss)
    found = loss_and_gradients(model, lambda: captured.run(batch, draw)[0])
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=2e-7)
    assert sum(packed.num_terms([row]) for row in range(3)) == sum(each.num_counted for each in sequences)
    ends = {row: int((batch["position_ids"][row, 1:] == 0).nonzero()[0]) + 1 for row in range(3)}
    for row, end in ends.items():  # change the first sequence of each row
        other = {name: tensor.clone() for name, tensor in batch.items()}
        other["input_ids"][row, :end] = (other["input_ids"][row, :end] - 4 + 7) % 40 + 4
        one, changed = (captured.run(each, draw)[1]["logits"][row] for each in (batch, other))
        assert torch.equal(one[end:], changed[end:])
        assert not torch.equal(one[:end], changed[:end])


@pytest.mark.parametrize("kind", ["opt"])
def test_a_model_that_sees_neighbours_is_refused(kind):
    """It does see them, which the test above would notice."""
    model = model_of(kind, ffn_dim=32, word_embed_proj_dim=16)
    sequences = sequences_of(5, 3, 4, 6, 6)
    alone, packed = (rows(sequences, packing=packing) for packing in (False, True))
    with torch.no_grad():
        one, other = (model(**each.batch(range(len(each)), len(each))).loss for each in (alone, packed))
    assert abs(one - other) > 1e-5
    with pytest.raises(ValueError, match=r"F is a opt, and --packing is only for models .* leave out --packing"):
        require_separation(model, "F")
