"""Synthesis of programs: from costs and memory limits to the rows of one batch, with a lower bound on the time.

`problem.py` defines the problem, `timing.py` times a solution, `seeds.py` makes first solutions, `squeeze.py` and
`improve.py` improve them, `bound.py` computes the lower bound, and `search.py` runs all of these. `keep.py` chooses
which microbatches are recomputed, `search_with_moves.py` which ones move, and `keep_and_move.py` both together.
`steady.py` is for batches that follow one another without a drain. `search_process.py` runs a search beside a training.
"""

from megatron.pipeline.synthesis.keep import synthesize_keeping
from megatron.pipeline.synthesis.problem import Problem
from megatron.pipeline.synthesis.search import Synthesis, synthesize
from megatron.pipeline.synthesis.steady import Steady, begin_steady, synthesize_steady

__all__ = [
    "Problem", "Steady", "Synthesis", "begin_steady", "synthesize", "synthesize_keeping", "synthesize_steady",
]  # fmt: skip
