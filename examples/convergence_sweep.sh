#!/usr/bin/env bash
# What the delay of 2bw costs, and what provisional weights leave of it: trains the quickstart's GPT, or a BERT, under several
# schedules, learning rates and seeds, and prints and draws their last validation losses over flush's.
#
#   bash examples/convergence_sweep.sh                              # outputs/sweep; 2 processes, about a minute a run
#   STAGES=4 bash examples/convergence_sweep.sh                     # outputs/sweep_p4: as many stages as microbatches
#   STAGES=1 SCHEDULES="flush 2bw provisional@2 provisional@4" bash examples/convergence_sweep.sh    # @P: on P stages
#   REPLICAS=4 SCHEDULES="flush provisional reduced" bash examples/convergence_sweep.sh    # outputs/sweep_d4; 8 processes
#   MODEL=bert RATES="1e-4 1e-3" SEEDS=1 bash examples/convergence_sweep.sh
#
# Run again, it trains only what is missing. RATES, SEEDS, SCHEDULES (of flush, 2bw, feedback, provisional, uniform1,
# uniform2, ..., and reduced, which predicts from the gradients of all replicas), ITERATIONS, OUTPUT and EXTRA, further
# flags of training (EXTRA="--optimizer muon --muon-extra-scale-factor 0.2"), change the setting. Replicas share the
# batch, in smaller microbatches. docs/convergence.md has the results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

model="${MODEL:-gpt}" stages="${STAGES:-2}" replicas="${REPLICAS:-1}"
case "$model" in
    gpt) name=sweep prepare=prepare_data.sh settings=model.sh size=4 ;;
    bert) name=sweep_bert prepare=prepare_bert_data.sh settings=bert_model.sh size=8 ;;
    *)
        echo "MODEL is $model, which is neither gpt nor bert" >&2
        exit 1
        ;;
esac
[ "$stages" = 2 ] || name="${name}_p$stages"
[ "$replicas" = 1 ] || name="${name}_d$replicas"
[ $((size % replicas)) = 0 ] || { echo "REPLICAS is $replicas, which does not divide microbatches of $size" >&2 && exit 1; }
output="${OUTPUT:-outputs/$name}"
data="$output/data"

prepare_environment core
install_project
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
bash "examples/quickstart/$prepare" "$data"
# shellcheck disable=SC1090
. "examples/quickstart/$settings"

train() { # NAME[@STAGES] RATE SEED FLAGS...
    local run="$output/$1_lr$2_seed$3" rate="$2" seed="$3" stages="$stages"
    [[ "$1" != *@* ]] || stages="${1#*@}"
    shift 3
    [ ! -f "$run.jsonl" ] || return 0
    echo "== ${run##*/}"
    rm -f "$run.partial"
    python -m torch.distributed.run --standalone --nproc-per-node "$((stages * replicas))" "pretrain_$model.py" \
        --pipeline-model-parallel-size "$stages" "${model_args[@]}" "${training_args[@]}" "${data_args[@]}" \
        --micro-batch-size "$((size / replicas))" --lr "$rate" --min-lr "$(python -c "print($rate / 10)")" --lr-warmup-fraction 0.05 --seed "$seed" \
        --train-iters "${ITERATIONS:-400}" --eval-interval 25 --eval-iters 5 --log-interval 100 \
        --metrics-file "$run.partial" "$@" ${EXTRA:-} </dev/null
    mv "$run.partial" "$run.jsonl"
}

for seed in ${SEEDS:-1234 1 2}; do
    for rate in ${RATES:-1e-4 5e-4 1e-3 2e-3}; do
        for schedule in ${SCHEDULES:-flush 2bw provisional}; do
            case "${schedule%@*}" in
                provisional) flags=(--pipeline-schedule 2bw --2bw-provisional stage) ;;
                reduced) flags=(--pipeline-schedule 2bw --2bw-provisional stage --2bw-provisional-reduce) ;;
                uniform*)
                    flags=(--pipeline-schedule 2bw --2bw-provisional uniform)
                    name="${schedule%@*}"
                    flags+=(--2bw-provisional-microbatches "${name#uniform}")
                    ;;
                feedback) flags=(--pipeline-schedule 2bw --2bw-error-feedback) ;;
                *) flags=(--pipeline-schedule "${schedule%@*}") ;;
            esac
            train "$schedule" "$rate" "$seed" "${flags[@]}"
        done
    done
done

python tools/compare_runs.py "$output" --title "${model^^}, $stages stages, $replicas replicas, 4 microbatches"
