"""A model's partition as a file."""

import json
import math

import pytest

from megatron.finetuning.partition_file import PartitionFile
from megatron.finetuning.plan import captured_model, make_plan
from megatron.finetuning.samples import read_data
from tests.finetuning import cases, tiny

CLASSES = "sequence-classification"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("partition")


@pytest.fixture(scope="module")
def path(folder):
    return cases.partition(folder, CLASSES, (0, 0, 0))


@pytest.mark.full
def test_it_is_read_as_it_was_written(path, tmp_path):
    file = PartitionFile.read(path)
    assert file.rank_of_stage == (0, 0, 0) and set(file.stage_of_node.values()) == {0, 1, 2}
    file.write(tmp_path / "again.json")
    assert PartitionFile.read(tmp_path / "again.json") == file
    assert json.loads(path.read_text())["device_of_node"].keys() == json.loads(path.read_text())["stage_of_node"].keys()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"form": 7}, "has form 7, and this version reads 1"),
        ({"stages": "none"}, "is damaged at stages"),
        ({"rank_of_stage": [0, -1.5]}, "is damaged at rank_of_stage.1"),
        ({"rank_of_stage": [0, 0, -1]}, "is damaged at rank_of_stage.2"),
        ({"rank_of_stage": [0, 0]}, "is damaged: its nodes have 3 stages, .* the ranks of 2; make it again"),
        ({"stages": []}, "is damaged: its nodes have 3 stages, and it says the costs of 0"),
        ({"surprise": 1}, "is damaged at surprise"),
    ],
)
def test_what_is_no_partition(path, change, sentence):
    text = json.dumps({**json.loads(path.read_text()), **change})
    with pytest.raises(ValueError, match=sentence):
        PartitionFile.from_json(text)


def test_files_that_are_none(tmp_path):
    for content, sentence in (("{", "is no JSON"), ("[]", "no partition of a model"), ('{"a": 1}', "no partition")):
        (tmp_path / "p.json").write_text(content)
        with pytest.raises(ValueError, match=sentence):
            PartitionFile.read(tmp_path / "p.json")
    with pytest.raises(ValueError, match=r"--partition .* cannot be read"):
        PartitionFile.read(tmp_path / "nowhere.json")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--per_device_train_batch_size", 4], "is for --per_device_train_batch_size 3, not 4"),
        (["--max_seq_length", 10], "is for --max_seq_length 12, not 10"),
        (["--dtype", "bfloat16"], "is for --dtype float32, not bfloat16"),
    ],
)
def test_flags_that_it_is_not_for(folder, path, argv, sentence):
    args = tiny.arguments(folder, CLASSES, *argv, "--partition", path)
    with pytest.raises(ValueError, match=sentence):
        make_plan(args, read_data(args))


@pytest.mark.full
def test_lengths_that_a_task_has_not_do_not_matter(folder, path):
    args = tiny.arguments(folder, CLASSES, "--max_target_length", 7, "--partition", path)
    assert make_plan(args, read_data(args)).partition.sequence == (12, 6)


@pytest.mark.full
def test_another_model_is_refused(folder, path):
    """The same architecture with dropout is another graph."""
    args = tiny.arguments(folder, CLASSES, "--partition", path, dropout=0.1)
    with pytest.raises(ValueError, match=r"was made for another graph .* make the file again"):
        make_plan(args, read_data(args))


def test_another_number_of_devices_is_refused(folder):
    args = tiny.arguments(folder, CLASSES, "--partition", cases.partition(folder, CLASSES, (0, 1, 2)))
    with pytest.raises(ValueError, match="is for 3 devices, and the job has 1; start as many processes"):
        make_plan(args, read_data(args))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_schedules_of_one_stage_a_device(folder, path, schedule):
    args = tiny.arguments(folder, CLASSES, "--partition", path, "--pipeline_schedule", schedule)
    with pytest.raises(ValueError, match=f"{schedule} runs one stage on each device, and the partition has 3 on 1"):
        make_plan(args, read_data(args))


@pytest.mark.full
def test_a_skip_is_no_chain(folder):
    """Stages that begin within a layer hand on what goes past its attention."""
    args = tiny.arguments(folder, CLASSES, "--partition", cases.partition(folder, CLASSES, (0,) * 8))
    plan = make_plan(args, read_data(args))
    assert not plan.schedule.graph.is_chain and plan.schedule.weights.refreshes
    args.pipeline_schedule = "2bw"
    with pytest.raises(ValueError, match="2bw runs stages that are a chain, and these have the edges"):
        make_plan(args, read_data(args))


def test_what_crosses_is_what_stages_say(folder, path):
    """Bytes of each edge, from the graph alone, and from the stages that are cut."""
    from megatron.capture.cut import cut

    args = tiny.arguments(folder, CLASSES, "--partition", path)
    plan = make_plan(args, read_data(args))
    captured, batch, _ = captured_model(args, read_data(args))
    sizes, found = captured.sizes_of(batch), {}
    for index, stage in cut(captured, plan.stage_of_operator).items():
        for target, tensors in stage.targets.items():
            of_each = [(each.owner, each.dtype.itemsize * math.prod(each.shape_at(sizes))) for each in tensors]
            found[index, target] = (
                sum(size for owner, size in of_each if owner is None),
                sum(size for owner, size in of_each if owner is not None),
            )
    assert plan.edge_bytes == found
