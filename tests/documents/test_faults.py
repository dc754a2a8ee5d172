"""Faults of a file are told in one sentence each: value, reason, remedy."""

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.documents.faults import Boolean, Name, Number, nearest, refuse_unknown_keys, sentence, shown
from tests.draws import draws


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")

    count: Annotated[int, Number, Field(ge=1, le=9)] = 1
    seconds: Annotated[float, Number, Field(gt=0, allow_inf_nan=False)] = 1.0
    is_on: Boolean = False
    name: Name = ""
    kind: Literal["a", "b"] = "a"
    parts: dict[str, int] = {}


def _told(document: object) -> str:
    with pytest.raises(ValidationError) as refusal:
        _Record.model_validate(document)
    return sentence(refusal.value.errors(include_url=False)[0], _Record.model_fields)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"count": True}, "count is True: a number is wanted, not a boolean; give a number"),
        ({"count": 0}, "count is 0: input should be greater than or equal to 1; give 1 or more"),
        ({"count": 10}, "count is 10: input should be less than or equal to 9; give 9 or less"),
        ({"count": 1.5}, "count is 1.5: input should be a valid integer, got a number with a fractional part; give a "
         "whole number"),
        ({"seconds": 0}, "seconds is 0: input should be greater than 0; give more than 0"),
        ({"seconds": float("inf")}, "seconds is inf: input should be a finite number; give a finite number"),
        ({"is_on": 1}, "is_on is 1: input should be a valid boolean; give true or false"),
        ({"name": [1]}, "name is [1]: a text or a whole number is wanted; give a text"),
        ({"name": False}, "name is False: a text or a whole number is wanted; give a text"),
        ({"kind": "c"}, "kind is 'c': input should be 'a' or 'b'; give one of these"),
        ({"parts": 3}, "parts is 3: input should be a valid dictionary; give an object"),
        ({"parts": {"x": "y"}}, "parts.x is 'y': input should be a valid integer, unable to parse string as an "
         "integer; give a whole number"),
        ({"cuont": 3}, "cuont is 3, and there is no such key; the nearest that is known is count"),
        ({"wrong\nkey": 3}, "'wrong\\nkey' is 3, and there is no such key; known are count, is_on, kind, name, parts, "
         "seconds"),
        (7, "the file is 7: input should be a valid dictionary; give an object"),
    ],
)  # fmt: skip
def test_a_fault_is_a_sentence(document, told):
    assert _told(document) == told


def test_what_is_right_is_taken():
    """A whole number is a name, a text a number, an integer a number of seconds."""
    record = _Record.model_validate({"count": "3", "seconds": 2, "is_on": True, "name": 17})
    assert (record.count, record.seconds, record.is_on, record.name) == (3, 2.0, True, "17")


@draws(40)
@given(st.dictionaries(st.text(max_size=8), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda each: st.lists(each, max_size=3)
), max_size=4))  # fmt: skip
def test_any_document_is_read_or_told_in_one_line(document):
    try:
        _Record.model_validate(document)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            told = sentence(fault, _Record.model_fields)
            assert "; " in told and "\n" not in told and "pydantic" not in told


@pytest.mark.parametrize(
    ("key", "near"), [("micro-batch", "micro_batch"), ("MICRO_BACH", "micro_batch"), ("seq", None), (3, None)]
)
def test_the_nearest_key(key, near):
    assert nearest(key, ("micro_batch", "global_batch", "recompute")) == near


def test_unknown_keys_are_refused_by_their_place():
    refuse_unknown_keys({"a": 1}, ("a", "b"))
    with pytest.raises(ValueError, match=r"^part.c is 2, and there is no such key; known are a, b$"):
        refuse_unknown_keys({"a": 1, "c": 2}, ("a", "b"), within="part")


def test_values_are_shown_on_one_short_line():
    assert shown("a\nb") == "'a\\nb'" and len(shown("x" * 1000)) == 60
    assert shown(10**5000) == "a number of more than 38 digits"
