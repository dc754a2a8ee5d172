"""A process for megatron.core that calls a function of a module with words.

python -m benchmarks.common.rank MODULE:FUNCTION WORD...
"""

import sys

from benchmarks.common.processes import function_of
from megatron import backend

if __name__ == "__main__":
    function = function_of(sys.argv[1])
    backend.keep_freed_memory()  # as in training
    function(*sys.argv[2:])
