"""The replay of variants of stale weights computes what the project's own policy does; provisional steps are steps."""

import copy

import pytest
import torch
from torch import nn

from megatron.pipeline.program.edges import Edge
from papers.ftpipe import stale_variants
from papers.ftpipe.stale_variants import RULES, ReplayedStage, replay
from tests.pipeline.runtime import graph_cases
from tests.pipeline.runtime.graph_cases import Shape
from tests.pipeline.runtime.test_graph import run

FULL = pytest.mark.full
FIRST = {("stale", "sgd", 1), ("provisional", "adamw", 3)}
ALL_RULES = [pytest.param(rule, marks=() if rule == "provisional" else FULL) for rule in RULES]
NUM_STAGES = 5
CHAIN = Shape(tuple(Edge(stage, stage + 1) for stage in range(NUM_STAGES - 1)), (0,) * NUM_STAGES)


class OfChain(nn.Module):
    """A node of the runtime's tests, with the arguments of the replay."""

    def __init__(self, stage):
        super().__init__()
        self.node = graph_cases.Node(CHAIN, stage)

    def forward(self, data, handed):
        number = self.node.stage
        whole = handed if number % 2 else self._with_ids(data, handed)
        outputs, loss = self.node(data, {number - 1: whole} if number else {})
        return (loss,) if loss is not None else tuple(each for each in outputs[number + 1] if each.is_floating_point())

    def _with_ids(self, data, handed):
        """Replayed stages hand on what has a gradient; ids are what they are for any weights."""
        ids = torch.full((graph_cases.SAMPLES, 1), (data[0] + self.node.stage - 1) % 5)
        return (handed[0], ids, *handed[1:]) if handed else ()


def trained(rule, *, kind="adamw", depths=None, num_batches=5, size=2, lr=0.1):
    """(stages, losses)."""
    stages = [
        ReplayedStage(
            OfChain(stage),
            NUM_STAGES - 1 - stage if depths is None else depths[stage],
            lambda parameters: graph_cases.optimizer_of(parameters, lr=lr, kind=kind),
            lambda optimizer: graph_cases.scheduler_of(optimizer, kind=kind),
            rule,
        )
        for stage in range(NUM_STAGES)
    ]
    return stages, replay(stages, graph_cases.data_of, num_batches=num_batches, size=size)


def weights_of(stages):
    return {
        f"{number}.{name}": each.detach()
        for number, stage in enumerate(stages)
        for name, each in stage.module.node.named_parameters()
    }


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("rule", "kind", "size"),
    [
        pytest.param(rule, kind, size, marks=() if (rule, kind, size) in FIRST else FULL)
        for rule in ("stale", "predicted", "gap-aware", "provisional")
        for kind in ("sgd", "adamw")
        for size in (1, 2, 3)
    ],
)
def test_it_is_the_replay_of_the_runtime(rule, kind, size):
    """Which processes compute bit for bit (tests/pipeline/runtime)."""
    stages, losses = trained(rule, kind=kind, size=size)
    expected = graph_cases.replayed(
        CHAIN,
        (size,) * 5,
        recompute=True,
        kind=kind,
        predict=rule == "predicted",
        gap_aware=rule == "gap-aware",
        provisional=rule == "provisional",
    )
    assert same(weights_of(stages), expected.parameters)
    of_batches = [sum(losses[size * batch :][:size]) / size for batch in range(5)]
    assert of_batches == [pytest.approx(each.losses["loss"], rel=1e-12) for each in expected.reports]


@pytest.mark.parametrize("rule", [*(pytest.param(each, marks=FULL) for each in ("stale", "predicted")), "provisional"])
def test_it_is_the_policy(rule):
    """The replay is that of one process that has all stages and executes the program."""
    chosen = {"predict": rule == "predicted", "provisional": rule == "provisional"}
    (outcome,) = run(CHAIN, preset="stale", batches=(2,) * 4, recompute=True, kind="adamw", **chosen)
    assert same(weights_of(trained(rule, num_batches=4)[0]), outcome.parameters)


@pytest.mark.parametrize("rule", ALL_RULES)
def test_without_depth_it_is_plain(rule):
    stages, _ = trained(rule, kind="sgd", depths=[0] * NUM_STAGES)
    plain = graph_cases.in_one_process(CHAIN, (2,) * 5)
    for name, each in weights_of(stages).items():
        torch.testing.assert_close(each, plain.parameters[name], rtol=1e-6, atol=1e-7)
    assert not same(weights_of(trained(rule, kind="sgd")[0]), weights_of(stages))


@pytest.mark.parametrize("rule", ALL_RULES)
def test_without_steps_nothing_is_stale(rule):
    """With a learning rate of 0, losses and the optimizer's state are those of flush."""
    stages, losses = trained(rule, lr=0.0)
    plain, expected = trained("stale", lr=0.0, depths=[0] * NUM_STAGES)
    assert losses == expected
    for one, other in zip(stages, plain, strict=True):
        for mine, theirs in zip(one.parameters, other.parameters, strict=True):
            assert torch.equal(one.optimizer.state[mine]["exp_avg"], other.optimizer.state[theirs]["exp_avg"])


def test_one_microbatch_leaves_nothing_that_is_not_stepped():
    """So provisional steps begin with accumulation, and come at every second forward of two."""
    for rule, other in (("provisional", "stale"), ("provisional, predicted", "predicted")):
        stages, _ = trained(rule, size=1, num_batches=9)
        assert same(weights_of(stages), weights_of(trained(other, size=1, num_batches=9)[0]))
        assert not any(stage.num_provisional for stage in stages)
    stages, _ = trained("provisional", size=2)
    assert [stage.num_provisional for stage in stages] == [3, 3, 4, 4, 0]


@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=FULL), "adamw"])
def test_with_all_gradients_a_provisional_step_is_the_step(kind):
    """Judged on one stage, shown behind its last backward but before its step; then as the predictor goes on."""
    (stage,) = trained("provisional, predicted", kind=kind)[0][1:2]
    for parameter in stage.parameters:
        parameter.grad = torch.randn_like(parameter) / 3
    stage.num_unstepped = 3
    true = [each.detach().clone() for each in stage.parameters]

    def shown(horizon):
        with stage.weights_of_forward(stage.num_steps + horizon, 3):
            return [each.detach().clone() for each in stage.parameters]

    one, three = shown(1), shown(3)
    assert all(torch.equal(each, before) for each, before in zip(stage.parameters, true, strict=True))
    state = copy.deepcopy(stage.optimizer.state_dict()["state"])
    stage.rule = "provisional"
    assert all(map(torch.equal, shown(3), one)), "without predictions it stays there"
    assert str(state) == str(stage.optimizer.state_dict()["state"])
    stage.step()
    assert all(map(torch.equal, stage.parameters, one))
    stage.rule = "predicted"
    for found, expected in zip(three, shown(2), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert not any(map(torch.equal, three, one))


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"'slow' is no rule for forwards at stale weights; there are stale, "):
        ReplayedStage(nn.Linear(1, 1), 0, torch.optim.Adam, lambda optimizer: None, "slow")


def results(**losses):
    return [
        {"task": "reviews", "variant": variant.replace("_", ", "), "size": 4, "rate": 0.1, "seed": seed, "loss": loss,
         "accuracy": 0.5, "seconds": 1.0}
        for variant, found in losses.items()
        for seed, loss in enumerate(found)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("provisional", "wins"),
    [
        ([1.02, 1.03, 1.02], True),
        pytest.param([1.07, 1.08, 1.07], False, marks=FULL),  # less than half
        pytest.param([1.04, 1.0, 1.07], False, marks=FULL),  # a spread larger than what it is ahead
    ],
)
def test_the_rule_by_which_one_wins(provisional, wins, capsys):
    flush, stale, predicted = [1.0] * 3, [1.1, 1.11, 1.1], [1.08, 1.09, 1.08]
    found = results(flush=flush, stale=stale, predicted=predicted, provisional=provisional)
    case = stale_variants.over_flush(found)["reviews", 4, 0.1]
    assert stale_variants.verdict(case, 1.0, "provisional")[2] is wins
    assert not stale_variants.verdict(case, 0.9, "provisional")[2], "flush has to train well"
    stale_variants.show(found)
    text = capsys.readouterr().out
    assert "+10.0% (+10.0 to +11.0); 0.500" in text and ("does not win" in text) is not wins
