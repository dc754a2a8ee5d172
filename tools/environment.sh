# Sourced by tests/run.sh and examples/quickstart.sh: a Python environment with the project's requirements.
#
#   prepare_environment core test   # requirements/{pinned,runtime,core,test}.txt are met afterwards
#   PINNED=FILE                     # in the environment: FILE takes the place of requirements/pinned.txt
#   install_project                 # `import megatron.pipeline` works anywhere in that environment
#   $OUTPUT                         # is absolute: a relative one counts from where the caller, who has come here by cd, stood
#
# Uses the active virtual (or conda) environment; if none is active, the repository's own .venv, made on first use.
# What is there already is not installed again, and then no network is needed.

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ -n "${OUTPUT:-}" && "$OUTPUT" != /* ]]; then
    OUTPUT="${OLDPWD:-$PWD}/$OUTPUT"
fi

in_environment() {
    [ -n "${CONDA_PREFIX:-}" ] || "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null
}

activate_environment() {
    local python
    if python="$(command -v python)" && in_environment "$python"; then
        return
    fi
    if [ ! -x "$repository/.venv/bin/python" ] || ! "$repository/.venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(command -v python3 || command -v python)" || {
            echo "No Python found: install Python 3.10 or newer." >&2
            return 1
        }
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            echo "$python is $("$python" --version), but Python 3.10 or newer is needed." >&2
            return 1
        }
        echo "Making a virtual environment in .venv"
        rm -rf "$repository/.venv"
        "$python" -m venv "$repository/.venv" || {
            echo "$python cannot make virtual environments: install its venv module (Debian: python3-venv)." >&2
            return 1
        }
    fi
    # shellcheck disable=SC1091
    . "$repository/.venv/bin/activate"
}

prepare_environment() {
    activate_environment || return 1
    # Pinned first: else pip fetches the newest torch, with all of CUDA, before it sees the other requirement.
    local name missing options=()
    local files=("${PINNED:-$repository/requirements/pinned.txt}" "$repository/requirements/runtime.txt")
    for name in "$@"; do
        files+=("$repository/requirements/$name.txt")
    done
    missing="$(python "$repository/tools/environment.py" "${files[@]}")" || return 1
    [ -z "$missing" ] && return
    echo "Installing: $(echo "$missing" | paste -sd' ')"
    for name in "${files[@]}"; do
        options+=(-r "$name")
    done
    if ! python -m pip install --no-input --disable-pip-version-check "${options[@]}"; then
        echo >&2
        echo "pip could not install these requirements; they are still missing (is there a network?):" >&2
        python "$repository/tools/environment.py" "${files[@]}" | sed 's/^/  /' >&2
        return 1
    fi
}

install_project() {
    local where='import megatron.pipeline as package; print(package.__path__[0])'
    [ "$(cd / && python -c "$where" 2>/dev/null)" = "$repository/megatron/pipeline" ] && return
    echo "Installing the project from $repository"
    # Built with the setuptools that torch brings: pip would fetch a copy of its own.
    python -m pip install --no-input --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable "$repository"
}
