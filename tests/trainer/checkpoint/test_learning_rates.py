"""Whose learning rates a resumed run has: the command line's, the checkpoint's, or a sentence that says they differ."""

from unittest import mock

import pytest

from megatron import backend

backend.install()  # before anything imports megatron.core

from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.stages.megatron.optimizers import optimizers_of
from tests.trainer.run.run_case import numbered_names, train

OVERRIDE = "--override-opt_param-scheduler"
CHECKPOINTS = "--use-checkpoint-opt_param-scheduler"
FLAGS = "--clip-grad 0 --untie-embeddings-and-output-weights --pipeline-model-parallel-size 1 --train-iters 4"
RATES = "--lr 1e-2 --decoupled-lr 5e-3"
OTHERS = "--lr 1e-3 --decoupled-lr 2e-3"


def rates_of(run):
    """For `watch`: the learning rates of the groups that have parameters, at the end."""
    return lambda: sorted({group["lr"] for group in run.optimizer.param_groups if group["params"]})


def rates_by_parameter(run):
    """For `watch`: the learning rate of each parameter, by its name in the whole model, at the end."""

    def rates() -> dict[str, float]:
        names = {id(value): name for chunk in run.chunks for name, value in numbered_names(unwrap_model(chunk))}
        return {
            names[id(parameter)]: group["lr"]
            for each in optimizers_of(run.optimizer) for group in each.param_groups for parameter in group["params"]
        }  # fmt: skip

    return rates


def refusal_case(**options) -> str:
    from tests.trainer.run.run_case import train_case

    with pytest.raises(ValueError) as caught:
        train_case(**options)
    return str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run with two learning rates that has stopped in its middle."""
    made = tmp_path_factory.mktemp("rates")
    train(1, f"{FLAGS} {RATES} --save {made} --exit-interval 2")
    return made


def logged_case(**options) -> dict:
    """`train_case`, and what loading logs."""
    from megatron.trainer.checkpoint import checkpoint
    from tests.trainer.run.run_case import train_case

    logged: list[str] = []
    with mock.patch.object(checkpoint, "log_once", logged.append):
        return {**train_case(**options), "logged": logged}


@pytest.mark.parametrize(
    ("whose", "expected", "further", "told"),
    [
        (OVERRIDE, [1e-3, 2e-3], "", None),
        (
            CHECKPOINTS, [5e-3, 1e-2], "--adam-beta2 0.95 --adam-eps 1e-8",
            "--adam-beta1 --adam-beta2: the optimizer goes on with 0.9 0.999, the checkpoint's, and not with 0.9 0.95; "
            "--no-load-optim begins with the latter and no moments",
        ),
    ],
)  # fmt: skip
def test_the_flags_say_whose_rates_hold(folder, whose, expected, further, told):
    """Of each group of parameters, though a checkpoint has the groups' rates, too. Adam's other settings are always the
    checkpoint's, and a line says so where the flags have others."""
    [resumed] = train(
        1, f"{FLAGS} {OTHERS} --load {folder} {whose} {further}", watch=f"{__name__}:rates_of",
        function=f"{__name__}:logged_case",
    )  # fmt: skip
    assert resumed["watched"] == expected
    assert resumed["logged"] == ([told] if told else [])
    assert resumed["iteration"] == 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        (2, "--bf16 --use-distributed-optimizer"),
        (1, "--pipeline-schedule l2l"),
        (1, "--optimizer muon --muon-scalar-lr 3e-3"),
    ],
)
def test_other_optimizers_follow_the_command_line(num_ranks, flags, tmp_path):
    train(num_ranks, f"{FLAGS} {RATES} {flags} --save {tmp_path} --exit-interval 2")
    flags = flags.replace("3e-3", "4e-3")
    resumed = train(num_ranks, f"{FLAGS} {OTHERS} {flags} --load {tmp_path} {OVERRIDE}", watch=f"{__name__}:rates_of")
    assert resumed[0]["watched"] == [1e-3, 2e-3, *([4e-3] if "4e-3" in flags else [])]


@pytest.mark.parametrize(
    ("there", "here"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.full)], ids=["to more parts", "to fewer parts"]
)
def test_each_group_has_its_rates_at_other_degrees(there, here, tmp_path):
    """Experts that ranks share out have an optimizer of their own; nothing else is said of the schedule."""
    flags = f"{FLAGS} {RATES} --num-experts 4 --moe-aux-loss-coeff 1e-2"
    train(2, f"{flags} --expert-model-parallel-size {there} --save {tmp_path} --exit-interval 2")
    resumed = train(
        2, f"{flags} --expert-model-parallel-size {here} --load {tmp_path}", watch=f"{__name__}:rates_by_parameter"
    )
    for rates in (each["watched"] for each in resumed):
        ends = {name: rate for name, rate in rates.items() if "word_embeddings" in name or "output_layer" in name}
        assert set(ends.values()) == {5e-3} and len(ends) == 2
        assert {rates[name] for name in rates.keys() - ends.keys()} == {1e-2}


def test_the_distributed_optimizer_lacks_no_group_either(tmp_path):
    flags = f"{FLAGS} --bf16 --use-distributed-optimizer --lr 1e-2"
    train(1, f"{flags} --save {tmp_path} --exit-interval 2")
    function = f"{__name__}:refusal_case"
    [said] = train(1, f"{flags} --decoupled-lr 5e-3 {OVERRIDE} --load {tmp_path}", function=function)
    assert "optimizer has 2 groups of parameters by learning rate and weight decay, and this run has 3" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr 1e-2 --decoupled-lr 2e-3", "a group of parameters has {'max_lr': 0.005, 'min_lr': 0.0} there, and"),
        ("--lr 1e-2 " + OVERRIDE, "optimizer has 3 groups of parameters by learning rate and weight decay"),
    ],
    ids=["another rate of a group", "no such group"],
)
def test_rates_that_do_not_fit_are_one_sentence(folder, flags, message):
    """Without a flag that says whose hold, and where a group is missing."""
    [said] = train(1, f"{FLAGS} {flags} --load {folder}", function=f"{__name__}:refusal_case")
    assert message in said and ("--override-opt_param-scheduler" in said or "--no-load-optim" in said)
