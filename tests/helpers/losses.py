"""Checks that tests of losses share: a linear head, allocations, weights of classes."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from src.losses import chunked_cross_entropy
from src.losses.cross_entropy import PLAIN
from tests.conformance import recipes
from tests.helpers import kit

TEXTS = ["a cat", "a red cat", "no fox", "a mat"]


def linear_sums(hidden, weight, bias, targets, options=PLAIN, training=True):
    """Return the sums of a linear head with these parameters."""
    scored = chunked_cross_entropy.Scored(hidden, SimpleNamespace(weight=weight, bias=bias))
    return chunked_cross_entropy.sums_from_scored(scored, targets, training, options)


def allocations(work) -> list[int]:
    """Return the bytes of each allocation of `work`, negative where they are freed, from the allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    return [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]


def check_balanced_weights(tmp_path, task: str, rows: list[dict], given: list[str]) -> None:
    """Assert that `class_weights: balanced` counts the labels `given` of the rows."""
    kit.need_task(task)
    opened, splits = kit.open_data(
        task=task,
        train_file=kit.write_jsonl(tmp_path / "rows.jsonl", rows),
        model_config=kit.write_yaml(tmp_path / "bert.yaml", recipes.BERT),
        tokenizer_name=kit.tiny_tokenizer(tmp_path / "tokenizer", [recipes.SENTENCE]),
        class_weights="balanced",
    )
    counts = np.array([given.count(label) for label in opened.labels])
    weights = [float(value) for value in opened.options.class_weights]
    assert weights == pytest.approx(len(given) / (len(counts) * counts), rel=1e-15)
    batch = opened.collate(splits["train"].rows(np.arange(4)), True)
    assert batch.weight == pytest.approx(len(given), rel=1e-15)  # so the loss keeps its scale
