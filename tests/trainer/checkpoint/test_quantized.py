"""Quantized weights: the numbers that transformers makes of MXFP4 and FP8, on each rank; bf16 on export."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.trainer.files.safetensors_files import WeightsFolder, from_fp8, from_mxfp4
from tests import workers
from tests.trainer.checkpoint.small_models import reaches, saved, stored, transformers_logits

NULL = "--tokenizer-type NullTokenizer"
CONVERT = "tests.trainer.checkpoint.small_models:convert_case"
TOLERANCE = 1e-6
CONFIGS = {
    "gpt_oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "deepseek_v3": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


def by_transformers(numbers: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(numbers, factors, output_dtype=torch.bfloat16)


def test_mxfp4_is_that_of_transformers():
    """Every number under every exponent, bit for bit; an exponent that is no number is refused."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(255 * 16 * 16).view(1, 255, 16, 16).remainder(256).to(torch.uint8)
    scales = torch.arange(255).view(1, 255, 1).expand(1, 255, 16).to(torch.uint8)
    found, theirs = from_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales)
    assert found.dtype == torch.bfloat16 and torch.equal(found.transpose(1, 2), theirs)
    assert torch.equal(found[0, 127, :4], torch.tensor([0.0, 0.0, 0.5, 0.0]).bfloat16())  # bytes 0x00 and 0x01
    with pytest.raises(ValueError, match="a scale that is no number"):
        from_mxfp4(blocks, torch.full_like(scales, 255))


def test_fp8_is_that_of_transformers():
    """Every number, bit for bit; rows may begin inside a block, and the last blocks may be smaller."""
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    every = torch.where(every.float().isnan(), torch.zeros(256), every.float()).to(torch.float8_e4m3fn)
    numbers = every.view(torch.uint8)[torch.arange(256 * 384).remainder(251)].view(256, 384).view(torch.float8_e4m3fn)
    factors = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)) * 0.01
    assert torch.equal(from_fp8(numbers, factors, 0), by_transformers(numbers, factors))
    part = numbers.view(torch.uint8)[:200, :300].view(torch.float8_e4m3fn)
    wanted = torch.empty(200, 300, dtype=torch.bfloat16)
    for row in range(200):
        for block in range(3):
            columns = slice(block * 128, (block + 1) * 128)
            wanted[row, columns] = (part[row, columns].float() * factors[row // 128, block]).bfloat16()
    assert torch.equal(from_fp8(part, factors, 0), wanted)
    rows = part.view(torch.uint8)[100:150].view(torch.float8_e4m3fn)
    assert torch.equal(from_fp8(rows, factors, 100), wanted[100:150])


def quantized(name: str, folder: Path) -> tuple[Path, Path]:
    """A model with random quantized weights, and the same as transformers unquantizes it. Both in `folder`."""
    ours, theirs = (Path(shutil.copytree(saved(name, torch.bfloat16), folder / each)) for each in ("ours", "theirs"))
    tensors, generator = stored(ours), torch.Generator().manual_seed(3)
    for key in list(tensors):
        if name == "gpt_oss" and key.endswith("_proj"):
            experts, rows, columns = tensors.pop(key).shape
            shape = (experts, columns, rows // 32)
            tensors[f"{key}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
            tensors[f"{key}_scales"] = torch.randint(122, 126, shape, generator=generator).to(torch.uint8)
        if name == "deepseek_v3" and "_proj" in key:
            tensors[key] = (60 * torch.randn(tensors[key].shape, generator=generator)).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = 0.004 * torch.rand(1, 1, generator=generator)
    save_file(tensors, ours / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((ours / "config.json").read_text()) | {"quantization_config": CONFIGS[name]}
    (ours / "config.json").write_text(json.dumps(config))
    if name == "gpt_oss":
        import transformers

        how = transformers.Mxfp4Config(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype=torch.bfloat16, quantization_config=how)
        named = model.state_dict()
    else:
        pairs = {key for key in tensors if f"{key}_scale_inv" in tensors}
        named = {
            key: by_transformers(tensor, tensors[f"{key}_scale_inv"]) if key in pairs else tensor
            for key, tensor in tensors.items()
            if not key.endswith("_scale_inv")
        }
    save_file({key: each.contiguous() for key, each in named.items()}, theirs / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    return ours, theirs


def test_parts_of_quantized_tensors(tmp_path):
    """Any rows of an expert's MXFP4, also from inside a group of 32, are those of the whole."""
    ours, theirs = quantized("gpt_oss", tmp_path)
    folder, name = WeightsFolder(ours), "model.layers.1.mlp.experts.gate_up_proj"
    whole = stored(theirs)[name]
    experts, height, _ = folder.tensors[name].shape
    assert folder.tensors[name].shape == whole.shape and folder.tensors[name].dtype == torch.bfloat16
    for expert in range(experts):
        for first, last in ((0, height), (5, 40), (33, 64), (40, 41)):
            found = folder.rows(name, expert * height + first, expert * height + last, axes=2)
            assert torch.equal(found, whole[expert, first:last])
    folder.close()


@pytest.mark.parametrize(
    "name, cut",
    [
        ("gpt_oss", "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
        ("deepseek_v3", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_a_quantized_model_becomes_a_bf16_one(name, cut, tmp_path):
    """Each rank reads its part; a conversion there and back writes what transformers reads in the quantized files."""
    ours, theirs = quantized(name, tmp_path)
    assert reaches(ours, f"--load-hf {ours} {NULL} {cut}", transformers_logits(theirs), ranks=4) < TOLERANCE
    workers.run(1, CONVERT, source=ours, output=tmp_path / "dist", to="torch_dist")
    given = ("--config", str(ours / "config.json"))
    workers.run(1, CONVERT, source=tmp_path / "dist", output=tmp_path / "back", to="hugging-face", further=given)
    wanted, found = stored(theirs), stored(tmp_path / "back")
    assert found.keys() == wanted.keys()
    assert all(found[key].dtype == wanted[key].dtype and torch.equal(found[key], wanted[key]) for key in wanted)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"a": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "a in .* is of dtype FP8, and there is no a_scale_inv"),
        ({"a": torch.ones(200, 2).to(torch.float8_e4m3fn), "a_scale_inv": torch.ones(1, 1)}, r"has shape \(1, 1\)"),
        ({"a": torch.ones(2, 2).to(torch.float8_e5m2)}, "a in .* is of dtype 'F8_E5M2': weights in FP32"),
        ({"a_blocks": torch.ones(1, 2, 1, 16).byte()}, "a_blocks in .* is of dtype uint8"),
        ({"a_blocks": torch.ones(1, 2, 1, 8).byte(), "a_scales": torch.ones(1, 2, 1).byte()}, "not the MXFP4 of"),
    ],
)
def test_other_forms_are_refused(tensors, message, tmp_path):
    """By the tensor's name."""
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        WeightsFolder(tmp_path)
