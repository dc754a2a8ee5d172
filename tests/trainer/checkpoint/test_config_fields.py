"""config.json, key by key, against transformers: what changes its numbers is another model here, or an error."""

import contextlib
import copy
import json
from pathlib import Path

import pytest
import torch

from megatron.trainer.arguments.hugging_face import model_of
from tests import workers
from tests.trainer.checkpoint.small_models import (
    MODELS,
    VOCABULARY,
    architecture_of,
    logits_case,
    logits_of,
    model_class,
    saved,
)

TOLERANCE = 1e-6

OF_THE_FILE = ("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path")
"""Keys that say where the model comes from, and how it is stored."""


def other_values(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, 2 * value, 2.0 * value + 0.25, None]
    if isinstance(value, list):
        return [[each for each in value[1:]], [*value[1:], value[0]] if value else [0], None]
    return [3, True, 0.5, "gelu", None] if value is None else ["gelu_new", "gelu", "other", None]


def variants(config: dict) -> list[tuple[str, dict]]:
    """Configurations that differ in one key, also of the mappings in it, or lack one."""
    found = []
    for key, value in config.items():
        if key in OF_THE_FILE:
            continue
        found.append((f"without {key}", {name: each for name, each in config.items() if name != key}))
        inner = variants(value) if isinstance(value, dict) else [(f"{each!r}", each) for each in other_values(value)]
        found += [(f"{key} {what}", config | {key: each}) for what, each in inner if each != value]
    return found


def logits(kind: str, config: dict, weights: dict) -> torch.Tensor | None:
    """What transformers computes by a configuration; None where it can build no model by it. Raises RuntimeError for
    weights of other shapes."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    known = {key: value for key, value in config.items() if key not in OF_THE_FILE}
    try:
        model = model_class(kind)(getattr(transformers, kind + "Config")(**known))
    except (StrictDataclassError, TypeError, ValueError):
        return None
    if kind in ("T5", "MT5"):  # which transformers ties
        model.lm_head.weight = torch.nn.Parameter(weights["lm_head.weight"])
    model.load_state_dict(weights)
    model.set_attn_implementation("eager")
    return logits_of(model)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("gpt_oss", "deepseek_v3", "qwen2") else pytest.mark.full)
             for name in MODELS if name != "llama of four"]
)  # fmt: skip
def test_no_key_is_passed_over(name):
    """Each key is changed, and left out: what is the same model here has the same logits there, bit for bit."""
    folder, kind = saved(name), MODELS[name][0]
    config = json.loads((folder / "config.json").read_text())
    facts = model_of(config, "it").facts
    model = model_class(kind).from_pretrained(folder)
    weights = copy.deepcopy(model.state_dict())
    expected = logits(kind, config, weights)
    taken = refused = same = 0
    for what, changed in variants(config):
        try:
            there = model_of(changed, "it").facts
        except ValueError:
            refused += 1
            continue
        if there != facts:
            taken += 1
            continue
        found = logits(kind, changed, weights)
        if found is not None:
            same += 1
            assert torch.equal(found, expected), f"{what} changes the logits of {kind}"
    assert min(taken, refused, same) > 5, (taken, refused, same)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama of four"])
def test_what_is_taken_over_means_the_same(name, tmp_path):
    """Each key is changed: where that is another model of the same shapes, its logits are those of transformers."""
    folder, kind = saved(name), MODELS[name][0]
    config = json.loads((folder / "config.json").read_text())
    facts = model_of(config, "it").facts
    weights = copy.deepcopy(model_class(kind).from_pretrained(folder).state_dict())
    changes, folders, wanted = [], [], []
    for what, changed in variants(config):
        with contextlib.suppress(ValueError, RuntimeError):
            there = model_of(changed, "it").facts
            expected = logits(kind, changed, weights) if there != facts else None
            if expected is not None and torch.isfinite(expected).all():
                folders.append(Path(tmp_path / str(len(folders))))
                folders[-1].mkdir()
                (folders[-1] / "model.safetensors").symlink_to(folder / "model.safetensors")
                (folders[-1] / "config.json").write_text(json.dumps(changed))
                changes.append(what)
                wanted.append(expected)
    found = workers.run(1, f"{__name__}:each_by_itself", folders=folders, timeout=300)[0]
    computed = 0
    for what, expected, ours in zip(changes, wanted, found, strict=True):
        if not isinstance(ours, str):
            computed += 1
            deviation = (ours[..., :VOCABULARY] - expected).abs().max() / expected.abs().max()
            assert deviation < TOLERANCE, f"{kind}, {what}: {deviation}"
    assert computed > 1, found


def each_by_itself(folders: list[Path]) -> list:
    """The logits of each model, or why it is refused."""
    from megatron.core import parallel_state

    found = []
    for folder in folders:
        try:
            flags = f"--load-hf {folder} --tokenizer-type NullTokenizer"
            found.append(logits_case(flags, architecture_of(folder)))
        except ValueError as error:
            found.append(str(error))
            parallel_state.destroy_model_parallel()
    return found
