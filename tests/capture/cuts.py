"""Assignments of operators to stages, drawn at random."""

import random

from megatron.capture.blocks import blocks_of
from megatron.capture.export import Captured


def contiguous(captured: Captured, num_stages: int, generator: random.Random) -> dict[int, int]:
    """Stages that follow one another in the order of the blocks, cut at any of them."""
    blocks = blocks_of(captured)
    borders = sorted(generator.sample(range(1, len(blocks)), num_stages - 1))
    stage = {block: sum(place >= border for border in borders) for place, block in enumerate(blocks)}
    return spread(stage)


def any_acyclic(captured: Captured, num_stages: int, generator: random.Random) -> dict[int, int]:
    """Any stage that does not come before those it needs: stages are scattered over the model, and edges skip."""
    stage_of: dict[int, int] = {}
    position = {node: number for number, node in enumerate(captured.nodes)}
    blocks = blocks_of(captured)
    for place, block in enumerate(blocks):
        needed = (source for number in block for source in captured.nodes[number].all_input_nodes)
        least = max((stage_of.get(position.get(source), 0) for source in needed), default=0)
        slack = min(num_stages - 1, place * num_stages // len(blocks) + 1)  # leave stages for the end
        stage = generator.randint(least, max(least, slack)) if generator.random() < 0.3 else least
        stage_of |= dict.fromkeys(block, stage)
    used = sorted(set(stage_of.values()))
    return {number: used.index(stage) for number, stage in stage_of.items()}


def spread(stage: dict[tuple[int, ...], int]) -> dict[int, int]:
    """Stage of each operator from stage of each block."""
    return {number: its for block, its in stage.items() for number in block}
