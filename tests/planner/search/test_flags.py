"""A configuration's flags mean what the configuration says."""

from hypothesis import given

from megatron.pipeline.schedules import PRESETS
from megatron.planner.memory.recompute import RecomputeScope
from megatron.trainer.arguments import parse_args
from megatron.trainer.arguments.flags.parser import destinations
from megatron.trainer.arguments.flags.specification import Role
from tests.commands.trial.strategies import configurations


@given(configurations())
def test_the_training_programs_parse_what_was_meant(configuration):
    """Every field comes out of the parser of pretrain_gpt.py as it went in, by flags of this role alone."""
    args = parse_args(list(configuration.argv()))
    assert set(args.given) <= set(destinations(Role.CONFIGURATION))
    assert args.tensor_model_parallel_size == configuration.tensor
    assert args.pipeline_model_parallel_size == configuration.pipeline
    if configuration.layers is None or configuration.num_stages == 1:
        assert (args.num_virtual_stages_per_pipeline_rank or 1) == configuration.virtual
    else:  # tests/trainer/run/test_virtual_stages.py says what megatron.core makes of a layout
        assert args.num_virtual_stages_per_pipeline_rank is None
        stages = args.pipeline_model_parallel_layout.split("|")
        assert (stages[0][0], stages[-1][-1]) == ("E", "L")
        assert tuple(stage.count("t") for stage in stages) == configuration.layers
    assert (args.micro_batch_size, args.global_batch_size) == (
        configuration.micro_batch_size,
        configuration.global_batch_size,
    )
    assert (args.pipeline_schedule, args.rank_mapping) == (configuration.schedule, configuration.rank_mapping)
    if not PRESETS[configuration.schedule].balance:
        assert bool(args.balance_activations) == configuration.balance
    assert args.sequence_parallel == configuration.sequence_parallel
    assert args.use_distributed_optimizer == configuration.distributed_optimizer
    assert args.pipeline_2bw_provisional == configuration.provisional
    assert args.pipeline_2bw_provisional_microbatches == configuration.provisional_microbatches
    assert args.pipeline_2bw_provisional_reduce == configuration.provisional_reduce
    scopes = {None: RecomputeScope.NONE, "selective": RecomputeScope.ATTENTION, "full": RecomputeScope.LAYER}
    assert scopes[args.recompute_granularity] is configuration.recompute
    assert args.recompute_num_layers in (None, 1) and args.recompute_method in (None, "uniform")
