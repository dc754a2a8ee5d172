"""`--dry-run`: a job for a cluster is checked by one process, and refused for what would stop it there."""

import os
import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron import backend

backend.install()

from megatron.pipeline.schedules import read_schedule
from megatron.planner import estimate_memory
from megatron.trainer.arguments import parse_args
from megatron.trainer.dry_run.dry_run import check_job, prove
from megatron.trainer.models.core_config import transformer_config
from megatron.trainer.plan import from_flags
from tests import workers
from tests.full_disk import largest_file
from tests.pipeline.brought_programs import FOLDED, KEPT, KEPT_AND_SWAPS, TORCH, written
from tests.trainer.arguments.command_line import arguments, argv
from tests.trainer.data.small_data import write_dataset
from tests.trainer.run.run_case import BASE, train

ROOT = Path(__file__).parents[3]
GPT3_96B = (
    "--num-layers 80 --hidden-size 9984 --num-attention-heads 104 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 2 --global-batch-size 128 --vocab-size 51199 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 8 --sequence-parallel --recompute-activations --fp16 --use-distributed-optimizer "
    "--dry-run 32"
)


HALVES = (
    "--dry-run 2 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --transformer-impl transformer_engine "
    "--assume-packages"
)


@pytest.fixture
def dry(run_words):
    """Run a command line (SMALL and more) dry."""
    return lambda extra, without="": run_words(argv(extra, without))


def test_a_file_that_has_no_room_is_named_and_is_not_there(dry, tmp_path):
    with largest_file(100):
        status, _, err, found = dry("--dry-run 1")
    assert (status, err) == (1, f"pretrain_gpt.py: error: {tmp_path}/dry.json: File too large\n") and found == {}


def test_job_that_is_right(dry):
    """Program, memory and rank map of a job for 32 GPUs are printed, in plain text where it is no terminal."""
    status, out, err, found = dry(f"{GPT3_96B} --pipeline-schedule bpipe --rank-mapping pair-adjacent")
    assert (status, err) == (0, "")
    assert "32 GPUs on 4 nodes, tensor 4 x pipeline 8 x data 1" in out and "proved for any number of batches" in out
    assert "0 of 12 pairs that move activations cross a node" in out and "pairs move 3.49 GB" in out
    assert "\x1b" not in out and "─" not in out
    assert found["world_size"] == 32 and found["verdict"] is None and found["num_microbatches"] == [64]
    assert max(rank["saved_microbatches"] for rank in found["memory"]) == 5
    assert found["placement"]["ranks_by_slot"][:8] == [0, 1, 2, 3, 28, 29, 30, 31]
    assert found["program"]["num_ranks"] == 8 and any(found["program"]["evicted_microbatches"])
    assert sum(rank["num_parameters"] for rank in found["memory"]) * 4 == pytest.approx(96.8e9, rel=0.01)


def test_activations_on_the_host_are_counted(dry):
    """The device holds three microbatches of a rank, as asked, and the host says how many bytes of the others."""
    _, _, _, plain = dry(GPT3_96B)
    status, out, err, found = dry(f"{GPT3_96B} --pipeline-offload-activations 3")
    assert (status, err) == (0, "")
    assert [rank["saved_microbatches"] for rank in found["memory"]] == [3, 3, 3, 3, 3, 3, 2, 1]
    assert found["memory"][0]["activations_bytes"] == plain["memory"][0]["activations_bytes"] * 3 / 8
    said = re.search(r"on the host by rank: 7, 6, 5, 4, 2, 0, 0, 0, at most ([0-9.]+) GiB \(stage [0-9]\)", out)
    largest = max(rank["activations_on_host"] for rank in found["memory"])
    assert float(said[1]) == pytest.approx(largest / 2**30, abs=0.01) and largest > 0
    assert not any(rank["activations_on_host"] for rank in plain["memory"])
    _, out, _, _ = dry(f"{GPT3_96B} --pipeline-offload-activations 8")
    assert "note: --pipeline-offload-activations 8 has nothing to move" in out


def test_one_of_each_is_no_plural(dry):
    status, out, err, _ = dry("--micro-batch-size 1 --global-batch-size 1 --dry-run 1")
    assert (status, err) == (0, "") and "dry run of pretrain_gpt.py: 1 GPU on 1 node, tensor 1" in out
    assert "batches of 1 sample, microbatches of 1" in out and "1 stage on 1 rank, batches of 1 microbatch: pr" in out


@pytest.mark.parametrize(
    "schedule, gpu, status, said",
    [
        ("flush", "68", 1, "error: stage 0 misses 5."),
        ("flush", "H200", 0, "H200: fits; stage 0 leaves "),
        ("flush", "A100-80", 1, "--dry-run-gpu A100-80, of which no tensor gets 9.6 GiB; recompute"),
        ("bpipe", "A100-80", 0, "A100-80: "),
    ],
)
def test_verdict_on_a_gpu(dry, schedule, gpu, status, said):
    """A job that does not fit the named GPU is refused with the stage and what it misses, room for no tensor too."""
    found, out, err, _ = dry(f"{GPT3_96B} --pipeline-schedule {schedule} --dry-run-gpu {gpu}")
    assert found == status and said in (err if status else out)
    assert ("no run is known that did with less" in out) == ("borderline" in out)


def test_communicators_of_nccl_are_counted(dry):
    """Their buffers have a column, and are part of the total; over gloo there are none."""
    flags = "--dry-run 4 --pipeline-model-parallel-size 4"
    _, out, _, nccl = dry(flags)
    gloo = dry(f"{flags} --distributed-backend gloo")[3]
    assert "transfers communicators total" in " ".join(out.split())
    for ours, theirs in zip(nccl["memory"], gloo["memory"], strict=True):
        assert ours["communicators_bytes"] > 0 and theirs["communicators_bytes"] == 0
        assert ours["total_bytes"] - ours["communicators_bytes"] == pytest.approx(theirs["total_bytes"])


@pytest.mark.parametrize(
    "extra, message",
    [
        ("--dry-run 6 --pipeline-model-parallel-size 4", "6 processes cannot be divided"),
        ("--dry-run 4 --pipeline-model-parallel-size 4 --pipeline-schedule 2bw --global-batch-size 2", "at least 4"),
        ("--dry-run 2 --pipeline-model-parallel-size 2 --dry-run-gpu P100", "--dry-run-gpu: 'P100' is no GPU"),
        (
            "--dry-run 32 --global-batch-size 32 --rank-topology examples/topology.yaml",
            "--dry-run 32 needs more GPUs than the 16 of",
        ),
        ("--dry-run 2 --rank-topology nowhere.yaml", "nowhere.yaml"),
        (
            "--dry-run 2 --assume-packages flash_attn",
            "--assume-packages flash_attn: runs ask for transformer_engine, apex",
        ),
        ("--dry-run 2 --assume-packages transformer_engine==new", "Invalid version: 'new'; write it as 2.6.0"),
        (
            f"{HALVES} transformer-engine==2.2",
            "layers of Transformer Engine can put weight gradients off from 2.3.0 on",
        ),
        (f"{HALVES} apex", "--transformer-impl transformer_engine needs the transformer_engine package"),
        (
            "--dry-run 2 --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex "
            "--assume-packages transformer_engine apex",
            "flex needs CUDA and the package deep_ep",
        ),
        ("--dry-run 1 --use-checkpoint-args --load ./nowhere", "nowhere"),
        ("--dry-run 1 --num-attention-heads 3 --kv-channels 8 --apply-layernorm-1p --transformer-impl local", "needs"),
    ],
)
def test_job_that_is_wrong(dry, monkeypatch, extra, message):
    """What a run would refuse, for any reason that is known before, is one sentence with status 1."""
    monkeypatch.chdir(ROOT)
    status, _, err, _ = dry(extra)
    assert status == 1
    assert err.startswith("pretrain_gpt.py: error: ") and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("packages", "engine", "fuses"),
    [
        ("", " and Transformer Engine (", True),
        ("--assume-packages transformer_engine==2.6.0 apex", " and Transformer Engine 2.6.0 (", True),
        ("--assume-packages transformer-engine==2.5.0+cu12 apex", " and Transformer Engine 2.5.0+cu12 (", False),
        ("--assume-packages none", ", without Transformer Engine", False),
    ],
)
def test_packages_of_the_jobs_machines(dry, packages, engine, fuses):
    """What the job's machines have decides its layers and fusions, not what is installed here."""
    status, out, err, _ = dry(f"--dry-run 2 --pipeline-model-parallel-size 2 --pipeline-schedule 2bw {packages}")
    assert (status, err) == (0, "") and f"CUDA{engine}" in out
    assert ("gradient_accumulation_fusion is off" in out) != fuses


def test_flags_of_a_dry_run_need_it():
    """--dry-run-gpu and the like say nothing by themselves."""
    with pytest.raises(ValueError, match="--dry-run-gpu needs --dry-run, the number of GPUs"):
        arguments("--dry-run-gpu H100")


@pytest.mark.parametrize("heads", ["", "--group-query-attention --num-query-groups 2"])
def test_rotary_models_need_no_kernel_here(dry, heads):
    """A model of Llama's shape passes where Transformer Engine is missing: its kernels are the cluster's."""
    model = (
        "--dry-run 8 --pipeline-model-parallel-size 2 --position-embedding-type rope --swiglu --normalization RMSNorm "
        f"--disable-bias-linear --untie-embeddings-and-output-weights --bf16 {heads}"
    )
    status, out, err, _ = dry(model)
    assert (status, err) == (0, "") and "GiB" in out


def test_conversations_count_as_their_sequences(dry, tmp_path):
    """With padding, as other text of that length; a file that is elsewhere is a warning, an empty one an error."""
    (tmp_path / "empty.jsonl").write_text("")
    counted = []
    for flags in (
        f"--sft --data-path {tmp_path}/none.jsonl",
        "--mock-data",
        f"--sft --data-path {tmp_path}/empty.jsonl",
    ):
        status, out, err, found = dry(
            f"--dry-run 2 --pipeline-model-parallel-size 2 --tokenizer-type ByteLevelTokenizer {flags}",
            without="--mock-data --tokenizer-type",
        )
        counted.append((status, found and found["memory"]))
        assert (f"warning: data file {tmp_path}/none.jsonl is not on this machine" in out) == ("none" in flags)
    assert counted[0] == counted[1] and counted[0][0] == 0 and counted[2][0] == 1
    assert "empty.jsonl has no conversations; write lines such as" in err


def test_what_is_only_on_the_cluster_is_a_warning(dry):
    """Data, tokenizer and checkpoints that are not here are named, and taken as there."""
    status, out, err, found = dry(
        "--dry-run 2 --pipeline-model-parallel-size 2 --data-path 0.5 /data/one 0.5 /data/two --load /ckpt "
        "--tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt",
        without="--mock-data --tokenizer-type --vocab-size",
    )
    assert (status, err) == (0, "")
    assert [line.split(" ")[0] for line in found["warnings"]] == ["--load", "data", "data", "--vocab-file"]
    assert "warning: data file /data/one.idx and /data/one.bin is not on this machine" in out
    assert "the embedding is taken to have 50304 rows, as GPT-2's" in out


def test_data_that_are_here_are_checked(dry, tmp_path):
    """A damaged file on this machine is an error, as in a run; a sound one is not mentioned."""
    prefix = write_dataset(tmp_path / "text", documents=20, vocab=60)
    status, _, _, found = dry(f"--dry-run 1 --data-path {prefix}", without="--mock-data")
    assert status == 0 and not found["warnings"]
    with open(f"{prefix}.bin", "ab") as stream:
        stream.write(b"more")
    status, _, err, _ = dry(f"--dry-run 1 --data-path {prefix}", without="--mock-data")
    assert status == 1 and "longer than its index says" in err


def test_topology_gives_nodes_and_bandwidths(dry, monkeypatch):
    """With a topology the pairs' transfers are compared with what appendix B needs; half a topology may be filled."""
    monkeypatch.chdir(ROOT)
    model = GPT3_96B.replace("--dry-run 32", "--dry-run 16").replace("--num-layers 80", "--num-layers 40")
    model = model.replace("--pipeline-model-parallel-size 8", "--pipeline-model-parallel-size 4")
    status, out, err, found = dry(f"{model} --pipeline-schedule bpipe --rank-topology examples/topology.yaml")
    assert (status, err) == (0, "")
    assert "4 of 4 pairs that move activations cross a node" in out and "to fit under a forward of" in out
    assert {slot["node"] for slot in found["placement"]["slots"]} == {"node0", "node1"}
    status, _, _, found = dry("--dry-run 8 --pipeline-model-parallel-size 4 --rank-topology examples/topology.yaml")
    assert status == 0 and {slot["node"] for slot in found["placement"]["slots"]} == {"node0"}


def test_every_batch_size_is_proved(dry):
    """A ramp-up's sizes, and the way from each to the next, are proved under 2bw; one that is too small is refused."""
    model = "--dry-run 4 --pipeline-model-parallel-size 4 --pipeline-schedule 2bw --global-batch-size 12"
    status, out, _, found = dry(f"{model} --rampup-batch-size 4 4 100")
    assert status == 0 and found["num_microbatches"] == [4, 8, 12] and "4 to 12 (3 sizes)" in out
    status, _, err, _ = dry(f"{model} --rampup-batch-size 2 2 100")
    assert status == 1 and "2bw with 4 stages needs batches of at least 4" in err


def test_schedules_that_stash(dry):
    """pipedream's versions are in the weights: four on the first of four stages."""
    status, _, _, found = dry(
        "--dry-run 4 --pipeline-model-parallel-size 4 --pipeline-schedule pipedream --clip-grad 0 "
        "--global-batch-size 1 --untie-embeddings-and-output-weights"
    )
    assert status == 0
    assert [rank["weights_bytes"] / rank["num_parameters"] for rank in found["memory"]] == [16, 12, 8, 4]


def test_backwards_in_halves(dry):
    """What waits for W is counted apart: in the program's lines, and where it adds to the peak in the memory's."""
    base = GPT3_96B.replace("--recompute-activations ", "")
    status, out, _, found = dry(f"{base} --pipeline-schedule zb-h1 --transformer-impl local")
    assert status == 0
    assert "saved microbatches by rank: 8, 8, 8, 8, 8, 8, 8, 8" in out
    assert "of them between the halves of their backward, I and W, by stage: 1, 2, 3, 4, 5, 6, 7, 8" in out
    deferred = [rank["deferred_bytes"] for rank in found["memory"]]
    assert deferred[0] == 0 and deferred == sorted(deferred) and deferred[-1] > 0


def test_predicted_weights(dry):
    """In FP32 without the distributed optimizer the true weights are a copy more; what is held is counted."""
    common = "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8 --pipeline-schedule 2bw "
    common += "--dry-run 2 --untie-embeddings-and-output-weights"
    plain, stage, uniform = (
        dry(f"{common} {mode}")[3]["memory"]
        for mode in ("", "--2bw-provisional stage", "--2bw-provisional uniform --2bw-provisional-microbatches 7")
    )
    for rank in range(2):
        weights = [each[rank]["weights_bytes"] for each in (plain, stage, uniform)]
        assert weights[1] == weights[2] == weights[0] / 2 * 3
        gradients = [each[rank]["gradients_bytes"] for each in (plain, stage, uniform)]
        assert gradients == [gradients[0], gradients[0], gradients[0] / 2 * (2 + rank)]
    half = [dry(f"{common} --bf16 {mode}")[3]["memory"][0] for mode in ("", "--2bw-provisional stage")]
    assert all(half[0][f"{part}_bytes"] == half[1][f"{part}_bytes"] for part in ("weights", "gradients", "optimizer"))


def test_many_nodes_are_cut_short(dry):
    """A thousand GPUs do not print a thousand places; the JSON has them."""
    status, out, _, found = dry("--dry-run 1024 --pipeline-model-parallel-size 4 --global-batch-size 1024")
    assert status == 0 and "... and 112 more nodes" in out and len(out.splitlines()) < 60
    assert len(found["placement"]["slots"]) == 1024


def test_under_a_launcher_it_is_refused(monkeypatch):
    """Many processes would each check the whole job."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start it without torchrun or srun"):
        check_job(parse_args(argv("--dry-run 2")))


def test_program_of_its_own_process(tmp_path):
    """As users start it: status 0 and the tables; an unknown flag is a usage error, with status 2."""
    words = [str(ROOT / "pretrain_gpt.py"), *argv("--dry-run 8 --pipeline-model-parallel-size 4")]
    for more, status in (([], 0), (["--no-such-flag"], 2)):
        process = workers.fork(program_of, [*words, *more], tmp_path / f"{status}.txt")
        process.join(300)
        assert process.exitcode == status
    said = (tmp_path / "0.txt").read_text()
    assert "memory of a GPU, estimated" in said and "PP 3 DP 1" in said


def program_of(words: list[str], output: Path) -> None:
    """In a process that has torch already, as `python` runs these words there."""
    os.chdir(output.parent)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), 1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


FURTHER = "--mtp-num-layers 2 --position-embedding-type none --untie-embeddings-and-output-weights"


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["flush", "2bw", "bpipe", "bpipe --pipeline-recompute", f"flush {FURTHER}"])
def test_estimate_of_a_real_run(schedule):
    """The activations of every stage are within 10% of what a real run of four stages counts, also where they move, and
    where the last stage predicts further tokens. Dropout adds nothing to what a stage keeps until it recomputes."""
    flags = f"--pipeline-model-parallel-size 4 --pipeline-schedule {schedule} --global-batch-size 8 --train-iters 2"
    measured = train(4, f"{flags} --log-saved-activations")[-1]["records"][-1]["saved_activation_bytes"]
    args = arguments(f"{BASE} {flags}", world_size=4)
    args = replace(args, padded_vocab_size=128)
    config, setting = transformer_config(args), from_flags.activation_setting(args)
    memory = estimate_memory(
        from_flags.architecture(args), replace(setting, mask_bytes=setting.element_bytes),
        from_flags.training_state(args), prove(args)[1], layers=from_flags.layers_of_stages(config),
    )  # fmt: skip
    for rank, num_bytes in zip(memory, measured, strict=True):
        assert num_bytes == pytest.approx(rank.parts.activations, rel=0.1), rank.rank


def watch_bytes(run) -> Callable[[], dict[str, int]]:
    """The bytes of a rank's weights and their gradients, and of masters and moments when it has stepped."""

    def held() -> dict[str, int]:
        from megatron.pipeline.runtime.stages.megatron.optimizers import optimizers_of

        parameters = [each for chunk in run.chunks for each in chunk.parameters()]
        state = 0
        for each in optimizers_of(run.update.optimizer):
            for group in each.optimizer.param_groups:
                for own in group["params"]:
                    moments = [value for name, value in each.optimizer.state[own].items() if name != "step"]
                    state += sum(tensor.nbytes for tensor in [*moments, *([own] if run.args.bf16 else [])])
        gradients = sum(each.main_grad.nbytes for each in parameters)
        return {"weights": sum(each.nbytes for each in parameters), "gradients": gradients, "optimizer": state}

    return held


TWO_STAGES = "--pipeline-model-parallel-size 2"
SHARED = f"--num-experts 4 --disable-bias-linear --swiglu {TWO_STAGES} --expert-model-parallel-size 2"


@pytest.mark.parametrize(
    ("num_ranks", "flags", "near"),
    [
        (4, f"{SHARED} --bf16 --moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 32", 0.0),
        pytest.param(4, f"{SHARED} --bf16 --use-distributed-optimizer", 0.01, marks=pytest.mark.full),
        pytest.param(
            4, f"{SHARED.replace(TWO_STAGES, '')} --pipeline-model-parallel-size 1 --tensor-model-parallel-size 2 "
            "--sequence-parallel --make-vocab-size-divisible-by 64 --expert-tensor-parallel-size 1", 0.0,
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_bytes_of_ranks_that_share_out_experts(num_ranks, flags, near):
    """Weights, gradients, masters and moments of a rank of a real run; shards are cut at other places than evenly."""
    results = train(num_ranks, f"{flags} --train-iters 1", watch=f"{__name__}:{watch_bytes.__name__}")
    args = replace(arguments(f"{BASE} {flags}", world_size=num_ranks), padded_vocab_size=128)
    memory = estimate_memory(
        from_flags.architecture(args), from_flags.activation_setting(args), from_flags.training_state(args),
        prove(args)[1], layers=from_flags.layers_of_stages(transformer_config(args)),
    )  # fmt: skip
    for rank, result in enumerate(results):
        parts = memory[rank * len(memory) // num_ranks].parts
        for name, num_bytes in result["watched"].items():
            said = getattr(parts, name) + (parts.step if name == "optimizer" and "--bf16" not in flags else 0)
            assert num_bytes == pytest.approx(said, rel=near or 1e-9), (rank, name)


def test_provisional_weights_are_named(dry):
    """With what each stage reads of the smallest batch."""
    _, out, _, _ = dry("--pipeline-schedule 2bw --2bw-provisional stage --pipeline-model-parallel-size 2 --dry-run 2")
    assert "2bw with provisional weights: stages read 7, 8 of 8 microbatches" in out


def test_microbatches_that_a_program_keeps_count_whole(dry, tmp_path):
    """Stage 0 holds three microbatches, of which it recomputes one, when another one has ended; stage 1 recomputes
    none."""
    flags = (
        "--pipeline-model-parallel-size 2 --global-batch-size 8 --untie-embeddings-and-output-weights --dry-run 4 "
        f"--pipeline-program {tmp_path}/program.csv"
    )

    def memory(text: str, more: str) -> list[dict[str, float]]:
        written(tmp_path, text)
        return dry(flags + more)[3]["memory"]

    plain, kept = memory(TORCH, ""), memory(KEPT, " --pipeline-recompute")
    assert kept[0]["activations_bytes"] == pytest.approx(plain[0]["activations_bytes"] * 2 / 3)
    assert kept[0]["workspace_bytes"] == plain[0]["workspace_bytes"]
    assert kept[1] == plain[1]
    moved = memory(KEPT_AND_SWAPS, " --pipeline-recompute")
    whole = plain[0]["activations_bytes"] / 3
    assert [each["activations_on_host"] / whole for each in moved] == pytest.approx([3, 1], rel=0.2)
    assert moved[0]["activations_bytes"] < kept[0]["activations_bytes"] + whole


def test_a_program_of_ones_own(dry, tmp_path):
    """Its rows are proved, priced and named with their hash; what disagrees is refused as a run would."""
    path = written(tmp_path, FOLDED)
    flags = (
        "--pipeline-model-parallel-size 2 --global-batch-size 8 --untie-embeddings-and-output-weights --dry-run 4 "
        f"--pipeline-program {path}"
    )
    status, out, err, found = dry(flags)
    digits = read_schedule(path, data_parallel=True).sha256
    assert (status, err) == (0, "")
    assert f"program {path} (sha256 {digits[:12]}), 4 stages on 2 ranks, batches of 4 microbatches" in " ".join(
        out.split()
    )
    assert found["program_sha256"] == digits and found["program"]["live_versions"] == [2, 2, 2, 2]
    status, _, err, _ = dry(flags.replace("size 8", "size 4"))
    assert status == 1 and "has batches of 4 microbatches, not 2" in err
