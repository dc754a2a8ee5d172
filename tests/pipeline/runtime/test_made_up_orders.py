"""What an order outside of the project's tables may do: a batch's gradients, loss scale and weights are its own,
wherever its backwards stand.
"""

import pytest

from megatron.pipeline.check import check
from megatron.pipeline.program.program import Program
from megatron.pipeline.schedules import Schedule
from tests import workers
from tests.pipeline.runtime.made_up_orders import registered
from tests.pipeline.runtime.stages.module import reference
from tests.pipeline.runtime.stages.module.reference import Training

torch = pytest.importorskip("torch")

FILE = """\
# weights: 2bw
# batches: 2 2
0F0@0,0F1@0,0F2@0,0B0@0,0B2@0,0B1@0,0REDUCE_NORM@1,0STEP@1,0F3@0,0B3@0,0REDUCE_NORM@2,0STEP@2
"""


def run_module(**options):
    from tests.pipeline.runtime.stages.module.module_cases import run

    with registered():
        return run("2bw-entangled", **options)


def train_gpt(schedule, **options):
    from tests.pipeline.runtime.stages.megatron.megatron_cases import train

    with registered():
        return train(schedule=schedule, **options)


@pytest.mark.parametrize("drains", [(), (0, 2)])
def test_entangled_batches_train_as_one_process(drains):
    """Backwards of two batches in turn, each batch with its own gradient buffer: bit-equal to the reference, with
    drains in the middle.
    """
    training = Training(batches=(3,) * 6)
    [outcome] = workers.run(1, f"{__name__}:run_module", training=training, drains=drains)
    expected = reference.train(training, delay=1)
    assert [report.losses["loss"] for report in outcome.reports] == expected.losses
    for name, tensor in outcome.parameters.items():
        assert torch.equal(tensor, expected.parameters[name])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "drains": (1,)},
        {"dtype": "float16", "clip": 1.0, "overflow_batches": (2,), "hysteresis": 1},
        {"dtype": "bfloat16", "recompute_granularity": "full"},
    ],
)
def test_entangled_batches_of_a_gpt_are_those_of_2bw(options):
    """megatron.core's update, too: losses, norms, loss scales and both weight versions equal those of plain 2bw."""
    shared = {"layers": 2, "hidden": 16, "batches": (3,) * 6, **options}
    [[plain], [entangled]] = (
        workers.run(1, f"{__name__}:train_gpt", schedule=schedule, **shared) for schedule in ("2bw", "2bw-entangled")
    )
    assert str(entangled["batches"]) == str(plain["batches"])  # the norm of an overflow is no number
    for version in ("newest", "older"):
        for name, tensor in entangled[version].items():
            assert torch.equal(tensor, plain[version][name])


def test_a_program_says_whether_it_interleaves_batches():
    """Presets finish a batch's backwards before the next one's; the made-up order and a file may not."""
    program = Program.from_csv(FILE)
    check(program)
    assert program.interleaves_batches
    with registered():
        entangled = Schedule.preset("2bw-entangled", num_stages=1)
        assert entangled.build((3, 3, 3)).interleaves_batches and entangled.interleaves_batches((3, 3, 3))
    for preset, options in (("flush", {}), ("gpipe", {}), ("2bw", {}), ("interleaved", {"num_virtual_stages": 2})):
        schedule = Schedule.preset(preset, num_stages=4, **options)
        assert not schedule.build((4, 4, 4)).interleaves_batches and not schedule.interleaves_batches((4, 4, 4))
