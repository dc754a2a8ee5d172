"""What an entry may say of its run that the planner has no price for, by the names that frameworks give it.

A run with FP4 is none of plain tensor, pipeline and data parallelism, and a prediction as if it were says nothing. So
each such key is refused by name, unless its value says that it is off; the same words are looked for where an entry
describes its run in a text. Weights that are split over replicas are read where the part config says so in the words of
sharded_settings.py, and refused elsewhere. Of experts and context parallelism the numbers are read, by the names in
`_READ`, and other keys are refused: `moe` alone does not say how many experts there are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.documents.faults import place, shown

_READ = frozenset({
    "cp", "context_parallel", "context_parallel_size", "cp_comm_type",
    "ep", "expert_parallel", "expert_parallel_size", "expert_model_parallel_size",
    "etp", "expert_tensor_parallel_size",
    "num_experts", "num_moe_experts", "moe_router_topk", "moe_ffn", "moe_ffn_hidden_size", "moe_shared_ffn",
    "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_capacity_factor", "moe_expert_capacity_factor",
    "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "overlap_moe_expert_parallel_comm", "cuda_graph_scope",
    "fp8_recipe", "fp8_param_gather",
})  # fmt: skip
"""Keys of techniques that are modelled as far as these go."""


@dataclass(frozen=True)
class _Technique:
    """`key`, `text`: patterns of its keys, and of its name in a text; in small letters, with _ between words. `known`:
    keys of a part that are read, one of which says what such a text means."""

    key: str
    text: str
    reason: str
    remedy: str
    known: tuple[str, tuple[str, ...]] | None = None


_FP8 = _Technique(
    r"fp8|float8",
    r"fp8|float8",
    "products in FP8 are modelled as config.precision fp8, with a scale for each tensor, and no other way",
    "give that alone, or a run in 16 bits",
)
_IS_FP8 = re.compile(r"(fp8|float8)\s*([(,].*)?", re.IGNORECASE | re.DOTALL)  # as a precision, with a remark behind
_TECHNIQUES = (
    _Technique(
        r"fsdp|hsdp|full(y)?_?shard|shard_degree|dp_shard|sharding_strategy|zero_?(stage_?)?[23]|zero_(infinity|plus)",
        r"fsdp|hsdp|fully_sharded|zero_?[23]",
        "weights are split over replicas (fully sharded, ZeRO), which is not read here",
        "give config.fsdp as true or a number of replicas, or config.zero as 0 to 3",
    ),
    _Technique(
        r"fp4|float4|int8|int4|quanti[sz]|[48]_?bit",
        r"fp4|float4|int8|quanti[sz]ed",
        "products in FP4 or of integers are not modelled",
        "give a run in bf16, fp16, fp32 or fp8",
    ),
    _FP8,
    _Technique(
        r"moe|expert|(^|_)(ep|etp)(_|$)|capacity_factor|router",
        r"(^|_)moe(_|$)|mixtral|mixture_of_experts|(^|_)\d+x\d+b(_|$)",
        "layers have experts, which are modelled by their numbers only",
        "give model.num_experts and model.moe_router_topk, and config.ep",
        ("model", ("num_experts", "num_moe_experts")),
    ),
    _Technique(
        r"(^|_)cp(_|$)|context_parallel|ring_attention|ulysses|sequence_parallel_(size|degree)",
        r"context_parallel|ring_attention|ulysses",
        "sequences are split over context parallel ranks, which is modelled by their number only",
        "give config.cp, and config.cp_comm_type where it is not a ring",
        ("config", ("cp", "context_parallel", "context_parallel_size")),
    ),
    _Technique(
        r"offload|nvme",
        r"offload|zero_infinity",
        "offloading to the host is not modelled, but for schedule l2l",
        "give a run without, or l2l",
    ),
    _Technique(
        r"async_?tp|tp_comm_overlap_|ub_overlap|userbuffer",
        r"userbuffer",
        "tensor-parallel collectives in pieces are modelled as one switch",
        "give config.tp_comm_overlap as true or false",
    ),
    _Technique(
        r"compile|cuda_?graph",
        r"cuda_?graph",
        "compiled models are read as technique compile alone, and CUDA graphs are not modelled",
        "give a run without, or config.technique",
    ),
    _Technique(
        r"lora|peft|adapter|freez|frozen",
        r"(^|_)q?lora(_|$)",
        "weights that are not trained are not modelled",
        "give a run that trains all of them",
    ),
    _Technique(
        r"window|sparse_attention|linear_attention|(^|_)mla(_|$)|latent_attention|mamba|(^|_)ssm(_|$)",
        r"mamba|hyena|(^|_)rwkv",
        "attention that is not of all earlier tokens is not modelled",
        "give a run with full attention",
    ),
    _Technique(
        r"encoder_|decoder_|cross_attention|(^|_)(mtp|vision|image)(_|$)",
        r"(^|_)t5(_|$)",
        "encoders, several decoders and other heads are not modelled",
        "give a run of a GPT, a BERT or a Llama",
    ),
)  # fmt: skip
_OFF = frozenset({"", "0", "no", "none", "off", "false", "null"})
_DEGREE = re.compile(r"fsdp|(^|_)(cp|ep)(_|$)|parallel|degree|size|shard")
_PARTS = ("model", "hardware", "config")
_TEXTS = (("config", "technique"), ("config", "framework"), ("config", "precision"), ("config", "dtype"),
          ("hardware", "software"), ("model", "name"))  # fmt: skip
_STAGES = ("zero", "zero_stage", "zero_optimization_stage")
_SPLITS = re.compile(r"^(fsdp|data_parallel_shard_degree|zero(_optimization)?(_stage)?)$")  # what is read


def without_what_is_off(entry: Mapping) -> dict:
    """The entry without the keys of techniques that it says are off. Raises ValueError for one that is on."""
    kept = {key: value for key, value in entry.items() if not _is_off_key("", key, value)}
    for part in _PARTS:
        if isinstance(entry.get(part), Mapping):
            kept[part] = {key: value for key, value in entry[part].items() if not _is_off_key(part, key, value)}
    _refuse_two_names(kept)
    for part, key in _TEXTS:
        value = kept[part].get(key) if isinstance(kept.get(part), Mapping) else None
        is_said = key in ("precision", "dtype") and isinstance(value, str) and _IS_FP8.fullmatch(value.strip())
        is_text = isinstance(value, str) and value.strip() and not is_said
        technique = _found(_without_fp8(value) if key == "technique" else value, "text") if is_text else None
        if technique is _TECHNIQUES[0] and _is_split(kept):
            continue
        if technique is not None and not _is_said(technique, kept):
            raise ValueError(f"{place(part, key)} is {shown(value)}: {technique.reason}; {technique.remedy}")
    return kept


def _without_fp8(technique: str) -> str:
    """Without the word that says the precision, beside others that `+` joins."""
    return "+".join(word for word in technique.split("+") if not _IS_FP8.fullmatch(word.strip()))


def _is_off_key(part: str, key: object, value: object) -> bool:
    """Whether this names a technique and says that it is off. Raises ValueError where it is on."""
    name = _in_small_words(str(key))
    if part == "config" and name in _STAGES:
        return _is_off_stage(key, value)
    technique = _found(name, "key")
    if technique is None:
        return False
    is_one = type(value) in (int, float) and value == 1 and _DEGREE.search(name) is not None and name not in _READ
    if value is False or is_one or str(value).strip().lower() in _OFF:
        return True
    if name in _READ or (part == "config" and _SPLITS.match(name) and type(value) in (bool, int)):
        return False
    raise ValueError(f"{place(part, key)} is {shown(value)}: {technique.reason}; {technique.remedy}")


def _is_said(technique: _Technique, entry: Mapping) -> bool:
    """Whether the entry gives the numbers of a technique that a text names."""
    part, keys = technique.known or ("", ())
    given = entry.get(part)
    return isinstance(given, Mapping) and any(key in given for key in keys)


def _is_off_stage(key: object, value: object) -> bool:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise ValueError(f"{place('config', key)} is {shown(value)}, which is no stage of ZeRO; give 0 to 3")
    return value == 0


def _refuse_two_names(entry: Mapping) -> None:
    """Raises ValueError where two names of one thing say different things."""
    config = entry.get("config")
    for names in (_STAGES, ("fsdp", "data_parallel_shard_degree")):
        given = {name: config[name] for name in names if isinstance(config, Mapping) and name in config}
        if len(set(map(str, given.values()))) > 1:
            (first, one), (second, other) = list(given.items())[:2]
            raise ValueError(
                f"config.{first} is {shown(one)} and config.{second} {shown(other)}, which are names of one thing; "
                "leave one out"
            )


def _is_split(entry: Mapping) -> bool:
    """Whether its part config says how weights are split, so that a text may name it, too."""
    config = entry.get("config")
    return isinstance(config, Mapping) and any(_SPLITS.match(_in_small_words(str(key))) for key in config)


def _in_small_words(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _found(text: str, kind: str) -> _Technique | None:
    words = _in_small_words(text)
    return next((each for each in _TECHNIQUES if re.search(getattr(each, kind), words)), None)
