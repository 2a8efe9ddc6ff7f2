"""Checks of a task in float64 that need no training run. Each failure says what is wrong with the task.

smoke_checks.py has those that `make smoke` runs, too.
Tests: tests/conformance/test_task.py runs them for every recipe, and for mutants that they must catch.
"""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.find_tasks import Task
from engine.plan.seeding import seed_everything
from tests.conformance.host_reads import IN_TRANSFORMERS, HostReads
from tests.conformance.smoke_checks import collate_seeded, differences

ROWS = 10
TOLERANCE = 1e-6  # of sums in float64: some layers of transformers compute in float32
ROUNDING = 1e-9


class NoWaiting(TorchDispatchMode):
    """Within, an operation that makes the host wait for the device raises AssertionError."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim")
        if name == "index":
            waits = any(i is not None and i.dtype is torch.bool for i in args[1])
        assert not waits, (
            f"`loss` calls {name}, for which the host waits for the device in every micro-batch (.item(), `if tensor:`, "
            "tensor[mask], …): compute on the host, in `collate`, what the host can know"
        )
        return function(*args, **(kwargs or {}))


def run_batch(
    task, model, rows: list[dict], training: bool, collated_for_training: bool = False, seed: int = 0
) -> tuple[dict, dict]:
    """Return (weight and sums, values per row) of a batch, all in float64 on the host."""
    model.train(training)
    seed_everything(seed)
    batch = task.collate(rows, collated_for_training)
    for name in ("weight", "tokens", "padded_tokens"):
        assert not torch.is_tensor(getattr(batch, name)), f"`collate` returns {name} as a tensor: return a number"
    seed_everything(seed)
    reads = HostReads()
    with torch.no_grad(), reads.generation_allowed(model), reads.noted():
        out = task.loss(model, batch.inputs)
    cure = "compute on the host, in `collate`, what the host can know"
    if IN_TRANSFORMERS in reads.places():
        cure = "call the model by call_on_tokens (engine/models/packed_attention.py), which knows the masks on the host"
    assert not reads.found, (
        f"`loss` waits for the device in every micro-batch, because the host reads a tensor: {reads.places()}: {cure}"
    )
    sums = {name: float(value) for name, value in out.items() if value.dim() == 0}
    assert type(task).wrap_gradient is not Task.wrap_gradient or "loss" in sums, "`loss` returns no scalar named loss"
    values = {name: value.double().numpy() for name, value in out.items() if value.dim()}
    return {"weight": float(batch.weight), **batch.sums, **sums}, values


def is_random(task, rows: list[dict]) -> bool:
    """Return whether `collate` draws random numbers in training: masking, augmentation, mixup."""
    return bool(_differences(task, rows, training=True))


def check_evaluation_is_not_random(task, rows: list[dict]) -> None:
    """Raise AssertionError if `collate(rows, training=False)` is not a function of the rows."""
    names = _differences(task, rows, training=False)
    assert not names, (
        f"`collate(rows, training=False)` returns another {', '.join(names)} the second time: evaluation must not "
        "augment, mask or mix at random; make it a function of the rows"
    )


def _differences(task, rows: list[dict], training: bool) -> list[str]:
    """Return the names of the parts of a batch that differ between two seeds."""
    return differences(*(collate_seeded(task, rows, training, seed).result for seed in (1, 2)))


def check_rows_are_independent(task, model, rows: list[dict], training: bool) -> None:
    """Raise AssertionError unless the sums of a batch are those of its rows alone, added up.

    Where `collate` is random in training, the loss of training is that of batches collated for evaluation; if it cannot
    be, because it reads what these lack, that of the rows of one batch."""
    collated = training and not is_random(task, rows)
    if training and not collated and _reads_more(task, model, rows):
        return check_rows_of_a_batch(task, model, rows)
    together, values = run_batch(task, model, rows, training, collated)
    alone = [run_batch(task, model, [row], training, collated) for row in rows]
    again, _ = run_batch(task, model, rows, training, collated, seed=1)
    assert _close(list(together.values()), list(again.values())), (
        f"two forward passes over the same batch differ ({together} and {again}): switch dropout off in the recipe"
    )
    for name, total in together.items():
        parts = [sums[name] for sums, _ in alone]
        means = np.sum([part * sums["weight"] for part, (sums, _) in zip(parts, alone, strict=True)])
        is_mean = name != "weight" and _close(total * together["weight"], means)
        reason = "it is a mean: return the sum, and its divisor as the weight"
        if not is_mean:
            reason = f"a row's {name} depends on the rows or the padding beside it (attention mask, batch norm, a mean)"
        assert _close(total, sum(parts)), (
            f"`{name}` of {len(rows)} rows in one batch is {total:.9g}, but the rows alone add up to {sum(parts):.9g}: "
            f"{reason}"
        )
    for name, value in values.items():
        assert len(value) == len(rows), f"`{name}` has {len(value)} values for {len(rows)} rows: return one per row"
        assert _close(value, np.concatenate([row[name] for _, row in alone])), (
            f"`{name}` of a row depends on the rows or the padding beside it"
        )


def _reads_more(task, model, rows: list[dict]) -> bool:
    try:
        run_batch(task, model, rows, training=True, collated_for_training=False)
    except KeyError:
        return True
    return False


def check_rows_of_a_batch(task, model, rows: list[dict]) -> None:
    """Raise AssertionError unless the loss of a batch in training is that of its rows alone, cut out of it."""
    model.train()
    seed_everything(0)
    inputs = task.collate(rows, True).inputs
    if any(value.shape[:1] != (len(rows),) for value in inputs.values()):
        return
    alone = [{name: value[i : i + 1] for name, value in inputs.items()} for i in range(len(rows))]
    with torch.no_grad():
        total, *parts = (float(task.loss(model, each)["loss"]) for each in (inputs, *alone))
    assert _close(total, sum(parts)), f"a row's loss in training ({total:.9g} in all) depends on the rows beside it"


def check_shortened_rows(task, rows: list[dict]) -> None:
    """Raise AssertionError unless a shortened row has min(length, its own) tokens and no more weight than before."""
    from addons.data.size_warmups import shorten_row

    for row in rows:
        whole = task.collate([row], False)
        for length in (2, 3, whole.tokens - 1, whole.tokens + 1):
            cut = task.collate([shorten_row(row, length)], False)
            assert cut.tokens == min(length, whole.tokens), f"a row cut to {length} has {cut.tokens} tokens"
            assert cut.weight <= whole.weight, f"cutting a row to {length} tokens raises its weight"


def _close(one, other) -> bool:
    return np.allclose(one, other, rtol=TOLERANCE, atol=ROUNDING)
