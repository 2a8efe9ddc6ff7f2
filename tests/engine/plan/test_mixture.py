"""Mixtures: exact shares, all rows drawn once before any twice, numbers by source."""

import json
from itertools import pairwise

import numpy as np
import pytest

from engine.config.errors import UsageError
from engine.plan.row_order import example_ids, mixture_quotas
from tests.helpers import kit

ROWS = [100, 37, 5]
WEIGHTS = [None, [1, 1, 2], [0.2, 0.7, 0.1]]


def spread(drawn: np.ndarray) -> int:
    """Return by how many draws the rows of one source differ at most."""
    bounds = np.cumsum([0, *ROWS])
    counts = np.bincount(drawn, minlength=142)
    return max(int(np.ptp(counts[a:b])) for a, b in pairwise(bounds))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_all_rows_are_drawn_once_before_any_twice(weights):
    quotas = mixture_quotas(ROWS, weights)
    drawn = [example_ids(0, 142, 142, 7, epoch, quotas) for epoch in range(7)]
    assert spread(np.concatenate(drawn)) <= 1
    share = np.array(ROWS if weights is None else weights) / sum(ROWS if weights is None else weights)
    for ids in drawn:  # each epoch holds the quota of each source
        counts = np.histogram(ids, np.cumsum([0, *ROWS]))[0]
        assert counts.sum() == 142
        assert (abs(counts - 142 * share) < 1).all()


def test_mutant_that_draws_with_replacement():
    rng = np.random.default_rng(0)
    probabilities = np.concatenate([[w / 4 / n] * n for w, n in zip([1, 1, 2], ROWS, strict=True)])
    assert spread(rng.choice(142, 7 * 142, p=probabilities)) > 1


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two sources of rows of ids, and a run's flags without the mixture."""
    folder = tmp_path_factory.mktemp("sources")
    generator = np.random.default_rng(0)
    mixture = {}
    for name, low, weight, counts in (("low", 0, 1, (61, 13)), ("high", 25, 3, (30, 9))):
        mixture[name] = {"weight": weight}
        for split, count in zip(("train", "validation"), counts, strict=True):
            lengths, file = generator.integers(3, 12, count), folder / f"{name}_{split}.jsonl"
            kit.write_jsonl(file, [{"input_ids": generator.integers(low, low + 25, n).tolist()} for n in lengths])
            mixture[name][f"{split}_file"] = str(file)
    model = kit.write_yaml(folder / "exact.yaml", kit.EXACT)
    fields = {"model_config": model, "cache_dir": folder / "cache", "dtype": "float64", "global_batch_size": 8}
    fields |= {"per_device_batch_size": 4, "max_steps": 16, "logging_steps": 1, "eval_steps": 8, "learning_rate": 1e-2}
    return folder, kit.flags(**fields), mixture


def mixed(mixture) -> list[str]:
    return ["--mixture", json.dumps(mixture)]


@pytest.fixture(scope="module")
def one(sources, tmp_path_factory):
    _, fields, mixture = sources
    return kit.run_training(1, tmp_path_factory.mktemp("mixed") / "run", *fields, *mixed(mixture))


def test_numbers_do_not_depend_on_processes_or_a_token_budget(sources, one, tmp_path):
    folder, fields, mixture = sources
    with pytest.raises(UsageError, match="per_device_batch_tokens is 5, but the longest row has 11 tokens"):
        kit.open_data(model_config=folder / "exact.yaml", mixture=json.dumps(mixture), per_device_batch_tokens=5)
    budget = ["--per_device_batch_tokens", "23"]
    two = kit.run_training(2, tmp_path / "run", *fields, *mixed(mixture), *budget)
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert [line["weight"] for line in two.kind("train")] == [line["weight"] for line in one.kind("train")]
    assert kit.ledger_text(one.folder) == kit.ledger_text(two.folder)
    mixture = mixture | {"low": mixture["low"] | {"weight": 2}}
    other = ["--output_dir", two.folder, *budget]
    codes, [text] = kit.run_command("train.py", *fields, *mixed(mixture), *other, folder=tmp_path)
    assert codes == [2]
    assert "(data.rows: " in text


def test_lengths_are_those_of_the_rows(sources):
    folder, _, mixture = sources
    train_set = kit.open_data(model_config=folder / "exact.yaml", mixture=json.dumps(mixture))[1]["train"]
    ids = np.arange(91)[::-1]
    assert train_set.lengths[ids].tolist() == [len(row["input_ids"]) for row in train_set.rows(ids)]


def test_loss_of_each_source_equals_its_data_alone(sources, one, tmp_path):
    folder, fields, _ = sources
    line = one.kind("eval")[-1]
    for name, count in (("low", 13), ("high", 9)):
        given = [
            *kit.flags(model_name_or_path=one.folder / "final", validation_file=folder / f"{name}_validation.jsonl"),
            *fields[2:],
        ]
        alone = kit.run_evaluation(1, tmp_path / name, *given)
        assert line[f"{name}/examples"] == alone["examples"] == count
        for key in ("loss", "weight", "accuracy", "perplexity"):
            assert line[f"{name}/{key}"] == pytest.approx(alone[key], rel=1e-12)
    total = sum(line[f"{name}/loss"] * line[f"{name}/weight"] for name in ("low", "high"))
    assert line["loss"] == pytest.approx(total / line["weight"], rel=1e-12)
    assert line["loss"] != pytest.approx((line["low/loss"] + line["high/loss"]) / 2, rel=1e-6)  # the mean of means
    assert line["examples"] == 22


@pytest.mark.parametrize(
    "change, message",
    [
        ({"low": {"train_fil": "x"}}, "mixture: low: train_fil: unknown field; did you mean train_file?"),
        ({"low": {"weight": 1}}, "mixture: low: give .*train_file or dataset_name"),
        ({"low": {"train_file": "a.jsonl", "weight": -1}}, "low: weight: -1: .*greater than 0"),
        ({"lo/w": {"train_file": "a.jsonl", "weight": 1}}, r"mixture: 'lo/w': source names must be non-empty"),
        ({"low": {"train_file": "a.jsonl"}}, "give all sources a weight, or none"),
        ({"low": {"train_file": "a.jsonl", "weight": 1}}, "mixture: low: train_file: a.jsonl: no such file"),
    ],
)
def test_mixture_errors(sources, change, message):
    folder, _, mixture = sources
    with pytest.raises(UsageError, match=message):
        kit.open_data(model_config=folder / "exact.yaml", mixture=json.dumps(mixture | change))
