"""Cross-entropy in chunks: equal to the plain formula in value and gradient, and never more than a chunk of logits in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from src.models import losses

VOCABULARY, FEATURES, CHUNK = 37, 11, 16  # 16 rows is the smallest chunk there is


@pytest.fixture(params=["torch", "own"])
def path(request, monkeypatch):
    """Both implementations: the one of the installed torch, and ours for a torch without it."""
    monkeypatch.setitem(losses.CHUNK_ELEMENTS, "cpu", 1)
    if request.param == "own":
        monkeypatch.delattr(F, "linear_cross_entropy")
    return request.param


def make(rows, dtype=torch.float64, bias=True, ignored=0.3, vocabulary=VOCABULARY, features=FEATURES):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, features, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, features, generator=generator, dtype=dtype, requires_grad=True)
    offset = torch.randn(vocabulary, generator=generator, dtype=dtype, requires_grad=True) if bias else None
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = -100
    return hidden, weight, offset, targets


def plain(hidden, weight, bias, targets):
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum")


def with_gradients(function, hidden, weight, bias, targets):
    loss = function(hidden, weight, bias, targets)
    wanted = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    return [loss.detach(), *torch.autograd.grad(0.37 * loss, wanted)]  # the loop scales the loss before backward


def difference(function, *arguments):
    ours, reference = with_gradients(function, *arguments), with_gradients(plain, *arguments)
    return max((a - b).abs().max().item() for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 50])
def test_loss_and_gradients_equal_the_plain_formula(path, rows, bias):
    assert difference(losses.linear_cross_entropy, *make(rows, bias=bias)) <= 1e-10


def test_mutant_mean_of_chunk_means_is_caught(path):
    def mutant(hidden, weight, bias, targets):
        parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        means = [F.cross_entropy(F.linear(h, weight, bias), t) for h, t in parts]
        return torch.stack(means).mean() * (targets != -100).sum()

    assert difference(mutant, *make(50)) > 1e-3


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_hidden_or_weight(path, frozen):
    arguments = make(50)
    arguments[frozen].requires_grad_(False)
    assert difference(losses.linear_cross_entropy, *arguments) <= 1e-10


@pytest.mark.parametrize("rows", [0, 5, 50])
def test_nothing_to_predict_is_zero_with_zero_gradients(path, rows):
    arguments = make(rows, ignored=1.1)
    assert all((x == 0).all() for x in with_gradients(losses.linear_cross_entropy, *arguments))
    assert [x.item() for x in losses.linear_scores(*arguments)] == [0, 0]


@pytest.mark.parametrize("rows", [1, CHUNK, 50])
def test_scores_equal_the_plain_formula(path, rows):
    hidden, weight, bias, targets = make(rows)
    loss, correct = losses.linear_scores(hidden, weight, bias, targets)
    logits = F.linear(hidden, weight, bias)
    assert loss.item() == pytest.approx(plain(hidden, weight, bias, targets).item(), rel=1e-12)
    assert correct.item() == sum(row.argmax() == t for row, t in zip(logits, targets, strict=True) if t != -100)
    assert loss.dtype == correct.dtype == torch.float64


@pytest.mark.parametrize("rows", [CHUNK, 50])
@pytest.mark.parametrize("form", ["autocast", "weights"])
def test_under_bfloat16_the_sum_is_float32(path, rows, form):
    arguments = make(rows, torch.float32 if form == "autocast" else torch.bfloat16, ignored=0)
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        loss, *gradients = with_gradients(losses.linear_cross_entropy, *arguments)
        scored, _ = losses.linear_scores(*arguments)
    assert loss.dtype == torch.float32
    assert [g.dtype for g in gradients] == [x.dtype for x in arguments[:3]]
    # A sum kept in bfloat16 would be a multiple of 1 or 2 here, off by more than rounding the logits is.
    exact = with_gradients(plain, *[x.double() if x.is_floating_point() else x for x in arguments])
    assert loss.item() == pytest.approx(exact[0].item(), rel=5e-3)
    assert scored.item() == pytest.approx(loss.item(), rel=1e-5)
    for got, expected in zip(gradients, exact[1:], strict=True):
        assert (got - expected).abs().max() <= 0.03 * expected.abs().max()


# ---- memory ----------------------------------------------------------------------------------------------------------

ROWS, WIDE = 1024, 4096


def memory(work) -> tuple[int, int]:
    """Return (largest allocation, most bytes alive at once) of `work`, from the allocator, whatever allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    sizes = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = torch.tensor(sizes).cumsum(0)
    return max(sizes), alive.max().item()


def bounded(work, inputs, chunks: int = 4) -> bool:
    """Whether `work` stays within its inputs' gradients (twice: new and added up) and a few chunks of logits; 1 % is for alignment."""
    chunk = CHUNK * WIDE * 4
    gradients = sum(x.numel() * x.element_size() for x in inputs)
    largest, peak = memory(work)
    assert peak > chunk  # the profiler sees what happens inside
    return largest <= 1.01 * max(chunk, gradients) and peak <= 2 * gradients + chunks * chunk


@pytest.mark.parametrize("low", [False, True])
def test_memory_is_bounded_by_the_chunk(path, low):
    hidden, weight, bias, targets = make(ROWS, torch.float32, vocabulary=WIDE, features=8)
    inputs = (hidden, weight, bias)

    def training(function=losses.linear_cross_entropy):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = function(*inputs, targets)
        loss.backward()

    assert bounded(training, inputs)
    assert not bounded(lambda: training(plain), inputs)  # the mutant
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        assert bounded(lambda: losses.linear_scores(*inputs, targets), inputs)
        assert not bounded(lambda: losses.scores(F.linear(*inputs), targets), inputs)  # the mutant


def test_chunks_follow_the_vocabulary():
    rows = {v: losses.chunk_rows("cpu", v) for v in (50, 4096, 128_256, 1 << 24)}
    assert rows[4096] == 1024
    assert all(n * v <= losses.CHUNK_ELEMENTS["cpu"] for v, n in rows.items() if n > CHUNK)
    assert rows[1 << 24] == CHUNK  # never a matrix product of a few rows
