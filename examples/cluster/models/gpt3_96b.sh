# Sourced: GPT-3 96B on 32 GPUs, the fastest configuration of table 7 of the BPipe paper, (6) with microbatches of 2. It
# runs out of memory without balance.
num_gpus=32
TP="${TP:-4}" PP="${PP:-8}" MICRO_BATCH="${MICRO_BATCH:-2}" GLOBAL_BATCH="${GLOBAL_BATCH:-128}"
model_args=(--num-layers 80 --hidden-size 9984 --num-attention-heads 104)
training_args=(--lr 0.6e-4 --min-lr 0.6e-5)
. "$here/models/gpt3.sh"
