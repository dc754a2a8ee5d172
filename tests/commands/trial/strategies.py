"""Configurations for hypothesis."""

from hypothesis import strategies as st

from megatron.pipeline.placement.mapping import NAMES
from megatron.pipeline.program.weight_policies import TWO_BW
from megatron.pipeline.schedules.orders import PRESETS
from megatron.planner import Configuration
from megatron.planner.job.configuration import PROVISIONAL_MODES
from megatron.planner.memory.recompute import RecomputeScope


@st.composite
def configurations(draw):
    """Valid ones, of small numbers."""
    size, data, microbatches = (draw(st.integers(1, 4)) for _ in range(3))
    pipeline, virtual = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    schedule = draw(st.sampled_from(sorted(name for name, preset in PRESETS.items() if preset.residency is None)))
    modes = PROVISIONAL_MODES if PRESETS[schedule].policy == TWO_BW else ("off",)
    provisional = draw(st.sampled_from(modes))
    layers = draw(st.none() | st.tuples(*[st.integers(1, 3)] * (pipeline * virtual)))
    return Configuration(
        tensor=draw(st.integers(1, 4)),
        pipeline=pipeline,
        data=data,
        virtual=virtual,
        layers=layers,
        micro_batch_size=size,
        global_batch_size=size * data * microbatches,
        recompute=draw(st.sampled_from(RecomputeScope)),
        schedule=schedule,
        provisional=provisional,
        provisional_microbatches=draw(st.integers(1, 4)) if provisional == "uniform" else None,
        provisional_reduce=provisional != "off" and data > 1 and draw(st.booleans()),
        balance=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        distributed_optimizer=draw(st.booleans()),
        rank_mapping=draw(st.sampled_from(NAMES)),
    )
