"""The most that each stage of a pipeline holds at a time, counted in a real run, beside the numbers of the checker.

    python benchmarks/memory.py                      # 4 processes, under a minute; a table
    python benchmarks/memory.py --json result.json

A tiny GPT of megatron.core trains on 4 stages under each schedule. Counted on every rank while it runs:

microbatches  microbatches from the start of a forward to the end of its backward
              (`PipelineEngine.saved`)
deferred      the microbatches between I and W, if backwards are split (`PipelineEngine.saved`)
bytes         bytes that autograd saves for these microbatches, by torch's saved-tensor hooks: distinct storages without
              parameters; between I and W the bytes that W needs (`MegatronStage.deferred_bytes`)
versions      weight versions alive at a time (`WeightVersions.peak_live`)

The checker knows microbatches and versions. The expected bytes are the most that the program's row holds, computed with
the bytes of one microbatch in full and of one microbatch between I and W. Counted and expected numbers must be equal; a
difference makes the exit status 1. Counts do not depend on the machine or its load.
"""

import itertools
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.processes import gathered, run_group
from benchmarks.common.results import parser_of, set_environment, write
from benchmarks.common.tables import terminal
from megatron.pipeline.program.instruction import Instruction, Kind

NUM_STAGES = 4
HIDDEN, SEQUENCE, MICROBATCH_SIZE, VOCABULARY = 32, 16, 2, 64
RUNS: dict[str, tuple[str, bool, tuple[int, ...]]] = {
    "gpipe": ("gpipe", False, (8, 8, 8)),
    "flush": ("flush", False, (8, 8, 8)),
    "2bw": ("2bw", False, (8, 8, 8, 8)),
    "2bw extra warm-up": ("2bw", True, (8, 8, 8, 8)),
    "zb-h1": ("zb-h1", False, (8, 8, 8)),
    "pipedream": ("pipedream", False, (1,) * 16),
}
"""Name -> preset, extra warm-up, number of microbatches of each batch."""
_COUNTED = ("microbatches", "deferred", "bytes", "versions")


class CountedStage:
    """A stage whose saved bytes are counted.

    Attributes:
        microbatch_bytes: the different numbers of bytes that a forward has saved.
        kept_bytes: the different numbers of bytes kept for a microbatch between I and W.
        peak_bytes: the most bytes saved at a time.
    """

    def __init__(self, stage) -> None:
        self._stage = stage
        self._saved: dict[int, dict[int, int]] = {}
        self._kept: dict[int, int] = {}
        self.microbatch_bytes: set[int] = set()
        self.kept_bytes: set[int] = set()
        self.peak_bytes = 0

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def forward(self, microbatch, input):
        storages = self._saved[microbatch.index] = {}
        parameters = {parameter.untyped_storage().data_ptr() for parameter in self._stage.model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would be a cycle with its graph

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self._stage.forward(microbatch, input)
        self.microbatch_bytes.add(sum(storages.values()))
        self._note_bytes()
        return output

    def _note_bytes(self) -> None:
        now = sum(sum(each.values()) for each in self._saved.values()) + sum(self._kept.values())
        self.peak_bytes = max(self.peak_bytes, now)

    def backward(self, microbatch, output_grad):
        input_grad = self._stage.backward(microbatch, output_grad)
        del self._saved[microbatch.index]
        return input_grad

    def backward_input(self, microbatch, output_grad):
        input_grad = self._stage.backward_input(microbatch, output_grad)
        del self._saved[microbatch.index]
        kept = self._kept[microbatch.index] = self._stage.deferred_bytes(microbatch)
        self.kept_bytes.add(kept)
        self._note_bytes()
        return input_grad

    def backward_weights(self, microbatch):
        self._stage.backward_weights(microbatch)
        del self._kept[microbatch.index]


def gpt_chunk():
    """Build this rank's stage, one layer in FP32, in megatron.core's DDP."""
    from benchmarks.common.gpt import gpt_stage
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    gpt = gpt_stage(
        num_layers=NUM_STAGES, num_stages=NUM_STAGES, hidden_size=HIDDEN, heads=2, vocab_size=VOCABULARY,
        seq_length=SEQUENCE,
    )  # fmt: skip
    return DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)


def forward_step(data_iterator, model):
    """Run a stage's forward step in Megatron-LM's form; the loss is the mean over the tokens."""
    from benchmarks.common.gpt import mean_loss

    tokens, labels = next(data_iterator)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)
    return model(tokens, torch.arange(SEQUENCE).expand_as(tokens), mask, labels=labels), mean_loss


def data():
    """Yield random tokens and labels without end, int64 tensors [microbatch, sequence]."""
    generator = torch.Generator().manual_seed(1)
    shape = (MICROBATCH_SIZE, SEQUENCE + 1)
    for tokens in (torch.randint(VOCABULARY, shape, generator=generator) for _ in itertools.count()):
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def count(schedule, batches: Sequence[int]) -> dict:
    """Train batches under a schedule. Returns the counts of this rank."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.pipeline.runtime.engine import PipelineEngine
    from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
    from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate

    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunk = gpt_chunk()
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0), [chunk])
    update = MegatronWeightUpdate([chunk], optimizer, weights=schedule.weights, num_stages=NUM_STAGES, stage=rank)
    stage = CountedStage(
        MegatronStage(
            chunk,
            forward_step,
            update,
            seq_length=SEQUENCE,
            micro_batch_size=MICROBATCH_SIZE,
            data_iterator=data(),
        )
    )
    engine = PipelineEngine(schedule, stage, update)
    for num_microbatches in batches:
        engine.run_batch(num_microbatches, num_microbatches * MICROBATCH_SIZE)
    engine.drain()
    dist.barrier()
    engine.close()
    return {
        "microbatches": engine.saved.peaks[rank],
        "versions": update.versions.peak_live,
        "bytes": stage.peak_bytes,
        "microbatch_bytes": sorted(stage.microbatch_bytes),
        "deferred": engine.saved.deferred_peaks[rank],
        "kept_bytes": sorted(stage.kept_bytes),
    }


def count_all(names: Sequence[str]) -> dict[str, list[dict]]:
    """Count all runs, in each of the processes. Returns name of the run -> the counts of all ranks."""
    warnings.filterwarnings("ignore", message=".*cuda_graph_scope.*")  # about a default of megatron.core's own
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=NUM_STAGES)
    results = {}
    for name in names:
        results[name] = gathered(count(*schedule_of(name)))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return results


def schedule_of(name: str):
    """The schedule and the batches of a run."""
    from megatron.pipeline.schedules import Schedule

    preset, extra_warmup, batches = RUNS[name]
    return Schedule.preset(preset, num_stages=NUM_STAGES, extra_warmup=extra_warmup), batches


def rows_of(counts: dict[str, list[dict]]) -> list[dict]:
    """A row for each run. Its lists have one entry for each stage."""
    from megatron.pipeline.check import check

    rows = []
    for name, stages in counts.items():
        schedule, batches = schedule_of(name)
        program = schedule.build(batches)
        proved = check(program)
        counted = {key: [stage[key] for stage in stages] for key in _COUNTED}
        one = [stage["microbatch_bytes"][-1] for stage in stages]
        kept = [max(stage["kept_bytes"], default=0) for stage in stages]
        expected = {
            "microbatches": list(proved.peak_saved_microbatches),
            "bytes": [most_bytes(*each) for each in zip(program.rows, one, kept, strict=True)],
            "deferred": list(proved.peak_deferred_microbatches),
            "versions": list(proved.live_versions),
        }
        rows.append({"schedule": name, "counted": counted, "checker": expected, "equal": counted == expected})
    return rows


def most_bytes(row: Sequence[Instruction], one: int, kept: int) -> int:
    """The most bytes that a stage's row holds, with `one` for each microbatch in full and `kept` for each between I and
    W."""
    changes = {
        Kind.FORWARD: one,
        Kind.BACKWARD: -one,
        Kind.BACKWARD_INPUT: kept - one,
        Kind.BACKWARD_WEIGHT: -kept,
    }
    return max(itertools.accumulate(changes.get(each.kind, 0) for each in row))


def show(rows: list[dict]) -> None:
    table = Table(title=f"saved microbatches, their bytes and weight versions: peak of each of {NUM_STAGES} stages")
    for column in ("schedule", "", "microbatches", "between I and W", "KiB saved", "versions"):
        table.add_column(column)
    for row in rows:
        for source in ("counted", "checker"):
            values = row[source]
            table.add_row(
                row["schedule"] if source == "counted" else "",
                source,
                " ".join(map(str, values["microbatches"])),
                " ".join(map(str, values["deferred"])),
                " ".join(f"{size / 1024:.1f}" for size in values["bytes"]),
                " ".join(map(str, values["versions"])),
            )
        table.add_section()
    terminal(120).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, json="file for the counts")
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS), help="schedules")
    args = parser.parse_args(arguments)
    set_environment()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the counts are the same, and a computer need not have four GPUs
    rows = rows_of(run_group(NUM_STAGES, "benchmarks.memory:count_all", args.only))
    show(rows)
    write(args.json, {"rows": rows})
    different = [row["schedule"] for row in rows if not row["equal"]]
    if different:
        print(f"counted and proved differ: {', '.join(different)}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
