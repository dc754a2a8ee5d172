"""Other systems that keep a model's state on the host, with torch's fused AdamW.

The model is that of `model.py` or of `captured.py`. Each layer is a unit of its own and recomputed from its input. The
systems run on a CPU with gloo and one rank, so private memory stands for both their device and their host. Their device
bytes are the bytes that a batch makes in addition to existing memory, and the bytes that they never offload. FSDP2 also
runs on a GPU (benchmarks/gpu_hour/l2l.py).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron import backend


class PeerModel(Protocol):
    """A model that peers train.

    Attributes:
        layer_parameters: the number of a layer's parameters. It is known once `recomputed` has made the module.
        microbatch_size: rows of a microbatch.
    """

    layer_parameters: int
    microbatch_size: int

    def recomputed(self, wrap: Callable[[nn.Module], nn.Module] = lambda unit: unit) -> nn.Module:
        """Make the module, whose layers are recomputed. `wrap` is called with each unit."""

    def loss(self, module: nn.Module, microbatch: int) -> Tensor:
        """The mean loss of a microbatch, by its number in the run."""

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of the module's parameters."""


class Peer(ABC):
    """A contender: `run(m)` trains a batch and returns its loss.

    Attributes:
        device_state_bytes: bytes that it never offloads.
        num_bytes_moved: bytes that it has moved to the device and back, or would have moved with a device of its own;
            None if they cannot be counted.
    """

    num_bytes_moved: int | None = None

    def __init__(self, model: PeerModel) -> None:
        self.model = model
        self._next = 0

    def run(self, num_microbatches: int) -> float:
        total: Tensor | float = 0.0
        for _ in range(num_microbatches):
            total += self.train(self._next, num_microbatches)
            self._next += 1
        self.step()
        return float(total / num_microbatches)

    @abstractmethod
    def train(self, microbatch: int, num_microbatches: int) -> Tensor | float:
        """Run forward and backward of a microbatch. Returns its loss; as a tensor the host need not wait for it."""

    def step(self) -> None:  # noqa: B027  DeepSpeed's engine steps in `train`
        """Step the optimizer after the last microbatch of a batch."""

    @property
    def device_state_bytes(self) -> int:
        return 0

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class FullyShard(Peer):
    """FSDP2: `fully_shard` of each layer with `CPUOffloadPolicy`. Weights leave the device after each forward.

    Args:
        param_dtype: the dtype in which weights are gathered and multiplied, with gradients reduced in FP32; None: that
            of the parameters.
    """

    def __init__(self, model: PeerModel, *, param_dtype: torch.dtype | None = None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        super().__init__(model)
        if not torch.distributed.is_initialized():
            one_rank()
        self.num_bytes_moved = 0
        self._count_moves()
        shards = {
            "mesh": init_device_mesh(backend.device().type, (1,)),
            "offload_policy": CPUOffloadPolicy(pin_memory=backend.is_cuda()),
            "reshard_after_forward": True,  # otherwise a top-level unit keeps its weights until its backward
        }
        if param_dtype is not None:
            shards["mp_policy"] = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        self._module = model.recomputed(lambda unit: fully_shard(unit, **shards))
        self._optimizer = model.optimizer(self._module)

    def train(self, microbatch: int, num_microbatches: int) -> Tensor:
        loss = self.model.loss(self._module, microbatch)
        (loss / num_microbatches).backward()
        return loss.detach().double()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)  # gradients stay where they are, on the host

    def _count_moves(self) -> None:
        """Count the bytes of weights when a group of parameters is gathered, and of gradients after its backward."""
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        unshard, post_backward = FSDPParamGroup.unshard, FSDPParamGroup.post_backward

        def counted_unshard(group, *args, **options):
            is_there = group._all_gather_result is not None or group.is_unsharded
            unshard(group, *args, **options)
            if not is_there and group._all_gather_result is not None:
                self.num_bytes_moved += _bytes_of(group)

        def counted_post_backward(group, *args, **options):
            self.num_bytes_moved += _bytes_of(group)
            post_backward(group, *args, **options)

        FSDPParamGroup.unshard, FSDPParamGroup.post_backward = counted_unshard, counted_post_backward


class Zero(Peer):
    """DeepSpeed's ZeRO with offload: stage 2 with optimizer and gradients on the host, or stage 3 with weights, too."""

    def __init__(self, model: PeerModel, stage: int) -> None:
        super().__init__(model)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        one_rank()
        import deepspeed

        self._stage = stage
        module = model.recomputed()
        host = {"device": "cpu"}
        bucket = model.layer_parameters  # the default buckets take gigabytes
        zero = {"stage": stage, "offload_optimizer": host, "reduce_bucket_size": bucket}
        if stage == 3:
            zero |= {
                "offload_param": host,
                "stage3_prefetch_bucket_size": bucket,
                "stage3_max_live_parameters": 2 * bucket,
                "stage3_param_persistence_threshold": 0,
            }
        else:
            zero["allgather_bucket_size"] = bucket
        self._config = {
            "train_micro_batch_size_per_gpu": model.microbatch_size,
            "gradient_accumulation_steps": 1,  # set again for each batch
            "gradient_clipping": 0.0,  # the default of recent versions is 1
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=model.optimizer(module), config=self._config)

    def run(self, num_microbatches: int) -> float:
        self._engine.set_train_batch_size(num_microbatches * self._config["train_micro_batch_size_per_gpu"])
        return super().run(num_microbatches)

    def train(self, microbatch: int, num_microbatches: int) -> float:
        loss = self.model.loss(self._engine, microbatch)
        self._engine.backward(loss)
        self._engine.step()  # steps only after the batch's last microbatch
        return loss.item()

    @property
    def device_state_bytes(self) -> int:
        return sum(each.nbytes for each in self._engine.module.parameters()) if self._stage == 2 else 0


def _bytes_of(group) -> int:
    return sum(each.sharded_param.numel() * each.sharded_param.element_size() for each in group.fsdp_params)


def one_rank() -> None:
    """Join a gloo group of this process alone."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    os.environ["MASTER_PORT"] = str(store.port)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
