"""One table says what the words of a program mean, and nobody keeps a second one."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.pipeline.program.instruction import (
    AWAITS_REDUCTIONS,
    BEGINS_BACKWARD,
    BUSY,
    COMPUTATIONS,
    ENDS_BACKWARD,
    HOST_WORDS,
    MOVES,
    OWN_UPDATES,
    RECEIVES,
    REDUCTIONS,
    SENDS,
    STASH_WORDS,
    SWAPS,
    UPDATES,
    WORDS,
    Kind,
    Lane,
    Subject,
)
from megatron.pipeline.simulate.costs import Costs

ROOT = Path(__file__).resolve().parents[3]

HOLDERS = {  # files that have to name several words in one table, and why
    "megatron/pipeline/program/instruction.py": "the table",
    "megatron/pipeline/program/csv_text.py": "the words that torch has, too",
    "megatron/trainer/changes/times.py": "the computations of which layers' times are learned",
    "megatron/pipeline/synthesis/problem.py": "the computations of which a made program consists",
}


def test_every_word_has_a_row():
    """The table is complete, and every word is in one lane, about one subject."""
    assert set(WORDS) == set(Kind)
    assert set(Kind) == COMPUTATIONS | SENDS | RECEIVES | MOVES | UPDATES | STASH_WORDS
    assert OWN_UPDATES == BUSY - COMPUTATIONS
    assert UPDATES - OWN_UPDATES == REDUCTIONS | (HOST_WORDS - STASH_WORDS)
    assert {Kind.OFFLOAD, Kind.RELOAD} | SWAPS == STASH_WORDS < HOST_WORDS
    assert {Kind.SWAP_OUT, Kind.SWAP_IN} == SWAPS
    assert not REDUCTIONS & HOST_WORDS
    assert {Kind.STEP, Kind.VALIDATE, Kind.ROLLBACK, Kind.HOLD, Kind.PREDICT} == OWN_UPDATES
    assert {Kind.STEP, Kind.VALIDATE, Kind.ROLLBACK, Kind.PREDICT} == AWAITS_REDUCTIONS


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.row.other_end])
def test_the_ends_of_a_transfer_agree(kind: Kind):
    """The other end of the other end is the word itself; what one sends or gives away the other takes."""
    word, other = kind.row, kind.row.other_end.row
    assert other.other_end is kind
    assert word.lane is other.lane
    if word.lane is Lane.TRANSFERS:
        assert (word.sends, word.receives) == (other.receives, other.sends)
    else:
        assert (word.saved, word.of_pair) == (-other.saved, not other.of_pair)
        assert word.leaves == other.leaves


def test_rows_are_complete():
    """Every word has a proof, a method of the executor and, where it takes time, a cost that users can give."""
    costs = {field.name for field in fields(Costs)}
    for kind, word in WORDS.items():
        assert word.proof is not None and word.handler, kind
        assert not word.cost or word.cost in costs, kind
        without = {Kind.ACCEPT, Kind.RETURN, Kind.FREE, Kind.VALIDATE, Kind.ROLLBACK}
        assert bool(word.cost) != (kind in SENDS | RECEIVES | without), kind


def test_who_waits_for_the_host():
    """Computations wait for their weights, and for what has left and comes back; both are carried out in lanes."""
    weights = dict.fromkeys(COMPUTATIONS, (Kind.FETCH,))
    saved = dict.fromkeys(BEGINS_BACKWARD, (Kind.FETCH, Kind.SWAP_IN))
    inputs = {Kind.RECOMPUTE: (Kind.FETCH, Kind.RELOAD, Kind.SWAP_IN)}
    assert {kind: kind.row.awaits for kind in COMPUTATIONS} == weights | saved | inputs
    assert all(other.row.lane is not Lane.COMPUTE for word in WORDS.values() for other in word.awaits)


def test_tensors_are_made_and_needed():
    """What travels is made by some computation and needed by another; backwards begin with a gradient."""
    assert {word.makes for word in WORDS.values()} == {word.needs for word in WORDS.values()}
    assert {Kind.BACKWARD, Kind.BACKWARD_INPUT} == BEGINS_BACKWARD
    assert {Kind.BACKWARD, Kind.BACKWARD_WEIGHT} == ENDS_BACKWARD
    assert all(word.subject is Subject.MICROBATCH for word in WORDS.values() if word.needs or word.makes or word.saved)


def _words_named(node: ast.AST) -> set[str]:
    """The words that a set, tuple, list or dictionary names as its elements or keys, or as values of a dictionary."""
    elements = getattr(node, "elts", None) or [*getattr(node, "keys", []), *getattr(node, "values", [])]
    return {
        each.attr
        for each in elements
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "Kind"
        and each.attr in Kind.__members__
    }  # fmt: skip


def test_there_is_no_second_table():
    """No file of the package lists words of its own, but for those that have to."""
    found = {}
    for path in sorted(ROOT.glob("megatron/**/*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "Kind." in text else ():
            if isinstance(node, ast.Set | ast.Tuple | ast.List | ast.Dict) and len(_words_named(node)) > 1:
                found.setdefault(name, node.lineno)
    assert {name: line for name, line in found.items() if name not in HOLDERS} == {}
    assert set(HOLDERS) <= set(found), "a file that lists none any more leaves the list"
