"""What the BPipe paper states about memory: which configurations of GPT-3 96B ran on GPUs of 80 GB (Tables 2, 6 and 7).

The authors tried the scopes none, attention and layer in this order and stopped at the first that ran (section 4.2), so
a scope before the one in the table ran out of memory.
"""

SCOPES = ("none", "attention", "layer")

FIRST_FEASIBLE = {  # (t, p, d): {microbatch size: scope}
    (1, 16, 2): {1: "layer"},
    (2, 8, 2): {1: "layer", 2: "layer"},
    (4, 4, 2): {1: "attention", 2: "layer"},
    (8, 2, 2): {1: "attention", 2: "layer", 4: "layer"},
    (2, 16, 1): {2: "layer", 4: "layer"},
    (4, 8, 1): {1: "attention", 4: "layer", 8: "layer"},
    (8, 4, 1): {1: "attention", 2: "attention", 4: "layer", 8: "layer"},
}
ONLY_BALANCED = {  # likewise, of those that ran with BPipe and not without it
    (2, 16, 1): {1: "attention"},
    (4, 8, 1): {2: "attention"},
}
ALSO_BALANCED = {  # Table 6
    (8, 4, 1): {1: "attention", 2: "attention", 4: "layer", 8: "layer"},
}


def facts() -> list[tuple[tuple[int, int, int], int, str, bool, bool]]:
    """(degrees, microbatch size, scope, balanced, whether it ran)."""
    found = []
    for degrees, sizes in FIRST_FEASIBLE.items():
        for size, scope in sizes.items():
            tried = SCOPES[: SCOPES.index(scope) + 1]
            found += [(degrees, size, each, False, each == scope) for each in tried]
    for degrees, sizes in ONLY_BALANCED.items():
        for size, scope in sizes.items():
            tried = SCOPES[: SCOPES.index(scope) + 1]
            found += [(degrees, size, each, False, False) for each in tried]
            found.append((degrees, size, scope, True, True))
    for degrees, sizes in ALSO_BALANCED.items():
        found += [(degrees, size, scope, True, True) for size, scope in sizes.items()]
    return found
