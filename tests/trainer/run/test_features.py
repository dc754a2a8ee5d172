"""Flags that change the model, the numbers or the schedule: each trains, on two ranks, and the loss falls.

A feature joins the list in one line.
"""

import math

import pytest

from tests.trainer.run.run_case import train

UNTIED = "--untie-embeddings-and-output-weights"
FEATURES = {
    "llama": f"--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear {UNTIED} "
             "--group-query-attention --num-query-groups 2 --attention-dropout 0 --hidden-dropout 0",
    "fp16 dynamic": "--fp16 --initial-loss-scale 65536 --pipeline-schedule 2bw --global-batch-size 4",
    "masks": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "bf16 reduced in bf16": "--bf16 --grad-reduce-in-bf16",
    "fp16 static": "--fp16 --loss-scale 128 --apply-query-key-layer-scaling --global-batch-size 4",
    "sgd": "--optimizer sgd --lr 0.1 --sgd-momentum 0.5",
    "fused optimizer": "--optimizer-kernel fused --pipeline-schedule 2bw",
    "recompute block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "extra warm-up": "--pipeline-extra-warmup --pipeline-schedule 2bw",
    "learning rates": "--decoupled-lr 1e-3 --lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-warmup-fraction 0.2 "
                      "--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.1",
    "other activations": "--squared-relu --qk-layernorm --init-method-xavier-uniform",
    "fused cross entropy": "--cross-entropy-loss-fusion --manual-gc --manual-gc-interval 2 --deterministic-mode",
    "samples": "--global-batch-size 8 --train-samples 48 --lr-warmup-samples 8 --lr-decay-samples 40",
    "loading workers": "--num-workers 1 --no-mmap-bin-files",
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FEATURES)
def test_feature_trains_on_two_stages(name):
    """p=2: every loss is finite, all iterations are reported, and the last loss is below the first."""
    losses = train(2, FEATURES[name])[-1]["losses"]
    assert len(losses) == 6 and all(math.isfinite(loss) for loss in losses.values())
    assert losses[6] < losses[1]
