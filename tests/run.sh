#!/usr/bin/env bash
# Runs the tests:  bash tests/run.sh [--fast | --full] [further arguments of pytest]
#
# Without either: the selection that takes 10 to 30 minutes on 2 cores, by their speed, which is every test not marked `full`.
# With --fast: of these the rooms without torch, and one real run: about four minutes. With --full: every test.
# Uses the active virtual environment, else .venv, and installs only what it lacks.
# Where there is a GPU, the tests that need none run first, with the GPUs hidden, then those marked `gpu`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

# A test waits for processes that start and for ranks in turn, so two processes do not keep two cores busy; three do. They
# share the usual selection, file by file (tests/conftest.py: which files stay together; tests/turns.py: who runs alone);
# `-n 0`: one process does all.
share=(-n 3 --dist loadfile --no-loadscope-reorder)
selection="not full"
name="the usual selection (everything: bash tests/run.sh --full)"
rooms=()
needed=(core test tensorboard tokenizers metis parquet datasets digits peft)
if [ "${1:-}" = "--fast" ]; then
    shift
    rooms=(--ignore tests/planner/memory/test_parameters.py --ignore tests/planner/memory/test_hosted.py
        tests/test_imports.py tests/pipeline/program tests/pipeline/schedules tests/pipeline/check tests/pipeline/simulate tests/pipeline/synthesis
        tests/pipeline/placement tests/planner tests/partition tests/trainer/run/test_loop.py::test_parallel_degrees_together)
    name="the rooms without torch and one real run"
elif [ "${1:-}" = "--full" ]; then
    shift
    needed+=(triton)
    share=() # jobs of eight ranks, and hours of memory and time that are watched
    selection="full or not full"
    name="all tests"
fi

prepare_environment "${needed[@]}"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # jobs start hundreds of processes, which need not compile the sources each

echo "Running $name with $(command -v python)"
if ! nvidia-smi -L >/dev/null 2>&1; then
    exec python -m pytest "${share[@]}" -m "$selection" "${rooms[@]}" "$@" </dev/null
fi
status=0
CUDA_VISIBLE_DEVICES="" python -m pytest "${share[@]}" -m "($selection) and not gpu" "${rooms[@]}" "$@" </dev/null || status=$?
python -m pytest -m "($selection) and gpu" "${rooms[@]}" "$@" </dev/null || [ $? -eq 5 ] || status=$? # 5: the arguments name no such test
exit "$status"
