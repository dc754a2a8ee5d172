# Sourced: GPT-3 13B on 8 GPUs, as in table 1, figure 3 and figure 9 of the BPipe paper.
num_gpus=8
TP="${TP:-1}" PP="${PP:-8}" MICRO_BATCH="${MICRO_BATCH:-1}" GLOBAL_BATCH="${GLOBAL_BATCH:-32}"
model_args=(--num-layers 40 --hidden-size 5120 --num-attention-heads 40)
training_args=(--lr 1.0e-4 --min-lr 1.0e-5)
. "$here/models/gpt3.sh"
