"""Command lines as they are published: what a user brings, to which only `--pipeline-schedule` is added.

Each of the folder `recipes` is a file that names its source with its commit, its program and its number of GPUs; those
here are of scripts that Megatron-LM had once, by their path in its repository. Flags and values are those of the
sources; places that a script's user fills in (data, tokenizer, checkpoints) hold names, none of which exists here.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

RECIPES = {path.stem: path for path in sorted(Path(__file__).with_name("recipes").glob("*.txt"))}


def recipe(name: str) -> str:
    """The words of a recipe, of which none has a space."""
    lines = RECIPES[name].read_text(encoding="utf-8").splitlines()
    return " ".join(word for line in lines for word in shlex.split(line, comments=True))


def fact(name: str, what: str) -> str:
    """What the head of a recipe says of its `program` or `GPUs`."""
    return re.search(rf"^# {what}: (\S+)$", RECIPES[name].read_text(encoding="utf-8"), re.MULTILINE)[1]


_GPT3 = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
    "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 {growth} "
    "--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 "
    "--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 "
    "--lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--data-path text_document "
    "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1 --log-interval 100 "
    "--save-interval 10000 --eval-interval 1000 --save checkpoints --load checkpoints --eval-iters 10 "
    "--tensorboard-dir logs"
)
# examples/gpt3/train_gpt3_175b_distributed.sh, until April 2026
GPT3_175B = _GPT3.format(growth="--rampup-batch-size 16 16 5859375")
GPT3_175B_STEPS = recipe("gpt3_175b")  # the same since then
# examples/pretrain_gpt.sh of v2.5
GPT2_345M = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 8 "
    "--seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 "
    "--save checkpoints --load checkpoints --data-path text_document --vocab-file gpt2-vocab.json "
    "--merge-file gpt2-merges.txt --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 0.00015 "
    "--min-lr 1.0e-5 --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 "
    "--checkpoint-activations --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16"
)
# examples/pretrain_gpt_distributed_with_mp.sh of core_v0.5.0
GPT2_345M_PARALLEL = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers 24 "
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 "
    "--global-batch-size 16 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine "
    "--min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --data-path text_document "
    "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1 --log-interval 100 "
    "--save-interval 10000 --eval-interval 1000 --eval-iters 10 --distributed-backend nccl --save checkpoints "
    "--load checkpoints"
)
BERT_340M = recipe("bert_340m")
_LLAMA3_FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
LLAMA3_MOCK = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 "
    "--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1"
)
# with DTYPE="bf16", and without its data
LLAMA3_8B = recipe("llama3_8b_fp8").replace(f"{_LLAMA3_FP8} ", "").replace(f"{LLAMA3_MOCK} ", "")
assert not {"--mock-data", "--fp8-format"} & {*LLAMA3_8B.split()}
LLAMA3_DATA = (
    "--data-path text --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --data-cache-path cache "
    "--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --vocab-size 128256"
)
# docs/llama_mistral.md (the flags of a Llama-2, t=8 for 70B), without its --use-checkpoint-args; shape, batch and
# optimizer of the 70B from Touvron et al. 2023, Llama 2, section 2 and table 1. No script of its training is published.
LLAMA2_70B = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --seq-length 4096 --max-position-embeddings 4096 "
    "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --load checkpoints --no-load-optim "
    "--no-load-rng --untie-embeddings-and-output-weights --use-rotary-position-embeddings --normalization RMSNorm "
    "--no-position-embedding --no-masked-softmax-fusion --attention-softmax-in-fp32 "
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --swiglu --disable-bias-linear --norm-epsilon 1e-5 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 1 --global-batch-size 1024 --train-iters 476837 --lr 1.5e-4 --min-lr 1.5e-5 "
    "--lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--adam-eps 1e-5 --clip-grad 1.0 --bf16 --use-distributed-optimizer --sequence-parallel --data-path text_document "
    "--split 99,1,0 --save checkpoints --save-interval 1000"
)


@dataclass(frozen=True)
class Published:
    """A command line that a dry run passes: on so many GPUs, with so many billion parameters (tied embeddings on both
    ends of the pipeline counted twice), of a GPT or a BERT, under `schedules`, and with what `changed` overrides.
    `full`: those of the schedules that are for the full selection, whose proofs take seconds."""

    argv: str
    num_gpus: int
    billions: float
    architecture: str = "gpt"
    changed: str = ""
    schedules: tuple[str, ...] = ("flush", "2bw")
    full: tuple[str, ...] = ()


_SHORT = ("flush",)  # on fewer GPUs also under 2bw, whose proof of so large batches takes a minute
PASSES = {
    "GPT-3 175B": Published(GPT3_175B, 2048, 175.2, schedules=_SHORT, full=_SHORT),
    "GPT-3 175B by steps": Published(GPT3_175B_STEPS, 2048, 175.2, schedules=_SHORT),
    "GPT-2 345M": Published(GPT2_345M, 2, 0.406, changed="--pipeline-model-parallel-size 2"),
    "GPT-2 345M parallel": Published(GPT2_345M_PARALLEL, 8, 0.406),
    "BERT 340M": Published(BERT_340M, 64, 0.387, "bert", changed="--pipeline-model-parallel-size 8"),
    "Llama-3 8B": Published(f"{LLAMA3_8B} {LLAMA3_DATA}", 8, 8.03, changed="--pipeline-model-parallel-size 2"),
    "Llama-3 8B mock": Published(f"{LLAMA3_8B} {LLAMA3_MOCK}", 8, 8.03),
    "Llama-3 8B, context parallel": Published(
        f"{LLAMA3_8B} {LLAMA3_MOCK}", 8, 8.03, changed="--context-parallel-size 2", schedules=("flush",)
    ),
    "GPT-OSS": Published(recipe("gpt_oss"), 8, 0.2896, changed="--pipeline-model-parallel-size 4", schedules=_SHORT),
    "Llama-2 70B": Published(LLAMA2_70B, 64, 69.0, full=("flush", "2bw")),
}
AS_WRITTEN = {
    "bert_340m": (0.387, "flush"),
    "deepseek_v2_lite": (15.7, "flush 2bw"),
    "deepseek_v3": (682.0, "interleaved"),
    "gpt_oss": (0.29, "flush 2bw"),
    "gpt_oss_20b_bridge": (20.9, "flush"),
    "llama3_70b_bridge": (70.6, "interleaved"),
    "llama3_8b_fp8": (8.03, "flush 2bw"),
    "mixtral_8x22b": (140.6, "interleaved"),
    "mixtral_8x7b": (46.7, "flush 2bw"),
    "qwen25_72b_mindspeed": (72.7, "flush"),
    "qwen3_235b_a22b": (235.0, "interleaved"),
    "qwen3_30b_a3b_bridge": (30.5, "flush 2bw"),
    "qwen3_30b_a3b_pai": (30.5, "flush 2bw"),
    "qwen3_30b_a3b_zoo": (30.5, "flush"),
    "t5_220m": (0.2225, "flush 2bw"),
}
"""Recipes that a dry run passes: billions of parameters, and schedules. Not listed: `gpt3_175b`."""
PASSES |= {
    name: Published(
        recipe(name), int(fact(name, "GPUs")), billions,
        fact(name, "program").removeprefix("pretrain_").removesuffix(".py"),
        schedules=tuple(schedules.split()),
    )
    for name, (billions, schedules) in AS_WRITTEN.items()
}  # fmt: skip
REFUSED = {
    "llama3_8b_fsdp": "--ckpt-format --init-model-with-meta-device --use-megatron-fsdp",
    "mamba_800m": "--hybrid-layer-pattern",
}
"""Recipes, and the flags that the one message has to name."""
PASSES |= {
    f"{name}, context parallel": Published(
        recipe(name), int(fact(name, "GPUs")), AS_WRITTEN[name][0], changed=f"--context-parallel-size 2 {changed}",
        schedules=("flush",), full=("flush",),
    )
    for name, changed in (("deepseek_v2_lite", ""), ("gpt_oss_20b_bridge", "--cp-comm-type a2a"))
}  # fmt: skip
assert RECIPES.keys() == {*AS_WRITTEN, *REFUSED, "gpt3_175b"}
