# Sourced: GPT-3 134B on 48 GPUs, with 12 stages and microbatches of 2 as in figure 8 of the BPipe paper.
num_gpus=48
TP="${TP:-4}" PP="${PP:-12}" MICRO_BATCH="${MICRO_BATCH:-2}" GLOBAL_BATCH="${GLOBAL_BATCH:-192}"
model_args=(--num-layers 84 --hidden-size 11520 --num-attention-heads 120)
training_args=(--lr 0.6e-4 --min-lr 0.6e-5)
. "$here/models/gpt3.sh"
