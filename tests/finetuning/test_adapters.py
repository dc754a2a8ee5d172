"""LoRA adapters of PEFT in whole runs of `finetune.py`'s job, beside PEFT in one process."""

from pathlib import Path

import pytest
import torch

from tests import workers
from tests.finetuning import cases, lora, tiny

CASES = "tests.finetuning.cases"
CLASSES, CAUSAL, T5 = "sequence-classification", "causal-lm", "text-to-text"
LLAMA = ["q_proj", "v_proj", "down_proj"]

ADAPTERS = {
    "lora": (CAUSAL, {"r": 4, "lora_alpha": 8, "target_modules": LLAMA, "task_type": "CAUSAL_LM"}),
    "dora": (CAUSAL, {"r": 3, "target_modules": "all-linear", "use_dora": True, "task_type": "CAUSAL_LM"}),
    "head": (CLASSES, {"r": 4, "target_modules": ["query", "dense"], "use_rslora": True, "task_type": "SEQ_CLS"}),
    "t5": (T5, {"r": 2, "target_modules": ["q", "v", "wo"], "task_type": "SEQ_2_SEQ_LM"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


def base_of(folder: Path, task: str) -> Path:
    return lora.llama_folder(folder) if task == CAUSAL else tiny.model_folder(folder, task)


def run(folder: Path, name: str, *argv: object, task: str, ranks: int, dropout: float = 0.0):
    outcome, *_ = workers.run(
        ranks, f"{CASES}:finetune", folder=folder, task=task, argv=tuple(map(str, argv)), dropout=dropout, name=name,
        weights="adapter_of",
    )  # fmt: skip
    return outcome


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "schedule", "ranks", "accumulation"),
    [
        ("lora", "flush", (0, 1, 0, 1), 2),
        ("lora", "2bw", (0, 1, 2, 3), 4),
        ("dora", "gpipe", (0, 1), 2),
        ("dora", "pipedream", (0, 1), 1),
        ("head", "2bw", (0, 1), 2),
        ("head", "flush", (0,), 2),
        ("t5", "gpipe", (0, 1, 1, 0), 2),
        ("t5", "pipedream", (0, 1, 2, 3), 1),
    ],
)
def test_ranks_train_what_peft_trains(folder, kind, schedule, ranks, accumulation):
    """An adapter that PEFT has begun goes on as with PEFT in one process; the file that is written is PEFT's."""
    task, options = ADAPTERS[kind]
    base = base_of(folder, task)
    adapter = lora.begun(base, task, folder / kind, **options)
    place = folder / f"{kind}-{schedule}-{len(ranks)}"
    place.mkdir()
    argv = [
        "--model_name_or_path",
        base,
        "--adapter_name_or_path",
        adapter,
        "--gradient_accumulation_steps",
        accumulation,
    ]
    argv += ["--pipeline_schedule", schedule, "--learning_rate", 1e-3, "--weight_decay", 0.1, "--num_train_epochs", 4]
    argv += ["--max_grad_norm", 0 if schedule == "pipedream" else 0.1, "--dataloader_drop_last", "--no_group_texts"]
    argv += ["--merge_adapter"]
    cut = cases.partition(place, task, ranks, *argv)
    found = run(place, "out", *argv, "--partition", cut, task=task, ranks=len(set(ranks)))
    command = tiny.command(place, task, *argv)
    delays = lora.delays_of(tiny.arguments(place, task, *argv), cut, schedule)
    expected = lora.plain(base, task, adapter, command, delays)
    assert len(set(expected.losses)) == len(expected.losses) > 2
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.weights.keys() == expected.weights.keys()
    begun = cases.adapter_of(adapter, task)
    for name, weights in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weights, rtol=1e-5, atol=1e-5, msg=name)
        assert not torch.allclose(begun[name], weights, rtol=1e-3, atol=1e-4), f"{name} has not learned"
    batch = {"input_ids": torch.arange(4, 20).view(2, 8)}
    batch |= {"labels": batch["input_ids"]} if task == T5 else {}
    written = lora.adapted(base, task, place / "out").eval()
    whole = lora.adapted(base, task, adapter).eval()
    whole.load_state_dict({**whole.state_dict(), **written.state_dict()})
    merged = cases.loaded(place / "out" / "merged", task).eval()
    with torch.no_grad():
        logits = written(**batch).logits
        assert torch.equal(logits, whole(**batch).logits)
        torch.testing.assert_close(merged(**batch).logits, logits, rtol=1e-5, atol=1e-5)
    for name, weights in written.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], weights, rtol=0, atol=1e-6, msg=name)
