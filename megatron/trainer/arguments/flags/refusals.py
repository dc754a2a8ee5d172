"""Flags of Megatron-LM that do nothing here: each is refused by name, or accepted without effect.

Problem: Megatron-LM has over 800 flags, and a script that works there may carry any of them. A flag that is unknown
here tells its user nothing: neither whether the training is another one without it, nor what to do.

Solution: a flag that would change the training is refused, with what to do instead; a flag that changes neither the
training nor its outputs is accepted and noted once. Some of them are records, as the flags that work. All others stand
in a table of text, `megatron_lm.txt`, which is read when a command line has a flag that argparse does not know.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.trainer.arguments.flags.specification import Flag, Group, Role, ignored, integer, number, refused

# --- refused ----------------------------------------------------------------------------------------------------------

_ENGINE = "it needs a dispatcher or a kernel that is not built; leave the flag out."
_FP4 = "FP4 is not supported by the pipeline runtime; use --fp8-format, or --bf16 alone."
_FSDP = "sharding parameters over replicas is not supported; use --use-distributed-optimizer and pipeline stages."
_OFFLOAD = "a part of the state is not moved to host memory; all of it is with --pipeline-schedule l2l, so use that."
_SKIPS = (
    "layers are not left out of single batches: what a batch runs is proved before the run, and a batch with other "
    "stages is another program; leave the flag out."
)
_GRAPH = "CUDA graphs cannot follow the switch between weight versions; leave the flag out."
_NATIVE = "it belongs to Megatron-LM's own pipeline loops; leave the flag out, the program places all transfers."
_CLUSTER = "this cluster service is not connected; leave the flag out."
_RERUN = "results are not recomputed to find faults; leave the flag out."
_FRACTION = "all of the data are read; prepare files of fewer classes or images."


def _list(reason: str, *names: str, takes: int | str | None = 0) -> tuple[Flag, ...]:
    return tuple(refused(name, reason, takes=takes) for name in names)


def _renamed(*names: tuple[str, str]) -> tuple[Flag, ...]:
    """Old flags with a value, each with the one that has taken its place."""
    return tuple(refused(name, f"an old flag; {what}.", takes=None) for name, what in names)


REFUSED = Group(
    "refused",
    "Known from Megatron-LM. Each parses, and using it is an error that says what to do.",
    (
        refused("--num-distributed-optimizer-instances", _FSDP, takes=None, kind=integer, default=1, neutral=(1,)),
        refused("--cuda-graph-impl", _GRAPH, takes=None, default="none", neutral=("none",)),
        *_list(_ENGINE, "--moe-use-legacy-grouped-gemm"),
        *_list(_ENGINE, "--moe-latent-size", takes=None),
        *_list("the shared expert has no gate; leave the flag out.", "--moe-shared-expert-gate"),
        *_list("an old flag; use --recompute-granularity selective --recompute-modules moe.", "--moe-layer-recompute"),
        *_list("weights of a dense model are not copied into experts; leave the flag out.", "--moe-use-upcycling"),
        refused(
            "--moe-router-topk-limited-devices",
            "an old flag; use --moe-router-num-groups and --moe-router-group-topk.",
            takes=None,
        ),
        *_list(_FP4, "--fp4-format", takes=None),
        *_list(
            "gradients of weights are in FP8, too: Transformer Engine has not read it since 2.0; leave the flag out.",
            "--no-fp8-wgrad",
        ),
        *_list("rank orders other than tp-cp-ep-dp-pp are not built; leave the flag out.", "--use-tp-pp-dp-mapping"),
        *_list(
            "use --pipeline-model-parallel-layout with a stage that has nothing but E.",
            "--standalone-embedding-stage",
        ),
        *_list(_FSDP, "--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2"),
        *_list(_OFFLOAD, "--optimizer-cpu-offload", "--fine-grained-activation-offloading"),
        refused("--l2l-skip-layers", _SKIPS, takes=None),
        refused("--optimizer-offload-fraction", _OFFLOAD, takes=None, kind=number, neutral=(0.0,)),
        refused("--cpu-offloading-num-layers", _OFFLOAD, takes=None, kind=integer, neutral=(0,)),
        refused(
            "--muon-scalar-optimizer",
            "AdamW steps what Muon does not; leave the flag out.",
            takes=None,
            default="adam",
            neutral=("adam",),
        ),
        refused("--muon-use-syrk", "the products of Muon's iterations are torch's; leave the flag out."),
        *(
            refused(
                f"--main-{name}-dtype",
                f"{name} of the optimizer are in FP32; use fp32.",
                takes=None,
                default="fp32",
                neutral=("fp32",),
            )
            for name in ("grads", "params")
        ),
        *_list(_GRAPH, "--enable-cuda-graph", "--external-cuda-graph", "--te-rng-tracker"),
        *_list(
            _NATIVE,
            "--use-ring-exchange-p2p",
            "--overlap-param-gather-with-optimizer-step",
        ),
        *_list(
            "saved activations are not distributed over tensor ranks; use --sequence-parallel.",
            "--distribute-saved-activations",
        ),
        *_list("all replicas start from the same weights; leave the flag out.", "--data-parallel-random-init"),
        *_list("only megatron.core models are built; leave the flag out.", "--use-legacy-models"),
        refused(
            "--spec",
            "layer specifications from files are not loaded; edit megatron/trainer/models/gpt.py.",
            takes="+",
            neutral=(["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],),
        ),
        *_list(
            "validation always takes --eval-iters batches; leave the flag out.",
            "--full-validation",
            "--multiple-validation-sets",
        ),
        *_list(_RERUN, "--result-rejected-tracker-filename", takes=None),
        *_list(_CLUSTER, "--enable-ft-package", "--inprocess-restart", "--use-sharp", "--nccl-ub"),
        *_list(_CLUSTER, "--nccl-communicator-config-path", takes=None),
        *_list(
            "checkpoints are always kept; delete old ones outside of the run.", "--save-retain-interval", takes=None
        ),
        *_list(
            "only --save-interval saves; leave the flag out.",
            "--non-persistent-save-interval",
            "--non-persistent-ckpt-type",
            "--non-persistent-global-ckpt-dir",
            takes=None,
        ),
        *_list("torch_dist is the only format; leave the flag out.", "--ckpt-convert-format", takes=None),
        refused(
            "--dist-ckpt-format",
            "torch_dist is the only format; leave the flag out.",
            takes=None,
            default="torch_dist",
            neutral=("torch_dist",),
        ),
        *_list("the data position is kept as consumed samples; leave the flag out.", "--dataloader-save", takes=None),
        refused(
            "--data-impl",
            "only data that tools/preprocess_data.py writes are read, those of mmap; prepare the text with it and "
            "leave the flag out.",
            takes=None,
            default="mmap",
            neutral=("mmap", "infer"),
        ),
        *_renamed(
            ("--batch-size", "it meant the samples of a microbatch; use --micro-batch-size, and --global-batch-size"),
            ("--model-parallel-size", "it is called --tensor-model-parallel-size; use that"),
            ("--warmup", "it was a share of the decay; use --lr-warmup-fraction"),
            ("--checkpoint-num-layers", "use --recompute-granularity full with --recompute-num-layers"),
            ("--activations-checkpoint-num-layers", "use --recompute-granularity full with --recompute-num-layers"),
            ("--activations-checkpoint-method", "use --recompute-granularity full with --recompute-method"),
        ),
        *_list("use --sequence-parallel.", "--distribute-checkpointed-activations"),
        *_list("dropout is the only noise; leave the flag out.", "--moe-input-jitter-eps", takes=None),
        refused(
            "--vision-pretraining-type",
            "images are classified; use classify, or Megatron-LM for the others.",
            takes=None,
            default="classify",
            neutral=("classify",),
        ),
        refused(
            "--vision-backbone-type",
            "the model is a ViT; use vit, or Megatron-LM for the others.",
            takes=None,
            default="vit",
            neutral=("vit",),
        ),
        refused(
            "--head-lr-mult",
            "the head learns at the rate of the embedding; use --decoupled-lr for both.",
            takes=None,
            kind=number,
            default=1.0,
            neutral=(1.0,),
        ),
        refused("--classes-fraction", _FRACTION, takes=None, kind=number, default=1.0, neutral=(1.0,)),
        refused("--data-per-class-fraction", _FRACTION, takes=None, kind=number, default=1.0, neutral=(1.0,)),
    ),
)


# --- ignored ----------------------------------------------------------------------------------------------------------

_WATCHES = "results are not recomputed to find faults; a loss or gradient that is not finite ends the job"
_GRADIENTS = "gradients lie in contiguous buffers that the pipeline's program reduces"
_MODELOPT = "Megatron-LM's models of ModelOpt alone read it; YaRN is --position-embedding-type yarn and its flags"
_PROGRAM = "the program says what is computed when, and beside which transfer"
_GATHER = (
    "weights are kept and gathered in the model's precision and cast to FP8 once in each batch, by the scales of the "
    "same recipe; that takes 2 bytes more for an element of a linear layer, which the memory estimate counts"
)
_SUM = "the value would need another reduction over all ranks; grad_norm is in the log line and in --metrics-file"

IGNORED = Group(
    "without effect",
    "Known from Megatron-LM, about logging, checks and speed of what is done otherwise here. Each is accepted, and the "
    "run says once that it has no effect.",
    (
        ignored("--log-params-norm", _SUM),
        ignored("--log-num-zeros-in-grad", _SUM),
        ignored("--log-straggler", "--pipeline-timeline shows where each rank's time goes"),
        ignored("--log-batch-size-to-tensorboard", "the batch size is always recorded"),
        ignored("--enable-one-logger", "that service is not connected"),
        ignored("--no-one-logger", "that service is not connected"),
        ignored("--check-for-spiky-loss", _WATCHES),
        ignored("--check-for-large-grads", _WATCHES),
        ignored("--rerun-mode", _WATCHES, takes=None, neutral=("disabled",)),
        ignored("--no-barrier-with-level-1-timing", "timers do not wait for other ranks"),
        ignored("--fp8-interval", "Transformer Engine has not read it since 1.8", takes=None, neutral=("1",)),
        ignored("--fp8-param-gather", _GATHER),
        ignored("--ddp-average-in-collective", "gradients are scaled before the sum, which gives the same mean"),
        ignored("--delay-wgrad-compute", _PROGRAM),
        ignored("--overlap-moe-expert-parallel-comm", _PROGRAM, roles=Role.PRICED),
        ignored("--moe-shared-expert-overlap", _PROGRAM),
        ignored("--defer-embedding-wgrad-compute", _PROGRAM),
        ignored("--overlap-p2p-communication", "transfers are posted by the program and always run beside compute"),
        ignored("--no-scatter-gather-tensors-in-pipeline", "transfers are not split over tensor ranks"),
        ignored("--no-async-tensor-model-parallel-allreduce", "megatron.core decides what runs beside compute"),
        ignored("--DDP-impl", _GRADIENTS, takes=None, choices=("local", "torch")),
        ignored("--use-contiguous-buffers-in-ddp", _GRADIENTS),
        ignored("--no-contiguous-buffers-in-local-ddp", _GRADIENTS),
        ignored("--use-persistent-ckpt-worker", "--async-save has a worker for each save"),
        ignored("--vision-pretraining", "pretrain_vision_classify.py trains for classes in any case"),
        ignored(
            "--no-mmap-bin-files", ".bin files are always read through file handles, so that one cut short is named"
        ),
        ignored("--no-data-sharding", "all replicas take the samples of one order in turns"),
        ignored("--keep-last", "an epoch's last samples begin a batch that the next epoch fills up, so none is lost"),
        ignored("--enable-gpt-oss", _MODELOPT),
        ignored("--export-force-local-attention", _MODELOPT),
        ignored("--no-query-key-layer-scaling", "it is off unless --apply-query-key-layer-scaling is given"),
    ),
)


# --- the table of text ------------------------------------------------------------------------------------------------


_TABLE = Path(__file__).with_name("megatron_lm.txt")
_REFUSED, _WITHOUT_EFFECT = "refused: ", "without effect: "
_KINDS = {"N": integer, "X": number, "TEXT": str}


@dataclass(frozen=True)
class Elsewhere:
    """A flag of the table. `kind`: what its value is, None for a switch; `several`: whether it takes more than one;
    `default`: Megatron-LM's, which asks for nothing; `refused`: whether it changes what is trained; `reason`: why it is
    refused, with the remedy, or why it has no effect."""

    name: str
    kind: str | None
    several: bool
    default: str | None
    refused: bool
    reason: str

    def takes(self, words: Sequence[str]) -> int:
        """How many of the words behind the flag are its values."""
        return 0 if self.kind is None else len(words) if self.several else min(len(words), 1)

    def asks(self, values: Sequence[str]) -> bool:
        """Whether these values ask for something. Raises ValueError with a sentence about an invalid one."""
        if self.kind is None:
            return True
        if not values:
            raise ValueError(f"{self.name}: expected {'a value' if not self.several else 'values'}")
        read = _KINDS[self.kind]
        try:
            return [read(value) for value in values] != ([] if self.default is None else [read(self.default)])
        except Exception as error:  # argparse's own type, which would be named in the annotation only
            raise ValueError(f"{self.name}: {error}") from None


@cache
def table() -> dict[str, Elsewhere]:
    """All flags of the table by name, in its order."""
    flags, reason = {}, ""
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith((_REFUSED, _WITHOUT_EFFECT)):
            reason = line
        elif line.startswith(" "):
            for name, values in by_flag(shlex.split(line)):
                kind, default = (*values, None, None)[:2]
                refused = reason.startswith(_REFUSED)
                flags[name] = Elsewhere(
                    name=name,
                    kind=kind and kind.removesuffix("+"),
                    several=(kind or "").endswith("+"),
                    default=default,
                    refused=refused,
                    reason=reason.removeprefix(_REFUSED if refused else _WITHOUT_EFFECT),
                )
    return flags


def by_flag(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each word that begins with `--`, without the `=` and what stands behind it, and the words up to the next one;
    words before the first flag have the name ''."""
    name, values = "", []
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name or values:
            yield name, values
        name, equals, value = word.partition("=")
        values = [value] if equals else []
    if name or values:
        yield name, values
