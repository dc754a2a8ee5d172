"""Stages with captured activations: a microbatch leaves and comes back between its forward and its backward."""

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.pipeline.runtime.activations.saved_activations import ActivationMemory, CapturedActivations
from megatron.pipeline.runtime.activations.saved_tensors import ALIGNMENT
from megatron.pipeline.runtime.contract.stage import Microbatch
from megatron.pipeline.runtime.contract.tensors import TensorSpec
from megatron.pipeline.runtime.stages.module.stage import ModuleStage
from megatron.pipeline.runtime.update.versions import WeightVersions
from tests import workers
from tests.pipeline.runtime.activations.captured_cases import CASES, DATA, NUM_MICROBATCHES, PLACES


@pytest.fixture(scope="module")
def megatron():
    """What `in_flight` returns for every case and place, computed by one worker in one call."""
    return workers.run(1, "tests.pipeline.runtime.activations.captured_cases:run_all", timeout=200)[0]


@pytest.mark.sample(8)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_megatron_gradients_are_bit_equal_after_a_move(megatron, name, place):
    """Captured or not, moved in either order or not: the same bits in every gradient, next to another version."""
    result = megatron[name, place]
    assert result["num_gradients"] > 10
    assert set(result["differences"]) == {0.0}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_megatron_microbatches_are_alike_and_counted(megatron, name, place):
    """Every microbatch saves the same bytes; the peak is their sum; two that left leave one; at the end nothing is."""
    result = megatron[name, place]
    size = result["sizes"][0]
    assert result["sizes"] == [size] * NUM_MICROBATCHES and (
        size > 0 or (name, place) == ("recompute instruction", "whole")
    )
    assert result["peak"] == NUM_MICROBATCHES * size
    assert result["after"] == [0, 0, size] and result["in_graphs"] == size
    assert result["at_end"] == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_megatron_activations_are_gone_after_eviction(megatron, name, place):
    """Only data of all that autograd saved of two evicted microbatches is alive beside the weights."""
    assert megatron[name, place]["num_saved"] > 0 or CASES[name].get("recompute")
    assert megatron[name, place]["left"] <= DATA


@pytest.mark.parametrize("place", PLACES)
def test_sequence_parallel_activations_are_parts(place):
    """Under t=2 with sequence parallelism each rank moves its own part of the activations, with the same bits."""
    options = {"place": place, "t": 2, "sequence_parallel": True, "dropout": 0.1}
    for result in workers.run(2, "tests.pipeline.runtime.activations.captured_cases:megatron_case", **options):
        assert result["num_gradients"] > 10 and set(result["differences"]) == {0.0}
        assert len(set(result["sizes"])) == 1 and result["left"] <= DATA


def test_stages_that_cannot_move_their_activations_say_so():
    """Memory that autograd keeps is refused when the stage is built; a stage that does not capture, when it evicts."""
    messages = workers.run(1, "tests.pipeline.runtime.activations.captured_cases:refusals")[0]
    assert messages["recomputed norms"].startswith("--recompute-modules layernorm: ")
    assert messages["not captured"].startswith("stage 1 does not capture its activations")


def layers() -> torch.nn.Module:
    """Some, with dropout, the same each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Tanh())


def module_stage(
    memory: ActivationMemory | None, *, recompute: bool, module: torch.nn.Module | None = None
) -> ModuleStage:
    """The middle of three stages."""
    module = layers() if module is None else module
    return ModuleStage(
        module,
        index=1,
        num_stages=3,
        versions=WeightVersions(dict(module.named_parameters()), window=1),
        input_spec=TensorSpec((4, 8)),
        output_spec=TensorSpec((4, 8)),
        recompute=recompute,
        activation_memory=memory,
    )


def module_gradients(memory: ActivationMemory | None, *, recompute: bool, rounds: int = 1) -> list[torch.Tensor]:
    """Two microbatches in flight; with `memory` both leave and come back in the other order."""
    stage = module_stage(memory, recompute=recompute)
    gradients = []
    for number in range(rounds):
        pair = [Microbatch(2 * number + position, number, position, 2) for position in range(2)]
        torch.manual_seed(1)
        outputs = [stage.forward(microbatch, torch.randn(4, 8)) for microbatch in pair]
        if memory is not None:
            buffers = [stage.evict(microbatch).pack() for microbatch in pair]
            assert [stage.saved_bytes(microbatch) for microbatch in pair] == [0, 0]
            for microbatch in reversed(pair):
                stage.load(microbatch, buffers[pair.index(microbatch)])
            del buffers
        for microbatch, output in zip(pair, outputs, strict=True):
            if recompute:
                stage.recompute(microbatch)
            gradients.append(stage.backward(microbatch, output))
    return gradients + [parameter.grad for parameter in stage.module.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
def test_module_gradients_are_bit_equal_after_a_move(recompute):
    """Any nn.Module, also where only the input is saved because the program recomputes."""
    expected = module_gradients(None, recompute=recompute)
    moved = module_gradients(ActivationMemory(), recompute=recompute)
    assert all(torch.equal(one, other) for one, other in zip(expected, moved, strict=True))


@pytest.mark.parametrize("recompute", [False, True])
def test_nothing_grows_from_step_to_step(recompute):
    """Twenty rounds need the buffers of the first and leave nothing behind."""
    memory = ActivationMemory()
    module_gradients(memory, recompute=recompute, rounds=20)
    assert memory.pool.num_buffers == 2
    assert memory.current_bytes == 0


def test_a_recomputed_stage_saves_its_input_only():
    """Under recompute a microbatch is its input, and the gradient's leaf does not hold the values while it is away."""
    memory = ActivationMemory()
    stage = module_stage(memory, recompute=True)
    microbatch, other = Microbatch(0, 0, 0, 2), Microbatch(1, 0, 1, 2)
    stage.forward(microbatch, torch.randn(4, 8))
    assert stage.saved_bytes(microbatch) == memory.current_bytes == 4 * 8 * 4
    stage.forward(other, torch.randn(4, 8))
    stage.evict(microbatch).pack()
    assert memory.current_bytes == 4 * 8 * 4
    with pytest.raises(RuntimeError, match="microbatch 0 at stage 1 reads a saved tensor that was evicted"):
        stage.recompute(microbatch)


def test_a_microbatch_of_another_length_cannot_be_evicted():
    """A batch of another size is refused with both sizes, before anything of it is freed."""
    stage = module_stage(ActivationMemory(), recompute=False)
    first, second = Microbatch(0, 0, 0, 2), Microbatch(1, 0, 1, 2)
    stage.forward(first, torch.randn(4, 8))
    output = stage.forward(second, torch.randn(5, 8))
    stage.evict(first)
    with pytest.raises(ValueError, match=r"microbatch 1 at stage 1 saves .* bytes in .* moved activations need"):
        stage.evict(second)
    assert stage.backward(second, torch.ones_like(output)).shape == (5, 8)


class Cached(torch.nn.Module):
    """A table that the first forward makes and the others use, and a weight that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self._hidden = [torch.ones(8, requires_grad=True)]
        self._table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._table is None:
            self._table = torch.arange(8.0)
        return x * self.weight * self._table * self._hidden[0]


def test_what_microbatches_share_stays():
    """A cache made by the first forward and weights that no module knows are found by the second microbatch."""
    memory = ActivationMemory()
    stage = module_stage(memory, recompute=False, module=Cached())
    pair = [Microbatch(position, 0, position, 2) for position in range(2)]
    stage.forward(pair[0], torch.randn(4, 8))
    assert stage.saved_bytes(pair[0]) == 2 * 4 * 8 * 4 + 2 * 8 * 4  # x, its last product; table and hidden weight
    stage.forward(pair[1], torch.randn(4, 8))
    assert [stage.saved_bytes(microbatch) for microbatch in pair] == [2 * 4 * 8 * 4] * 2
    assert memory.current_bytes == 2 * 2 * 4 * 8 * 4
    for microbatch in pair:
        eviction = stage.evict(microbatch)
        assert len(eviction.pack()) == eviction.num_bytes == ALIGNMENT + 4 * 8 * 4


def test_what_was_interrupted_is_cleared():
    """A backward that did not end, and a forward that did not: the microbatches can be computed again."""
    layer, memory = torch.nn.Linear(4, 4), ActivationMemory(torch.device("cpu"))
    captured = CapturedActivations(0, layer, memory)

    def forward(microbatch: int) -> None:
        input = torch.ones(2, 4, requires_grad=True)
        with captured.capture(microbatch):
            output = layer(input).exp()
        captured.seal(microbatch, input=input, output=output)

    forward(0)
    with pytest.raises(RuntimeError, match="connection closed"), captured.capture(1):
        raise RuntimeError("connection closed by peer")
    captured.clear()
    assert memory.current_bytes == 0
    for microbatch in range(2):
        forward(microbatch)
