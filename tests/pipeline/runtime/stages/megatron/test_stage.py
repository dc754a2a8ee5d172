"""`MegatronStage` alone: weights of the right version in forward and backward, memory, recomputation, losses."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from megatron import backend

backend.install()

from megatron.core.utils import unwrap_model
from megatron.pipeline.runtime.contract.stage import EVALUATION_BATCH, BatchInfo, Microbatch
from tests import workers
from tests.pipeline.runtime.stages.megatron import megatron_cases as cases

ONE = Microbatch(index=0, batch=0, position=0, num_microbatches=1)


@pytest.fixture(scope="module")
def alone():
    """Results of all cases below that need megatron.core's groups, computed by one worker in one call."""
    return workers.run(1, f"{__name__}:single_worker_cases", timeout=200)[0]


def single_worker_cases() -> dict:
    return {
        "switching": {name: switching_deviation(**options) for name, options in SWITCHING.items()},
        "storage": freed_storage(),
        "replay": replayed_data(),
        "losses": loss_forms(),
        "evaluation": evaluation_leaves_no_trace(),
        "bad_loss": refused_loss_shape(),
    }


SWITCHING = {
    "linear": {},
    "tied output": {"tied": True},
    "gated": {"swiglu": True, "normalization": "RMSNorm", "position": "rope"},
    "recompute instruction": {"recompute": True},
    "full recompute": {"recompute_granularity": "full"},
    "selective recompute": {"recompute_granularity": "selective"},
    "distributed optimizer": {"distributed_optimizer": True},
    "bf16": {"dtype": "bfloat16"},
    "bf16 distributed optimizer": {"dtype": "bfloat16", "distributed_optimizer": True},
}


def switching_deviation(**options) -> float:
    """Largest difference of gradients: F and B with version 0 while version 1 is made in between, or without it."""
    gradients = []
    for switch in (False, True):
        case = cases.Case(schedule="2bw", batches=(1,), layers=2, **options)
        with cases.parallel(case):
            (stage,), update = cases.build(case)
            info = BatchInfo(0, 1, case.micro_batch_size)
            stage.load_version(0)
            update.begin_batch(info)
            stage.forward(ONE, None)
            if switch:
                with update.versions.making(1):
                    for param in stage.model.parameters():
                        param.add_(1.0)  # what an optimizer does, far away from version 0
                stage.load_version(1)
            stage.load_version(0)
            update.begin_backward(info)
            if case.recompute:
                stage.recompute(ONE)
            stage.backward(ONE, None)
            gradients.append([param.main_grad.clone() for param in stage.model.parameters()])
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", SWITCHING)
def test_a_version_made_between_forward_and_backward_changes_no_gradient(alone, name):
    """Load, forward, step another version into the other slot, load back, backward: gradients are bit-equal."""
    assert alone["switching"][name] == 0.0


def test_matmul_needs_the_load_before_the_backward():
    """Why B loads its version: `x @ w` differentiates with whatever the parameter shows then."""
    weight = torch.nn.Parameter(torch.eye(2))
    old, new = weight.data, weight.data * 3
    x = torch.ones(1, 2, requires_grad=True)
    out = (x @ weight).sum()
    weight.data = new
    weight.data = old
    out.backward()
    assert x.grad.tolist() == [[1.0, 1.0]]
    x.grad = None
    out = (x @ weight).sum()
    weight.data = new
    out.backward()
    assert x.grad.tolist() == [[3.0, 3.0]]


def freed_storage() -> dict:
    """A stage in the middle of a pipeline of four, with the storages it should let go."""
    case = cases.Case(layers=2, micro_batch_size=1)
    with cases.parallel(case):
        _, update = cases.build(case)
        stage = middle_stage(case, update)
        info = BatchInfo(0, 1, 1)
        update.begin_batch(info)
        update.begin_backward(info)
        stage.load_version(0)
        received = torch.randn(stage.input_spec.shape)
        output = stage.forward(ONE, received)
        sent = weakref.ref(output.untyped_storage())
        result = {"specs": (stage.input_spec, stage.output_spec), "output_has_graph": output.requires_grad}
        values = output.clone()
        stage.free_output(ONE)
        result["kept_while_sending"] = torch.equal(output, values)
        del output
        gc.collect()
        result["freed_after_sending"] = sent() is None
        input_grad = stage.backward(ONE, torch.ones_like(values))
        result["input_grad_shape"] = tuple(input_grad.shape)
        result["saved"] = len(stage.activations)
        held = weakref.ref(received.untyped_storage())
        del received, input_grad
        gc.collect()
        result["input_freed"] = held() is None
        reference = received_gradient(case, update)
        result["gradients"] = reference
        return result


def middle_stage(case: cases.Case, update):
    model = update.chunks[0]
    inner = unwrap_model(model)
    inner.pre_process = inner.post_process = inner.decoder.pre_process = inner.decoder.post_process = False

    def step(data_iterator, chunk):
        return chunk(None, None, cases.causal_mask()), None

    return cases.MegatronStage(
        model, step, update, seq_length=cases.SEQUENCE, micro_batch_size=1, index=1, num_stages=4
    )


def received_gradient(case: cases.Case, update) -> float:
    """Freeing the output before the backward changes nothing: difference to a plain backward of the same chunk."""
    inner = unwrap_model(update.chunks[0])
    torch.manual_seed(3)
    given = torch.randn(cases.SEQUENCE, 1, case.hidden)
    gradient = torch.randn_like(given)
    plain = given.clone().requires_grad_()
    inner.set_input_tensor(plain)
    inner(None, None, cases.causal_mask()).backward(gradient)
    stage = middle_stage(case, update)
    stage.forward(ONE, given)
    stage.free_output(ONE)
    return (stage.backward(ONE, gradient) - plain.grad).abs().max().item()


def test_a_sent_output_keeps_its_storage_until_it_is_sent_and_no_longer(alone):
    """The stage's own hold goes with free_output; the alias in flight keeps the values; then nothing keeps them."""
    storage = alone["storage"]
    assert storage["kept_while_sending"] and storage["freed_after_sending"] and storage["input_freed"]
    assert not storage["output_has_graph"]
    assert storage["saved"] == 0


def test_edges_and_backward_without_the_output(alone):
    """Specs are [sequence, microbatch, hidden]; a backward whose output was freed gives bit-equal gradients."""
    storage = alone["storage"]
    shape = (cases.SEQUENCE, 1, 32)
    assert [spec.shape for spec in storage["specs"]] == [shape, shape]
    assert storage["input_grad_shape"] == shape
    assert storage["gradients"] == 0.0


def replayed_data() -> dict:
    """Microbatches drawn by the forwards, in order, and by the recomputations, in another order."""
    case = cases.Case(batches=(3,), recompute=True, layers=1)
    drawn = []
    with cases.parallel(case):
        (stage,), update = cases.build(case)
        plain_step = cases.forward_step(case)

        def step(data_iterator, model):
            def watched():
                for item in data_iterator:
                    drawn.append(item["tokens"].sum().item())
                    yield item

            return plain_step(watched(), model)

        stage._forward_step = step
        info = BatchInfo(0, 3, 6)
        update.begin_batch(info)
        stage.load_version(0)
        microbatches = [Microbatch(i, 0, i, 3) for i in range(3)]
        for microbatch in microbatches:
            stage.forward(microbatch, None)
        update.begin_backward(info)
        for microbatch in reversed(microbatches):
            stage.recompute(microbatch)
            stage.backward(microbatch, None)
        return {"drawn": drawn, "losses": stage.take_losses(0)}


def test_recomputation_sees_the_same_data_and_counts_no_loss_twice(alone):
    """Each R replays what its F drew from the iterator; losses are recorded by F alone."""
    drawn = alone["replay"]["drawn"]
    assert drawn[3:] == drawn[2::-1] and len(set(drawn[:3])) == 3
    assert alone["replay"]["losses"]["lm loss"][1] == 3.0


def loss_forms() -> dict:
    results = {}
    for token_form in (False, True):
        case = cases.Case(batches=(2,), token_form=token_form, layers=1)
        with cases.parallel(case):
            (stage,), update = cases.build(case)
            info = BatchInfo(0, 2, 4)
            update.begin_batch(info)
            update.begin_backward(info)
            stage.load_version(0)
            for position in range(2):
                stage.forward(Microbatch(position, 0, position, 2), None)
                stage.backward(Microbatch(position, 0, position, 2), None)
            gradient = torch.cat([param.main_grad.flatten() for param in stage.model.parameters()])
            results[token_form] = {
                "losses": stage.take_losses(0),
                "again": stage.take_losses(0),
                "gradient": gradient,
            }
    return results


def test_both_forms_of_a_loss_function(alone):
    """(loss, numbers) and (sum, num_tokens, numbers) give one gradient; a scalar counts as one, a pair as its count."""
    scalar, pair = alone["losses"][False], alone["losses"][True]
    torch.testing.assert_close(scalar["gradient"], pair["gradient"], rtol=1e-6, atol=1e-9)
    assert scalar["losses"]["lm loss"][1] == 2.0
    assert pair["losses"]["lm loss"][1] == 2 * 2 * cases.SEQUENCE
    mean = scalar["losses"]["lm loss"][0] / 2.0
    assert pair["losses"]["lm loss"][0] / pair["losses"]["lm loss"][1] == pytest.approx(mean, rel=1e-6)
    assert scalar["again"] == {}


def evaluation_leaves_no_trace() -> dict:
    """Evaluate between two forwards of a model with dropout: modes, generator, losses, saved microbatches."""
    case = cases.Case(batches=(2,), dropout=0.2, layers=1)
    with cases.parallel(case):
        (stage,), update = cases.build(case)
        update.begin_batch(BatchInfo(0, 2, 4))
        stage.load_version(0)
        stage.forward(Microbatch(0, 0, 0, 2), None)
        state = backend.device_rng_state()
        evaluated = []
        for _ in range(2):
            stage.evaluation_iterator = cases.evaluation_data(case, 0)
            stage.forward_only(Microbatch(0, EVALUATION_BATCH, 0, 1), None)
            evaluated.append(stage.take_losses(EVALUATION_BATCH)["lm loss"])
        result = {
            "evaluated": evaluated,
            "training_off": not stage.model.training,
            "generator": torch.equal(state, backend.device_rng_state()),
            "saved": len(stage.activations),
        }
        stage.forward(Microbatch(1, 0, 1, 2), None)
        result["training_on"] = stage.model.training
        result["count"] = stage.take_losses(0)["lm loss"][1]
        return result


def test_evaluation_leaves_no_trace(alone):
    """Evaluation has no dropout, saves nothing, and mixes nothing into the batch's losses."""
    result = alone["evaluation"]
    assert result["evaluated"][0] == result["evaluated"][1]
    assert result["training_off"] and result["training_on"] and result["generator"]
    assert (result["saved"], result["count"]) == (1, 2.0)


def refused_loss_shape() -> str:
    case = cases.Case(batches=(1,), layers=1)
    with cases.parallel(case):
        (stage,), update = cases.build(case)
        plain_step = cases.forward_step(case)

        def step(data_iterator, model):
            output, _ = plain_step(data_iterator, model)
            return output, lambda losses: (losses.mean(), {"lm loss": torch.zeros(3)})

        stage._forward_step = step
        update.begin_batch(BatchInfo(0, 1, 2))
        try:
            stage.forward(ONE, None)
        except ValueError as error:
            return str(error)
    return "accepted"


def test_a_loss_of_unknown_shape_is_refused(alone):
    """A reported tensor that is neither a scalar nor [sum, count] is an error that says so."""
    assert "3 elements" in alone["bad_loss"]
