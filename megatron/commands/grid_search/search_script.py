"""The best configuration as a script in the form of examples/cluster/models, which also starts by itself."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.documents.files import write_whole
from megatron.planner import Cluster, Configuration
from megatron.planner.job.configuration import SETTINGS
from megatron.planner.search import Kept
from megatron.planner.search.notes import delay_sentence
from megatron.planner.search.table import describe, expectation
from megatron.trainer.plan.command import SOURCES, Job

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "auto.csv"
"""The file with a script's program, if a program is faster than all named schedules."""
_CHECKOUT = f":-{ROOT}" if (ROOT / "examples").is_dir() else ":?has to name a checkout, whose examples/cluster start it"
_WIDTH = 116
_LAYERS = {"transformer_engine": "Transformer Engine's", "local": "megatron.core's own (local)"}
_MODEL_GROUPS = ("model", "precision")
_MADE_BY = "# It is a model's file in the form of examples/cluster/models, too"  # in the head of every script
_TOKENIZER = frozenset({"tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"})
_FILES = {"--vocab-file": "VOCAB_FILE", "--merge-file": "MERGE_FILE"}
_WITHOUT_MODEL = ("GPT2BPETokenizer", "NullTokenizer", "ByteLevelTokenizer")  # they need no TOKENIZER_MODEL of job.sh


def script_text(
    job: Job,
    kept: Kept,
    cluster: Cluster,
    *,
    command: str,
    others: Sequence[str] = (),
    topology: str = "topology.yaml",
    program: str | None = None,
    recomputes: bool = False,
) -> str:
    """The text of the script that runs a kept configuration.

    Args:
        command: the command that made the script, for its head.
        others: names of the other files in the script's folder, for its head.
        topology: the name of the topology file that an optimized mapping reads (`write_topology`).
        program: the name of the file with a program in place of the schedule; None: there is none.
        recomputes: the program recomputes microbatches.
    """
    choice, estimate = kept.choice, kept.estimate
    hosts = cluster.gpus_of_hosts
    gpu = str(cluster.device.memory_gib) if cluster.is_cpu or cluster.memory_gib else cluster.gpu
    launcher = "one_node.sh" if len(hosts) == 1 else "torchrun.sh"
    locations = _Locations.of(job, Path.cwd())
    environment = [*(["MASTER_ADDR=node0"] if len(hosts) > 1 else []), *locations.wanted]
    variables, chosen = _written(estimate.configuration)
    verdict = estimate.verdict
    memory = (
        f"{kept.memory_gib:.1f} of {cluster.device.memory_gib:g} GiB on the fullest, beside "
        f"{verdict.free_gib - verdict.spare_gib:.1f} GiB that no tensor gets (docs/planner.md)"
    )
    delayed = delay_sentence([kept])
    training = [*_others(job), *chosen, *locations.others, *_defaults(job)]
    if recomputes:
        training.append(("--pipeline-recompute",))
    if cluster.is_cpu and not any("--distributed-backend" in each for each in training):
        training.append(("--distributed-backend", "gloo"))  # else a dry run counts NCCL's buffers
    what = f"{program} in place of {describe(choice)}" if program else describe(choice)
    lines = [
        "#!/usr/bin/env bash",
        *_comment(f"{what}: {cluster.num_gpus} x {cluster.gpu}, {memory}."),
        *_comment(
            f"Expected: {estimate.seconds:.3g} s an iteration, {kept.sequences_per_second:.3g} sequences/s, "
            f"{100 * estimate.mfu:.1f}% MFU, with {_LAYERS[kept.software.transformer_impl]} layers and "
            f"{kept.software.attention} attention. Made by"
        ),
        *_comment(command, indent="    "),
        *(line for each in expectation(kept) for line in _comment(f"{each[:1].upper()}{each[1:]}.")),
        *(_comment(f"Note: {delayed}.") if delayed else []),
        *(line for each in others for line in _comment(f"Note: {each}.")),
        "#",
        "#   bash THIS_FILE --dry-run      # check everything, run nothing; needs torch, and no GPU",
        f"#   {' '.join([*environment, 'bash THIS_FILE'])}",
        "#",
        *_left_out(locations),
        f"{_MADE_BY}: the scripts in examples/cluster take its",
        "# path in place of a model's name, and job.sh there says what the environment may set.",
        'if [ "${BASH_SOURCE[0]}" = "$0" ]; then',
        '    this="$(realpath "$0")"',
        f'    cd "${{PIPELINE_HOME{_CHECKOUT}}}"',
        f'    exec bash examples/cluster/{launcher} "$this" "$@"',
        "fi",
        "# shellcheck disable=SC2034  # job.sh reads them",
        *_topology(choice.rank_mapping, topology),
        *([f'PIPELINE_PROGRAM="${{PIPELINE_PROGRAM:-$(dirname "${{BASH_SOURCE[0]}}")/{program}}}"'] if program else []),
        f"program={job.program} gpu={gpu} num_gpus={cluster.num_gpus}",
        *_assignments({"GPUS_PER_NODE": hosts[0], **variables}),
        *_array("model_args", job.argv_of(*_MODEL_GROUPS) + _vocabulary(job)),
        *_array("training_args", training),
        *locations.lines,
    ]
    return "\n".join(lines) + "\n"


def _written(configuration: Configuration) -> tuple[dict[str, object], list[tuple[str, ...]]]:
    """The variables of job.sh that describe a configuration, and the flags of its fields without a variable."""
    variables, flags = {}, []
    for name, setting in SETTINGS.items():
        if setting.variable is None:
            flags.append(configuration.argv(name))
        else:
            value = getattr(configuration, name)
            variables[setting.variable] = int(value) if isinstance(value, bool) else getattr(value, "value", value)
    return variables, [*filter(None, flags)]


def write_topology(path: Path, cluster: Cluster) -> None:
    """Write the cluster's nodes to a file, in which the user enters their host names."""
    topology = cluster.topology.model_dump(mode="json", exclude_none=True)
    write_whole(path, json.dumps(topology, indent=1) + "\n")


def remove_script(path: Path) -> None:
    """Remove the script and the program that an earlier search wrote at `path`. A file that no search wrote stays."""
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8")
        if _MADE_BY in text:
            path.unlink()
            if f"/{PROGRAM}}}" in text:
                (path.parent / PROGRAM).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Locations:
    """The locations of data, tokenizer and checkpoints, as far as the user gave them.

    Attributes:
        wanted: variables that the environment has to set for the rest.
        lines: lines of the script; variables of the environment take precedence.
        others: other flags of these groups: how often to save, what to log, what a document's end means.
        left_out: flags with a variable of the user's own script that nobody has set.
    """

    wanted: list[str]
    lines: list[str]
    others: list[tuple[str, ...]]
    left_out: list[tuple[str, ...]]

    @classmethod
    def of(cls, job: Job, folder: Path) -> "_Locations":
        """Sort the user's flags. Relative paths are seen from `folder`, since the script runs elsewhere."""
        given = {}
        for group in ("data", "tokenizer", "checkpoint", "logging"):
            given |= job.located_argv_of(group, folder)
        unknown = {dest: argv for dest, argv in given.items() if any(set("$`") & set(word) for word in argv)}
        known = {dest: argv for dest, argv in given.items() if dest not in unknown}
        lines, wanted = [], []

        def take(names: frozenset[str]) -> list[tuple[str, ...]]:
            return [known.pop(dest) for dest in [*known] if dest in names]

        sources = take(SOURCES)
        if job.has_data and not SOURCES & unknown.keys():
            lines += _array("data_args", sources)
        else:
            wanted.append("DATA_PATH=...")
        tokenizer_type = known.get("tokenizer_type", ("", ""))[1]
        tokenizer = take(_TOKENIZER)
        if job.has_tokenizer and not _TOKENIZER & unknown.keys():
            lines += _array("tokenizer_args", tokenizer)
        else:
            files = {argv[0]: argv[1] for argv in tokenizer}
            for flag, name in _FILES.items():
                if flag in files:
                    lines.append(_variable(name, files[flag]))
                elif job.architecture == "gpt" or flag == "--vocab-file":
                    wanted.append(f"{name}=...")
        if tokenizer_type and tokenizer_type not in _WITHOUT_MODEL:
            lines.append(_variable("TOKENIZER_TYPE", tokenizer_type))
        if "save" in known:
            save = known.pop("save")
            if known.get("load", save)[1:] == save[1:]:
                known.pop("load", None)  # job.sh loads what was saved
            lines.append(_variable("CHECKPOINTS", save[1]))
        else:
            wanted.append("CHECKPOINTS=...")
        said = {f"--{name}" for name in ("data-path", "save", *(flag.removeprefix("--") for flag in _FILES))}
        left_out = [argv for argv in unknown.values() if argv[0] not in said]
        return cls(wanted, lines, [*known.values()], left_out)


def _variable(name: str, value: str) -> str:
    return f'[ -n "${{{name}:-}}" ] || {name}={shlex.quote(value)}'


def _left_out(locations: _Locations) -> list[str]:
    if not locations.left_out:
        return []
    flags = "; ".join(" ".join(argv) for argv in locations.left_out)
    return [*_comment(f"Left out, as they need variables that the search did not know: {flags}"), "#"]


def _topology(rank_mapping: str, name: str) -> list[str]:
    """The lines on the topology file beside the script, which an optimized mapping needs."""
    if rank_mapping != "optimized":
        return []
    return [
        f"# {name} beside this file has to name the nodes by their host names (docs/placement.md).",
        f'TOPOLOGY="${{TOPOLOGY:-$(dirname "${{BASH_SOURCE[0]}}")/{name}}}"',
    ]


def _others(job: Job) -> list[tuple[str, ...]]:
    """The flags of the training that the user gave."""
    of_model = {*job.argv_of(*_MODEL_GROUPS), *_vocabulary(job)}
    return [argv for argv in job.argv_of() if argv not in of_model]


def _vocabulary(job: Job) -> list[tuple[str, ...]]:
    return [argv for argv in job.argv_of() if argv[0] in ("--vocab-size", "--vocab-extra-ids")]


def _defaults(job: Job) -> list[tuple[str, ...]]:
    """The flags that a run needs and that the user did not give, with values from the environment."""
    argv = []
    if not job.gives("train_iters") and not job.gives("train_samples"):
        argv.append(("--train-iters", '"${TRAIN_ITERS:-100000}"'))
    if not job.gives("lr"):
        argv.append(("--lr", '"${LR:-1e-4}"'))
    return argv


def _assignments(variables: dict) -> list[str]:
    """Lines of NAME="${NAME:-value}", so that the environment can replace values; as many in a line as fit."""
    return _filled([f'{name}="${{{name}:-{value}}}"' for name, value in variables.items()], indent="")


def _array(name: str, flags: Sequence[tuple[str, ...]]) -> list[str]:
    words = [" ".join(word if word.startswith('"${') else shlex.quote(word) for word in each) for each in flags]
    return [f"{name}=(", *_filled(words, indent="    "), ")"]


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
