"""What `megatron.pipeline` exports, and what that costs who plans."""

import subprocess
import sys

import pytest

import megatron.pipeline


def test_the_export_is_lazy():
    """Importing the package, and all rooms that plan, imports no torch; asking for `Pipeline` does."""
    code = (
        "import sys, megatron.pipeline, megatron.pipeline.schedules, megatron.pipeline.simulate\n"
        "assert 'Pipeline' in dir(megatron.pipeline) and 'torch' not in sys.modules\n"
        "from megatron.pipeline import Pipeline\n"
        "assert 'torch' in sys.modules and Pipeline is megatron.pipeline.Pipeline\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_other_names_are_errors():
    """As for any module."""
    with pytest.raises(AttributeError, match="has no attribute 'Pipelines'"):
        _ = megatron.pipeline.Pipelines
