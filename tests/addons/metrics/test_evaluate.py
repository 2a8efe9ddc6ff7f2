"""Metrics of the `evaluate` library: shipped ones, scripts only with opt-in, no code of a file with a known name."""

import pytest

from addons.metrics.evaluate import load_metric
from engine.config.errors import UsageError
from src.losses.metrics import check_metrics, compute_metrics

OWN_METRIC = """
import datasets
import evaluate


class FirstLetters(evaluate.Metric):
    def _info(self):
        features = datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references, strict=True))
        return {"first_letters": sum(one[0] == other[0] for one, other in pairs) / len(pairs)}
"""


def test_only_shipped_metrics_run_without_opt_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "executed"
    for folder in ("rouge", "accuracy"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    script = tmp_path / "rouge"
    names = [
        str(script),
        str(script / "rouge.py"),
        "./rouge",
        "accuracy",
        "../evaluate/rouge",
        "rouge.py",
        "",
        "__init__",
    ]
    for name in names:
        with pytest.raises(UsageError, match=r"metrics.*trust_remote_code"):
            check_metrics([name], False)
    with pytest.raises(UsageError, match=r"metrics: accuracy.*\./accuracy"):  # the Hub's is meant, or this one?
        load_metric("accuracy", True)
    assert not marker.exists()


def test_metric_script_runs_with_opt_in(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_METRIC)
    names = ["exact_match", str(tmp_path / "mine.py")]
    expected = {"exact_match": 0.5, "first_letters": 1.0}
    assert compute_metrics(names, ["a b", "c"], ["a b", "cd"], True) == expected
    with pytest.raises(UsageError, match=r"metrics.*trust_remote_code"):
        compute_metrics(names, ["a b", "c"], ["a b", "cd"], False)


@pytest.mark.cluster  # needs an extra package
def test_rouge_is_the_mean_of_f_measures():
    pytest.importorskip("rouge_score")
    texts, references = ["the cat sat", "nothing"], ["the cats sat down", "something else"]
    once = compute_metrics(["rouge", "exact_match"], texts, references, False)
    assert once == compute_metrics(["rouge", "exact_match"], texts, references, False)
    assert once["rouge1"] == pytest.approx(2 * 3 / (3 + 4) / 2)
    assert once["rouge2"] == pytest.approx(2 * 2 / (2 + 3) / 2)
    assert once["rougeL"] == once["rougeLsum"] == once["rouge1"]
