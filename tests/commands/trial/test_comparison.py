"""The table of what was measured."""

import io

from rich.console import Console

from megatron.commands.grid_search.trial_results import Status, table_of
from tests.commands.trial.test_results import result


def test_a_sentence_is_shown_as_it_stands():
    """Brackets in it are none of rich's; and failures come last."""
    sentence = "RuntimeError: [enforce fail at alloc.cpp] [/bold] can't allocate memory"
    failed = result("b", None, status=Status.OUT_OF_MEMORY, sentence=sentence)
    stream = io.StringIO()
    Console(file=stream, width=300).print(table_of([failed, result("a", 2.0, predicted_seconds=2.1)]))
    text = stream.getvalue()
    assert f"out of memory: {sentence}" in text and text.index("+5.0%") < text.index(sentence)
