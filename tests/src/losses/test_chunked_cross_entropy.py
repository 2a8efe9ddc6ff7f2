"""Cross-entropy in chunks: equal to the plain formula in value and gradient, three matrix products, bounded memory."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from engine.models.compile_and_recompute import CompiledOnAccelerators
from src.losses import chunked_cross_entropy
from src.losses.chunked_cross_entropy import positions_of_targets
from src.losses.cross_entropy import PLAIN, CrossEntropy
from tests.helpers.losses import allocations, linear_sums

VOCABULARY, FEATURES, CHUNK = 37, 11, 16  # 16 rows is the smallest chunk there is
ALL_OPTIONS = CrossEntropy(label_smoothing_factor=0.2, z_loss=0.03, focal_gamma=0.5)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setitem(chunked_cross_entropy.CHUNK_ELEMENTS, "cpu", 1)
    monkeypatch.setattr(chunked_cross_entropy, "MIN_ROWS_BY_FORMULA", CHUNK)


def make(rows, dtype=torch.float64, bias=True, ignored=0.3, vocabulary=VOCABULARY, features=FEATURES, scale=1):
    """Return random (hidden, weight, bias, targets) of a linear head. At scale 300, exp(logits) is infinite or 0."""
    generator = torch.Generator().manual_seed(rows)
    values = {"generator": generator, "dtype": dtype, "requires_grad": True}
    hidden, weight = (torch.randn(size, features, **values) for size in (rows, vocabulary))
    hidden = (scale * hidden).detach().requires_grad_()
    offset = torch.randn(vocabulary, **values) if bias else None
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = -100
    return hidden, weight, offset, targets


def ours(*arguments):
    return linear_sums(*arguments)["loss"]


def scores(*arguments):
    """Return (loss, correct predictions) of an evaluation."""
    return linear_sums(*arguments, PLAIN, False).values()


def plain(hidden, weight, bias, targets):
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum")


def with_gradients(function, hidden, weight, bias, targets):
    loss = function(hidden, weight, bias, targets)
    inputs = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    return [loss.detach(), *torch.autograd.grad(0.37 * loss, inputs)]  # the loop scales the loss before backward


def mean_of_means(hidden, weight, bias, targets):
    """The mutant: the mean of the means of chunks."""
    parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    means = [F.cross_entropy(F.linear(h, weight, bias), t) for h, t in parts]
    return torch.stack(means).mean() * (targets != -100).sum()


def difference(function, *arguments, expected=plain):
    """Return the largest difference of two losses and their gradients."""
    pairs = zip(with_gradients(function, *arguments), with_gradients(expected, *arguments), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs if a.numel())


@pytest.mark.parametrize("rows", [0, 1, CHUNK, CHUNK + 1, 50])
def test_loss_gradients_and_scores_equal_the_plain_formula(small_chunks, rows):
    for options in ({}, {"bias": False}, {"ignored": 1.1}, {"scale": 300}):
        assert difference(ours, *make(rows, **options)) <= 1e-10
    for frozen in (0, 1):
        arguments = make(rows)
        arguments[frozen].requires_grad_(False)
        assert difference(ours, *arguments) <= 1e-10
    loss, correct = scores(*arguments)
    logits, targets = F.linear(*arguments[:3]), arguments[3]
    assert loss.item() == pytest.approx(plain(*arguments).item(), rel=1e-12)
    assert correct.item() == (logits.argmax(-1) == targets).sum()
    assert rows < 50 or difference(mean_of_means, *make(rows)) > 1e-3


@pytest.mark.parametrize("ignored", [0.5, 1.1])
def test_positions_without_a_target_cost_no_products(small_chunks, ignored):
    """Padding and prompts. With nearly all targets, picking rows would cost more than it saves."""
    hidden, weight, bias, targets = make(50, ignored=ignored)
    positions = torch.from_numpy(positions_of_targets(targets.numpy())["target_positions"])
    assert positions.tolist() == [i for i, target in enumerate(targets.tolist()) if target != -100]

    def picked(hidden, weight, bias, targets):
        head = SimpleNamespace(weight=weight, bias=bias)
        scored = chunked_cross_entropy.Scored(hidden, head)
        return chunked_cross_entropy.sums_from_scored(scored, targets, True, positions=positions)["loss"]

    assert difference(picked, hidden, weight, bias, targets) <= 1e-10
    share = len(positions) / 50
    assert products(picked, hidden, weight, bias, targets) <= 3.1 * share
    assert products(ours, hidden, weight, bias, targets) > 2.9 * share + 0.5  # the mutant
    assert not positions_of_targets(make(50, ignored=0)[3].numpy())


# ---- precision and number of operations ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["autocast", "autocast of hidden states", "weights"])
def test_under_bfloat16_the_sum_is_float32(small_chunks, form):
    arguments = list(make(50, torch.bfloat16 if form == "weights" else torch.float32, ignored=0))
    if form == "autocast of hidden states":
        arguments[0] = arguments[0].detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=form != "weights"):
        loss, *gradients = with_gradients(ours, *arguments)
        score, _ = scores(*arguments)
    assert [x.dtype for x in (loss, *gradients)] == [torch.float32, *(x.dtype for x in arguments[:3])]
    # A sum kept in bfloat16 would be a multiple of 1 or 2 here, off by more than rounding the logits is.
    exact = plain(*[x.double() if x.is_floating_point() else x for x in arguments]).item()
    assert loss.item() == pytest.approx(exact, rel=5e-3)
    assert score.item() == pytest.approx(loss.item(), rel=1e-5)


def recomputed_in_chunks(hidden, weight, bias, targets):
    """The mutant: recomputes the logits of each chunk, and adds the gradients of the head in 16 bits under autocast."""
    rows = chunked_cross_entropy.chunk_rows("cpu", weight.shape[0])
    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return sum(chunked_cross_entropy.recomputed(lambda h, t: plain(h, weight, bias, t), h, t) for h, t in parts)


@pytest.mark.parametrize("options", [PLAIN, pytest.param(ALL_OPTIONS, marks=pytest.mark.cluster)])
def test_head_gradient_under_bfloat16_is_as_exact_as_one_product(options):
    hidden, weight, _, targets = make(4088, torch.float32, ignored=0, vocabulary=8_192, features=16)
    weight = weight.detach().mul(0.02).requires_grad_()

    def full(hidden, weight, bias, targets):
        return options.sums(F.linear(hidden, weight).float(), targets)["loss"]

    def head_gradient(function, low: bool):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = function(hidden, weight, None, targets)
        return torch.autograd.grad(loss, weight)[0]

    exact = head_gradient(full, low=False)
    functions = (full, lambda *given: ours(*given, options), recomputed_in_chunks)
    product, chunks, mutant = ((head_gradient(f, low=True) - exact).norm() / exact.norm() for f in functions)
    assert chunks <= 1.1 * product
    assert mutant > 1.1 * product


def test_the_loss_scale_of_float16_reaches_the_gradient_of_each_chunk(small_chunks):
    """A probability of 1 - 7e-8: float16 holds 65,536 times its gradient, but not the gradient."""
    _, _, _, targets = make(50, ignored=0)
    weight = torch.eye(VOCABULARY, requires_grad=True)
    hidden = (20 * torch.eye(VOCABULARY)[targets]).requires_grad_()

    def gradients(function, low):
        with torch.autocast("cpu", torch.float16, enabled=low):
            loss = function(hidden, weight, None, targets)
        return torch.autograd.grad(65_536 * loss, (hidden, weight))

    def error(function):
        pairs = zip(gradients(function, True), gradients(plain, False), strict=True)
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    def mutant(hidden, weight, bias, targets):
        return chunked_cross_entropy._sums_by_chunk(CHUNK, hidden, targets, weight, bias, PLAIN, True)["loss"]

    assert error(ours) <= 0.1
    assert error(mutant) > 0.9


def products(function, *arguments) -> float:
    """Return the operations of a forward and backward pass, in matrix products of the head."""
    with FlopCounterMode(display=False) as counter:
        function(*arguments).backward()
    hidden, weight = arguments[:2]
    return counter.get_total_flops() / (2 * hidden.shape[0] * weight.numel())


@pytest.mark.parametrize("low", [False, True])
def test_three_matrix_products(small_chunks, low):
    arguments = make(50, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        assert products(ours, *arguments) <= 3.1
        assert products(recomputed_in_chunks, *arguments) >= 3.9  # the mutant
        assert products(lambda *given: ours(*given, ALL_OPTIONS), *arguments) <= 3.1
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            scores(*arguments)
    assert counter.get_total_flops() == 2 * 50 * arguments[1].numel()


# ---- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.cluster  # needs a C++ compiler
def test_compiled_once_for_any_number_of_rows():
    """inductor on a CPU: the function that accelerators run, by the same path."""
    from torch._dynamo.utils import counters

    compiled = CompiledOnAccelerators(chunked_cross_entropy._sums_of_rows.function, uncompiled_devices=())
    before = counters["stats"]["unique_graphs"]

    def loss(hidden, weight, bias, targets):
        arguments = (hidden * 1, targets, weight, bias, PLAIN, True)
        assert compiled.compiles(*arguments)
        return compiled(*arguments)["loss"]

    with torch.compiler.set_stance("force_eager"):  # as in an evaluation of compiled layers
        for rows in (50, 0, 1, 300):
            pairs = zip(*(with_gradients(each, *make(rows, torch.float32)) for each in (loss, plain)), strict=True)
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)
    assert counters["stats"]["unique_graphs"] - before == 1


def test_where_compilation_fails_the_loss_is_eager_after_one_warning(capsys, tmp_path, monkeypatch):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    function = chunked_cross_entropy._sums_of_rows.function
    compiled = CompiledOnAccelerators(lambda *given: function(*given), uncompiled_devices=())
    hidden, weight, bias, targets = make(50)
    arguments = (hidden, targets, weight, bias, CrossEntropy(), True)
    with config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        assert not compiled.compiles(*arguments)
        assert not compiled.compiles(*arguments)
    assert torch.equal(compiled(*arguments)["loss"], plain(hidden, weight, bias, targets))
    lines = capsys.readouterr().err.splitlines()  # torch 2.15 logs one of its own, too
    [warning] = [line for line in lines if line.startswith("warning:")]
    assert "torch.compile failed" in warning


def test_a_first_call_that_lacks_memory_is_made_again():
    """make find-batch-size goes on with fewer rows, which must not decide what is compiled."""
    compiled, rows = CompiledOnAccelerators(chunked_cross_entropy._sums_of_rows.function, uncompiled_devices=()), []

    def lacks_memory_once(hidden, *others):
        rows.append(len(hidden))
        if len(rows) == 1:
            raise torch.OutOfMemoryError
        return compiled.function(hidden, *others)

    compiled.compiled = lacks_memory_once
    hidden, weight, bias, targets = make(50)
    arguments = (hidden, targets, weight, bias, PLAIN, True)
    with pytest.raises(torch.OutOfMemoryError):
        compiled.compiles(*arguments)
    assert compiled.compiles(*arguments)
    assert rows == [CompiledOnAccelerators.FIRST_ROWS] * 2


# ---- memory ----------------------------------------------------------------------------------------------------------

ROWS, WIDE = 1024, 4096


def peak_memory(sizes: list[int]) -> int:
    """Return the most bytes that are alive at once."""
    return torch.tensor(sizes).cumsum(0).max().item()


def bounded(work, inputs, chunks: int = 4) -> bool:
    """Whether `work` stays within its inputs' gradients (twice: new and added up) and a few chunks of logits, plus 1 %."""
    chunk = CHUNK * WIDE * 4
    gradients = sum(x.numel() * x.element_size() for x in inputs)
    largest, peak = max(sizes := allocations(work)), peak_memory(sizes)
    assert peak > chunk  # the profiler sees what happens inside
    return largest <= 1.01 * max(chunk, gradients) and peak <= 2 * gradients + chunks * chunk


@pytest.mark.parametrize("options, chunks", [(PLAIN, (1.1, 2.1)), (ALL_OPTIONS, (11, 11))])
@pytest.mark.parametrize("low", [False, True])
def test_memory_is_bounded_by_the_chunk(small_chunks, low, options, chunks):
    *inputs, targets = make(ROWS, torch.float32, vocabulary=WIDE, features=8)

    def training(function):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = function(*inputs, targets, options)["loss"]
        loss.backward()

    def full(hidden, weight, bias, targets, options):
        return options.sums(F.linear(hidden, weight, bias), targets)

    assert bounded(lambda: training(linear_sums), inputs, chunks[low])
    assert not bounded(lambda: training(full), inputs, chunks[low])  # the mutant
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        assert bounded(lambda: scores(*inputs, targets), inputs)


@pytest.mark.parametrize("form", ["bias", "no bias", "frozen"])
def test_chunks_take_turns_in_one_memory_and_add_their_gradients_in_place(small_chunks, monkeypatch, form):
    """The mutants: autograd, probabilities or logits in new memory, a product of each chunk beside the sum, a scaled copy."""
    *inputs, targets = make(ROWS, torch.float32, vocabulary=WIDE, features=48, bias=form == "bias")
    inputs[1].requires_grad_(form != "frozen")
    trained = [x for x in inputs if x is not None and x.requires_grad]
    gradients, chunk = sum(x.numel() * x.element_size() for x in trained), CHUNK * WIDE * 4

    def is_in_place():
        sizes = allocations(lambda: ours(*inputs, targets).backward())
        return sizes.count(chunk) == 1 and peak_memory(sizes) <= 1.02 * gradients + 1.2 * chunk

    assert is_in_place()
    by_autograd = chunked_cross_entropy._add_gradients
    monkeypatch.setattr(chunked_cross_entropy, "_add_gradients_by_formula", lambda *a: by_autograd(*a[:3], PLAIN, True))
    assert not is_in_place()


@pytest.mark.parametrize("trained", [True, False])
def test_chunks_of_a_training_have_512_rows(monkeypatch, trained):
    """Each reads the whole head. Those of an evaluation are smaller: they need several copies of the logits."""
    monkeypatch.setitem(chunked_cross_entropy.CHUNK_ELEMENTS, "cpu", 64 * VOCABULARY)
    hidden, weight, bias, targets = make(600)
    weight.requires_grad_(trained)
    for function in ("_add_gradients", "_add_gradients_by_formula"):
        original = getattr(chunked_cross_entropy, function)

        def recorded(gradients, inputs, targets, *rest, original=original):
            sizes.append(len(targets))
            return original(gradients, inputs, targets, *rest)

        monkeypatch.setattr(chunked_cross_entropy, function, recorded)
    sizes = []
    ours(hidden, weight, bias, targets)
    assert sizes == [512, 88]
    sizes.clear()
    scores(hidden, weight, bias, targets)
    assert max(sizes) == 64


@pytest.mark.parametrize("target", [-1, VOCABULARY])
def test_another_target_that_is_no_class_is_an_error(small_chunks, target):
    hidden, weight, bias, targets = make(50)
    targets[20] = target
    with pytest.raises(RuntimeError, match="out of bounds"):
        ours(hidden, weight, bias, targets)


def test_an_accelerator_computes_all_logits_at_once_if_they_fit():
    gib, rows, bytes_per_row = 1 << 30, 32_768, 2 * 50_304  # 3.1 GiB of logits
    assert chunked_cross_entropy.fitting_rows(rows, bytes_per_row, 80 * gib) == rows
    chunk = chunked_cross_entropy.fitting_rows(rows, bytes_per_row, 24 * gib)
    assert 0.7 * gib < chunk * bytes_per_row <= 0.75 * gib
