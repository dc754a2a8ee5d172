"""A model's partition as a file: `tools/partition.py MODEL --output P.json` writes it, `finetune.py --partition` reads
it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from megatron.capture.export import Captured
from megatron.capture.graph_file import stage_of_operators
from megatron.capture.signature import check_signature
from megatron.documents.writing import write_whole
from megatron.pipeline.program.edges import StageGraph

FORM = 1
LENGTHS = {
    "max_seq_length": ("text-to-text", "sequence-classification", "causal-lm", "question-answering"),
    "max_target_length": ("text-to-text",),
}
"""Flag of a length -> the tasks whose microbatches have it."""

_Count = Annotated[int, Field(ge=0)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StageCost:
    """Costs of a microbatch at a stage: milliseconds of a forward without gradients, of a recompute and backward, of
    a forward that saves and its backward; parameters that it owns, bytes that it saves for its backward.
    """

    forward_ms: _Number
    recompute_and_backward_ms: _Number
    plain_forward_ms: _Number
    plain_backward_ms: _Number
    parameters: _Count
    saved_bytes: _Count


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PartitionFile:
    """`signature`: of the captured graph. `sequence`: tokens of a sequence and of a target, as the flags say.
    `stage_of_node`: of the nodes of `graph_file`. `rank_of_stage`: the device of each stage.
    """

    form: int
    model: str
    task: str
    signature: str
    micro_batch_size: int
    sequence: tuple[int, int]
    dtype: str
    method: str
    objective_ms: _Number
    stage_of_node: dict[int, int]
    rank_of_stage: tuple[_Count, ...]
    stages: tuple[StageCost, ...]
    bandwidth_gigabytes_per_second: _Number
    memory_limit_bytes: _Number
    weight_bytes_per_parameter: _Number

    def work(self, graph: StageGraph) -> tuple[tuple[float, float], ...]:
        """Seconds of a forward and of a backward of each stage; those that others depend on recompute."""
        return tuple(
            (each.forward_ms / 1000, each.recompute_and_backward_ms / 1000)
            if graph.depth(stage)
            else (each.plain_forward_ms / 1000, each.plain_backward_ms / 1000)
            for stage, each in enumerate(self.stages)
        )

    def to_json(self) -> str:
        """One object; `device_of_node` is there for readers."""
        content: dict[str, Any] = asdict(self)
        content["device_of_node"] = {node: self.rank_of_stage[stage] for node, stage in self.stage_of_node.items()}
        return json.dumps(content, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, path: str = "the partition") -> PartitionFile:
        """Raises ValueError for what is no partition of a model."""
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
        """Raises ValueError as `from_json`, and for a file that cannot be read."""
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
        """Raises ValueError where it is not for this model, or not for these flags."""
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
        """What `cut` takes."""
        return stage_of_operators(captured, self.stage_of_node)
