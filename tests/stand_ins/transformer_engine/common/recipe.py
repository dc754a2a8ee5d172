"""Recipes of FP8 and FP4, which the stand-in does not have."""

from .._release import missing

Recipe, Format, DelayedScaling, Float8CurrentScaling = missing(
    "Recipe", "Format", "DelayedScaling", "Float8CurrentScaling"
)
Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling = missing(
    "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"
)
