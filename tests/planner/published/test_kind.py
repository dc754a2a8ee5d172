"""The kind of a run: what is one, and that what nobody knows of makes another."""

from dataclasses import dataclass, fields, replace

import pytest

from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.job.software import MEGATRON_2021, MEGATRON_V3, Software
from megatron.planner.published import residuals as kinds
from megatron.planner.published.residuals import Kind, kind_of
from tests.planner.search.helper import a100, gpt3

MODEL = gpt3(8, 1024, 16)
PLAIN = Configuration(tensor=8, pipeline=2, micro_batch_size=1, global_batch_size=8)


def of(configuration=PLAIN, cluster=None, software=MEGATRON_V3, **changes) -> Kind:
    return kind_of(configuration, MODEL, cluster or a100(2), software, under_pressure=False, **changes)


def test_what_is_priced_by_arithmetic_is_no_kind():
    """Degrees, batches, recomputation, layers and the software's overlaps are not; the rest is as it says."""
    expected = Kind(
        device="A100", attention="unfused attention", precision="16 bits", strategy="flush", several_nodes=True
    )
    assert of() == expected == of(software=MEGATRON_2021)
    assert of(Configuration(tensor=2, pipeline=8, micro_batch_size=4, global_batch_size=64, recompute="layer",
                            distributed_optimizer=True, rank_mapping="pair-adjacent")) == expected  # fmt: skip
    assert str(expected) == "A100, flush, unfused attention, 16 bits, several nodes"
    assert of(software=Software(element_bytes=4)).precision == "32 bits"
    assert of(software=Software(flash_attention=True)).attention == "flash attention"
    assert not of(cluster=a100(1)).several_nodes


@pytest.mark.parametrize(
    ("schedule", "pipeline", "strategy"),
    [
        ("flush", 1, "one pipeline stage"), ("gpipe", 1, "one pipeline stage"), ("gpipe", 2, "gpipe"),
        ("2bw", 1, "2bw"), ("2bw", 2, "2bw"), ("bpipe", 4, "bpipe"), ("zb-h1", 1, "zb-h1"), ("l2l", 1, "l2l"),
    ],
)  # fmt: skip
def test_strategies(schedule, pipeline, strategy):
    """On one stage all that drain are one; those whose updates are hidden, or that split backwards, are not."""
    configuration = replace(PLAIN, schedule=schedule, pipeline=pipeline, virtual=2 if schedule == "l2l" else 1)
    assert of(configuration).strategy == strategy


def test_editions_of_a_gpu_are_others():
    """Memory does not matter; rates do."""
    one = {"nodes": 1, "gpus_per_node": 8}
    assert of(cluster=Cluster(gpu="A100-40", **one)).device == "A100"
    assert of(cluster=Cluster(gpu="A100-80", memory_gib=60.0, peak_teraflops=312.0, **one)).device == "A100"
    slow_links = {"bandwidth": {"within_node": 16.0}}
    for rates in ({"peak_teraflops": 200.0}, {"memory_bandwidth": 1000.0}, slow_links):
        assert of(cluster=Cluster(gpu="A100-80", **one, **rates)).device == "A100 with rates of its own"
    assert of(cluster=Cluster(gpu="cpu", **one)).device == "cpu"


def test_a_strategy_that_nobody_knows_of_is_named(monkeypatch):
    """A field that is added to a configuration makes another kind where it is on, and none where it is off."""

    @dataclass(frozen=True, kw_only=True)
    class Sharded(Configuration):
        fully_sharded: bool = False
        exchange: str = "none"

    monkeypatch.setattr(kinds, "_USUAL", {Sharded: kinds._USUAL[Configuration], **kinds._USUAL})
    plain = Sharded(micro_batch_size=1, global_batch_size=8, tensor=8, pipeline=2)
    assert of(plain) == of()
    assert of(replace(plain, fully_sharded=True, exchange="ring")).extras == ("fully sharded", "exchange ring")
    assert of(replace(PLAIN, schedule="2bw", provisional="stage")).extras == ("provisional stage",)


def test_what_is_usual_is_there():
    """Names of fields that there are: a field that is renamed has to be looked at again."""
    for settings, names in kinds._USUAL.items():
        assert names <= {field.name for field in fields(settings)}
