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
    "bf16": "--bf16 --pipeline-schedule 2bw",
    "bf16 reduced in bf16": "--bf16 --grad-reduce-in-bf16",
    "fp16 dynamic": "--fp16 --initial-loss-scale 65536 --pipeline-schedule 2bw --global-batch-size 4",
    "fp16 static": "--fp16 --loss-scale 128 --apply-query-key-layer-scaling --global-batch-size 4",
    "sgd": "--optimizer sgd --lr 0.1 --sgd-momentum 0.5",
    "fused optimizer": "--optimizer-kernel fused --pipeline-schedule 2bw",
    "recompute full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recompute block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "recompute selective": "--recompute-activations --pipeline-schedule 2bw",
    "recompute in the program": "--pipeline-recompute --pipeline-schedule 2bw",
    "extra warm-up": "--pipeline-extra-warmup --pipeline-schedule 2bw",
    "single gradient buffer": "--2bw-single-gradient-buffer --pipeline-schedule 2bw",
    "uneven stages": "--decoder-first-pipeline-num-layers 1",
    "embedding counts": "--num-layers 3 --account-for-embedding-in-pipeline-split",
    "learning rates": "--decoupled-lr 1e-3 --lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-warmup-fraction 0.2 "
                      "--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.1",
    "masks": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "other activations": "--squared-relu --qk-layernorm --init-method-xavier-uniform",
    "fused cross entropy": "--cross-entropy-loss-fusion --manual-gc --manual-gc-interval 2 --deterministic-mode",
    "samples": "--train-samples 48 --lr-warmup-samples 8 --lr-decay-samples 40",
    "loading workers": "--num-workers 1 --no-mmap-bin-files",
}  # fmt: skip


QUICK = ("llama", "bf16", "fp16 dynamic", "recompute in the program", "masks")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in FEATURES]
)
def test_feature_trains_on_two_stages(name):
    """p=2: every loss is finite, all iterations are reported, and the last loss is below the first."""
    losses = train(2, FEATURES[name])[-1]["losses"]
    assert len(losses) == 6 and all(math.isfinite(loss) for loss in losses.values())
    assert losses[6] < losses[1]
