"""Weights, gradients and optimizer state of a rank, in bytes.

Mixed precision with Adam takes 20 bytes a parameter (Smith et al. 2022; BPipe, section 1): 2 for the weight, 2 for the
gradient, and in FP32 4 each for master, gradient and both moments. Here by part, since each changes with a flag:

    weights        weight_bytes, for each weight version that is alive at once (2bw: 2)
    true weights   where the versions are predictions: weight_bytes again, unless the masters are the true weights
    gradients      gradient_bytes, for each buffer in use at once (2bw: 2, or 1 with the flag); weight_bytes more where
                   they are sums beside a backward's own
    masters        4 for 16-bit weights; with the distributed optimizer 4 also for FP32 weights of several versions
    FP32 copies    4 where gradients are kept in 16 bits: the optimizer steps with FP32 ones, which megatron.core makes
                   in the step and leaves behind it. Where a host steps stage by stage, of the largest
    moments        4 each: Adam 2, SGD with momentum 1

The distributed optimizer (ZeRO-1) divides the last three by the number of replicas: those of experts by theirs.
"""

from dataclasses import dataclass

from megatron.planner.memory.parameters import FP8_COPY_BYTES

_FP32 = 4
PREDICTION_CHUNK = 64 * 2**20
"""Bytes of the masters from which a prediction steps at a time: as many as reach them first (provisional_step.py)."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What is kept for each parameter.

    Attributes:
        num_moments: Adam 2, SGD 1 with momentum, else 0.
        keeps_gradient_copies: FP32 copies of gradients stay from step to step; else the step makes them.
        data: ranks with the same parameters, context parallel ones among them.
        expert_data: ranks with the same experts.
        sums_beside_gradients: gradients are FP32 sums of what a backward keeps in the type of weights.
        fp8_weights: linears have weights in FP8 alone, which are gathered so (`--fp8-param-gather`).
    """

    weight_bytes: int = 2
    gradient_bytes: int = 4
    num_moments: int = 2
    distributed_optimizer: bool = False
    data: int = 1
    keeps_gradient_copies: bool = False
    expert_data: int = 1
    fp8_weights: bool = False
    sums_beside_gradients: bool = False

    def weights(self, num_parameters: int, *, num_versions: int, predicts: bool = False) -> float:
        """The bytes of all weight versions. `predicts`: they are predictions."""
        steps_weights = self.weight_bytes == _FP32 and not self.distributed_optimizer  # there are no masters
        return float(num_parameters * self.weight_bytes * (num_versions + (predicts and steps_weights)))

    def fp8_copies(self, num_elements: int) -> float:
        """Bytes that linears' weights take in FP8, less what they do not take in 16 bits where they are FP8 alone."""
        return float(num_elements * (FP8_COPY_BYTES - self.fp8_weights * self.weight_bytes))

    def gathered(self, num_parameters: int, num_elements: int) -> float:
        """Bytes of the weights that replicas gather, `num_elements` of which are of linears."""
        return float(num_parameters * self.weight_bytes - self.fp8_weights * num_elements * (self.weight_bytes - 1))

    def gradients(self, num_parameters: int, *, num_buffers: int) -> float:
        """The bytes of all gradient buffers."""
        kept = self.gradient_bytes + (self.weight_bytes if self.sums_beside_gradients else 0)
        return float(num_parameters * kept * num_buffers)

    def optimizer(
        self, num_parameters: int, *, num_versions: int, stepped: int | None = None, experts: int = 0
    ) -> float:
        """Masters, FP32 copies of gradients, and moments.

        Args:
            stepped: how many parameters step at once; None: all.
            experts: how many of the parameters are of experts; where `stepped` is given, none.
        """
        keeps_masters = self.weight_bytes < _FP32 or (self.distributed_optimizer and num_versions > 1)
        copied = num_parameters if stepped is None else stepped
        part = self._part(num_parameters, experts)
        kept = _FP32 * num_parameters * (keeps_masters + self.num_moments) * part
        return kept + self._gradient_copies(copied, part)

    def copies_in_step(self, num_parameters: int, *, num_versions: int, experts: int = 0) -> float:
        """The bytes of these that are held in the step alone: none where batches overlap, whose steps come between
        forwards and backwards."""
        if self.keeps_gradient_copies or num_versions > 1:
            return 0.0
        return self._gradient_copies(num_parameters, self._part(num_parameters, experts))

    def _gradient_copies(self, num_parameters: int, part: float) -> float:
        """Bytes of the FP32 copies with which the optimizer steps a part of these."""
        return _FP32 * num_parameters * part if self.gradient_bytes < _FP32 else 0.0

    def _part(self, num_parameters: int, experts: int) -> float:
        """Which part of the parameters a rank steps."""
        return self.stepped(num_parameters, experts) / num_parameters if num_parameters else 1.0

    def prediction(self, num_parameters: int, *, largest: int, experts: int = 0) -> float:
        """The most that a provisional step copies at once: masters, moments and gradients, all in FP32.

        `largest`: elements of the largest parameter. `experts`: how many parameters are of experts.
        """
        masters = min(_FP32 * self.stepped(num_parameters, experts), PREDICTION_CHUNK + _FP32 * largest)
        return masters * (2 + self.num_moments)

    def stepped(self, num_parameters: int, experts: int = 0) -> float:
        """How many of the parameters a rank steps, of which some are of experts: of those that are split its part."""
        if not self.distributed_optimizer:
            return num_parameters
        return (num_parameters - experts) / self.data + experts / self.expert_data
