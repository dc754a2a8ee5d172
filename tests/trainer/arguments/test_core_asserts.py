"""What megatron.core asserts of our flags is known to our rules: what they let through is built."""

import os
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron import backend

backend.install()

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.trainer.arguments.platform import require_attention_environment
from megatron.trainer.programs import pretrain_bert, pretrain_gpt, pretrain_t5
from megatron.trainer.start_up import initialize
from megatron.trainer.start_up.run import setup_model_and_optimizer
from tests.trainer.arguments.bert_command_line import SMALL_BERT, bert_arguments
from tests.trainer.arguments.command_line import GPU, arguments, argv, configuration
from tests.trainer.arguments.t5_command_line import SMALL_T5

UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
P, P4, T = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4", "--tensor-model-parallel-size"
ROPE, GROUPS = "--position-embedding-type rope", "--group-query-attention --num-query-groups"
SELECTIVE, DECAY = "--recompute-granularity selective --recompute-modules", "--weight-decay-incr-style"
MLA = "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
CHOICES = (
    ("--optimizer sgd", "--optimizer lamb", "--sgd-momentum 0"),
    ("--use-distributed-optimizer", "--use-distributed-optimizer --ddp-pad-buckets-for-high-nccl-busbw"),
    ("--bf16", "--fp16", "--fp16 --loss-scale 64", "--bf16 --grad-reduce-in-bf16"),
    ("--swiglu", "--squared-relu", "--quick-geglu", "--swiglu --no-bias-swiglu-fusion"),
    ("--disable-bias-linear", "--disable-bias-linear --add-qkv-bias", "--add-qkv-bias"),
    ("--normalization RMSNorm", "--apply-residual-connection-post-layernorm", "--qk-layernorm"),
    (f"{GROUPS} 1", f"{GROUPS} 2", f"{GROUPS} 4", f"{GROUPS} 3"),
    ("--kv-channels 8", "--kv-channels 3", "--ffn-hidden-size 30"),
    (ROPE, "--position-embedding-type none", f"{ROPE} --rotary-percent 0.5 --rotary-interleaved",
     f"{ROPE} --use-rope-scaling", f"{ROPE} --rotary-percent 0.01"),
    (MLA, f"{MLA} --q-lora-rank 8 --rope-type rope --qk-layernorm", f"{MLA} --q-lora-rank 6 {SELECTIVE} mla_up_proj",
     f"{MLA} --position-embedding-type rope"),
    ("--softmax-type learnable", "--softmax-type off-by-one --window-size 3,0", "--window-size 0,0",
     "--window-size 5,0 --window-attn-skip-freq 2", "--window-size 5,0 --window-attn-skip-freq [1,1,0,1]"),
    ("--position-embedding-type yarn --rotary-scaling-factor 32", "--glu-linear-offset 1 --quick-geglu",
     "--activation-func-clamp-value 7 --swiglu"),
    ("--apply-query-key-layer-scaling", "--attention-softmax-in-fp32", "--fp16-lm-cross-entropy"),
    ("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-persist-layer-norm"),
    ("--cross-entropy-loss-fusion", "--deterministic-mode", "--init-method-xavier-uniform", "--hidden-dropout 0"),
    ("--attention-backend local", "--attention-backend unfused"),
    ("--recompute-activations", f"{UNIFORM} 1", f"{UNIFORM} 3", f"{UNIFORM} 9", f"{BLOCK} 9", f"{SELECTIVE} layernorm",
     f"{SELECTIVE} core_attn mlp", f"{SELECTIVE}"),
    (f"--mtp-num-layers 1 {ROPE}", f"--mtp-num-layers 2 {ROPE} --calculate-per-token-loss"),
    ("--context-parallel-size 2", "--context-parallel-size 2 --cp-comm-type a2a", "--context-parallel-size 3"),
    (f"{T} 2", f"{T} 4", f"{T} 2 --sequence-parallel", f"{T} 2 --tp-comm-overlap"),
    (P, P4, f"{P} --decoder-first-pipeline-num-layers 1", f"{P} --num-virtual-stages-per-pipeline-rank 2",
     f"{P} --num-layers 3 --account-for-embedding-in-pipeline-split", f"{P} --pipeline-model-parallel-layout Et|tttL",
     f"{P} --num-layers 2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
     f"{P4} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"),
    ("--pipeline-schedule 2bw", "--pipeline-schedule gpipe", "--pipeline-schedule zb-h1", "--pipeline-schedule zbv"),
    ("--lr-decay-style constant", "--lr-decay-style cosine --min-lr 1e-4", "--lr-decay-style inverse-square-root",
     "--lr-decay-style WSD --lr-wsd-decay-iters 3", "--lr-decay-style WSD --lr-wsd-decay-iters 30",
     "--lr-warmup-fraction 0.999", "--lr-decay-iters 4 --lr-warmup-iters 3", "--decoupled-lr 1e-2"),
    (f"{DECAY} linear --start-weight-decay 0 --end-weight-decay 0.1",
     "--start-weight-decay 0.1 --end-weight-decay 0.1"),
    ("--untie-embeddings-and-output-weights", "--clip-grad 0", "--seed 4294967295", "--vocab-size 1"),
    ("--num-attention-heads 1", "--num-attention-heads 8", "--num-layers 1", "--num-layers 8", "--seq-length 1"),
)  # fmt: skip

PROGRAMS = {
    "gpt": (argv(), {}, pretrain_gpt.program),
    "bert": (SMALL_BERT.split(), pretrain_bert.DEFAULTS, pretrain_bert.program),
    "t5": (SMALL_T5.split(), pretrain_t5.DEFAULTS, pretrain_t5.program),
}


def of(name: str, flags: str) -> int:
    return int((re.findall(rf"--{name}-parallel-size (\d+)", flags) or [1])[-1])


@pytest.fixture
def one_rank_of_many(monkeypatch) -> None:
    """Process groups of any size that one process makes, and that send nothing."""
    make = torch.distributed.new_group

    def new_group(*args, **options):
        options.pop("pg_options", None)
        return make(*args, **{**options, "backend": "fake"})

    def gloo(store, rank, size, timeout):
        return FakeProcessGroup._create_internal(rank, size)

    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", gloo)


def combinations(seed: int, number: int) -> Iterator[str]:
    """Flags of one to six subjects each."""
    drawn = random.Random(seed)
    for _ in range(number):
        yield " ".join(drawn.choice(each) for each in drawn.sample(CHOICES, drawn.randint(1, 6)))


def build(architecture: str, flags: str, size: int, rank: int) -> None:
    """What a rank builds of the flags, and a learning rate for each iteration. ValueError where a rule refuses them."""
    words, defaults, program = PROGRAMS[architecture]
    args = configuration([*words, *flags.split()], defaults=defaults, world_size=size, distributed_backend="gloo")
    args = replace(args, rank=rank, padded_vocab_size=128 * args.tensor_model_parallel_size)
    with initialize.left_in_order(), mock.patch.dict(os.environ):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            args = initialize.set_up(args)
            built = setup_model_and_optimizer(args, program())
        except ValueError as error:
            raise AssertionError(f"not a rule's: {error}") from error
        for _ in range(args.train_iters + 1):
            built.scheduler.step(increment=args.global_batch_size)
        built.update.close()
        receives_tokens = args.mtp_num_layers and args.context_parallel_size > 1
        if args.pipeline_model_parallel_size == 1 and architecture == "gpt" and not receives_tokens:
            forward(built.stages[0], args)


def forward(stage, args) -> None:
    """One forward and backward of a model that is one stage."""
    tokens = torch.zeros(args.micro_batch_size, args.seq_length // args.context_parallel_size, dtype=torch.long)
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    stage.model(tokens, positions, None, labels=tokens).float().sum().backward()
    MTPLossLoggingHelper.tracker.clear()


@pytest.mark.sample(2, "t5-0-60")
@pytest.mark.parametrize(
    ("architecture", "seed", "number"),
    [("gpt", 0, 40), ("bert", 0, 20), ("t5", 0, 60), pytest.param("gpt", 1, 600, marks=pytest.mark.full)],
)
def test_what_rules_let_through_is_built(one_rank_of_many, architecture, seed, number):
    """Random combinations, on a first and a last rank: each is refused by a rule, or megatron.core builds and computes
    it."""
    built = 0
    for index, flags in enumerate(combinations(seed, number)):
        shared = of("tensor-model", flags) * of("pipeline-model", flags) * of("context", flags)
        size = shared * (1 + index % 2)
        rank = (size - 1) * (index % 3 > 0)
        try:
            build(architecture, flags, size, rank)
            built += 1
        except ValueError:
            pass
        except Exception as error:
            raise AssertionError(f"{flags} on rank {rank} of {size}: {type(error).__name__}: {error}") from error
    assert built >= number / 4


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--optimizer sgd --use-distributed-optimizer", "does not go with --optimizer sgd: .*; leave one of the two"),
        (f"{UNIFORM} 3", "--recompute-num-layers 3 does not divide the 4 layers of a stage .*; give a divisor of 4"),
        (f"{UNIFORM} 2 {P} --num-layers 6", "does not divide the 3 layers"),
        (f"{UNIFORM} 2 {P} --decoder-first-pipeline-num-layers 1", "does not divide the 1 layers"),
        (f"{UNIFORM} 2 {P} --pipeline-model-parallel-layout Ett|tttL --num-layers 5", "3 layers of a stage"),
        (f"{UNIFORM} 2 {P} --num-layers 3 --account-for-loss-in-pipeline-split", "the 1 layers"),
        (f"{UNIFORM} 2 {P} --untie-embeddings-and-output-weights --elastic-pipeline --freeze-interval 2", "give 1, or"),
        (f"{T} 2 --tp-comm-overlap", "overlaps what --sequence-parallel sends; add the latter"),
        ("--use-rotary-position-embeddings --position-embedding-type none", "exclude each other; keep one"),
    ],
)
def test_refusals(flags, sentence):
    """One sentence each, before anything is built."""
    with pytest.raises(ValueError, match=sentence):
        arguments(flags, world_size=of("tensor-model", flags) * of("pipeline-model", flags), platform=GPU)


def test_plain_attention_of_bert():
    """megatron.core's BERT takes it for local alone."""
    assert bert_arguments("--attention-backend local").attention_backend == "local"
    with pytest.raises(ValueError, match="--attention-backend unfused needs CUDA with --transformer-impl"):
        bert_arguments("--attention-backend unfused")


@pytest.mark.parametrize(
    "flags",
    [f"{UNIFORM} 2", f"{UNIFORM} 2 {P}", f"{BLOCK} 3 {P}", f"{UNIFORM} 1 {P} --decoder-first-pipeline-num-layers 1",
     f"{UNIFORM} 2 {P} --num-layers 8 --num-virtual-stages-per-pipeline-rank 2"],
)  # fmt: skip
def test_chunks_that_come_out_even(flags):
    """These are let through."""
    assert arguments(flags, world_size=of("pipeline-model", flags)).recompute_num_layers in (1, 2, 3)


def test_attention_of_the_environment():
    """A variable that asks for another attention than the flag is named, before megatron.core ends with it."""
    args = arguments("--attention-backend unfused")
    require_attention_environment(args, {"NVTE_UNFUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"})
    with pytest.raises(ValueError, match="NVTE_FLASH_ATTN is 1, and --attention-backend unfused asks for 0; unset"):
        require_attention_environment(args, {"NVTE_FLASH_ATTN": "1"})
    args = arguments("--apply-query-key-layer-scaling --bf16", platform=GPU)
    require_attention_environment(args, {"NVTE_APPLY_QK_LAYER_SCALING": "1"})
    with pytest.raises(ValueError, match=r"is not set, which .*; export NVTE_APPLY_QK_LAYER_SCALING=1"):
        require_attention_environment(args, {})


def test_kernels_that_read_no_mask():
    """--reset-attention-mask takes layers, and a softmax, that apply it."""
    args = arguments("--reset-attention-mask --bf16", platform=GPU)
    assert args.transformer_impl == "local" and not args.masked_softmax_fusion
    assert arguments("--bf16 --transformer-impl local", platform=GPU).masked_softmax_fusion
    with pytest.raises(ValueError, match="--transformer-impl transformer_engine has a causal attention that reads no"):
        arguments("--reset-attention-mask --transformer-impl transformer_engine", platform=GPU)
