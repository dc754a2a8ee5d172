"""From a captured model to its partition."""

import pytest

from megatron.finetuning.partitioning import PlannedMachine, cut_model, num_bytes, simulated_seconds
from megatron.finetuning.plan import captured_model, make_plan
from megatron.finetuning.samples import read_data
from tests import workers
from tests.finetuning import tiny

CLASSES = "sequence-classification"


@pytest.mark.full
def test_a_model_is_cut_and_the_simulator_chooses(tmp_path):
    args = tiny.arguments(tmp_path, CLASSES)
    captured, batch, _ = captured_model(args, read_data(args))
    said = []
    choice, candidates, _, competition = cut_model(
        captured, batch, PlannedMachine(2, 2.0**34, 10.0), args, effort=0.02, progress=said.append
    )
    sought = {each.method for each in competition.results} | competition.failures.keys()
    assert sought >= {"sequential", "mixed L=2", "mixed L=4"}
    assert choice.simulated_ms <= 1.005 * min(each.simulated_ms for each in candidates)
    for each in candidates:
        assert each.simulated_ms >= 0.999 * _busiest(each), each
    parameters = sum(each.numel() for each in captured.parameters.values())
    assert sum(stage.parameters for stage in choice.file.stages) == parameters
    assert any(text.startswith("profiling block 1 of") for text in said) and "simulating sequential" in said
    path = tmp_path / "p.json"
    choice.file.write(path)
    args = tiny.arguments(tmp_path, CLASSES, "--partition", path)
    args.devices = 2
    plan = make_plan(args, read_data(args))
    seconds = simulated_seconds(plan.schedule, plan.partition, plan.edge_bytes, 1)
    assert 1000 * seconds == pytest.approx(choice.simulated_ms)


def _busiest(candidate) -> float:
    """Milliseconds of a microbatch on the busiest rank; a stage on which no other depends does not recompute."""
    work = {}
    for stage, (cost, rank) in enumerate(zip(candidate.file.stages, candidate.file.rank_of_stage, strict=True)):
        last = stage == len(candidate.file.stages) - 1
        forward = cost.plain_forward_ms if last else cost.forward_ms + cost.plain_forward_ms
        work[rank] = work.get(rank, 0.0) + forward + cost.plain_backward_ms
    return max(work.values())


def test_nothing_fits_says_why(tmp_path):
    args = tiny.arguments(tmp_path, CLASSES)
    captured, batch, _ = captured_model(args, read_data(args))
    with pytest.raises(ValueError, match=r"nothing fits: the nodes need .* GiB .* add devices, memory or stages"):
        cut_model(captured, batch, PlannedMachine(2, 20_000.0, 10.0), args, effort=0.02)


def test_amounts_of_memory():
    assert num_bytes("11GiB") == 11 * 2**30 and num_bytes("512 MiB") == 2**29 and num_bytes("1.5GB") == 1.5e9
    for text in ("11", "GiB", "-1GiB", "0GiB", f"{10**400}GiB"):
        with pytest.raises(ValueError, match=f"'{text}' is no amount of memory"):
            num_bytes(text)


@pytest.mark.full
def test_all_ranks_know_why_there_is_no_partition(tmp_path):
    """The first rank alone cuts the model."""
    found = workers.run(2, "tests.finetuning.cases:refused", folder=tmp_path, argv=("--memory", "0.001MB"))
    assert found[0] == found[1] and found[0].startswith("nothing fits")
