"""Error messages for faults in users' files, each one sentence with the value, the reason and the remedy.

pydantic finds the faults. Its own messages have several lines and name Python types; here each fault becomes a
sentence, and an unknown key is answered with the nearest known one.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Annotated

from pydantic import BeforeValidator, Field, StrictBool
from pydantic_core import PydanticCustomError

_NEAR = 0.7  # of difflib's measure; seq_len and seq are 0.6, micro_bach and micro_batch 0.95
_REMEDIES = {
    "int": "give a whole number", "float": "give a number", "bool": "give true or false", "string": "give a text",
    "finite_number": "give a finite number", "number_not_boolean": "give a number", "text_not_number": "give a text",
    "greater_than_equal": "give {ge} or more", "greater_than": "give more than {gt}",
    "less_than_equal": "give {le} or less", "less_than": "give less than {lt}", "enum": "give one of these",
    "literal_error": "give one of these", "missing": "give it", "dict": "give an object", "mapping": "give an object",
    "model": "give an object", "dataclass": "give an object", "tuple": "give a list", "list": "give a list",
    "datetime": "give a date and a time", "too_short": "give one or more",
}  # fmt: skip
"""Remedies by pydantic's name of the fault, or by the name's first word."""


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("number_not_boolean", "a number is wanted, not a boolean")
    return value


def _name(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise PydanticCustomError("text_not_number", "a text or a whole number is wanted")
    return value


Number = BeforeValidator(_no_boolean)
"""Marks a number that must not be a boolean: `Annotated[int, Number]`. Without it pydantic accepts true as 1."""
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Boolean = StrictBool
"""The type of true and false. pydantic's `bool` would accept 1 and "yes", too."""
Name = Annotated[str, BeforeValidator(_name)]
"""The type of a text, or of a whole number that is converted to text."""


def shown(value: object) -> str:
    """A value as text for a sentence: one line, shortened if it is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown_key(key: object) -> str:
    """A key as text for a sentence, in quotes unless it is a plain word."""
    return key if isinstance(key, str) and key.replace("-", "_").isidentifier() else shown(key)


def place(*parts: object) -> str:
    """The place of a value, such as `config.micro_batch`; empty parts are left out."""
    return ".".join(shown_key(part) for part in parts if part != "")


def nearest(key: object, known: Collection[str]) -> str | None:
    """The known key nearest to an unknown `key`, or None if none is similar. Case and hyphens do not matter."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    found = get_close_matches(str(key).lower().replace("-", "_"), list(plain), n=1, cutoff=_NEAR)
    return plain[found[0]] if found else None


def unknown_key(where: str, value: object, near: str | None, known: Collection[str]) -> str:
    """The sentence on an unknown key at the place `where`. `near`: the nearest known key."""
    remedy = f"the nearest that is known is {near}" if near else f"known are {', '.join(sorted(known))}"
    return f"{where} is {shown(value)}, and there is no such key; {remedy}"


def refuse_unknown_keys(mapping: Mapping, known: Collection[str], *, within: str = "") -> None:
    """Raise ValueError for the first key of `mapping` that is not in `known`."""
    for key, value in mapping.items():
        if key not in known:
            raise ValueError(unknown_key(place(within, key), value, nearest(key, known), known))


def sentence(fault: Mapping, known: Collection[str] = (), *, where: str | None = None) -> str:
    """The sentence on a fault that pydantic found.

    Args:
        fault: an item of `ValidationError.errors()`.
        known: the known keys, for the sentence on an unknown key.
        where: the place of the fault; None: the place that pydantic reports.
    """
    kind, value = fault["type"], fault.get("input")
    if where is None:
        where = place(*fault["loc"]) or "the file"
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    if kind == "extra_forbidden":
        return unknown_key(where, value, nearest(fault["loc"][-1], known), known)
    if kind == "missing":
        return f"{where} is missing; give it"
    beginning = next((each for each in (kind, kind.partition("_")[0]) if each in _REMEDIES), None)
    remedy = _REMEDIES[beginning].format(**fault.get("ctx", {})) if beginning else "correct it"
    said = fault["msg"].partition("\n")[0].partition(" or instance")[0]
    return f"{where} is {shown(value)}: {said[:1].lower()}{said[1:]}; {remedy}"
