"""LoRA adapters of PEFT in whole runs of `finetune.py`'s job, beside PEFT in one process."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.capture.cut import cut
from megatron.capture.tensors import FolderTensors, Wanted
from megatron.commands import merge_adapter
from megatron.finetuning.adapters import AdapterTensors
from megatron.finetuning.assembly import edges_of_stage
from megatron.finetuning.merge import require_mergeable
from megatron.finetuning.partitioning import PlannedMachine, cut_model
from megatron.finetuning.plan import captured_model, first_lines, make_plan, of_devices
from megatron.finetuning.pretrained import Pretrained
from megatron.finetuning.samples import read_data
from tests import workers
from tests.commands.in_process import runner
from tests.finetuning import cases, lora, tiny

CASES = "tests.finetuning.cases"
CLASSES, CAUSAL, T5 = "sequence-classification", "causal-lm", "text-to-text"
LLAMA = ["q_proj", "v_proj", "down_proj"]

ADAPTERS = {
    "lora": (CAUSAL, {"r": 4, "lora_alpha": 8, "target_modules": LLAMA, "task_type": "CAUSAL_LM"}),
    "dora": (CAUSAL, {"r": 3, "target_modules": "all-linear", "use_dora": True, "task_type": "CAUSAL_LM"}),
    "head": (CLASSES, {"r": 4, "target_modules": ["query", "dense"], "use_rslora": True, "task_type": "SEQ_CLS"}),
    "embedding": (CAUSAL, {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "late": (CAUSAL, {"r": 2, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [2, 3]}),
    "t5": (T5, {"r": 2, "target_modules": ["q", "v", "wo"], "task_type": "SEQ_2_SEQ_LM"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


def base_of(folder: Path, task: str) -> Path:
    return lora.llama_folder(folder) if task == CAUSAL else tiny.model_folder(folder, task)


def run(folder: Path, name: str, *argv: object, task: str, ranks: int, dropout: float = 0.0):
    outcome, *_ = workers.run(
        ranks, f"{CASES}:finetune", folder=folder, task=task, argv=tuple(map(str, argv)), dropout=dropout, name=name,
        weights="adapter_of",
    )  # fmt: skip
    return outcome


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "schedule", "ranks", "accumulation"),
    [
        ("lora", "flush", (0, 1, 0, 1), 2),
        ("lora", "2bw", (0, 1, 2, 3), 4),
        ("dora", "gpipe", (0, 1), 2),
        ("dora", "pipedream", (0, 1), 1),
        ("head", "2bw", (0, 1), 2),
        ("head", "flush", (0,), 2),
        ("embedding", "flush", (0,), 1),
        ("t5", "gpipe", (0, 1, 1, 0), 2),
        ("t5", "pipedream", (0, 1, 2, 3), 1),
    ],
)
def test_ranks_train_what_peft_trains(folder, kind, schedule, ranks, accumulation):
    """An adapter that PEFT has begun goes on as with PEFT in one process; the file that is written is PEFT's."""
    task, options = ADAPTERS[kind]
    base = base_of(folder, task)
    adapter = lora.begun(base, task, folder / kind, **options)
    place = folder / f"{kind}-{schedule}-{len(ranks)}"
    place.mkdir()
    argv = [
        "--model_name_or_path",
        base,
        "--adapter_name_or_path",
        adapter,
        "--gradient_accumulation_steps",
        accumulation,
    ]
    argv += ["--pipeline_schedule", schedule, "--learning_rate", 1e-3, "--weight_decay", 0.1, "--num_train_epochs", 4]
    argv += ["--max_grad_norm", 0 if schedule == "pipedream" else 0.1, "--dataloader_drop_last", "--no_group_texts"]
    argv += ["--merge_adapter"] * (kind != "embedding")
    stages = cases.partition(place, task, ranks, *argv)
    found = run(place, "out", *argv, "--partition", stages, task=task, ranks=len(set(ranks)))
    command = tiny.command(place, task, *argv)
    delays = lora.delays_of(tiny.arguments(place, task, *argv), stages, schedule)
    expected = lora.plain(base, task, adapter, command, delays)
    assert len(set(expected.losses)) == len(expected.losses) > 2
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.weights.keys() == expected.weights.keys()
    begun = cases.adapter_of(adapter, task)
    for name, weights in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weights, rtol=1e-5, atol=1e-5, msg=name)
        assert not torch.allclose(begun[name], weights, rtol=1e-3, atol=1e-4), f"{name} has not learned"
    batch = {"input_ids": torch.arange(4, 20).view(2, 8)}
    batch |= {"labels": batch["input_ids"]} if task == T5 else {}
    written = lora.adapted(base, task, place / "out").eval()
    whole = lora.adapted(base, task, adapter).eval()
    whole.load_state_dict({**whole.state_dict(), **written.state_dict()})
    with torch.no_grad():
        logits = written(**batch).logits
        assert torch.equal(logits, whole(**batch).logits)
    if kind == "embedding":
        return
    merged = cases.loaded(place / "out" / "merged", task).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, logits, rtol=1e-5, atol=1e-5)
    for name, weights in written.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], weights, rtol=0, atol=1e-6, msg=name)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "ranks", "versions"),
    [
        ("2bw", (0, 1), (2, 2)),
        ("pipedream", (0, 1), (2, 1)),
        ("flush", (0, 1, 1, 0), (1, 1)),
        ("ftpipe", (0, 1, 1, 0), (1, 1)),
    ],
)
def test_only_adapters_have_versions_gradients_and_state(folder, schedule, ranks, versions):
    """Frozen weights lie once on each rank that uses them, the tied embedding, too, and nothing of them travels."""
    base = lora.llama_folder(folder)
    place = folder / f"held-{schedule}"
    place.mkdir()
    argv = ["--model_name_or_path", base, "--lora_r", 4, "--target_modules", *LLAMA, "--pipeline_schedule", schedule]
    argv += ["--gradient_accumulation_steps", 1 if schedule == "pipedream" else 2, "--dataloader_drop_last"]
    argv += ["--no_group_texts", "--max_steps", 3, "--save_strategy", "no", "--partition"]
    argv = tuple(map(str, [*argv, cases.partition(place, CAUSAL, ranks, *argv[:-1])]))
    found = workers.run(2, f"{CASES}:held", folder=place, task=CAUSAL, argv=argv, name="out")
    whole = cases.loaded(base, CAUSAL)
    frozen, adapters = sum(each.nbytes for each in whole.parameters()), 0
    for holds, count in zip(found, versions, strict=True):
        trained = sum(holds["trained"].values())
        adapters += trained
        assert sum(holds["slots"]) == count * trained
        assert sum(holds["buffers"]) == (2 if schedule == "2bw" else 1) * trained
        assert holds["states"] == 2 * trained
        assert not holds["with_gradients"] and holds["frozen_places"] == len(holds["frozen"])
    assert adapters == sum(each.nbytes for each in cases.adapter_of(place / "out", CAUSAL).values())
    embedding = whole.get_input_embeddings().weight.nbytes
    both = 1 if ranks[0] == ranks[-1] else 2  # ranks with the first and the last stage
    assert sum(sum(holds["frozen"].values()) for holds in found) == frozen + (both - 1) * embedding
    edges = {tuple(sorted(pair)) for holds in found for pair in holds["sent"]}
    assert edges == {(stage, stage + 1) for stage in range(len(ranks) - 1)}
    for holds in found:
        for forwards, backwards in holds["sent"].values():
            assert 0 < backwards <= forwards, "a gradient comes back for what is trained"


@pytest.mark.full
def test_another_model_under_a_saved_adapter_is_refused(folder):
    """A copy of the model in other files goes on; one of the same shapes with one other tensor does not."""
    argv = ["--lora_r", 4, "--pipeline_schedule", "flush", "--save_steps", 2]
    argv += ["--partition", cases.partition(folder, CLASSES, (0,), *argv)]
    run(folder, "based", *argv, "--max_steps", 2, task=CLASSES, ranks=1)
    argv += ["--max_steps", 4, "--resume", folder / "based" / "checkpoint-2"]
    base = Path(tiny.arguments(folder, CLASSES).model_name_or_path)
    for name in ("copied", "other"):
        tensors = load_file(base / "model.safetensors")
        if name == "other":
            tensors[max(tensors)] += 1.0
        shutil.copytree(base, folder / name)
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt", "of": name})
    run(folder, "on-copied", *argv, "--model_name_or_path", folder / "copied", task=CLASSES, ranks=1)
    with pytest.raises(workers.WorkerError, match=r"another --model_name_or_path \([0-9]+ tensors, digest "):
        run(folder, "on-other", *argv, "--model_name_or_path", folder / "other", task=CLASSES, ranks=1)


@pytest.mark.full
def test_a_new_adapter_begins_alike_everywhere(folder):
    """With dropout, ftpipe's stages on two ranks and on one: the same bits, and a head that is trained whole."""
    argv = ["--lora_r", 4, "--lora_dropout", 0.1, "--use_dora", "--target_modules", "query", "dense"]
    argv += ["--gradient_accumulation_steps", 2, "--learning_rate", 1e-3, "--num_train_epochs", 2]
    argv += ["--pipeline_schedule", "ftpipe", "--provisional_steps"]
    inner = folder / "inner"
    cases.loaded(tiny.model_folder(folder, dropout=0.1), CLASSES).bert.save_pretrained(inner)
    tiny.tokenizer().save_pretrained(inner)
    argv += ["--model_name_or_path", inner, "--modules_to_save", "classifier", "pooler"]
    runs = [
        run(
            folder, f"places-{number}", *argv, "--partition",
            cases.partition(folder, CLASSES, ranks, *argv, dropout=0.1), task=CLASSES, dropout=0.1,
            ranks=len(set(ranks)),
        )
        for number, ranks in enumerate([(0, 1, 1, 0), (0, 0, 0, 0)])
    ]  # fmt: skip
    assert runs[0].losses == runs[1].losses
    assert runs[0].weights.keys() == runs[1].weights.keys()
    assert all(torch.equal(weights, runs[1].weights[name]) for name, weights in runs[0].weights.items())
    assert {name for name in runs[0].weights if "classifier" in name or "pooler" in name} == {
        f"base_model.model.{module}.{kind}"
        for module in ("classifier", "bert.pooler.dense")
        for kind in ("weight", "bias")
    }


@pytest.mark.full
def test_no_gradient_of_frozen_tensors_travels(folder, tmp_path):
    """A T5's relative positions, which the first layer computes of frozen weights, go to all, and nothing returns."""
    argv = ["--lora_r", 2, "--target_modules", "q", "v"]
    args = tiny.arguments(tmp_path, T5, *argv, "--partition", cases.partition(tmp_path, T5, (0, 1, 2, 3), *argv))
    args.devices = 4
    plan = make_plan(args, read_data(args))
    kept = 0
    for stage in cut(plan.captured, plan.stage_of_operator).values():
        for other, tensors in edges_of_stage(plan, stage).items():
            gradients = [each.has_gradient for each in (stage.sources | stage.targets)[other]]
            assert len(tensors.gradients.specs) == sum(gradients)
            kept += gradients.count(False)
    assert kept > 0


@pytest.mark.full
def test_a_recompute_drops_the_same(folder):
    """Masks of adapters depend on neither recompute nor cut, and they do drop."""
    argv = ["--lora_r", 4, "--use_dora", "--target_modules", "all-linear", "--num_train_epochs", 1]
    argv += ["--learning_rate", 1e-2, "--pipeline_schedule", "flush"]
    runs = []
    for number, more in enumerate([[], ["--no_recompute"], ["--lora_dropout", 0]]):
        argv_of_run = ["--lora_dropout", 0.3, *argv, *more]
        place = folder / f"masks-{number}"
        place.mkdir()
        cut_here = cases.partition(place, CLASSES, (0, 1), *argv_of_run)
        runs.append(run(place, "out", *argv_of_run, "--partition", cut_here, task=CLASSES, ranks=2))
    assert runs[0].losses == runs[1].losses != runs[2].losses
    assert all(torch.equal(weights, runs[1].weights[name]) for name, weights in runs[0].weights.items())


def beginning(folder: Path, *argv: object, task: str = CLASSES) -> dict[str, torch.Tensor]:
    """The tensors with which an adapter begins, by their names in the adapted model."""
    args = tiny.arguments(folder, task, *argv)
    captured, _, opened = captured_model(args, read_data(args))
    source = AdapterTensors(
        opened.adapter, Pretrained(opened.model, args.model_name_or_path, new_head=True), used=captured.all_names,
        seed=args.seed,
    )  # fmt: skip
    make = source.initial(lambda *_: pytest.fail("the folder has a head"))
    parameters = opened.adapter.model.named_parameters()
    return {name: make(name, each.shape, each.dtype) for name, each in parameters if ".lora_" in name}


def test_a_whole_module_begins_as_the_models(folder, tmp_path):
    """A tied embedding that is trained whole has the frozen one's values in memory of its own; layers that a task
    leaves out are written as they began.
    """
    base = lora.llama_folder(folder)
    argv = ["--model_name_or_path", base, "--lora_r", 4, "--modules_to_save", "embed_tokens"]
    args = tiny.arguments(tmp_path, CAUSAL, *argv)
    captured, _, opened = captured_model(args, read_data(args))
    pretrained = Pretrained(opened.model, base, new_head=False)
    source = AdapterTensors(opened.adapter, pretrained, used=captured.all_names, seed=0)
    tied = next(name for name, names in captured.names.items() if "lm_head.weight" in names)
    names = ["model.embed_tokens.modules_to_save.default.weight", tied]
    with FolderTensors(base) as files:
        wanted = {name: Wanted(captured.names[name], torch.Size((44, 16)), torch.float32) for name in names}
        found = dict(source.read(files, wanted))
    trained, frozen = (found[name] for name in names)
    assert torch.equal(trained, cases.loaded(base, CAUSAL).get_input_embeddings().weight)
    assert torch.equal(trained, frozen) and trained.data_ptr() != frozen.data_ptr()
    assert source.unused(captured.all_names) == {}
    assert source.reverted(source.unused(())).keys() == set(opened.adapter.written.values())


def test_an_adapter_begins_as_pefts_does(folder):
    """Uniform first factors, second factors 0, DoRA's magnitudes the norms of the frozen weights; other layers and
    other seeds begin otherwise.
    """
    argv = ["--lora_r", 16, "--use_dora", "--target_modules", "all-linear"]
    found = beginning(folder, *argv)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=16, use_dora=True, target_modules="all-linear", task_type="SEQ_CLS")
    expected = peft.get_peft_model(cases.loaded(tiny.model_folder(folder), CLASSES), config)
    expected = {name.removeprefix(lora.PREFIX): each for name, each in expected.named_parameters() if ".lora_" in name}
    assert found.keys() == expected.keys()
    seen = set()
    for name, each in found.items():
        if ".lora_A" in name:
            bound = each.shape[1] ** -0.5
            assert 0.9 * bound < each.abs().max() <= bound and each.std() == pytest.approx(bound / 3**0.5, rel=0.15)
            assert expected[name].std().item() == pytest.approx(each.std().item(), rel=0.3)
            seen.add(each.flatten()[:4].sum().item())
        else:
            assert torch.equal(each, expected[name]), name
    assert len(seen) == sum(".lora_A" in name for name in found)
    other = beginning(folder, *argv, "--seed", 7)
    assert not any(torch.equal(each, other[name]) for name, each in found.items() if ".lora_A" in name)
    config = folder / "gaussian.json"
    config.write_text(
        json.dumps({"peft_type": "LORA", "r": 50, "init_lora_weights": "gaussian", "target_modules": ["query"]})
    )
    normal = torch.cat(
        [each.flatten() for name, each in beginning(folder, "--peft_config", config).items() if "A" in name]
    )
    assert normal.std() == pytest.approx(1 / 50, rel=0.1) and normal.abs().max() > 2.5 / 50


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "ranks", "accumulation"), [("ftpipe", (0, 1, 0, 1), 2), ("2bw", (0, 1), 2), ("flush", (0, 1), 1)]
)
def test_a_resumed_run_is_the_run(folder, schedule, ranks, accumulation):
    """Adapters, moments and older versions come from a checkpoint, which PEFT loads; frozen weights from the model."""
    argv = ["--lora_r", 4, "--lora_dropout", 0.1, "--gradient_accumulation_steps", accumulation, "--save_steps", 3]
    argv += [
        "--num_train_epochs",
        2,
        "--pipeline_schedule",
        schedule,
        "--dataloader_drop_last",
        "--learning_rate",
        1e-3,
    ]
    argv += ["--partition", cases.partition(folder, CLASSES, ranks, *argv, dropout=0.1)]
    whole = run(folder, f"whole-{schedule}", *argv, task=CLASSES, dropout=0.1, ranks=2)
    checkpoint = folder / f"whole-{schedule}" / "checkpoint-3"
    rest = run(
        folder, f"rest-{schedule}", *argv, "--resume_from_checkpoint", checkpoint, task=CLASSES, dropout=0.1, ranks=2
    )
    assert rest.losses == whole.losses[3:] and len(rest.losses) >= 3
    assert all(torch.equal(weights, rest.weights[name]) for name, weights in whole.weights.items())
    loaded = peft.get_peft_model_state_dict(lora.adapted(tiny.model_folder(folder, dropout=0.1), CLASSES, checkpoint))
    assert loaded.keys() == whole.weights.keys()
    assert not any(torch.equal(weights, loaded[name]) for name, weights in whole.weights.items())


@pytest.mark.full
def test_frozen_weights_in_bfloat16(folder):
    """Adapters are FP32, as PEFT has them; what PEFT computes in one process, and the merged model is bfloat16."""
    base = lora.llama_folder(folder)
    place = folder / "bfloat16"
    place.mkdir()
    adapter = lora.begun(base, CAUSAL, place / "begun", r=4, target_modules=LLAMA, task_type="CAUSAL_LM")
    argv = ["--model_name_or_path", base, "--adapter_name_or_path", adapter, "--dtype", "bfloat16", "--merge_adapter"]
    argv += ["--pipeline_schedule", "flush", "--optim", "sgd", "--learning_rate", 0.1, "--num_train_epochs", 2]
    stages = cases.partition(place, CAUSAL, (0, 1, 0, 1), *argv)
    found = run(place, "out", *argv, "--partition", stages, task=CAUSAL, ranks=2)
    delays = lora.delays_of(tiny.arguments(place, CAUSAL, *argv), stages, "flush")
    expected = lora.plain(base, CAUSAL, adapter, tiny.command(place, CAUSAL, *argv), delays, dtype=torch.bfloat16)
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    for name, weights in expected.weights.items():
        assert found.weights[name].dtype == weights.dtype == torch.float32
        torch.testing.assert_close(found.weights[name], weights, rtol=1e-3, atol=1e-3, msg=name)
    assert {each.dtype for each in tensors_of(place / "out" / "merged").values()} == {torch.bfloat16}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with FolderTensors(folder) as files:
        return {name: files.read(name) for name in files.places}


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--lora_alpha", 4], "--lora_alpha describes a new LoRA adapter; give --lora_r, too"),
        (
            ["--lora_r", 4, "--peft_config", "x"],
            "--lora_r and --peft_config each say what the adapter is; leave one out",
        ),
        (["--peft_config", "x", "--use_dora"], "--use_dora describes .*; leave it out, since --peft_config says"),
        (["--merge_adapter"], "--merge_adapter has no adapter to merge; give --lora_r, or leave it out"),
        (
            ["--lora_r", 4, "--merge_adapter", "--do_eval"],
            "--merge_adapter is for runs that train; .*tools/merge_adapter",
        ),
        (
            ["--lora_r", 4, "--merge_adapter", "--output_dir", "o", "--model_name_or_path", "./o/merged"],
            "--merge_adapter would write over --model_name_or_path ./o/merged; give another --output_dir than o",
        ),
        (["--lora_r", 4, "--bf16"], "adapters are FP32 themselves; give --dtype bfloat16"),
    ],
)
def test_flags_that_contradict_each_other(folder, argv, sentence):
    with pytest.raises(ValueError, match=sentence):
        tiny.arguments(folder, CLASSES, *argv)


LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["query"]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            None,
            r"adapter_config.json cannot be read \(No such file or directory\); give the adapter_config.json that PEFT",
        ),
        ({"peft_type": "IA3"}, "is of the kind IA3, and only LORA is trained here"),
        (LORA | {"task_type": "CAUSAL_LM"}, "has task_type CAUSAL_LM, and --task sequence-classification is SEQ_CLS"),
        (LORA | {"init_lora_weights": "pissa"}, "has init_lora_weights pissa, .*; give one of true, gaussian"),
        (
            LORA | {"target_parameters": ["weight"]},
            r"LoRA with target_parameters \['weight'\] is not trained here; leave",
        ),
        (LORA | {"bias": "all"}, "LoRA with bias all is not trained here"),
        (LORA | {"layer_replication": [[0, 2]]}, "LoRA with layer_replication"),
        (
            LORA | {"target_modules": ["none"]},
            "PEFT cannot adapt BertForSequenceClassification: .*; give other --target",
        ),
    ],
)
def test_configurations_that_are_not_trained(folder, tmp_path, content, sentence):
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    args = tiny.arguments(folder, CLASSES, "--peft_config", tmp_path / "adapter_config.json")
    with pytest.raises(ValueError, match=sentence):
        captured_model(args, read_data(args))


def test_an_adapter_of_another_model(folder, tmp_path):
    """Tensors that are missing, superfluous or of another shape are named."""
    base = tiny.model_folder(folder)
    written = lora.begun(base, CLASSES, tmp_path / "written", r=4, target_modules=["query"], task_type="SEQ_CLS")
    args = tiny.arguments(folder, CLASSES, "--adapter_name_or_path", written)
    _, _, opened = captured_model(args, read_data(args))
    tensors = cases.adapter_of(written, CLASSES)
    first = sorted(name for name in tensors if "lora_A" in name)[0]
    for changes, sentence in (
        ({first: None}, f"lacks {first}, which the adapter needs"),
        ({"other": torch.zeros(1)}, "has other, of which the adapter of its configuration has no use"),
        ({first: torch.zeros(3, 16)}, rf"{first} in .* has shape \(3, 16\), and the model needs \(4, 16\)"),
    ):
        kept = {name: each for name, each in (tensors | changes).items() if each is not None}
        save_file(kept, written / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=sentence):
            opened.adapter.read(written)


def test_what_would_be_lost_is_refused(folder, tmp_path):
    """A new head that stays frozen, and a tied weight that is to be merged in one of its places."""
    inner = tmp_path / "inner"
    config = cases.loaded(tiny.model_folder(folder), CLASSES).config
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(inner)
    tiny.tokenizer().save_pretrained(inner)
    args = tiny.arguments(folder, CLASSES, "--model_name_or_path", inner, "--lora_r", 4)
    captured, _, opened = captured_model(args, read_data(args))
    with pytest.raises(ValueError, match=r"bert.pooler.dense.bias is not in .*; give --modules_to_save dense"):
        AdapterTensors(opened.adapter, Pretrained(opened.model, inner, new_head=True), used=captured.all_names, seed=0)
    base = lora.llama_folder(folder)
    argv = ["--model_name_or_path", base, "--lora_r", 4, "--target_modules", "embed_tokens"]
    args = tiny.arguments(folder, CAUSAL, *argv)
    opened = captured_model(args, read_data(args))[2]
    with pytest.raises(
        ValueError, match=r"model.embed_tokens.weight and lm_head.weight are one tensor.*--merge_adapter out"
    ):
        require_mergeable(opened.adapter, Pretrained(opened.model, base, new_head=False))


def test_a_stage_before_all_that_is_trained(folder, tmp_path):
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(LORA | {"layers_to_transform": [1]}))
    stages = cases.partition(tmp_path, CLASSES, (0, 1, 0, 1), "--peft_config", config)
    args = tiny.arguments(tmp_path, CLASSES, "--peft_config", config, "--partition", stages)
    args.devices = 2
    with pytest.raises(
        ValueError, match=r"nothing is trained in or before stage 0.*make a partition with fewer stages"
    ):
        make_plan(args, read_data(args))


def test_memory_counts_frozen_weights_once(folder, tmp_path):
    """16 bytes for each trained parameter, 24 with 2bw's second version and gradients, and 4 for each frozen one."""
    base = lora.llama_folder(folder)
    argv = ["--model_name_or_path", base, "--lora_r", 4, "--target_modules", *LLAMA, "--no_group_texts"]
    args = tiny.arguments(tmp_path, CAUSAL, *argv)
    captured, batch, opened = captured_model(args, read_data(args))
    machine = PlannedMachine(2, 2.0**34, 10.0)
    choice, _, graph, _ = cut_model(captured, batch, machine, args, methods=["sequential"], effort=0.02)
    parameters = list(opened.adapter.model.parameters())
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    frozen = sum(each.nbytes for each in parameters if not each.requires_grad)
    embedding = captured.parameters["model.embed_tokens.weight"].nbytes
    assert sum(stage.parameters for stage in choice.file.stages) == trained
    assert sum(stage.frozen_bytes for stage in choice.file.stages) == frozen + embedding
    weights = sum(node.params for node in graph.nodes) + sum(each.params for each in graph.shared_parameters)
    assert 16 * weights == pytest.approx(16 * trained + frozen, abs=16 * len(graph.nodes))
    path = tmp_path / "P.json"
    choice.file.write(path)
    for schedule, size in (("flush", 16), ("2bw", 24)):
        args = tiny.arguments(tmp_path, CAUSAL, *argv, "--pipeline_schedule", schedule, "--partition", path)
        args.devices = 2
        plan = make_plan(args, read_data(args))
        needs = of_devices(plan, args)
        assert sum(weights for _, weights, *_ in needs) == size * trained + frozen + embedding
    assert f"LoRA of rank 4 in 12 layers: {trained} parameters are trained, {frozen // 4} are frozen" in first_lines(
        plan, args
    )


def test_merged_by_the_command(folder, tmp_path, capsys):
    """In several files, with the head that PEFT's file has: what merge_and_unload makes. No index of the model's own
    files comes along."""
    base = tiny.model_folder(folder)
    (base / "pytorch_model.bin.index.json").write_text("{}")
    options = {"r": 4, "target_modules": ["query", "dense"], "use_dora": True, "lora_alpha": 3}
    adapter = lora.begun(base, CLASSES, tmp_path / "adapter", task_type="SEQ_CLS", **options)
    status, out, err = runner(merge_adapter, capsys)(
        base, adapter, "--output", tmp_path / "merged", "--file-bytes", 8000
    )
    assert (status, out) == (0, f"merged model in {tmp_path / 'merged'}\n"), err
    assert len(list((tmp_path / "merged").glob("model-*-of-*.safetensors"))) > 2
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    assert not (tmp_path / "merged" / "pytorch_model.bin.index.json").exists()
    (base / "pytorch_model.bin.index.json").unlink()
    found = cases.weights_of(tmp_path / "merged", CLASSES)
    expected = lora.adapted(base, CLASSES, adapter).merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-6, msg=name)
    status, _, err = runner(merge_adapter, capsys)(base, base, "--output", tmp_path / "other")
    assert status == 1 and "adapter_config.json cannot be read" in err
    status, _, err = runner(merge_adapter, capsys)(base, adapter, "--output", tmp_path / "other", "--file-bytes", 0)
    assert status == 2 and "argument --file-bytes: '0' is no finite number above 0" in err


def test_the_command_takes_nothing_away(folder, tmp_path, capsys, monkeypatch):
    """A folder that holds anything, such as the model itself, is refused and stays; an error leaves no part behind."""
    base = tiny.model_folder(folder)
    adapter = lora.begun(base, CLASSES, tmp_path / "adapter", task_type="SEQ_CLS", r=4, target_modules=["query"])
    merge = runner(merge_adapter, capsys)
    for output in (base, adapter, tmp_path):
        before = sorted(output.iterdir())
        status, _, err = merge(base, adapter, "--output", output)
        assert status == 1
        assert err.splitlines()[-1] == f"error: {output} is not empty; name a folder that does not exist yet"
        assert sorted(output.iterdir()) == before
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    assert merge(base, adapter, "--output", ".")[0] == 0
    assert (tmp_path / "new" / "config.json").is_file()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "empty").mkdir()
    for name in ("empty", "missing"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere" / name)
        assert merge(base, adapter, "--output", tmp_path / name)[0] == 0
        assert (tmp_path / name).is_symlink() and (tmp_path / name / "config.json").is_file()
    (tmp_path / "itself").symlink_to("itself")
    status, _, err = merge(base, adapter, "--output", tmp_path / "itself")
    assert status == 1 and f"--output {tmp_path / 'itself'} cannot be written; name a folder of yours" in err
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    status, _, err = merge(base, adapter, "--output", tmp_path / "another")
    assert status == 1 and "adapter_model.safetensors cannot be read" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter", "elsewhere", "empty", "itself", "missing", "new",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["empty", "missing"]
