#!/usr/bin/env bash
# Checks form and style (configuration: pyproject.toml); `bash tools/lint.sh --fix` mends what can be mended.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" = "--fix" ]; then
    ruff format .
    ruff check --fix .
else
    ruff format --check .
    ruff check .
fi
for script in $(git ls-files '*.sh'); do
    bash -n "$script"
done
