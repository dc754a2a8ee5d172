"""Which rank a process is, by the launcher's environment."""

import pytest

from megatron.pipeline.runtime.failure.errors import environment_ranks, number_of


@pytest.mark.parametrize("text", ["", "-1", "1.0", "3²"])
def test_what_is_no_whole_number_is_refused(monkeypatch, text):
    """In a sentence with the variable's name; where a default will do, it is taken."""
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ValueError, match=f"WORLD_SIZE is '{text}', not a whole number; start through torchrun"):
        environment_ranks()
    assert number_of("WORLD_SIZE", 5) == 5
