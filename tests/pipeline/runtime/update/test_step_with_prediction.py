"""A step and the prediction behind it, in one pass, lead bit for bit where the two lead one after the other."""

import copy
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron.pipeline.runtime.contract.stage import BatchInfo
from megatron.pipeline.runtime.stages.module.update import ModuleUpdate
from megatron.pipeline.runtime.update import elementwise_step
from megatron.pipeline.runtime.update.elementwise_step import DueStep
from megatron.pipeline.runtime.update.muon import Muon
from megatron.pipeline.runtime.update.provisional_step import ProvisionalStep
from megatron.pipeline.runtime.update.weight_prediction import PredictedVersions
from tests import workers
from tests.draws import draws
from tests.pipeline.runtime.stages.module import module_cases
from tests.pipeline.runtime.stages.module.reference import Training

RATES = st.sampled_from([1e-3, 0.05, 0.3])
DECAYS = st.sampled_from([0.0, 0.1])
ADAM = st.fixed_dictionaries(
    {
        "lr": RATES,
        "weight_decay": DECAYS,
        "betas": st.sampled_from([(0.9, 0.999), (0.3, 0.6)]),
        "eps": st.sampled_from([1e-8, 1e-4]),
        "decoupled_weight_decay": st.booleans(),
        "kernel": st.sampled_from(["foreach", "loop", "fused"]),
    }
)
ADAMW = ADAM.map(lambda options: {name: each for name, each in options.items() if name != "decoupled_weight_decay"})
SGD = st.one_of(
    st.fixed_dictionaries(
        {
            "lr": RATES,
            "weight_decay": DECAYS,
            "momentum": st.sampled_from([0.0, 0.9]),
            "dampening": st.sampled_from([0.0, 0.3]),
            "kernel": st.sampled_from(["loop", "fused"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "lr": RATES,
            "weight_decay": DECAYS,
            "momentum": st.just(0.9),
            "nesterov": st.just(True),
            "kernel": st.sampled_from(["loop", "fused"]),
        }
    ),
)
OPTIMIZERS = st.one_of(
    st.tuples(st.just(torch.optim.Adam), ADAM),
    st.tuples(st.just(torch.optim.AdamW), ADAMW),
    st.tuples(st.just(torch.optim.SGD), SGD),
)
BLOCK = 16
ONE = st.fixed_dictionaries(
    {
        "size": st.integers(1, 70),
        "has_gradient": st.booleans(),
        "partial": st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16]),
        "target": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        "where": st.sampled_from([None, True, False]),
    }
)


def build(kind, options, sizes, *, num_steps=3):
    """An optimizer over parameters of these sizes in two groups, which has stepped so often.

    `options` has torch's options, or `kernel` in the place of `foreach` and `fused`.
    """
    options = dict(options)
    if (kernel := options.pop("kernel", None)) is not None:
        options |= {"foreach": kernel == "foreach", "fused": kernel == "fused"}
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
    optimizer = kind([group for group in groups if group["params"]], **options)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    optimizer.zero_grad()
    return parameters, optimizer


def take(parameters, optimizer, each_of, *, factor, share, puts_off, rate=0.7):
    """A step with `factor`, a change of the learning rate, and a prediction with `share`. What can be seen of it."""
    generator = torch.Generator().manual_seed(4)
    gradients, targets = {}, {}
    for parameter, each in zip(parameters, each_of, strict=True):
        true, partial = (torch.randn(parameter.shape, generator=generator) for _ in range(2))
        parameter.grad = true if each["has_gradient"] else None
        gradients[parameter] = None if each["partial"] is None else (partial.to(each["partial"]), share)
        targets[parameter] = torch.zeros(parameter.shape, dtype=each["target"])
    wheres = {p: each["where"] for p, each in zip(parameters, each_of, strict=True)}
    provisional = ProvisionalStep(optimizer)
    provisional.step(factor, puts_off=puts_off)
    num_due = len(provisional.due)
    for group in optimizer.param_groups:  # as a scheduler does between the two
        group["lr"] *= rate
    provisional.take(
        gradients.__getitem__,
        targets.__getitem__,
        where=lambda p: None if wheres[p] is None else torch.tensor(wheres[p]),
    )
    assert not provisional.due
    state = [value for p in parameters for _, value in sorted(optimizer.state.get(p, {}).items())]
    return num_due, [*(p.detach() for p in parameters), *targets.values(), *state]


def equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(one, other) and one.dtype is other.dtype for one, other in zip(first, second, strict=True)
    )


@draws(150, suppress=(HealthCheck.function_scoped_fixture,))
@given(
    made=OPTIMIZERS,
    each_of=st.lists(ONE, min_size=1, max_size=5),
    factor=st.sampled_from([1.0, 0.37]),
    share=st.sampled_from([1.0, 1.5, torch.tensor(0.6), torch.tensor(1.0, dtype=torch.float64)]),
)
def test_one_pass_has_the_bits_of_both(monkeypatch, made, each_of, factor, share):
    """Weights, state and predictions, over options, sizes around blocks, types, clipping and what is left out."""
    monkeypatch.setattr(elementwise_step, "BLOCK", BLOCK)
    found = []
    for puts_off in (False, True):
        parameters, optimizer = build(*made, [each["size"] for each in each_of])
        found.append(take(parameters, optimizer, each_of, factor=factor, share=share, puts_off=puts_off))
    (none, expected), (num_due, values) = found
    assert none == 0 and num_due == sum(each["has_gradient"] for each in each_of)
    assert equal(values, expected)


PLAIN = {"has_gradient": True, "partial": torch.float32, "target": torch.float32, "where": None}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["loop", "fused"])
@pytest.mark.parametrize("threads", [1, 2])
def test_whole_blocks_and_threads(threads, options):
    """With the block that is used; the optimizer's own step takes parts of the whole parameter on each thread."""
    sizes = [3 * elementwise_step.BLOCK + 5, 2 * elementwise_step.BLOCK, 100_003]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (_, expected), (num_due, values) = (
            take(*build(torch.optim.AdamW, options, sizes), [PLAIN] * 3, factor=0.5, share=1.5, puts_off=puts_off)
            for puts_off in (False, True)
        )
    finally:
        torch.set_num_threads(before)
    assert num_due == 3 and equal(values, expected)


def test_beside_muon_the_other_groups_are_put_off():
    """Muon's matrices are stepped at once, with the clipped gradients."""

    def run(puts_off):
        generator = torch.Generator().manual_seed(5)
        matrix, vector = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((6, 4), (9,)))
        muon = Muon([{"params": [matrix], "muon": "whole"}, {"params": [vector]}], lr=0.02)
        for parameter in (matrix, vector):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        muon.step()
        return take([matrix, vector], muon, [PLAIN] * 2, factor=0.5, share=1.5, puts_off=puts_off)

    (_, expected), (num_due, values) = map(run, (False, True))
    assert num_due == 1 and equal(values, expected)


class Amsgrad(torch.optim.AdamW):
    def __init__(self, params, **options):
        super().__init__(params, amsgrad=True, **options)


@pytest.mark.parametrize(
    ("kind", "options", "num_steps"),
    [
        (torch.optim.AdamW, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 0),
        (torch.optim.AdamW, {"amsgrad": True}, 3),
        (torch.optim.AdamW, {"maximize": True}, 3),
        (torch.optim.AdamW, {"fused": True, "maximize": True}, 3),
        (torch.optim.Adagrad, {}, 3),
        (Amsgrad, {}, 3),
    ],
)
def test_what_is_not_known_is_stepped_first(kind, options, num_steps):
    """A first step, which makes the moments; other options and optimizers."""
    (_, expected), (num_due, values) = (
        take(*build(kind, copy.deepcopy(options), [5, 40], num_steps=num_steps), [PLAIN] * 2,
             factor=0.5, share=1.5, puts_off=puts_off)
        for puts_off in (False, True)
    )  # fmt: skip
    assert num_due == 0 and equal(values, expected)


def test_a_group_that_is_not_known_is_stepped_first():
    """The learning rate of one group is a tensor; the other group is put off."""
    (_, expected), (num_due, values) = (
        take(*build(torch.optim.AdamW, {"lr": torch.tensor(0.01)}, [5, 40, 33]), [PLAIN] * 3,
             factor=0.5, share=1.5, puts_off=puts_off)
        for puts_off in (False, True)
    )  # fmt: skip
    assert num_due == 1 and equal(values, expected)


def test_parameters_that_share_a_count_are_stepped_first():
    """torch counts a step for each of them before anything is predicted."""
    results = []
    for puts_off in (False, True):
        parameters, optimizer = build(torch.optim.AdamW, {}, [5, 40])
        count = torch.tensor(3.0)
        for state in optimizer.state.values():
            state["step"] = count
        results.append(take(parameters, optimizer, [PLAIN] * 2, factor=0.5, share=1.5, puts_off=puts_off))
    assert results[1][0] == 0 and equal(results[0][1], results[1][1])


def watch(optimizer, how, calls):
    """Watch steps, and return what ends that."""
    note = lambda *args: calls.append(args)  # noqa: E731
    if how == "other step":
        step = optimizer.step
        optimizer.step = lambda: (calls.append("step"), step())
        return lambda: None
    register = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "global pre": register_optimizer_step_pre_hook,
        "global post": register_optimizer_step_post_hook,
    }[how]
    return register(note).remove


@pytest.mark.parametrize("how", ["pre", "post", "global pre", "global post", "other step"])
def test_a_watched_step_is_taken_first(how):
    """A hook, or a `step` that somebody has set: it runs, once, before the prediction."""
    results = []
    for puts_off in (False, True):
        parameters, optimizer = build(torch.optim.AdamW, {}, [5, 40])
        calls = []
        end = watch(optimizer, how, calls)
        try:
            results.append(take(parameters, optimizer, [PLAIN] * 2, factor=0.5, share=1.5, puts_off=puts_off))
        finally:
            end()
        assert len(calls) == 1
    assert results[1][0] == 0 and equal(results[0][1], results[1][1])


def test_a_scheduler_takes_the_step_as_made():
    """It warns if it steps before the optimizer; its own mark on `step` hides no pass."""
    parameters, optimizer = build(torch.optim.SGD, {"lr": 0.1}, [5, 40], num_steps=0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    provisional = ProvisionalStep(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    provisional.step(puts_off=True)
    assert len(provisional.due) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


# --- in an update and in a pipeline


def counted(monkeypatch):
    """A list that grows with each step that a pass takes."""
    calls, begin = [], DueStep.begin
    monkeypatch.setattr(DueStep, "begin", lambda self: (calls.append(self), begin(self))[1])
    return calls


def updated(*, with_prediction):
    """True and predicted weights behind some batches of a module of two weights, of which one gets no gradient."""
    parameters = {name: torch.nn.Parameter(torch.linspace(-1, 1, size)) for name, size in (("a", 70), ("b", 5))}
    versions = PredictedVersions(parameters)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    update = ModuleUpdate(
        parameters, versions=versions, optimizer=optimizer, scheduler=scheduler, clip_grad=0.5, skips_unused=True
    )
    for batch in range(5):
        info = BatchInfo(index=batch, num_microbatches=1, num_samples=1)
        update.begin_batch(info)
        update.begin_backward(info)
        parameters["a"].grad.fill_(1.0 + batch).mul_(torch.linspace(1, 2, 70))
        if batch > 0:
            update.step(batch, **({"with_prediction": True} if with_prediction else {}))
        update.predict(batch + 1, 1)
        update.reduce_norm(batch + 1, 0, {"loss": (1.0, 1.0)})
    predicted = copy.deepcopy(versions.tensors(5))
    return [*predicted.values(), *versions.newest_tensors().values(), *optimizer.state[parameters["a"]].values()]


def test_an_update_steps_in_the_prediction(monkeypatch):
    """From the second step on, with the learning rate of the step, and only the weight that has a gradient."""
    expected = updated(with_prediction=False)
    calls = counted(monkeypatch)
    assert equal(updated(with_prediction=True), expected)
    assert len(calls) == 3


def case(num_batches, **options):
    """The number of steps that passes took on this rank, and of parameters."""
    with pytest.MonkeyPatch.context() as patched:
        calls = counted(patched)
        outcome = module_cases.run(preset="2bw", predict=True, training=Training(batches=(4,) * num_batches), **options)
        return len(calls), len({id(each.operands.parameter) for each in calls}), len(outcome.parameters)


@pytest.mark.parametrize(
    ("options", "num_left"),
    [({}, 2), ({"provisional_microbatches": 1}, 2), ({"drains": (3,)}, 3), ({"provisional_microbatches": 0}, 6)],
)
def test_a_pipeline_steps_in_the_predictions(options, num_left):
    """All steps but the first, which makes moments, and one at the end and at a drain, which no prediction follows.

    Error feedback takes none: it needs the weights from before the step.
    """
    for calls, parameters, _ in workers.run(2, f"{__name__}:case", num_batches=6, timeout=60, **options):
        assert calls == (6 - num_left) * parameters
