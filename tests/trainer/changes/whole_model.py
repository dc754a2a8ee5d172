"""The state of a whole model, put together from its ranks'."""

import torch


def joined(states):
    """name -> elements of the whole model's state, from what `whole_state` of cases.py has found on each rank; replicas
    are equal, and no element is missing."""
    whole, known = {}, {}
    for pieces, _, _ in states:
        for key, found in pieces.items():
            for first, total, data in found:
                where = slice(first, first + len(data))
                if key not in whole:
                    whole[key], known[key] = torch.zeros(total, dtype=data.dtype), torch.zeros(total, dtype=torch.bool)
                assert torch.equal(whole[key][where][known[key][where]], data[known[key][where]]), f"replicas: {key}"
                whole[key][where], known[key][where] = data, True
    assert all(each.all() for each in known.values())
    return whole
