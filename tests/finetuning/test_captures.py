"""What a process has captured is captured anew where anything differs, and a copy is the new model's own graph."""

import pytest

from megatron.capture.export import signature
from megatron.finetuning.plan import captured_model
from megatron.finetuning.samples import read_data
from tests.finetuning import captures, tiny

CLASSES = "sequence-classification"


def captured(folder, *argv, task=CLASSES, dropout=0.0):
    """The graph, the model, and whether this process captured it now."""
    args, before = tiny.arguments(folder, task, *argv, dropout=dropout), len(captures._KNOWN)
    found, _, opened = captured_model(args, read_data(args))
    return found, opened.trained, len(captures._KNOWN) > before


@pytest.fixture
def nothing_known(monkeypatch):
    monkeypatch.setattr(captures, "_KNOWN", {})


def test_a_copy_reads_the_new_models_parameters(tmp_path, nothing_known):
    first, old, is_new = captured(tmp_path)
    second, model, is_new_again = captured(tmp_path)
    assert (is_new, is_new_again) == (True, False) and signature(first) == signature(second)
    own = dict(model.named_parameters())
    assert own and all(second.parameters[name] is own[name] for name in second.parameters)
    assert not {*map(id, second.parameters.values())} & {*map(id, old.parameters())}
    assert second.loss in second.graph_module.graph.nodes and {*second.nodes} <= {*second.graph_module.graph.nodes}


@pytest.mark.full
def test_what_a_run_changes_in_its_graph_is_not_in_the_next(tmp_path, nothing_known):
    first, *_ = captured(tmp_path)
    before = signature(first)
    first.graph_module.graph.erase_node(next(iter(reversed(first.graph_module.graph.nodes))))
    assert signature(first) != before and signature(captured(tmp_path)[0]) == before


@pytest.mark.full
@pytest.mark.parametrize("argv", [["--per_device_train_batch_size", 4], ["--bf16"], ["--lora_r", 2]], ids=str)
def test_another_run_captures_its_own(tmp_path, nothing_known, argv):
    """Another batch, other dtypes, and other modules; and the same with another dropout."""
    assert captured(tmp_path)[2] and captured(tmp_path, *argv)[2]
    assert captured(tmp_path, *argv, dropout=0.1)[2] and not captured(tmp_path, *argv)[2]
