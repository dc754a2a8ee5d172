"""`--profile`: nsys or PyTorch's profiler for some iterations of some ranks."""

import torch

from megatron.trainer.arguments.flags.config import TrainConfig


class Profiler:
    """The profiler of iterations `--profile-step-start` (included) to `--profile-step-end` (excluded)."""

    def __init__(self, args: TrainConfig) -> None:
        self._args = args
        self._on = args.profile and args.rank in args.profile_ranks
        self._running = False
        self._profile = None

    def before(self, iteration: int) -> None:
        """Start the profile if it begins with the batch of `iteration`, counted from 0."""
        if not self._on or self._running or iteration != self._args.profile_step_start:
            return
        self._running = True
        if self._args.use_pytorch_profiler:
            folder = self._args.tensorboard_dir or "profile"
            handler = torch.profiler.tensorboard_trace_handler(folder, worker_name=f"rank{self._args.rank}")
            self._profile = torch.profiler.profile(on_trace_ready=handler, record_shapes=True)
            self._profile.start()
        else:
            torch.cuda.cudart().cudaProfilerStart()

    def after(self, iteration: int) -> None:
        """End the profile if it ends here. `iteration`: the next iteration."""
        if self._running and iteration >= self._args.profile_step_end:
            self.close()

    def close(self) -> None:
        """End a profile that is still running."""
        if not self._running:
            return
        self._running = False
        if self._profile is not None:
            self._profile.stop()
        else:
            torch.cuda.cudart().cudaProfilerStop()
