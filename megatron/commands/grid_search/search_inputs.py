"""The inputs of `search` and `sweep`: the model (flags, a script, a YAML file), the cluster, and the space of the
search.
"""

import argparse
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from megatron.commands.grid_search.model_config import add_configured_arguments, read_configured, refuse_several_models
from megatron.documents.command_line import add_flags
from megatron.documents.files import read_document
from megatron.documents.flag_types import count, counts, positive, tokens
from megatron.planner import DEVICES, Cluster, load_cluster
from megatron.planner.job.cluster import CLUSTERS, MOST, MOST_PRICE, make_cluster
from megatron.planner.search import RANK_MAPPINGS, SCOPES, offered
from megatron.planner.search.outcome import OBJECTIVES
from megatron.planner.search.space import schedules_on_device
from megatron.planner.time.calibration import DEFAULT_NAME, NAMES
from megatron.trainer.arguments import Platform
from megatron.trainer.arguments.script import read_script
from megatron.trainer.plan.command import SEARCHED, Job

_WITHOUT_ENGINE = frozenset({"V100-16", "V100-32", "RTX2080Ti", "GTX1080Ti", "cpu"})  # no Transformer Engine runs there
_PRECISION = {"V100-16": "fp16", "V100-32": "fp16", "RTX2080Ti": "fp16", "GTX1080Ti": "fp32", "cpu": "fp32"}
_NOT_SEARCHED = ("pretrain_t5.py", "pretrain_vision_classify.py", "finetune_bert.py")


def cluster_names() -> list[str]:
    """The names of the clusters that come with the package."""
    return sorted(path.stem for path in CLUSTERS.glob("*.yaml"))


@dataclass(frozen=True)
class ClusterInput:
    """The cluster of a search, and notes for the user on how inputs were read."""

    cluster: Cluster
    notes: tuple[str, ...]


def read_cluster(options: argparse.Namespace) -> ClusterInput:
    """Read --cluster; --nodes, --gpus-per-node, --network and --price-per-gpu-hour replace values of its file.

    If only some of a node's GPUs are used, they have the same share of the node's network. Raises ValueError for a
    wrong file.
    """
    for flag, number in (("--nodes", options.nodes), ("--gpus-per-node", options.gpus_per_node)):
        if number is not None and number > MOST:
            raise ValueError(f"{flag} {number} is more than any cluster has; give {MOST} or less")
    price = options.price_per_gpu_hour
    if price is not None and price > MOST_PRICE:
        raise ValueError(f"--price-per-gpu-hour {price:g} is more than any GPU costs; give {MOST_PRICE} or less")
    named = CLUSTERS / f"{options.cluster}.yaml"
    path = named if named.exists() else Path(options.cluster)
    if not options.cluster or not path.exists():
        raise ValueError(
            f"--cluster {options.cluster or repr('')} is neither a file nor a known cluster; give a file, or one of "
            f"{', '.join(cluster_names())}"
        )
    whole = cluster = load_cluster(path)
    changes: dict = {}
    network = options.network
    if options.nodes is not None:
        changes["nodes"] = options.nodes
    if options.gpus_per_node is not None:
        if isinstance(cluster.nodes, tuple) and options.nodes is None:
            raise ValueError(f"{path} lists its nodes one by one; give --nodes besides --gpus-per-node")
        changes["gpus_per_node"] = options.gpus_per_node
        if cluster.gpus_per_host is not None:  # fewer GPUs than a host has are a part of it
            changes["gpus_per_host"] = min(cluster.gpus_per_host, options.gpus_per_node)
        network = network or cluster.network_of(options.gpus_per_node)
    if network is not None:
        changes["bandwidth"] = {**cluster.bandwidth.model_dump(exclude_none=True), "between_nodes": network}
    if price is not None:
        changes["price_per_gpu_hour"] = price
    nodes = changes.get("nodes", 1)
    if nodes > 1 and cluster.bandwidth.between_nodes is None and options.network is None:
        raise ValueError(f"{path} says nothing of the network between {nodes} nodes; give --network, GB/s of a node")
    cluster = make_cluster({**cluster.model_dump(exclude_none=True), **changes}, _source(path, options))
    counts = dict.fromkeys(node.gpus for node in cluster.topology.nodes)
    if len(counts) > 1:
        raise ValueError(
            f"{path}: nodes have {' and '.join(map(str, counts))} GPUs, and a search needs equally many on each; give "
            "such nodes"
        )
    notes = [] if cluster.is_known else [
        f"{cluster.gpu} is not known, so its times are not validated; the search takes its data from the file, and "
        "assumes the efficiency of an A100, bfloat16 and Transformer Engine; --precision and --transformer-impl change "
        "the last two"
    ]  # fmt: skip
    return ClusterInput(cluster, (*notes, *_network_notes(whole, cluster, options)))


def _network_notes(whole: Cluster, cluster: Cluster, options: argparse.Namespace) -> Iterator[str]:
    """A note on the network of a part of each node of `whole`, if no flag sets it."""
    all_of_it, taken = whole.bandwidth.between_nodes, cluster.bandwidth.between_nodes
    if options.network is None and len(cluster.topology.nodes) > 1 and taken < all_of_it:
        of_node = max(node.gpus for node in whole.topology.nodes)
        yield (
            f"{options.gpus_per_node} of a node's {of_node} GPUs are assumed to have their share of its network, "
            f"{taken:.4g} of {all_of_it:g} GB/s; --network changes that"
        )


def _source(path: Path, options: argparse.Namespace) -> str:
    """The source of a cluster: its file, and the flags that change its nodes."""
    given = [("--nodes", options.nodes), ("--gpus-per-node", options.gpus_per_node)]
    flags = " ".join(f"{flag} {number}" for flag, number in given if number is not None)
    return f"{path} with {flags}" if flags else str(path)


@dataclass(frozen=True)
class ModelInput:
    """The job of a search, and notes for the user on how inputs were read."""

    job: Job
    notes: tuple[str, ...]


def add_model_arguments(model: argparse.ArgumentParser) -> None:
    """Add the flags that give a model, besides the flags of the training programs."""
    model.add_argument(
        "--model-script", metavar="FILE", help="shell script that runs a training program; it is read, not run"
    )
    model.add_argument("--model-yaml", metavar="FILE", help="flags by name: num_layers: 24; switches are true")
    add_configured_arguments(model)
    model.add_argument("--architecture", choices=("gpt", "bert"), help="default: that of the script's program, or gpt")


def read_argv(options: argparse.Namespace) -> tuple[list[str], str, list[str]]:
    """Return the flags of the training program, its architecture, and lines for the user.

    The flags come from the named model and from the command line. Raises ValueError if they do not go together.
    """
    argv, notes, architecture = [], [], options.architecture
    refuse_several_models(options)
    if options.model_script is not None:
        command = read_script(_text(options.model_script), environment=os.environ, source=options.model_script)
        argv, notes = [*command.argv], [*command.notes]
        architecture = architecture or _architecture_of(command.program, options.model_script)
    elif options.model_yaml is not None:
        argv, named = _argv_of_yaml(options.model_yaml)
        architecture = architecture or named
    elif (configured := read_configured(options, sequence_length=_sequence_length(options.flags))) is not None:
        argv, notes, architecture = configured.argv, configured.notes, architecture or configured.architecture
    return [*argv, *options.flags], architecture or "gpt", notes


def _sequence_length(flags: list[str]) -> int | None:
    """The value of --seq-length on the command line, in either spelling; None: not given, or no number."""
    words = [word for flag in flags for word in flag.split("=", 1)]
    said = [after for word, after in pairwise(words) if word == "--seq-length"]
    return int(said[-1]) if said and said[-1].isdecimal() else None


def read_model(options: argparse.Namespace, cluster: Cluster) -> ModelInput:
    """Read the named model and the flags of the training programs, which take precedence.

    Raises ValueError for an unknown model, or flags that the programs refuse.
    """
    argv, architecture, notes = read_argv(options)
    argv, assumed = _for_processor(argv, options, cluster)
    job = Job.read(argv, architecture=architecture, platform=platform_of(cluster))
    notes += assumed
    sizes = options.expert_parallel_sizes
    if sizes is not None and max(sizes) > 1 and not job.has_experts:
        raise ValueError(
            f"--expert-parallel-sizes {','.join(map(str, sizes))} share experts, and the model has none; give "
            "--num-experts, or leave --expert-parallel-sizes out"
        )
    if job.dropped:
        notes.append(f"these flags are ignored, since the search chooses their values: {', '.join(job.dropped)}")
    if job.accepted:
        notes.append(f"these flags change neither training nor prediction: {', '.join(job.accepted)}")
    if job.vocab_size is None and options.predict_from is None:
        whose, size = job.usual_vocabulary
        notes.append(f"no --vocab-size was given; the embedding is taken to have {whose} {size} words")
    return ModelInput(job, tuple(notes))


def platform_of(cluster: Cluster) -> Platform:
    """The platform of a cluster for the rules of flags: with all packages that run there."""
    return Platform(
        is_cuda=not cluster.is_cpu,
        has_transformer_engine=cluster.gpu not in _WITHOUT_ENGINE,
        has_apex=not cluster.is_cpu,
        has_deep_ep=not cluster.is_cpu,
    )


def _for_processor(argv: list[str], options: argparse.Namespace, cluster: Cluster) -> tuple[list[str], list[str]]:
    """Default flags of precision and layers for the processor, if the user gives none."""
    notes = []
    precision = options.precision
    if precision is None and not {"--fp16", "--bf16"} & set(argv):
        precision = _PRECISION.get(cluster.gpu, "bf16")
        notes.append(f"no precision was given; {precision} is used, since it suits {cluster.gpu}")
    if precision is not None:
        others = [word for word in ("--fp16", "--bf16") if word in argv and word != f"--{precision}"]
        if others:
            notes.append(f"--precision {precision} overrides {' and '.join(others)}")
        argv = [word for word in argv if word not in ("--fp16", "--bf16")]
        argv += [f"--{precision}"] if precision != "fp32" else []
    if "--bf16" in argv and not cluster.device.has_bfloat16:
        raise ValueError(f"{cluster.gpu} has no units for bfloat16; give --precision fp16")
    if cluster.gpu in _WITHOUT_ENGINE and "--transformer-impl" not in {word.partition("=")[0] for word in argv}:
        argv = [*argv, "--transformer-impl", "local"]
    return argv, notes


def _architecture_of(program: str, source: str) -> str:
    for architecture, (known, _) in SEARCHED.items():
        if program == known:
            return architecture
    if program in _NOT_SEARCHED:
        raise ValueError(
            f"{source} runs {program}, whose models are neither searched nor profiled; check and price one "
            "configuration with its --dry-run"
        )
    raise ValueError(
        f"{source} runs {program}, which is not among {', '.join(known for known, _ in SEARCHED.values())}; give "
        "--architecture gpt or bert"
    )


def _argv_of_yaml(path: str) -> tuple[list[str], str | None]:
    """The flags of a YAML file: by name, with - or _ between words, true for a switch; `architecture` is no flag."""
    document = read_document(path)
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a mapping of flags; write, for example, num_layers: 24")
    architecture = document.pop("architecture", None)
    if architecture not in (None, *SEARCHED):
        raise ValueError(f"{path}: architecture {architecture} is not known; write {' or '.join(SEARCHED)}")
    argv: list[str] = []
    for name, value in document.items():
        flag = "--" + str(name).replace("_", "-")
        if value is True:
            argv.append(flag)
        elif isinstance(value, (list, tuple)):
            argv += [flag, *map(str, value)]
        elif isinstance(value, (str, int, float)) and value is not False:
            argv += [flag, str(value)]
        else:
            raise ValueError(f"{path}: {name}: {value!r} is not a value of a flag; leave out switches that are off")
    return argv, architecture


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a shell script") from error


assert set(_PRECISION) <= {*DEVICES, "cpu"}


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that define a search: model, cluster and search space. A sweep has them, too."""
    model = parser.add_argument_group("model", "Besides these, every flag of pretrain_gpt.py or pretrain_bert.py.")
    add_model_arguments(model)
    model.add_argument("--precision", choices=("bf16", "fp16", "fp32"),
                       help="default: --bf16 or --fp16 among the flags, or what suits the processor")  # fmt: skip
    add_flags(
        parser.add_argument_group("cluster"),
        ("--cluster", str, "NAME|FILE", f"{', '.join(cluster_names())}, or a YAML file as docs/grid_search.md shows",
         {"required": True}),
        ("--nodes", count, "N", "number of nodes, in place of the file's"),
        ("--gpus-per-node", count, "N", "GPUs of a node, in place of the file's"),
        ("--price-per-gpu-hour", positive, "PRICE", "price of a GPU hour, in place of the file's"),
        ("--calibrated-on", str, "NAME|FILE",
         f"constants of the time model: {', '.join(NAMES)}, or a file of `calibrate`", {"default": DEFAULT_NAME}),
        ("--residuals", str, "FILE", "residuals from `validate`, for intervals with constants of your own"),
        ("--predict-from", str, "FILE", "a profile by tools/profile_model.py, in place of the time model"),
        ("--network", positive, "GB/s", "network of a node in one direction, in place of the file's"),
    )  # fmt: skip
    scopes, schedules = tuple(scope.value for scope in SCOPES), tuple(offered())
    divide, of_training = "default: all divisors", "default: the value among the flags of the training, or 1"
    add_flags(
        parser.add_argument_group("space", "What the search considers; lists are separated by commas."),
        ("--objective", str, None, "what the search minimizes (default: %(default)s)",
         {"choices": OBJECTIVES, "default": "time"}),
        ("--tokens", tokens, "N", "of the whole training, such as 300B or 300e9, for its days and (with a price) cost"),
        ("--simulate", count, "K", "simulate the K best configurations (default: 5, fewer for large programs)"),
        ("--max-safe-batch", count, "N", "largest batch in sequences to which microbatches may be accumulated "
         "(PipeDream-2BW, section 4.3); --global-batch-size is then the smallest"),
        ("--schedules", some_of(schedules), "LIST",
         f"default: {','.join(schedules_on_device())}, and l2l where the cluster says host_memory_gib"),
        ("--tensor", counts, "LIST", f"tensor parallel sizes; {divide}"),
        ("--pipeline", counts, "LIST", f"pipeline parallel sizes; {divide}"),
        ("--virtual", counts, "LIST", f"stages on each rank, for interleaved; {divide}"),
        ("--microbatches", counts, "LIST", f"microbatch sizes; {divide}"),
        ("--context-parallel-sizes", counts, "LIST", f"context parallel sizes; {of_training}"),
        ("--expert-parallel-sizes", counts, "LIST", f"expert parallel sizes; {of_training}"),
        ("--recompute", some_of(scopes), "LIST", f"default: {','.join(scopes)}", {"default": scopes}),
        ("--distributed-optimizer", str, None, "whether optimizer state is split over replicas (default: %(default)s)",
         {"choices": ("yes", "no", "both"), "default": "both"}),
        ("--rank-mappings", some_of(RANK_MAPPINGS), "LIST", f"default: {','.join(RANK_MAPPINGS)}",
         {"default": RANK_MAPPINGS}),
        ("--no-early-stopping", None, None, "consider also what recomputes or balances more than it needs"),
        ("--require-fused-softmax", None, None, "leave out configurations that cannot use Megatron's fused softmax"),
        ("--avoid-pressure", None, None, "leave out configurations that the allocator slows down for lack of memory"),
    )  # fmt: skip


def some_of(known: Collection[str], of_name: Callable[[str], object] = str) -> Callable[[str], tuple]:
    """A type for argparse: a list of some of the known names, separated by commas, each converted by `of_name`."""

    def chosen(text: str) -> tuple:
        names = dict.fromkeys(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return tuple(map(of_name, names))

    return chosen
