"""An assignment that cannot be run is refused, and what crosses takes the routes that keep sums in order."""

import pytest

from megatron.capture.blocks import blocks_of, crossings
from megatron.capture.cut import cut
from tests.capture.cuts import spread
from tests.capture.models import captured


@pytest.fixture(scope="module")
def plain():
    return captured("plain")[1]


def test_an_operator_without_a_stage(plain):
    with pytest.raises(ValueError, match=r"operator \d+ \(.*\) has no stage; give each of Plain one"):
        crossings(plain, {})


def test_a_stage_without_operators(plain):
    blocks = blocks_of(plain)
    with pytest.raises(ValueError, match=r"stage 1 of 3 has no operators"):
        crossings(plain, spread({block: 2 * (place > 3) for place, block in enumerate(blocks)}))


def test_a_stage_that_needs_a_later_one(plain):
    blocks = blocks_of(plain)
    with pytest.raises(ValueError, match=r"stage 0 needs .* of stage 1; number stages"):
        crossings(plain, spread({block: int(place == 1) for place, block in enumerate(blocks)}))


def test_a_torn_block(plain):
    """An in-place activation writes what the operator before it made."""
    number = next(number for number, node in enumerate(plain.nodes) if "relu_" in str(node.target))
    stage_of = {each: int(each >= number) for each in range(len(plain.nodes))}
    with pytest.raises(ValueError, match=r"must lie in one stage"):
        crossings(plain, stage_of)


def by_layer(captured_t5, num_stages):
    """Stages of T5's decoder by layer: embeddings and encoder, then each decoder layer, then the head."""
    stage, current = {}, 0
    for block in blocks_of(captured_t5):
        names = " ".join(str(captured_t5.nodes[number].meta.get("nn_module_stack")) for number in block)
        if "decoder.block.0" in names:
            current = max(current, 1)
        if "decoder.block.1" in names:
            current = 2
        stage[block] = current
    return spread(stage)


def test_what_several_need_is_passed_on():
    """The encoder's output goes from stage to stage; without relay its maker sends it to each."""
    _, ours = captured("t5")
    assignment = by_layer(ours, 3)
    relayed, direct = (crossings(ours, assignment, relay=relay) for relay in (True, False))
    several = [key for key, route in direct.routes.items() if len(route) > 1]
    assert several
    for key in several:
        assert direct.routes[key] == ((0, 1), (0, 2)) and relayed.routes[key] == ((0, 1), (1, 2))
    assert set(cut(ours, assignment, relay=False)[0].targets) == {1, 2}
