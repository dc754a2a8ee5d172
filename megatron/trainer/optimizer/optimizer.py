"""The optimizer of a run: megatron.core's, which owns masters, groups and formats, around torch's or this project's.

megatron.core knows Adam and SGD. What else is a torch optimizer takes the place of its Adam before that has any state:
the groups, which hold the masters of 16-bit weights by then, are kept, and so are the names of the moments.
"""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron.backend.host_optimizers import optimizers_on_host
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.trainer.models import core_config
from megatron.trainer.optimizer.lamb import Lamb

OWN = {"lamb": Lamb}
"""Value of --optimizer -> what takes Adam's place: made of groups with Adam's numbers, with moments of Adam's names."""


def build_optimizer(
    args: argparse.Namespace, chunks: Sequence[torch.nn.Module], *, on_host: bool = False
) -> MegatronOptimizer:
    """The optimizer of `args` for a rank's chunks. `on_host`: their weights lie there, and steps are made there."""
    wanted = core_config.optimizer_config(args)
    own = OWN.get(wanted.optimizer)
    if own is not None:
        wanted = replace(wanted, optimizer="adam")
    with optimizers_on_host() if on_host else contextlib.nullcontext():
        optimizer = get_megatron_optimizer(wanted, chunks, config_overrides=get_standard_config_overrides(wanted))
    if own is not None:
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            if not each.is_stub_optimizer:
                each.optimizer = _in_place_of(each.optimizer, own)
    return optimizer


def _in_place_of(adam: torch.optim.Optimizer, own: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer of the groups of `adam`, without what says only how Adam computes."""
    assert not adam.state, "an optimizer that has stepped cannot be replaced"
    made = own(adam.param_groups)
    for group in made.param_groups:
        for name in adam.defaults.keys() - made.defaults.keys():
            del group[name]
    return made
