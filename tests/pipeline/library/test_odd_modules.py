"""Modules and losses that users have and examples have not: what one process computes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from megatron.pipeline import Pipeline
from tests import workers


class Doubling(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.linear(given.mul_(2))


class DoublingBehindTorch(Doubling):
    """Changes its input in place where torch does not count it."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        given.data.mul_(2)
        return self.linear(given)


class DoublingAtTimes(Doubling):
    """Changes its input in place in training, and only that of long batches; the values are the same in any case."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        changes = self.training and len(given) > 1
        return super().forward(given) if changes else self.linear(2 * given)


class Detached(nn.Module):
    """Trains, and hands no gradient on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.linear(given.detach())


def shifting(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Changes targets in place."""
    return mse_loss(output, targets.add_(1))


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]


def in_one_process(modules, loss=mse_loss) -> tuple[list[float], list[torch.Tensor]]:
    model = nn.Sequential(*copy.deepcopy(modules))
    optimizer, losses = make_optimizer([each for each in model.parameters() if each.requires_grad]), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        losses.append(0.0)
        for one, its in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            mean = loss(model(one), its) / 4
            mean.backward()
            losses[-1] += mean.item()
        optimizer.step()
    return losses, [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["flush", "gpipe"])
@pytest.mark.parametrize("what", ["inputs", "inputs behind torch", "received", "targets"])
def test_what_is_changed_in_place_is_a_copy(what, schedule, recompute):
    """Neither the run that finds the shapes nor a recompute changes the values twice, and the batch stays as it was."""
    torch.manual_seed(1)
    kinds = {
        "inputs": (Doubling, nn.Identity),
        "inputs behind torch": (DoublingBehindTorch, nn.Identity),
        "received": (nn.Identity, Doubling),
    }
    modules = [nn.Sequential(each(), nn.Linear(8, 8)) for each in kinds.get(what, (nn.Identity, nn.Identity))]
    loss = shifting if what == "targets" else mse_loss
    losses, values = in_one_process(modules, loss)
    pipeline = Pipeline(modules, schedule, 4, loss=loss, optimizer=make_optimizer, recompute=recompute)
    given = batches()
    assert [pipeline.step(batch).loss for batch in given] == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close([each.detach() for module in modules for each in module.parameters()], values)
    torch.testing.assert_close(given, batches())
    pipeline.close()


def test_what_is_changed_at_times_is_a_copy_from_then_on():
    """Also after the shapes of batches, or modes, in which nothing is changed."""
    torch.manual_seed(1)
    modules = [nn.Linear(8, 8), DoublingAtTimes()]
    losses, values = in_one_process(modules)
    pipeline = Pipeline(modules, "flush", 4, loss=mse_loss, optimizer=make_optimizer)
    found = []
    for batch in batches():
        found.append(pipeline.step(batch).loss)
        pipeline.evaluate(tuple(each[:4] for each in batch))
    assert found == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close([each.detach() for module in modules for each in module.parameters()], values)
    pipeline.close()


def test_shapes_are_found_in_inference_mode():
    """What the modules change in place is a copy there, too."""
    torch.manual_seed(1)
    modules = [Doubling(), nn.Linear(8, 8)]
    (inputs, targets), *_ = batches()
    expected = mse_loss(nn.Sequential(*modules)(inputs.clone()), targets).item()
    with Pipeline(modules, "flush", 4, loss=mse_loss, optimizer=make_optimizer) as pipeline:
        with torch.inference_mode():
            found = [pipeline.evaluate((inputs, targets)), pipeline.evaluate((inputs.clone(), targets.clone()))]
        assert [each.loss for each in found] == pytest.approx([expected, expected], rel=1e-6)
        losses, _ = in_one_process(modules)
        assert pipeline.step((inputs, targets)).loss == pytest.approx(losses[0], rel=1e-6)


STAGES = {
    "passes its input on": lambda: [nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8)],
    "detaches its input": lambda: [nn.Linear(8, 8), Detached(), nn.Linear(8, 8)],
    "trains nothing": lambda: [nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.Linear(8, 8)],
}


def under_bpipe(stages: str, recompute: bool):
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    modules = STAGES[stages]()
    expected, values = in_one_process(modules)
    own = modules[rank]
    pipeline = Pipeline(own, "bpipe", 4, loss=mse_loss, optimizer=make_optimizer, recompute=recompute)
    losses = [pipeline.step(batch if pipeline.takes_batch else None).loss for batch in batches()]
    pipeline.close()
    first = sum(len(list(each.parameters())) for each in modules[:rank])
    found = [each.detach() for each in own.parameters()]
    return losses, expected, [torch.equal(*pair) for pair in zip(found, values[first:], strict=False)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", STAGES)
def test_activations_move_beside_a_stage_that(stages, recompute):
    """What such a stage hands on is there after its input was dropped, and it need not have a gradient."""
    for losses, expected, are_equal in workers.run(
        3, "tests.pipeline.library.test_odd_modules:under_bpipe", stages=stages, recompute=recompute, timeout=30
    ):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert all(are_equal)
