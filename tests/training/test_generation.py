"""Sampling, and generation with kept keys and values against plain forwards."""

import pytest
import torch

from tests import workers

CASES = "tests.training.test_generation:"


def generate_both_ways(changes, prompt, num_tokens):
    """Greedy ids from the generator, and from a plain forward of the whole sequence for every token."""
    from megatron.training.checkpoint.state import unwrap
    from megatron.training.generation import Sampling, TextGenerator
    from tests.training import small_run

    run = small_run.start(small_run.arguments(**changes))
    model = unwrap(run.chunks[0]).eval()
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
    for wrong in ([], [1] * 17, [60]):
        try:
            next(generator.stream(wrong, 1, Sampling()))
        except ValueError as error:
            errors.append(str(error))
    small_run.finish()
    return greedy, again, sequence[len(prompt) :], sampled, errors


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
    assert "beyond the vocabulary of 60" in errors[2]


@pytest.fixture(scope="module")
def generation():
    from megatron import backend

    backend.install()
    from megatron.training import generation

    return generation


def frequencies(generation, logits, **sampling):
    generator = torch.Generator().manual_seed(0)
    draws = [generation.sample(logits, generation.Sampling(**sampling), generator) for _ in range(2000)]
    return torch.bincount(torch.tensor(draws), minlength=len(logits)) / 2000


def test_sampling_follows_the_restricted_distribution(generation):
    """Temperature, top-k and top-p draw with the probabilities of their definitions."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log()
    close = {"atol": 0.04, "rtol": 0}
    torch.testing.assert_close(frequencies(generation, logits), probabilities, **close)
    top = torch.tensor([0.625, 0.375, 0.0, 0.0])
    torch.testing.assert_close(frequencies(generation, logits, top_k=2), top, **close)
    torch.testing.assert_close(frequencies(generation, logits, top_p=0.7), top, **close)
    squared = probabilities**2 / (probabilities**2).sum()
    torch.testing.assert_close(frequencies(generation, logits, temperature=0.5), squared, **close)
    assert frequencies(generation, logits, temperature=0)[0] == 1
    assert frequencies(generation, logits, top_p=0.01)[0] == 1


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}])
def test_senseless_sampling_is_refused(generation, wrong):
    """The error names the setting."""
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("_", "-")):
        generation.Sampling(**wrong)
