import torch

from megatron.core import mpu, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_args


def initialize_megatron(extra_args_provider=None, allow_no_cuda=False):
    if not allow_no_cuda:
        assert torch.cuda.is_available(), "Megatron requires CUDA."
    args = parse_args(extra_args_provider)
    validate_args(args)
    set_args(args)
    init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    torch.distributed.init_process_group(backend=args.distributed_backend, world_size=args.world_size, rank=args.rank)
    if torch.cuda.device_count() > 0:
        mpu.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
        )
        torch.manual_seed(args.seed + 100 * mpu.get_pipeline_model_parallel_rank())
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    _compile_dependencies()


def _compile_dependencies():
    raise RuntimeError("nvcc is asked for")  # as good as what it needs on a machine without CUDA
