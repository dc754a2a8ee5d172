"""Which instruction an error belongs to: what the failure guard tells of it."""

from __future__ import annotations

from megatron.pipeline.program.instruction import Instruction


def annotate(error: BaseException, instruction: Instruction, where: str) -> None:
    """Leave on `error` which instruction raised it, once: `error.pipeline_instruction`, `error.pipeline_where`, a
    note.
    """
    if getattr(error, "pipeline_instruction", None) is None:
        error.pipeline_instruction = instruction
        error.pipeline_where = where
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"raised in instruction {instruction} on {where}")
