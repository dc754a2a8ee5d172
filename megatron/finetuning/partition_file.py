"""The partition of a model into stages: its file, and the pipeline edges and schedule that it implies.

`tools/partition.py MODEL --output P.json` writes the file, `finetune.py --partition` reads it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import fx

from megatron.capture.blocks import Crossings
from megatron.capture.export import Captured, check_signature
from megatron.capture.graph_file import stage_of_operators
from megatron.documents import counted
from megatron.documents.faults import NonNegative
from megatron.documents.files import write_whole
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.lane_order import Residency
from megatron.pipeline.program.weight_policies import Ahead, WeightPolicy
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.schedules.order import frozen_chain

FORM = 1
KEPT_PARTITION = "partition.json"
"""The file of a checkpoint with the partition of its run."""
LENGTHS = {
    "max_seq_length": (
        "text-to-text", "sequence-classification", "causal-lm", "chat", "dpo", "masked-lm", "multiple-choice",
        "regression", "token-classification", "question-answering", "contrastive-image-text",
        "image-text-to-text",
    ),
    "max_target_length": ("text-to-text", "ctc", "speech-to-text"),
}  # fmt: skip
"""Flag of a sequence length -> the tasks whose microbatches have that length."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StageCost:
    """The costs of a microbatch at a stage; times in milliseconds.

    Attributes:
        forward_ms: time of a forward that saves no activations.
        recompute_and_backward_ms: time of the recompute and the backward after such a forward.
        plain_forward_ms, plain_backward_ms: times of a forward that saves activations, and of its backward.
        parameters: number of elements of the trained parameters that the stage owns.
        saved_bytes: bytes of the activations that a forward saves.
        frozen_bytes: bytes of the frozen parameters that the stage is the first on its device to use.
    """

    forward_ms: NonNegative
    recompute_and_backward_ms: NonNegative
    plain_forward_ms: NonNegative
    plain_backward_ms: NonNegative
    parameters: NonNegativeInt
    saved_bytes: NonNegativeInt
    frozen_bytes: NonNegativeInt = 0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PartitionFile:
    """The content of a partition's file.

    Attributes:
        signature: the signature of the captured graph.
        sequence: --max_seq_length and --max_target_length, in tokens.
        stage_of_node: number of a node in `graph_file` -> its stage.
        rank_of_stage: the device of each stage.
    """

    form: int
    model: str
    task: str
    signature: str
    micro_batch_size: int
    sequence: tuple[int, int]
    dtype: str
    method: str
    objective_ms: NonNegative
    stage_of_node: dict[int, int]
    rank_of_stage: tuple[NonNegativeInt, ...]
    stages: tuple[StageCost, ...]
    bandwidth_gigabytes_per_second: NonNegative
    memory_limit_bytes: NonNegative
    weight_bytes_per_parameter: NonNegative

    def work(self, graph: StageGraph) -> tuple[tuple[float, float], ...]:
        """Seconds of a forward and of a backward of each stage; a stage without outgoing edges does not recompute."""
        return tuple(
            (cost.forward_ms / 1000, cost.recompute_and_backward_ms / 1000)
            if graph.depth(stage)
            else (cost.plain_forward_ms / 1000, cost.plain_backward_ms / 1000)
            for stage, cost in enumerate(self.stages)
        )

    def to_json(self) -> str:
        """The partition as the text of a file. `device_of_node` is added only for human readers."""
        content: dict[str, Any] = asdict(self)
        content["device_of_node"] = {node: self.rank_of_stage[stage] for node, stage in self.stage_of_node.items()}
        return json.dumps(content, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, path: str = "the partition") -> PartitionFile:
        """Parse the text of a partition's file; `path` names it in errors. Raises ValueError for any other text."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON ({error}); make it with tools/partition.py MODEL --output") from error
        if not isinstance(content, Mapping) or "stage_of_node" not in content or "signature" not in content:
            raise ValueError(f"{path} is no partition of a model; make it with tools/partition.py MODEL --output")
        if content.get("form") != FORM:
            raise ValueError(f"{path} has form {content.get('form')}, and this version reads {FORM}; make it again")
        content = {name: value for name, value in content.items() if name != "device_of_node"}
        try:
            file = TypeAdapter(PartitionFile).validate_python(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path} is damaged at {where} ({first['msg']}); make it again") from error
        count = 1 + max(file.stage_of_node.values(), default=-1)
        if not (len(file.stages) == len(file.rank_of_stage) == count > 0):
            raise ValueError(
                f"{path} is damaged: its nodes have {count} stages, and it says the costs of {len(file.stages)} and "
                f"the ranks of {len(file.rank_of_stage)}; make it again"
            )
        return file

    @staticmethod
    def read(path: Path) -> PartitionFile:
        """Read a partition's file. Raises ValueError if it cannot be read, or is refused by `from_json`."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"--partition {path} cannot be read: {reason}; make it with tools/partition.py MODEL --output"
            ) from error
        return PartitionFile.from_json(text, str(path))

    def write(self, path: Path) -> None:
        write_whole(path, self.to_json())

    def check(self, captured: Captured, path: str, args: argparse.Namespace) -> None:
        """Check that the partition fits the model and the flags. Raises ValueError naming the first difference."""
        for flag, its, given in (
            ("task", self.task, args.task),
            ("per_device_train_batch_size", self.micro_batch_size, args.per_device_train_batch_size),
            ("max_seq_length", self.sequence[0], args.max_seq_length),
            ("max_target_length", self.sequence[1], args.max_target_length),
            ("dtype", self.dtype, args.dtype),
        ):
            if its != given and args.task in LENGTHS.get(flag, (args.task,)):
                raise ValueError(f"{path} is for --{flag} {its}, not {given}; give that, or make the partition again")
        check_signature(captured, self.signature, path)

    def stage_of_operators(self, captured: Captured) -> dict[int, int]:
        """Number of an operator -> its stage, in the form that `cut` takes."""
        return stage_of_operators(captured, self.stage_of_node)


def kept_partition(args: argparse.Namespace, captured: Captured) -> PartitionFile | None:
    """The partition of the checkpoint from which the run resumes; None if it does not fit the run.

    A new profile, and with it the stages, would differ from run to run. The settings of run and checkpoint are compared
    later.

    Raises ValueError if the file is damaged.
    """
    path = None if args.resumed_from is None else args.resumed_from / KEPT_PARTITION
    if path is None or not path.is_file():
        return None
    found = PartitionFile.read(path)
    try:
        found.check(captured, str(path), args)
    except ValueError:
        return None
    return found if len(set(found.rank_of_stage)) == args.devices // args.data_parallel_size else None


# --- the partition as a pipeline


def edges_of(captured: Captured, crossing: Crossings) -> tuple[Edge, ...]:
    """The edges of the pipeline in ascending order: one for each pair of stages between which tensors travel.

    Raises ValueError if the stages do not form a pipeline.
    """
    with_gradient: dict[tuple[int, int], bool] = {}
    for key, route in crossing.routes.items():
        is_parameter = isinstance(key, str)
        has_gradient = captured.parameters[key].requires_grad if is_parameter else key in crossing.differentiable
        for pair in route:
            with_gradient[pair] = with_gradient.get(pair, False) or has_gradient
    edges = tuple(Edge(*pair, gradient) for pair, gradient in sorted(with_gradient.items()))
    StageGraph.of(crossing.num_stages, edges)
    return edges


class EdgeBytes(NamedTuple):
    """The bytes that travel over an edge in a forward.

    Attributes:
        activations: bytes of the activations of one microbatch.
        parameters: bytes of shared parameters, sent once for each weight version that the owner's forwards use.
    """

    activations: int = 0
    parameters: int = 0

    def a_microbatch(self, num_microbatches: int, weights: WeightPolicy) -> float:
        """Bytes for each microbatch, averaged over a batch.

        With provisional steps the result is an upper bound, since each forward may use a weight version of its own.
        """
        num_values = num_microbatches if weights.ahead is Ahead.PROVISIONAL_STEP else 1
        return self.activations + self.parameters * num_values / num_microbatches


def bytes_of_edges(
    captured: Captured, crossing: Crossings, sizes: Mapping[sympy.Symbol, int]
) -> dict[tuple[int, int], EdgeBytes]:
    """(source, target) -> bytes of the edge. `sizes`: values for the symbolic dimensions of the captured graph."""
    found: dict[tuple[int, int], EdgeBytes] = {}
    for key, route in crossing.routes.items():
        for pair in route:
            activations, parameters = found.get(pair, EdgeBytes())
            if isinstance(key, str):
                parameters += captured.parameters[key].nbytes
            else:
                activations += _num_bytes(key, sizes)
            found[pair] = EdgeBytes(activations, parameters)
    return found


def schedule_of(
    name: str,
    edges: Sequence[Edge],
    partition: PartitionFile,
    *,
    recompute: bool,
    norm_decides: bool = False,
    predict: bool = False,
    provisional: bool = False,
    residency: Residency | None = None,
    tied: Mapping[str, Sequence[int]] = MappingProxyType({}),
    data_parallel: bool = False,
    freezes: bool = False,
) -> Schedule:
    """The schedule called `name` over the stages of a partition.

    Args:
        recompute: recompute activations; ftpipe always does, since its backwards use newer weights than its forwards.
        norm_decides: gradients are clipped by their norm.
        predict: ftpipe's forwards use predicted weights.
        provisional: ftpipe's forwards use the weights of provisional steps.
        residency: the residency of weights under l2l; None: another schedule.
        tied: name of a trained parameter -> the stages that have a copy of it (l2l).
        data_parallel: the pipeline has replicas.
        freezes: layers freeze during the run, so the first stages of a chain may have no backward, as under l2l.

    Raises ValueError for stages that the schedule cannot run, such as stages that do not form a chain under 2bw.
    """
    rank_of_stage, num_stages = partition.rank_of_stage, len(partition.rank_of_stage)
    graph = StageGraph.of(num_stages, edges)
    may_freeze = freezes or residency is not None
    frozen = [stage for stage in range(num_stages) if graph.is_forward_only(stage)]
    if frozen and not may_freeze:
        raise ValueError(
            f"each stage needs a backward, and nothing is trained in or before stage {' and '.join(map(str, frozen))}; "
            "make a partition with fewer stages, or train something in each, as with --target_modules all-linear"
        )
    num_frozen = len(frozen)
    chain = graph.is_chain or tuple(edges) == frozen_chain(num_stages, num_frozen)
    if residency is not None:
        num_ranks = len(set(rank_of_stage))
        if num_frozen > num_stages - num_ranks:
            raise ValueError(
                f"under l2l the last layer of each rank needs a backward, and on {num_ranks} ranks the first "
                f"{num_frozen} of {num_stages} layers have nothing to train; give each replica at most "
                f"{counted(num_stages - num_frozen, 'device')}, or train something in earlier layers"
            )
        for name, stages in tied.items():
            if len(tied) > 1 or tuple(stages) != (0, num_stages - 1):
                raise ValueError(
                    f"stages {' and '.join(map(str, stages))} share {name}, and under l2l only the first and the last "
                    "stage may share a parameter, and only one; choose another --pipeline_schedule"
                )
        return Schedule.preset(
            "l2l", num_stages=num_stages, num_virtual_stages=num_stages // num_ranks, residency=residency,
            tied_embeddings=bool(tied), norm_decides=norm_decides, data_parallel=data_parallel, num_frozen=num_frozen,
        )  # fmt: skip
    common = {"num_stages": num_stages, "edges": () if chain else tuple(edges), "rank_of_stage": rank_of_stage}
    common["data_parallel"] = data_parallel
    if name == "ftpipe":
        assert not (predict and provisional), "the command line excludes it"
        weights = "stale-predicted" if predict else "stale-provisional" if provisional else "stale"
        return Schedule(order="async", weights=weights, recompute=True, work=partition.work(graph), **common)
    if name in ("2bw", "pipedream"):
        if not chain:
            skips = " ".join(str(edge) for edge in edges if edge.target != edge.source + 1)
            raise ValueError(
                f"{name} runs stages that are a chain, and these have the edges {skips}; partition with "
                "--max-stages-per-device 1 --methods sequential, or choose ftpipe, flush or gpipe"
            )
        if len(set(rank_of_stage)) < num_stages:
            raise ValueError(
                f"{name} runs one stage on each device, and the partition has {num_stages} on "
                f"{len(set(rank_of_stage))}; partition with --max-stages-per-device 1, or choose ftpipe, flush or gpipe"
            )
    return Schedule.preset(name, recompute=recompute, norm_decides=norm_decides, num_frozen=num_frozen, **common)


def _num_bytes(node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> int:
    value = node.meta["val"]
    shape = (size if isinstance(size, int) else int(size.node.expr.subs(sizes)) for size in value.shape)
    return math.prod(shape) * value.dtype.itemsize
