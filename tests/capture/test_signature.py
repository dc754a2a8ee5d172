"""Two captures have one signature if and only if operators have the same numbers."""

import subprocess
import sys

import pytest

from megatron.capture.export import capture, check_signature, signature
from tests.capture.models import KINDS, captured, cross_entropy

IN_ANOTHER_PROCESS = """
from megatron.capture.export import signature
from tests.capture.models import captured
print(signature(captured("plain")[1]))
"""


@pytest.mark.full
def test_two_processes_agree():
    other = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == signature(captured("plain")[1])


def test_values_and_batch_have_no_part_in_it():
    model = KINDS["plain"].build(0.1).train()
    ours = capture(model, KINDS["plain"].batch(5), loss=cross_entropy)
    assert signature(ours) == signature(captured("plain")[1])


def test_constants_and_shapes_have():
    """Another rate of dropout, another loss, another class: other graphs."""

    def twice(output, batch):
        return 2 * cross_entropy(output, batch)

    found = {signature(captured("plain")[1]), signature(captured("plain", 0.0)[1]), signature(captured("gpt2")[1])}
    for rate, loss in ((0.2, cross_entropy), (0.1, twice)):
        model = KINDS["plain"].build(rate).train()
        found.add(signature(capture(model, KINDS["plain"].batch(2), loss=loss)))
    assert len(found) == 5


def test_a_file_for_another_graph_is_refused():
    _, ours = captured("plain")
    check_signature(ours, signature(ours), "P.json")
    with pytest.raises(ValueError, match=r"P.json was made for another graph \(0{12}\) than that of Plain here"):
        check_signature(ours, "0" * 64, "P.json")
