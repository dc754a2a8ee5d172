"""Schedules that split backwards, from flags to losses: one process's results, what is counted, and refusals."""

from dataclasses import replace

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
    "zb-h2": (2, EXACT, f"{P2} --pipeline-schedule zb-h2"),
    "interleaved-zb": (2, EXACT, f"{P2} --pipeline-schedule interleaved-zb {V2}"),
    "v-half": (2, EXACT, f"{P2} --pipeline-schedule v-half"),
    "v-min, bf16": (2, f"{EXACT} --bf16", f"{P2} --pipeline-schedule v-min"),
    "zb-h1 of four stages": (4, EXACT, f"{P4} {ZB_H1}"),
    "zb-h1, replicas": (4, CLIPPED, f"{P2} {ZB_H1} --use-distributed-optimizer"),
    "zb-h1, sequence parallel": (4, f"{CLIPPED} {UNDROPPED}", f"{P2} {ZB_H1} {TENSOR}"),
    "zbv of four ranks": (4, f"{EXACT} --num-layers 8 --hidden-size 16", f"{P4} {ZBV}"),
    "zb-h1, recompute instructions": (2, EXACT, f"{P2} {ZB_H1} --pipeline-recompute"),
}


@table(ROW, RUNS, usual=1)
def test_training_equals_one_process(num_ranks, model, layout):
    check(num_ranks, model, layout, exact=EXACT in model)


@pytest.mark.full
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


OLD = replace(GPU, engine_puts_off=False)


def test_layers_of_transformer_engine_where_they_can():
    """They are the default of these schedules, too, from the release on that puts weight gradients off; before it those
    of megatron.core are, with a note. Asked for by name an old one is refused, and so is the overlap of its copies.
    """
    args = parse_args(argv(f"{P2} {ZB_H1}"))
    validate_args(args, world_size=2)
    notes = resolve_platform(args, OLD)
    assert args.transformer_impl == "local"
    assert any("transformer_impl is local: --pipeline-schedule zb-h1 splits backwards" in note for note in notes)
    for flags in (P2, f"{P2} {ZB_H1}"):
        assert arguments(flags, world_size=2, platform=GPU).transformer_impl == "transformer_engine"
    asked = f"{P2} {ZB_H1} --transformer-impl transformer_engine"
    with pytest.raises(ValueError, match=r"splits backwards into I and W, and layers of .* from 2.3.0 on; use --tr"):
        arguments(asked, world_size=2, platform=OLD)
    with pytest.raises(
        ValueError, match=r"--tp-comm-overlap computes gradients .* puts them off; leave one of the two"
    ):
        arguments(f"{P2} {ZB_H1} {TENSOR} --tp-comm-overlap", world_size=4, platform=GPU)


@pytest.mark.parametrize("turn", [True, False])
def test_programs_have_w_in_the_order_of_i_for_the_queues_of_transformer_engine(tmp_path, turn):
    """A layer's queue gives what it was given first; a program with another order is for megatron.core's layers."""
    halves = ["0I0@0", "0I1@0", "0W0@0", "0W1@0"] if turn else ["0I0@0", "0I1@0", "0W1@0", "0W0@0"]
    cells = ["0F0@0", "0F1@0", *halves]
    path = tmp_path / "program.csv"
    path.write_text("# batches: 2\n# weights: flush\n" + ",".join(cells) + "\n")
    flags = f"--pipeline-program {path} --micro-batch-size 1 --global-batch-size 2"
    args = parse_args(argv(flags))
    validate_args(args, world_size=1)
    notes = resolve_platform(args, GPU)
    assert args.transformer_impl == ("transformer_engine" if turn else "local")
    assert turn or any("its 0W1@0 stands before the W of microbatch 0" in note for note in notes)
    if not turn:
        with pytest.raises(ValueError, match="0W1@0 stands before the W of microbatch 0, whose I was first"):
            arguments(f"{flags} --transformer-impl transformer_engine", platform=GPU)
