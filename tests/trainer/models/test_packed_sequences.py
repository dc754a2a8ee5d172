"""Documents of a sequence: their borders, what they see of each other, and where their positions begin."""

import itertools

import pytest
import torch

from megatron import backend

backend.install()

from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.trainer.models.packed_sequences import packed_sequence

BORDERS = {"three": [0, 3, 5, 12], "one": [0, 12], "single tokens": [0, 1, 2, 3, 12]}


def field(borders: list[int]) -> torch.Tensor:
    """As a microbatch has it."""
    return torch.tensor([borders + [borders[-1]] * (borders[-1] + 1 - len(borders))], dtype=torch.int32)


class OneRank:
    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
def test_each_document_is_seen_and_placed_as_if_it_stood_alone(borders):
    """The mask leaves causal blocks, and rotary embeddings turn a document by the same bits wherever it stands."""
    packed, length = packed_sequence(field(borders)), borders[-1]
    parts = [slice(*pair) for pair in itertools.pairwise(borders)]
    expected = torch.ones(length, length, dtype=torch.bool)
    for part in parts:
        expected[part, part] = torch.ones(part.stop - part.start, part.stop - part.start).triu(1).bool()
    assert torch.equal(packed.mask(None), expected[None, None])
    assert packed.cu_seqlens_q.tolist() == borders and packed.cu_seqlens_q.dtype == torch.int32
    assert packed.max_seqlen_q == packed.max_seqlen_kv == max(part.stop - part.start for part in parts)

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, kv_channels=8)
    rotary = RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True, cp_group=OneRank)
    query = torch.randn(length, 2, 8)
    found = apply_rotary_pos_emb(
        query, rotary(packed.max_seqlen_q, packed_seq=True), config, cu_seqlens=packed.cu_seqlens_q, cp_group=OneRank
    )
    for part in parts:
        alone = apply_rotary_pos_emb(query[part, None], rotary(part.stop - part.start), config, cp_group=OneRank)
        assert torch.equal(found[part], alone[:, 0])
