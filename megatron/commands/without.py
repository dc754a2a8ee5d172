"""The command `tools/schedule.py without`: what a lost rank costs, and the program of the ranks that are left."""

import argparse
import json
from pathlib import Path

from megatron.commands import schedule_options as meaning
from megatron.documents import command_line
from megatron.documents.tables import print_table
from megatron.pipeline.program.csv_text import notes_of_completion
from megatron.pipeline.schedules import ProgramSchedule
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.survivors import ReplicaRank
from megatron.pipeline.survivors.losses import COLUMNS, double_losses, losses_of, single_losses


def run(options: argparse.Namespace) -> int:
    """Run `without`. Raises ValueError for options that do not go together, and for a job that outlives no loss."""
    if options.csv and not options.lost:
        raise ValueError("--csv writes the program of one loss; add --lost, such as --lost 1.2")
    if options.lost and options.pairs:
        raise ValueError("--pairs takes every loss of two ranks, and --lost one loss; leave one of them out")
    for file in filter(None, (options.csv, options.json)):
        if file != "-":
            command_line.require_file(Path(file))
    schedule, size = _job(options)
    if options.lost:
        losses = [tuple(map(ReplicaRank.parse, options.lost))]
    else:
        losses = (double_losses if options.pairs else single_losses)(schedule.num_ranks)
    found = losses_of(
        schedule, size, num_replicas=options.replicas, lost=losses, costs=meaning.costs(options),
        most_held=options.held,
    )  # fmt: skip
    if options.csv != "-":
        print_table(COLUMNS, [each.row() for each in found], right=range(1, len(COLUMNS)))
        undisturbed = next(each.survivors.undisturbed for each in found if each.survivors)
        print(f"\na batch takes {undisturbed:.4g} while no rank is lost; held: microbatches, by rank of the pipeline")
        for each in found:
            if each.refusal:
                print(f"{' '.join(map(str, each.lost))}: {each.refusal}")
        if any(map(schedule.keeps, range(schedule.num_stages))):
            print("without a rank every microbatch of a stage that recomputes is recomputed")
    if options.csv:
        text = found[0].survivors.schedule.program.to_csv()
        command_line.write(options.csv, text)
    if options.json:
        Path(options.json).write_text(json.dumps([each.to_dict() for each in found], indent=1))
    return 0


def _job(options: argparse.Namespace) -> tuple[PipelineSchedule, int]:
    """The schedule of a replica, and the number of microbatches of its batches."""
    options.batches = options.schedule and 1  # enough to see their size
    program = meaning.program(options)
    if len({*program.batches}) > 1:
        raise ValueError("a ramp-up has batches of several sizes; give --microbatches one number")
    if options.schedule is not None:
        return meaning.schedule(options), program.batches[0]
    notes = notes_of_completion(meaning.notes(options))
    return ProgramSchedule.of(program, name=options.file, **notes), program.batches[0]
