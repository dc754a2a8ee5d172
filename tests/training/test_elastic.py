"""A pipeline that shrinks while it trains, against one that stays as it is."""

import pytest

from tests.training.run_case import BASE, joined_weights, train

ELASTIC = (
    f"{BASE} --num-layers 4 --train-iters 8 --untie-embeddings-and-output-weights --freeze-training "
    "--freeze-interval 2 --freeze-schedule 1,2,3 --hidden-dropout 0.1 --attention-dropout 0.1 --lr 1e-3"
)
SHRINKS = "--elastic-pipeline --elastic-schedule 4,2,1"


def changes(results: list[dict]) -> list[tuple[int, int, int]]:
    """(frozen layers, ranks of the pipeline, replicas) behind each change."""
    records = [each for each in results[-1]["records"] if "frozen_layers" in each]
    return [(each["frozen_layers"], each["pipeline_ranks"], each["replicas"]) for each in records]


def batches(results: list[dict]) -> list[dict]:
    return [each for each in results[-1]["records"] if "lm_loss" in each]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        pytest.param("--pipeline-schedule 2bw --use-distributed-optimizer", marks=pytest.mark.full),
        pytest.param("--bf16 --use-distributed-optimizer", marks=pytest.mark.full),
        pytest.param("--pipeline-schedule gpipe --optimizer sgd", marks=pytest.mark.full),
        pytest.param("--pipeline-schedule bpipe --recompute-granularity full --recompute-method uniform "
                     "--recompute-num-layers 1", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_equals_a_pipeline_that_stays(flags):
    """Replicas add up in another order; nothing else differs."""
    stays, shrinks = train(4, f"{ELASTIC} {flags}"), train(4, f"{ELASTIC} {SHRINKS} {flags}")
    assert changes(stays) == [(1, 4, 1), (2, 4, 1), (3, 4, 1)]
    assert changes(shrinks) == [(1, 4, 1), (2, 2, 2), (3, 1, 4)]
    loose = 50 if "--bf16" in flags else 1
    for one, other in zip(batches(stays), batches(shrinks), strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], rel=1e-5 * loose)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5 * loose)
    before, after = joined_weights(stays), joined_weights(shrinks)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (value - after[name]).abs().max() <= 1e-4 * loose, name


def test_a_stop_between_changes_goes_on_as_if_there_was_none(tmp_path):
    """Also where it stops right behind a decision, before the change."""
    whole = train(4, f"{ELASTIC} {SHRINKS}")
    parts, save = [], f"--save {tmp_path} --load {tmp_path} --save-interval 100"
    for last in (3, 4, 7, 8):
        parts += batches(train(4, f"{ELASTIC} {SHRINKS} {save} --exit-interval {last}"))
    numbers = [(each["iteration"], each["lm_loss"], each["grad_norm"]) for each in parts]
    assert numbers == [(each["iteration"], each["lm_loss"], each["grad_norm"]) for each in batches(whole)]


@pytest.mark.full
def test_thirty_changes_leave_nothing_behind():
    """To and fro between pipelines and replicas, without freezing: neither files nor threads nor memory add up."""
    to_and_fro = ",".join(["1", "2"] * 16)
    flags = (
        f"{BASE} --num-layers 4 --train-iters 32 --untie-embeddings-and-output-weights --elastic-pipeline "
        f"--freeze-interval 1 --elastic-schedule {to_and_fro}"
    )
    results = train(2, flags, look_after=(3, 31))
    assert len([each for each in results[-1]["records"] if "frozen_layers" in each]) == 31
    for each in results:
        early, late = each["resources"]
        assert late["files"] - early["files"] <= 10
        assert late["threads"] - early["threads"] <= 5
        assert late["bytes"] - early["bytes"] <= 40 * 2**20
