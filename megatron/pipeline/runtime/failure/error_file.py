"""Why this process ends, for the launcher's last lines.

Problem: when a rank fails, torchrun prints a traceback of its own and a summary behind the rank's sentence, and the
summary says nothing.

Solution: torchrun names a file for each rank in TORCHELASTIC_ERROR_FILE and shows in its summary what stands there. A
rank that ends with a sentence writes it there, too.
"""

import json
import os
import time
from contextlib import suppress


def write_error_file(sentence: str) -> None:
    """Tell the launcher; without one, or where the file cannot be written, the sentence on the screen has to do."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stamp = {"py_callstack": sentence, "timestamp": str(int(time.time()))}  # torchrun shows the first of the two
    temporary = f"{path}.{os.getpid()}"
    with suppress(OSError):
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump({"message": {"message": sentence, "extraInfo": stamp}}, stream)
        os.replace(temporary, path)  # half a file would end torchrun with an error of its own
