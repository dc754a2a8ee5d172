#!/usr/bin/env bash
# Packs wheels for a machine without a network that has torch: what the tests and benchmarks of GPUs need besides it.
#
#   bash tools/pack_wheels.sh DIR                            # where there is a network, for Python 3.11 and 3.12
#   bash tools/pack_wheels.sh DIR --python 3.12 --with scipy # for one, with a package that is left out (fits need scipy)
#   pip install --no-index --find-links DIR -r DIR/requirements.txt        # there: installs what is missing, and no torch
#
# The list is that of requirements/{runtime,core,test}.txt without `left_out`, and with what those packages need; for Linux
# on x86-64. `sha256sum --check manifest.txt` in DIR says whether all of it has arrived. DIR appears whole or not at all.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

most_bytes=$((64 * 1024 * 1024))
# torch is there, with CUDA, Triton and networkx. The others are for pictures, fits, partitions, texts and lint alone, and large.
left_out=(torch networkx matplotlib scipy sentencepiece tokenizers ruff)

refuse() {
    echo "pack_wheels.sh: error: $1" >&2
    exit "${2:-1}"
}

folder="" pythons=(3.11 3.12)
while [ $# -gt 0 ]; do
    case "$1" in
    --python) [ $# -gt 1 ] || refuse "--python needs a version, such as 3.12" 2; pythons=("$2"); shift ;;
    --with)
        [[ $# -gt 1 && " ${left_out[*]:1} " = *" $2 "* ]] || refuse "--with needs one of ${left_out[*]:1}" 2
        mapfile -t left_out < <(printf '%s\n' "${left_out[@]}" | grep -vx "$2")
        shift
        ;;
    -*) refuse "$1 is not an option; the usage is: bash tools/pack_wheels.sh DIR [--python 3.12] [--with scipy]" 2 ;;
    *) [ -z "$folder" ] || refuse "one folder is needed, and $folder and $1 are two" 2; folder="$1" ;;
    esac
    shift
done
[ -n "$folder" ] || refuse "a folder is needed: bash tools/pack_wheels.sh DIR" 2
[ ! -e "$folder" ] || refuse "$folder is there already; name another folder, or remove it first" 2

mkdir -p "$(dirname "$folder")"
packed="$(mktemp -d "$folder.XXXXXX")"
trap 'rm -rf "$packed" "$stub"' EXIT
stub="$(mktemp -d)"

# Lines of requirements without comments, less those whose package is left out.
sed -E 's/[[:space:]]*#.*//; /^$/d' "$repository"/requirements/{runtime,core,test}.txt |
    grep -vxE "($(IFS='|' && echo "${left_out[*]}"))([^[:alnum:]_.-].*)?" >"$packed/requirements.txt"

# An empty wheel stands for torch while pip decides on versions: else it would bring torch, and CUDA with it.
version="2.6+left.out" # the oldest that requirements/runtime.txt takes
information="torch-$version.dist-info"
mkdir "$stub/$information"
printf 'Metadata-Version: 2.1\nName: torch\nVersion: %s\n' "$version" >"$stub/$information/METADATA"
printf 'Wheel-Version: 1.0\nGenerator: pack_wheels\nRoot-Is-Purelib: true\nTag: py3-none-any\n' >"$stub/$information/WHEEL"
touch "$stub/$information/RECORD"
empty="torch-$version-py3-none-any.whl"
(cd "$stub" && python3 -m zipfile -c "$empty" "$information")

platforms=(--platform manylinux2014_x86_64)
for minor in $(seq 28 -1 18); do
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
done
for python in "${pythons[@]}"; do
    python3 -m pip download --quiet --no-input --disable-pip-version-check --only-binary=:all: --implementation cp \
        --python-version "$python" "${platforms[@]}" --find-links "$stub" --dest "$packed" \
        -r "$packed/requirements.txt" "torch==$version" || refuse "pip could not bring the wheels for Python $python"
    rm "$packed/$empty"
done

bytes="$(cat "$packed"/*.whl | wc -c)"
if [ "$bytes" -gt "$most_bytes" ]; then
    (cd "$packed" && wc -c -- *.whl | sort -n >&2)
    refuse "the wheels have $bytes bytes, more than $most_bytes; pack for one Python: --python 3.12"
fi
(cd "$packed" && sha256sum -- *.whl requirements.txt >manifest.txt)
chmod 755 "$packed"
mv -T "$packed" "$folder"
echo "$folder: $(find "$folder" -name '*.whl' | wc -l) wheels of $((bytes / 1024 / 1024)) MiB for Python ${pythons[*]}"
