"""What torchtitan does unless an entry says otherwise."""

from megatron.planner.job.software import MEGATRON_V3, TORCHTITAN, TORCHTITAN_2025
from megatron.planner.memory.activations import RecomputeScope
from megatron.planner.published.entries import read_entry
from megatron.planner.published.software_defaults import of_its_year
from tests.planner.published.measured import BPIPE_TABLE_7, changed
from tests.planner.published.test_sharded_runs import TORCHTITAN as RUNS
from tests.planner.published.test_sharded_runs import predicted


def test_the_year_of_a_text():
    """Of other software none is told apart."""
    assert of_its_year(TORCHTITAN, "torchtitan Trainy/WhiteFiber June 2025") is TORCHTITAN_2025
    assert of_its_year(TORCHTITAN, "torchtitan benchmarks Dec 2024") is TORCHTITAN
    assert of_its_year(MEGATRON_V3, "of 2025") is MEGATRON_V3


def test_sequences_are_split_beside_tensor_parallelism():
    entry = read_entry(changed(RUNS[2], config={"fsdp": 16, "t": 8}))
    assert entry.configuration.sequence_parallel
    assert "sequence parallelism, as torchtitan has it beside tensor parallelism" in entry.assumed
    assert not read_entry(RUNS[2]).configuration.sequence_parallel
    assert not read_entry(changed(BPIPE_TABLE_7[1], config={"sequence_parallel": None})).configuration.sequence_parallel


def test_recomputation_is_selective_unless_it_is_said():
    silent = read_entry(changed(RUNS[0], config={"recompute": None}))
    assert silent.configuration.recompute is RecomputeScope.ATTENTION
    assert "selective recomputation in its place, as torchtitan has by default" in silent.assumed
    assert read_entry(changed(RUNS[0], config={"recompute": "none"})).configuration.recompute is RecomputeScope.NONE


def test_a_loss_that_is_compiled_takes_less():
    """From 2025 on, and only where the model is compiled."""
    late = [run | {"source": "torchtitan, June 2025"} for run in RUNS[:2]]
    eager, compiled = (predicted(run).estimate.memory[0].parts.workspace for run in late)
    earlier = [predicted(run).estimate.memory[0].parts.workspace for run in RUNS[:2]]
    assert earlier[0] == earlier[1] == eager
    assert eager - compiled == 6 * 2 * 8192 * 128256  # 8 and 2 bytes of a logit
