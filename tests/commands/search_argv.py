"""What the tests of a search give it."""

GPT = [
    "--num-layers", 24, "--hidden-size", 2048, "--num-attention-heads", 16, "--seq-length", 1024, "--vocab-size", 50257,
    "--global-batch-size", 64,
]  # fmt: skip
QUICK = ["--schedules", "flush,2bw", "--tensor", "1,2", "--simulate", 1]
CLUSTER = ["--cluster", "V100-16"]
SCRIPT = """#!/bin/bash
ARGS=(--num-layers 24 --hidden-size 1024
    --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512)
torchrun --nproc-per-node 8 pretrain_bert.py "${ARGS[@]}" --fp16 --lr 1e-4 --train-iters 1000 --global-batch-size 256 \\
    --tensor-model-parallel-size 2 --recompute-activations --data-path $DATA --vocab-file vocab.txt
"""
