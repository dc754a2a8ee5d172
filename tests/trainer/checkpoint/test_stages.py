"""Checkpoints of ranks with several stages, and of uneven stages: they load wherever else the layers are cut."""

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.trainer.run.run_case import joined_weights, table, train

FULL = pytest.mark.full
EXACT = "--untie-embeddings-and-output-weights --clip-grad 0"
CLIPPED = "--clip-grad 0.5 --adam-eps 1e-5"  # eps: the noise of gradients that should be 0 stays noise
UNDROPPED = "--hidden-dropout 0 --attention-dropout 0"
P1, P2, P4 = (f"--pipeline-model-parallel-size {p}" for p in (1, 2, 4))
V2 = "--num-virtual-stages-per-pipeline-rank 2"
SHARDED = "--use-distributed-optimizer"
TENSOR = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
EIGHT = "--num-layers 8 --hidden-size 16"
LAYOUT = "--pipeline-model-parallel-layout"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Runs of six iterations that saved the third, each made once: the directory, and the results of all ranks."""
    runs = {}

    def get(num_ranks: int, flags: str, case: str = "train_case") -> tuple[str, list[dict]]:
        if (num_ranks, flags) not in runs:
            folder = tmp_path_factory.mktemp("checkpoint")
            saving = f"{flags} --save {folder} --save-interval 3"
            runs[num_ranks, flags] = str(folder), train(num_ranks, saving, case=case)
        return runs[num_ranks, flags]

    return get


CUTS = {
    "5 layers, p=3 to p=2 v=2": (f"{EXACT} --num-layers 5", 3, P1.replace("1", "3"), 2, f"{P2} {V2}", True),
    "p=1 to p=2 v=2": (EXACT, 1, P1, 2, f"{P2} {V2}", True),
    "p=2 v=2 d=2 distributed optimizer to p=2 v=1": (CLIPPED, 4, f"{P2} {V2} {SHARDED}", 2, P2, False),
    "p=2 v=2 to p=1": (EXACT, 2, f"{P2} {V2}", 1, P1, True),
    "p=2 v=1 to v=2": (EXACT, 2, P2, 2, f"{P2} {V2}", True),
    "p=4 v=2 to p=2 v=2": (f"{EXACT} {EIGHT}", 4, f"{P4} {V2}", 2, f"{P2} {V2}", True),
    "p=2 v=2 to uneven": (EXACT, 2, f"{P2} {V2}", 4, f"{P4} {LAYOUT} E|ttt|t|L", True),
    "uneven to p=2 v=2": (EXACT, 4, f"{P4} {LAYOUT} E|ttt|t|L", 2, f"{P2} {V2}", True),
    "p=1 to empty stage": (EXACT, 1, P1, 2, f"{P2} {LAYOUT} Et|tt||tL", True),
    "p=2 v=2 to distributed optimizer p=2 v=2": (EXACT, 2, f"{P2} {V2}", 2, f"{P2} {V2} {SHARDED}", True),
    "distributed optimizer p=2 v=2 d=2 to p=4 d=1": (CLIPPED, 4, f"{P2} {V2} {SHARDED}", 4, f"{P4} {SHARDED}", False),
    "bf16, distributed optimizer p=2 v=2 to p=1": (f"{EXACT} --bf16", 2, f"{P2} {V2} {SHARDED}", 1, P1, True),
    "bf16, rank 0 with fewer groups": (
        f"{EXACT} --bf16 --decoupled-lr 1e-3", 4, f"{P4} {LAYOUT} E|ttt|t|L", 2, P2, True,
    ),
    "t=2 to p=2 v=2 t=2": (f"{CLIPPED} {UNDROPPED}", 2, f"{P1} {TENSOR}", 4, f"{P2} {V2} {TENSOR}", False),
}  # fmt: skip


@pytest.mark.full
@table("model, writers, source, readers, target, exact", CUTS, usual=1)
def test_other_cuts_go_on_with_the_same_numbers(saved, model, writers, source, readers, target, exact):
    """Losses, norms and weights are those of the run that went on; where only the cut differs, bit for bit."""
    check_cut(saved, model, writers, source, readers, target, exact=exact)


def check_cut(saved, model, writers, source, readers, target, *, exact, case="train_case"):
    """A run from the checkpoint of `source` on is that which went on."""
    folder, whole = saved(writers, f"{model} {source}", case)
    rest = train(readers, f"{model} {target} --load {folder} --ckpt-step 3", case=case)
    expected, found = (
        {record["iteration"]: record for record in results[-1]["records"] if record["iteration"] > 3}
        for results in (whole, rest)
    )
    assert found.keys() == expected.keys() == {4, 5, 6}
    for iteration, record in found.items():
        for name, tolerance in (("lm_loss", 0 if exact else 1e-6), ("grad_norm", 1e-12 if exact else 2e-6)):
            value = expected[iteration][name]  # without a norm: the step was skipped
            assert record[name] == (value and pytest.approx(value, rel=tolerance, abs=0)), (iteration, name)
    weights, expected_weights = joined_weights(rest), joined_weights(whole)
    names = weights.keys() & expected_weights.keys()
    assert weights.keys() ^ expected_weights.keys() <= {"output_layer.weight"}  # a copy of the tied embedding
    for name in names:
        if exact:
            assert torch.equal(weights[name], expected_weights[name]), name
        else:
            torch.testing.assert_close(weights[name], expected_weights[name], rtol=0, atol=1e-5)


def test_keys_do_not_depend_on_the_cut(saved):
    """Keys and shapes of a p=2 v=2 checkpoint are those of one process: Megatron-LM's, layers numbered globally."""
    stored = []
    for num_ranks, cut in ((1, P1), (2, f"{P2} {V2}")):
        folder, _ = saved(num_ranks, f"{EXACT} {cut}")
        entries = FileSystemReader(f"{folder}/iter_0000003").read_metadata().state_dict_metadata
        shapes = {key: tuple(getattr(entry, "size", ())) for key, entry in entries.items()}  # objects have none
        stored.append({key: shape for key, shape in shapes.items() if not key.startswith("rng_state")})
    assert stored[0] == stored[1]
    assert stored[0]["decoder.layers.mlp.linear_fc1.weight"] == (4, 128, 32)
    assert "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight" in stored[0]


def test_the_cut_comes_from_the_checkpoint_on_request(saved):
    """--use-mp-args-from-checkpoint-args takes v, and with it the schedule."""
    folder, whole = saved(2, f"{EXACT} {P2} {V2}")
    flags = "--use-checkpoint-args --use-mp-args-from-checkpoint-args --clip-grad 0"
    rest = train(2, f"{flags} --load {folder} --ckpt-step 3")
    assert any("schedule interleaved" in line for line in rest[-1]["lines"])
    assert rest[-1]["losses"] == {iteration: whole[-1]["losses"][iteration] for iteration in (4, 5, 6)}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["--bf16", f"--bf16 {SHARDED}", pytest.param("", marks=FULL)])
def test_groups_that_look_alike_are_not_mixed_up(saved, kind):
    """The layers go on with --lr and the embeddings with --decoupled-lr: the groups differ in nothing else."""
    check_cut(saved, f"{EXACT} --decoupled-lr 1e-3 {kind}", 1, P1, 1, P1, exact=True)
