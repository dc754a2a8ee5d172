# Sourced by one_node.sh, torchrun.sh and slurm.sh: from MODEL [--dry-run [GPUS]] [FLAGS] and the environment to a job.
#
# Sets: program, its arguments in `arguments`, GPUS_PER_NODE, NNODES. With --dry-run it checks the job and ends.
#
#   DATA_PATH        prefix of a .bin/.idx pair that tools/preprocess_data.py wrote
#   VOCAB_FILE, MERGE_FILE    GPT-2's tokenizer, or TOKENIZER_MODEL (and TOKENIZER_TYPE) for another; of BERT and T5 VOCAB_FILE
#   CHECKPOINTS      directory to save to and to resume from, which all nodes see
#                    (a model's file may give these itself, in data_args, tokenizer_args and CHECKPOINTS)
#   TOPOLOGY         optional: the cluster's nodes and bandwidths (docs/placement.md)
#   NNODES, GPUS_PER_NODE, TP, PP, VP (stages on each rank), MICRO_BATCH, GLOBAL_BATCH, RECOMPUTE (none, attention,
#   layer, stage), SCHEDULE or PIPELINE_PROGRAM (a file in its place), BALANCE (1: --balance-activations), DISTRIBUTED_OPTIMIZER (0 or 1), RANK_MAPPING
#                    optional: they change what the model's file says
#
# MODEL is one of models/, or a file in their form, as those of examples/models, and as tools/grid_search.py writes it
# (docs/grid_search.md).
here="$PWD/examples/cluster"
model="${1:-}"
model_file="$here/models/$model.sh"
if [[ "$model" == *.sh ]]; then
    model_file="$model"
    [[ "$model" == /* ]] || model_file="${OLDPWD:-$PWD}/$model"
fi
if [[ "$model" != *_* && "$model" != *.sh ]] || [ ! -f "$model_file" ]; then
    echo "usage: bash $0 MODEL [--dry-run] [FLAGS of the program]" >&2
    for file in "$here"/models/*_*.sh; do
        echo "    MODEL: $(basename "$file" .sh)" >&2
    done
    exit 2
fi
shift
dry_run="${DRY_RUN:-}"
if [ "${1:-}" = --dry-run ]; then
    dry_run=1
    shift
fi
asked_gpus=
if [ -n "$dry_run" ] && [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    asked_gpus="$1"
    shift
fi
data_args=() tokenizer_args=()
. "$model_file"
model="$(basename "$model" .sh)"

num_gpus="${asked_gpus:-$num_gpus}"
GPUS_PER_NODE="${GPUS_PER_NODE:-$((num_gpus < 8 ? num_gpus : 8))}"
NNODES="${NNODES:-$(((num_gpus + GPUS_PER_NODE - 1) / GPUS_PER_NODE))}"

case "$RECOMPUTE" in
    none) recompute_args=() ;;
    attention) recompute_args=(--recompute-activations) ;;
    layer) recompute_args=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
    stage) recompute_args=(--pipeline-recompute) ;;
    *)
        echo "RECOMPUTE is '$RECOMPUTE'; set it to none, attention, layer or stage" >&2
        exit 2
        ;;
esac

# A dry run needs none of these: it names what is not set and goes on.
from_environment() {
    if [ -z "${!1:-}" ] && [ -z "$dry_run" ]; then
        echo "$1 is not set: $2" >&2
        exit 2
    fi
    echo "${!1:-\$$1}"
}
if [ -n "${DATA_PATH:-}" ] || [ "${#data_args[@]}" = 0 ]; then
    data_path="$(from_environment DATA_PATH "the prefix of a .bin/.idx pair, which tools/preprocess_data.py writes")"
    data_args=(--data-path "$data_path")
fi
checkpoints="$(from_environment CHECKPOINTS "a directory for checkpoints, which all nodes see")"
if [ -z "${VOCAB_FILE:-}${TOKENIZER_MODEL:-}" ] && [ "${#tokenizer_args[@]}" -gt 0 ]; then
    : # the model's file says which
elif [ "$program" != pretrain_gpt.py ]; then
    vocab_file="$(from_environment VOCAB_FILE "a WordPiece vocabulary, a token a line")"
    tokenizer_args=(--tokenizer-type "${TOKENIZER_TYPE:-BertWordPieceLowerCase}" --vocab-file "$vocab_file")
elif [ -n "${TOKENIZER_MODEL:-}" ]; then
    tokenizer_args=(--tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}" --tokenizer-model "$TOKENIZER_MODEL")
else
    vocab_file="$(from_environment VOCAB_FILE "GPT-2's vocabulary, or set TOKENIZER_MODEL to another tokenizer's file")"
    merge_file="$(from_environment MERGE_FILE "GPT-2's merges, or set TOKENIZER_MODEL to another tokenizer's file")"
    tokenizer_args=(--tokenizer-type GPT2BPETokenizer --vocab-file "$vocab_file" --merge-file "$merge_file")
fi

arguments=(
    --split 969,30,1 "${data_args[@]}"
    --save "$checkpoints" --load "$checkpoints" --save-interval 500
    --log-interval 10 --log-throughput --eval-interval 1000 --eval-iters 10
    --metrics-file "$checkpoints/metrics.jsonl"
    "${model_args[@]}" "${training_args[@]}" "${recompute_args[@]}" "${tokenizer_args[@]}"
    --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH"
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --rank-mapping "$RANK_MAPPING"
)
if [ -n "${PIPELINE_PROGRAM:-}" ]; then
    arguments+=(--pipeline-program "$PIPELINE_PROGRAM")
else
    arguments+=(--pipeline-schedule "$SCHEDULE")
    if [ "${VP:-1}" -gt 1 ]; then
        arguments+=(--num-virtual-stages-per-pipeline-rank "$VP")
    fi
fi
if [ "$TP" -gt 1 ] && [ "${SEQUENCE_PARALLEL:-1}" = 1 ]; then
    arguments+=(--sequence-parallel)
fi
if [ "${BALANCE:-0}" = 1 ]; then
    arguments+=(--balance-activations)
fi
if [ "${DISTRIBUTED_OPTIMIZER:-1}" = 1 ]; then
    arguments+=(--use-distributed-optimizer)
fi
if [ -n "${TOPOLOGY:-}" ]; then
    arguments+=(--rank-topology "$TOPOLOGY")
fi
arguments+=("$@")

if [ -n "$dry_run" ]; then
    exec python "$program" "${arguments[@]}" --dry-run "$((NNODES * GPUS_PER_NODE))" \
        --dry-run-gpus-per-node "$GPUS_PER_NODE" --dry-run-gpu "${GPU:-$gpu}"
fi
export CUDA_DEVICE_MAX_CONNECTIONS=32 # a hardware queue for each stream: docs/gpu.md
