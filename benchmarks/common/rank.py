"""A process that calls a function of a module with words as arguments, where megatron.core can be imported.

python -m benchmarks.common.rank MODULE:FUNCTION WORD...
"""

import sys

from benchmarks.common.processes import function_of
from megatron import backend

if __name__ == "__main__":
    function = function_of(sys.argv[1])
    backend.keep_freed_memory()  # as in training
    function(*sys.argv[2:])
