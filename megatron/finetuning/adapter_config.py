"""The configuration of an adapter: PEFT's `LoraConfig`, from flags or from the file that PEFT writes.

A LoRA has many variants. Those that change the frozen weights, read data before they begin, or compute with other
modules than linear ones are refused by the name of their field.

peft is imported inside functions, since only adapters need it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection
from pathlib import Path

from megatron.finetuning.adapter_arguments import ALL_LINEAR, OF_LORA
from megatron.finetuning.pretrained import first_line

CONFIG = "adapter_config.json"

TASK_TYPES = {
    "sequence-classification": "SEQ_CLS",
    "causal-lm": "CAUSAL_LM",
    "chat": "CAUSAL_LM",
    "dpo": "CAUSAL_LM",
    "text-to-text": "SEQ_2_SEQ_LM",
    "question-answering": "QUESTION_ANS",
    "token-classification": "TOKEN_CLS",
}
"""Word of --task -> PEFT's, which decides the head that is trained whole; PEFT has none for images."""

SUPPORTED = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "use_rslora", "use_dora",
    "lora_bias", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern",
)  # fmt: skip
"""Fields of `LoraConfig` that may differ from their defaults."""

OF_FILES = (
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
)  # fmt: skip
"""Fields that describe the file, not the adapter."""

BEGINNINGS = ("true", "gaussian")
"""Values of `init_lora_weights` for a new adapter; the others need data, or change the frozen weights."""

BEGUN = (*BEGINNINGS, "false", "orthogonal")
"""Values of `init_lora_weights` for an adapter that is continued. None of them changes the frozen weights."""


def require_peft():
    """Import and return the package peft. Raises ValueError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ValueError("adapters need the package peft; pip install .[peft]") from error
    return peft


def adapter_config(args: argparse.Namespace):
    """PEFT's `LoraConfig` from the flags, or from the file that they name.

    Raises ValueError for a file that `written_config` refuses, or that is for another task.
    """
    peft = require_peft()
    source = args.peft_config or args.adapter_name_or_path
    if source is None:
        fields = {name: value for name in OF_LORA if (value := getattr(args, name)) not in (None, False)}
        if fields.get("target_modules") == [ALL_LINEAR]:
            fields["target_modules"] = ALL_LINEAR
        return peft.LoraConfig(r=args.lora_r, task_type=TASK_TYPES.get(args.task), **fields)
    known = BEGINNINGS if args.adapter_name_or_path is None else BEGUN
    config, wanted = written_config(Path(source), known), TASK_TYPES.get(args.task)
    if config.task_type not in (None, wanted):
        raise ValueError(f"{source} has task_type {config.task_type}, and --task {args.task} is {wanted}; change one")
    return config


def written_config(path: Path, beginnings: Collection[str] = BEGUN):
    """PEFT's `LoraConfig` in a file, or in a folder with PEFT's name.

    `beginnings`: the accepted values of `init_lora_weights`. Raises ValueError for a file that cannot be read, an
    adapter of another kind than LoRA, and another value of `init_lora_weights`.
    """
    peft = require_peft()
    path = path / CONFIG if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = content.get("peft_type")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read ({reason}); give the {CONFIG} that PEFT writes") from error
    if kind != "LORA":
        raise ValueError(f"{path} is of the kind {kind}, and only LORA is trained here; give a configuration of LoRA")
    try:
        config = peft.LoraConfig.from_peft_type(**content)
    except Exception as error:  # PEFT raises errors of any class for a wrong field
        raise ValueError(f"{path} is no LoRA that this peft knows: {first_line(error)}; write it anew") from error
    if str(config.init_lora_weights).lower() not in beginnings:
        raise ValueError(
            f"{path} has init_lora_weights {config.init_lora_weights}, which is not done here; give one of "
            f"{', '.join(beginnings)}"
        )
    config.inference_mode = False
    return config


def task_of(config, source: Path) -> str:
    """The word of --task for an adapter's configuration. Raises ValueError if it names no task of ours."""
    found = next((task for task, kind in TASK_TYPES.items() if kind == config.task_type), None)
    if found is None:
        raise ValueError(
            f"{source} has task_type {config.task_type}, which does not say the class of the model; set one of "
            f"{', '.join(TASK_TYPES.values())}"
        )
    return found


def refuse_variants(config) -> None:
    """Raise ValueError for a field of `LoraConfig` that asks for a variant that is not supported."""
    for field in dataclasses.fields(config):
        if field.name in SUPPORTED + OF_FILES:
            continue
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        value = getattr(config, field.name)
        if value not in (default, None, False) and value:
            raise ValueError(f"LoRA with {field.name} {value} is not trained here; leave {field.name} out")
