"""A Hugging Face model from its folder, without memory for its parameters, and its capture.

transformers is imported where it is used, since only fine-tuning needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron.capture.export import Captured, capture
from megatron.capture.fake import fake_parameters

NEEDS_TRANSFORMERS = "fine-tuning needs the package transformers, 5 or later; pip install .[tokenizers]"


def require_transformers():
    """The package. Raises ValueError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(NEEDS_TRANSFORMERS) from error
    return transformers


def check_folder(folder: str) -> Path:
    """Raises ValueError for what is no folder of a model."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"--model_name_or_path {folder} is no folder; download the model first (nothing is downloaded here)"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, so it is no model of transformers; give a model's folder")
    return path


def read_config(folder: str, changes: Mapping[str, object] | None = None):
    """The configuration of a model's folder. Raises ValueError for a folder that is none."""
    transformers = require_transformers()
    check_folder(folder)
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **dict(changes or {}))
    except Exception as error:  # of a field of another kind any
        raise ValueError(f"{folder}/config.json cannot be read: {first_line(error)}; save the model anew") from error


def open_model(
    folder: str,
    auto_model: str,
    *,
    real: bool = False,
    dtype: torch.dtype = torch.float32,
    changes: Mapping[str, object] | None = None,
) -> torch.nn.Module:
    """The model of a folder's configuration; of its weights only shapes, or with `real` values at random.

    `auto_model`: the class of transformers that knows the architecture for the task, such as
    ``AutoModelForCausalLM``. `changes`: to the configuration, such as ``num_labels``.

    Raises ValueError for a folder that is none, or an architecture that has no model for the task.
    """
    transformers = require_transformers()
    config = read_config(folder, changes)
    config.use_cache = False
    context = contextlib.nullcontext() if real else fake_parameters(dtype)
    try:
        with context:
            model = getattr(transformers, auto_model).from_config(config)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{config.model_type} of {folder} has no {auto_model}: {first_line(error)}; choose another --task"
        ) from error
    return model.to(dtype) if real else model


def capture_model(model: torch.nn.Module, batch: Mapping[str, Tensor], keep: Sequence[str]) -> Captured:
    """Capture it with a batch of a microbatch's shapes; of a single sample, with that twice.

    Raises ValueError as `capture`.
    """
    if next(iter(batch.values())).shape[0] == 1:
        batch = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    return capture(model, batch, keep=keep)


def first_line(error: Exception) -> str:
    """What an error says first, without a full stop; its name where it says nothing."""
    first, *others = str(error).splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first.rstrip(".")
