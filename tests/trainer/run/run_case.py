"""A whole training run inside a pool of workers: what pretrain_gpt.py and the like do, without starting processes."""

import atexit
import functools
import gc
import hashlib
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

from megatron.pipeline.runtime.contract.stage import RelayUpdate
from tests import workers
from tests.pipeline.placed_schedules import registered
from tests.pipeline.runtime.relay.relay_cases import shared_files
from tests.trainer.arguments.command_line import SMALL
from tests.trainer.data.small_data import write_dataset

if TYPE_CHECKING:
    from megatron.trainer.start_up.run import TrainingProgram

ROOT = Path(__file__).parents[3]
BASE = (
    SMALL.replace("--mock-data", "")
    + " --num-workers 0 --log-interval 1 --eval-iters 0 --hidden-size 32 --seq-length 16 --global-batch-size 4"
    " --train-iters 6 --lr-decay-style constant --lr 1e-2"
)


def table(names: str, rows: dict[str, tuple], usual: int) -> pytest.MarkDecorator:
    """Parametrizes a test by the named rows; the usual selection runs the first `usual` of them."""
    places = enumerate(rows.items())
    marks = [(), pytest.mark.full]
    return pytest.mark.parametrize(
        names, [pytest.param(*row, id=name, marks=marks[place >= usual]) for place, (name, row) in places]
    )


@functools.cache
def data_flags() -> str:
    """Flags of a small dataset, written once in the session; mock data would cost seconds a run."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    prefix = write_dataset(Path(folder) / "text", documents=60, vocab=60)
    return f"--data-path {prefix} --split 8,1,1 --data-cache-path {folder}/cache"


def training_program(name: str) -> tuple[dict, "TrainingProgram"]:
    """(defaults, what it trains) of a program such as pretrain_gpt.py."""
    program = importlib.import_module(f"megatron.trainer.programs.{name}")
    return getattr(program, "DEFAULTS", {}), program.program()


def train_case(
    flags: str,
    stop_after: dict[int, int] | None = None,
    minutes_ago: float = 0.0,
    look_after: tuple[int, ...] = (),
    program: str = "pretrain_gpt",
    base: str = BASE,
    watch: str | None = None,
) -> dict:
    """Run on this rank; returns the metrics (last rank), the printed lines, the weights of all its stages, a digest of
    each batch's gradients, by stage what was saved: microbatches at most, and the bytes in which one moved; the
    shared files that the run has mapped, with their bytes; and the bytes that it has fetched from the host.

    `flags`: after those of `base`. `stop_after`: rank -> iteration after whose report that rank is asked to stop.
    `minutes_ago`: when the program was started. `look_after`: iterations after which to look at what the process takes
    (`resources`). `watch`: "module:function" of what is called with the run before it trains, and returns what is
    called at its end for the entry `watched`.
    """
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    from megatron.trainer.arguments import parse_args
    from megatron.trainer.ranks import StopSignal
    from megatron.trainer.report.log import Reporter
    from megatron.trainer.report.metrics import read_metrics
    from megatron.trainer.run.assembly import assemble
    from megatron.trainer.run.loop import run_to_the_end
    from megatron.trainer.run.pretraining import complete
    from megatron.trainer.start_up import initialize

    defaults, trained = training_program(program)
    mapped = shared_files()
    rank = initialize.environment_ranks()[0]
    folder = Path(tempfile.mkdtemp())
    metrics = folder / "metrics.jsonl"
    if "--train-samples" in flags or "--epochs" in flags:
        base = base.replace("--train-iters 6", "").replace("--train-iters 10", "")
    args, _ = complete(parse_args(f"{base} --metrics-file {metrics} {flags}".split(), defaults=defaults))
    args = initialize.set_up(args)
    stop, lines = StopSignal(), []
    with mock.patch.object(Reporter, "say", lambda _, text: lines.append(text)):
        run = assemble(args, trained)
    run.reporter.say = lines.append
    gradients = _digests_of_gradients(run.update)
    resources = _look_after(run.reporter, look_after)
    watched = _function(watch)(run) if watch else lambda: None
    if stop_after and rank in stop_after:
        _stop_after(run.reporter, stop, stop_after[rank])
    try:
        run_to_the_end(run, stop, started=time.time() - 60 * minutes_ago)
        run.update.show_newest()
        records = read_metrics(str(metrics)) if metrics.exists() else []
        run.update.show_newest()
        return {
            "records": records,
            "losses": {
                record["iteration"]: record[name]
                for record in records
                for name in ("lm_loss", "loss")
                if name in record
            },
            "lines": lines,
            "iteration": run.iteration,
            "weights": whole_weights(run.chunks),
            "gradients": gradients,
            "saved_microbatches": run.engine.saved.peaks,
            "moved_bytes": {stage.index: _moved_bytes(stage) for stage in run.stages},
            "resources": resources,
            "mappings": {file: size for file, size in shared_files().items() if file not in mapped},
            "fetched_bytes": run.update.resident.num_bytes_fetched if isinstance(run.update, RelayUpdate) else 0,
            "generator": torch.get_rng_state(),
            "watched": watched(),
        }
    finally:
        shutil.rmtree(folder)
        for chunk in run.chunks:  # megatron.core's experts refer to a graph, it to its chunk, and no collection sees it
            chunk._modules.clear()
        get_moe_layer_wise_logging_tracker().clear()  # a later run in this process may have more layers


def whole_weights(chunks: list) -> dict[str, torch.Tensor]:
    """This rank's weights under their names in the whole model, joined over the tensor ranks. Collective."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    group, found = parallel_state.get_tensor_model_parallel_group(), {}
    whole_experts = parallel_state.get_expert_tensor_parallel_world_size() == 1
    for model in map(unwrap_model, chunks):
        for name, value in numbered_names(model):
            tensor = value.detach().clone()
            is_whole = not getattr(value, "allreduce", True) and whole_experts
            if getattr(value, "tensor_model_parallel", False) and group.size() > 1 and not is_whole:
                parts = [torch.empty_like(tensor) for _ in range(group.size())]
                torch.distributed.all_gather(parts, tensor, group=group)
                tensor = torch.cat(parts, dim=value.partition_dim)
            found[name] = tensor
    return found


def numbered_names(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a chunk under their names in the whole model, where layers count from 1."""
    from megatron.core import parallel_state

    first = parallel_state.get_expert_model_parallel_rank() * (model.config.num_moe_experts or 0)
    first //= model.config.expert_model_parallel_size
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if "local_experts" in words:
            place = words.index("local_experts") + 1
            words[place] = str(first + int(words[place]))
        if words[1] == "layers":
            words[2] = str(getattr(model, words[0]).layers[int(words[2])].layer_number)
        yield ".".join(words), parameter


def joined_weights(results: list[dict]) -> dict[str, torch.Tensor]:
    """The whole model from all ranks' results; the replicas' weights are equal."""
    joined: dict[str, torch.Tensor] = {}
    for result in results:
        for name, tensor in result["weights"].items():
            assert torch.equal(joined.setdefault(name, tensor), tensor), f"replicas differ in {name}"
    return joined


def _stop_after(reporter, stop, iteration: int) -> None:
    report = reporter.iteration

    def watching(batch_report, progress) -> None:
        report(batch_report, progress)
        if progress.iteration == iteration:
            stop._handle(15, None)

    reporter.iteration = watching


def _look_after(reporter, iterations: tuple[int, ...]) -> list[dict[str, int]]:
    """Grows by one for each of these iterations: threads, open files and resident bytes of this process, without those
    of files (the data)."""
    report, looks = reporter.iteration, []

    def watching(batch_report, progress) -> None:
        report(batch_report, progress)
        if progress.iteration in iterations:
            gc.collect()
            _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
            looks.append(
                {
                    "threads": len(os.listdir("/proc/self/task")),
                    "files": len(os.listdir("/proc/self/fd")),
                    "bytes": (resident - of_files) * os.sysconf("SC_PAGE_SIZE"),
                }
            )

    reporter.iteration = watching
    return looks


def _digests_of_gradients(update) -> list[str]:
    """Grows by one for each batch: of its reduced gradients, when they are applied. Not where these come stage by
    stage."""
    from megatron.pipeline.runtime.stages.megatron.frozen_update import MegatronFrozenUpdate

    if isinstance(update, (RelayUpdate, MegatronFrozenUpdate)):
        return []
    apply, digests = update._apply, []

    def watched(batch, coefficient: float) -> None:
        update._prepare(batch)
        content = b"".join(flat.view(torch.uint8).numpy().tobytes() for flat in batch.buffer.flats)
        digests.append(hashlib.blake2b(content).hexdigest())
        apply(batch, coefficient)

    update._apply = watched
    return digests


def _function(path: str) -> Callable:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _moved_bytes(stage) -> int | None:
    """The bytes of one microbatch; None where none was evicted."""
    layout = getattr(stage._captured, "layout", None)
    return None if layout is None else layout.buffer_bytes


def placed_case(**options) -> dict:
    """`train_case` with the schedules of placed_schedules.py."""
    with registered():
        return train_case(**options)


def train(
    num_ranks: int, flags: str = "", *, case: str = "train_case", function: str | None = None, **options
) -> list[dict]:
    """`train_case` on `num_ranks` ranks, all of them pipeline stages unless the flags say otherwise.

    `function`: "module:name" of a case that is not here.
    """
    if "--pipeline-model-parallel-size" not in flags:
        flags += f" --pipeline-model-parallel-size {num_ranks}"
    if not any(name in flags for name in ("--mock-data", "--data-path", "data-args-path", "--train-data")):
        flags += f" {data_flags()}"
    return workers.run(num_ranks, function or f"tests.trainer.run.run_case:{case}", flags=flags, **options)
