"""--load-hf in whole runs: the first loss is that of transformers, and layers of multi-token prediction come along."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import workers
from tests.trainer.arguments.bert_command_line import data_flags as bert_data
from tests.trainer.arguments.t5_command_line import write_tokenizer
from tests.trainer.checkpoint.small_models import architecture_of, model_class, saved, stored
from tests.trainer.run.run_case import data_flags, train

NULL = "--tokenizer-type NullTokenizer"
CONVERT = "tests.trainer.checkpoint.small_models:convert_case"
BASE = (
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --num-workers 0 --log-interval 1 --eval-iters 0 "
    "--make-vocab-size-divisible-by 1"
)
TOLERANCE = 1e-6
EXPERTS = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
TENSORS = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
BOTH = f"{TENSORS} --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2"


def first_samples(run):
    """For `train`: at its end, the rows of the vocabulary, and the first batch's samples on ranks that read them."""
    data, rows = run.datasets[0], run.args.padded_vocab_size
    return lambda: (rows, data and [{key: torch.as_tensor(each) for key, each in data[n].items()} for n in range(4)])


def together(samples: list[dict], key: str) -> torch.Tensor:
    return torch.stack([sample[key] for sample in samples]).long()


def losses_of(logits: torch.Tensor, labels: torch.Tensor, rows: int) -> torch.Tensor:
    """[b, s] of logits [b, s, v]. `rows`: v with padding, whose logits are 0, and which counts."""
    logits = torch.nn.functional.pad(logits, (0, rows - logits.shape[2]))
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), labels.clamp(min=0), reduction="none")


@functools.cache
def with_further_layer() -> tuple[Path, dict]:
    """A DeepSeek-V3 with a layer of multi-token prediction as published, which repeats embedding and head; and
    transformers' own such layer."""
    from transformers.modeling_layers import MtpModel

    folder = Path(shutil.copytree(saved("deepseek_v3"), Path(tempfile.mkdtemp()) / "further"))
    model = model_class("DeepseekV3").from_pretrained(folder, attn_implementation="eager").eval()
    further = MtpModel(model, 1).eval()
    torch.manual_seed(11)
    with torch.no_grad():
        for key, parameter in further.layers.named_parameters():
            parameter.copy_(("norm" in key) + 0.15 * torch.randn(parameter.shape))
        bias = further.layers[0].mtp_block.mlp.gate.e_score_correction_bias
        bias.copy_(0.15 * torch.randn(bias.shape))
    tensors, layer = stored(folder), f"model.layers.{model.config.num_hidden_layers}."
    for key, tensor in further.layers[0].state_dict().items():
        name = key.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name.startswith("mlp.experts."):
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for number, expert in enumerate(tensor):
                for part, piece in zip(parts, expert.chunk(len(parts)), strict=True):
                    tensors[f"{layer}mlp.experts.{number}.{part}.weight"] = piece.contiguous()
        else:
            tensors[layer + name] = tensor.contiguous()
    tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder, {"model": model, "further": further}


CUTS = {
    "gpt_oss": ("gpt_oss", EXPERTS),
    "deepseek_v3": ("deepseek_v3", BOTH),
    "bert": ("bert", TENSORS),
    "t5": ("t5", f"{TENSORS} --sequence-parallel"),
    "t5, the first": ("t5, the first", TENSORS),
    "megatron-bert": ("megatron-bert", TENSORS),
    "deepseek_v2": ("deepseek_v2", BOTH),
    "deepseek_v2, groups": ("deepseek_v2, groups", EXPERTS),
    "qwen3, yarn and windows": ("qwen3, yarn and windows", TENSORS),
}


@pytest.mark.sample(3, "t5", "deepseek_v3")
@pytest.mark.parametrize(
    "name, cut", [pytest.param(*row, id=name, marks=() if n < 4 else pytest.mark.full)
                  for n, (name, row) in enumerate(CUTS.items())]
)  # fmt: skip
def test_the_first_loss_is_that_of_transformers(name, cut):
    """On two stages, of two tensor ranks or with experts on two ranks."""
    folder = saved(name)
    flags = f"{cut} --load-hf {folder} --train-iters 1 --lr 1e-3"
    model = model_class(_kind(name)).from_pretrained(folder, attn_implementation="eager")
    watch = f"{__name__}:first_samples"
    if architecture_of(folder) == "bert":
        first, *_, run = train(4, f"{bert_data()} {flags}", base=BASE, program="pretrain_bert", watch=watch)
        rows, samples = first["watched"]
        with torch.no_grad():
            output = model.eval()(
                together(samples, "text"), attention_mask=together(samples, "padding_mask"),
                token_type_ids=together(samples, "types"),
            )  # fmt: skip
        mask = torch.stack([sample["loss_mask"] for sample in samples]).float()
        losses = losses_of(output.prediction_logits, together(samples, "labels"), rows) * mask
        expected = (losses[:2].sum() / mask[:2].sum() + losses[2:].sum() / mask[2:].sum()) / 2
        order = torch.nn.functional.cross_entropy(output.seq_relationship_logits, together(samples, "is_random"))
        assert run["records"][0]["sop_loss"] == pytest.approx(order.item(), rel=TOLERANCE)
    elif architecture_of(folder) == "t5":
        tokenizer = write_tokenizer(Path(tempfile.mkdtemp()), words=62)
        flags += f" --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer} --decoder-seq-length 12"
        base = BASE.replace("--seq-length", "--encoder-seq-length")
        first, *_, run = train(4, f"{bert_data()} {flags}", base=base, program="pretrain_t5", watch=watch)
        rows, samples = first["watched"]
        with torch.no_grad():
            logits = model.eval()(
                together(samples, "text_enc"), attention_mask=together(samples, "enc_mask"),
                decoder_input_ids=together(samples, "text_dec"), decoder_attention_mask=together(samples, "dec_mask"),
            ).logits  # fmt: skip
        assert not together(samples, "text_dec")[:, 0].any(), "a decoder begins with <pad>"
        mask = together(samples, "loss_mask").float()
        losses = losses_of(logits, together(samples, "labels"), rows) * mask
        expected = (losses[:2].sum() + losses[2:].sum()) / mask.sum()
    else:
        first, *_, run = train(4, f"{data_flags()} {NULL} {flags}", base=BASE, watch=watch)
        rows, samples = first["watched"]
        with torch.no_grad():
            logits = model.eval()(together(samples, "tokens")).logits
            expected = losses_of(logits, together(samples, "labels"), rows).mean()
    assert run["losses"][1] == pytest.approx(expected.item(), rel=TOLERANCE)


def _kind(name: str) -> str:
    from tests.trainer.checkpoint.small_models import MODELS

    return MODELS[name][0]


@pytest.mark.full
def test_further_layers_come_along(tmp_path):
    """The first losses of both tokens, under 2bw with tensor ranks that share out experts. What such a run saves
    converts back bit by bit, where its steps are too small to move a weight or a bias."""
    folder, theirs = with_further_layer()
    flags = (
        f"{data_flags()} {NULL} {BOTH} --pipeline-schedule 2bw --load-hf {folder} --train-iters 2 --lr 1e-30 "
        f"--lr-decay-style constant --clip-grad 0 --moe-router-bias-update-rate 0 --save {tmp_path / 'run'}"
    )
    first, *_, run = train(4, flags, base=BASE, watch=f"{__name__}:first_samples")
    rows, samples = first["watched"]
    tokens, labels = (together(samples, key) for key in ("tokens", "labels"))
    with torch.no_grad():
        output = theirs["model"](tokens, output_hidden_states=True)
        last, places = output.hidden_states[-1], torch.arange(tokens.shape[1]).expand_as(tokens)
        further = theirs["further"]
        hidden = further.layers[0](
            further.embed_tokens(labels), last, attention_mask=_causal(tokens.shape[1]), position_ids=places,
            cache=None, position_embeddings=further.rotary_emb(last, position_ids=places),
        )  # fmt: skip
        of_further = losses_of(further.shared_head(hidden)[:, :-1], labels[:, 1:], rows)
    assert run["losses"][1] == pytest.approx(losses_of(output.logits, labels, rows).mean().item(), rel=TOLERANCE)
    assert run["records"][0]["mtp_1_loss"] == pytest.approx(of_further.mean().item(), rel=TOLERANCE)
    workers.run(1, CONVERT, source=tmp_path / "run", output=tmp_path / "back", to="hugging-face")
    wanted, found = stored(folder), stored(tmp_path / "back")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def _causal(length: int) -> torch.Tensor:
    return torch.full((length, length), float("-inf")).triu(1).view(1, 1, length, length)


def test_further_layers_return(tmp_path):
    """With what they repeat; a run may leave them out, and what differs from its repetition is refused."""
    folder, _ = with_further_layer()
    for source, output, to in ((folder, "dist", "torch_dist"), (tmp_path / "dist", "back", "hugging-face")):
        workers.run(1, CONVERT, source=source, output=tmp_path / output, to=to)
    wanted, found = stored(folder), stored(tmp_path / "back")
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    flags = f"{data_flags()} {NULL} --load-hf {folder} --mtp-num-layers 0 --train-iters 1 --lr 1e-3"
    assert "mtp_1_loss" not in train(1, flags, base=BASE)[-1]["records"][0]
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    wanted["model.layers.4.embed_tokens.weight"] += 1
    save_file(wanted, broken / "model.safetensors")
    with pytest.raises(workers.WorkerError, match=r"another model\.layers\.4\.embed_tokens\.weight than model\.embed"):
        train(1, flags.replace(str(folder), str(broken)).replace("--mtp-num-layers 0", ""), base=BASE)
