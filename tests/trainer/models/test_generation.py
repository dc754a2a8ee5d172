"""Sampling, and generation with kept keys and values against plain forwards."""

import pytest
import torch

from tests import workers

CASES = "tests.trainer.models.test_generation:"


def generate_both_ways(changes, prompt, num_tokens):
    """Greedy ids from the generator, and from a plain forward of the whole sequence for every token."""
    from megatron.core.utils import unwrap_model
    from megatron.trainer.models.generation import Sampling, TextGenerator
    from tests.trainer.checkpoint import small_run

    run = small_run.start(small_run.arguments(**changes))
    model = unwrap_model(run.chunks[0]).eval()
    generator = TextGenerator(model, num_positions=16, vocab_size=60, device=torch.device("cpu"))
    greedy = list(generator.stream(prompt, num_tokens, Sampling(temperature=0)))
    again = list(generator.stream(prompt, num_tokens, Sampling(temperature=0)))
    sampled = [list(generator.stream(prompt, 8, Sampling(), seed=seed)) for seed in (1, 1, 2)]
    sequence, start = list(prompt), 0
    with torch.no_grad():
        while len(sequence) < len(prompt) + num_tokens:
            if len(sequence) - start > 16:
                start = len(sequence) - 8
            ids = torch.tensor([sequence[start:]])
            length = ids.size(1)
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            sequence.append(int(model(ids, torch.arange(length).unsqueeze(0), mask)[0, -1, :60].argmax()))
    errors = []
    for wrong in ([], [1] * 17, [60], [3, -1]):
        try:
            next(generator.stream(wrong, 1, Sampling()))
        except ValueError as error:
            errors.append(str(error))
    small_run.finish()
    return greedy, again, sequence[len(prompt) :], sampled, errors


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "changes",
    [{}, {"position_embedding_type": "rope", "swiglu": True, "untie_embeddings_and_output_weights": True}],
    ids=["learned positions", "rotary positions"],
)
def test_greedy_generation_is_the_argmax_of_plain_forwards(changes):
    """Also beyond the last position, where the later half of the sequence is run anew; prompts that cannot be continued
    are refused with the reason."""
    arguments = {"changes": changes, "prompt": [5, 9, 2], "num_tokens": 24}
    ((greedy, again, plain, sampled, errors),) = workers.run(1, CASES + "generate_both_ways", **arguments)
    assert greedy == plain and again == greedy and len(greedy) == 24
    assert sampled[0] == sampled[1] != sampled[2]
    assert "no tokens" in errors[0] and "17 tokens" in errors[1] and "16 positions" in errors[1]
    assert "beyond the vocabulary of 60" in errors[2] and "token id -1, beyond" in errors[3]


def draw(logits, settings):
    """For each setting: how often each id comes in 2000 draws."""
    from megatron.trainer.models import generation

    generator = torch.Generator().manual_seed(0)
    results = []
    for setting in settings:
        draws = [generation.sample(logits, generation.Sampling(**setting), generator) for _ in range(2000)]
        results.append(torch.bincount(torch.tensor(draws), minlength=len(logits)) / 2000)
    return results


def refuse(settings):
    """The error of each setting."""
    from megatron.trainer.models.generation import Sampling

    errors = []
    for setting in settings:
        try:
            errors.append(str(Sampling(**setting)))
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_sampling_follows_the_restricted_distribution():
    """Temperature, top-k and top-p draw with the probabilities of their definitions."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    two, first = torch.tensor([0.625, 0.375, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    expected = [
        ({}, probabilities),
        ({"top_k": 2}, two),
        ({"top_p": 0.7}, two),
        ({"temperature": 0.5}, probabilities**2 / (probabilities**2).sum()),
        ({"temperature": 0}, first),
        ({"top_p": 0.01}, first),
    ]
    settings = [setting for setting, _ in expected]
    (frequencies,) = workers.run(1, CASES + "draw", logits=probabilities.log(), settings=settings)
    for (setting, wanted), found in zip(expected, frequencies, strict=True):
        assert (found - wanted).abs().max() < 0.04, setting


def test_senseless_sampling_is_refused():
    """The error names the setting."""
    temperatures = [-1.0, float("nan"), float("inf"), 1e-320]
    settings = [*({"temperature": each} for each in temperatures), {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
    (errors,) = workers.run(1, CASES + "refuse", settings=settings)
    for setting, error in zip(settings, errors, strict=True):
        name, value = next(iter(setting.items()))
        assert f"{name.replace('_', '-')} {value} must be" in error
