"""Which software a run had."""

from megatron.planner.job.software import MEGATRON_CORE, MEGATRON_DEEPSPEED, MEGATRON_V3
from megatron.planner.published.entries import read_entry
from tests.planner.published.measured import BPIPE_TABLE_7, VTRAIN, changed


def test_names_of_software():
    """A field of the entry comes before the source; Hopper is newer than Megatron-LM v3."""
    assert read_entry(changed(VTRAIN[0], config={"framework": None})).software is MEGATRON_DEEPSPEED
    entry = BPIPE_TABLE_7[0] | {"source": "a blog"}
    named = read_entry(changed(entry, hardware={"software": "Megatron-Core 0.16"}))
    assert named.software is MEGATRON_CORE and not named.assumed
    old, new = (read_entry(changed(entry, hardware={"software": None, "gpu": gpu})) for gpu in ("A100-80", "H100"))
    assert old.software is MEGATRON_V3 and new.software.flash_attention and old.assumed and new.assumed
    assert read_entry(changed(entry, config={"flash_attention": True})).software.flash_attention
