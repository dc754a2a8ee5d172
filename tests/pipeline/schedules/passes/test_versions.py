"""Computations get the versions of the weight policy."""

from megatron.pipeline.schedules.passes.updates import set_versions
from tests.pipeline.schedules.passes.written import extent, segments, texts


def test_backward_keeps_the_version_of_its_forward():
    """Whatever is stepped between; the policy decides at the forward."""
    result = set_versions(
        segments("0F0", "0F1 0STEP@1", "0F2 0R0 0B0 0STEP@2 0R1 0B1 0B2"), extent("2bw", batches=(1, 1, 1))
    )
    assert texts(result) == ["0F0@0", "0F1@0 0STEP@1", "0F2@1 0R0@0 0B0@0 0STEP@2 0R1@0 0B1@0 0B2@1"]


def test_stash_uses_the_newest():
    """Under stash the STEPs before a forward decide."""
    result = set_versions(segments("0F0 0F1 0B0 0STEP@4 0F2 0B1"), extent("stash", batches=(1, 1, 1), first_batch=3))
    assert texts(result) == ["0F0@3 0F1@3 0B0@3 0STEP@4 0F2@4 0B1@3"]
