#!/usr/bin/env bash
# Measures on one GPU what could never be measured without one, the most valuable first:
#
#   bash benchmarks/gpu_hour.sh [--minutes N] [--out DIR] [--wheels DIR] [--rehearse] [further flags of the runner]
#
# It needs torch, and a folder of wheels (tools/pack_wheels.sh) for what a bare torch lacks; `wheels` in the checkout or
# beside it, unless --wheels says where. Nothing is fetched, and the Python's own packages serve where they are there.
# Called again it goes on where it stopped: `--minutes 9` three times is an hour cut into short commands. docs/gpu.md says
# what it measures; `--list` shows the parts. PYTHON names another interpreter than python3.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out=""
name=gpu_hour
wheels=()
flags=()
while [ $# -gt 0 ]; do
    case "$1" in
    --wheels) wheels=(--wheels "${2:?--wheels needs a folder}") && shift ;;
    --wheels=*) wheels=("$1") ;;
    --out) out="${2:?--out needs a folder}" && shift ;;
    --out=*) out="${1#--out=}" ;;
    --rehearse) flags+=("$1") && name=gpu_hour_rehearsal ;;
    *) flags+=("$1") ;;
    esac
    shift
done
out="${out:-$repository/outputs/$name}"
mkdir -p "$out"
python="${PYTHON:-python3}"
"$python" "$repository/benchmarks/gpu_hour/install.py" --target "$out/site" ${wheels[@]+"${wheels[@]}"}
export PYTHONPATH="$repository:$out/site${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.gpu_hour --out "$out" ${flags[@]+"${flags[@]}"}
