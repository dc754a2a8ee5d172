"""Command lines as they are published: what a user brings, to which only `--pipeline-schedule` is added.

Flags and values as their sources have them; places that a script's user fills in (data, tokenizer, checkpoints) hold
names, none of which exists here. Scripts are those of Megatron-LM, by their path in its repository.
"""

from dataclasses import dataclass

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
# the same since then; bash splits the quoted list, since the script expands its array without quotes
GPT3_175B_STEPS = _GPT3.format(growth="--step-batch-size-schedule 0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536")
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
# examples/bert/train_bert_340m_distributed.sh; its 16 stages do not divide its 24 layers, there neither
BERT_340M = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
    "--attention-backend auto --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 --weight-decay 1e-2 "
    "--clip-grad 1.0 --fp16 --lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 16 --data-path text_sentence --vocab-file vocab.txt --split 949,50,1 "
    "--log-interval 100 --save-interval 10000 --eval-interval 1000 --save checkpoints --load checkpoints "
    "--eval-iters 10 --tensorboard-dir logs"
)
# examples/llama/train_llama3_8b_h100_fp8.sh with DTYPE="bf16", without its data
LLAMA3_8B = (
    "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused "
    "--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 "
    "--global-batch-size 128 "
    "--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 "
    "--min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion "
    "--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 "
    "--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --log-interval 1 --eval-iters 32 --eval-interval 100 "
    "--save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6 "
    "--ckpt-format torch_dist --distributed-timeout-minutes 60 --save checkpoints --load checkpoints "
    "--tensorboard-dir logs"
)
# what the same script adds with DTYPE="fp8", and for mock data and for data
LLAMA3_FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
LLAMA3_MOCK = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 "
    "--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1"
)
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
# examples/mixtral/train_mixtral_8x7b_distributed.sh
MIXTRAL_8X7B = (
    "--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 "
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion "
    "--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce "
    "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path text_document --split 99990,8,2 "
    "--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 "
    "--lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
    "--use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000 --eval-interval 1000 "
    "--eval-iters 10 --save checkpoints --load checkpoints --tensorboard-dir checkpoints/tensorboard --no-load-optim "
    "--no-load-rng --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B"
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
    "Llama-2 70B": Published(LLAMA2_70B, 64, 69.0, full=("flush", "2bw")),
    "Mixtral 8x7B, all experts of a layer on a rank": Published(
        MIXTRAL_8X7B, 256, 46.7, changed="--expert-model-parallel-size 1", schedules=_SHORT
    ),
}
REFUSED = {
    "Mixtral 8x7B": (
        MIXTRAL_8X7B,
        "--expert-model-parallel-size",
    ),
    "Llama-3 8B in FP8": (
        f"{LLAMA3_8B} {LLAMA3_FP8} {LLAMA3_MOCK}",
        "--fp8-format --fp8-amax-history-len --fp8-amax-compute-algo --fp8-param-gather",
    ),
}
"""Words, and the flags that the one message has to name."""
