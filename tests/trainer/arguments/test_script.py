"""Flags read from shell scripts, against what bash itself passes on."""

import os
import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.trainer.arguments.script import read_script

MEGATRON = """#!/bin/bash
# Runs the "175B" parameter model
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-1}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=some/path # of the run
TP=2; PP=$((WORLD_SIZE / TP / 2))

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 96     # layers
    --hidden-size 12288
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size ${TP}
	--pipeline-model-parallel-size "$PP")
MODEL_PARALLEL_ARGS+=(--sequence-parallel)
DATA_ARGS=(
    --split '949,50,1'
    --save "$CHECKPOINT_PATH/a b"
)
OLD_ARGS="
    --lr 6.0e-5 \\
    --clip-grad 1.0
"
OLD_ARGS+=" --fp16"
torchrun ${DISTRIBUTED_ARGS[@]} folder/pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    "${MODEL_PARALLEL_ARGS[@]}" $OLD_ARGS \\
    "${DATA_ARGS[@]}" --seed=12 >log.txt 2>&1
"""


def by_bash(script: str, folder, **environment: str) -> list[str]:
    """What bash would give the program, after its name."""
    stub = folder / "torchrun"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" > "$RECORD"\n')
    stub.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record"), **environment}
    subprocess.run(["bash", "-c", script], env=variables, check=True, cwd=folder, timeout=60)
    argv = (folder / "record").read_text().split("\0")[:-1]
    start = next(index for index, word in enumerate(argv) if word.endswith("pretrain_gpt.py"))
    return argv[start + 1 :]


@pytest.mark.parametrize("environment", [{}, {"SLURM_NNODES": "4"}], ids=str)
def test_a_script_in_the_manner_of_megatron(tmp_path, environment):
    """Arrays, strings, arithmetic, comments, continued lines and redirections give the words that bash gives."""
    found = read_script(MEGATRON, environment=environment)
    assert found.program == "pretrain_gpt.py"
    assert list(found.argv) == by_bash(MEGATRON, tmp_path, **environment)
    assert "--pipeline-model-parallel-size" in found.argv and not found.notes


TOKENS = ["a", "--b", "$X", '"$X"', "${X}", "'$X'", '"c d"', "e'f'g", "$X$Y", "h$Y", "${Z:-i}", '"${A[@]}"', "${A[@]}",
          "$((2 * (N + 1)))", "j\\ k", "l=m", '"n\\"o"', '"$X p"', "${A[1]}",
          '"\\$X"', "$(( N / 2 ))", "''", 't"${A[@]}"u', "v#w",
          '"${A[1]}"', "${Z:-${X}}", '"${Z:-${A[0]}}"', "${Y:-${X}}q"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(argv=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=6), in_array=st.booleans())
def test_any_words_expand_as_in_bash(argv, in_array, tmp_path_factory):
    """Quoted and unquoted variables, arrays and arithmetic, in a command or through an array."""
    given_argv = " ".join(argv)
    start = "X=' 1  2'\nY=3\nN=4\nA=(p 'q r' s)\n"
    command = f"W=({given_argv})\ntorchrun pretrain_gpt.py \"${{W[@]}}\"" if in_array else (
        f"torchrun pretrain_gpt.py {given_argv}"
    )  # fmt: skip
    script = start + command + "\n"
    assert list(read_script(script, environment={}).argv) == by_bash(script, tmp_path_factory.mktemp("bash"))


def test_what_is_not_read_is_said():
    """Blocks and other files are not read, and named; variables that nobody sets stay as they stand."""
    script = """
    source other.sh
    if [ "$A" = b ]; then
        ARGS=(--num-layers 4)
        for x in 1 2; do echo $x; done
    fi
    setup() {
        ARGS=(--num-layers 5)
    }
    python -u pretrain_bert.py --num-layers 6 --data-path $DATA
    """
    found = read_script(script, environment={}, source="job.sh")
    assert found.program == "pretrain_bert.py" and found.argv == ("--num-layers", "6", "--data-path", "$DATA")
    assert len(found.notes) == 3
    assert all(note.startswith("job.sh: ") for note in found.notes)


def test_what_another_command_decides_is_not_assigned():
    """Behind && and || an assignment may not happen, so the note names it; what only sets variables decides nothing."""
    script = """
    SIZE=1; export A=2 && B=(3 "$A")
    [ -n "$X" ] && SIZE=4 || C+=(5
    6)
    A[0]=7
    torchrun pretrain_gpt.py "${B[@]}" $SIZE $A
    """
    found = read_script(script, environment={}, source="job.sh")
    assert found.argv == ("3", "2", "1", "2")
    assert [re.findall(r"line (\d+)\) assigns what is not read", note) for note in found.notes] == [["3"], ["3"], ["5"]]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("python train.py --a", "^job.sh runs no pretrain_.*; write the model's flags into a file and give @FILE"),
        ("if true; then\n  python pretrain_gpt.py\nfi", r"runs no pretrain_.*; job.sh: 'if true; then' \(line 1\)"),
        ('A=1\npython pretrain_gpt.py \\\n  "a\n', r"'\"a' \(line 3\) has a quote .* that does not end; .* @FILE"),
        ("A=1\nB=(a\n b\npython pretrain_gpt.py", r"'B=\(a' \(line 2\) has .* parenthesis that does not end; .* @FILE"),
        ("python pretrain_gpt.py $(a", r"\(line 1\) has .* parenthesis that does not end"),
    ],
)
def test_refusals(script, reason):
    """What cannot be read is named with its line, and with what takes the script's place."""
    with pytest.raises(ValueError, match=reason):
        read_script(script, environment={}, source="job.sh")
