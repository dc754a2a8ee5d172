"""Other frameworks' names for keys of an entry, where both mean the same in the same unit.

A user who copies `tensor_model_parallel_size` from Megatron-LM's flags, or `num_hidden_layers` from a model's
config.json, need not know this project's letter for it: such a key is read as the one that it stands for. A name that
may mean something else (`batch_size`, of a rank in some frameworks), or that has no unit (`step_time`), is none of
these; entry_keys.py refuses it. Names of one field with several are beside it, in settings.py and model_names.py.
"""

from collections.abc import Mapping

from megatron.documents.faults import place, shown

SAME = {  # by part: in small letters with _, and our key
    "config": {
        "tp": "t", "tensor_parallel": "t", "tensor_parallel_size": "t", "tensor_model_parallel_size": "t",
        "pp": "p", "pipeline_parallel": "p", "pipeline_parallel_size": "p", "pipeline_model_parallel_size": "p",
        "dp": "d", "data_parallel": "d", "data_parallel_size": "d",
        "vp": "v", "vpp": "v", "virtual_pipeline": "v", "virtual_pipeline_model_parallel_size": "v",
        "num_virtual_stages_per_pipeline_rank": "v",
        "mbs": "micro_batch", "micro_batch_size": "micro_batch", "microbatch_size": "micro_batch",
        "gbs": "global_batch", "global_batch_size": "global_batch",
        "use_distributed_optimizer": "zero1", "distributed_optimizer": "zero1", "use_flash_attn": "flash_attention",
        "recompute_granularity": "recompute",
    },
    "model": {
        "num_layers": "layers", "num_hidden_layers": "layers", "hidden_size": "hidden",
        "num_attention_heads": "heads", "num_heads": "heads",
        "num_query_groups": "kv_heads", "num_key_value_heads": "kv_heads",
        "ffn_hidden_size": "ffn", "intermediate_size": "ffn",
        "seq_length": "seq", "seq_len": "seq", "sequence_length": "seq", "vocab_size": "vocab",
        "num_experts_per_tok": "moe_router_topk", "moe_intermediate_size": "moe_ffn",
    },
    "hardware": {
        "num_gpus": "gpus", "num_gpus_per_node": "gpus_per_node", "memory_gb": "mem_GB",
        "peak_teraflops": "peak_tflops",
    },
}  # fmt: skip
_GRANULARITIES = ("full", "selective")
"""Megatron-LM's values of recompute_granularity, which settings.py knows: whole layers, or the attention's core."""


def in_small_words(key: object) -> str:
    """As the tables of names have it."""
    return str(key).lower().replace("-", "_").strip("_")


def in_our_keys(entry: Mapping) -> tuple[dict, dict[tuple[str, str], str]]:
    """The entry with our keys in place of others' names for them; and what was written, by part and our key.

    Raises ValueError where two names of one thing are given, and for a value that the other name does not have.
    """
    found, written = dict(entry), {}
    for part, names in SAME.items():
        if not isinstance(entry.get(part), Mapping):
            continue
        found[part] = {}
        for key, value in entry[part].items():
            ours = names.get(in_small_words(key), key)
            if in_small_words(key) == "recompute_granularity" and part == "config":
                _refuse_granularity(key, value)
            if ours in found[part]:
                first = written.get((part, ours), ours)
                raise ValueError(f"{place(part, first)} and {place(part, key)} say the same; give one of them")
            found[part][ours] = value
            if ours != key:
                written[part, ours] = str(key)
    return found, written


def _refuse_granularity(key: object, value: object) -> None:
    """Raises ValueError for what Megatron-LM does not call so."""
    word = value.partition("(")[0].partition(",")[0].strip().lower() if isinstance(value, str) else None  # a remark
    if word not in _GRANULARITIES:
        raise ValueError(
            f"{place('config', key)} is {shown(value)}, and Megatron-LM's are full and selective; give one of these, "
            "or config.recompute"
        )
