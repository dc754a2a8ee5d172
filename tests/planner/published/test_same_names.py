"""Names that mean the same in other frameworks are read as ours; others are refused, and so are two of one thing."""

import pytest

from megatron.planner.published.entries import Entry, Unpredictable, read_entry
from megatron.planner.published.entry_keys import PARTS
from megatron.planner.published.same_names import SAME, in_our_keys
from tests.planner.published.measured import BPIPE_TABLE_7, changed

FULL = {
    "model": {"name": "Llama 3.1 8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336,
              "seq": 8192, "vocab": 128256, "num_experts": 8, "moe_router_topk": 2, "moe_ffn": 7168},
    "hardware": {"gpu": "H100-SXM", "gpus": 64, "gpus_per_node": 8, "mem_GB": 80, "peak_tflops": 900,
                 "internode": "400 GB/s"},
    "config": {"t": 2, "p": 4, "d": 8, "v": 2, "micro_batch": 1, "global_batch": 128, "zero1": True,
               "flash_attention": True, "recompute": "full", "schedule": "interleaved", "ep": 4,
               "sequence_parallel": True},
}  # fmt: skip
CASES = [(part, name, key) for part, names in SAME.items() for name, key in names.items()]


def renamed(part: str, key: str, name: str, value: object = None) -> dict:
    inner = dict(FULL[part])
    given = inner.pop(key)
    return FULL | {part: inner | {name: given if value is None else value}}


def refusal(entry: dict) -> str:
    found = read_entry(entry)
    assert isinstance(found, Unpredictable) and "\n" not in found.reason, found
    return found.reason


@pytest.mark.parametrize(("part", "name", "key"), CASES)
def test_another_name_is_read_as_ours(part, name, key):
    """In any case, and with hyphens; what it says counts, as another value shows."""
    usual = read_entry(FULL)
    assert isinstance(usual, Entry) and key in FULL[part] and key in PARTS[part] and name not in PARTS[part]
    assert read_entry(renamed(part, key, name)) == usual
    assert read_entry(renamed(part, key, name.upper().replace("_", "-"))) == usual
    other = {"zero1": False, "flash_attention": False, "recompute": "selective"}
    value = other.get(key, FULL[part][key] * 2 if key != "moe_router_topk" else 3)
    assert read_entry(renamed(part, key, name, value)) == read_entry(renamed(part, key, key, value)) != usual


@pytest.mark.parametrize(("part", "name", "key"), CASES)
def test_both_names_are_refused(part, name, key):
    entry = FULL | {part: FULL[part] | {name: FULL[part][key]}}
    assert refusal(entry) == f"{part}.{key} and {part}.{name} say the same; give one of them"


def test_two_other_names_are_refused():
    entry = FULL | {"config": {"tp": 2, "tensor_parallel": 2, "p": 4, "d": 8, "micro_batch": 1}}
    assert refusal(entry) == "config.tp and config.tensor_parallel say the same; give one of them"


@pytest.mark.parametrize(("part", "name", "key"), CASES)
def test_a_wrong_value_is_told_at_the_name_that_was_written(part, name, key):
    assert refusal(renamed(part, key, name, [1])).startswith(f"{part}.{name} is [1]")


@pytest.mark.parametrize("value", ["layer", "none", "full-block", 1, True])
def test_a_granularity_that_is_none(value):
    """The words of Megatron-LM mean ours; others it does not have."""
    told = refusal(renamed("config", "recompute", "recompute_granularity", value))
    assert told == (
        f"config.recompute_granularity is {value!r}, and Megatron-LM's are full and selective; give one of these, or "
        "config.recompute"
    )


def test_a_remark_behind_a_granularity():
    entry = renamed("config", "recompute", "recompute_granularity", "full (uniform, 1 layer)")
    assert read_entry(entry) == read_entry(FULL)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("config", "batch_size"), ("config", "gradient_checkpointing"), ("config", "activation_checkpointing"),
        ("model", "topk"), ("model", "num_local_experts"), ("hardware", "between_nodes"), ("hardware", "within_node"),
        ("config", "num_layers_per_virtual_pipeline_stage"), ("config", "num_layers"), ("model", "tp"),
    ],
)  # fmt: skip
def test_what_may_mean_something_else_is_refused(part, name):
    """A batch of a rank, a switch, experts of a rank, a number without a unit; or a key of another part."""
    assert f"{part}.{name} is 2" in refusal(changed(BPIPE_TABLE_7[0], **{part: {name: 2}}))


def test_an_entry_without_such_names_stays():
    assert in_our_keys(FULL) == (FULL, {})
    assert in_our_keys({"model": 3, "id": "a"}) == ({"model": 3, "id": "a"}, {})
