"""Schedules: an order of computations, a weight policy and flags, built into programs; or a program of one's own."""

from megatron.pipeline.program.program import PeriodicProgram
from megatron.pipeline.schedules.compatibility import TooManyRead
from megatron.pipeline.schedules.orders import ORDERS, PRESETS, Preset
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule, ProgramStream
from megatron.pipeline.schedules.placements import PLACEMENTS
from megatron.pipeline.schedules.program_schedule import OtherRun, ProgramSchedule, read_schedule
from megatron.pipeline.schedules.schedule import Schedule

__all__ = [
    "ORDERS",
    "PLACEMENTS",
    "PRESETS",
    "OtherRun",
    "PeriodicProgram",
    "PipelineSchedule",
    "Preset",
    "ProgramSchedule",
    "ProgramStream",
    "Schedule",
    "TooManyRead",
    "read_schedule",
]
