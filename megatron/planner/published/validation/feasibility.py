"""Facts about memory: which configurations of a model ran, and which did not.

A file holds a list of facts:

    {"model": "96B", "t": 1, "p": 16, "d": 2, "micro_batch": 1, "recompute": "layer", "bpipe": false, "fits": true,
     "strength": "stated"}

`strength`: stated, or implied by what the authors did not list. The model's shape, batch, GPU and software are those of
the first entry, if possible a measured one, whose model has this name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from megatron.documents.faults import Boolean, place, sentence
from megatron.documents.reading import read_document
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.estimate import Verdict
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.planner import Planner
from megatron.planner.published.entries import Entry
from megatron.planner.published.model_names import Count


class Fact(BaseModel):
    """See the module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    t: Count
    p: Count
    d: Count
    micro_batch: Count
    recompute: RecomputeScope
    bpipe: Boolean = False
    fits: Boolean
    strength: str = "stated"

    def __str__(self) -> str:
        schedule = ", bpipe" if self.bpipe else ""
        return (
            f"{self.model} t={self.t} p={self.p} d={self.d} microbatch {self.micro_batch}, recompute "
            f"{self.recompute.value}{schedule}"
        )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A fact and what the memory model says about it."""

    fact: Fact
    verdict: Verdict

    @property
    def is_right(self) -> bool:
        return self.verdict.fits == self.fact.fits


def load_facts(path: str | Path) -> list[Fact]:
    """Raises ValueError naming the file and what is wrong."""
    try:
        return TypeAdapter(list[Fact]).validate_python(read_document(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = f"fact {place(*first['loc'])}" if first["loc"] else "the file"
        raise ValueError(f"{path}: {sentence(first, Fact.model_fields, where=where)}") from error


def judge_facts(facts: Sequence[Fact], entries: Sequence[Entry]) -> list[Judged]:
    """Raises ValueError for a model that no entry has, or a configuration that cannot be."""
    planners: dict[str, tuple[Planner, int]] = {}
    judged = []
    for fact in facts:
        if fact.model not in planners:
            planners[fact.model] = _planner(fact.model, entries)
        planner, batch = planners[fact.model]
        try:
            configuration = _configuration(fact, batch)
            memory = planner.memory(configuration)
        except ValueError as error:
            raise ValueError(f"fact {fact}: {error}") from error
        judged.append(Judged(fact=fact, verdict=planner.judge(configuration, memory)))
    return judged


def _configuration(fact: Fact, batch: int) -> Configuration:
    return Configuration(
        tensor=fact.t, pipeline=fact.p, data=fact.d, micro_batch_size=fact.micro_batch, global_batch_size=batch,
        recompute=fact.recompute, schedule="bpipe" if fact.bpipe else "flush", sequence_parallel=fact.t > 1,
        distributed_optimizer=True,
    )  # fmt: skip


def _planner(name: str, entries: Sequence[Entry]) -> tuple[Planner, int]:
    known = [entry for entry in entries if name in entry.model_name.split()]
    if not known:
        raise ValueError(f"no entry has a model called {name}; give entries that name its shape")
    entry = next((each for each in known if each.seconds is not None), known[0])  # those say the batch
    planner = Planner(entry.model, entry.cluster, software=entry.software)
    return planner, entry.configuration.global_batch_size
