"""ROUGE for the `evaluate` library: the means of rouge_score's F-measures, without its random bootstrap.

Needs rouge_score (requirements-extra.txt). Its words are the letters a to z and digits, stemmed as in English: use
another metric for other languages. Tests: tests/addons/metrics/test_evaluate.py.
"""

import math

import datasets

import evaluate

KINDS = ["rouge1", "rouge2", "rougeL", "rougeLsum"]  # rougeLsum: by line


class Rouge(evaluate.Metric):
    """The mean F-measures of common words, word pairs, and longest common subsequences of texts and of lines."""

    def _info(self):
        from rouge_score.rouge_scorer import RougeScorer

        self.scorer = RougeScorer(KINDS, use_stemmer=True)
        features = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="texts", features=features)

    def _compute(self, predictions, references):
        # rouge_score's own aggregator draws samples, so its result would differ from call to call.
        scores = [self.scorer.score(target, text) for text, target in zip(predictions, references, strict=True)]
        return {kind: math.fsum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS}
