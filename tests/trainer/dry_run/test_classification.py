"""`--dry-run` of a classifier: its parameters, its memory, and what is not on this machine."""

import pytest

from megatron import backend

backend.install()

from megatron.planner import Activations
from megatron.trainer.plan import from_flags
from tests.trainer.run.text_helper import SHAPE as SHAPE_OF_BERT
from tests.trainer.run.text_helper import defaults as defaults_of_bert
from tests.trainer.run.vision_helper import SMALL, defaults, vision_arguments, write_images


@pytest.fixture
def dry(run_words):
    """Run a command line dry, of a program with these defaults."""
    return lambda flags, preferred: run_words(flags.split(), defaults=preferred)


def test_a_vit_that_is_right(dry):
    """Patches and classes are in the sum of parameters; data that are elsewhere are a warning."""
    flags = f"{SMALL} --data-path TRAIN VALID --pipeline-model-parallel-size 2 --dry-run 4"
    status, out, err, found = dry(flags, defaults())
    assert (status, err) == (0, "")
    assert "warning: data TRAIN is not on this machine" in out and "warning: data VALID is not" in out
    layer = 12 * 32**2 + 13 * 32
    expected = [2 * layer + (16 + 1 + 5 + 1) * 32, 2 * layer + 2 * 32 + 33 * 3]
    assert [rank["num_parameters"] for rank in found["memory"]] == expected


def test_a_bert_that_is_right(dry):
    """An embedding of the vocabulary, and no output layer; without the texts --num-classes says how many."""
    flags = f"{SHAPE_OF_BERT} --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 3"
    flags += " --data-path TRAIN --dry-run 4 --pipeline-model-parallel-size 4"
    status, _, err, _ = dry(f"{flags} --vocab-file NONE", defaults_of_bert())
    assert status == 1 and "file TRAIN does not exist" in err
    status, out, err, found = dry(f"{flags} --vocab-file NONE --num-classes 3 --vocab-size 64", defaults_of_bert())
    assert (status, err) == (0, "") and "warning: data TRAIN is not on this machine" in out
    parameters = [rank["num_parameters"] for rank in found["memory"]]
    assert parameters[0] - parameters[1] == (64 + 12 + 2) * 32
    assert parameters[3] - parameters[1] == 2 * 32 + 33 * 32 + 33 * 3


def test_epochs_need_the_data(dry, tmp_path):
    """Their number of samples decides the length; with them the dry run knows it."""
    flags = SMALL.replace("--train-iters 10", "--epochs 4 --dry-run 1")
    status, _, err, _ = dry(f"{flags} --data-path none.npz", defaults())
    assert status == 1 and "file none.npz does not exist" in err
    path = write_images(tmp_path / "a.npz", 20)
    assert dry(f"{flags} --data-path {path}", defaults())[0] == 0
    args = vision_arguments(base=f"{flags.replace('--dry-run 1', '')} --data-path {path}")
    assert (args.train_iters, args.eval_interval, args.eval_iters) == (10, 3, 0)


@pytest.mark.parametrize("flags", ["", "--recompute-activations"])
def test_patches_are_kept_for_the_backward(flags):
    """The first stage saves the pixels of its patches beside its layers: 4 bytes each."""
    args = vision_arguments(f"{flags} --patch-dim 2 --hidden-dropout 0")
    activations = Activations(from_flags.architecture(args), from_flags.activation_setting(args))
    first = activations.saved(1, is_first=True, is_last=False) - activations.saved(1, is_first=False, is_last=False)
    assert first == 4 * 17 * 4
    head = activations.saved(1, is_first=False, is_last=True) - activations.saved(1, is_first=False, is_last=False)
    assert head == 2 * 4 * 17 * 32
