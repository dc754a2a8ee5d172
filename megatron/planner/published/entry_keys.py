"""The keys of an entry: what is read, what is a remark, and a sentence for everything else.

A key that nobody reads would change nothing in silence, however much it meant for the run. So it is refused, with the
nearest one that is known: by its letters, by another framework's name for it, or in another part of the entry. Names
that mean the same are read (same_names.py).
"""

from collections.abc import Collection, Mapping

from pydantic import AliasChoices, BaseModel

from megatron.documents.faults import nearest, place, unknown_key
from megatron.planner.published.hardware import HardwareRecord
from megatron.planner.published.measured_times import MEASURED, TIMES
from megatron.planner.published.model_names import ModelRecord
from megatron.planner.published.same_names import SAME, in_small_words
from megatron.planner.published.settings import SettingsRecord

REMARKS = frozenset({"note", "comment", "about", "confidence", "provenance", "params_B"})
"""For the reader; in any part."""

_NAMES = {  # in other frameworks, in small letters with _: what they may mean here, if it is not said by SAME
    "batch_size": "global_batch", "between_nodes": "internode", "within_node": "intranode",
    "activation_checkpointing": "recompute", "gradient_checkpointing": "recompute",
    "iteration_time": "iteration_s", "step_time": "iteration_s",
    "tflops": "tflops_per_gpu", "teraflops": "tflops_per_gpu", "tflop/s": "tflops_per_gpu", "tflop_s": "tflops_per_gpu",
    "tokens_per_s": "tokens_per_s_per_gpu", "tokens/s": "tokens_per_s_per_gpu", "tps": "tokens_per_s_per_gpu",
    "experts": "num_experts", "num_local_experts": "num_experts", "num_moe_experts": "num_experts",
    "topk": "moe_router_topk", "head_size": "head_dim",
} | {name: key for names in SAME.values() for name, key in names.items()}  # fmt: skip


def keys_of(record: type[BaseModel]) -> frozenset[str]:
    """The keys that a record reads."""
    keys: set[str] = set()
    for name, field in record.model_fields.items():
        alias = field.validation_alias
        keys |= set(map(str, alias.choices)) if isinstance(alias, AliasChoices) else {name}
    return frozenset(keys)


_RECORDS = {"model": ModelRecord, "hardware": HardwareRecord, "config": SettingsRecord}
PARTS = {part: keys_of(record) for part, record in _RECORDS.items()}
_SYNONYMS = {
    part: [
        tuple(map(str, field.validation_alias.choices))
        for field in record.model_fields.values()
        if isinstance(field.validation_alias, AliasChoices)
    ]
    for part, record in _RECORDS.items()
}
"""By part: the names of what has several."""


def refuse_unknown(entry: Mapping, known: Collection[str]) -> None:
    """Raises ValueError for the first key that is neither read nor a remark; of `measured` only for one that is nearly
    the name of a time, since the others change no prediction.

    Args:
        known: the keys of an entry itself.
    """
    _refuse("", entry, {*known})
    for part, keys in PARTS.items():
        if isinstance(entry.get(part), Mapping):
            _refuse(part, entry[part], keys)
            _refuse_twice(part, entry[part])
    measured = entry.get("measured")
    for key, value in measured.items() if isinstance(measured, Mapping) else ():
        near = _known_as(key, MEASURED) or nearest(key, MEASURED)
        if key not in MEASURED and near in TIMES:
            raise ValueError(unknown_key(place("measured", key), value, f"measured.{near}", TIMES))


def unknown_measurements(measured: Mapping) -> list[str]:
    """Keys of `measured` that mean nothing here."""
    return [str(key) for key in measured if key not in MEASURED and key not in REMARKS]


def _refuse(part: str, mapping: Mapping, known: Collection[str]) -> None:
    for key, value in mapping.items():
        if key not in known and key not in REMARKS:
            raise ValueError(unknown_key(place(part, key), value, _near(part, key, known), known))


def _refuse_twice(part: str, mapping: Mapping) -> None:
    for names in _SYNONYMS[part]:
        given = [name for name in names if name in mapping]
        if len(given) > 1:
            raise ValueError(f"{place(part, given[0])} and {place(part, given[1])} say the same; give one of them")


def _near(part: str, key: object, known: Collection[str]) -> str | None:
    """The place of the key that may have been meant: here, or in another part."""
    others = {other: keys for other, keys in PARTS.items() if other != part}
    named = _known_as(key, {*known, *(each for keys in others.values() for each in keys)})
    here = named if named in known else nearest(key, known)
    if here is not None:
        return place(part, here)
    return next((place(other, named or key) for other, keys in others.items() if (named or key) in keys), None)


def _known_as(key: object, known: Collection[str]) -> str | None:
    name = _NAMES.get(in_small_words(key))
    return name if name in known else None
