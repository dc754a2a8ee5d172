"""tools/convert_checkpoint.py: bits that return, logits that stay, memory that does not grow, and refusals."""

import contextlib
import fcntl
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests import workers
from tests.full_disk import largest_file
from tests.trainer.checkpoint.small_models import (
    MODELS,
    architecture_of,
    reaches,
    saved,
    stored,
    transformers_logits,
)
from tests.trainer.run.run_case import train

CASES = "tests.commands.test_convert_checkpoint:"
TOLERANCE = 1e-6
FROZEN = "--freeze-training --freeze-interval 1 --freeze-schedule 1,2"


def run_tool(argv: list[str], room: int | None = None) -> tuple[int, str]:
    """Exit status, and what the tool prints, in this process. `room`: bytes at which a disk is full."""
    from megatron.commands import convert_checkpoint

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            with contextlib.nullcontext() if room is None else largest_file(room):
                status = convert_checkpoint.main(argv)
        except SystemExit as end:
            status = end.code
    return status, output.getvalue()


def convert(*argv: object) -> str:
    """What the tool prints; it has to succeed."""
    status, text = workers.run(1, f"{CASES}run_tool", argv=[*map(str, argv)])[0]
    assert status == 0, text
    return text


def refusal(*argv: object, **options: int) -> str:
    status, text = workers.run(1, f"{CASES}run_tool", argv=[*map(str, argv)], **options)[0]
    assert status == 1 and text.startswith("error: ") and text.count("\n") == 1, text
    return text


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("room", [60, 600, 3000])
def test_a_full_disk_is_told_with_the_folder_and_leaves_nothing(tmp_path, room):
    """Whether it meets the flags, a file that is copied, a tensor or the arguments; then there is room, with a flag
    between SOURCE and OUTPUT.
    """
    folder, ours, back = saved("gpt2", torch.float32, "20KB"), tmp_path / "ours", tmp_path / "back"
    reason = "cannot be written (File too large); make room, or name another place"
    assert f"{ours} {reason}" in refusal(folder, ours, "--to", "torch_dist", room=room)
    assert not any(ours.iterdir())
    convert(folder, "--to", "torch_dist", ours)
    assert f"{back} {reason}" in refusal(ours, back, "--to", "hugging-face", room=room)
    assert [each.name for each in tmp_path.iterdir()] == ["ours"]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama of four"])
def test_bits_return(name, tmp_path):
    """From several files into several, and transformers computes the same with what comes back."""
    dtype = torch.bfloat16 if name in ("llama", "qwen3_moe", "gpt2", "gpt_oss", "deepseek_v3") else torch.float32
    folder = saved(name, dtype, "20KB")
    assert (folder / "model.safetensors.index.json").exists()
    convert(folder, tmp_path / "ours", "--to", "torch_dist")
    convert(tmp_path / "ours", tmp_path / "back", "--to", "hugging-face", "--max-shard-size", 2e-5)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert same_tensors(stored(folder), stored(tmp_path / "back"))
    assert torch.equal(transformers_logits(tmp_path / "back"), transformers_logits(folder))
    flags = [convert(each, "--to", "flags") for each in (folder, tmp_path / "ours", tmp_path / "back")]
    assert flags[0] == flags[1] == flags[2] and "num-layers" in flags[0]


TENSORS = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name, cut",
    [
        ("mistral", TENSORS),
        ("deepseek_v3", f"{TENSORS} --sequence-parallel"),  # its layers have keys of their own
        ("gpt_oss", "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
        ("bert", TENSORS),
        ("t5, the first", f"{TENSORS} --sequence-parallel"),
        pytest.param("t5", f"{TENSORS} --sequence-parallel", marks=pytest.mark.full),
        pytest.param("megatron-bert", TENSORS, marks=pytest.mark.full),
        pytest.param("mixtral", f"{TENSORS} --sequence-parallel", marks=pytest.mark.full),
        pytest.param("deepseek_v2", TENSORS + " --sequence-parallel", marks=pytest.mark.full),
    ],
)
def test_training_loads_what_was_converted(name, cut, tmp_path):
    """At other degrees, with no weight left over; and what training saves from there converts back."""
    folder = saved(name)
    convert(folder, tmp_path / "ours", "--to", "torch_dist")
    cut += " --make-vocab-size-divisible-by 64" + " --tokenizer-type NullTokenizer" * (architecture_of(folder) != "gpt")
    flags = f"@{tmp_path / 'ours' / 'flags.txt'} --load {tmp_path / 'ours'} --dist-ckpt-strictness raise_all {cut}"
    assert reaches(folder, f"{flags} --save {tmp_path / 'again'}", transformers_logits(folder), ranks=4) < TOLERANCE
    convert(tmp_path / "again", tmp_path / "back", "--to", "hugging-face", "--config", folder / "config.json")
    assert same_tensors(stored(folder), stored(tmp_path / "back"))
    there = json.loads((folder / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == there


@pytest.mark.sample(2, "gpt_oss---pipeline-model-parallel-size 2 --micro-batch-size 1")
@pytest.mark.parametrize(
    "name, cut",
    [
        ("llama", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"),
        ("gpt2", "--tensor-model-parallel-size 2"),
        (
            "llama of four",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4",
        ),
        ("mixtral", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        pytest.param(
            "mixtral", "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2", marks=pytest.mark.full
        ),
        pytest.param(
            "deepseek_v3",
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --sequence-parallel",
            marks=pytest.mark.full,
        ),
        ("deepseek_v3", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        ("gpt_oss", "--pipeline-model-parallel-size 2 --micro-batch-size 1"),
        ("bert", "--tensor-model-parallel-size 2"),
        pytest.param("t5", "--pipeline-model-parallel-size 2", marks=pytest.mark.full),
        pytest.param("t5", "--tensor-model-parallel-size 2", marks=pytest.mark.full),
        pytest.param("t5, the first", "--tensor-model-parallel-size 2", marks=pytest.mark.full),
        pytest.param("megatron-bert", "--tensor-model-parallel-size 2", marks=pytest.mark.full),
    ],
)
def test_the_old_format_is_read(name, cut, tmp_path):
    """One file for each rank, as Megatron-LM's `torch` format has them, into both others."""
    folder = saved(name)
    ranks = 2 ** sum(f"--{each}-model-parallel" in cut for each in ("pipeline", "tensor", "expert"))
    flags = f"--load-hf {folder} --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 64 {cut}"
    architecture = architecture_of(folder)
    workers.run(ranks, f"{CASES}save_in_old_format", flags=flags, root=tmp_path / "old", architecture=architecture)
    convert(tmp_path / "old", tmp_path / "back", "--to", "hugging-face")
    assert same_tensors(stored(folder), stored(tmp_path / "back"))
    convert(tmp_path / "old", tmp_path / "ours", "--to", "torch_dist")
    convert(tmp_path / "ours", tmp_path / "again", "--to", "hugging-face")
    assert same_tensors(stored(folder), stored(tmp_path / "again"))


def save_in_old_format(flags: str, root: Path, architecture: str) -> None:
    """Write a rank's file as Megatron-LM's `save_checkpoint` does with --ckpt-format torch."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model
    from megatron.trainer.checkpoint.arguments import saved_arguments
    from megatron.trainer.checkpoint.state import model_key
    from tests.trainer.checkpoint.small_models import loaded

    args, chunks = loaded(flags, architecture)
    tensor, stage = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if args.pipeline_model_parallel_size > 1 else "")
    if args.expert_model_parallel_size > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    file = root / "iter_0000005" / name / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    state = {"args": saved_arguments(args), "checkpoint_version": 3.0, "iteration": 5}
    for number, chunk in enumerate(chunks):
        state[model_key(number, len(chunks))] = unwrap_model(chunk).state_dict_for_save_checkpoint()
    torch.save(state, file)
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    parallel_state.destroy_model_parallel()


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(tmp_path):
    """Of 146 MB in blocks of 2 MiB each way adds less than a third to the memory of the process."""
    added = workers.run(1, f"{CASES}measured", folder=tmp_path, layers=4, vocabulary=62_500)[0]
    size = sum(file.stat().st_size for file in (tmp_path / "back").glob("*.safetensors"))
    assert size > 140e6 and max(added) < size / 3, (size, added)


@pytest.mark.full
def test_memory_does_not_grow_with_the_layers(tmp_path):
    """Ninety layers of 4.5 MB add what ten add, but for a twentieth of their bytes: entries of the index."""
    (tmp_path / "ten").mkdir()
    (tmp_path / "ninety").mkdir()
    few = workers.run(1, f"{CASES}measured", folder=tmp_path / "ten", layers=10, vocabulary=4_000)[0]
    many = workers.run(1, f"{CASES}measured", folder=tmp_path / "ninety", layers=90, vocabulary=4_000)[0]
    size = sum(file.stat().st_size for file in (tmp_path / "ninety" / "back").glob("*.safetensors"))
    assert size > 390e6 and all(two - one < size / 20 for one, two in zip(few, many, strict=True)), (size, few, many)


def measured(folder: Path, layers: int, vocabulary: int) -> list[float]:
    """Bytes that each way adds at its peak. The largest file has 70 MB."""
    from unittest import mock

    from megatron.commands.convert_checkpoint import _completed
    from megatron.trainer.arguments.hugging_face import model_of
    from megatron.trainer.checkpoint import hugging_face
    from megatron.trainer.checkpoint.tensor_rows import tensors_of
    from megatron.trainer.checkpoint.tensor_table import sources_of
    from megatron.trainer.files.safetensors_files import write_folder

    config = {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": vocabulary, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "attention_dropout": 0.0, "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_theta": 500_000.0,
    }  # fmt: skip
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    model = model_of(config, "it")
    args = _completed([*model.argv(), "--tokenizer-type", "NullTokenizer"])
    sources = sources_of(tensors_of("llama", args))
    wanted = {name: (torch.bfloat16, source.shape) for name, source in sources.items()}
    parts = ((name, torch.full(source.shape, 0.5, dtype=torch.bfloat16)) for name, source in sources.items())
    write_folder(folder / "hf", wanted, parts, largest_file=70_000_000)
    added = []
    with mock.patch.object(hugging_face, "BLOCK", 2 * 2**20):
        for argv in (["hf", "ours", "--to", "torch_dist"], ["ours", "back", "--to", "hugging-face"]):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = _resident("VmRSS")
            assert run_tool([str(folder / argv[0]), str(folder / argv[1]), *argv[2:]])[0] == 0
            added.append(_resident("VmHWM") - before)
    return added


def _resident(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return float(line.split()[1]) * 1024


def test_files_of_the_tokenizer_come_along(tmp_path):
    """There and back, and the flags beside a checkpoint name them."""
    folder = Path(shutil.copytree(saved("qwen3"), tmp_path / "hf"))
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).write_text(f'{{"of": "{name}"}}')
    convert(folder, tmp_path / "ours", "--to", "torch_dist")
    convert(tmp_path / "ours", tmp_path / "back", "--to", "hugging-face")
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_text() == (folder / name).read_text()
    flags = (tmp_path / "ours" / "flags.txt").read_text()
    assert f"--tokenizer-type HuggingFaceTokenizer\n--tokenizer-model {tmp_path / 'ours'}\n" in flags


def test_what_is_refused(tmp_path):
    """In one sentence, before anything is written."""
    folder = saved("mixtral")
    ours, new = tmp_path / "ours", tmp_path / "new"
    convert(folder, ours, "--to", "torch_dist")
    assert "is not empty" in refusal(folder, ours, "--to", "torch_dist")
    assert "is a Hugging Face model already" in refusal(folder, new, "--to", "hugging-face")
    for flag in ("--config", "--vocab-size", "--ckpt-step"):
        assert f"{flag} is about a checkpoint" in refusal(folder, new, "--to", "torch_dist", flag, 1)
    assert "is a torch_dist checkpoint already" in refusal(ours, new, "--to", "torch_dist")
    assert "is no folder" in refusal(tmp_path / "none", new, "--to", "torch_dist")
    assert "neither config.json nor a checkpoint" in refusal(tmp_path, new, "--to", "hugging-face")
    assert "more than the 128 rows" in refusal(ours, new, "--to", "hugging-face", "--vocab-size", 129)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10_000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(ours, new, "--to", "hugging-face", "--config", tmp_path / "config.json")
    assert "--rotary-base is 10000, and it is 1000000 here; leave it out" in message
    data = next((ours / "release").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert "is damaged: its checksum does not match" in refusal(ours, new, "--to", "hugging-face")
    assert not new.exists()


def test_a_conversion_that_was_killed_is_made_again(tmp_path):
    """Its remains in the folder are replaced; a folder with anything else, or without its flags, is not touched."""
    ours = tmp_path / "ours"
    (ours / ".iter_0000000.incomplete").mkdir(parents=True)
    (ours / "tokenizer.json").write_text("mine")
    assert "is not empty" in refusal(saved("llama"), ours, "--to", "torch_dist")
    (ours / "flags.txt").write_text("--num-la")
    convert(saved("llama"), ours, "--to", "torch_dist")
    assert "--num-layers" in (ours / "flags.txt").read_text() and not [*ours.glob(".iter_*")]
    (tmp_path / "export" / ".iter_0000000.incomplete").mkdir(parents=True)
    assert "is not empty" in refusal(ours, tmp_path / "export", "--to", "hugging-face")


def test_an_export_that_was_killed_leaves_nothing_for_ever(tmp_path):
    """The next one of the same name removes its folder; that of one that still writes, and of another name, stays."""
    ours = tmp_path / "ours"
    convert(saved("llama"), ours, "--to", "torch_dist")
    argv = [str(ours), str(tmp_path / "new"), "--to", "hugging-face"]
    with pytest.raises(workers.WorkerError, match=r"died|killed|SIGKILL|signal 9"):
        workers.run(1, f"{CASES}killed", argv=argv)
    (left,) = tmp_path.glob(".new.incomplete.*")
    assert any(left.iterdir()) and not (tmp_path / "new").exists()
    other, running = tmp_path / ".newer.incomplete.x", tmp_path / ".new.incomplete.running"
    for folder in (other, running):
        folder.mkdir()
    lock = os.open(running, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    convert(*argv)
    os.close(lock)
    assert [*tmp_path.glob(".new*.incomplete.*")] in ([other, running], [running, other]) and not left.exists()
    assert (tmp_path / "new").stat().st_mode == other.stat().st_mode  # as of any folder that this process makes
    assert same_tensors(stored(tmp_path / "new"), stored(saved("llama")))


def killed(argv: list[str]) -> None:
    """`run_tool`, killed after ten parts."""
    import signal
    from unittest import mock

    from megatron.trainer.checkpoint import conversion

    read, count = conversion.CheckpointWeights.read, []

    def killing(*arguments, **options):
        count.append(1)
        if len(count) > 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(*arguments, **options)

    with mock.patch.object(conversion.CheckpointWeights, "read", killing):
        run_tool(argv)


@pytest.mark.parametrize("direction", ["torch_dist", "hugging-face"])
def test_what_fails_leaves_nothing(direction, tmp_path):
    """A disk that is full in the middle: no checkpoint, no folder, no remains."""
    source = saved("llama")
    if direction == "hugging-face":
        convert(source, tmp_path / "ours", "--to", "torch_dist")
        source = tmp_path / "ours"
    before = sorted(tmp_path.iterdir())
    argv = [str(source), str(tmp_path / "new"), "--to", direction]
    status, text = workers.run(1, f"{CASES}interrupted", argv=argv)[0]
    assert status == 1 and f"{tmp_path}/new cannot be written (No space left on device); make room" in text
    left = [path for path in tmp_path.rglob("*") if (tmp_path / "new") in path.parents]
    assert not left and [path for path in sorted(tmp_path.iterdir()) if path.name != "new"] == before


def interrupted(argv: list[str]) -> tuple[int, str]:
    """`run_tool` with weights that cannot be read, or a disk that is full, after ten parts."""
    import errno
    from unittest import mock

    from megatron.trainer.checkpoint import conversion, hugging_face

    kind = hugging_face.HuggingFaceWeights if "torch_dist" in argv else conversion.CheckpointWeights
    read, count = kind.read, []

    def failing(*arguments, **options):
        count.append(1)
        if len(count) > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return read(*arguments, **options)

    with mock.patch.object(kind, "read", failing):
        return run_tool(argv)


def test_the_size_of_the_vocabulary_is_asked_for(tmp_path):
    """A run's checkpoint holds the tokenizer's name, and not how many tokens it has."""
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32"
    workers.run(1, f"{CASES}save_new", flags=f"{flags} --tokenizer-type ByteLevelTokenizer --save {tmp_path / 'run'}")
    argv = (tmp_path / "run", tmp_path / "out", "--to", "hugging-face")
    assert "give --vocab-size, the size of the tokenizer" in refusal(*argv)
    convert(*argv, "--vocab-size", 259)
    assert stored(tmp_path / "out")["transformer.wte.weight"].shape == (259, 32)


def save_new(flags: str) -> None:
    """Save a model with random weights."""
    from megatron.core import parallel_state
    from tests.trainer.checkpoint.small_models import loaded

    loaded(flags)
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("flags", ["--pipeline-schedule 2bw", FROZEN])
def test_what_training_saves_returns(flags, tmp_path):
    """Through a run whose steps are too small to move a weight: with one key for all layers, or one for each."""
    folder = saved("llama of four")
    base = (
        "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --num-workers 0 --eval-iters 0 --train-iters 2 "
        "--lr 1e-30 --lr-decay-style constant --clip-grad 0 --tokenizer-type NullTokenizer"
    )
    train(2, f"{flags} --load-hf {folder} --save {tmp_path / 'run'}", base=base)
    convert(tmp_path / "run", tmp_path / "back", "--to", "hugging-face")
    assert same_tensors(stored(folder), stored(tmp_path / "back"))
