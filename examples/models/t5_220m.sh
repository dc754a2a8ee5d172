#!/usr/bin/env bash
# T5 220M on 8 H100, with the model, the batch and the rates of Megatron-LM's example, on two stages:
# https://github.com/NVIDIA/Megatron-LM/blob/d98e8a64ddf34856e74b24714e3bedb2f5a39553/examples/t5/train_t5_220m_distributed.sh
# VOCAB_FILE is a WordPiece vocabulary, and DATA_PATH was made with --split-sentences; a small one makes its own.
program=pretrain_t5.py gpu=H100 num_gpus=8
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
TP="${TP:-1}" PP="${PP:-2}" MICRO_BATCH="${MICRO_BATCH:-64}" GLOBAL_BATCH="${GLOBAL_BATCH:-512}"
RECOMPUTE="${RECOMPUTE:-none}" SCHEDULE="${SCHEDULE:-flush}" RANK_MAPPING="${RANK_MAPPING:-standard}"
model_args=(
    --encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 --ffn-hidden-size 3072 --num-attention-heads 12
    --kv-channels 64 --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512
    --vocab-extra-ids 100 --init-method-std 0.015 --bf16
)
training_args=(
    --train-iters "${ITERATIONS:-1000000}" --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-iters 10000
    --weight-decay 0.01 --clip-grad 1.0
)
if [ -n "$SMALL" ]; then
    bash examples/quickstart/prepare_bert_data.sh "$CHECKPOINTS/data"
    VOCAB_FILE="$CHECKPOINTS/data/vocab.txt" TOKENIZER_TYPE=BertWordPieceLowerCase
    data_args=(--data-path "$CHECKPOINTS/data/corpus_text_sentence")
    training_args+=(
        --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
        --kv-channels 16 --encoder-seq-length 64 --decoder-seq-length 32 --max-position-embeddings 64
        --vocab-extra-ids 16 --lr-warmup-iters 0 --log-interval 1 --eval-iters 1 --num-workers 0
    )
fi
TOKENIZER_TYPE="${TOKENIZER_TYPE:-BertWordPieceCase}"
