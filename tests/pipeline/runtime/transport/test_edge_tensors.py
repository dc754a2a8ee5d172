"""What travels over an edge is packed, and comes out as it went in."""

import pytest
import torch

from megatron.pipeline.runtime.contract.tensors import EdgeTensors, TensorSpec


def test_tensors_of_an_edge_are_packed_and_aligned():
    edge = EdgeTensors([TensorSpec((3,), torch.bfloat16), TensorSpec((2, 2), torch.int64), TensorSpec((5,))])
    tensors = (torch.randn(3).bfloat16(), torch.arange(4).view(2, 2), torch.randn(5))
    packed = edge.activations.pack(tensors)
    assert packed.shape == edge.activations.whole.shape == (3 * 64,)
    assert all(torch.equal(one, other) for one, other in zip(edge.activations.unpack(packed), tensors, strict=True))
    gradients = (tensors[0] * 2, tensors[2] * 2)
    back = edge.gradients.unpack(edge.gradients.pack(gradients))
    assert all(torch.equal(one, other) for one, other in zip(back, gradients, strict=True))
    alone = EdgeTensors([TensorSpec((3,), torch.int64)])
    ids = torch.arange(3)
    assert alone.gradients.whole is None and alone.activations.pack([ids]) is ids
    with pytest.raises(ValueError, match="every microbatch must have the same shapes"):
        edge.activations.pack((tensors[0], tensors[1], torch.randn(4)))
    with pytest.raises(ValueError, match="carries no tensor"):
        EdgeTensors([])


def test_bytes_say_what_a_tensor_is():
    """torch puts conjugation and negation off: a link that sent the bytes as they are would lose it."""
    waves = torch.randn(3, dtype=torch.complex64)
    for tensor in (waves.conj(), waves.conj().imag):
        edge = EdgeTensors([TensorSpec((3,), tensor.dtype)])
        for travelling in (edge.activations, edge.gradients):
            packed = travelling.pack([tensor])
            assert packed.is_contiguous() and not packed.is_conj() and not packed.is_neg()
            assert torch.equal(packed, tensor)


def test_shared_parameters_may_be_left_out():
    """What is there is packed as if it were all; of nothing there is no transfer."""
    edge = EdgeTensors([TensorSpec((2, 3)), TensorSpec((4,)), TensorSpec((2,), torch.int64)], [1, None, None])
    weight, hidden, ids = torch.randn(2, 3), torch.randn(4), torch.tensor([1, 2])
    assert edge.activations.has_shared and edge.gradients.owners == (1, None)
    for tensors in ((weight, hidden, ids), (None, hidden, ids)):
        present = tuple(tensor is not None for tensor in tensors)
        packed = edge.activations.pack(tensors)
        assert packed.shape == edge.activations.spec_of(present).shape == (64 * sum(present),)
        for one, other in zip(edge.activations.unpack(packed, present), tensors, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    assert edge.gradients.pack((None, hidden)) is hidden
    alone = EdgeTensors([TensorSpec((2, 3))], [0])
    assert alone.activations.spec_of((False,)) is None and alone.activations.pack((None,)) is None
