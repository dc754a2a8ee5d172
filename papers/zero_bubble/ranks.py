"""The parts `halves` and `pipeline` of `python -m papers.zero_bubble`, in its processes."""

import gc
import random
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.common.processes import gathered
from megatron import backend
from megatron.pipeline.program.weight_policies import FLUSH
from megatron.pipeline.runtime.contract.stage import BatchInfo, Microbatch
from megatron.pipeline.schedules import Schedule
from megatron.pipeline.simulate import simulate
from megatron.pipeline.simulate.costs import Costs
from megatron.planner.memory.recompute import RecomputeScope
from megatron.planner.time.profile import StagePosition
from megatron.trainer.plan.command import model_argv
from megatron.trainer.profile.pool import StagePlan

_WARM_UP = 3


def _now() -> float:
    """The CPU seconds of this thread; on CUDA the wall time after the device has finished its work."""
    if backend.is_cuda():
        backend.synchronize()
        return time.perf_counter()
    return time.thread_time()


# --- halves


def measure_halves(args: dict) -> list[dict]:
    """Measure a row for each stage, dtype and recompute scope: seconds in each repeat, and bytes."""
    warnings.filterwarnings("ignore", category=UserWarning)
    backend.keep_freed_memory()
    rows = []
    for dtype in args["dtypes"]:
        for place in args["places"]:
            for scope in args["recompute"]:
                print(f"{place} stage, {dtype}, recompute {scope}", file=sys.stderr, flush=True)
                rows.append(_row(args, place, dtype, RecomputeScope(scope)))
    return rows


def _row(args: dict, place: str, dtype: str, scope: RecomputeScope) -> dict:
    from megatron.core import parallel_state
    from megatron.trainer.profile.measurements import build_lone_stage
    from megatron.trainer.profile.pool import prepare, training_program

    plan = _plan(args, place, dtype, scope)
    flags = plan.arguments()
    flags.log_saved_activations = True
    flags.num_workers = 0  # processes that load data would take the core
    lone = build_lone_stage(prepare(flags, None), training_program("gpt"), plan.place, plan.weights)
    try:
        return {"place": place, "dtype": dtype, "recompute": scope.value} | _time_halves(lone, args)
    finally:
        lone.close()
        parallel_state.destroy_model_parallel()
        gc.collect()


def _plan(args: dict, place: str, dtype: str, scope: RecomputeScope) -> StagePlan:
    flags = {
        "--hidden-size": args["hidden_size"], "--num-attention-heads": args["heads"],
        "--seq-length": args["seq_length"], "--max-position-embeddings": args["seq_length"],
        "--vocab-size": args["vocab_size"], "--tokenizer-type": "NullTokenizer", "--num-layers": args["layers"],
        "--lr": "1e-4", "--micro-batch-size": args["micro_batch_size"], "--hidden-dropout": 0,
        "--attention-dropout": 0, "--transformer-impl": "local",
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair] + ["--mock-data"]
    if dtype == "bfloat16":
        words.append("--bf16")
    return StagePlan(
        architecture="gpt", argv=model_argv(words, architecture="gpt"), place=StagePosition(place),
        num_layers=args["layers"], tensor=1, micro_batch_size=args["micro_batch_size"], recompute=scope, weights=FLUSH,
        sequence_parallel=False, num_microbatches=2, num_batches=args["repeats"] + _WARM_UP, num_warmup=0,
    )  # fmt: skip


def _time_halves(lone, args: dict) -> dict:
    """Measure all repeats. Each is a batch: one microbatch with a whole backward, one in halves, and the weight
    products alone, in changing order."""
    update, found, order = lone.update, defaultdict(list), random.Random(0)
    lone.stage.split_backward()
    turns = _Turns(lone, _products(lone.stage.model, args["seq_length"] * args["micro_batch_size"]), found)
    for batch in range(args["repeats"] + _WARM_UP):
        info = BatchInfo(batch, 2, 2 * args["micro_batch_size"])
        update.begin_batch(info)
        update.begin_backward(info)
        lone.stage.load_version(batch)
        first, second = (Microbatch(2 * batch + position, batch, position, 2) for position in (0, 1))
        whole_comes_first = order.random() < 0.5
        turn = [(turns.whole, first), (turns.halves, second)]
        if not whole_comes_first:
            turn = [(turns.halves, first), (turns.whole, second)]
        turn.insert(order.randrange(3), (turns.products_alone,))
        for work, *microbatch in turn:
            work(*microbatch)
        update.reduce_norm(batch + 1, 0, lone.stage.take_losses(batch))
        update.step(batch + 1)
    result = {name: values[_WARM_UP:] for name, values in found.items()}
    return result | {name: result[name][-1] for name in ("saved_bytes", "kept_bytes")}


class _Turns:
    """The measurements that take turns: a whole backward, its halves, and the weight products alone.

    `found`: receives the seconds and the bytes of each turn, by name.
    """

    def __init__(self, lone, products: Callable[[], None], found: dict[str, list]) -> None:
        self._lone, self._stage, self._products, self._found = lone, lone.stage, products, found

    def whole(self, microbatch: Microbatch) -> None:
        self._stage.forward(microbatch, self._lone.input)
        self._found["saved_bytes"].append(self._stage.saved_bytes(microbatch))
        self._time("backward", self._stage.backward, microbatch, self._lone.output_grad)

    def halves(self, microbatch: Microbatch) -> None:
        self._stage.forward(microbatch, self._lone.input)
        self._time("input", self._stage.backward_input, microbatch, self._lone.output_grad)
        self._found["kept_bytes"].append(self._stage.deferred_bytes(microbatch))
        self._time("weight", self._stage.backward_weights, microbatch)

    def products_alone(self) -> None:
        self._time("products", self._products)

    def _time(self, name: str, work: Callable[..., object], *arguments: object) -> None:
        start = _now()
        work(*arguments)
        self._found[name].append(_now() - start)


def _products(model: torch.nn.Module, num_tokens: int) -> Callable[[], None]:
    """A function that computes the weight product of each linear of `model` once, from random matrices."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    factors = [
        tuple(torch.randn(num_tokens, size, device=weight.device).to(weight.dtype) for size in weight.shape)
        for module in model.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        for weight in (module.weight,)
    ]

    def compute() -> None:
        for output_grad, input in factors:
            output_grad.t().matmul(input)

    return compute


# --- the pipeline


def measure_pipeline(args: dict) -> list[dict]:
    """Measure a row for each schedule: for each round, measured and simulated seconds of a batch, and the stages' own
    times."""
    warnings.filterwarnings("ignore", category=UserWarning)
    backend.keep_freed_memory()
    from benchmarks.common.gpt import Model
    from benchmarks.real_compute_contenders import Engine
    from megatron.core import parallel_state
    from papers.zero_bubble.__main__ import SCHEDULES

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = Model(
        hidden_size=args["hidden_size"], heads=args["heads"], layers=args["layers"], extra_layers=0,
        seq_length=args["seq_length"], micro_batch_size=args["micro_batch_size"], vocab_size=args["vocab_size"] + 1,
    )  # fmt: skip
    alone = _StageInHalves(model)
    engines = {name: Engine(model, name) for name in SCHEDULES}
    gc.collect()
    gc.freeze()
    rows = {name: defaultdict(list, schedule=name) for name in SCHEDULES}
    order, m = random.Random(0), args["microbatches"]
    for each in range(args["rounds"]):
        if dist.get_rank() == 0:
            print(f"round {each + 1} of {args['rounds']}", file=sys.stderr, flush=True)
        own = alone.measure(m, args["batches"])
        for name in order.sample(SCHEDULES, len(SCHEDULES)):
            rows[name]["own"].append(own)
            rows[name]["simulated"].append(_simulated(name, own, m))
            rows[name]["measured"].append(_batch_seconds(engines[name], m, args["batches"]))
    return [dict(row) for row in rows.values()]


def _simulated(preset: str, own: dict[str, list[float]], num_microbatches: int) -> float:
    """The simulated seconds of a batch, with the stages' own times and transfers that take no time."""
    costs = Costs(
        forward=own["forward"], backward=own["backward"], backward_input=own["input"], backward_weight=own["weight"],
        step=own["step"],
    )  # fmt: skip
    return simulate(Schedule.preset(preset, num_stages=2).build((num_microbatches,)), costs).end


def _batch_seconds(engine, num_microbatches: int, num_batches: int) -> float:
    """Measure the seconds of a batch on the slower rank, after one untimed batch."""
    engine.run(num_microbatches)
    engine.finish()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_batches):
        engine.run(num_microbatches)
    engine.finish()
    return max(gathered((time.perf_counter() - start) / num_batches))


class _StageInHalves:
    """This rank's stage on random inputs and output gradients, measured at the same time as the other rank's stage."""

    def __init__(self, model) -> None:
        from benchmarks.common.gpt import chunk_with_optimizer, forward_step
        from benchmarks.real_compute_contenders import Contender
        from megatron.core import parallel_state
        from megatron.pipeline.runtime.stages.megatron.stage import MegatronStage
        from megatron.pipeline.runtime.stages.megatron.update import MegatronWeightUpdate

        chunk, optimizer = chunk_with_optimizer(model)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        self._update = MegatronWeightUpdate([chunk], optimizer, num_stages=2, stage=rank)
        self._stage = MegatronStage(
            chunk, forward_step(model), self._update, seq_length=model.seq_length,
            micro_batch_size=model.micro_batch_size,
            data_iterator=Contender.data(type("Data", (), {"model": model})()),
        )  # fmt: skip
        self._stage.split_backward()
        shape = (model.seq_length, model.micro_batch_size, model.hidden_size)
        self._input = None if rank == 0 else torch.randn(shape)
        self._output_grad = torch.randn(shape) * 1e-4 if rank == 0 else None
        self._batch = 0

    def measure(self, num_microbatches: int, num_batches: int) -> dict[str, list[float]]:
        """Measure the seconds of forward, backward, input, weight and step at each stage, as medians over
        microbatches."""
        found = defaultdict(list)
        for number in range(2 * num_batches + 1):
            for name, values in self._run_batch(num_microbatches, split=number % 2 == 0).items():
                found[name] += values if number else []
        ranks = gathered({name: statistics.median(values) for name, values in found.items()})
        return {name: [rank[name] for rank in ranks] for name in ranks[0]}

    def _run_batch(self, num_microbatches: int, *, split: bool) -> dict[str, list[float]]:
        stage, update, batch = self._stage, self._update, self._batch
        self._batch += 1
        info, found = BatchInfo(batch, num_microbatches, num_microbatches), defaultdict(list)

        def timed(name: str, work: Callable[..., object], *arguments: object) -> None:
            start = time.perf_counter()
            work(*arguments)
            found[name].append(time.perf_counter() - start)

        dist.barrier()
        update.begin_batch(info)
        update.begin_backward(info)
        for position in range(num_microbatches):
            microbatch = Microbatch(batch * num_microbatches + position, batch, position, num_microbatches)
            stage.load_version(batch)
            timed("forward", stage.forward, microbatch, self._input)
            stage.free_output(microbatch)
            if split:
                timed("input", stage.backward_input, microbatch, self._output_grad)
                timed("weight", stage.backward_weights, microbatch)
            else:
                timed("backward", stage.backward, microbatch, self._output_grad)
        update.reduce_norm(batch + 1, 0, stage.take_losses(batch))
        dist.barrier()
        timed("step", update.step, batch + 1)
        return found
