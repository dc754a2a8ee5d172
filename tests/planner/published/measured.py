"""A few published runs, as entries of a file of measurements. Seconds or MFU are the papers'."""

A100 = {
    "gpu": "A100-SXM-80GB", "gpus_per_node": 8, "internode": "4x200Gb/s HDR IB per node (800 Gb/s)",
    "software": "Megatron-LM v3",
}  # fmt: skip
GPT3_96B = {"name": "GPT-3 96B", "layers": 80, "hidden": 9984, "heads": 104, "seq": 2048, "vocab": 51200}


def bpipe(t: int, p: int, d: int, size: int, scope: str, mfu: float, *, schedule: str = "1f1b", note: str = "") -> dict:
    """A run of BPipe's Table 7."""
    return {
        "id": f"t{t}p{p}d{d}mb{size}-{scope}",
        "source": "BPipe (ICML 2023) Table 7 + Table 1",
        "model": GPT3_96B,
        "hardware": A100,
        "config": {
            "t": t, "p": p, "d": d, "micro_batch": size, "global_batch": 128, "recompute": scope, "schedule": schedule,
            "sequence_parallel": True, "zero1": True,
        },
        "measured": {"mfu": mfu},
        "note": note,
    }  # fmt: skip


BPIPE_TABLE_7 = [
    bpipe(1, 16, 2, 1, "layer", 0.3808),
    bpipe(2, 8, 2, 1, "layer", 0.4046),
    bpipe(4, 4, 2, 2, "layer", 0.4051),
    bpipe(8, 2, 2, 1, "attention", 0.3547),
    bpipe(8, 2, 2, 2, "layer", 0.3007),
    bpipe(2, 16, 1, 1, "attention", 0.4878, schedule="bpipe"),
    bpipe(4, 8, 1, 1, "attention", 0.3709),
    bpipe(4, 8, 1, 2, "attention", 0.5064, schedule="bpipe"),
    bpipe(8, 4, 1, 4, "layer", 0.3804),
    bpipe(8, 4, 1, 8, "layer", 0.2431, note="allocator memory pressure"),
]


def korthikanti(model: tuple[str, int, int, int], config: dict, seconds: float) -> dict:
    """A run of Korthikanti et al. 2022, Table 5."""
    name, layers, hidden, heads = model
    return {
        "id": f"{name}-{config['recompute']}",
        "source": "Korthikanti et al. 2022 (arXiv 2205.05198) Table 5",
        "model": {"name": name, "layers": layers, "hidden": hidden, "heads": heads, "seq": 2048, "vocab": 51200},
        "hardware": {"gpu": "A100-SXM-80GB", "gpus_per_node": 8, "system": "Selene (DGX A100, HDR IB)"},
        "config": {"t": 8, "d": 1} | config,
        "measured": {"iteration_s": seconds},
    }


_22B, _175B = ("22B", 48, 6144, 64), ("175B", 96, 12288, 96)
_ONE = {"p": 1, "micro_batch": 4, "global_batch": 4}
_EIGHT = {"p": 8, "v": 3, "micro_batch": 1, "global_batch": 64, "schedule": "interleaved"}
KORTHIKANTI = [
    korthikanti(_22B, _ONE | {"recompute": "layer"}, 1.42),
    korthikanti(_22B, _ONE | {"recompute": "attention", "sequence_parallel": True}, 1.10),
    korthikanti(_175B, _EIGHT | {"recompute": "layer"}, 18.13),
    korthikanti(_175B, _EIGHT | {"recompute": "attention", "sequence_parallel": True}, 13.75),
]


def two_bw(gpu: str, p: int, size: int, scope: str, throughput: float, *, chosen: bool) -> dict:
    """A row of PipeDream-2BW's Table 1, for BERT-24 with 8 replicas."""
    return {
        "id": f"{gpu}-{size}-{scope}",
        "source": "PipeDream-2BW Table 1",
        "model": {"name": "BERT-24", "layers": 24, "seq": 128, "hidden": None},
        "hardware": {"desc": f"{8 * p}x {gpu}", "interconnect": "AWS p3.16xlarge"},
        "config": {"t": 1, "p": p, "d": 8, "micro_batch": size, "recompute": scope, "schedule": "2bw"},
        "measured": {"throughput": throughput, "chosen_by_planner": chosen},
    }


PIPEDREAM_2BW = [
    two_bw("1080Ti", 2, 8, "none", 151, chosen=True),
    two_bw("1080Ti", 2, 8, "layer", 141, chosen=False),
    two_bw("V100-16GB", 4, 1, "none", 42, chosen=False),
    two_bw("V100-16GB", 4, 4, "layer", 111, chosen=True),
]
VTRAIN = [
    {
        "id": f"vtrain-t{t}p{p}mb{size}",
        "source": "vTrain (MICRO 2024) measured data",
        "model": {"layers": layers, "hidden": hidden, "heads": heads, "seq": 2048, "vocab": 50257},
        "hardware": {"gpu": "A100", "gpus_per_node": 8, "internode": "800 Gb/s per node (vTrain config)"},
        "config": {
            "t": t, "p": p, "d": d, "micro_batch": size, "global_batch": 1536, "recompute": "layer",
            "framework": "Megatron-DeepSpeed",
        },
        "measured": {"iteration_ms": milliseconds},
    }
    for layers, hidden, heads, t, p, d, size, milliseconds in (
        (48, 8192, 64, 4, 4, 32, 2, 13875.5),
        (48, 8192, 64, 8, 8, 8, 2, 15001.9),
        (96, 12288, 96, 4, 16, 8, 2, 54255.9),
        (96, 12288, 96, 8, 16, 4, 3, 55677.5),
    )
]  # fmt: skip
SHARED = {  # made up: ranks share sequences, or experts
    "id": "made up",
    "model": {
        "name": "Llama 3", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "seq": 8192, "vocab": 128256,
    },
    "hardware": {"gpu": "H100", "gpus": 64, "internode": "400 GB/s", "software": "Megatron-Core"},
    "config": {"t": 2, "p": 2, "micro_batch": 1, "global_batch": 64, "sequence_parallel": True, "zero1": True},
}  # fmt: skip
ALL = [*BPIPE_TABLE_7, *KORTHIKANTI, *PIPEDREAM_2BW, *VTRAIN]


def changed(entry: dict, **parts: dict) -> dict:
    """The entry with other values in some of its parts."""
    return entry | {name: entry[name] | part for name, part in parts.items()}


MOE = changed(
    SHARED,
    model={"name": "Mixtral 8x7B", "ffn": 14336, "vocab": 32000, "num_experts": 8, "moe_router_topk": 2},
    config={"ep": 8, "etp": 1},
)
