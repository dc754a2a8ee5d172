"""tools/convert_checkpoint.py: bits that return, logits that stay, memory that does not grow, and refusals."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from tests import workers
from tests.trainer.checkpoint.small_models import (
    MODELS,
    reaches,
    saved,
    stored,
    transformers_logits,
)

CASES = "tests.commands.test_convert_checkpoint:"
TOLERANCE = 1e-6


def run_tool(argv: list[str]) -> tuple[int, str]:
    """Exit status, and what the tool prints, in this process."""
    from megatron.commands import convert_checkpoint

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = convert_checkpoint.main(argv)
        except SystemExit as end:
            status = end.code
    return status, output.getvalue()


def convert(*argv: object) -> str:
    """What the tool prints; it has to succeed."""
    status, text = workers.run(1, f"{CASES}run_tool", argv=[*map(str, argv)])[0]
    assert status == 0, text
    return text


def refusal(*argv: object) -> str:
    status, text = workers.run(1, f"{CASES}run_tool", argv=[*map(str, argv)])[0]
    assert status == 1 and text.startswith("error: ") and text.count("\n") == 1, text
    return text


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("name", MODELS)
def test_bits_return(name, tmp_path):
    """From several files into several, and transformers computes the same with what comes back."""
    dtype = torch.bfloat16 if name in ("llama", "qwen3_moe", "gpt2") else torch.float32
    folder = saved(name, dtype, "20KB")
    assert (folder / "model.safetensors.index.json").exists()
    convert(folder, tmp_path / "ours", "--to", "torch_dist")
    convert(tmp_path / "ours", tmp_path / "back", "--to", "hugging-face", "--max-shard-size", 2e-5)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert same_tensors(stored(folder), stored(tmp_path / "back"))
    assert torch.equal(transformers_logits(tmp_path / "back"), transformers_logits(folder))
    flags = [convert(each, "--to", "flags") for each in (folder, tmp_path / "ours", tmp_path / "back")]
    assert flags[0] == flags[1] == flags[2] and "--num-layers 2\n" in flags[0]


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_training_loads_what_was_converted(name, tmp_path):
    """At other degrees, with no weight left over; and what training saves from there converts back."""
    folder = saved(name)
    convert(folder, tmp_path / "ours", "--to", "torch_dist")
    cut = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
    cut += " --sequence-parallel" * (name == "mixtral")
    flags = f"@{tmp_path / 'ours' / 'flags.txt'} --load {tmp_path / 'ours'} --dist-ckpt-strictness raise_all {cut}"
    assert reaches(folder, f"{flags} --save {tmp_path / 'again'}", transformers_logits(folder), ranks=4) < TOLERANCE
    convert(tmp_path / "again", tmp_path / "back", "--to", "hugging-face", "--config", folder / "config.json")
    assert same_tensors(stored(folder), stored(tmp_path / "back"))
    there = json.loads((folder / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == there


@pytest.mark.parametrize(
    "name, cut",
    [
        ("llama", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
        ("gpt2", "--tensor-model-parallel-size 2"),
        ("mixtral", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    ],
)
def test_the_old_format_is_read(name, cut, tmp_path):
    """One file for each rank, as Megatron-LM's `torch` format has them, into both others."""
    folder = saved(name)
    ranks = 4 if "pipeline" in cut else 2
    flags = f"--load-hf {folder} --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 64 {cut}"
    workers.run(ranks, f"{CASES}save_in_old_format", flags=flags, root=tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "back", "--to", "hugging-face")
    assert same_tensors(stored(folder), stored(tmp_path / "back"))
    convert(tmp_path / "old", tmp_path / "ours", "--to", "torch_dist")
    convert(tmp_path / "ours", tmp_path / "again", "--to", "hugging-face")
    assert same_tensors(stored(folder), stored(tmp_path / "again"))


def save_in_old_format(flags: str, root: Path) -> None:
    """Write a rank's file as Megatron-LM's `save_checkpoint` does with --ckpt-format torch."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model
    from megatron.trainer.checkpoint.arguments import saved_arguments
    from tests.trainer.checkpoint.small_models import loaded

    args, chunks = loaded(flags)
    tensor, stage = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if args.pipeline_model_parallel_size > 1 else "")
    file = root / "iter_0000005" / name / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    state = {"args": saved_arguments(args), "checkpoint_version": 3.0, "iteration": 5}
    state["model"] = unwrap_model(chunks[0]).state_dict_for_save_checkpoint()
    torch.save(state, file)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    parallel_state.destroy_model_parallel()
