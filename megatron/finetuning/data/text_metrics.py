"""Metrics over texts: each compares generated texts with one reference each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class TextMetric:
    """A row of the table of metrics.

    Attributes:
        names: the names of the values.
        compute: (generated texts, references) -> value by name.
        package: the package that has the metric; None: it needs none.
    """

    names: tuple[str, ...]
    compute: Callable[[Sequence[str], Sequence[str]], dict[str, float]]
    package: str | None = None


def _exact_match(generated: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The share of texts that equal their references, apart from white space around them."""
    right = sum(one.strip() == other.strip() for one, other in zip(generated, references, strict=True))
    return {"generated_exact_match": right / len(references)}


def _rouge(generated: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The means of ROUGE's F-measures, from 0 to 1, with words stemmed as transformers' examples do."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(ROUGE, use_stemmer=True)
    scores = [scorer.score(other, one) for one, other in zip(generated, references, strict=True)]
    return {name: sum(each[name].fmeasure for each in scores) / len(scores) for name in ROUGE}


def _bleu(generated: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """BLEU of all texts together, from 0 to 100."""
    import sacrebleu

    return {"bleu": sacrebleu.corpus_bleu(generated, [references]).score}


def _chrf(generated: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """chrF of all texts together, from 0 to 100."""
    import sacrebleu

    return {"chrf": sacrebleu.corpus_chrf(generated, [references]).score}


TEXT_METRICS = {
    "exact_match": TextMetric(("generated_exact_match",), _exact_match),
    "rouge": TextMetric(ROUGE, _rouge, "rouge_score"),
    "bleu": TextMetric(("bleu",), _bleu, "sacrebleu"),
    "chrf": TextMetric(("chrf",), _chrf, "sacrebleu"),
}
"""Word of --generation_metrics -> its metric."""
