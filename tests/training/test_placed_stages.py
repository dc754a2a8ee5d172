"""Wherever a schedule puts its stages, they train what one process trains on the same data."""

import pytest
import torch

from tests.training import run_case
from tests.training.run_case import joined_weights
from tests.training.test_virtual_stages import CLIPPED, EXACT, P2, P4, V2, check

FULL = pytest.mark.full


def train(num_ranks: int, flags: str = "", **options) -> list[dict]:
    return run_case.train(num_ranks, flags, case="placed_case", **options)
