"""Captured models of which layers freeze, and train again: against a plain loop, resumed, and what a rank holds."""

import dataclasses
import time
from unittest import mock

import pytest
import torch
import transformers

from megatron.capture.layers import stages_of_layers
from megatron.elastic.freezing import LayerNorms
from megatron.finetuning.arguments import parse_args
from megatron.finetuning.checkpoint import SavedProgress
from megatron.finetuning.data.batches import Epochs
from megatron.finetuning.freezing import Freezer
from megatron.finetuning.optimizers import make_optimizer, make_scheduler
from megatron.finetuning.partition_file import PartitionFile
from megatron.finetuning.plan import captured_model, decaying, make_plan
from megatron.finetuning.pretrained import open_model
from megatron.finetuning.samples import read_data
from megatron.finetuning.trainer import Trainer
from megatron.pipeline.runtime.contract.stage import BatchReport
from tests import workers
from tests.finetuning import cases, tiny

NAME, CASE = "sequence-classification", "tests.finetuning.cases:finetune"
COMMON = ["--num_train_epochs", 4, "--learning_rate", 0.01, "--gradient_accumulation_steps", 2,
          "--max_grad_norm", 0.5, "--weight_decay", 0.1, "--adam_epsilon", 1e-4, "--freeze_training",
          "--dataloader_drop_last"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("freezing")


def layer_of(name: str, num_layers: int = 2) -> int:
    """Of a BERT: layers, embeddings before them, and a head behind. The tiny one has two layers."""
    if "embeddings" in name:
        return 0
    return int(name.split("layer.")[1].split(".")[0]) if "layer." in name else num_layers - 1


def plain(folder, argv, frozen_after, norms=None, *, delay=0, num_layers=2):
    """The same in one process with torch alone.

    `frozen_after`: step -> the number of frozen layers from then on; None: as before. `delay`: 1 under 2bw.
    """
    args = parse_args(tiny.command(folder, NAME, *map(str, argv)))
    data = read_data(args)
    torch.manual_seed(args.seed)
    model = cases.loaded(args.model_name_or_path, NAME).train()
    decays = decaying(open_model(args.model_name_or_path, data.task.auto_model, changes=data.changes))
    named = dict(model.named_parameters())
    optimizer = make_optimizer(named, args, decays=decays)
    epochs = Epochs(
        num_samples=len(data.training), micro_batch_size=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps, seed=args.seed, drop_last=args.dataloader_drop_last,
    )  # fmt: skip
    num_steps = int(args.num_train_epochs * epochs.batches_per_epoch)
    scheduler = make_scheduler(optimizer, args, num_steps=num_steps)
    losses, older = [], {name: each.detach().clone() for name, each in named.items()}
    for step, batch in zip(range(1, num_steps + 1), epochs.batches(), strict=False):
        terms = [data.training.num_terms(indices) for indices in batch]
        found, newest = [], {name: each.detach().clone() for name, each in named.items()}
        for name, each in named.items() if delay else ():
            if each.requires_grad:
                each.data.copy_(older[name])
        for indices, count in zip(batch, terms, strict=True):
            loss = model(**data.training.batch(indices, len(indices))).loss * (count * len(batch) / sum(terms))
            (loss / len(batch)).backward()
            found.append(loss.item())
        losses.append(sum(found) / len(found))
        for name, each in named.items():
            each.data.copy_(newest[name])
        older = newest
        if norms is not None:
            squares = [0.0, 0.0]
            for name, each in named.items():
                if "layer." in name and each.grad is not None:
                    squares[layer_of(name)] += each.grad.double().square().sum().item()
            norms.add(squares)
        torch.nn.utils.clip_grad_norm_([each for each in named.values() if each.grad is not None], args.max_grad_norm)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        if (count := frozen_after(step)) is not None:
            for name, each in named.items():
                each.requires_grad_(layer_of(name, num_layers) >= count)
                if not each.requires_grad:
                    optimizer.state.pop(each, None)
    return losses, {name: each.detach() for name, each in model.state_dict().items()}


def partition(folder, ranks, *, by_layers):
    """A stage for each rank: of as many blocks each, or of the layers of the model."""
    path = cases.partition(folder, NAME, tuple(range(ranks)))
    if not by_layers:
        return path
    args = tiny.arguments(folder, NAME)
    captured, *_ = captured_model(args, read_data(args))
    file, first = PartitionFile.read(path), len(captured.inputs)
    stages = dict(enumerate(stages_of_layers(captured), start=first))
    path = folder / "by-layers.json"
    dataclasses.replace(file, stage_of_node=dict.fromkeys(range(first), 0) | stages).write(path)
    return path


def run(folder, name, *argv, ranks=2, stages=None, by_layers=True, case="finetune", **options):
    """`stages`: of a pipeline, if there are several. Under l2l layers are stages, without a partition."""
    if "l2l" not in argv:
        argv = (*argv, "--partition", partition(folder, stages or ranks, by_layers=by_layers))
    argv = tuple(map(str, argv))
    return workers.run(
        ranks, f"tests.finetuning.cases:{case}", folder=folder, task=NAME, argv=argv, name=name, **options
    )


def require_close(found, expected):
    losses, weights = expected
    assert found.losses == pytest.approx(losses, rel=1e-6)
    for name, value in weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


def changes(found):
    return [(line["step"], line["frozen_layers"]) for line in found.lines if "frozen_layers" in line]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "ranks", "by_layers"),
    [("gpipe", 2, False), ("2bw", 2, True), pytest.param("flush", 1, False, marks=pytest.mark.full),
     pytest.param("flush", 2, True, marks=pytest.mark.full), pytest.param("l2l", 1, True, marks=pytest.mark.full)],
)  # fmt: skip
def test_a_run_that_freezes_trains_what_one_process_trains(folder, schedule, ranks, by_layers):
    """Frozen layers are a part of a stage, or the first stage."""
    argv = [*COMMON, "--freeze_interval", 3, "--freeze_schedule", "0,1", "--pipeline_schedule", schedule]
    found, *_ = run(folder, f"{schedule}-{ranks}", *argv, ranks=ranks, by_layers=by_layers)
    assert changes(found) == [(6, 1)]
    require_close(found, plain(folder, argv, {6: 1}.get, delay=int(schedule == "2bw")))
    rates = [line["learning_rate"] for line in found.lines if "learning_rate" in line]
    assert rates == pytest.approx([0.01 * (1 - step / len(rates)) for step in range(len(rates))])


REPLICAS = ["--l2l_stash", "device", "--data_parallel_size", 2]


@pytest.mark.full
@pytest.mark.parametrize("flags", [["--max_grad_norm", 0], REPLICAS])
def test_a_relay_of_two_ranks_freezes_layers(folder, flags):
    """Of four layers the last two are the last ones of their ranks and never freeze. Or two replicas share a rank's
    layers, of which all but the last freeze.
    """
    deep, one = folder / "deep", "--data_parallel_size" in flags
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(
        vocab_size=44, **shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2
    )
    transformers.BertForSequenceClassification(config).save_pretrained(deep)
    tiny.tokenizer().save_pretrained(deep)
    argv = [*COMMON, "--model_name_or_path", deep, "--freeze_interval", 1, "--freeze_schedule", "1,3" if one else "1,2",
            "--pipeline_schedule", "l2l"]  # fmt: skip
    found, *_ = run(folder, f"relay-{one}", *argv, *flags)
    assert changes(found) == [(1, 1), (2, 3 if one else 2)] and len(found.losses) > 3
    alike = ["--gradient_accumulation_steps", 4] if one else ["--max_grad_norm", 1e9]
    require_close(found, plain(folder, [*argv, *alike], dict(changes(found)).get, num_layers=4))


def test_a_relay_that_freezes_and_thaws_has_the_bits_of_flush(folder):
    """With masters, whose FP32 values a layer has when it trains again; dropout; resumed while a layer is frozen.
    Without clipping, which flush does to BF16 gradients and the relay to FP32 ones.
    """
    argv = [*COMMON, "--freeze_interval", 2, "--freeze_schedule", "1", "--do_train", "--bf16", "--save_steps", 3,
            "--validation_file", tiny.data_file(folder, NAME, seed=3), "--eval_steps", 5, "--eval_strategy", "steps",
            "--freeze_watch_validation", -10, "--max_grad_norm", 0, "--pipeline_schedule"]  # fmt: skip
    options = {"folder": folder, "task": NAME, "dropout": 0.1}
    cut = cases.partition(folder, NAME, (0,), "--bf16", dropout=0.1)
    flush, *_ = workers.run(
        1, CASE, argv=(*map(str, argv), "flush", "--partition", str(cut)), name="thaws-flush", **options
    )
    relay, *_ = workers.run(1, CASE, argv=(*map(str, argv), "l2l"), name="thaws-l2l", **options)
    again = ("l2l", "--resume_from_checkpoint", str(folder / "thaws-l2l" / "checkpoint-3"))
    rest, *_ = workers.run(1, CASE, argv=(*map(str, argv), *again), name="thaws-rest", **options)
    assert changes(flush) == changes(relay) == [(2, 1), (10, 0)] and changes(rest) == [(10, 0)]
    assert relay.losses == flush.losses and rest.losses == relay.losses[3:] != []
    for name, each in flush.weights.items():
        assert torch.equal(each, relay.weights[name]) and torch.equal(each, rest.weights[name]), name


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "ranks"), [("flush", 2), ("l2l", 1)])
def test_the_norms_by_which_layers_freeze_are_those_of_one_process(folder, schedule, ranks):
    """Of the two batches since the last decision, over all ranks, of which each has a part of a layer."""
    argv = [*COMMON, "--freeze_interval", 3, "--pipeline_schedule", schedule, "--save_steps", 5]
    norms, seen = LayerNorms(2), {}

    def decide(step):
        seen[step] = norms.state_dict()
        if step % 3 == 0:
            norms.take()

    plain(folder, argv, decide, norms)
    run(folder, f"norms-{schedule}", *argv, ranks=ranks, by_layers=False)
    saved = SavedProgress.read(folder / f"norms-{schedule}" / "checkpoint-5").freezing["norms"]
    assert [each["count"] for each in saved] == [2] * ranks and seen[5]["count"] == 2
    assert [sum(layer) for layer in zip(*(each["sums"] for each in saved), strict=True)] == pytest.approx(
        seen[5]["sums"], rel=1e-5
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "precision"), [("2bw", ["--bf16"]), pytest.param("flush", [], marks=pytest.mark.full)]
)
def test_a_run_resumed_with_frozen_layers_is_the_run(folder, schedule, precision):
    argv = [*COMMON, "--freeze_interval", 3, "--freeze_schedule", "1", "--pipeline_schedule", schedule, *precision,
            "--save_steps", 5]  # fmt: skip
    whole, *_ = resumable(folder, f"whole-{schedule}", argv)
    saved = folder / f"whole-{schedule}" / "checkpoint-5"
    rest, *_ = resumable(folder, f"rest-{schedule}", [*argv, "--resume_from_checkpoint", saved])
    assert rest.losses == whole.losses[5:] != []
    for name, each in whole.weights.items():
        assert torch.equal(each, rest.weights[name]), name


@pytest.mark.full
def test_an_evaluation_that_a_stop_left_out_lets_layers_train_again(folder):
    """A stop at batch 4, where an evaluation is due by which layers train again, and a freezing that it forestalls."""
    argv = [*COMMON, "--freeze_interval", 2, "--freeze_schedule", "1,1", "--pipeline_schedule", "flush", "--do_train",
            "--validation_file", tiny.data_file(folder, NAME, seed=3), "--eval_steps", 2, "--eval_strategy", "steps",
            "--freeze_watch_validation", -10]  # fmt: skip
    whole, *_ = resumable(folder, "unstopped", argv)
    assert changes(whole) == [(2, 1), (4, 0)]
    stopped, *_ = resumable(folder, "stopped", argv, stop_at=3)
    assert changes(stopped) == [(2, 1)]
    rest, *_ = resumable(folder, "stopped", [*argv, "--resume_from_checkpoint"])
    assert changes(rest) == [(2, 1), (4, 0)] and rest.losses == whole.losses
    for name, each in whole.weights.items():
        assert torch.equal(each, rest.weights[name]), name


def resumable(folder, name, argv, **options):
    cut = cases.partition(folder, NAME, (0, 1), *argv, dropout=0.1)
    argv = (*map(str, argv), "--partition", str(cut))
    return workers.run(2, "tests.finetuning.cases:finetune", folder=folder, task=NAME, argv=argv, name=name,
                       dropout=0.1, **options)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["2bw", pytest.param("flush", marks=pytest.mark.full)])
def test_replicas_freeze_as_one_pipeline(folder, schedule):
    """Two pipelines with two microbatches a batch each, and one with four. Of 20 rows the second batch has a microbatch
    for the first replica alone. A layer freezes and trains again; in between the replicas go on from the checkpoint of
    the one pipeline. The norms that decide are the same, too.
    """
    argv = [*COMMON[:-1], "--pipeline_schedule", schedule, "--freeze_interval", 3, "--freeze_schedule", "1",
            "--do_train", "--validation_file", tiny.data_file(folder, NAME, seed=3), "--eval_steps", 3,
            "--eval_strategy", "steps", "--freeze_watch_validation", -10, "--save_steps", 2]  # fmt: skip
    one, *_ = run(folder, f"one-{schedule}", *argv, "--gradient_accumulation_steps", 4)
    argv += ["--data_parallel_size", 2]
    two, *_ = run(folder, f"two-{schedule}", *argv, ranks=4, stages=2)
    saved = folder / f"one-{schedule}" / "checkpoint-4"
    rest, *_ = run(folder, f"rest-of-two-{schedule}", *argv, "--resume_from_checkpoint", saved, ranks=4, stages=2)
    rest.lines = [line for line in one.lines if line["step"] <= 4] + rest.lines
    assert changes(one) == [(3, 1), (6, 0)] and len(one.losses) == 8
    for found in (two, rest):
        assert changes(found) == changes(one)
        require_close(found, (one.losses, one.weights))
        for key in ("grad_norm", "learning_rate", "eval_loss", "eval_accuracy"):
            expected = [line[key] for line in one.lines if key in line]
            assert [line[key] for line in found.lines if key in line] == pytest.approx(expected, rel=1e-5)
    norms = [
        SavedProgress.read(folder / f"{name}-{schedule}" / "checkpoint-2").freezing["norms"] for name in ("one", "two")
    ]
    for of_one, of_two in zip(*norms, strict=True):
        assert of_one["count"] == of_two["count"] == 2 and any(of_one["sums"])
        assert of_two["sums"] == pytest.approx(of_one["sums"], rel=1e-5)


def test_the_drain_counts_as_the_last_batch():
    """A frozen first rank runs a batch ahead of its report, so it waits for the others when the pipeline drains."""

    def drain():
        time.sleep(0.1)
        return [BatchReport(1), BatchReport(2)]

    engine, report = mock.Mock(next_batch=3, drain=drain, is_drained=False), mock.Mock()
    trainer = Trainer(mock.Mock(engine=engine), mock.Mock(fp16=False), report, *[None] * 9)
    trainer._waiting.extend([(1, 4, 0.5), (2, 8, 0.25)])
    trainer._drain()
    before, last = (call.args[1] for call in report.batch.call_args_list)
    assert before == 0.5 and 0.35 <= last < 0.5


def test_frozen_layers_have_no_gradients_moments_versions_or_traffic(folder):
    argv = [*COMMON, "--freeze_interval", 3, "--freeze_schedule", "1", "--pipeline_schedule", "2bw"]
    first, last = run(folder, "held", *argv, case="held", weights="weights_of")
    assert not first["trained"] and first["frozen"] and not first["with_gradients"]
    assert first["states"] == sum(first["slots"]) == sum(first["buffers"]) == 0
    assert first["sent"][0, 1][0] > 0 and first["sent"][0, 1][1] == 0  # activations, and no gradients
    trained = sum(last["trained"].values())
    assert last["states"] == 2 * trained and last["slots"] == [trained] * 2 and set(last["buffers"]) == {trained}


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--freeze_interval", 3], "needs --freeze_training"),
        (["--freeze_training"], "needs --freeze_interval"),
        (["--freeze_training", "--freeze_interval", 3, "--pipeline_schedule", "ftpipe"], "step together"),
        (["--freeze_training", "--freeze_interval", 3, "--pipeline_schedule", "flush", "--fp16"], "loss scale"),
        (["--freeze_training", "--freeze_interval", 3, "--pipeline_schedule", "flush", "--lora_r", 2], "adapter"),
        (["--freeze_training", "--freeze_interval", 3, "--pipeline_schedule", "flush", "--freeze_schedule", "a"],
         "no list"),
        (["--freeze_training", "--freeze_interval", 3, "--pipeline_schedule", "flush", "--freeze_watch_validation",
          0.01], "evaluations during training"),
    ],
)  # fmt: skip
def test_what_freezing_cannot_do_is_refused(folder, argv, reason):
    with pytest.raises(ValueError, match=reason):
        tiny.arguments(folder, NAME, *argv)


@pytest.mark.parametrize(
    ("ranks", "counts", "reason"), [((0, 0), "1", "one on each device"), ((0,), "2", "of 2 layers")]
)
def test_a_pipeline_or_a_number_that_cannot_be_is_refused(folder, ranks, counts, reason):
    argv = ["--pipeline_schedule", "flush", "--freeze_training", "--freeze_interval", "3", "--freeze_schedule", counts,
            "--partition", str(cases.partition(folder, NAME, ranks))]  # fmt: skip
    found, *_ = workers.run(1, "tests.finetuning.cases:refused", folder=folder, argv=argv)
    assert reason in found


@pytest.mark.full
def test_a_relay_without_a_layer_to_freeze_is_refused(folder):
    argv = ("--pipeline_schedule", "l2l", "--freeze_training", "--freeze_interval", "3")
    found = workers.run(2, "tests.finetuning.cases:refused", folder=folder, argv=argv)
    assert found[0] == found[1] and "on 2 ranks 0 of 2 layers can freeze, as the last one of each rank" in found[0]


def test_a_relay_of_tied_embeddings_is_refused(folder):
    argv = ["--pipeline_schedule", "l2l", "--freeze_training", "--freeze_interval", 3]
    args = tiny.arguments(folder, "causal-lm", *argv)
    with pytest.raises(ValueError, match=r"would freeze transformer\.wte\.weight, which several stages share"):
        Freezer.of(args, make_plan(args, read_data(args)), None, None)


def test_what_the_model_never_trains_stays_so(folder):
    """A parameter without a gradient in the model's own code has none after layers freeze, and after they thaw."""
    argv = ["--pipeline_schedule", "flush", "--freeze_training", "--freeze_interval", 3, "--freeze_schedule", "1"]
    args = tiny.arguments(folder, NAME, *argv, "--partition", cases.partition(folder, NAME, (0,)))
    plan = make_plan(args, read_data(args))
    parameters = plan.captured.parameters
    fixed = next(name for name in parameters if "layer.1" in name)
    parameters[fixed].requires_grad_(False)
    freezer = Freezer.of(args, plan, None, None)
    for num_frozen in (1, 0):
        freezer._plan_of(num_frozen)
        found = {name for name, each in parameters.items() if not each.requires_grad}
        assert found == {fixed} | {name for name in parameters if layer_of(name) < num_frozen}
