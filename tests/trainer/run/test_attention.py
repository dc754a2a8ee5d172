"""Runs with latents, windows and sinks: the same numbers however the job is cut, checkpoints, counts, refusals."""

import functools

import pytest
import torch

from tests.trainer.arguments.command_line import arguments
from tests.trainer.run.run_case import joined_weights, table, train

LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --qk-layernorm --rotary-scaling-factor 40 --mscale-all-dim 1 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --clip-grad 0"
)
GATE = "--quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7"
SINKS = (
    f"--softmax-type learnable --window-size 3,0 --window-attn-skip-freq 2 {GATE} --position-embedding-type yarn "
    "--rotary-scaling-factor 32 "
    "--no-yarn-correction-range-round-to-int --group-query-attention --num-query-groups 2 --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --clip-grad 0"
)
EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
QUIET = "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0"
SMOOTH = f"{QUIET} --lr 1e-3 --adam-eps 1e-5"  # so that the noise of gradients near zero stays noise
TWO_BW, DEEP = "--pipeline-schedule 2bw", "--pipeline-model-parallel-size 2"
WIDE = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
PREDICTED = f"{TWO_BW} --2bw-provisional uniform --2bw-provisional-microbatches 1"


def ungated(flags: str) -> str:
    """The same with a plain MLP, whose parts on tensor ranks `joined_weights` joins."""
    return flags.replace(GATE, "").replace("--swiglu", "")


@functools.cache
def on_one_rank(flags: str) -> list[dict]:
    return train(1, flags)


def losses(results: list[dict]) -> list[float]:
    return [record["lm_loss"] for record in results[-1]["records"] if "lm_loss" in record]


CUTS = {
    "latents with Muon and predictions": (2, f"{LATENT} --optimizer muon {PREDICTED}", "", 0.0),
    "latents on tensor ranks": (4, f"{ungated(LATENT)} {SMOOTH} {TWO_BW}", f"{DEEP} {WIDE}", 2e-6),
    "GPT-OSS": (2, f"{SINKS} {EXPERTS} {TWO_BW}", "", 0.0),
    "sinks on tensor ranks": (4, f"{ungated(SINKS)} {SMOOTH} {TWO_BW}", f"{DEEP} {WIDE}", 2e-6),
    "latents with experts": (
        2, f"{LATENT} {EXPERTS} --moe-shared-expert-intermediate-size 32 --moe-layer-freq [0]*1+[1]*3 {TWO_BW}", "", 0.0
    ),
    "latents, l2l": (2, f"{LATENT} --pipeline-schedule l2l", "", 1e-6),
    "latents, frozen layers": (2, f"{LATENT} --freeze-training --freeze-interval 2 --freeze-schedule 1,2", "", 0.0),
    "sinks with Muon": (2, f"{SINKS} --optimizer muon {TWO_BW}", "", 0.0),
    "sinks, off by one": (2, f"{SINKS.replace('learnable', 'off-by-one')} {TWO_BW}", "", 0.0),
    "recomputed up projections": (
        2, f"{LATENT} {TWO_BW}", "--recompute-granularity selective --recompute-modules mla_up_proj core_attn", 0.0
    ),
    "latents with sinks and windows": (2, f"{LATENT} --softmax-type learnable --window-size 3,0 {TWO_BW}", "", 0.0),
}  # fmt: skip


@table(("ranks", "flags", "cut", "tolerance"), CUTS, usual=1)
def test_numbers_do_not_depend_on_the_cut(ranks, flags, cut, tolerance):
    """Losses and weights are those of one rank; sinks are drawn alike on tensor ranks."""
    results, expected = train(ranks, f"{flags} {cut}"), on_one_rank(flags)
    assert len(losses(expected)) == 6
    assert losses(results) == pytest.approx(losses(expected), rel=tolerance, abs=0.0)
    one, other = joined_weights(expected), joined_weights(results)
    assert one.keys() == other.keys() and ("learnable" in flags) == any("softmax_offset" in name for name in one)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0.0, atol=5 * tolerance, msg=lambda text, n=name: n + text)


RESUMED = {
    "GPT-OSS, other depth and tensor ranks": (2, f"{SINKS} {SMOOTH} {TWO_BW}", 4, f"{DEEP} {WIDE}", 2e-6),
    "latents, other depth and tensor ranks": (2, f"{LATENT} {SMOOTH} {TWO_BW}", 4, f"{DEEP} {WIDE}", 2e-6),
    "latents, other depth": (2, f"{LATENT} {TWO_BW}", 1, "", 0.0),
    "GPT-OSS, replicas": (2, f"{SINKS} {SMOOTH} {TWO_BW}", 4, f"{DEEP} --use-distributed-optimizer", 2e-6),
}


@table(("writers", "flags", "readers", "cut", "tolerance"), RESUMED, usual=0)
def test_a_checkpoint_goes_on_at_other_degrees(tmp_path, writers, flags, readers, cut, tolerance):
    """Weights and moments of latents and sinks, in both versions of 2bw."""
    whole = on_one_rank(flags)
    train(writers, f"{flags} --save {tmp_path} --exit-interval 3")
    found = losses(train(readers, f"{flags} --load {tmp_path} {cut}"))
    assert found == pytest.approx(losses(whole)[3:], rel=tolerance, abs=0.0)


MLA = "--multi-latent-attention"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--v-head-dim 8", "--v-head-dim is given, and --multi-latent-attention is not; give both, or neither"),
        ("--rope-type yarn", "for other attention use --position-embedding-type yarn"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "mla_up_proj needs --multi-latent"),
        (f"{MLA} --group-query-attention", "since every head makes keys and values of the latent; keep one"),
        (f"{MLA} --position-embedding-type yarn", "use --position-embedding-type rope and --rope-type yarn"),
        (f"{MLA} --rotary-interleaved", "--rotary-interleaved is not built for --multi-latent-attention; leave"),
        (f"{MLA} --qk-pos-emb-head-dim 3", "3 is odd, and rotary embeddings turn pairs of channels; give an even"),
        (f"{MLA} --q-lora-rank 9 {WIDE}", "--q-lora-rank is 9, which --tensor-model-parallel-size 2 does not divide"),
        (f"{MLA} --no-yarn-correction-range-round-to-int", "multi-latent attention rounds them; leave it out"),
        ("--mscale 2", "--mscale is about YaRN; add --position-embedding-type yarn, or --rope-type yarn with"),
        ("--position-embedding-type yarn --rotary-percent 0.5", "YaRN goes with none of --rotary-percent,"),
        ("--position-embedding-type yarn --kv-channels 7", "a head has 7; change --kv-channels"),
        ("--position-embedding-type yarn --rotary-seq-len-interpolation-factor 2", "is --rotary-scaling-factor; use"),
        ("--window-size 3", "--window-size 3 is not two whole numbers; write for example 127,0"),
        ("--window-size 3,1", "3,1: a window begins at a token of at least 0 places before and ends at the token"),
        ("--window-size -1,0", "-1,0: a window begins at a token of at least 0 places before and ends at the token"),
        ("--window-size 3,0 --reset-attention-mask", "keeps documents apart; leave one out"),
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq is given, and --window-size is not; give both"),
        ("--window-size 3,0 --window-attn-skip-freq 1", "1 leaves no layer with a window; give 2 or more"),
        ("--window-size 3,0 --window-attn-skip-freq [1,0]", "has 2 entries, and the model 4 layers; give a 1 or"),
        ("--window-size 3,0 --window-attn-skip-freq x", "--window-attn-skip-freq x is no pattern; give a number"),
        ("--glu-linear-offset 1", "--glu-linear-offset needs a gated MLP; add --quick-geglu or --swiglu"),
        ("--softmax-type learnable --init-method-xavier-uniform", "cannot draw; leave one out"),
    ],
)
def test_what_is_refused(flags, reason):
    with pytest.raises(ValueError) as refused:
        arguments(flags.replace("-1,0", "=-1,0").replace("size =", "size="), world_size=4)
    assert reason in str(refused.value)
