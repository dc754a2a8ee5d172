"""What megatron.core's interleaved loop does on one rank, and which batches it refuses: the loop itself, recorded.

`forward_backward_pipelining_with_interleaving` runs here as it is, with chunks of the model that write down each call,
and a communicator whose receives come at once. So one process can play any rank of any pipeline.
"""

from types import SimpleNamespace

import torch

from megatron import backend

backend.install()

from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
from megatron.core.transformer.transformer_config import TransformerConfig


class _Recorded(torch.autograd.Function):
    """Writes down its forward and its backward."""

    @staticmethod
    def forward(context, input, log, chunk, microbatch):
        context.words = log, chunk, microbatch
        log.append(f"{chunk}F{microbatch}")
        return input.clone()

    @staticmethod
    def backward(context, gradient):
        log, chunk, microbatch = context.words
        log.append(f"{chunk}B{microbatch}")
        return gradient, None, None, None


class _Chunk(torch.nn.Module):
    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, chunk: int, is_last: bool, log: list[str]) -> None:
        super().__init__()
        self.config, self.chunk, self.is_last, self.log = config, chunk, is_last, log
        self.vp_stage, self.num_forwards, self.input = chunk, 0, None

    def set_input_tensor(self, tensors: list) -> None:
        self.input = tensors[0]

    def forward(self) -> torch.Tensor:
        microbatch, self.num_forwards = self.num_forwards, self.num_forwards + 1
        input = torch.zeros(1, 1, 1, requires_grad=True) if self.input is None else self.input
        output = _Recorded.apply(input, self.log, self.chunk, microbatch)
        return output.sum() if self.is_last else output


class _Communicator(P2PCommunicator):
    def __init__(self, group: SimpleNamespace, config: TransformerConfig) -> None:
        self.pp_group, self.config = group, config
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def _communicate(self, *, recv_prev: bool, recv_next: bool, tensor_shape: list[int] | None, **_: object):
        received = [torch.zeros(tensor_shape, requires_grad=True) if each else None for each in (recv_prev, recv_next)]
        return *received, []


def run(p: int, v: int, m: int, group: int, rank: int, forward_only: bool = False) -> str:
    """The loop of one rank: its computations in order, as words CHUNK F|B MICROBATCH, or why it refuses the batch."""
    config = TransformerConfig(
        num_layers=p * v,
        hidden_size=1,
        num_attention_heads=1,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v,
        microbatch_group_size_per_vp_stage=group,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
    )
    log: list[str] = []
    ranks = SimpleNamespace(size=lambda: p, rank=lambda: rank)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    chunks = [_Chunk(config, chunk, rank == p - 1 and chunk == v - 1, log) for chunk in range(v)]
    try:
        forward_backward_pipelining_with_interleaving(
            forward_step_func=lambda iterator, chunk: (chunk(), lambda output: (output, {})),
            data_iterator=[iter(()) for _ in range(v)],
            model=chunks,
            num_microbatches=m,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=_Communicator(ranks, config),
            pg_collection=SimpleNamespace(tp=alone, cp=alone, embd=None, pos_embd=None, pp=ranks, dp_cp=alone),
        )
    except (ValueError, RuntimeError) as error:
        assert not log, log
        return f"refused: {error}"
    return " ".join(log)


def run_all(cases: list[tuple]) -> list[str]:
    return [run(*case) for case in cases]
