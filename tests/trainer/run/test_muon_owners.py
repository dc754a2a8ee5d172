"""--optimizer muon with --use-distributed-optimizer: each replica owns whole parameters, and nothing else changes."""

from collections.abc import Callable

import pytest
import torch

from megatron.pipeline.placement.mapping import owners_of
from tests.trainer.arguments.command_line import arguments
from tests.trainer.checkpoint.test_stages import check_cut, saved  # noqa: F401  a fixture
from tests.trainer.run.run_case import joined_weights, numbered_names, table, train
from tests.trainer.run.test_muon import FULL, MUON, TENSOR, TWO_BW, UNIFORM
from tests.trainer.run.test_relay import FLUSH, FP16, P1, P2

OWNED = "--use-distributed-optimizer"
TIED = MUON.replace("--untie-embeddings-and-output-weights ", "")
STAGE = f"{TWO_BW} --2bw-provisional stage"
REDUCED = "--2bw-provisional-reduce"
FEEDBACK = f"{TWO_BW} --2bw-error-feedback"
LONE = f"{P2} --pipeline-model-parallel-layout E|ttttL --position-embedding-type rope"  # stage 0: one parameter
OVERRIDE = "--override-opt_param-scheduler"  # the run has another length
V2 = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    "sizes, num_replicas, pinned, expected",
    [
        ([1, 4, 2, 3], 2, (), [0, 0, 1, 1]),
        ([4, 4, 4, 4], 2, (), [0, 1, 0, 1]),
        ([1, 4, 4], 2, (0,), [0, 1, 0]),
        ([5, 5], 3, (), [0, 1]),
        ([], 2, (), []),
    ],
)
def test_the_largest_first_to_the_replica_with_least(sizes, num_replicas, pinned, expected):
    """Equal sizes in their order, and equal replicas from the first on."""
    assert owners_of(sizes, num_replicas, pinned=pinned) == expected


# name: (ranks, flags); the run without owners is compared with the run with owners
SAME_BITS = {
    "2bw, bf16, p=2 d=2": (4, f"{MUON} --bf16 {P2} {TWO_BW}"),
    "flush, p=1 d=2": (2, f"{MUON} {P1} {FLUSH}"),
    "uniform, reduced": (2, f"{MUON} {P1} {UNIFORM} {REDUCED}"),
    "2bw, p=2 d=2": (4, f"{MUON} {P2} {TWO_BW}"),
    "flush, bf16, tied, p=2 d=2": (4, f"{TIED} --bf16 {P2} {FLUSH}"),
    "gpipe, p=2 d=2": (4, f"{MUON} {P2} --pipeline-schedule gpipe"),
    "2bw, p=1 d=4": (4, f"{MUON} --bf16 {P1} {TWO_BW}"),
    "a replica owns nothing": (4, f"{MUON} {LONE} {TWO_BW}"),
    "a replica owns nothing, error feedback": (4, f"{MUON} {LONE} {FEEDBACK}"),
    "a replica owns nothing, bf16, reduced": (4, f"{MUON} --bf16 {LONE} {STAGE} {REDUCED}"),
    "2bw, single gradient buffer": (2, f"{MUON} --bf16 {P1} {TWO_BW} --2bw-single-gradient-buffer"),
    "FP16 that overflows": (4, f"{MUON} {FP16} {P2} {FLUSH}"),
    "2bw, FP16 that overflows": (4, f"{MUON} {FP16} {P2} {TWO_BW}"),
    "stage, reduced": (4, f"{TIED} {P2} {STAGE} {REDUCED}"),
    "stage, bf16, reduced": (4, f"{TIED} --bf16 {P2} {STAGE} {REDUCED}"),
    "uniform, FP16 that overflows, reduced": (4, f"{MUON} {FP16} {P2} {UNIFORM} {REDUCED}"),
    "error feedback": (4, f"{TIED} {P2} {FEEDBACK}"),
    "error feedback, bf16": (2, f"{MUON} --bf16 {P1} {FEEDBACK}"),
    "tensor ranks": (4, f"{MUON} {P1} {FLUSH} {TENSOR} --muon-tp-mode duplicated"),
    "zero bubble": (4, f"{TIED} {P2} --pipeline-schedule zbv"),
    "interleaved": (4, f"{MUON} {P2} {V2}"),
    "bpipe": (8, f"{MUON} --pipeline-model-parallel-size 4 --pipeline-schedule bpipe"),
    "learning rates of its own": (2, f"{MUON} --bf16 {P1} {FLUSH} --muon-scalar-lr 1e-3 --decoupled-lr 3e-3"),
}  # fmt: skip


@pytest.mark.full
@table("num_ranks, flags", SAME_BITS, usual=1)
def test_owners_change_no_bit(num_ranks, flags):
    """Gradients of every batch, losses and weights are those of replicas that all step all parameters."""
    expected, found = train(num_ranks, flags), train(num_ranks, f"{flags} {OWNED}")
    assert [each["gradients"] for each in found] == [each["gradients"] for each in expected]
    assert found[-1]["losses"] == expected[-1]["losses"] and found[-1]["losses"]
    weights = joined_weights(found)
    assert not [name for name, weight in joined_weights(expected).items() if not torch.equal(weights[name], weight)]


def watch_predictions(run) -> Callable[[], list[dict[str, torch.Tensor]]]:
    """The weights that the rank has predicted for each batch."""
    predict, predictions = run.update.predict, []

    def predicted(version: int, num_microbatches: int) -> None:
        predict(version, num_microbatches)
        tensors = run.update.versions.tensors(version)
        predictions.append({name: tensor.clone() for name, tensor in tensors.items()})

    run.update.predict = predicted
    return lambda: predictions


@pytest.mark.full
@pytest.mark.parametrize(
    "num_ranks, flags",
    [
        pytest.param(4, f"{TIED} {P2} {STAGE}", id="stage"),
        pytest.param(2, f"{MUON} {FP16} {P1} {UNIFORM}", id="uniform, FP16", marks=FULL),
    ],
)
def test_owners_predict_for_all_replicas(num_ranks, flags):
    """From their own gradients alone. Replicas then compute at the same weights, as with megatron.core's shards; so do
    the copies of a tied embedding. The losses are near those of replicas that predict apart."""
    apart = train(num_ranks, flags)
    found = train(num_ranks, f"{flags} {OWNED}", watch=f"{__name__}:watch_predictions")
    watched = [each["watched"] for each in found]
    assert len(watched[0]) >= 5
    for one, other in zip(watched[0::2], watched[1::2], strict=True):  # two replicas of a stage
        assert not [name for left, right in zip(one, other, strict=True) for name in left
                    if not torch.equal(left[name], right[name])]  # fmt: skip
    for iteration, loss in apart[-1]["losses"].items():
        assert found[-1]["losses"][iteration] == pytest.approx(loss, rel=0.02)
    for first, last in zip(watched[0], watched[-1], strict=True) if num_ranks == 4 else ():
        assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])


# --- checkpoints ------------------------------------------------------------------------------------------------------


def watch_state(run) -> Callable[[], tuple[dict, dict]]:
    """The optimizer's state on this rank, when the run begins and when it ends: name -> tensors by name."""
    begins = _state_of(run)
    return lambda: (begins, _state_of(run))


def _state_of(run) -> dict[str, dict[str, torch.Tensor]]:
    from megatron.core.utils import unwrap_model
    from megatron.pipeline.runtime.stages.megatron.optimizers import masters_of, optimizers_of

    [inner] = optimizers_of(run.update.optimizer)
    masters = masters_of(inner)
    found = {}
    for chunk in map(unwrap_model, run.chunks):
        for name, parameter in numbered_names(chunk):
            own = masters.get(parameter, parameter)
            if own in inner.optimizer.state:
                tensors = {"master": own, **inner.optimizer.state[own]}
                found[name] = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    return found


def joined_state(results: list[dict], *, at_end: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The state of all ranks, of which no two own the same parameter."""
    joined: dict[str, dict[str, torch.Tensor]] = {}
    for result in results:
        state = result["watched"][at_end]
        assert not joined.keys() & state.keys()
        joined |= state
    return joined


@pytest.mark.parametrize("precision", ["--bf16", pytest.param("", marks=FULL)])
def test_state_loads_at_other_degrees(tmp_path, precision):
    """Four owners write; two replicas, one, and two stages read masters, moments and counters bit for bit."""
    watching = {"watch": f"{__name__}:watch_state"}
    model = f"{MUON} {precision} {FLUSH}"
    saving = f"{model} {P1} {OWNED} --train-iters 3 --save {tmp_path} --save-interval 3"
    written = train(4, saving, **watching)
    expected = joined_state(written, at_end=True)
    assert min(len(each["watched"][1]) for each in written) > 5
    for num_ranks, cut in ((2, f"{P1} {OWNED}"), (1, P1), (2, P2), (4, f"{P2} {OWNED} --ckpt-fully-parallel-load")):
        read = train(num_ranks, f"{model} {cut} --load {tmp_path} --ckpt-step 3 --train-iters 4 {OVERRIDE}", **watching)
        found = joined_state(read, at_end=False)
        assert found.keys() == expected.keys(), cut
        for name, tensors in expected.items():
            assert found[name].keys() == tensors.keys()
            assert not [key for key, tensor in tensors.items() if not torch.equal(found[name][key], tensor)], name


# name: (flags of both, ranks, cut of the run that saves, ranks, cut of the run that goes on, bit for bit)
CUTS = {
    "owners to none": (f"{MUON} --bf16", 4, f"{P2} {TWO_BW} {OWNED}", 4, f"{P2} {TWO_BW}", True),
    "none to owners": (f"{MUON} --bf16", 4, f"{P2} {TWO_BW}", 4, f"{P2} {TWO_BW} {OWNED}", True),
    "FP32, none to owners": (MUON, 2, f"{P1} {FLUSH}", 2, f"{P1} {FLUSH} {OWNED}", True),
    "FP32, owners to none": (MUON, 2, f"{P1} {FLUSH} {OWNED}", 2, f"{P1} {FLUSH}", True),
    "saved by the first of each": (
        f"{MUON} --bf16 --no-ckpt-fully-parallel-save", 2, f"{P1} {FLUSH} {OWNED}", 2, f"{P1} {FLUSH} {OWNED}", True,
    ),
    "tensor ranks": (
        f"{MUON} --bf16 --swiglu {TENSOR}", 4, f"{P1} {FLUSH} {OWNED}", 4, f"{P1} {FLUSH}", True,
    ),
    "predictions": (f"{TIED} --bf16", 4, f"{P2} {STAGE} {OWNED}", 4, f"{P2} {STAGE} {OWNED}", True),
    "predictions, FP32": (TIED, 4, f"{P2} {STAGE} {OWNED}", 4, f"{P2} {STAGE} {OWNED}", True),
    "reduced predictions to none": (
        f"{TIED} --bf16", 4, f"{P2} {STAGE} {REDUCED} {OWNED}", 4, f"{P2} {STAGE} {REDUCED}", True,
    ),
    "error feedback": (MUON, 2, f"{P1} {FEEDBACK} {OWNED}", 2, f"{P1} {FEEDBACK}", True),
    "groups without parameters": (
        f"{MUON} --bf16 --decoupled-lr 3e-3", 4, f"{P1} {FLUSH} {OWNED}", 4, f"{P1} {FLUSH}", True,
    ),
    "zero bubble": (
        f"{TIED} --bf16", 4, f"{P2} --pipeline-schedule zbv {OWNED}", 4, f"{P2} --pipeline-schedule zbv", True,
    ),
    "a replica owns nothing": (f"{MUON} --bf16 {LONE}", 4, f"{TWO_BW} {OWNED}", 4, f"{TWO_BW}", True),
    "none to a replica that owns nothing": (f"{MUON} {LONE}", 4, f"{TWO_BW}", 4, f"{TWO_BW} {OWNED}", True),
    "asynchronously": (f"{MUON} --bf16", 2, f"{P1} {FLUSH} {OWNED} --async-save", 2, f"{P1} {FLUSH} {OWNED}", True),
    "to the host": (f"{MUON} --bf16", 2, f"{P1} {FLUSH} {OWNED}", 1, f"{P1} --pipeline-schedule l2l", False),
}  # fmt: skip


@table("flags, writers, source, readers, target, exact", CUTS, usual=0)
def test_checkpoints_go_on_elsewhere(saved, flags, writers, source, readers, target, exact):  # noqa: F811
    """With owners, without them, and in other schedules."""
    check_cut(saved, flags, writers, source, readers, target, exact=exact)


@pytest.mark.parametrize(
    "flags, flag",
    [
        ("--overlap-grad-reduce --overlap-param-gather", "--overlap-param-gather"),
        ("--freeze-training --freeze-interval 2", "--freeze-training"),
        ("--elastic-pipeline --freeze-interval 2", "--elastic-pipeline"),
    ],
)
def test_what_is_refused(flags, flag):
    """In a sentence, at the start."""
    with pytest.raises(ValueError) as caught:
        arguments(f"{MUON} {OWNED} {flags}")
    message = f"{flag} does not go with --optimizer muon and --use-distributed-optimizer"
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
