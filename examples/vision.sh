#!/usr/bin/env bash
# Pretrain a small ViT on the digits 0 to 4 and fine-tune it on 5 to 9, on two processes (docs/classification.md).
#
#   bash examples/vision.sh           # results in outputs/vision, or in $OUTPUT; under 3 minutes on 2 free cores
#
# The images come with scikit-learn. The second run takes all weights but the head's from the first one's checkpoint; a
# third one, without them, is there to compare with. EPOCHS changes how long that takes; 0 leaves it at the data.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/vision}"
epochs="${EPOCHS:-15}"

prepare_environment core digits
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""

echo "== Data"
python examples/digits.py --classes 0-4 --folder "$output/0-4"
python examples/digits.py --classes 5-9 --folder "$output/5-9"
[ "$epochs" -gt 0 ] || exit 0

train() { # NAME DATA FLAGS...
    local name="$1" data="$2"
    shift 2
    echo "== $name"
    rm -f "$output/$name.jsonl"
    python -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_vision_classify.py \
        --pipeline-model-parallel-size 2 --num-layers 6 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 \
        --img-h 8 --img-w 8 --num-channels 1 --patch-dim 2 --num-classes 5 --attention-dropout 0 --hidden-dropout 0 \
        --micro-batch-size 16 --global-batch-size 32 --lr 1e-3 --lr-decay-style cosine --lr-warmup-fraction 0.1 \
        --weight-decay 0.05 --epochs "$epochs" --num-workers 0 --log-interval 1000 \
        --data-path "$data/train.npz" "$data/validation.npz" "$data/test.npz" --metrics-file "$output/$name.jsonl" "$@"
}

rm -rf "$output/checkpoints"
train pretraining "$output/0-4" --save "$output/checkpoints"
train tuning "$output/5-9" --pretrained-checkpoint "$output/checkpoints"
train scratch "$output/5-9"

python tools/plot_metrics.py "$output/tuning.jsonl" "$output/scratch.jsonl" --output "$output/loss.png" \
    --title "Digits 5 to 9, with the weights of a ViT for 0 to 4 and without"
grep -h test_accuracy "$output/tuning.jsonl" "$output/scratch.jsonl"
