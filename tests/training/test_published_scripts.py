"""Megatron-LM's published example scripts: every argument parses, and works or is refused by name.

The argument lists are those of examples/gpt3/train_gpt3_175b_distributed.sh and
examples/llama/train_llama3_8b_h100_fp8.sh, as data; places that the scripts' user fills in hold names.
"""

import pytest

from megatron.training.arguments import parse_args, resolve_platform, validate_args
from tests.training.arguments_helper import GPU
from tests.training.bert_helper import defaults

GPT3_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
    "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 "
    "--train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 "
    "--clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 "
    "--lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    "--data-path text_document "
    "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1 --log-interval 100 "
    "--save-interval 10000 --eval-interval 1000 --save checkpoints --load checkpoints --eval-iters 10 "
    "--tensorboard-dir logs"
)
LLAMA3_8B = (
    "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 "
    "--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p "
    "--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 "
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
BERT_340M = (  # examples/bert/train_bert_340m_distributed.sh
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
    "--attention-backend auto --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 --weight-decay 1e-2 "
    "--clip-grad 1.0 --fp16 --lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 16 --data-path text_sentence --vocab-file vocab.txt --split 949,50,1 "
    "--log-interval 100 --save-interval 10000 --eval-interval 1000 --save checkpoints --load checkpoints "
    "--eval-iters 10 --tensorboard-dir logs"
)
LLAMA3_FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
LLAMA3_MOCK = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 "
    "--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1"
)
LLAMA3_DATA = (
    "--data-path text --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --data-cache-path cache "
    "--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --vocab-size 128256"
)


def test_bert_script():
    """The BERT 340M script is accepted on 8 stages; its 16 do not divide 24 layers, which the error says."""
    with pytest.raises(ValueError, match="--num-layers 24 is not divisible by --pipeline-model-parallel-size 16"):
        validate_args(parse_args(BERT_340M.split(), defaults=defaults()), world_size=128)
    args = parse_args([*BERT_340M.split(), "--pipeline-model-parallel-size", "8"], defaults=defaults())
    validate_args(args, world_size=64)
    resolve_platform(args, GPU)
    assert args.tokenizer_type == "BertWordPieceLowerCase" and args.bert_binary_head


def test_gpt3_script_with_a_batch_that_its_ramp_up_divides():
    """The GPT-3 175B script is accepted on 128 x 2 GPUs as it stands, but for pipedream it is refused by name."""
    args = parse_args(GPT3_175B.split())
    validate_args(args, world_size=256)
    resolve_platform(args, GPU)
    assert args.tokenizer_type == "GPT2BPETokenizer" and args.data_parallel_size == 2
    assert args.batch_sizes.num_microbatches(0) == 8
    with pytest.raises(ValueError, match=r"--pipeline-schedule pipedream .*--clip-grad 0"):
        validate_args(parse_args([*GPT3_175B.split(), "--pipeline-schedule", "pipedream"]), world_size=256)


def test_gpt3_script_under_2bw_names_the_batch_that_is_too_small():
    """Under 2bw the ramp-up's first batches are smaller than the pipeline is deep: refused before anything starts."""
    args = parse_args([*GPT3_175B.split(), "--pipeline-schedule", "2bw"])
    with pytest.raises(ValueError, match="8"):
        validate_args(args, world_size=256)
    args = parse_args([*GPT3_175B.replace("16 16 5859375", "32 32 5859375").split(), "--pipeline-schedule", "2bw"])
    validate_args(args, world_size=256)


@pytest.mark.parametrize("data", [LLAMA3_MOCK, LLAMA3_DATA])
def test_llama3_script_in_bf16(data):
    """The Llama-3 8B script without its FP8 part and its loss per token is accepted on 8 GPUs."""
    with pytest.raises(ValueError, match=r"--calculate-per-token-loss: .*leave the flag out"):
        parse_args(f"{LLAMA3_8B} {data}".split())
    args = parse_args(f"{LLAMA3_8B} {data}".replace("--calculate-per-token-loss", "").split())
    notes = validate_args(args, world_size=8)
    resolve_platform(args, GPU)
    assert args.data_parallel_size == 8 and args.train_iters == 1953125000 // 128
    assert any("--sequence-parallel has no effect" in note for note in notes)


def test_llama3_script_in_fp8_is_refused_by_name():
    """Its FP8 part is refused by the flag's name with the remedy."""
    with pytest.raises(ValueError, match=r"--fp8-format hybrid: .*use --bf16"):
        parse_args(f"{LLAMA3_8B} {LLAMA3_FP8} {LLAMA3_MOCK}".split())
