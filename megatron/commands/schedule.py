"""Look at a pipeline schedule before running it: print, prove, time and draw its program.

    python tools/schedule.py show  --schedule 2bw --stages 4 --microbatches 4 --batches 3
    python tools/schedule.py check --schedule 2bw --stages 64 --microbatches 512
    python tools/schedule.py check --schedule 2bw --stages 4 --hardware-queues 8 --tensor 2 --data 2
    python tools/schedule.py draw  --schedule 2bw --stages 4 --microbatches 4 --batches 3 --output 2bw.png
    python tools/schedule.py simulate --schedule flush --stages 8 --microbatches 16 --latency 0.1
    python tools/schedule.py without --schedule flush --stages 4 --microbatches 8 --replicas 4
    python tools/schedule.py synthesize --ranks 4 --microbatches 12 --forward 1,1,1,2 --limit 3 --csv my.csv

Instead of a preset, a CSV file with one row of instructions per rank can be given: this project's text form, or the
compute-only files of torch.distributed.pipelining. `check` reports whether `--pipeline-program` could train with such a
file for any number of batches. Nothing is executed; neither torch nor a GPU is needed.

Exit status: 0; 1 if the program, a file or a combination of options is wrong; 2 if the command line is wrong.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron.commands import schedule_options as meaning
from megatron.commands import synthesize
from megatron.commands.synthesis_rows import print_rows
from megatron.documents import command_line
from megatron.documents.tables import print_table
from megatron.pipeline.check import CheckReport, check, check_periodic
from megatron.pipeline.check.hardware_queues import PROVED, prove_hardware_queues
from megatron.pipeline.program.csv_text import notes_of_completion
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import ProgramSchedule
from megatron.pipeline.schedules.completion import completed
from megatron.pipeline.schedules.pipeline_schedule import PipelineSchedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.critical_path import critical_path, critical_path_text
from megatron.pipeline.simulate.memory_curve import memory_curves
from megatron.pipeline.simulate.timeline import Timeline
from megatron.pipeline.survivors import ReplicaRank
from megatron.pipeline.survivors.losses import COLUMNS, double_losses, losses_of, single_losses


def main(arguments: Sequence[str] | None = None) -> int:
    commands = {
        "show": _show, "check": _check, "simulate": _simulate, "draw": _draw, "without": _without,
        "synthesize": synthesize.run,
    }  # fmt: skip
    options = meaning.parse(__doc__, commands, arguments)
    return command_line.run(options.run, options)


# --- commands


def _show(options: argparse.Namespace) -> int:
    program = meaning.program(options)
    if options.complete:
        notes = meaning.notes(options)
        program = completed(program, **notes_of_completion(notes))
    if options.csv:
        command_line.write(options.csv, meaning.degrees_text(options) + program.to_csv())
    if options.torch_csv:
        command_line.write(options.torch_csv, program.to_torch_csv())
    if options.timeline:
        _prove(options, program)
        _print_timeline(simulate(program, meaning.costs(options)), options)
    elif not options.csv and not options.torch_csv:
        for rank, row in enumerate(program.rows):
            print(f"rank {rank}: " + "  ".join(map(str, row)))
    return 0


def _check(options: argparse.Namespace) -> int:
    program = meaning.program(options)
    print(_describe(_prove(options, program), program))
    if options.schedule and meaning.schedule(options).balance and not any(program.num_evictions):
        print("nothing to balance: every stage keeps within the bound of its pair already")
    if options.schedule and len(set(program.batches)) == 1:
        schedule, size = meaning.schedule(options), program.batches[0]
        check_periodic(schedule.build_periodic(size), **schedule.bounds((size,) * (2 * schedule.num_stages)))
        print("proved for every number of batches: fill, n periods, drain")
        if schedule.optimistic:
            stream = schedule.stream()
            for _ in range(2):
                stream.start_batch(size)
            stream.drain()  # each proves what ranks do that refuse a step
            print("proved for every step that is refused: all ranks go back, and the batch begins again")
    if options.file is not None:
        print(*_training_lines(program, meaning.notes(options), options.file), sep="\n")
    if options.hardware_queues is not None:
        print(_prove_hardware_queues(options, program))
    return 0


def _prove_hardware_queues(options: argparse.Namespace, program: Program) -> str:
    """Prove the program for GPUs with few hardware queues, and return the verdict as a sentence.

    Raises ValueError if a deadlock is found.
    """
    job = {name: getattr(options, name) for name in ("tensor", "data", "distributed_optimizer")}
    report = prove_hardware_queues(program, num_queues=options.hardware_queues, **job)
    queues = f"{options.hardware_queues} hardware queue{'s' * (options.hardware_queues > 1)}"
    if report.verdict == PROVED:
        return (
            f"proved with {queues} for these {len(program.batches)} batches: every rank runs to its end "
            f"(it has at most {max(report.num_streams)} streams)"
        )
    return (
        f"not proved with {queues}: of {report.num_interleavings} orders in which threads may launch none deadlocks, "
        f"which is no proof; {max(report.num_streams)} queues are one for each stream"
    )


def _simulate(options: argparse.Namespace) -> int:
    program = meaning.program(options)
    _prove(options, program)
    costs = meaning.costs(options)
    timeline = simulate(program, costs)
    rows = [("makespan", f"{timeline.makespan:g}"), ("bubble, all ranks", f"{timeline.bubble:.1%}")]
    if len(set(program.batches)) == 1 and len(timeline.steady_starts()) > 1:
        rows.append(("time per batch, steady", f"{timeline.steady_time_per_batch():g}"))
    for rank in range(timeline.num_ranks):
        rows.append((f"rank {rank}: busy, idle", f"{timeline.busy(rank):g}, {timeline.idle(rank):g}"))
    for stage in range(timeline.num_stages):
        rows.append((f"stage {stage}: peak saved microbatches", str(timeline.peak_saved_microbatches(stage))))
    for stage in range(timeline.num_stages):
        if peak := timeline.peak_deferred_microbatches(stage):
            rows.append((f"stage {stage}: of them between I and W", str(peak)))
    if timeline.num_stages > timeline.num_ranks:
        for rank in range(timeline.num_ranks):
            rows.append((f"rank {rank}: the same, over its stages", str(timeline.peak_saved_on_rank(rank))))
    rows += _lane_rows(timeline)
    rows += _memory_rows(timeline, options, program)
    print_rows(rows)
    if options.critical_path:
        print()
        print(critical_path_text(critical_path(timeline, costs)))
    if options.json:
        timeline.save(options.json)
    return 0


def _draw(options: argparse.Namespace) -> int:
    from megatron.pipeline.draw import draw_timeline

    if options.output:
        command_line.require_file(Path(options.output))
    program = meaning.program(options)
    _prove(options, program)
    costs = meaning.costs(options)
    timelines = [simulate(program, costs).named("planned")]
    path = critical_path(timelines[0], costs) if options.critical_path else ()
    sizes = meaning.sizes(options)
    timelines += [Timeline.load(path).named(f"measured ({Path(path).name})") for path in options.measured]
    if options.text:
        for timeline in timelines:
            _print_timeline(timeline, options)
    if options.output:
        draw_timeline(
            timelines,
            options.output,
            title=meaning.title(options, program) if options.title is None else options.title,
            one_based=options.one_based,
            saved_microbatches=any(program.num_evictions) if options.saved is None else options.saved,
            lanes=options.lanes,
            critical_path=path,
            memory=None if sizes is None else (sizes, program.weights),
            time_label=options.time_label,
            time_scale=options.time_scale,
            width=options.width,
        )
        print(f"wrote {options.output}")
    return 0


def _without(options: argparse.Namespace) -> int:
    """What a lost rank costs, and the program of the ranks that are left."""
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
        command_line.write(options.json, json.dumps([each.to_dict() for each in found], indent=1))
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


def _prove(options: argparse.Namespace, program: Program) -> CheckReport:
    """Prove a program. The program of a preset is also held to the number of activations that its schedule may save."""
    bounds = {} if options.schedule is None else meaning.schedule(options).bounds(program.batches)
    return check(program, **bounds)


# --- output


def _lane_rows(timeline: Timeline) -> list[tuple[str, str]]:
    """The busy time of each lane to and from the host, and the end of the last update; empty without such lanes."""
    rows = []
    for rank in range(timeline.num_ranks):
        busy = timeline.busy_lanes(rank)
        if busy:
            names, times = ", ".join(lane.value for lane in busy), ", ".join(map("{:g}".format, busy.values()))
            rows.append((f"rank {rank}: {names}", times))
    if rows:
        rows.append(("last update ends", f"{max(span.end for span in timeline.spans) - timeline.start:g}"))
    return rows


def _memory_rows(timeline: Timeline, options: argparse.Namespace, program: Program) -> list[tuple[str, str]]:
    """The peak memory of each rank, with its time and its parts; empty if no sizes are given."""
    sizes = meaning.sizes(options)
    if sizes is None:
        return []
    rows = []
    for rank, curve in enumerate(memory_curves(timeline, sizes, program.weights)):
        time, parts = curve.at_peak
        made_of = ", ".join(f"{name} {value:g}" for name, value in parts.items() if value)
        rows.append((f"rank {rank}: peak memory", f"{curve.peak:g} at {time:g} ({made_of})"))
    return rows


def _describe(report: CheckReport, program: Program) -> str:
    transfers = "sends and receives pair up" if report.communicates else "none (compute-only program)"
    fetches = [f"{count / len(program.batches):g}" for count in report.num_fetches]
    facts = [  # name, values, whether they are told
        ("ranks, stages", (report.num_ranks, f"{report.num_stages}{_of_model(program)}"), True),
        ("batches of microbatches", program.batches, True),
        ("instructions", (report.num_instructions,), True),
        ("transfers", (transfers,), True),
        ("peak saved microbatches", report.peak_saved_microbatches, True),
        ("  of all stages of a rank", report.peak_saved_on_rank, report.num_stages > report.num_ranks),
        ("  of them between I and W", report.peak_deferred_microbatches, any(report.peak_deferred_microbatches)),
        ("live weight versions", report.live_versions or ("none named",), True),
        ("tensors between a rank's stages", report.peak_waiting_on_rank, any(report.peak_waiting_on_rank)),
        ("steps not validated", report.peak_unvalidated_steps, report.peak_unvalidated_steps),
        ("resident stages", report.peak_resident_stages, fetches),
        ("fetches a batch", fetches, fetches),
        ("tensors between stages, on the device", report.peak_boundaries_on_rank, report.peak_boundaries_on_rank),
        ("inputs to the host and back", report.offloaded_microbatches, any(report.offloaded_microbatches)),
        ("evicted microbatches", report.evicted_microbatches, any(report.evicted_microbatches)),
        ("activations to the host and back", report.swapped_microbatches, any(report.swapped_microbatches)),
        ("  of a rank, at once on the host", report.peak_on_host, any(report.swapped_microbatches)),
    ]
    rows = [(name, ", ".join(map(str, values))) for name, values, is_told in facts if is_told]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["correct", *(f"  {name:{width}}  {value}" for name, value in rows)])


def _of_model(program: Program) -> str:
    stages = len({copy.stage for copy in program.copies})
    return f", copies of the model's {stages}" if stages else ""


def _training_lines(program: Program, notes: dict[str, int], name: str) -> list[str]:
    """Lines about the fill, period and drain of a correct program; or the reason that no run can train with it.

    Args:
        notes: the file's notes about the run, from `csv_text.read_notes`.
        name: name of the file.
    """
    try:
        schedule = ProgramSchedule.of(program, name=name, **notes_of_completion(notes))
    except ValueError as error:
        return [f"no run can train with it: {error}"]
    fill, period = schedule.repetition.num_fill, schedule.repetition.num_period
    drains = ", and drains with each, since the rows repeat as a whole only" * schedule.drains_between_periods
    lag = schedule.report_lag
    runs = "" if program.copies else ", as --pipeline-program runs them"
    return [
        f"proved for every number of batches{runs}:",
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


def _print_timeline(timeline: Timeline, options: argparse.Namespace) -> None:
    from rich.console import Console

    from megatron.pipeline.draw import timeline_text

    console = Console()
    width = console.width if console.is_terminal else options.columns
    text = timeline_text(timeline, width=width, one_based=options.one_based, versions=options.versions)
    if console.is_terminal:
        console.print(text, soft_wrap=True, end="")
    else:
        print(text.plain, end="")
