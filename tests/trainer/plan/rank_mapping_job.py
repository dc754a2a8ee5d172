"""pretrain_gpt.py that also prints where each process ended up; started by test_rank_mapping_jobs.py."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megatron.trainer.programs import pretrain_gpt
from megatron.trainer.run import entry

STARTED_AS = os.environ["RANK"]
build = pretrain_gpt.model_provider


def model_provider(args, config):
    """Called on every rank once the groups are there."""
    import torch

    from megatron.core import parallel_state

    place = {
        "host": os.environ["PIPELINE_HOST_NAME"],
        "started_as": int(STARTED_AS),
        "local_rank": os.environ.get("LOCAL_RANK"),
        "device_rank": args.local_rank,
        "rank": torch.distributed.get_rank(),
        "RANK": os.environ["RANK"],
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
    }
    sys.stdout.write("\nPLACE " + json.dumps(place) + "\n")
    sys.stdout.flush()
    return build(args, config)


pretrain_gpt.model_provider = model_provider

if __name__ == "__main__":
    sys.exit(entry.run("pretrain_gpt.py", pretrain_gpt.program))
