"""Published runs whose weights are split over replicas, predicted with constants that were fitted to none of them."""

from dataclasses import replace

from megatron.planner.job.software import DEEPSPEED
from megatron.planner.published.entries import Entry, read_entry
from megatron.planner.published.prediction import Prediction, Question, predict
from megatron.planner.time.calibration import default_constants
from tests.planner.published.measured import changed

LLAMA = {
    "name": "Llama 3.1 8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "seq": 8192, "vocab": 128256,
}  # fmt: skip
H100 = {"gpu": "H100-96GB (HBM2e, 500 W)", "gpus_per_node": 8, "internode": "400 Gb/s per GPU"}


def torchtitan(gpus: int, technique: str, rate: float, gib: float) -> dict:
    """A run of benchmarks/llama3_h100_202412_torchtitan.md, Tables 1 and 3: tokens per second of a GPU, its memory."""
    return {
        "id": f"{gpus}-{technique}",
        "source": "torchtitan benchmarks Dec 2024",
        "model": LLAMA,
        "hardware": H100 | {"gpus": gpus},
        "config": {
            "fsdp": gpus, "micro_batch": 2, "global_batch": 2 * gpus, "recompute": "selective", "technique": technique,
        },
        "measured": {"tokens_per_s_per_gpu": rate, "peak_memory_GiB": gib},
    }  # fmt: skip


TORCHTITAN = [
    torchtitan(8, "eager", 5762, 82.4), torchtitan(8, "compile", 6667, 77.0),
    torchtitan(128, "eager", 5605, 67.0), torchtitan(128, "compile", 6514, 62.0),
]  # fmt: skip


LLAMA_70B = LLAMA | {"name": "Llama 3.1 70B", "layers": 80, "hidden": 8192, "heads": 64}
WIDE = {"fsdp": 32, "t": 8, "micro_batch": 16, "global_batch": 512, "recompute": "layer"}
LATER = torchtitan(32, "compile+fp8", 10938, 47.96) | {"source": "torchtitan Trainy/WhiteFiber June 2025"}
IN_FP8 = [
    torchtitan(8, "compile+fp8", 8532, 76.8), torchtitan(128, "compile+fp8", 8380, 61.8),
    changed(torchtitan(256, "compile+fp8", 829, 71.9), model=LLAMA_70B, config=WIDE),  # Table 4
    changed(LATER, hardware={"gpu": "H200-141GB"}, config={"recompute": None}),
]  # fmt: skip


def zero_3(params: float, gpus: int, micro_batch: int, global_batch: int, teraflops: float | None) -> dict:
    """A run of Narayanan et al. 2021, Table 2, without model parallelism; of the caption where there are no TFLOP/s."""
    return {
        "id": f"{params}-{gpus}",
        "source": "Narayanan et al. SC21 Table 2 (ZeRO-3)",
        "model": {"params_B": params, "seq": 2048, "vocab": 51200},
        "hardware": {"gpu": "A100-SXM-80GB", "mem_GB": 80, "gpus_per_node": 8, "system": "Selene", "gpus": gpus},
        "config": {
            "t": 1, "p": 1, "d": gpus, "micro_batch": micro_batch, "global_batch": global_batch, "zero": 3,
            "recompute": "layer",
        },
        "measured": {"tflops_per_gpu_incl_recompute": teraflops} if teraflops else {"feasible": False},
    }  # fmt: skip


NARAYANAN = [
    zero_3(174.6, 384, 4, 1536, 144), zero_3(174.6, 768, 2, 1536, 88), zero_3(174.6, 1536, 1, 1536, 44),
    zero_3(529.6, 640, 4, 2560, 138), zero_3(529.6, 1120, 2, 2240, 98), zero_3(529.6, 2240, 1, 2240, 48),
]  # fmt: skip


def predicted(run: dict) -> Prediction:
    entry = read_entry(run)
    assert isinstance(entry, Entry), entry.reason
    return predict(entry, default_constants())


def test_times_of_torchtitan():
    """3 to 11% too short; a network costs little, and compiling saves more than it did."""
    found = [predicted(run) for run in TORCHTITAN]
    errors = [each.errors["iteration"] for each in found]
    assert all(-0.12 < error < -0.02 for error in errors)
    eager, compiled, wide, _ = (each.estimate.seconds for each in found)
    assert 0.75 < compiled / eager < 0.9 and eager < wide < 1.03 * eager


def test_torchtitan_in_fp8():
    """Within 4%, on H100 and H200, and beside tensor parallelism; faster than in 16 bits."""
    found = [predicted(run) for run in IN_FP8]
    assert all(abs(each.errors["iteration"]) < 0.04 for each in found)
    assert all(each.entry.software.fp8 and each.entry.software.fuses_elementwise for each in found)
    assert found[0].estimate.seconds < 0.86 * predicted(TORCHTITAN[1]).estimate.seconds
    assert all(abs(each.peak_error) < 0.03 for each in found[:2]) and all(abs(each.peak_error) < 0.26 for each in found)


def test_torchtitan_multiplies_in_pieces():
    """Asynchronous tensor parallelism makes the run with layers recomputed 16% faster, where it made it 6%."""
    plain = IN_FP8[2]
    pieces = changed(plain, config={"technique": "compile+fp8+asyncTP"}, measured={"tokens_per_s_per_gpu": 876})
    each = predicted(pieces)
    assert each.entry.software.overlaps_in_pieces and not predicted(plain).entry.software.overlaps_in_pieces
    assert 0.8 < each.estimate.seconds / predicted(plain).estimate.seconds < 0.95
    assert abs(each.errors["iteration"]) < 0.07
    same = changed(plain, config={"tp_comm_overlap": True})
    assert predicted(same).estimate.seconds == each.estimate.seconds


def test_attention_kernels_of_the_generation_before_are_slower():
    """On H100 FlashAttention-2, as PyTorch has it; on A100 it is the newest."""
    for gpu, is_slower in (("H100", True), ("A100-80", False)):
        run = changed(TORCHTITAN[0], hardware={"gpu": gpu})
        older = read_entry(run)
        newer = replace(older, software=replace(older.software, flash_attention_2=False))
        times = [predict(each, default_constants()).estimate.seconds for each in (older, newer)]
        assert (times[0] > 1.03 * times[1]) is is_slower and (times[0] == times[1]) is not is_slower


def test_collectives_of_torchtitan_hold_no_operands():
    """Microbatches of 16 on 8 tensor ranks leave room, and nothing is slowed; Megatron-Core's would be."""
    verdict = predicted(IN_FP8[2]).estimate.verdict
    assert verdict.fits and not verdict.slowed
    other = changed(IN_FP8[2], config={"technique": None, "framework": "Megatron-Core", "sequence_parallel": True})
    assert predicted(other).estimate.verdict.slowed


def test_memory_of_torchtitan():
    """Within 7%, on 8 GPUs and on 128."""
    assert all(abs(predicted(run).peak_error) < 0.07 for run in TORCHTITAN)
    assert predicted(changed(TORCHTITAN[0], measured={"peak_memory_GiB": None})).peak_error is None


def test_zero_3_of_narayanan():
    """Within 25%, and the largest of 175B within 40; with twice the GPUs and half the microbatch hardly any faster, or
    slower."""
    found = [predicted(run) for run in NARAYANAN]
    errors = [each.errors["iteration"] for each in found]
    assert all(abs(error) < (0.4 if index == 2 else 0.25) for index, error in enumerate(errors))
    for each in found:
        assert each.entry.software.sharding is DEEPSPEED
    assert [each.estimate.fits for each in found] == [True, True, True, False, True, True]  # see the next test
    for few, many in ((1, 2), (4, 5)):
        assert found[many].estimate.seconds > 0.9 * found[few].estimate.seconds


def test_what_ran_out_of_memory():
    """530B on 560 GPUs did not run (the caption of the table), and does not fit. With the same microbatch on 640 it
    ran, and its tensors fit; 3.7 GiB are missing of what is taken to be lost beside them."""
    few, more = (predicted(zero_3(529.6, gpus, 4, 4 * gpus, None)).estimate.verdict for gpus in (560, 640))
    assert not few.fits and few.spare_gib < more.spare_gib - 1.5
    assert more.is_borderline and -4 < more.spare_gib < 0


def test_the_same_answer_for_a_fit():
    """What a fit asks again and again is what a prediction says."""
    question, constants = Question(read_entry(TORCHTITAN[0])), default_constants()
    assert question.time_errors(constants) == question.predict(constants).errors
