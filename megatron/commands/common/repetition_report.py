"""What `tools/schedule.py check` says of a file: whether a run could train with it, for any number of batches."""

from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import ProgramSchedule


def training_lines(program: Program, notes: dict[str, int], name: str) -> list[str]:
    """Lines about fill, period and drain of a program that is right by itself; or why no run can go on with it.

    Args:
        notes: what the file says of the run, as of `csv_text.read_notes`.
        name: of the file.
    """
    try:
        schedule = ProgramSchedule.of(program, name=name, fill=notes.get("fill"), period=notes.get("period"))
    except ValueError as error:
        return [f"no run can train with it: {error}"]
    fill, period = schedule.repetition.num_fill, schedule.repetition.num_period
    drains = ", and drains with each, since the rows repeat as a whole only" * schedule.drains_between_periods
    lag = schedule.report_lag
    return [
        "proved for every number of batches, as --pipeline-program runs them:",
        f"  fill, period     {_batches(fill)}, {_batches(period)}{drains}",
        f"  reports          {'with their batch' if not lag else f'{_batches(lag)} later'}",
        f"  complete rows    {schedule.program.num_instructions} instructions, {_added(program, schedule.program)}",
        f"  sha256           {schedule.sha256}",
    ]


def _batches(count: int) -> str:
    return f"{count} batch{'es' * (count != 1)}"


def _added(program: Program, complete: Program) -> str:
    added = complete.num_instructions - program.num_instructions
    return f"{added} of them added" if added else "all of them the file's"
