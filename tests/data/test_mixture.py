"""Mixtures: exact shares, all rows drawn once before any twice, numbers by source."""

import json
from itertools import pairwise

import numpy as np
import pytest

from src.config.errors import UsageError
from src.data import batch_plan
from src.data.batch_plan import PlanConfig, StepSizes, training_order
from src.data.row_order import example_ids, mixture_quotas
from tests.helpers import kit

ROWS = [100, 37, 5]
WEIGHTS = [None, [1, 1, 2], [0.2, 0.7, 0.1]]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_epoch_holds_the_quota_of_each_source(weights):
    quotas = mixture_quotas(ROWS, weights)
    assert sum(draws for _, draws in quotas) == sum(ROWS)
    share = [n / sum(ROWS) for n in ROWS] if weights is None else [w / sum(weights) for w in weights]
    assert all(abs(draws - s * sum(ROWS)) < 1 for (_, draws), s in zip(quotas, share, strict=True))
    bounds = np.cumsum([0, *ROWS])
    for epoch in range(4):
        ids = example_ids(0, 142, 142, 7, epoch, quotas)
        assert np.histogram(ids, bounds)[0].tolist() == [draws for _, draws in quotas]


def spread(drawn: np.ndarray) -> int:
    """Return by how many draws the rows of one source differ at most."""
    bounds = np.cumsum([0, *ROWS])
    counts = np.bincount(drawn, minlength=142)
    return max(int(np.ptp(counts[a:b])) for a, b in pairwise(bounds))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_all_rows_are_drawn_once_before_any_twice(weights):
    quotas = mixture_quotas(ROWS, weights)
    drawn = np.concatenate([example_ids(0, 142, 142, 7, epoch, quotas) for epoch in range(7)])
    assert spread(drawn) <= 1
    if weights is None:
        assert np.bincount(drawn).tolist() == [7] * 142


def test_mutant_that_draws_with_replacement():
    rng = np.random.default_rng(0)
    probabilities = np.concatenate([[w / 4 / n] * n for w, n in zip([1, 1, 2], ROWS, strict=True)])
    assert spread(rng.choice(142, 7 * 142, p=probabilities)) > 1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_mixture_ids_do_not_depend_on_the_split(weights):
    quotas = mixture_quotas(ROWS, weights)
    whole = [example_ids(s * 10, min(142, s * 10 + 10), 142, 3, 1, quotas).tolist() for s in range(15)]
    first = StepSizes(142, 10).per_epoch
    for world, micro, tokens in ((1, 10, None), (2, 3, None), (3, 4, 60)):
        lengths = np.arange(142) % 50 + 1
        seen = [[] for _ in range(15)]
        for rank in range(world):
            order = training_order(
                PlanConfig(142, 10, micro, 3, lengths, tokens, quotas), rank, world, first, first + 15
            )
            for item in order:
                seen[item.step - first] += [] if item.dummy else item.ids.tolist()
        assert [sorted(ids) for ids in seen] == [sorted(ids) for ids in whole]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two sources of rows of ids, one in a file and one in two, and a run's flags without the mixture."""
    folder = tmp_path_factory.mktemp("sources")
    generator = np.random.default_rng(0)
    for name, low, count in (
        ("low", 0, 61),
        ("high", 25, 22),
        ("high2", 25, 8),
        ("low_val", 0, 13),
        ("high_val", 25, 9),
    ):
        rows = [{"input_ids": generator.integers(low, low + 25, n).tolist()} for n in generator.integers(3, 12, count)]
        kit.write_jsonl(folder / f"{name}.jsonl", rows)
    model = kit.write_yaml(folder / "gpt2.yaml", kit.TINY)
    mixture = {
        "low": {"train_file": str(folder / "low.jsonl"), "validation_file": str(folder / "low_val.jsonl"), "weight": 1},
        "high": {"train_file": str(folder / "high*.jsonl"), "weight": 3},
    }
    mixture["high"]["train_file"] = [str(folder / "high.jsonl"), str(folder / "high2.jsonl")]
    mixture["high"]["validation_file"] = str(folder / "high_val.jsonl")
    fields = {"model_config": model, "cache_dir": folder / "cache", "dtype": "float64", "global_batch_size": 8}
    fields |= {"per_device_batch_size": 4, "max_steps": 16, "logging_steps": 1, "eval_steps": 8, "learning_rate": 1e-2}
    return folder, kit.flags(**fields), mixture


def mixed(mixture) -> list[str]:
    return ["--mixture", json.dumps(mixture)]


@pytest.fixture(scope="module")
def one(sources, tmp_path_factory):
    _, fields, mixture = sources
    return kit.run_training(1, tmp_path_factory.mktemp("mixed") / "run", *fields, *mixed(mixture))


def test_numbers_do_not_depend_on_processes(sources, one, tmp_path):
    _, fields, mixture = sources
    two = kit.run_training(2, tmp_path / "run", *fields, *mixed(mixture), "--per_device_batch_size", "3")
    assert kit.distance(one.weights, kit.run_training(2, tmp_path / "two", *fields, *mixed(mixture)).weights) <= 1e-10
    assert [line["weight"] for line in two.kind("train")] == [line["weight"] for line in one.kind("train")]
    assert kit.ledger_text(one.folder) == kit.ledger_text(two.folder)


def test_loss_of_each_source_equals_its_data_alone(sources, one, tmp_path):
    folder, fields, _ = sources
    line = one.kind("eval")[-1]
    for name, count in (("low", 13), ("high", 9)):
        given = [
            *kit.flags(model_name_or_path=one.folder / "final", validation_file=folder / f"{name}_val.jsonl"),
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


def test_mixture_resumes_bitwise_and_weights_are_fixed(sources, one, tmp_path):
    import shutil

    _, fields, mixture = sources
    shutil.copytree(one.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    first = kit.run_training(
        1, tmp_path / "run", *fields, *mixed(mixture), "--save_steps", "7", "--save_total_limit", "9"
    )
    for step in (14, 16):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:08}")
    again = kit.run_training(1, tmp_path / "run", *fields, *mixed(mixture), "--save_steps", "7")
    assert kit.same(again.weights, one.weights)
    assert kit.same(first.weights, one.weights)
    other = json.loads(json.dumps(mixture))
    other["low"]["weight"] = 2
    codes, texts = kit.run_command(
        "train.py", *fields, *mixed(other), "--output_dir", tmp_path / "run", folder=tmp_path
    )
    assert codes == [2]
    assert "(data.rows: " in texts[0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"low": 3}, "mixture: low: 3: .*dict"),
        ({"low": {"train_fil": "x"}}, "mixture: low: train_fil: unknown field; did you mean train_file?"),
        ({"low": {"weight": 1}}, "mixture: low: give .*train_file or dataset_name"),
        ({"low": {"train_file": "a.jsonl", "weight": -1}}, "low: weight: -1: .*greater than 0"),
        ({"low": {"train_file": "a.jsonl", "weight": 1e308}}, "low: weight: 1e\\+308: "),
        ({"low": {"train_file": "a.jsonl", "weight": "2024-01-01"}}, "low: weight: '2024-01-01': .*number"),
        (
            {"low": {"train_file": "a.jsonl", "dataset_config_name": "x", "weight": 1}},
            "low: dataset_config_name is given without dataset_name",
        ),
        ({"lo\nw": {"train_file": "a.jsonl", "weight": 1}}, r"mixture: 'lo\\nw': source names must be non-empty"),
        ({"low": {"train_file": "a.jsonl"}}, "give all sources a weight, or none"),
        ({"low": {"train_file": [1], "weight": 1}}, "mixture: low: train_file: 0: 1: "),
        (
            {"low": {"train_file": "nowhere.jsonl", "weight": 1}},
            "mixture: low: train_file: nowhere.jsonl: no such file",
        ),
    ],
)
def test_mixture_errors(sources, change, message):
    folder, _, mixture = sources
    with pytest.raises(UsageError, match=message):
        kit.open_data(model_config=folder / "gpt2.yaml", mixture=json.dumps(mixture | change))


# ---- the token budget --------------------------------------------------------------------------------------------------


def test_split_by_tokens_is_optimal():
    """Against all cuts of ten rows."""
    from itertools import combinations

    rng = np.random.default_rng(2)
    for tokens in (40, 64, 100):
        long = -np.sort(-rng.integers(1, 40, 10))
        overhead = max(1, int(tokens * batch_plan.OVERHEAD))

        def cost(bounds, long=long, tokens=tokens, overhead=overhead):
            areas = [int(long[a]) * (b - a) for a, b in pairwise(bounds)]
            return sum(areas) + overhead * len(areas) if max(areas) <= tokens else float("inf")

        every = [[0, *inner, 10] for k in range(10) for inner in combinations(range(1, 10), k)]
        assert cost(batch_plan.split_by_tokens(long, tokens)) == min(map(cost, every))


def test_token_budget_and_rows_longer_than_it(sources, one, tmp_path):
    folder, fields, mixture = sources
    with pytest.raises(UsageError, match="per_device_batch_tokens is 5, but the longest row has 11 tokens"):
        kit.open_data(model_config=folder / "gpt2.yaml", mixture=json.dumps(mixture), per_device_batch_tokens=5)
    plain = [*fields[2:], "--model_config", kit.write_yaml(tmp_path / "exact.yaml", kit.EXACT), *mixed(mixture)]
    rows = kit.run_training(1, tmp_path / "rows", *plain)
    for world, tokens in ((1, 40), (2, 23)):
        run = kit.run_training(world, tmp_path / f"{tokens}", *plain, "--per_device_batch_tokens", tokens)
        assert kit.distance(rows.weights, run.weights) <= 1e-10
        assert kit.ledger_text(run.folder) == kit.ledger_text(rows.folder)
