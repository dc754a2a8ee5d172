"""Programs that are computed: from costs and memory limits to the rows of one batch, with a lower bound beside them.

`problem.py` has what is asked, `timing.py` times an answer, `seeds.py` makes first answers, `squeeze.py` and
`improve.py` improve them, `bound.py` computes what no answer beats, and `search.py` runs all of these.
"""

from megatron.pipeline.synthesis.problem import Problem
from megatron.pipeline.synthesis.search import Synthesis, synthesize

__all__ = ["Problem", "Synthesis", "synthesize"]
