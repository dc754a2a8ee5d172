"""The best configuration as a script in the form of examples/cluster/models, which also starts by itself."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.planner import Cluster
from megatron.planner.search import Kept
from megatron.planner.search.picture import describe
from megatron.planner.search.space import preset_of
from megatron.training.job import Job

ROOT = Path(__file__).resolve().parents[2]
_WIDTH = 116
_MODEL_GROUPS = ("model", "precision")
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)(?:\}|\b)")


def script_text(job: Job, kept: Kept, cluster: Cluster, *, command: str) -> str:
    """The script's text. `command`: that made it, for the head."""
    choice, estimate = kept.choice, kept.estimate
    preset, balance = preset_of(choice.schedule)
    nodes = cluster.topology.nodes
    gpu = str(cluster.device.memory_gib) if cluster.is_cpu or cluster.memory_gib else cluster.gpu
    launcher = "one_node.sh" if len(nodes) == 1 else "torchrun.sh"
    places = _Places.of(job, Path.cwd())
    environment = [*(["MASTER_ADDR=node0"] if len(nodes) > 1 else []), *places.wanted]
    variables = {
        "GPUS_PER_NODE": nodes[0].gpus, "TP": choice.tensor, "PP": choice.pipeline, "VP": choice.virtual,
        "MICRO_BATCH": choice.micro_batch_size, "GLOBAL_BATCH": choice.global_batch_size,
        "RECOMPUTE": choice.recompute.value, "SCHEDULE": preset, "BALANCE": int(balance),
        "SEQUENCE_PARALLEL": int(estimate.configuration.sequence_parallel),
        "DISTRIBUTED_OPTIMIZER": int(choice.distributed_optimizer), "RANK_MAPPING": choice.rank_mapping,
    }  # fmt: skip
    memory = f"{kept.memory_gib:.1f} of {cluster.device.memory_gib:g} GiB on the fullest"
    training = [*_others(job), *places.others, *_defaults(job)]
    lines = [
        "#!/usr/bin/env bash",
        *_comment(f"{describe(choice)}: {cluster.num_gpus} x {cluster.gpu}, {memory}."),
        *_comment(
            f"Expected: {estimate.seconds:.3g} s an iteration, {kept.sequences_per_second:.3g} sequences/s, "
            f"{100 * estimate.mfu:.1f}% MFU. Made by"
        ),
        *_comment(command, indent="    "),
        "#",
        "#   bash THIS_FILE --dry-run      # anywhere: check everything, run nothing",
        f"#   {' '.join([*environment, 'bash THIS_FILE'])}",
        "#",
        "# It is a model's file in the form of examples/cluster/models, too: the scripts in examples/cluster take its",
        "# path in place of a model's name, and job.sh there says what the environment may set.",
        'if [ "${BASH_SOURCE[0]}" = "$0" ]; then',
        '    this="$(realpath "$0")"',
        f'    cd "${{PIPELINE_HOME:-{ROOT}}}"',
        f'    exec bash examples/cluster/{launcher} "$this" "$@"',
        "fi",
        "# shellcheck disable=SC2034  # job.sh reads them",
        *_topology(choice.rank_mapping),
        f"program={job.program} gpu={gpu} num_gpus={cluster.num_gpus}",
        *_assignments(variables),
        *_array("model_args", job.words_of(*_MODEL_GROUPS) + _vocabulary(job)),
        *_array("training_args", training),
        *places.lines,
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Places:
    """Where data, tokenizer and checkpoints are, as far as the user said so.

    Attributes:
        wanted: variables that the environment has to set for the rest.
        lines: of the script; what the environment sets goes before them.
        others: flags that say something else: how often to save, what to log, what a document's end means.
    """

    wanted: list[str]
    lines: list[str]
    others: list[tuple[str, ...]]

    @classmethod
    def of(cls, job: Job, folder: Path) -> "_Places":
        """Relative paths of the user's are seen from `folder`, since the script runs elsewhere."""
        wanted, lines = [], []
        data, tokenizer, checkpoint, logging = (
            job.placed_words_of(group, folder) for group in ("data", "tokenizer", "checkpoint", "logging")
        )
        others = [*checkpoint.values(), *logging.values()]
        if job.has_data:
            lines += _array("data_args", list(data.values()))
        else:
            wanted.append("DATA_PATH=...")
            others += data.values()
        if job.has_tokenizer:
            lines += _array("tokenizer_args", list(tokenizer.values()))
        else:
            wanted += ["VOCAB_FILE=...", *(["MERGE_FILE=..."] if job.architecture == "gpt" else [])]
        save = checkpoint.get("save")
        if save is None:
            wanted.append("CHECKPOINTS=...")
        else:
            # Loaded is what was saved, unless the user said otherwise; job.sh writes both flags.
            same = [save, *(words for dest, words in checkpoint.items() if dest == "load" and words[1:] == save[1:])]
            others = [words for words in others if words not in same]
            lines.append(f'[ -n "${{CHECKPOINTS:-}}" ] || CHECKPOINTS={_quoted(save[1])}')
        named = dict.fromkeys(_REFERENCE.findall(" ".join([*lines, *(word for words in others for word in words)])))
        wanted += [f"{name}=..." for name in named if name != "CHECKPOINTS"]
        return cls(wanted, lines, others)


def _topology(rank_mapping: str) -> list[str]:
    """The file that an optimized mapping needs: beside the script."""
    if rank_mapping != "optimized":
        return []
    return [
        "# topology.yaml beside this file has to name the nodes by their host names (docs/placement.md).",
        'TOPOLOGY="${TOPOLOGY:-$(dirname "${BASH_SOURCE[0]}")/topology.yaml}"',
    ]


def _others(job: Job) -> list[tuple[str, ...]]:
    """The flags of the training that the user gave."""
    of_model = {*job.words_of(*_MODEL_GROUPS), *_vocabulary(job)}
    return [words for words in job.words_of() if words not in of_model]


def _vocabulary(job: Job) -> list[tuple[str, ...]]:
    return [words for words in job.words_of() if words[0] in ("--vocab-size", "--vocab-extra-ids")]


def _defaults(job: Job) -> list[tuple[str, ...]]:
    """What a run cannot do without, from the environment where the user did not say it."""
    words = []
    if not job.gives("train_iters") and not job.gives("train_samples"):
        words.append(("--train-iters", '"${TRAIN_ITERS:-100000}"'))
    if not job.gives("lr"):
        words.append(("--lr", '"${LR:-1e-4}"'))
    return words


def _assignments(variables: dict) -> list[str]:
    """NAME="${NAME:-value}", as the environment may say otherwise; as many in a line as fit."""
    return _filled([f'{name}="${{{name}:-{value}}}"' for name, value in variables.items()], indent="")


def _array(name: str, flags: Sequence[tuple[str, ...]]) -> list[str]:
    words = [" ".join(word if word.startswith('"${') else _quoted(word) for word in each) for each in flags]
    return [f"{name}=(", *_filled(words, indent="    "), ")"]


def _quoted(word: str) -> str:
    """As a word of the script. A variable in it, which the user's own script had and nobody has set, is looked up when
    the script runs, and stays as it is if nobody has set it then: a dry run needs no paths."""
    if not _REFERENCE.search(word):
        return shlex.quote(word)
    text, end = "", 0
    for found in _REFERENCE.finditer(word):
        name = found.group(1)
        text += _escaped(word[end : found.start()]) + f"${{{name}:-\\${name}}}"
        end = found.end()
    return f'"{text}{_escaped(word[end:])}"'


def _escaped(text: str) -> str:
    """For use between double quotes."""
    return re.sub(r'(["$`\\])', r"\\\1", text)


def _filled(words: Sequence[str], *, indent: str) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent}{word}")
    return lines


def _comment(text: str, *, indent: str = "") -> list[str]:
    return [f"# {line}" for line in _filled(text.split(" "), indent=indent)]
