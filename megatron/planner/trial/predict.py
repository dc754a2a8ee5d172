"""What a profile says a configuration takes."""

from megatron.planner.job.cluster import Cluster
from megatron.planner.job.configuration import Configuration
from megatron.planner.planner import Planner
from megatron.planner.time.iteration import simulated
from megatron.planner.time.profile import Profile
from megatron.planner.time.profiled import ProfiledCosts, shape_of


def predicted_seconds(profile: Profile, configuration: Configuration, *, num_layers: int) -> float:
    """Seconds of an iteration of the profile's model with `num_layers` layers. Raises ValueError for what was not
    profiled."""
    model = shape_of(profile, num_layers=num_layers, tensor=configuration.tensor)
    # Of the cluster a profile needs nothing: it was taken there.
    planner = Planner(model, Cluster(gpu="cpu", nodes=1, gpus_per_node=configuration.num_gpus))
    costs = ProfiledCosts(profile, model).costs(configuration, planner.layers(configuration))
    schedule = configuration.pipeline_schedule(tied_embeddings=model.tied_embeddings)
    return simulated(costs, configuration, schedule).seconds
