"""The program `finetune.py`: fine-tune a Hugging Face model through a pipeline of stages. See docs/finetuning.md.

torchrun --nproc-per-node 4 finetune.py --model_name_or_path FOLDER --task sequence-classification --train_file F ...
"""

import sys
from argparse import Namespace

from megatron.pipeline import interrupt

if __name__ == "__main__":
    interrupt.end_at_interrupt(says="finetune.py: ended by SIGINT")  # before imports that take long

from megatron.finetuning.arguments import parse_args
from megatron.finetuning.relay_arguments import RELAY
from megatron.trainer.ranks import StopSignal
from megatron.trainer.run import entry

PROG = "finetune.py"


def main() -> int:
    """Fine-tune as the command line says. Returns the exit status."""
    stop = StopSignal().install()
    try:
        args = parse_args(prog=PROG)
    except ValueError as error:
        return entry.end(PROG, error)
    return entry.start(PROG, lambda: run(args, stop), stop)


def run(args: Namespace, stop: StopSignal) -> None:
    """Fine-tune, or with --dry_run print the memory and the time of the job. torch is imported here, not before."""
    from megatron.finetuning import plan, relay_plan
    from megatron.finetuning.job import finetune

    if args.dry_run:
        (relay_plan if args.pipeline_schedule == RELAY else plan).run_dry(args)
    else:
        finetune(args, stop)


if __name__ == "__main__":
    sys.exit(main())
