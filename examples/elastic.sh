#!/usr/bin/env bash
# Fine-tune a ViT on 4 processes while its layers freeze and its pipeline shrinks: 4 ranks, 2, 1 (docs/pipetransformer.md).
#
#   bash examples/elastic.sh          # results in outputs/elastic, or in $OUTPUT; under 5 minutes on 2 free cores
#
# The images come with scikit-learn: the model learns the digits 0 to 4 first, and is tuned on 5 to 9. A second run does
# the same without a change, to compare accuracies. EPOCHS changes how long each takes: in few, layers freeze before they
# have converged. FREEZE_WATCH=0.01 trains all layers again where that costs validation accuracy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

output="${OUTPUT:-outputs/elastic}"
epochs="${EPOCHS:-20}"
batches=$((epochs * 18)) # 583 images, 32 in a batch; freezing starts behind a quarter of them and is decided every fifth

prepare_environment core digits
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""

echo "== Data"
python examples/digits.py --classes 0-4 --folder "$output/0-4"
python examples/digits.py --classes 5-9 --folder "$output/5-9"

train() { # NAME RANKS DATA FLAGS...
    local name="$1" ranks="$2" data="$3"
    shift 3
    echo "== $name"
    rm -f "$output/$name.jsonl"
    python -m torch.distributed.run --standalone --nproc-per-node "$ranks" pretrain_vision_classify.py \
        --pipeline-model-parallel-size "$ranks" --num-layers 8 --hidden-size 64 --ffn-hidden-size 128 \
        --num-attention-heads 4 --img-h 8 --img-w 8 --num-channels 1 --patch-dim 2 --num-classes 5 \
        --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --global-batch-size 32 --lr 1e-3 \
        --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.05 --epochs "$epochs" --num-workers 0 \
        --log-interval 20 --untie-embeddings-and-output-weights \
        --data-path "$data/train.npz" "$data/validation.npz" "$data/test.npz" --metrics-file "$output/$name.jsonl" "$@"
}

rm -rf "$output/checkpoints" "$output/cache"
train pretraining 2 "$output/0-4" --save "$output/checkpoints"
train elastic 4 "$output/5-9" --pretrained-checkpoint "$output/checkpoints" \
    --freeze-training --freeze-start $((batches / 4)) --freeze-interval $((batches / 5)) --freeze-schedule 3,5,6 \
    --elastic-pipeline --elastic-schedule 4,2,1 --activation-cache "$output/cache" \
    ${FREEZE_WATCH:+--freeze-watch-validation "$FREEZE_WATCH"}
train dense 4 "$output/5-9" --pretrained-checkpoint "$output/checkpoints"

python tools/plot_changes.py "$output/elastic.jsonl" --output "$output/changes.png" --title "A ViT that is fine-tuned: pipeline 4, 2, 1"
for name in elastic dense; do
    echo "$name: $(grep -h test_accuracy "$output/$name.jsonl")"
done
echo "The picture is $output/changes.png"
