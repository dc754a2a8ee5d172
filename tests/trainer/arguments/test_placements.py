"""The command line of schedules whose stages lie elsewhere than in turn: layers, refusals, a dry run."""

import re

import pytest

from megatron import backend

backend.install()

from megatron.trainer.arguments import parse_args
from megatron.trainer.dry_run.dry_run import run_dry
from megatron.trainer.models.core_config import transformer_config
from megatron.trainer.plan import from_flags
from tests.pipeline.placed_schedules import registered
from tests.trainer.arguments.command_line import arguments, argv

EIGHT = "--num-layers 8"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
ACCOUNT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
LAYOUT = "--pipeline-model-parallel-layout"
P2, P4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
V2 = "--num-virtual-stages-per-pipeline-rank 2"
V, LOPSIDED = (f"{P2} {V2} --pipeline-schedule {name}" for name in ("v", "lopsided"))
BY_LAYOUT, SHUFFLED = f"{P2} --pipeline-schedule v", f"{P4} --pipeline-schedule shuffled"


def layers(flags: str, num_ranks: int) -> tuple[int, ...]:
    with registered():
        return from_flags.layers_of_stages(transformer_config(arguments(flags, world_size=num_ranks)))


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "cut"),
    [
        (2, V, EIGHT),
        (2, LOPSIDED, EIGHT),
        (2, V, f"--num-layers 5 {FIRST} 2"),
        (4, SHUFFLED, f"--num-layers 7 {LAST} 4"),
        (2, V, f"--num-layers 6 {ACCOUNT}"),
        (2, V, "--num-layers 7"),
        (2, BY_LAYOUT, f"{LAYOUT} E|t|tt|tL"),
    ],
)
def test_a_stage_holds_what_it_holds_under_flush(num_ranks, schedule, cut):
    """Flags about layers speak of stages: as of a pipeline with as many ranks as there are stages."""
    assert layers(f"{cut} {schedule}", num_ranks) == layers(f"{cut} {P4}", 4)


def test_flags_of_ranks_stay_those_of_ranks_where_stages_are_dealt_out_in_turn():
    """Megatron-LM's: the first rank's layers are shared by its stages."""
    assert layers(f"{EIGHT} {P2} {V2} {FIRST} 2", 2) == (1, 3, 1, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{V} --num-layers 3", "--num-layers 3 is less than the 4 stages of the pipeline; take fewer stages"),
        (f"{V} --num-layers 6 {FIRST} 2", "leaves 4 layers for the other 3 stages, which does not come out even"),
        (f"{BY_LAYOUT} {LAYOUT} Et|||tttL", "leaves rank 1 of the pipeline nothing to hold; give one of its stages"),
        (f"{V} --balance-activations", "so there is nothing to balance"),
    ],
)
def test_what_is_refused(flags, message):
    """Layers that do not come out even over the stages, and a rank whose stages are all empty, in one sentence."""
    with registered(), pytest.raises(ValueError) as error:
        arguments(flags, world_size=2)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_rank_with_an_empty_stage():
    """In a v the middle stages are one rank's, which may have an empty one."""
    assert layers(f"{BY_LAYOUT} {LAYOUT} Et|tt||tL", 2) == (1, 2, 0, 1)


def test_a_dry_run(capsys):
    """Proves the program, and counts each rank's memory by its stages."""
    with registered():
        assert run_dry(parse_args(argv(f"{V} --num-layers 5 {FIRST} 2 --dry-run 4")), "pretrain_gpt.py") == 0
    said = capsys.readouterr().out
    assert "schedule v, 4 stages on 2 ranks, batches of 4 microbatches: proved for any number of batches" in said
    rows = re.findall(r"^([01]: \d, \d) +(\S+)", said, re.MULTILINE)
    assert rows == [("0: 0, 3", "2+1"), ("1: 1, 2", "1+1")]
