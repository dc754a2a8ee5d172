"""`finetune.py --pipeline_schedule l2l`: any captured model trains with its weights on the host as one process does."""

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.finetuning import job
from megatron.finetuning.assembly import build_pipeline
from megatron.finetuning.relay_plan import relay_bytes
from megatron.pipeline.runtime.relay.packed_weights import PACKINGS
from megatron.pipeline.runtime.stages.module.rank_update import TOGETHER
from tests import workers
from tests.finetuning import cases, lora, tiny
from tests.finetuning.test_adapters import ADAPTERS, base_of
from tests.finetuning.test_adapters import run as with_adapter
from tests.finetuning.test_runs import run, same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("relay")


CLASSES = "sequence-classification"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("task", "ranks", "argv"),
    [
        (CLASSES, 1, ["--gradient_accumulation_steps", 4, "--max_grad_norm", 0.1, "--weight_decay", 0.1]),
        (CLASSES, 2, ["--gradient_accumulation_steps", 2, "--optim", "adamw_torch_fused"]),
        (CLASSES, 1, ["--gradient_accumulation_steps", 4, "--l2l_moments", "bfloat16", "--max_grad_norm", 0]),
        (CLASSES, 2, ["--optim", "adamw_torch_fused", "--l2l_moments", "bfloat16", "--adam_epsilon", 1e-4]),
        ("text-to-text", 2, ["--gradient_accumulation_steps", 2, "--max_grad_norm", 0.1]),
        ("causal-lm", 1, ["--gradient_accumulation_steps", 2, "--max_grad_norm", 0, "--l2l_stash", "device"]),
        ("causal-lm", 2, ["--optim", "sgd", "--learning_rate", 0.1, "--gradient_accumulation_steps", 2]),
        ("image-classification", 1, ["--max_grad_norm", 0, "--l2l_resident_stages", 1]),
    ],
)
def test_a_relay_trains_what_one_process_trains(folder, task, ranks, argv):
    argv = [*argv, "--num_train_epochs", 2, "--pipeline_schedule", "l2l"]
    expected = cases.plain(folder, task, argv=argv)
    found = run(folder, f"{task}-{ranks}-{argv.count('bfloat16')}", *argv, task=task, ranks=ranks)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5) and len(found.losses) > 2
    same(found, expected, exactly=False)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_replicas_share_a_store(folder, ranks):
    """Two replicas, on one rank each or two, store and step halves of each layer: what one process trains. The run goes
    on from its checkpoint without replicas."""
    argv = ["--pipeline_schedule", "l2l", "--max_grad_norm", 0.5, "--num_train_epochs", 2, "--save_steps", 2]
    argv += ["--weight_decay", 0.1, "--adam_epsilon", 1e-4]
    halves = ["--gradient_accumulation_steps", 2, "--data_parallel_size", 2]
    found = run(folder, f"halves-{ranks}", *argv, *halves, task="causal-lm", ranks=ranks)
    whole = ["--gradient_accumulation_steps", 4]
    expected = cases.plain(folder, "causal-lm", argv=[*argv, *whole])
    assert found.losses == pytest.approx(expected.losses, rel=1e-6) and len(found.losses) > 2
    same(found, expected, exactly=False)
    rest = [*argv, *whole, "--resume_from_checkpoint", folder / f"halves-{ranks}" / "checkpoint-2"]
    one = run(folder, f"rest-{ranks}", *rest, task="causal-lm", ranks=ranks // 2)
    assert one.losses == pytest.approx(found.losses[2:], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "precision"), [(1, ["--bf16"]), pytest.param(2, ["--l2l_stash", "device"], marks=pytest.mark.full)]
)
def test_a_resumed_relay_is_the_run(folder, ranks, precision):
    """With dropout, masters and an evaluation on the way: the same bits at the end, which are those of `flush`."""
    validation = tiny.data_file(folder, num_samples=7, seed=3)
    argv = ["--num_train_epochs", 2, "--gradient_accumulation_steps", 2, "--dataloader_drop_last", "--do_train"]
    argv += ["--do_eval", "--validation_file", validation, "--eval_steps", 3, *precision[: precision == ["--bf16"]]]
    relay = [*argv, "--pipeline_schedule", "l2l", "--save_steps", 3, *precision]
    name = f"{ranks}{precision[0]}"
    whole = run(folder, f"whole-{name}", *relay, ranks=ranks, dropout=0.1)
    checkpoint = folder / f"whole-{name}" / "checkpoint-3"
    rest = run(folder, f"rest-{name}", *relay, "--resume_from_checkpoint", checkpoint, ranks=ranks, dropout=0.1)
    assert rest.losses == whole.losses[3:] and len(rest.losses) >= 3
    same(whole, rest)
    cut = cases.partition(folder, CLASSES, (0,), *argv[-1:] * ("--bf16" in argv), dropout=0.1)
    flush = run(
        folder, f"flush-{name}", *argv, "--pipeline_schedule", "flush", "--partition", cut, ranks=1, dropout=0.1
    )
    assert whole.losses == flush.losses
    assert [line["eval_loss"] for line in whole.lines if "eval_loss" in line] == [
        line["eval_loss"] for line in flush.lines if "eval_loss" in line
    ]
    same(whole, flush)


@pytest.mark.parametrize("moments", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_moments_of_another_width_are_refused(folder, moments):
    """A checkpoint has moments of one width, and a run that goes on with the other would round or widen them."""
    argv = ["--max_steps", 1, "--save_steps", 1, "--pipeline_schedule", "l2l", "--bf16", "--l2l_moments"]
    run(folder, f"moments-{moments}", *argv, moments, ranks=1)
    (other,) = {"float32", "bfloat16"} - {moments}
    reason = r"another optim \(adamw with FP32 masters( with BF16 moments)?\) than this run's \(adamw with FP32 masters"
    with pytest.raises(workers.WorkerError, match=reason):
        run(folder, f"moments-{moments}", *argv, other, "--resume", "auto", ranks=1)


DEEP = {
    "llama": ("causal-lm", transformers.LlamaForCausalLM, transformers.LlamaConfig, {"num_key_value_heads": 1}),
    "qwen3": ("causal-lm", transformers.Qwen3ForCausalLM, transformers.Qwen3Config,
              {"head_dim": 8, "num_key_value_heads": 1}),
    "t5": ("text-to-text", transformers.T5ForConditionalGeneration, transformers.T5Config,
           {"d_model": 16, "d_kv": 8, "d_ff": 32, "decoder_start_token_id": 0, "pad_token_id": 0}),
    "vit": ("image-classification", transformers.ViTForImageClassification, transformers.ViTConfig,
            {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}),
}  # fmt: skip


def device_peak(folder: Path, kind: str, layers: int, evaluates: bool, *flags: str) -> tuple[int, int, int, int]:
    """The most bytes of two batches on the device; what was planned of them; bytes on the host; and those planned."""
    task, model, config, options = DEEP[kind]
    shape = {"hidden_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "t5":
        shape = {"num_layers": layers // 2, "num_heads": 2}
    path = Path(folder) / f"{kind}-{layers}"
    torch.manual_seed(1)
    model(config(**shape, **({} if kind == "vit" else {"vocab_size": 44}), **options)).save_pretrained(path)
    if kind != "vit":
        tiny.tokenizer().save_pretrained(path)
    kept = []

    def keep(plan, args, **options):
        kept.append((build_pipeline(plan, args, **options), relay_bytes(plan, args)[0]))
        return kept[0][0]

    argv = ["--model_name_or_path", path, "--max_steps", 2, "--gradient_accumulation_steps", 4, "--pipeline_schedule",
            "l2l", "--num_train_epochs", 9, "--do_train", *flags]  # fmt: skip
    if evaluates:
        argv += ["--do_eval", "--validation_file", tiny.data_file(folder, task, num_samples=100, seed=3)]
    with mock.patch.object(job, "build_pipeline", keep), mock.patch.object(job, "relay_peaks", lambda pipeline: ""):
        cases.finetune(folder, task, argv=[str(each) for each in argv], name=path.name)
    [(pipeline, planned)] = kept
    ledger = pipeline.updates[TOGETHER].ledger
    return ledger.take_device_peak(), planned.device - planned.layer, ledger.host_bytes, planned.host


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [kind if kind == "t5" else pytest.param(kind, marks=pytest.mark.full) for kind in DEEP]
)
@pytest.mark.parametrize("evaluates", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("times", [3, pytest.param(12, marks=pytest.mark.full)])
def test_the_device_does_not_grow_with_depth(folder, kind, evaluates, times):
    """Three or twelve times as deep, the same bytes on the device, which are at most those planned; the host holds the
    rest."""
    (few, planned, on_host, _), (many, planned_again, more_on_host, _) = (
        workers.run(
            1, f"{__name__}:device_peak", timeout=500, folder=folder, kind=kind, layers=depth, evaluates=evaluates
        )[0]
        for depth in (6, 6 * times)
    )
    assert few == many <= planned == planned_again
    assert few > 0.7 * planned and more_on_host > 2 / 3 * times * on_host


def host_bytes(folder: Path) -> dict[str, tuple[int, int]]:
    """Bytes on the host and those planned, with moments in FP32 and in BF16."""
    return {
        moments: device_peak(folder, "llama", 8, False, "--bf16", "--l2l_moments", moments)[2:]
        for moments in ("float32", "bfloat16")
    }


@pytest.mark.full
def test_the_host_has_ten_bytes_a_parameter(folder):
    """Besides the gradient: weight, master and moments, of 2, 4 and twice 2 bytes, as planned but for the padding of
    small tensors."""
    [found] = workers.run(1, f"{__name__}:host_bytes", folder=folder)
    (wide, planned_wide), (narrow, planned_narrow) = found["float32"], found["bfloat16"]
    assert planned_narrow / planned_wide == pytest.approx((2 + 10) / (2 + 14), abs=0.01)
    assert planned_wide < wide < 1.12 * planned_wide and planned_narrow < narrow < 1.12 * planned_narrow


def rounded(base: Path, folder: Path, bits: int) -> Path:
    """The model with the matrices of its layers as they come out of a packing."""
    packing, path = PACKINGS[bits], folder / f"{base.name}-of-{bits}-bits"
    shutil.copytree(base, path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    for name, weight in tensors.items():
        if any(part.isdigit() for part in name.split(".")) and "relative" not in name and packing.takes(weight):
            tensors[name] = packing.rounded(weight)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "ranks", "bits"),
    [("lora", 1, 4), pytest.param("dora", 2, 8, marks=pytest.mark.full), ("head", 2, None),
     ("late", 2, 8), pytest.param("t5", 1, 8, marks=pytest.mark.full)],
)  # fmt: skip
def test_adapters_relay(folder, kind, ranks, bits):
    """Adapters alone have gradients and step, with the bits of `flush`; packed weights are those rounded before. The
    layers before the first adapter have forwards alone.
    """
    task, options = ADAPTERS[kind]
    base = base_of(folder, task)
    adapter = lora.begun(base, task, folder / f"begun-{kind}", **options)
    argv = ["--adapter_name_or_path", adapter, "--gradient_accumulation_steps", 2, "--learning_rate", 1e-3]
    argv += ["--num_train_epochs", 2, "--dataloader_drop_last", "--no_group_texts"]
    plain = base if bits is None else rounded(base, folder, bits)
    packs = [] if bits is None else [f"--load_in_{bits}bit"]
    relay = ["--model_name_or_path", base, *argv, "--pipeline_schedule", "l2l", *packs]
    found = with_adapter(folder, f"relay-{kind}", *relay, task=task, ranks=ranks)
    flush = ["--model_name_or_path", plain, *argv, "--pipeline_schedule", "flush"]
    cut = cases.partition(folder, task, (0,), *flush)
    expected = with_adapter(folder, f"flush-{kind}", *flush, "--partition", cut, task=task, ranks=1)
    assert found.losses == expected.losses and len(found.losses) > 2
    same(found, expected)


@pytest.mark.full
def test_a_new_adapter_begins_at_the_packed_weights(folder):
    """DoRA's magnitudes are norms of the weights with which the run computes, so an adapter begins as the model."""
    base = lora.llama_folder(folder)
    argv = ["--lora_r", 2, "--use_dora", "--target_modules", "q_proj", "down_proj", "--max_steps", 3]
    relay = ["--model_name_or_path", base, *argv, "--pipeline_schedule", "l2l", "--load_in_4bit"]
    found = with_adapter(folder, "new", *relay, task="causal-lm", ranks=1)
    flush = ["--model_name_or_path", rounded(base, folder, 4), *argv, "--pipeline_schedule", "flush"]
    cut = cases.partition(folder, "causal-lm", (0,), *flush)
    expected = with_adapter(folder, "new-flush", *flush, "--partition", cut, task="causal-lm", ranks=1)
    assert found.losses == expected.losses and len(found.losses) == 3
    same(found, expected)
