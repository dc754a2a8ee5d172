"""Gradients leave stage by stage, through two buffers. Norms that wait on the host: they come back as they were, in one
order, once.
"""

import pytest
import torch
from torch import nn

from megatron.pipeline.runtime.relay.host_store import HostStore
from megatron.pipeline.runtime.relay.host_update import NormsOnHost, StageGradients, copied_back


class Rank:
    def __init__(self, widths=(4, 9, 2)):
        torch.manual_seed(0)
        self.modules = {index: nn.Linear(3, width) for index, width in enumerate(widths)}
        parameters = {index: {f"{index}.{name}": each for name, each in module.named_parameters()}
                      for index, module in self.modules.items()}  # fmt: skip
        self.store = HostStore(parameters)
        self.gradients = StageGradients(self.store.stages, parameters)

    def backward(self, stage, microbatch):
        self.gradients.accumulate(stage)
        input = torch.randn(5, 3, generator=torch.Generator().manual_seed(microbatch))
        self.modules[stage](input).square().mean().backward()

    def on_host(self, stage):
        return {name.split(".")[1]: each for name, each in self.store.stages[stage].gradients.items()}


def expected(stage, microbatches, **options):
    """The gradients of a plain module."""
    rank = Rank(**options)
    for microbatch in microbatches:
        input = torch.randn(5, 3, generator=torch.Generator().manual_seed(microbatch))
        rank.modules[stage](input).square().mean().backward()
    return {name: each.grad for name, each in rank.modules[stage].named_parameters()}


def test_what_arrives_is_what_autograd_adds_up():
    """Three stages in turn, microbatches of two of them interleaved, over two batches: bit-equal to `.grad`."""
    rank = Rank()
    for batch in range(2):
        first, second = 10 * batch, 10 * batch + 1
        rank.backward(2, first)
        rank.backward(1, first)
        rank.backward(2, second)
        rank.backward(1, second)
        rank.gradients.store(2)()
        rank.backward(0, first)
        rank.gradients.store(1)()
        rank.backward(0, second)
        rank.gradients.store(0)()
        for stage in range(3):
            plain = expected(stage, (first, second))
            assert all(torch.equal(each, plain[name]) for name, each in rank.on_host(stage).items())


def test_backwards_may_add_in_another_precision():
    """To what `show` is given, in the dtype of the host's gradients; and to nothing when they have left."""
    module, shown = nn.Linear(3, 2).bfloat16(), {}
    parameters = {0: dict(module.named_parameters())}
    store = HostStore(parameters, gradient_dtype=torch.float32)
    gradients = StageGradients(store.stages, parameters, show=lambda each, view: shown.update({each: view}))
    gradients.accumulate(0)
    assert all(view.dtype == torch.float32 and not view.any() for view in shown.values())
    shown[module.bias].fill_(1 / 3)
    gradients.store(0)()
    assert store.stages[0].gradients["bias"].tolist() == [torch.tensor(1 / 3).item()] * 2
    assert shown == {module.weight: None, module.bias: None}


def test_a_buffer_is_free_when_its_gradients_have_left():
    """Two stages have one; a third is refused until one is stored, and then begins at zero in that one."""
    rank = Rank()
    rank.backward(2, 0)
    rank.backward(1, 0)
    with pytest.raises(AssertionError, match=r"stages \[2, 1\] have all gradient buffers, and 0 needs one"):
        rank.gradients.accumulate(0)
    rank.gradients.store(1)()
    rank.backward(0, 0)
    assert all(torch.equal(each.grad, expected(0, (0,))[name]) for name, each in rank.modules[0].named_parameters())
    assert all(each.grad is None for each in rank.modules[1].parameters())
    assert rank.gradients.num_bytes == 2 * rank.store.stages[1].layout.num_bytes, "two of the largest"


def test_norms_are_taken_before_the_gradients_leave():
    """The norm of each parameter, in FP64."""
    rank = Rank()
    rank.backward(1, 0)
    norms = rank.gradients.norms(1)
    for name, gradient in expected(1, (0,)).items():
        assert torch.equal(norms[f"1.{name}"], torch.linalg.vector_norm(gradient, dtype=torch.float64))


def test_a_reduction_reads_what_was_stored_before_the_copy():
    """The row goes on when it has posted both; the chain's thread reduces, and the copy takes what it made."""
    rank = Rank()
    rank.backward(1, 0)
    copy = rank.gradients.store(1)
    for flat in rank.gradients.flat(1).values():
        flat.mul_(2.0)
    copy()
    plain = expected(1, (0,))
    assert all(torch.equal(each, 2 * plain[name]) for name, each in rank.on_host(1).items())


class Beside:
    """Replica `index` of two, alone in its process."""

    size, host = 2, "here"

    def __init__(self, index):
        self.index = index

    def buffer(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def barrier(self):
        pass


def test_a_replica_brings_its_share_alone():
    """Each element comes with one of two replicas, and about half of them with each."""
    parameters = {0: {"a": nn.Parameter(torch.ones(30, 20)), "b": nn.Parameter(torch.ones(100))}}
    found = []
    for index in range(2):
        store = HostStore(parameters, replicas=Beside(index))
        gradients = StageGradients(store.stages, parameters)
        gradients.accumulate(0)
        for parameter in parameters[0].values():
            parameter.grad.fill_(1.0)
        gradients.store(0)()
        found.append({name: each.clone() for name, each in store.stages[0].gradients.items()})
    assert all((found[0][name] + found[1][name] == 1.0).all() for name in parameters[0])
    assert [sum(int(each.sum()) for each in replica.values()) for replica in found] == [320, 380]


def test_gradients_come_back_whole_and_as_they_were():
    """They are read behind the others' stores, and before anyone writes their sum."""
    gradient, calls = torch.zeros(3), []

    class Others:
        def barrier(self):
            gradient.fill_(5.0 if not calls else 7.0)  # what others do before they come, and when they have gone on
            calls.append(gradient[0].item())

    back = copied_back({"tied": gradient}, Others(), device=torch.device("cpu"))
    assert back["tied"].tolist() == [5.0] * 3 and calls == [5.0, 7.0]
    assert copied_back({"tied": gradient}, None, device=torch.device("cpu"))["tied"] is not gradient


def scalars(**values):
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in values.items()}


def test_they_come_back_in_order():
    """In whichever order stages note theirs, with gaps and one by one; the last that was noted counts."""
    norms = NormsOnHost("abcde", dtype=torch.float32)
    norms.note(4, scalars(e=0.1, d=0.7))
    norms.note(4, {})
    norms.note(4, scalars(a=3.0, c=1.5))
    norms.note(4, scalars(d=0.3))
    assert norms.take(4) == scalars(a=3.0, c=1.5, d=0.3, e=0.1) and list(norms.take(4)) == []


def test_batches_are_apart():
    """What one has noted another does not get, and one has to be taken before the next begins."""
    norms = NormsOnHost("ab", dtype=torch.float32)
    norms.note(1, scalars(a=1.0))
    with pytest.raises(AssertionError, match="of version 1 are there, and 2 notes some"):
        norms.note(2, scalars(b=2.0))
    with pytest.raises(AssertionError, match="of version 1 are there, and not of 2"):
        norms.take(2)
    taken = norms.take(1)
    norms.note(2, scalars(a=5.0, b=2.0))
    assert taken == scalars(a=1.0), "what was taken is not written again"
    assert norms.take(2) == scalars(a=5.0, b=2.0)


def test_nothing_to_count():
    """A replica that counts nothing."""
    norms = NormsOnHost((), dtype=torch.float32)
    norms.note(1, {})
    assert norms.take(1) == {}
