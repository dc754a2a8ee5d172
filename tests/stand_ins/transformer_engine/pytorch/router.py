"""Fused routers of experts, which the stand-in does not have."""

from .._release import missing

fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss, fused_topk_with_score_function = missing(
    "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"
)
