"""`Pipeline` over plain modules: what it computes is what one process computes, under any schedule."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.pipeline import Costs, Pipeline, Problem, synthesize
from megatron.pipeline.schedules import Schedule
from tests import open_tables, workers
from tests.pipeline.brought_programs import FOLDED, KEPT, KEPT_AND_SWAPS, RHYTHM, SWAPS, TORCH, written
from tests.pipeline.library import library_cases as cases
from tests.pipeline.library.library_cases import Run, single_process

CASES = "tests.pipeline.library.library_cases"


def run(num_ranks, settings, schedule, **options):
    return workers.run(num_ranks, f"{CASES}:run", run=settings, schedule=schedule, timeout=20, **options)


def assert_same(ranks, expected, *, exact=True, with_values=True):
    """Every rank has the reference's reports, and together they hold its parameters and buffers."""
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for outcome in ranks:
        assert outcome.losses == (expected.losses if exact else pytest.approx(expected.losses, rel=1e-5))
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-5)
        assert outcome.rates == expected.rates
        assert outcome.evaluations == pytest.approx(expected.evaluations, rel=1e-6)
    for outcome in ranks if with_values else ():
        for name, value in outcome.values.items():
            torch.testing.assert_close(value, expected.values[name], **close)
    if with_values:
        assert {name for outcome in ranks for name in outcome.values} == set(expected.values)


LESS = Problem(rank_of_stage=(0, 1, 2, 3), num_microbatches=4, costs=Costs(forward=[1.0, 1.0, 1.0, 2.4]), limits=3.0)
WAYS = {
    "flush": ("flush", 4, Run(scheduled=True), 0),
    "2bw": ("2bw", 4, Run(scheduled=True), 1),
    "flush-merged": ("flush", 2, Run(), 0),
    "interleaved": ("interleaved", 2, Run(), 0),
    "bpipe": ("bpipe", 4, Run(plain=True), 0),
    "zb-h1": ("zb-h1", 4, Run(), 0),
    "synthesized": (synthesize(LESS, rounds=2).schedule(), 4, Run(), 0),
    "recompute-of-norms": ("flush", 4, Run(recompute=True), 0),
    "gpipe": ("gpipe", 4, Run(), 0),
    "2bw-of-two": ("2bw", 2, Run(num_stages=2), 1),
    "gpipe-merged": ("gpipe", 2, Run(num_stages=6), 0),
    "recompute": ("2bw", 2, Run(num_stages=2, recompute=True), 1),
    "extra-warmup": (
        Schedule(order="1f1b", weights="2bw", num_stages=2, extra_warmup=True), 2, Run(num_stages=2, plain=True), 1
    ),
}  # fmt: skip


@pytest.mark.sample(2, "bpipe")
@pytest.mark.parametrize("way", WAYS)
def test_it_is_training_in_one_process(way):
    """Losses, parameters and running means are bit-equal, with frozen and with unused parameters and integers that
    travel; under 2bw gradients are those of the weights before.
    """
    schedule, num_ranks, settings, delay = WAYS[way]
    assert_same(run(num_ranks, settings, schedule), single_process(settings, delay=delay))


SINGLE, DOUBLE = Run(num_stages=2, waves=torch.float32), Run(num_stages=2, waves=torch.float64)
HALVED = "".join(f"0F{i},1F{i},1I{i},0I{i},1W{i},0W{i}," for i in range(4))


def test_complex_tensors_travel_with_their_gradients():
    """Beside real ones, conjugated or negated only when they are read, and of complex parameters: bit-equal."""
    settings = Run(num_stages=4, waves=torch.float32)
    assert_same(run(2, settings, "interleaved"), single_process(settings, delay=0))


@pytest.mark.sample(5)
@pytest.mark.parametrize("settings", [SINGLE, DOUBLE, replace(DOUBLE, clip_grad=0.3)])
@pytest.mark.parametrize(
    ("schedule", "delay"), [("flush", 0), ("halved", 0), ("recomputed", 0), ("2bw", 1), ("provisional", 0)]
)
def test_complex_and_double_parameters_are_trained_as_torch_trains_them(schedule, delay, settings, tmp_path):
    """Under 2bw, with predictions from whole batches, recomputed and with backwards in halves."""
    settings = replace(settings, recompute=schedule == "recomputed")
    if schedule == "provisional":  # a prediction does not know by what the step clips
        settings = replace(settings, clip_grad=1e9 if settings.clip_grad else 0.0)
    alone = replace(settings, num_stages=1)
    found = {
        "flush": lambda: cases.run(settings, "flush"),
        "halved": lambda: cases.run(settings, str(written(tmp_path, HALVED))),
        "recomputed": lambda: cases.run(settings, "flush"),
        "2bw": lambda: cases.run(alone, "2bw"),
        "provisional": lambda: cases.run(alone, "2bw", provisional=True),
    }[schedule]()
    expected = single_process(alone if schedule in ("2bw", "provisional") else settings, delay=delay)
    if not settings.clip_grad:
        assert_same([found], expected)
    assert found.losses == pytest.approx(expected.losses, rel=1e-13 if settings.waves is torch.float64 else 1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-13 if settings.waves is torch.float64 else 1e-6)


ASYNCHRONOUS, ALONE = (Schedule(order="async", weights="stale", recompute=True, num_stages=number) for number in (2, 1))
SUMS = {
    "flush": ("flush", 4, Run(evaluate=(1, 4)), 0),
    "clipped": ("flush", 2, Run(clip_grad=0.2), 0),
    "2bw": ("2bw", 2, Run(num_stages=2, clip_grad=0.2, evaluate=(2,)), 1),
    "pipedream": ("pipedream", 2, Run(num_stages=2, num_microbatches=1, drains=True), 0),
    "ftpipe": (ASYNCHRONOUS, 2, Run(num_stages=2, recompute=True, drains=True), 0),
    "zb-h1": ("zb-h1", 4, Run(), 0),
    "bpipe": ("bpipe", 4, Run(plain=True), 0),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", SUMS)
def test_a_loss_may_be_a_sum_and_its_count(way):
    """Microbatches count different numbers, and each counted label weighs the same in losses, norms and gradients,
    whenever a stage steps. Bit-equal but where a norm clips, which is added up in another order.
    """
    schedule, num_ranks, settings, delay = SUMS[way]
    settings = replace(settings, sums=True)
    expected = single_process(settings, delay=delay)
    assert expected.losses != single_process(replace(settings, sums=False), delay=delay).losses
    assert not settings.clip_grad or min(expected.norms) > settings.clip_grad
    assert_same(run(num_ranks, settings, schedule), expected, exact=not settings.clip_grad)


@pytest.mark.parametrize("first", [0, 1])
def test_nothing_is_predicted_before_anything_counts(first):
    """Where the first microbatch counts no label, or the whole first batch: nobody knows by what to divide, so the
    batch is computed at the newest weights, undecayed, and so are those behind until one has stepped.
    """
    expected = cases.late_labels_in_one_process(first)
    for outcome in workers.run(2, f"{CASES}:with_late_labels", first=first, timeout=20):
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-6, nan_ok=True)
        for name, value in outcome.values.items():
            torch.testing.assert_close(value, expected.values[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", ["pipedream", ASYNCHRONOUS, replace(ASYNCHRONOUS, weights="stale-provisional")])
def test_counts_are_of_their_own_batch(schedule):
    """Where stages step by themselves and batches overlap: with as much in each microbatch of a batch, but not of the
    next, what means compute to the last bit.
    """
    means, sums = (
        workers.run(2, f"{CASES}:with_counts_by_batch", schedule=schedule, sums=sums, timeout=20)
        for sums in (False, True)
    )
    for one, other in zip(means, sums, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        for name, value in one.values.items():
            assert torch.equal(value, other.values[name]), name


@pytest.mark.parametrize("schedule", ["flush", "pipedream"])
def test_a_count_is_any_real_number(schedule):
    """Of Python, of numpy or of torch; where it goes through the store, too."""
    losses = []
    for count in (2, 2.0, np.int64(2), np.float64(2), torch.tensor([2]), torch.tensor(2.0, requires_grad=True)):
        pipeline = Pipeline(
            torch.nn.Linear(2, 2), schedule, 1, loss=lambda output, target, count=count: (output.sum() * 0 + 6, count),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )  # fmt: skip
        report = pipeline.step((torch.ones(2, 2), torch.ones(2)))
        losses += [each.loss for each in (*([] if report is None else [report]), *pipeline.drain())]
        pipeline.close()
    assert losses == [3.0] * 6


def test_a_batch_that_counts_nothing_makes_no_step():
    """Nor does it move the learning rate. Its loss is that of torch's own mean over nothing."""
    for schedule in ("flush", "2bw", ALONE):
        module = torch.nn.Linear(2, 2)
        pipeline = Pipeline(
            module, schedule, 2, loss=lambda output, target: ((output * target).sum(), target.sum()),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        )  # fmt: skip
        before, reports = module.bias.detach().clone(), []
        for value in (1.0, 0.0, 1.0):
            report = pipeline.step((torch.ones(4, 2), torch.full((4, 2), value)))
            reports += [*([] if report is None else [report]), *pipeline.drain()]
        assert [report.skipped for report in reports] == [False, True, False]
        assert [math.isnan(report.loss) for report in reports] == [False, True, False]
        assert [report.learning_rate for report in reports] == pytest.approx([0.1, 0.01, 0.01])
        torch.testing.assert_close(module.bias, before - (0.1 + 0.01) / 2)
        pipeline.close()


def test_stages_in_a_v():
    """Under zbv the first and the last stage share a rank, which brings both modules."""
    settings = Run()
    assert_same(run(2, settings, "zbv", order=[0, 1, 1, 0]), single_process(settings, delay=0))


def test_reports_come_as_the_weights_allow():
    """With flushes step returns its own batch's report, under 2bw that of the batch before; all ranks have the same."""
    settings = Run(num_stages=2, plain=True)
    for schedule, returned in (("flush", [0, 1, 2, 3, 4, 5]), ("2bw", [None, 0, 1, 2, 3, 4])):
        outcomes = run(2, settings, schedule)
        assert [outcome.returned for outcome in outcomes] == [returned] * 2
        assert outcomes[0].samples == [8] * 6


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_shapes_may_change(schedule):
    """A smaller last batch, longer sequences and an evaluation with others are found out, and nothing is rounded
    differently for it.
    """
    settings = Run(sizes=(8, 8, 4, 8, 12, 4), lengths=(5, 5, 5, 9, 5, 5), evaluate=(1, 4))
    outcomes = run(4, settings, schedule)
    assert_same(outcomes, single_process(settings, delay=int(schedule == "2bw")))
    assert outcomes[0].samples == [8, 8, 4, 8, 12, 4]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("case", "schedule", "delay", "sums"),
    [
        ("in_replicas", "flush", 0, True),
        ("in_replicas", "2bw", 1, False),
        ("in_groups", "flush", 0, False),
        ("in_groups", "2bw", 1, True),
        ("in_replicas", "pipedream", 0, True),
        ("in_replicas", ASYNCHRONOUS, 0, True),
    ],
)
def test_replicas_average_their_gradients(case, schedule, delay, sums):
    """Two pipelines of two stages train on half of each batch; they hold the same weights. Where losses are sums, the
    replicas' halves count different numbers, of which each weighs the same.
    """
    updates_alone = schedule in ("pipedream", ASYNCHRONOUS)
    settings = Run(
        num_stages=2, plain=True, num_microbatches=1 if updates_alone else 2, sums=sums, drains=updates_alone
    )
    outcomes = workers.run(4, f"{CASES}:{case}", run=settings, schedule=schedule, timeout=20)
    whole = replace(settings, num_microbatches=2 * settings.num_microbatches)
    expected = single_process(whole, delay=delay)
    assert_same(outcomes, expected, exact=False)
    twins = ((0, 2), (1, 3)) if case == "in_replicas" else ((0, 1), (2, 3))
    for one, other in twins:
        for name, value in outcomes[one].values.items():
            assert torch.equal(value, outcomes[other].values[name])
    assert outcomes[0].samples == [8] * 6


def test_unused_parameters_are_left_alone_by_replicas():
    """Weight decay does not touch a parameter that no replica has used."""
    settings = Run(num_stages=2, num_microbatches=2)
    outcomes = workers.run(4, f"{CASES}:in_replicas", run=settings, schedule="flush", timeout=20)
    began = cases.values_of(dict(enumerate(cases.build(2))))
    assert torch.equal(outcomes[0].values["0.unused.weight"], began["0.unused.weight"])
    assert not torch.equal(outcomes[0].values["0.embedding.weight"], began["0.embedding.weight"])


@pytest.mark.parametrize(
    ("text", "delay", "order"),
    [
        (TORCH, 0, [0, 1]),
        (RHYTHM, 1, [0, 1]),
        (FOLDED, 1, [1, 0, 0, 1]),
        (SWAPS, 0, [0, 1]),
        (KEPT, 0, [0, 1]),
        (KEPT_AND_SWAPS, 0, [0, 1]),
    ],
)
def test_it_runs_the_rows_of_a_file(text, delay, order, tmp_path):
    """Programs that no preset has, computations alone; one has the first stage on the second rank, one copies
    activations to the host, one recomputes some microbatches, and one does both.
    """
    settings = Run(num_stages=len(order), plain=True)
    outcomes = run(2, settings, str(written(tmp_path, text)), order=order)
    assert_same(outcomes, single_process(settings, delay=delay))


def test_it_runs_orders_that_users_register():
    """By the name of a preset of somebody's own: batches of three whose rows are entangled, and a zigzag under a policy
    of three versions.
    """
    settings = Run(num_stages=1, plain=True, num_microbatches=3, sizes=(6,) * 6)
    assert_same(run(1, settings, "2bw-entangled", registered=True), single_process(settings, delay=1))
    settings = Run(plain=True, num_microbatches=2)
    outcomes = run(2, settings, open_tables.PRESET, registered=True, order=[1, 0, 0, 1])
    assert_same(outcomes, single_process(settings, delay=2))


def test_stages_may_be_a_graph():
    """A module that hands different tensors to two stages returns a dict; the other one gets them as arguments, by the
    order of their stages. The loss falls as in one process.
    """
    from megatron.pipeline.program.edges import Edge

    edges = tuple(map(Edge.parse, ("0>1", "0>2", "1>2")))
    outcomes = workers.run(
        3, f"{CASES}:over_a_graph", schedule=Schedule(order="1f1b", weights="flush", num_stages=3, edges=edges)
    )
    fork, middle, join = modules = cases.graph_modules()
    optimizer = cases.make_optimizer([each for module in modules for each in module.parameters()])
    losses = []
    for index in range(6):
        optimizer.zero_grad()
        pairs = zip(*(each.chunk(4) for each in cases.data(index, plain=True)), strict=True)
        losses.append(0.0)
        for inputs, targets in pairs:
            made = fork(inputs)
            loss = cases.loss_of(join(made[2], middle(made[1])), targets)
            (loss / 4).backward()
            losses[-1] += loss.item() / 4
        optimizer.step()
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(("schedule", "delay"), [("flush", 0), ("2bw", 1)])
def test_two_stages_may_tie_a_parameter(schedule, delay):
    """An embedding that is the output layer, too, on two ranks: both copies stay equal, and the loss is that of one."""
    first, last = workers.run(2, f"{CASES}:with_tie", schedule=schedule)
    assert torch.equal(first.values["0.weight"], last.values["1.weight"])
    assert first.losses == last.losses and first.losses[-1] != first.losses[0]
    weight = cases.Tied(is_first=True).weight
    optimizer, versions, losses = cases.make_optimizer([weight]), [weight.detach().clone()], []
    for index in range(6):
        weight.data = versions[max(index - delay, 0)].clone()
        optimizer.zero_grad()
        losses.append(0.0)
        for ids, targets in zip(*(each.chunk(4) for each in cases.data(index)), strict=True):
            output = torch.nn.functional.linear(torch.nn.functional.embedding(ids, weight), weight)
            loss = cases.loss_of(output, targets)
            (loss / 4).backward()
            losses[-1] += loss.item() / 4
        weight.data = versions[index].clone()
        optimizer.step()
        versions.append(weight.detach().clone())
    assert first.losses == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(first.values["0.weight"], versions[-1])


def test_bfloat16_is_autocast():
    """Transfers have the dtype that the modules make, and the loss is near that of FP32."""
    settings = Run(num_stages=2, plain=True)
    outcomes = run(2, settings, "flush", autocast=torch.bfloat16)
    expected = single_process(settings, delay=0)
    assert outcomes[0].losses == outcomes[1].losses
    assert outcomes[0].losses != expected.losses
    assert outcomes[0].losses == pytest.approx(expected.losses, rel=0.02)
    assert all(value.dtype is torch.float32 for value in outcomes[0].values.values())


def test_a_pipeline_may_be_a_part_of_the_world():
    """Two ranks of four, by their group."""
    outcomes = workers.run(4, f"{CASES}:in_a_part_of_the_world", timeout=20)
    expected = single_process(Run(num_stages=2, plain=True), delay=0)
    assert outcomes == [[], expected.losses, expected.losses, []]


def test_the_timeline_shows_the_last_batches():
    """On the first rank: the batches that are kept, each with its forwards and backwards on all stages."""
    first, second = run(2, Run(num_stages=2, plain=True), "2bw", timeline=True, traced_batches=3)
    assert second.timeline is None
    assert (first.timeline.first_batch, first.timeline.batches) == (3, (4, 4, 4))
    forwards = [span for span in first.timeline.spans if span.instruction.kind.value == "F"]
    assert len(forwards) == 2 * 3 * 4


def test_predicted_weights():
    """2bw with and without prediction differ, and both ranks have the same losses."""
    settings = Run(num_stages=2, plain=True)
    outcomes = run(2, settings, "2bw", provisional=True)
    assert outcomes[0].losses == outcomes[1].losses != single_process(settings, delay=1).losses


REFUSALS = {
    "unsplittable": "a batch of 7 samples cannot be split into 4 equal microbatches; give a multiple of 4",
    "missing": "none is given; call step(batch) on it",
    "triple": "a batch of 3 parts is not (inputs, targets)",
    "broken_module": "stage 0 cannot compute a microbatch",
    "different_numbers": "num_microbatches is",
    "uneven_modules": "the ranks give [2, 1] modules",
    "no_optimizer": "no optimizer today",
    "of_another_rank": "was saved with stages",
    "of_another_rule": "was saved with weights 2bw-provisional, error feedback, and this rank has 2bw-provisional",
    "two_guesses": "provisional and error_feedback are two guesses of one update; give one of them",
    "feedback_of_flush": "the schedule's weights are flush; make them 2bw-provisional there",
    "l2l": "keeps weights on the host",
    "pipedream_in_microbatches": "updates after every microbatch",
    "clipped_pipedream": "every stage steps before the norm",
    "unknown": "there is no schedule '1f1b-of-mine'",
    "loss_of_no_kind": "the loss is a tensor of shape (2, 6); return its mean over the microbatch, a real scalar",
    "losses_of_two_kinds": "the loss returns means in some replicas and (sum, count) in others",
    "count_of_no_kind": "the loss counts a str; return (sum, count) with a number",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_said_on_all_ranks(case):
    """In one sentence, as a ValueError; behind one in a step the pipeline goes on as if it had not been called."""
    for message in workers.run(2, f"{CASES}:message", make_error=case, timeout=20):
        assert REFUSALS[case] in message
