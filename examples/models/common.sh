# Sourced at the head of every model here, behind its program, GPU and number of GPUs: starts what was called, and says what
# SMALL=1 makes of the model.
#
#   bash examples/models/MODEL.sh --dry-run [GPUS]     # check everything, run nothing; needs torch, and no GPU
#   DATA_PATH=... CHECKPOINTS=... bash examples/models/MODEL.sh [FLAGS of the program]
#   SMALL=1 bash examples/models/MODEL.sh              # three iterations of a small one, on 2 processes, also on a CPU
#
# The models are files in the form of examples/cluster/models: one_node.sh, torchrun.sh and slurm.sh there take their paths,
# too, and job.sh there says what the environment may set. Those with experts or shared sequences read EP and CP, too.
# A tokenizer's name of the Hugging Face hub is TOKENIZER_MODEL's default. SMALL=1 leaves results in $CHECKPOINTS, or in
# outputs/models; ITERATIONS changes their number.
[ "${SMALL:-0}" = 1 ] || SMALL=
small_args=()
if [ -n "$SMALL" ]; then
    num_gpus=2 GPUS_PER_NODE=2 TP="${TP:-1}" PP="${PP:-2}" VP="${VP:-1}" CP="${CP:-1}" EP="${EP:-1}" LAYOUT="${LAYOUT:-}"
    MICRO_BATCH="${MICRO_BATCH:-1}" GLOBAL_BATCH="${GLOBAL_BATCH:-4}" ITERATIONS="${ITERATIONS:-3}"
    CHECKPOINTS="${CHECKPOINTS:-outputs/models/$(basename "${BASH_SOURCE[1]}" .sh)}"
    unset DATA_PATH VOCAB_FILE TOKENIZER_MODEL
    data_args=(--mock-data) tokenizer_args=(--tokenizer-type NullTokenizer)
    small_args=(
        --num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16
        --seq-length 64 --max-position-embeddings 64 --vocab-size 1000 --make-vocab-size-divisible-by 128
        --lr-warmup-iters 0 --log-interval 1 --eval-iters 1 --num-workers 0
    )
fi
if [ "${BASH_SOURCE[1]}" = "$0" ]; then
    this="$(realpath "$0")"
    cd "$(dirname "$this")/../.."
    if [ -n "$SMALL" ]; then
        . tools/environment.sh
        prepare_environment core
        install_project
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    fi
    launcher=torchrun.sh
    if [ "$num_gpus" -le 8 ] && [ "${1:-}" != --dry-run ]; then
        launcher=one_node.sh
    fi
    exec bash "examples/cluster/$launcher" "$this" "$@"
fi
