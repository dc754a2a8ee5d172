"""Schedules that split backwards, from flags to losses: one process's results, what is counted, and refusals."""

import pytest
import torch

from megatron.trainer.arguments import parse_args, resolve_platform, validate_args
from tests.trainer.arguments.command_line import GPU, arguments, argv
from tests.trainer.run.run_case import joined_weights, table, train
from tests.trainer.run.test_virtual_stages import CLIPPED, EXACT, FULLY, P2, P4, ROW, TENSOR, UNDROPPED, V2, check

ZB_H1, ZBV = "--pipeline-schedule zb-h1", f"--pipeline-schedule zbv {V2}"

RUNS = {
    "zb-h1, bf16": (2, f"{EXACT} --bf16", f"{P2} {ZB_H1}"),
    "zbv, full recompute": (2, f"{EXACT} {FULLY}", f"{P2} {ZBV}"),
    "zb-h1 of four stages": (4, EXACT, f"{P4} {ZB_H1}"),
    "zb-h1, replicas": (4, CLIPPED, f"{P2} {ZB_H1} --use-distributed-optimizer"),
    "zb-h1, sequence parallel": (4, f"{CLIPPED} {UNDROPPED}", f"{P2} {ZB_H1} {TENSOR}"),
    "zbv of four ranks": (4, f"{EXACT} --num-layers 8 --hidden-size 16", f"{P4} {ZBV}"),
    "zb-h1, recompute instructions": (2, EXACT, f"{P2} {ZB_H1} --pipeline-recompute"),
}


@table(ROW, RUNS, usual=1)
def test_training_equals_one_process(num_ranks, model, layout):
    check(num_ranks, model, layout, exact=EXACT in model)


def test_a_resumed_run_goes_on_and_says_what_is_kept(tmp_path):
    """Saved and started anew: losses and weights are those of the whole run. What is kept between I and W is in the
    log line and the metrics, by pipeline rank, beside what is saved in full.
    """
    flags = f"{EXACT} {P2} {ZB_H1} --log-saved-activations"
    whole = train(2, f"{flags} --save {tmp_path} --save-interval 3")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train(2, f"{flags} --load {tmp_path}")
    losses = [[each["lm_loss"] for each in run[-1]["records"] if each["iteration"] > 3] for run in (whole, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    weights = joined_weights(resumed)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in joined_weights(whole).items())
    record = whole[-1]["records"][-1]
    assert len(record["deferred_bytes"]) == 2 and min(record["deferred_bytes"]) > 0
    assert len(record["saved_activation_bytes"]) == 2
    assert any("between I and W (MiB): " in line for line in whole[-1]["lines"])


def test_layers_whose_backward_is_one_are_left_out_or_refused():
    """Where Transformer Engine is there, its layers are the default of other schedules, and of these those of
    megatron.core, with a note; asked for by name they are refused.
    """
    args = parse_args(argv(f"{P2} {ZB_H1}"))
    validate_args(args, world_size=2)
    notes = resolve_platform(args, GPU)
    assert args.transformer_impl == "local"
    assert any("transformer_impl is local: zb-h1 splits backwards" in note for note in notes)
    assert arguments(P2, world_size=2, platform=GPU).transformer_impl == "transformer_engine"
    with pytest.raises(ValueError, match="splits it into I and W; use --transformer-impl local"):
        arguments(f"{P2} {ZB_H1} --transformer-impl transformer_engine", world_size=2, platform=GPU)
