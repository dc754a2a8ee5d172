"""Programs whose stages are copies, on modules: the ranks that are left compute the batches of all replicas.

Sums: the gradients of a copy are added up in the order of its row, and then those of all copies. With two copies that
is one sum in whatever order gloo takes it, so without clipping weights equal one process that adds in this order to the
last bit. With three copies the order is gloo's, and a norm is summed over ranks: last bits.
"""

from types import SimpleNamespace

import pytest
import torch

from megatron.pipeline.program.copies import Copy, PeersOfCopy, graph_of_model, ranks_of_copies
from megatron.pipeline.program.edges import Edge, StageGraph
from megatron.pipeline.program.instruction import MOVES, SWAPS
from megatron.pipeline.program.weight_policies import POLICIES
from megatron.pipeline.runtime.fitting import require_copyable
from tests import workers
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.stages.module import copies_cases, provisional_reference, reference
from tests.pipeline.runtime.stages.module.copies_cases import Case

_PLACE = "tests.pipeline.runtime.stages.module.copies_cases:"


def train(case: Case, function: str = "train", **options) -> list[copies_cases.Outcome]:
    num_ranks = case.schedule().num_ranks if function == "train" else len(case.copies)
    return workers.run(num_ranks, _PLACE + function, case=case, timeout=60, **options)


def assert_same(outcomes, expected, *, exact: bool = False) -> None:
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-6, "atol": 1e-6}
    found: dict[str, list[torch.Tensor]] = {}
    for outcome in outcomes:
        assert [report.batch for report in outcome.reports] == [report.batch for report in expected.reports]
        for ours, theirs in zip(outcome.reports, expected.reports, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], **close)
            found.setdefault(name, []).append(tensor)
        assert outcome.left == (0, 0, 0)
    assert found.keys() == expected.parameters.keys()
    for copies in found.values():
        assert all(torch.equal(copies[0], other) for other in copies)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_two_replicas_without_a_rank_are_one_process(weights, optimizer):
    """Three ranks compute the batches of four microbatches, weights bit-equal; a drain in between changes nothing. An
    evaluation may be too small for a copy to take part."""
    case = Case(weights=weights, optimizer=optimizer, evaluates=3 if weights == "flush" else 1)
    outcomes, expected = train(case), copies_cases.in_one_process(case)
    assert_same(outcomes, expected, exact=True)
    for outcome in outcomes:
        [found] = outcome.evaluations
        assert found["loss"] == pytest.approx(expected.evaluations[0]["loss"], rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_two_peers_share_what_a_lost_rank_would_take(weights, optimizer):
    """Of three replicas five ranks are left, and each batch is clipped by the norm of all."""
    case = Case(num_replicas=3, lost=((2, 1),), weights=weights, optimizer=optimizer, clip_grad=0.05)
    assert case.copies[3:] == (Copy(1, (0, 2, 3)), Copy(1, (1, 4, 5)))
    expected = copies_cases.in_one_process(case)
    assert min(report.grad_norm for report in expected.reports) > case.clip_grad
    assert_same(train(case), expected)


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_a_drained_job_changes_to_copies_in_place(weights):
    """Four ranks train two batches, and three of them go on with the same weights, both versions, and moments."""
    case = Case(weights=weights, optimizer="adamw", clip_grad=0.05)
    outcomes = workers.run(4, f"{_PLACE}go_on", case=case, border=2, timeout=60)
    assert outcomes.pop(3) is None
    assert_same(outcomes, copies_cases.in_one_process(case))


@pytest.mark.full
def test_a_copy_between_copies_gets_from_two_and_gives_to_two():
    """The stage in the middle has one copy left; backwards are split, and the timeline has every computation."""
    case = Case(num_stages=3, lost=((1, 1),), weights="2bw", splits=True)
    outcomes = train(case)
    assert_same(outcomes, copies_cases.in_one_process(case), exact=True)
    for word in ("2RECV_F1<1", "2SEND_F1>4", "2RECV_B1<4", "2SEND_B1>1", "4I1@0", "4W1@0"):
        assert word in outcomes[0].drawn


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"preset": "flush", "recompute": True},
        {"preset": "2bw", "weights": "2bw", "num_replicas": 3, "lost": ((2, 1),)},
        {"preset": "zb-h1", "num_replicas": 3, "lost": ((2, 1), (0, 0)), "num_microbatches": 4},
        {"preset": "interleaved", "num_stages": 4, "virtual_stages": 2},
        pytest.param(
            {"preset": "2bw", "weights": "2bw", "num_stages": 3, "num_microbatches": 3}, marks=pytest.mark.full
        ),
        pytest.param({"preset": "zb-h2", "num_stages": 3, "num_microbatches": 4}, marks=pytest.mark.full),
    ],
    ids=lambda options: options["preset"],
)
def test_ranks_that_are_left_run_the_program_made_for_them(options):
    """The schedule of one replica, without the lost ranks, as `survivors.without` orders it."""
    case = Case(clip_grad=0.05, optimizer="adamw", num_batches=4, **options)
    assert_same(train(case), copies_cases.in_one_process(case))


@pytest.mark.sample(1, "True")
@pytest.mark.parametrize("tied", [False, True])
def test_copies_predict_from_what_the_replicas_would_have_read(tied):
    """Each copy has a part of these gradients, also of a weight that both ends share."""
    of_replicas = {"num_replicas": 3, "tied": tied}
    case = Case(
        preset="2bw", weights="2bw", lost=((2, 1),), num_microbatches=3, num_read=1, optimizer="adamw", **of_replicas
    )
    training = reference.Training(batches=(case.num_microbatches,) * case.num_batches, **of_replicas)
    expected = provisional_reference.train(training, lambda name, size: 1, reduce_partial=True)
    if tied:
        expected.parameters[reference.LAST_WEIGHT] = expected.parameters[reference.FIRST_WEIGHT]
    for outcome in train(case):
        assert [report.loss for report in outcome.reports] == pytest.approx(expected.losses, rel=1e-6)
        for name, tensor in outcome.parameters.items():
            torch.testing.assert_close(tensor, expected.parameters[name], rtol=1e-6, atol=1e-6)
        assert outcome.left == (0, 0, 0)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"preset": "bpipe", "lost": ((0, 1),)},
        pytest.param({"preset": "flush", "most_on_device": 3, "lost": ((0, 2),)}, marks=pytest.mark.full),
        pytest.param({"preset": "bpipe", "lost": ((0, 0), (1, 1)), "recompute": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_copies_move_their_activations(options):
    """What the ranks that are left save goes to their pairs, or to the host, within the number that is proved. Stages
    have other numbers in the program than in the model."""
    of_all = {"num_stages": 4, "num_microbatches": 8, "num_batches": 2, "lost": ((0, 0),), "optimizer": "adamw"}
    case = Case(**of_all | options)
    schedule = case.schedule()
    assert schedule.moves_activations and max(schedule.max_saved_on_rank(())) == 3
    outcomes = train(case)
    assert_same(outcomes, copies_cases.in_one_process(case))
    rows = schedule.build((case.batch_size,) * case.num_batches).rows
    moves = {str(each) for row in rows for each in row if each.kind in MOVES | SWAPS}
    assert moves and moves <= {*outcomes[0].drawn}


def test_ranks_with_several_stages_hold_copies():
    """Each rank has two stages of a chain of four, and one has lost its peer."""
    case = Case(num_stages=4, lost=((1, 1), (1, 3)), rank_of_stage=(0, 1, 2, 0, 1, 2), clip_grad=0.05)
    assert_same(train(case), copies_cases.in_one_process(case))


@pytest.mark.parametrize("weights", ["flush", "2bw"])
def test_losses_that_are_sums_are_divided_by_the_counts_of_all_copies(weights):
    case = Case(num_replicas=3, lost=((2, 1),), weights=weights, sums=True, clip_grad=0.05)
    assert_same(train(case), copies_cases.in_one_process(case))


def test_each_copy_of_tied_parameters_is_counted_once():
    """The sum over both ends takes one copy of each, of which the first stage has three and the last two."""
    case = Case(num_replicas=3, lost=((2, 1),), tied=True, clip_grad=0.05)
    expected = copies_cases.in_one_process(case)
    expected.parameters[copies_cases.reference.LAST_WEIGHT] = expected.parameters[copies_cases.reference.FIRST_WEIGHT]
    assert_same(train(case), expected)


def test_copies_of_the_stages_of_a_graph():
    """A stage names the stages of the model, and its tensors come from the copies that have the microbatch."""
    case = Case(num_stages=4, lost=((1, 0), (0, 2), (1, 3)), clip_grad=0.5, num_batches=4)
    shape = copies_cases.graph_shape()
    expected = graph_cases.in_one_process(shape, (case.batch_size,) * case.num_batches, clip_grad=case.clip_grad)
    assert_same(train(case, "train_graph"), expected)


def test_a_rank_that_waits_names_the_stage_of_the_model():
    """Instructions have the numbers of the program, whose stages the user does not know."""
    said = workers.run(3, f"{_PLACE}error_of_a_wait", case=Case())[2]
    assert said.startswith("rank 2 (stage 2 of the program, 1 of the model) waited 0.5 s in 2F0@0 for 2RECV_F0<0 from ")
    assert said.endswith("rank 0 (stage 0 of the program, 0 of the model)")


def test_shared_parameters_of_a_graph_are_refused():
    case = Case(num_stages=4, lost=((1, 0), (0, 2), (1, 3)))
    for said in train(case, "refusal"):
        assert "of the model share a parameter over their edge" in said


def test_a_copy_knows_the_copies_that_have_its_microbatches():
    copies = (Copy(0, (0, 2)), Copy(0, (1, 3)), Copy(1, (0, 1, 2, 3)), Copy(2, (0, 2)), Copy(2, (1, 3)))
    edges = (Edge(0, 2), Edge(1, 2), Edge(2, 3), Edge(2, 4))
    assert graph_of_model(copies, edges) == StageGraph.of(3)
    takers = PeersOfCopy(copies, 2, (3, 4))
    assert [takers.of(position) for position in (0, 1, 6)] == [{2: 3}, {2: 4}, {2: 3}]
    with pytest.raises(KeyError):
        PeersOfCopy(copies, 0, (2,)).of(1)
    assert [ranks_of_copies(copies, range(5), rank) for rank in (1, 2, 4)] == [(0, 1), (2,), (3, 4)]
    with pytest.raises(ValueError, match="stages of rank 0 have copies on different ranks, stage 0 and stage 1"):
        ranks_of_copies(copies, (0, 1, 0, 2, 3), 0)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        (
            {"weights": POLICIES["2bw-provisional"], "predicts_apart": True},
            "the gradients of each copy alone, and",
        ),
        ({"weights": POLICIES["stash"]}, "let each stage step by itself, and copies of a stage share a batch"),
        ({"residency": object()}, "has copies of stages and its weights on the host; keep these on the device"),
    ],
)
def test_what_copies_cannot_do_is_refused(differs, message):
    """The sentence says what the schedule has and what to choose."""
    plain = {"weights": POLICIES["flush"], "residency": None, "predicts_apart": False}
    require_copyable(SimpleNamespace(**plain))
    with pytest.raises(ValueError, match=message):
        require_copyable(SimpleNamespace(**plain | differs))
