"""Options of the cross-entropy and R-Drop: equal to torch and to the formulas of the papers, and for every split."""

import pytest
import torch
import torch.nn.functional as F

from engine.config.errors import UsageError
from src.losses.chunked_cross_entropy import sums_from_logits
from src.losses.cross_entropy import ClassCrossEntropy, CrossEntropy, r_drop_sums
from tests.conformance import recipes
from tests.helpers import kit, technique_runs
from tests.helpers.losses import TEXTS, check_balanced_weights, linear_sums
from tests.src.losses import test_chunked_cross_entropy as chunked
from tests.src.losses.test_chunked_cross_entropy import VOCABULARY, difference, make, plain

OPTIONS = {"label_smoothing_factor": 0.2, "z_loss": 0.03, "focal_gamma": 0.5}
small_chunks = pytest.fixture(autouse=True)(chunked.small_chunks.__wrapped__)


def by_hand(logits, targets, class_weights=None):
    """Return the loss of each target with OPTIONS, from the soft distribution q as the papers write it."""
    real = targets != -100
    weights = torch.ones(logits.shape[-1], dtype=logits.dtype) if class_weights is None else class_weights
    one_hot = F.one_hot(targets.clamp(min=0), logits.shape[-1]).to(logits.dtype)
    q = 0.8 * one_hot + 0.2 / logits.shape[-1]
    p = logits.softmax(-1)
    focal = (q * weights * (1 - p) ** 0.5 * -p.log()).sum(-1)
    return (focal + 0.03 * weights[targets.clamp(min=0)] * logits.exp().sum(-1).log() ** 2)[real].sum()


# ---- one formula -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_smoothing_and_class_weights_equal_torch(weighted):
    class_weights = torch.rand(VOCABULARY, dtype=torch.float64) if weighted else None
    given = [repr(value) for value in class_weights.tolist()] if weighted else []
    smoothed = ClassCrossEntropy(label_smoothing_factor=0.3, class_weights=given)
    options = ClassCrossEntropy(**OPTIONS, class_weights=given)

    def on_logits(loss):
        return lambda hidden, weight, bias, targets: loss(F.linear(hidden, weight, bias), targets)

    def of_torch(logits, targets):
        return F.cross_entropy(logits, targets, class_weights, reduction="sum", label_smoothing=0.3)

    def mutant(logits, targets):
        """Smooths ignored targets, too."""
        return 0.7 * F.cross_entropy(logits, targets, reduction="sum") - 0.3 * logits.log_softmax(-1).mean(-1).sum()

    for loss, expected in ((smoothed, of_torch), (options, lambda *given: by_hand(*given, class_weights))):
        ours = on_logits(lambda *given, loss=loss: loss.sums(*given)["loss"])
        assert difference(ours, *make(50), expected=on_logits(expected)) <= 1e-12
    assert difference(on_logits(mutant), *make(50), expected=on_logits(of_torch)) > 1e-3


def test_further_sums_and_gradients_at_the_bounds():
    arguments, options = make(50), CrossEntropy(**OPTIONS)
    sums, logits = linear_sums(*arguments, options), F.linear(*arguments[:3])
    assert sums["cross_entropy"].item() == pytest.approx(plain(*arguments).item(), rel=1e-12)
    z_loss = logits.logsumexp(-1)[arguments[3] != -100].square().sum().item()
    assert sums["z_loss"].item() == pytest.approx(z_loss, rel=1e-12)
    logits = torch.tensor([[200.0, 0, 0], [-200, 0, 0]], requires_grad=True)  # probabilities rounded to one and zero
    options.sums(logits, torch.tensor([0, 0]))["loss"].backward()
    assert logits.grad.isfinite().all()


def test_r_drop_is_the_loss_of_its_authors():
    one, other = torch.randn(2, 5, 3, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 1, 0])
    entropy = sum(F.cross_entropy(logits, labels, reduction="sum") for logits in (one, other))
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    kl = [F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p))]
    loss = r_drop_sums({"loss": entropy}, torch.cat([one, other]), 2.0)["loss"]
    assert abs(loss - entropy / 2 - 2.0 * sum(kl) / 2) <= 1e-12


# ---- class weights ---------------------------------------------------------------------------------------------------


def test_mean_with_class_weights_is_that_of_torch():
    """The weight of a batch is the sum of its class weights; the mutant divides by the rows."""
    targets, logits = torch.tensor([0, 2, -100, 2, 1]), torch.randn(5, 3, dtype=torch.float64)
    options = ClassCrossEntropy(class_weights=["1", "0.5", "3"])
    weight = options.weigh(True, targets.numpy())
    loss = sums_from_logits(logits, targets, True, options)["loss"]
    expected = F.cross_entropy(logits, targets, torch.tensor([1, 0.5, 3], dtype=torch.float64)).item()
    assert (loss / weight).item() == pytest.approx(expected, rel=1e-14)
    assert (loss / 4).item() != pytest.approx(expected, rel=1e-2)
    assert options.weigh(False, targets.numpy()) == 4


@pytest.mark.parametrize("weights", [["1", "-1"], ["0", "0"], ["1"]])
def test_invalid_class_weights_are_named(weights):
    with pytest.raises(UsageError, match=rf"class_weights is {', '.join(weights)}, .* a, b"):
        ClassCrossEntropy(class_weights=weights).set_classes(["a", "b"])


def test_balanced_weights_are_those_of_scikit_learn(tmp_path):
    rows = [{"text": text, "label": text[0]} for text in TEXTS]
    check_balanced_weights(tmp_path, "text_classification", rows, [row["label"] for row in rows])


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_language_model_equals_a_plain_loop_for_every_split(tmp_path):
    values = technique_runs.files(tmp_path) | OPTIONS
    loop = technique_runs.Plain(values)
    targets = loop.batch.inputs["targets"].flatten()

    def loss():
        logits = loop.model(input_ids=loop.batch.inputs["input_ids"]).logits.flatten(0, 1)
        return by_hand(logits, targets) / (targets != -100).sum()

    loop.loss = loss
    run = technique_runs.check_splits(tmp_path, values, loop.descend(loop.optimizer()))
    line = run.kind("train")[-1]
    assert line["cross_entropy"] < line["loss"]
    assert line["z_loss"] > 0
    assert "z_loss" not in run.kind("eval")[-1]


def test_evaluation_is_the_plain_cross_entropy(tmp_path):
    fields = technique_runs.files(tmp_path) | {"max_steps": 1, "learning_rate": 0}
    one, other = (technique_runs.train(tmp_path / str(i), fields | more) for i, more in enumerate(({}, OPTIONS)))
    assert one.kind("eval")[-1]["loss"] == other.kind("eval")[-1]["loss"]
    assert one.losses() != other.losses()


def test_r_drop_with_balanced_classes_is_exact_for_every_split(tmp_path):
    kit.need_task("text_classification")
    argv = recipes.text_classification(tmp_path)
    dropout = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    kit.write_yaml(tmp_path / "model.yaml", recipes.BERT | dropout)
    argv += kit.flags(train_file=tmp_path / "train.jsonl", dtype="float64", global_batch_size=16, max_steps=5)
    argv += kit.flags(per_device_batch_size=4, logging_steps=1, class_weights="balanced", r_drop_alpha=2.0)
    one, two = (kit.run_training(world, tmp_path / f"{world}", *argv) for world in (1, 2))
    assert kit.distance(one.weights, two.weights) <= 1e-10
    assert two.kind("train")[-1]["r_drop"] > 0
