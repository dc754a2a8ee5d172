"""Cuts a model once by each method, from one profile, and writes the best partition of each (`finetune_speed.py`)."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import backend


def main() -> None:
    from megatron.finetuning.arguments import add_data, add_microbatch, settle_precision
    from megatron.finetuning.partitioning import PlannedMachine, cut_model
    from megatron.finetuning.plan import captured_model
    from megatron.finetuning.samples import read_data

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_name_or_path")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--bandwidth", type=float, default=1.0, help="between processes, 10^9 bytes per second")
    parser.add_argument("--output", type=Path, required=True)
    add_data(parser, required=True)
    add_microbatch(parser)
    args = parser.parse_args()
    settle_precision(args)
    args.do_train, args.do_eval, args.seed, args.max_stages_per_device = True, False, 0, 3
    captured, batch, _ = captured_model(args, read_data(args))
    _, candidates, _, _ = cut_model(captured, batch, PlannedMachine(args.devices, 2.0**36, args.bandwidth), args)
    simulated = {}
    for name in ("sequential", "mixed"):
        best = min(
            (each for each in candidates if each.result.method.startswith(name)), key=lambda each: each.simulated_ms
        )
        best.file.write(args.output / f"{name}.json")
        simulated[name] = best.simulated_ms / 1000
        print(f"{best.result.method}: {len(best.file.stages)} stages, {best.simulated_ms:.1f} ms", flush=True)
    (args.output / "simulated.json").write_text(json.dumps(simulated))


if __name__ == "__main__":
    backend.install()
    backend.keep_freed_memory()  # as in training
    main()
