"""What a profile says about the model and the machine beside the times."""

import argparse
import os
import platform

import torch

import megatron.core
from megatron import backend
from megatron.planner.time.profile import Machine
from megatron.trainer.data.tokenizer import build_tokenizer, padded_vocab_size
from megatron.trainer.models.core_config import params_dtype
from megatron.trainer.plan import from_flags


def describe(args: argparse.Namespace) -> dict:
    """`model`, `dtype`, `transformer_impl`, `shares_processor` and `machine` of a `Profile`; `args` are complete."""
    args.padded_vocab_size = padded_vocab_size(args, build_tokenizer(args))
    return {
        "model": from_flags.architecture(args),
        "dtype": str(params_dtype(args)).removeprefix("torch."),
        "transformer_impl": args.transformer_impl,
        "shares_processor": not backend.is_cuda(),
        "machine": Machine(
            device=torch.cuda.get_device_name() if backend.is_cuda() else _processor(),
            num_devices=torch.cuda.device_count() if backend.is_cuda() else os.cpu_count(),
            threads=torch.get_num_threads(),
            system=f"{platform.system()} {platform.release()}",
            torch=torch.__version__,
            megatron_core=megatron.core.__version__,
        ),
    }


def _processor() -> str:
    """The name of the CPU, as Linux knows it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
