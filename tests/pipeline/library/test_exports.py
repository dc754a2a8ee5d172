"""What `megatron.pipeline` exports, and what that costs who plans."""

import subprocess
import sys

import pytest

import megatron.pipeline


def test_the_export_is_lazy():
    """Importing the package, and all rooms that plan, imports no torch."""
    code = (
        "import sys, megatron.pipeline, megatron.pipeline.schedules, megatron.pipeline.simulate\n"
        "assert 'Pipeline' in dir(megatron.pipeline) and 'torch' not in sys.modules\n"
        "assert 'megatron.pipeline.synthesis' not in sys.modules\n"
        "assert megatron.pipeline.synthesize and megatron.pipeline.Problem and megatron.pipeline.Costs\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert megatron.pipeline.Pipeline.__name__ == "Pipeline"


def test_other_names_are_errors():
    """As for any module."""
    with pytest.raises(AttributeError, match="has no attribute 'Pipelines'"):
        _ = megatron.pipeline.Pipelines
