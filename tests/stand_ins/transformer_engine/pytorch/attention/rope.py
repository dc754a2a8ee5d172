"""Rotary positions."""

import torch
from torch import Tensor

from ..._release import missing, pinned

[apply_fused_qkv_rotary_pos_emb] = missing("apply_fused_qkv_rotary_pos_emb")


@pinned
def apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", interleaved=False, fused=False, cu_seqlens=None) -> Tensor:
    """`t` [sequence, batch, heads, channels], of which the first are rotated by `freqs` [sequence, 1, 1, rotated]. Of
    packed ones, [tokens, heads, channels], each sequence begins with the first of `freqs`."""
    if tensor_format == "thd":
        parts = t[:, None].split(cu_seqlens.diff().tolist())
        return torch.cat([apply_rotary_pos_emb(part, freqs, interleaved=interleaved) for part in parts])[:, 0]
    if tensor_format != "sbhd":
        raise NotImplementedError(f"the stand-in's rotary positions have no format {tensor_format}")
    rotated, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    freqs = freqs[: t.shape[0]]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
        turned = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return torch.cat((rotated * freqs.cos().to(t.dtype) + turned * freqs.sin().to(t.dtype), rest), dim=-1)
