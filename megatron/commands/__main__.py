"""Plan runs, look at schedules, prepare data, draw the measurements of runs.

    megatron-pipeline COMMAND --help      # after `pip install`; python -m megatron.commands is the same
    python tools/COMMAND.py --help        # in a checkout

Training programs are started by torchrun instead: `torchrun -m megatron.trainer.programs.pretrain_gpt ...`.
"""

import argparse
import importlib
import sys

from megatron.documents.flag_files import FlagFileParser
from megatron.pipeline import interrupt

NAME = "megatron-pipeline"
COMMANDS = {
    "schedule": "print, prove, time and draw a pipeline schedule",
    "grid_search": "search, estimate and measure configurations of a training run",
    "rank_map": "print and draw which GPU runs which rank, and the cost of this placement",
    "partition": "cut a model's graph into pipeline stages",
    "profile_model": "measure a model's blocks on this machine",
    "preprocess_data": "turn JSON lines into Megatron's .bin/.idx pairs",
    "convert_checkpoint": "turn Hugging Face models into checkpoints, and back",
    "merge_adapter": "merge a LoRA adapter into its model",
    "text_generation": "continue a prompt with a trained GPT",
    "launch": "start the processes of a job that can go on without some of them",
    "plot_metrics": "draw the loss curves of runs",
    "plot_memory": "draw the peak of saved activations on each pipeline rank",
    "plot_changes": "draw the course of a run that changes its pipeline",
    "compare_runs": "compare schedules over learning rates and seeds",
}
"""Name of a command -> its summary. `megatron/commands/NAME.py` has `main()`, which returns the exit status."""


def run(name: str) -> int | None:
    """Run a command. Ctrl-C then ends the process with one line, even while the command is being imported."""
    interrupt.end_at_interrupt()
    return importlib.import_module(f"megatron.commands.{name}").main()


def main() -> int | None:
    """Run the console script: the first argument names the command, which reads the other arguments."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = FlagFileParser(
        prog=NAME, description=__doc__.partition("\n\n")[0], epilog=f"commands:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "command", choices=COMMANDS, metavar="COMMAND", help="a command listed below; COMMAND --help describes it"
    )
    command = parser.parse_args(sys.argv[1:2] or ["--help"]).command
    sys.argv[:2] = [f"{NAME} {command}"]
    return run(command)


if __name__ == "__main__":
    sys.exit(main())
