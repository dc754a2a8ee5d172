"""Flags from a YAML file."""

import pytest

from megatron.finetuning.arguments import parse_args

FILE = """\
# a run
model-name-or-path: m
task: causal-lm
train_file: t.jsonl
validation_file: v.jsonl
output_dir: o
learning_rate: 1e-4
max_steps: -1
source_prefix: "-- "
eval_strategy: no
save_strategy: epoch
bf16: yes
do_train: true
no_group_texts: false
gradient_checkpointing: true
resume_from_checkpoint: true
save_total_limit: null
report_to: [tensorboard]
"""


def written(folder, text=FILE):
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("how", ["first", "flag", "words"])
def test_keys_are_flags(tmp_path, how):
    """The same arguments as by words; the command line has the last word, and a note says which file it was."""
    path = written(tmp_path)
    if how == "words":
        (tmp_path / "words").write_text("--config\n" + path + "\n")
        words = [f"@{tmp_path / 'words'}"]
    else:
        words = [path] if how == "first" else [f"--config={path}"]
    args = parse_args([*words, "--learning_rate", "1e-5", "--bf16", "false", "--report_to", "none"])
    flags = "--model_name_or_path m --task causal-lm --train_file t.jsonl --validation_file v.jsonl --output_dir o"
    flags += " --learning_rate 1e-5 --eval_strategy no --save_strategy epoch --do_train --gradient_checkpointing"
    expected = parse_args([*flags.split(), "--resume_from_checkpoint"])
    assert args.notes == [f"flags of {path}, and over them those of the command line"]
    args.config, args.notes, expected.source_prefix = None, [], "-- "
    assert args == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "learning_rte: 1e-4\n",
            "learning_rte is '1e-4', and there is no such key; the nearest that is known is learning",
        ),
        ("config: other.yaml\n", "config is 'other.yaml', and there is no such key"),
        ("learning_rate: [1, 2]\n", r"learning_rate is \[1, 2\], a list; give one value"),
        ("learning_rate: true\n", "learning_rate is True, a boolean; give one value"),
        ("optim: {name: adam}\n", r"optim is \{'name': 'adam'\}, a table; give one value"),
        ("learning-rate: 1\nlearning_rate: 2\n", "learning_rate is given in both spellings; give it once"),
        ("- learning_rate\n", "is no table of flags; give lines such as learning_rate: 1e-4"),
        ("learning_rate: fast\n", "argument --learning_rate.*: invalid number value: 'fast'"),
        ("bf16: perhaps\n", "'perhaps' is neither true nor false"),
    ],
)
def test_what_a_file_cannot_say(tmp_path, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_args([written(tmp_path, text), "--model_name_or_path", "m", "--task", "causal-lm"])


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml cannot be read .*; give a YAML or JSON file"):
        parse_args([str(tmp_path / "none.yaml")])
