"""What the label of a GPU says of its rates, where it is none of the usual ones: its memory, and a limit of its power.

HBM2e is stacked in units of 16 GB with 1024 lines each; five of them have the 2039 GB/s of an A100 of 80 GB. A limit
of power lowers clocks: what a processor takes grows with the cube of its clock, as voltage rises with it, so the peak
falls with the cube root. So an H100 of 400 W is expected to have 821 of 989 TFLOP/s; the data sheet of the NVL edition,
which takes 400 W, has 835.
"""

import re

_GB_OF_STACK = 16
_GB_PER_SECOND_OF_STACK = 2039 / 5
_POWER = {"A100-80": 400, "A100-40": 400, "H100": 700, "H200": 700, "V100-32": 300, "V100-16": 300}
"""Watts of their data sheets (SXM)."""
_HBM3 = ("H100", "H200")


def memory_bandwidth_of(label: str, name: str, gigabytes: float | None) -> float | None:
    """GB/s of a GPU with other memory than the one of that name; None: its label says nothing of it. `gigabytes`: where
    the label does not say them."""
    named = re.search(r"(\d+) ?GI?B", label, re.IGNORECASE)
    if gigabytes is None and named is not None:
        gigabytes = float(named[1])
    if name not in _HBM3 or gigabytes is None or re.search(r"HBM2e", label, re.IGNORECASE) is None:
        return None
    return _GB_PER_SECOND_OF_STACK * round(gigabytes / _GB_OF_STACK)


def clock_of(label: str, name: str) -> float | None:
    """Part of its clock that a limit of power leaves; None: its label names none below its data sheet's."""
    found = re.search(r"(?<![\w.])(\d{2,4}) ?W(?!\w)", label)
    if found is None or name not in _POWER or int(found[1]) >= _POWER[name]:
        return None
    return (int(found[1]) / _POWER[name]) ** (1 / 3)
