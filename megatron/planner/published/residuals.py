"""Measured over predicted times of published runs, as files.

They come with the package for each calibration that has been validated: `residuals/NAME.json`, and one more for each
other file of runs, `residuals/NAME.FILE.json`. They are written by

    python tools/grid_search.py validate --entries measurements.json --write-residuals FILE

A run that the constants were fitted to is predicted by constants that were fitted again without this run.

The *kind* of a run decides how far off the prediction of its time may be. There are few kinds, since there are few
published runs. A kind consists of everything that the time model prices by a rule of its own: the processor, the
attention's kernels, the precision, the schedule, a network between nodes, and a shortage of memory. Each other setting
of a configuration, a model or a software that is not at its usual value (`extras`) makes another kind. So a feature
that was never compared does not borrow the interval of another feature.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatron.documents.faults import sentence
from megatron.documents.files import read_document, write_whole
from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.devices import DEVICES
from megatron.planner.job.software import Software
from megatron.planner.memory.architecture import Architecture

NO_PIPELINE = "one pipeline stage"
PRESSED = "slowed or borderline"
"""The name of runs under memory pressure, in the words of verdicts (job/estimate.py)."""
_OTHER_RATE = 0.05  # a GPU whose rates differ by so much from its data sheet's is another edition

_USUAL = {  # fields that are priced by arithmetic alone, or are part of the kind under another name
    Configuration: frozenset({
        "tensor", "pipeline", "data", "virtual", "micro_batch_size", "global_batch_size", "recompute", "schedule",
        "balance", "sequence_parallel", "distributed_optimizer", "rank_mapping", "layers", "provisional_microbatches",
        "provisional_reduce", "resident_stages", "host_update", "stash", "gathers_fetch",
    }),
    Software: frozenset({
        "element_bytes", "gradient_bytes", "flash_attention", "fuses_softmax", "fuses_gradient_accumulation",
        "overlaps_tensor", "overlaps_transfers", "splits_transfers", "flash_attention_2",
        "keeps_gradient_copies", "own_communicators", "sums_beside_gradients", "blocks_launches", "transformer_impl",
    }),
    Architecture: frozenset({
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
        "sequence_length", "vocabulary_size", "num_positions", "num_token_types", "tied_embeddings", "gated",
        "linear_biases", "qkv_bias", "norm_vectors", "qk_norm", "patch_elements", "class_token", "num_classes",
        "pooler", "masked_head", "binary_head", "hidden_dropout", "attention_dropout",
    }),
}  # fmt: skip

BESIDE = frozenset({
    "overlaps gradients", "overlaps weights", "overlaps in pieces", "overlaps experts", "cuda graphs", "fp8 weights",
})  # fmt: skip
"""Extras that run beside other work, or are left to the device. They change a prediction little, so runs with and
without them share an interval, provided that each of them was compared in some run (interval.py)."""
_WORDS = {"context": "context parallelism", "expert": "expert parallelism", "fp8": "FP8"}
"""Field -> a name that says more than the field's."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The kind of a run, which decides the interval of its time.

    Attributes:
        device: a family of GPUs, of any memory: "A100".
        attention: "flash attention" or "unfused attention".
        precision: "16 bits" or "32 bits".
        strategy: the schedule's name, or `NO_PIPELINE`.
        extras: other settings that are not at their usual values.
        several_nodes: whether its GPUs are on several nodes.
        under_pressure: whether the run barely fits in memory, or ranks are slowed by a shortage of memory.
    """

    device: str
    attention: str
    precision: str
    strategy: str
    extras: tuple[str, ...] = ()
    several_nodes: bool = False
    under_pressure: bool = False

    def __str__(self) -> str:
        where = "several nodes" if self.several_nodes else "one node"
        pressed = (PRESSED,) if self.under_pressure else ()
        return ", ".join((self.device, self.strategy, self.attention, *self.extras, self.precision, where, *pressed))


def kind_of(
    configuration: Configuration, model: Architecture, cluster: Cluster, software: Software, *, under_pressure: bool
) -> Kind:
    """The kind of a run."""
    used = software.of(configuration)
    return Kind(
        device=_family(cluster),
        attention="flash attention" if used.flash_attention else "unfused attention",
        precision=f"{8 * used.element_bytes} bits",
        strategy=_strategy(configuration),
        extras=tuple(word for each in (configuration, used, model) for word in _extras(each)),
        several_nodes=len(cluster.topology.nodes) > 1,
        under_pressure=under_pressure,
    )


def _family(cluster: Cluster) -> str:
    """The name of a GPU without its memory; the name says if its rates are not those of the data sheet."""
    name = re.sub(r"-\d+(?=-|$)", "", cluster.gpu)
    sheet, has = DEVICES.get(cluster.gpu), cluster.device
    if sheet is None:
        return name if cluster.is_cpu else f"{cluster.gpu} with rates of its own"
    rates = ("peak_teraflops", "memory_bandwidth", "link_bandwidth")
    pairs = ((getattr(has, rate), getattr(sheet, rate)) for rate in rates)
    is_other = any(abs(rate / usual - 1) > _OTHER_RATE for rate, usual in pairs)
    return f"{name} with rates of its own" if is_other else name


def _strategy(configuration: Configuration) -> str:
    preset = configuration.preset
    waits = preset.order in ("gpipe", "1f1b") and preset.policy.drains and preset.residency is None
    if configuration.pipeline == 1 and waits and not preset.balance:
        return NO_PIPELINE  # whatever the schedule, microbatches follow each other
    return f"{configuration.schedule}+balance" if configuration.balance else configuration.schedule


def _extras(settings: Configuration | Software | Architecture) -> list[str]:
    """Name the fields that are not in `_USUAL` and not at their default.

    The name of a value, if it has one, stands for its field. A text follows the field's name.
    """
    base = next(each for each in _USUAL if isinstance(settings, each))
    found = []
    for field in fields(base):
        value = getattr(settings, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name not in _USUAL[base] and value != default:
            name = _WORDS.get(field.name, field.name.replace("_", " "))
            found.append(f"{name} {value}" if isinstance(value, str) else getattr(value, "name", name))
    return found


_FOLDER = Path(__file__).parent / "residuals"


@dataclass(frozen=True, kw_only=True)
class Residual:
    """A published run. `ratio`: measured over predicted seconds of an iteration. `source`: its table or paper."""

    id: str
    source: str
    ratio: float
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """The residuals of one calibration.

    Attributes:
        calibration: the name of the calibration.
        constants: the constants that predicted the runs, to detect that others are in use.
        entries: the name of the file of measurements.
        command: the command that wrote the residuals.
        date: the day of writing, YYYY-MM-DD.
    """

    calibration: str
    constants: Mapping[str, float]
    entries: str
    command: str
    date: str
    runs: tuple[Residual, ...]

    def save(self, path: str | Path) -> None:
        """Write the residuals, one run per line, without the fields of a kind that have their default."""
        head = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "runs"}
        lines = ",\n  ".join(json.dumps(_plain(each)) for each in self.runs)
        text = json.dumps({**head, "constants": dict(self.constants)}, indent=1).removesuffix("\n}")
        write_whole(path, f'{text},\n "runs": [\n  {lines}\n ]\n}}\n')


@cache
def source_of(name: str) -> str:
    """The source of a run, from the name of its table: all tables of one paper or one software are one source."""
    return re.split(r"[,(\d]| Table| sec| README", name, maxsplit=1)[0].strip()


def _plain(run: Residual) -> dict:
    kind = {name: value for name, value in asdict(run.kind).items() if value}
    return {"id": run.id, "source": run.source, "ratio": run.ratio, "kind": kind}


@cache
def load_residuals(calibration: str) -> Residuals | None:
    """The residuals of a calibration by its name; None: it was never validated. Raises ValueError for a wrong file."""
    path = _FOLDER / f"{calibration}.json"
    return read_residuals(path) if path.is_file() else None


@cache
def load_others(calibration: str) -> tuple[Residuals, ...]:
    """The residuals of a calibration from other files of runs. Raises ValueError as `load_residuals`."""
    return tuple(read_residuals(path) for path in sorted(_FOLDER.glob(f"{calibration}.*.json")))


def read_residuals(path: str | Path) -> Residuals:
    """The residuals in a file. Raises ValueError naming the file and the fault."""
    try:
        return TypeAdapter(Residuals).validate_python(read_document(path))
    except ValidationError as error:
        raise ValueError(f"{path}: {sentence(error.errors(include_url=False)[0])}") from error
