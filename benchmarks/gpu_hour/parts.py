"""The parts of the hour, as a table: a row for each part, in the order in which they run.

The order is by value a minute: first what tells whether the card computes what it should and how fast it can be, then
what was never measured on a GPU, last what is long. Rows follow each other such that calls of nine minutes are filled.
A part is a process of its own, so that nothing it does to the card or to itself reaches the others.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A row.

    Attributes:
        name: the name of the part, and of its file of results.
        question: what it answers, in one sentence.
        argv: the words after `python`; the runner adds `--json FILE`, and in a rehearsal `--rehearse`.
        limit: the seconds after which it is ended.
        expected: the seconds that it is expected to take, which decide whether it is begun; guesses, until measured.
        capability: the least compute capability of the card that it needs.
        packages: the modules that it needs beside torch and the project's requirements.
    """

    name: str
    question: str
    argv: tuple[str, ...]
    limit: float
    expected: float
    capability: tuple[int, int] = (0, 0)
    packages: tuple[str, ...] = ()


def _module(name: str, limit: float, expected: float, question: str, *, argv: str = "", **needs: object) -> Part:
    """A module of this folder, of its own name or with the words of `argv`."""
    module, *words = (argv or name).split()
    return Part(name, question, ("-m", f"benchmarks.gpu_hour.{module}", *words), limit, expected, **needs)


def _tests(name: str, limit: float, expected: float, file: str, question: str) -> Part:
    return _module(
        name, limit, expected, question, argv=f"gpu_tests {file}", packages=("pytest", "pytest_timeout", "hypothesis")
    )


_CUDA = "tests/pipeline/runtime/cuda"
PARTS = (
    _module("floor", 150, 40, "How fast are matrix products, copies and launches on this card?"),
    _module("one_stage", 300, 100,
            "Has one stage plain torch's losses, and what is its time over torch's and megatron.core's?"),
    _module("schedules", 300, 100, "Have two and four stages on one card one process's losses, under every schedule?"),
    _tests("tests_order", 240, 50, f"{_CUDA}/test_order.py",
           "Do results stay right where the work that others wait for is late?"),
    _module("memory", 420, 200, "What is the peak memory over the planner's estimate, at sizes that fill the card?"),
    _tests("tests_host", 240, 40, f"{_CUDA}/test_host.py",
           "Does the thread that computes make no call that waits for the device?"),
    _module("host_time", 180, 60, "What does the executor cost the host per instruction, and does the host run ahead?"),
    _module("l2l", 480, 240, "What do weights on the host cost against flush and FSDP2, and do their copies hide?"),
    _tests("tests_triton", 240, 40, "tests/pipeline/runtime/update/test_triton_step.py",
           "Has the kernel of steps and predictions the bits of the pass on a CPU?"),
    _module("fused", 240, 50, "What are fused Adam and fused accumulation of gradients worth?"),
    _module("precision", 240, 80, "What are BF16 and FP8 worth, and do their losses agree with FP32's?"),
    _module("cuda_graphs", 180, 60, "How much of a microbatch could CUDA graphs save, by size of the layers?"),
    _module("calibration", 525, 330, "How near are iterations predicted from a profile of this card to measured ones?",
            packages=("scipy",)),
    _module("prediction_pass", 180, 40, "What do a step and a prediction take in one kernel, beside torch's AdamW?",
            argv="existing prediction_pass"),
    _tests("tests_cuda", 400, 120, f"{_CUDA}/test_cuda.py",
           "Do ranks that share the card train as one process on the CPU does?"),
    _module("one_rank", 300, 90, "How many tokens/s have flush, 2bw and predicted weights on one stage, over NCCL?",
            argv="existing one_rank"),
    _tests("tests_memory", 240, 60, f"{_CUDA}/test_memory.py", "Does memory stay as it is from drain to drain?"),
    _tests("tests_install", 120, 20, "tests/backend/test_install.py",
           "Does the project replace nothing of torch where there is CUDA?"),
    _tests("tests_runs", 520, 400, "tests/trainer/run/test_cuda_runs.py",
           "Has pretrain_gpt.py the CPU's losses on one card, and the estimated memory?"),
)  # fmt: skip
