"""`SavedTensors`: gradients do not notice that the saved tensors were away, and while they are away they are gone.
`ActivationLayout`: each saved byte once, aligned as it was.
"""

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from megatron.pipeline.runtime.activations.saved_tensors import (
    ALIGNMENT,
    ActivationLayout,
    SavedTensors,
    merged,
    storages_of,
)
from megatron.pipeline.runtime.contract.tensors import num_holders

RANGES = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(1, 500)).map(lambda pair: (pair[0], sum(pair))), max_size=12
)


@given(RANGES)
def test_merged_ranges_cover_the_same_bytes_once(ranges):
    """The union has exactly the bytes of the ranges, in ascending pieces with gaps between them."""
    union = merged(ranges)
    assert [byte for start, end in union for byte in range(start, end)] == sorted(
        {byte for start, end in ranges for byte in range(start, end)}
    )
    assert all(first[1] < second[0] for first, second in itertools.pairwise(union))


@given(RANGES)
def test_spans_do_not_overlap_and_keep_their_alignment(ranges):
    """Spans lie one after another with less than two alignments between them, at their storage's remainder."""
    layout = ActivationLayout.of(ranges)
    end = 0
    for (position, length), (start, stop) in zip(layout.spans, ranges, strict=True):
        assert length == stop - start
        assert end <= position < end + 2 * ALIGNMENT
        assert position % ALIGNMENT == start % ALIGNMENT
        end = position + length
    assert layout.buffer_bytes == end
    assert layout.saved_bytes == sum(stop - start for start, stop in ranges)


def test_a_microbatch_of_another_shape_is_refused():
    """The error names the microbatch, both sizes and the first piece that differs."""
    layout = ActivationLayout.of([(0, 8), (0, 16)])
    layout.require_equal(ActivationLayout.of([(0, 8), (0, 16)]), "microbatch 1 at stage 0")
    message = (
        "microbatch 2 at stage 0 saves 28 bytes in 2 pieces, "
        "the stage's first evicted microbatch 24 bytes in 2 (piece 1"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        layout.require_equal(ActivationLayout.of([(0, 8), (0, 20)]), "microbatch 2 at stage 0")
    with pytest.raises(ValueError, match="piece 2 differs first"):
        layout.require_equal(ActivationLayout.of([(0, 8), (0, 16), (0, 4)]), "microbatch 3 at stage 0")


CPU = torch.device("cpu")
WIDTH = 16


class Attention(nn.Module):
    """Views of one projection, a cached mask, a softmax that saves its output, dropout with a mask that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), diagonal=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(self.mask, -1e4)
        return functional.dropout(scores.softmax(-1), 0.3) @ v


class TiedOutput(nn.Module):
    """A lookup by integers that are made in the forward, and its weight again as the output's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found = self.table[x.detach().argmax(-1)] + x
        return found @ self.table.t()


class InPlace(nn.Module):
    """Operators that write into their input and save it, or save a part of what another one saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).relu_()
        gate, value = h.split(WIDTH // 2, dim=-1)
        h = torch.sigmoid(gate) * value
        return torch.cat([h.exp(), h[..., 1::2].repeat(1, 1, 2)], dim=-1)


class Spectrum(nn.Module):
    """Complex tensors, and one that is conjugated only when it is read."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(x, x.sin())
        return (y * y.conj().exp()).abs()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    "saved output": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)),
    "attention": Attention,
    "tied output": TiedOutput,
    "in place": InPlace,
    "complex": Spectrum,
    "layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2),
}
TYPES = {name: (torch.float32,) if name == "complex" else (torch.float32, torch.bfloat16) for name in MODULES}


class Run:
    """Forward of one microbatch with captured tensors; `trace` refers weakly to everything that moves."""

    def __init__(self, module: nn.Module, number: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(number)
        self.input = torch.randn(2, 6, WIDTH, generator=generator).to(dtype).requires_grad_()
        self.saved = SavedTensors(f"microbatch {number} at stage 0")
        torch.manual_seed(number)
        with self.saved.hooks():
            output = module(self.input)
        own = [*module.parameters(), getattr(module, "mask", None)]
        self.trace = self.saved.seal(stay=storages_of(own), device=CPU).values()
        self.edge = torch.autograd.graph.get_gradient_edge(output)
        self.output_grad = torch.randn(output.shape, generator=generator).to(dtype)
        self.input.data = torch.empty(1, dtype=dtype).expand(self.input.shape)

    def evict(self) -> Tensor:
        return evicted(self.saved)

    def backward(self) -> Tensor:
        torch.autograd.backward((self.edge,), (self.output_grad,))
        return self.input.grad


def gradients(name: str, dtype: torch.dtype, steps: Callable[[list[Run]], None]) -> list[Tensor]:
    """Input gradients of two microbatches in flight, and the parameters' gradients."""
    torch.manual_seed(0)
    module = MODULES[name]().to(dtype)
    runs = [Run(module, number, dtype) for number in range(2)]
    steps(runs)
    inputs = [run.backward() for run in runs]
    return inputs + [parameter.grad for parameter in module.parameters()]


def evicted(saved: SavedTensors) -> Tensor:
    """The buffer that they have left for."""
    buffer = torch.empty(saved.layout.buffer_bytes, dtype=torch.uint8)
    saved.leave()
    saved.evict(buffer)
    return buffer


def evict_and_restore(runs: list[Run]) -> None:
    """Both are away at once and come back in the other order, through memory that others wrote in between."""
    buffers = [run.evict() for run in runs]
    arrived = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.fill_(0xAB)
    for run, buffer in zip(reversed(runs), reversed(arrived), strict=True):
        run.saved.restore(buffer)


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in MODULES for dtype in TYPES[name]])
def test_gradients_are_bit_equal_after_a_move(name, dtype):
    """Evicting and restoring two microbatches changes no bit of any gradient."""
    expected = gradients(name, dtype, lambda runs: None)
    moved = gradients(name, dtype, evict_and_restore)
    assert len(expected) == len(moved) > 1
    assert all(torch.equal(one, other) for one, other in zip(expected, moved, strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_evicted_means_freed(name):
    """After an eviction no storage that moved is alive."""
    run = Run(MODULES[name](), 0)
    assert run.trace and not any(storage.expired() for storage in run.trace)
    run.evict()
    assert all(storage.expired() for storage in run.trace)


def test_each_byte_moves_once_and_views_stay_views():
    """Three views of one storage, two of which overlap, move as their union and share memory again."""
    base = torch.arange(64.0)
    saved = SavedTensors("microbatch 0 at stage 0")
    handles = [saved.pack(view) for view in (base[:16].view(4, 4).t(), base[8:24], base[40:].view(torch.int32)[::3])]
    del base
    saved.seal(stay=set(), device=CPU)
    assert saved.layout.saved_bytes == 24 * 4 + 22 * 4
    before = [(h.tensor.clone(), h.tensor.stride(), h.tensor.data_ptr() % 64) for h in handles]
    buffer = evicted(saved)
    saved.restore(buffer)
    for handle, (values, stride, alignment) in zip(handles, before, strict=True):
        assert torch.equal(handle.tensor, values) and handle.tensor.dtype == values.dtype
        assert handle.tensor.stride() == stride and handle.tensor.data_ptr() % 64 == alignment
        assert handle.tensor.untyped_storage()._cdata == buffer.untyped_storage()._cdata
    handles[0].tensor[0, 2] = -1.0  # element 8 of the storage
    assert handles[1].tensor[0] == -1.0


def test_parameters_of_every_version_stay():
    """Weights do not move, transposed or not, though each microbatch was run with other ones."""
    module = TiedOutput()
    slots = [module.table.data, module.table.data.clone()]
    sizes = []
    for number, slot in enumerate(slots):
        module.table.data = slot
        run = Run(module, number)
        sizes.append(run.saved.layout.saved_bytes)
        run.evict()
        assert num_holders(slot) >= 2
    assert sizes == [2 * 6 * (WIDTH * 4 + 8)] * 2  # the summed embedding in FP32 and the indices in int64


def test_storages_stay_whatever_view_of_them_is_saved():
    """What is named stays through all of its views, also when it is named after the forward; the rest moves."""
    table, mask = torch.randn(8, 8), torch.rand(8) > 0.5
    saved = SavedTensors("microbatch 0 at stage 0")
    own = saved.pack(torch.randn(8))
    shared = [saved.pack(tensor) for tensor in (table.t(), table[2], mask[2:])]
    saved.seal(stay=storages_of([table]), device=CPU)
    assert saved.layout.saved_bytes == 32 + 6
    saved.exclude(storages_of([mask]))
    assert saved.layout.saved_bytes == 32
    buffer = evicted(saved)
    assert own.tensor is None
    assert all(handle.tensor is not None for handle in shared)
    saved.restore(buffer)
    assert all(handle.get() is handle.tensor for handle in shared)


def test_a_freed_output_keeps_what_autograd_saved_of_it():
    """Pointing a sent output at other memory, as megatron.core does, leaves the saved values alone."""
    weight = torch.randn(8, requires_grad=True)
    saved = SavedTensors("microbatch 0 at stage 0")
    with saved.hooks():
        output = weight.exp()
    saved.seal(stay=set(), device=CPU)
    expected = output.detach().clone()
    output.data = torch.empty(1)
    buffer = evicted(saved)
    saved.restore(buffer)
    torch.autograd.backward((torch.autograd.graph.get_gradient_edge(output),), (torch.ones(8),))
    assert torch.equal(weight.grad, expected)


def test_memory_that_the_forward_freed_itself_stays():
    """A storage that a recomputation will fill in the backward is not moved, and is found when it is filled."""
    inner, weight = torch.randn(8), torch.randn(8, requires_grad=True)
    saved = SavedTensors("microbatch 0 at stage 0")
    with saved.hooks():
        output = weight * inner
    values = inner.clone()
    inner.untyped_storage().resize_(0)
    saved.seal(stay=set(), device=CPU)
    assert saved.layout.buffer_bytes == 0
    buffer = evicted(saved)
    inner.untyped_storage().resize_(32)
    inner.untyped_storage().copy_(values.untyped_storage())
    saved.restore(buffer)
    output.sum().backward()
    assert torch.equal(weight.grad, values)


def test_the_backward_frees_as_it_goes():
    """Nothing but the graph holds a handle: when a layer's weight gradient is there, what it had saved is gone."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    run = Run(module, 0)
    run.saved.restore(run.evict())
    handles = [reference for span in run.saved._spans for reference, _ in span.members]
    alive = []
    for layer in (2, 0):
        module[layer].weight.register_hook(lambda grad: alive.append(sum(ref() is not None for ref in handles)))
    assert len(handles) == 4  # each linear saves its input, each tanh its output
    run.backward()
    assert alive == [2, 0]


def test_reading_what_is_away_is_an_error():
    """A backward before the load says whose tensors are missing, from when they are to leave, packed already or not."""
    run = Run(MODULES["norm"](), 3)
    run.saved.leave()
    with pytest.raises(RuntimeError, match="backward of microbatch 3 at stage 0 reads a saved tensor that was evicted"):
        run.backward()


def test_moves_out_of_order_are_errors():
    """Evicting twice, loading what was never evicted, and buffers that do not fit are refused by name."""
    run = Run(MODULES["linear"](), 5)
    size = run.saved.layout.buffer_bytes
    with pytest.raises(RuntimeError, match="microbatch 5 at stage 0 cannot be loaded: it is not evicted"):
        run.saved.restore(torch.empty(size, dtype=torch.uint8))
    run.saved.leave()
    for wrong in (torch.empty(size + 1, dtype=torch.uint8), torch.empty(size), torch.empty(2 * size)[::2]):
        with pytest.raises(ValueError, match=f"moves in a contiguous buffer of {size} bytes"):
            run.saved.evict(wrong)
    with pytest.raises(RuntimeError, match="microbatch 5 at stage 0 cannot be evicted: it is evicted already"):
        run.saved.leave()


@pytest.mark.parametrize("evict", [False, True])
def test_a_change_in_place_is_noticed(evict):
    """What autograd refuses without hooks is refused with them: a saved tensor that was written to afterwards."""
    x = torch.randn(8, requires_grad=True)
    saved = SavedTensors("microbatch 7 at stage 0")
    with saved.hooks():
        output = x.exp()
        result = (output * 2).sum()
        output.detach().zero_()
    saved.seal(stay=set(), device=CPU)
    with pytest.raises(RuntimeError, match=r"microbatch 7 at stage 0: a torch.float32 tensor of shape \(8,\)"):
        evicted(saved) if evict else result.backward()
