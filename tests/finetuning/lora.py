"""Adapters of the tests of fine-tuning, and their training with nothing but torch, transformers and PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import peft
import torch
import transformers

from megatron.capture.blocks import crossings
from megatron.finetuning.arguments import parse_args
from megatron.finetuning.data.batches import Epochs
from megatron.finetuning.optimizers import make_optimizer, make_scheduler
from megatron.finetuning.partition_file import PartitionFile
from megatron.finetuning.plan import captured_model, decaying
from megatron.finetuning.samples import read_data
from tests.finetuning import cases, tiny

PREFIX = "base_model.model."


def llama_folder(folder: Path) -> Path:
    """A Llama with a tied embedding."""
    path = folder / "llama"
    config = transformers.LlamaConfig(
        vocab_size=44, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=32, tie_word_embeddings=True, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    if not path.exists():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(path)
        tiny.tokenizer().save_pretrained(path)
    return path


def begun(base: Path, task: str, path: Path, **options: object) -> Path:
    """An adapter as PEFT writes it, whose second factors are not 0."""
    torch.manual_seed(1)
    config = peft.LoraConfig(init_lora_weights=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(cases.loaded(base, task), config)
        for each in model.parameters():
            if each.requires_grad:  # a module that is trained whole is no longer the model's
                each.data += 0.02 * torch.randn(each.shape)
        model.save_pretrained(path)
    return path


def adapted(
    base: Path, task: str, adapter: Path, *, dtype: torch.dtype = torch.float32, **options: object
) -> peft.PeftModel:
    """The model with an adapter, as users load it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(cases.loaded(base, task).to(dtype), adapter, **options)


def delays_of(args, partition: Path, schedule: str) -> dict[str, int]:
    """Name of a parameter -> the batches by which a schedule's weights are older than the newest."""
    captured, _, _ = captured_model(args, read_data(args))
    found = crossings(captured, PartitionFile.read(partition).stage_of_operators(captured))
    of_stage = {"2bw": lambda stage: 1, "pipedream": lambda stage: found.num_stages - 1 - stage}
    delay = of_stage.get(schedule, lambda stage: 0)
    return {name: delay(stage) for name, stage in found.owner.items()}


def plain(
    base: Path,
    task: str,
    adapter: Path,
    argv: Sequence[object],
    delays: Mapping[str, int],
    *,
    dtype: torch.dtype = torch.float32,
) -> cases.Outcome:
    """The training of an adapter in one process. The weights are those of PEFT's file.

    Batch j is computed at version max(j - delay, 0) of each parameter. `dtype`: of the frozen weights.
    """
    args = parse_args(list(map(str, argv)))
    data = read_data(args)
    model = adapted(base, task, adapter, dtype=dtype, is_trainable=True).train()
    trained = {name.removeprefix(PREFIX): each for name, each in model.named_parameters() if each.requires_grad}
    frozen = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    optimizer = make_optimizer(trained, args, decays=decaying(model.get_base_model()))
    epochs = Epochs(
        num_samples=len(data.training), micro_batch_size=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps, seed=args.seed, drop_last=args.dataloader_drop_last,
    )  # fmt: skip
    num_steps = int(args.num_train_epochs * epochs.batches_per_epoch)
    scheduler = make_scheduler(optimizer, args, num_steps=num_steps)
    versions = [{name: each.detach().clone() for name, each in trained.items()}]
    lines = []
    for step, batch in zip(range(num_steps), epochs.batches(), strict=False):
        for name, each in trained.items():
            each.data.copy_(versions[max(step - delays[name], 0)][name])
        losses, terms = [], [data.training.num_terms(indices) for indices in batch]
        for indices, count in zip(batch, terms, strict=True):
            output = model.get_base_model()(**data.training.batch(indices, len(indices)))
            loss = output.loss * (count * len(batch) / sum(terms))
            (loss / len(batch)).backward()
            losses.append(loss.item())
        if args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained.values(), args.max_grad_norm)
        lines.append({"step": step + 1, "loss": sum(losses) / len(losses)})
        for name, each in trained.items():
            each.data.copy_(versions[-1][name])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        versions.append({name: each.detach().clone() for name, each in trained.items()})
    assert frozen and all(torch.equal(model.get_parameter(name), each) for name, each in frozen.items())
    return cases.Outcome(lines, peft.get_peft_model_state_dict(model))
