"""The timeline of a configuration on a search's page: a program that is small enough to be read, and what it lacks."""

from html import escape

from megatron.pipeline.draw.page_timeline import page_timeline
from megatron.pipeline.schedules.any_schedule import AnySchedule
from megatron.pipeline.simulate import simulate
from megatron.planner.memory.sizes import resized
from megatron.planner.planner import Planner
from megatron.planner.search.outcome import Kept

_MANY_CELLS, _MOST_CELLS = 2_000, 20_000  # of a drawing: what can be read, and what can be drawn


def timeline_element(each: Kept, planner: Planner) -> str:
    """The first batches as a figure, with the signs and what is left out below it."""
    configuration = each.estimate.configuration
    schedule = configuration.pipeline_schedule(tied_embeddings=planner.model.tied_embeddings)
    num_batches = 3 * schedule.num_ranks if schedule.weights.updates_alone else 1 + schedule.weights.delay
    whole = configuration.num_microbatches
    size = _readable_size(schedule, whole, num_batches)
    num_cells = 2 * schedule.num_stages * num_batches * size
    if num_cells > _MOST_CELLS:
        return (
            f"<p>{schedule.num_stages} stages with batches of at least {size} microbatches are {num_cells:,} boxes, "
            "too many to draw here (<code>tools/schedule.py draw</code> draws them).</p>"
        )
    program = resized(schedule, whole, size).build((size,) * num_batches)
    layers = planner.layers(configuration)
    timeline = simulate(program, planner.cost_model.costs(configuration, layers))
    title = f"{num_batches} batch{'es' * (num_batches > 1)} of {size} microbatches"
    drawn = page_timeline(timeline, name=title)
    said = [title]
    if size < whole:
        said.append(f"the configuration has {whole}" + ", so its bubbles are smaller" * schedule.weights.drains)
    if drawn.left_out:
        said.append(f"not drawn: {', '.join(drawn.left_out)}")
    signs = "".join(
        f'<span class="sign"><i style="background:{colour}"></i>{escape(meaning)}</span> '
        for colour, meaning in drawn.signs
    )
    return (
        f'<figure><div class="wide drawing">{drawn.svg}</div>'
        f"<figcaption>{escape('; '.join(said), quote=False)}.<br>{signs}</figcaption></figure>"
    )


def _readable_size(schedule: AnySchedule, whole: int, num_batches: int) -> int:
    """Microbatches of a batch: few, but enough to fill the pipeline if the batch does; as the schedule takes them."""
    ranks = schedule.num_ranks
    step = 1 if schedule.weights.drains and schedule.num_virtual_stages == 1 else ranks
    readable = max(_MANY_CELLS // (2 * schedule.num_stages * num_batches) // step, 1) * step
    size = min(whole, max(readable, ranks))
    return next(each for each in range(size, whole + 1) if resized(schedule, whole, each).runs(each))
