"""Schedules, which build programs from an order, a weight policy and flags, or continue a program that a user wrote."""

from megatron.pipeline.program.edges import PLACEMENTS
from megatron.pipeline.program.program import PeriodicProgram
from megatron.pipeline.schedules.compatibility import TooManyRead
from megatron.pipeline.schedules.orders import ORDERS, PRESETS, Preset
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule, ProgramStream
from megatron.pipeline.schedules.program_schedule import OtherRun, ProgramSchedule, read_schedule
from megatron.pipeline.schedules.schedule import Schedule

__all__ = [
    "ORDERS", "PLACEMENTS", "PRESETS", "OtherRun", "PeriodicProgram", "PipelineSchedule", "Preset", "ProgramSchedule",
    "ProgramStream", "Schedule", "TooManyRead", "read_schedule",
]  # fmt: skip
