"""Provisional weights in pipelines of a small MLP, against a plain loop that takes the same provisional step."""

import pytest
import torch

from megatron.pipeline.runtime.contract.stage import BatchInfo
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions
from tests import workers
from tests.pipeline.runtime.stages.module import provisional_reference, reference
from tests.pipeline.runtime.stages.module.reference import Training
from tests.pipeline.runtime.stages.module.test_pipeline import assert_same

CASE = "tests.pipeline.runtime.stages.module.module_cases:run"


def run(num_ranks, training, **options):
    return workers.run(num_ranks, CASE, preset="2bw", predict=True, training=training, timeout=60, **options)


def sizes(p):
    """Nine batches of p, p+1 and 2p microbatches."""
    return (p, p, p + 1, 2 * p, 2 * p, p, p + 1, p, p)


def uniform(num_read):
    return lambda name, num_microbatches: num_read


@pytest.mark.sample(2)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_each_stage_reads_what_it_has_done(p):
    """Bit-equal losses and parameters, with a warm-up, and no drain, evaluation or ramp makes a difference."""
    training = Training(batches=sizes(p), warmup=4)
    expected = provisional_reference.train(training, provisional_reference.ByStage(p))
    assert_same(run(p, training), expected)
    drained = run(p, training, drains=(0, 3, 4, 6), evaluate=3)
    assert_same(drained, expected)
    assert all(outcome.evaluations == drained[0].evaluations for outcome in drained)
    assert len({str(each) for each in drained[0].evaluations}) == 4


def test_with_the_whole_gradient_it_is_flush():
    """One stage has done all microbatches when the next batch begins, so it predicts the step itself: bit-equal to
    training without a delay. Only clipping is guessed, from the step before.
    """
    training = Training(batches=(4, 4, 5, 8, 8, 4, 4, 4), warmup=4)
    assert_same(run(1, training), reference.train(training, delay=0))


@pytest.mark.parametrize("p", [1, 2, 4])
def test_evaluations_use_the_true_weights(p):
    """The last evaluation is the loss at the weights that the plain loop has by then."""
    training = Training(batches=(4,) * 4)
    outcomes = run(p, training, drains=(3,), evaluate=2)
    model = reference.build_model()
    model.load_state_dict(provisional_reference.train(training, provisional_reference.ByStage(p)).parameters)
    losses = [reference.loss_of(model(inputs), target).item() for inputs, target in map(reference.data, range(2))]
    [(total, count)] = outcomes[0].evaluations[0].values()
    assert total / count == pytest.approx(sum(losses) / 2, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_a_given_number_is_equal_over_the_degrees(num_read):
    """With the same number on every stage p=1, 2 and 4 are the plain loop, bit for bit; 0: error feedback."""
    training = Training(batches=(6, 6, 8, 8, 6, 7, 6, 6), warmup=3)
    expected = provisional_reference.train(training, uniform(num_read))
    for p in (1, 2, 4):
        assert_same(run(p, training, provisional_microbatches=num_read), expected)
        assert_same(run(p, training, provisional_microbatches=num_read, drains=(1, 5)), expected)


@pytest.mark.parametrize("num_read", [0, 2])
def test_with_muon(num_read):
    """Matrices are stepped as a whole, provisionally, too: each lies on one stage."""
    training = Training(batches=(4, 4, 5, 6, 4, 4), warmup=3, muon=True)
    expected = provisional_reference.train(training, uniform(num_read))
    assert_same(run(2, training, provisional_microbatches=num_read), expected)


def test_modes_and_2bw_and_flush_are_different_things():
    """So the tests above could fail."""
    training = Training(batches=(4,) * 6)
    losses = [
        provisional_reference.train(training, provisional_reference.ByStage(2)).losses,
        provisional_reference.train(training, uniform(1)).losses,
        provisional_reference.train(training, uniform(0)).losses,
        reference.train(training, delay=1).losses,
        reference.train(training, delay=0).losses,
    ]
    assert len({str(each) for each in losses}) == 5


@pytest.mark.parametrize("p", [2, 4])
def test_clipping(p):
    """A prediction is clipped as the step before was, or more where the norm of its stage asks for it."""
    training, number = Training(batches=sizes(p), clip_grad=0.05), provisional_reference.ByStage(p)
    expected = provisional_reference.train(training, number)
    assert min(expected.grad_norms) > training.clip_grad
    as_before = provisional_reference.train(training, lambda *of: number(*of))
    assert expected.losses != pytest.approx(as_before.losses, rel=1e-4)
    outcomes = run(p, training)
    assert_same(outcomes, expected, exact=False)
    for outcome in outcomes:
        assert [report.grad_norm for report in outcome.reports] == pytest.approx(expected.grad_norms, rel=1e-5)


def test_clipping_with_a_given_number_is_equal_over_the_degrees():
    """No stage may clip by what it alone knows."""
    training = Training(batches=(4, 4, 5, 6, 4, 4), clip_grad=0.05)
    expected = provisional_reference.train(training, uniform(1))
    for p in (1, 2, 4):
        assert_same(run(p, training, provisional_microbatches=1), expected, exact=False)


@pytest.mark.parametrize("p", [2, 4])
def test_tied_copies_are_clipped_alike(p):
    """By the norm of the gradient that both have, whatever the rest of their stages asks for."""
    training = Training(batches=(4, 4, 5, 6, 4, 4), clip_grad=0.05, tied=True)
    expected = provisional_reference.train(training, provisional_reference.ByStage(p, tied=True))
    outcomes = run(p, training)
    parameters = {name: tensor for outcome in outcomes for name, tensor in outcome.parameters.items()}
    for name, tensor in expected.parameters.items():
        torch.testing.assert_close(parameters[name], tensor, rtol=1e-5, atol=1e-6)
    first, last = outcomes[0].parameters, outcomes[-1].parameters
    assert torch.equal(first[reference.FIRST_WEIGHT], last[reference.LAST_WEIGHT])


@pytest.mark.parametrize("reduce_partial", [False, True])
def test_replicas(reduce_partial):
    """d=2, p=2: each replica predicts from its own gradients, or all from the mean; their true weights are equal."""
    training = Training(batches=(2, 2, 4, 4, 2, 3, 2, 2), clip_grad=0.05, num_replicas=2)
    number = provisional_reference.ByStage(2)
    expected = provisional_reference.train(training, number, reduce_partial=reduce_partial)
    other = provisional_reference.train(training, number, reduce_partial=not reduce_partial)
    assert expected.losses != pytest.approx(other.losses, rel=1e-6)
    outcomes = run(4, training, reduce_partial=reduce_partial)
    assert_same(outcomes, expected, exact=False)
    for first, second in ((0, 2), (1, 3)):
        for name, tensor in outcomes[first].parameters.items():
            assert torch.equal(tensor, outcomes[second].parameters[name])


@pytest.mark.parametrize(
    ("p", "num_read", "changes"),
    [
        (2, provisional_reference.ByStage(2), {"clip_grad": 0.1}),
        (2, uniform(3), {"clip_grad": 0.1, "warmup": 4}),
        (1, provisional_reference.ByStage(1), {"num_replicas": 2}),
    ],
    ids=["by stage", "uniform", "replicas"],
)
def test_sums_are_divided_by_the_newest_count_that_there_is(p, num_read, changes):
    """Steps divide by their own batch's count, predictions by that of the batch before, which all ranks know."""
    training = Training(batches=(4, 4, 5, 8, 8, 4), sums=True, **changes)
    expected = provisional_reference.train(training, num_read)
    options = {} if isinstance(num_read, provisional_reference.ByStage) else {"provisional_microbatches": 3}
    assert_same(run(p * training.num_replicas, training, **options), expected, exact=False)
    assert len({reference.sum_of(*reference.data(index))[1].item() for index in range(33)}) > 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"provisional_microbatches": 2}])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_tied_weights(p, options):
    """Both copies read the sum of the two stages' gradients of as many microbatches as both have done."""
    training = Training(batches=(6, 6, 7, 8, 6, 6, 6, 6), tied=True)
    number = uniform(2) if options else provisional_reference.ByStage(p, tied=True)
    expected = provisional_reference.train(training, number)
    outcomes = run(p, training, **options)
    parameters = {name: tensor for outcome in outcomes for name, tensor in outcome.parameters.items()}
    for name, tensor in expected.parameters.items():
        torch.testing.assert_close(parameters[name], tensor, rtol=1e-5, atol=1e-6)
    if p > 1:
        assert torch.equal(parameters[reference.FIRST_WEIGHT], parameters[reference.LAST_WEIGHT])


def test_an_overflow_leaves_no_prediction():
    """The batch that has it is skipped, and the one behind it is computed at the weights that there are."""
    training = Training(batches=(4,) * 8, poisoned_microbatch=13)
    expected = provisional_reference.train(training, uniform(2))
    outcomes = run(2, training, provisional_microbatches=2)
    for outcome in outcomes:
        assert [report.skipped for report in outcome.reports] == [batch == 3 for batch in range(8)]
        for name, tensor in outcome.parameters.items():
            assert torch.equal(tensor, expected.parameters[name])


def test_an_overflow_on_one_stage_leaves_tied_copies_equal():
    """Only the last stage reads the last microbatch of a batch: its layers stay, and both copies are predicted."""
    for poisoned in (6, 7):
        training = Training(batches=(4,) * 3, poisoned_microbatch=poisoned, tied=True)
        outcomes = run(2, training, drains=(1,), look_at_predictions=True)
        first, last = (outcome.predictions[0] for outcome in outcomes)
        assert torch.equal(first[reference.FIRST_WEIGHT], last[reference.LAST_WEIGHT])


@pytest.mark.parametrize("p", [2, 4])
def test_memory(p):
    """Two predicted sets of weights and the true one, two gradient buffers; as many saved microbatches as under 2bw."""
    outcomes = run(p, Training(batches=(p + 1,) * 6))
    assert [outcome.num_slots for outcome in outcomes] == [2] * p
    assert [outcome.peak_versions for outcome in outcomes] == [2] * p
    assert [outcome.peak_saved[stage] for stage, outcome in enumerate(outcomes)] == [p - stage for stage in range(p)]


def test_what_the_optimizer_does_not_step_stays():
    """A parameter that is in none of its groups has its value in every prediction, whatever lay in the slot."""
    parameters = {name: torch.nn.Parameter(torch.ones(3)) for name in ("stepped", "left out")}
    versions = PredictedVersions(
        parameters, make_slot=lambda: {name: torch.full((3,), float("nan")) for name in parameters}
    )
    optimizer = torch.optim.AdamW([parameters["stepped"]], lr=0.1)
    update = ModuleUpdate(parameters, versions=versions, optimizer=optimizer)
    for batch in range(2):
        info = BatchInfo(index=batch, num_microbatches=1, num_samples=1)
        update.begin_batch(info)
        update.begin_backward(info)
        for parameter in parameters.values():
            parameter.grad.fill_(1.0)
        update.predict(batch + 1, 1)
        predicted = versions.tensors(batch + 1)
        assert torch.equal(predicted["left out"], torch.ones(3))
        assert (predicted["stepped"] < 1).all()
        update.reduce_norm(batch + 1, 0, {"loss": (1.0, 1.0)})
        update.step(batch + 1)
