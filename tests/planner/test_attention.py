"""Latents, windows and sinks in the planner: published sizes, operations, and what a window leaves."""

from dataclasses import replace

import pytest

from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import Windows
from megatron.planner.memory.parameters import stage_parameters
from megatron.planner.time.work import LayerWork
from megatron.trainer.plan import from_flags
from megatron.trainer.report.metrics import flops_per_sample
from tests.planner.counted_operations import counted_operations
from tests.trainer.arguments.bert_command_line import bert_arguments
from tests.trainer.arguments.command_line import arguments
from tests.trainer.arguments.t5_command_line import t5_arguments
from tests.trainer.run.text_helper import text_arguments
from tests.trainer.run.vision_helper import vision_arguments

_LATENT = (
    "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--qk-layernorm --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 4096 --max-position-embeddings 4096 "
)
_SINKS = (
    "--hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64 --group-query-attention --num-query-groups 8 "
    "--kv-channels 64 --moe-router-topk 4 --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7 "
    "--softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2 --position-embedding-type yarn "
    "--rotary-scaling-factor 32 --normalization RMSNorm --untie-embeddings-and-output-weights --seq-length 4096 "
    "--max-position-embeddings 131072 "
)
PUBLISHED = {
    # arXiv 2412.19437, section 4.2: "671B total parameters, of which 37B are activated", without its MTP module
    "DeepSeek-V3": (
        _LATENT + "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
        "--q-lora-rank 1536 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58)",
        129280, 671.0,
    ),
    # arXiv 2405.04434, appendix B: "15.7B total parameters"
    "DeepSeek-V2-Lite": (
        _LATENT + "--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 "
        "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816 "
        "--moe-layer-freq ([0]+[1]*26)",
        102400, 15.7,
    ),
    # arXiv 2508.10925, table 1: 20.91B and 116.83B
    "GPT-OSS-20B": (_SINKS + "--num-layers 24 --num-experts 32", 201088, 20.91),
    "GPT-OSS-120B": (_SINKS + "--num-layers 36 --num-experts 128", 201088, 116.83),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    """The parameters of models that their papers give, to the last digit there."""
    flags, vocabulary, billions = PUBLISHED[name]
    args = replace(arguments(flags), padded_vocab_size=vocabulary)
    (count,) = stage_parameters(from_flags.architecture(args), 1, (args.num_layers,))
    digits = len(str(billions).partition(".")[2])
    assert round(count / 1e9, digits) == billions


@pytest.mark.parametrize("before", [0, 3, 7, 30])
def test_what_a_window_leaves(before):
    """Counted pair by pair; half of the layers have a window."""
    pairs = [(query, key) for query in range(8) for key in range(query + 1)]
    inside = sum(query - key <= before for query, key in pairs) / len(pairs)
    assert Windows(before=before).attended(8) == pytest.approx(inside)
    assert Windows(before=before, share=0.5).attended(8) == pytest.approx((1 + inside) / 2)


@pytest.mark.parametrize(
    "flags",
    [
        "--multi-latent-attention --q-lora-rank 8 --v-head-dim 24",
        "--multi-latent-attention --window-size 3,0",
        "--multi-latent-attention --v-head-dim 24 --mtp-num-layers 2 --position-embedding-type rope",
        "--window-size 3,0 --window-attn-skip-freq [1,0,1,1] --group-query-attention --num-query-groups 2 --swiglu",
        "--num-experts 4 --moe-layer-freq [0,1,1,1] --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 32 "
        "--disable-bias-linear",
        "--num-experts 4 --moe-layer-freq [0,1,1,1] --moe-ffn-hidden-size 96 --disable-bias-linear --mtp-num-layers 2 "
        "--position-embedding-type rope",
    ],
)
def test_operations_of_a_run_are_those_of_its_architecture(flags):
    args = replace(arguments(flags), padded_vocab_size=256)
    assert flops_per_sample(args) == pytest.approx(counted_operations(args))


@pytest.mark.parametrize("model", [bert_arguments, t5_arguments, vision_arguments, text_arguments])
def test_operations_of_other_models(model):
    """A BERT with its heads, a T5, and classifiers of images and of texts."""
    args = replace(model("--eval-iters 1"), padded_vocab_size=256)
    assert flops_per_sample(args) == pytest.approx(counted_operations(args))


def test_work_of_the_core():
    """Scores are as wide as queries, their product with values as values; flash attention skips what a window hides,
    and other attention computes it."""
    flags = "--multi-latent-attention --qk-head-dim 24 --qk-pos-emb-head-dim 8 --v-head-dim 16"
    shape = from_flags.architecture(replace(arguments(flags), padded_vocab_size=256))
    narrow = replace(shape, windows=Windows(before=3))

    def core(shape, *, flash):
        return LayerWork(
            shape, Software(flash_attention=flash), tensor=1, micro_batch_size=2, sequence_parallel=False
        )._core_forward()  # fmt: skip

    scores = 2 * shape.num_attention_heads * shape.sequence_length**2
    assert core(shape, flash=False).operations == core(narrow, flash=False).operations == 2 * scores * (32 + 16)
    assert core(shape, flash=True).attended == scores * (32 + 16)
    part = narrow.windows.attended(shape.sequence_length)
    assert core(narrow, flash=True).attended == pytest.approx(part * scores * (32 + 16)) and part < 0.5
