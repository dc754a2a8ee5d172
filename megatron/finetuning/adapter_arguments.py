"""The flags of adapters, named as in the examples of PEFT and TRL, and the checks that need no model.

An adapter begins anew (`--lora_r`, or `--peft_config` with PEFT's own file), or is taken up again
(`--adapter_name_or_path`). All other flags describe an adapter that one of these three has asked for. A flag that is
not given has PEFT's default.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from megatron.documents.flag_types import both_spellings, count, count_from_0, part

SOURCES = ("lora_r", "peft_config", "adapter_name_or_path")
"""The flags that ask for an adapter, of which a run takes one."""

OF_LORA = ("lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora", "modules_to_save")
"""The flags that describe a new LoRA; they bear the names of PEFT's `LoraConfig`."""

ALL_LINEAR = "all-linear"
"""PEFT's word for all linear layers but the head."""

MERGED = "merged"
"""The folder in --output_dir for the model with the adapter merged in. A folder that was there makes room for it."""


def add_adapters(group) -> None:
    """Add the flags that decide which parameters are trained."""
    add = both_spellings(group)
    add("--lora_r", type=count, metavar="R", help="train LoRA adapters of this rank; the model stays frozen")
    add("--lora_alpha", type=count_from_0, metavar="A", help="adapters are scaled by A / R; none: 8, as PEFT")
    add("--lora_dropout", type=part, metavar="P", help="dropout of what adapters read; none: 0")
    known = "ends of the names of adapted modules, or all-linear; none: those that PEFT knows of the architecture"
    add("--target_modules", nargs="+", metavar="NAME", help=known)
    add("--use_dora", action="store_true", help="DoRA: LoRA with a trained magnitude of each output")
    add("--use_rslora", action="store_true", help="adapters are scaled by A over the root of R")
    add("--modules_to_save", nargs="+", metavar="NAME",
        help="modules that are trained and written whole, as a new head")  # fmt: skip
    add("--peft_config", metavar="FILE", help="PEFT's adapter_config.json, or its folder, in place of these flags")
    add("--adapter_name_or_path", metavar="FOLDER", help="go on with the adapter that PEFT or a run wrote there")


def add_merge(add: Callable[..., argparse.Action]) -> None:
    """Add the flag that also writes the merged model."""
    add("--merge_adapter", action="store_true",
        help="also write the model with the adapter merged in: OUTPUT_DIR/merged")  # fmt: skip


def has_adapter(args: argparse.Namespace) -> bool:
    """Whether the flags ask for an adapter."""
    return any(getattr(args, name) is not None for name in SOURCES)


def validate_adapter(args: argparse.Namespace) -> None:
    """Check the flags of adapters. Raises ValueError, with the remedy, for flags that contradict each other."""
    sources = [name for name in SOURCES if getattr(args, name) is not None]
    given = [name for name in OF_LORA if getattr(args, name)]
    if len(sources) > 1:
        raise ValueError(f"--{sources[0]} and --{sources[1]} each say what the adapter is; leave one out")
    if given and sources != ["lora_r"]:
        remedy = f"leave it out, since --{sources[0]} says what the adapter is" if sources else "give --lora_r, too"
        raise ValueError(f"--{given[0]} describes a new LoRA adapter; {remedy}")
    if getattr(args, "merge_adapter", False) and not sources:
        raise ValueError("--merge_adapter has no adapter to merge; give --lora_r, or leave it out")
    if getattr(args, "merge_adapter", False) and args.do_eval and not args.do_train:
        raise ValueError("--merge_adapter is for runs that train; merge an adapter with tools/merge_adapter.py")
    if getattr(args, "merge_adapter", False) and args.output_dir is not None:
        merged = Path(args.output_dir) / MERGED
        for name in ("model_name_or_path", "adapter_name_or_path"):
            if getattr(args, name) is not None and Path(getattr(args, name)).resolve() == merged.resolve():
                raise ValueError(
                    f"--merge_adapter would write over --{name} {getattr(args, name)}; give another --output_dir than "
                    f"{args.output_dir}"
                )
    if sources and (args.bf16 or args.fp16):
        raise ValueError(
            f"--{'bf16' if args.bf16 else 'fp16'} keeps FP32 masters of what is trained, and adapters are FP32 "
            "themselves; give --dtype bfloat16, the precision of the frozen weights"
        )
