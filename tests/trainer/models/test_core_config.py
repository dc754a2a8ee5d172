"""From flags to megatron.core's configurations."""

import pytest
import torch

from megatron import backend

backend.install()

from megatron.trainer.models import core_config
from tests.trainer.arguments.command_line import arguments


class _Optimizer:
    def __init__(self):
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0, "default_config": True}]


def learning_rates(flags: str, num_iterations: int, without: str = "") -> list[float]:
    args = arguments(flags, without=without)
    optimizer = _Optimizer()
    scheduler, consumed, rates = core_config.param_scheduler(args, optimizer), 0, []
    for _ in range(num_iterations):
        rates.append(optimizer.param_groups[0]["lr"])
        size = args.batch_sizes.num_samples(consumed)
        consumed += size
        scheduler.step(size)
    return rates


def test_linear_decay_with_warmup():
    """Two iterations of warm-up to the peak, then linear to --min-lr at --train-iters."""
    rates = learning_rates("--lr-warmup-iters 2 --min-lr 1e-4", 11)
    assert rates[0] == 0.0 and rates[2] == pytest.approx(1e-3) and rates[10] == pytest.approx(1e-4)
    assert rates[6] == pytest.approx((1e-3 + 1e-4) / 2)


def test_iterations_mean_iterations_also_in_a_ramp_up():
    """--lr-warmup-iters ends at that iteration whatever the sizes of the batches before."""
    rates = learning_rates("--rampup-batch-size 2 2 24 --lr-warmup-iters 4", 11)
    assert rates[4] == pytest.approx(1e-3) and rates[3] < 1e-3
    assert rates[10] == pytest.approx(0.0)


def test_samples_and_wsd():
    """Sample-based lengths, and WSD's constant part."""
    rates = learning_rates("--train-samples 80 --lr-warmup-samples 16", 10, without="--train-iters")
    assert rates[2] == pytest.approx(1e-3)
    rates = learning_rates("--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style linear", 11)
    assert rates[7] == pytest.approx(1e-3) and rates[8] < 1e-3 and rates[10] == pytest.approx(0.0)


def test_transformer_config():
    """Names that differ between the two vocabularies arrive where they belong."""
    made = core_config.transformer_config(
        arguments("--swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --bf16")
    )
    assert made.gated_linear_unit and not made.add_bias_linear and made.layernorm_epsilon == 1e-6
    assert made.params_dtype is torch.bfloat16 and made.pipeline_dtype is torch.bfloat16
    assert made.use_cpu_initialization and not made.gradient_accumulation_fusion
    grouped = core_config.transformer_config(arguments("--group-query-attention --num-query-groups 2"))
    assert grouped.num_query_groups == 2
    assert core_config.transformer_config(arguments()).num_query_groups == 4
    full = core_config.transformer_config(
        arguments("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    )
    assert full.recompute_granularity == "full"


def test_optimizer_and_ddp_config():
    """The optimizer's values arrive; DDP leaves reductions to the program."""
    made = core_config.optimizer_config(arguments("--optimizer sgd --clip-grad 0 --fp16 --loss-scale 64"))
    assert (made.optimizer, made.clip_grad, made.loss_scale, made.fp16) == ("sgd", 0.0, 64.0, True)
    ddp = core_config.ddp_config(arguments("--bf16 --overlap-grad-reduce"))
    assert ddp.grad_reduce_in_fp32 and not ddp.overlap_grad_reduce
