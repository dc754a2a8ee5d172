"""The flags of weights on the host (L2L), and the checks that need no model."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron.documents.flag_types import count
from megatron.finetuning.adapter_arguments import has_adapter
from megatron.pipeline.program.lane_order import Residency

RELAY = "l2l"
"""The schedule."""

PRICED = ["RTX3090", "RTX4090", "RTX5090", "A6000", "L40S", "H100-PCIe"]
"""GPUs on which a dry run prices l2l, unless others are given."""

ELSEWHERE = {"l2l_resident_stages": 2, "l2l_update": "auto", "l2l_stash": "host", "l2l_moments": "float32"}
"""Flags without effect under other schedules -> their defaults."""


NARROW = ("adamw", "adamw_torch_fused")
"""Optimizers whose moments may be narrower than FP32."""


def add_relay(add: Callable[..., argparse.Action]) -> None:
    """Add the flags. `add`: the `add_argument` of a parser or of a group."""
    add("--l2l_resident_stages", type=count, default=ELSEWHERE["l2l_resident_stages"],
        help="most layers on the device at once (l2l)")  # fmt: skip
    add("--l2l_update", choices=("auto", "eager", "deferred"), default=ELSEWHERE["l2l_update"],
        help="the host steps a layer at once, or after the norm by which gradients are clipped (l2l)")  # fmt: skip
    add("--l2l_stash", choices=("host", "device"), default=ELSEWHERE["l2l_stash"],
        help="where inputs of layers wait for the backward (l2l)")  # fmt: skip
    add("--l2l_moments", choices=("float32", "bfloat16"), default=ELSEWHERE["l2l_moments"],
        help="the optimizer's moments on the host (l2l, adamw)")  # fmt: skip
    add(
        "--load_in_4bit",
        action="store_true",
        help="keep frozen weights in NF4 on the host, and copy them to the device so (l2l)",
    )
    add("--load_in_8bit", action="store_true", help="the same in 8 bits")
    add("--dry_run_gpus", nargs="+", metavar="GPU", default=PRICED, help="GPUs on which --dry_run prices l2l")


def validate_relay(args: argparse.Namespace) -> None:
    """Check the flags, and note those without effect. Raises ValueError for flags that contradict each other."""
    packs = [f"--load_in_{bits}bit" for bits in (4, 8) if getattr(args, f"load_in_{bits}bit")]
    if len(packs) > 1:
        raise ValueError(f"{' and '.join(packs)} choose two formats for the same weights; leave one out")
    if args.pipeline_schedule != RELAY:
        if packs:
            raise ValueError(
                f"{packs[0]} packs weights that live on the host; give --pipeline_schedule l2l, or leave it out"
            )
        asked = [name for name, default in ELSEWHERE.items() if getattr(args, name) != default]
        args.notes.extend(f"--{name} has no effect without --pipeline_schedule l2l" for name in asked)
        return
    if args.partition is not None:
        raise ValueError(f"--partition {args.partition}: under l2l the layers are the stages; leave it out")
    if args.fp16:
        raise ValueError("--fp16 needs a loss scale, and l2l has none; give --bf16, or another --pipeline_schedule")
    if args.no_recompute:
        raise ValueError(
            "--no_recompute: l2l recomputes, since a layer's weights are gone by its backward; leave it out"
        )
    if args.optim == "adafactor" and args.data_parallel_size > 1:
        raise ValueError(
            "--optim adafactor cannot step a part of a layer alone, and under l2l each replica steps a part of each "
            "layer; give adamw, adam or sgd"
        )
    if args.l2l_moments == "bfloat16" and (args.optim not in NARROW or (args.dtype == "bfloat16" and not args.bf16)):
        asked = f"--optim {args.optim}" if args.optim not in NARROW else "--dtype bfloat16"
        raise ValueError(
            f"--l2l_moments bfloat16 is for {' and '.join(NARROW)} beside weights or masters in FP32, not for {asked}; "
            "leave one out" + ", or give --bf16" * (args.optim in NARROW and not has_adapter(args))
        )
    if packs and not has_adapter(args):
        raise ValueError(f"{packs[0]} packs frozen weights, and here all weights are trained; give --lora_r")
    if args.l2l_update == "eager" and args.max_grad_norm:
        raise ValueError(
            f"--l2l_update eager steps a layer before the norm of all gradients is known, and --max_grad_norm is "
            f"{args.max_grad_norm:g}; give --max_grad_norm 0, or leave --l2l_update out"
        )


def residency_of(args: argparse.Namespace) -> Residency | None:
    """How weights live on the host; None unless under l2l."""
    if args.pipeline_schedule != RELAY:
        return None
    update = args.l2l_update
    if update == "auto":
        update = "deferred" if args.max_grad_norm else "eager"
    return Residency(args.l2l_resident_stages, update, args.l2l_stash)
