"""Checks of a task on a few of its rows: batches that repeat, seeds and states that stay, weights and losses that are sums.

`make smoke` runs them before its first step, tests/conformance/ for every task. Each raises Failure with one sentence that
names the task, the mistake and the fix. Tests: tests/conformance/test_mistakes.py, tests/engine/tools/test_smoke.py.
"""

import inspect
import pickle
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from engine.config.errors import Failure
from engine.config.paths import REPOSITORY
from engine.distributed.running_statistics import StepBuffers
from engine.find_tasks import Batch, Task
from engine.plan.seeding import seed_everything

SEEDS = range(1, 9)  # of a random flip of one row, 8 seeds miss 1 in 256
MANY_SEEDS = range(1, 17)  # for the mean of a loss that is random
STANDARD_ERRORS = 5  # a difference of two means below this is chance
MANY = 1000  # rows
REPEATS = 1e-3  # relative difference between two losses of one batch and seed: a GPU may add in another order
GENERATORS = {"torch": "torch.manual_seed", "numpy": "np.random.seed", "random": "random.seed"}
DRAW = "draw from torch, np.random or random, seeded for each micro-batch, or seed yours by torch.initial_seed()"


def place(task: Task) -> str:
    """Return the name and the file of a task, for messages."""
    file = Path(inspect.getfile(type(task)))
    shown = file.relative_to(REPOSITORY) if file.is_relative_to(REPOSITORY) else file
    return f"task {task.cfg.task} ({shown})"


# ---- seeds -----------------------------------------------------------------------------------------------------------


class UnseededGenerators(TorchFunctionMode):
    """Within, count the calls that draw from a torch.Generator that has the seed of every new one."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.default = torch.Generator().initial_seed()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        generator = (kwargs or {}).get("generator")
        if isinstance(generator, torch.Generator) and generator.initial_seed() == self.default:
            self.calls += 1
        return function(*args, **(kwargs or {}))


class Seeded(NamedTuple):
    """What a call returned, and the generators after it."""

    result: Any
    states: dict[str, Any]  # of torch, numpy and random


def call_seeded(task: Task, method: str, call: Callable[[], Any], seed: int) -> Seeded:
    """Return the result of `call()`, which calls `method` of the task, after all generators were seeded.

    Raise Failure if the method seeds torch, or draws from a torch.Generator that has no seed."""
    seed_everything(seed)
    with UnseededGenerators() as unseeded:
        result = call()
    devices = [torch.initial_seed()]
    if torch.cuda.is_initialized():
        devices.append(torch.cuda.initial_seed())
    if set(devices) != {seed}:
        raise Failure(_reseeds(task, method, "torch"))
    if unseeded.calls:
        raise Failure(
            f"{place(task)}: `{method}` draws from a torch.Generator() without a seed, which gives the same numbers to "
            f"every micro-batch: {DRAW}"
        )
    _, key, position, *_ = np.random.get_state()
    numpy_state = (np.asarray(key).tobytes(), position)
    states = {"torch": torch.get_rng_state().numpy().tobytes(), "numpy": numpy_state, "random": random.getstate()}
    return Seeded(result, states)


def check_seeds_stay(task: Task, method: str, first: Seeded, again: Seeded, other: Seeded) -> None:
    """Raise Failure if the method seeds a generator. `first` and `again` began with one seed, `other` with another."""
    for name in GENERATORS:
        if first.states[name] == other.states[name] or first.states[name] != again.states[name]:
            raise Failure(_reseeds(task, method, name))


def _reseeds(task: Task, method: str, generator: str) -> str:
    return (
        f"{place(task)}: `{method}` seeds {generator} ({GENERATORS[generator]}), so that random numbers, such as dropout "
        "masks, no longer belong to the micro-batch: remove it, because every micro-batch is seeded before"
    )


# ---- state -----------------------------------------------------------------------------------------------------------

PLAIN = (bool, int, float, str, list, tuple, dict, set, np.ndarray, torch.Tensor)


def state_of(task: Task) -> dict[str, bytes]:
    """Return {where: plain value} of what a call could change: attributes of the task, globals of its file, defaults."""
    values = dict(vars(sys.modules[type(task).__module__]))
    for cls in type(task).__mro__:
        for name, value in vars(cls).items():
            values[f"{cls.__name__}.{name}"] = getattr(value, "__defaults__", value)
    values |= {f"self.{name}": value for name, value in vars(task).items()}
    state = {}
    for name, value in values.items():
        if isinstance(value, PLAIN) and not name.startswith("__"):
            with suppress(Exception):  # it holds what is not plain
                state[name] = pickle.dumps(value)
    return state


def check_keeps_no_state(task: Task, method: str, call: Callable[[], Any]) -> None:
    """Raise Failure if `call()`, which calls `method` of the task, changes something. What the first call keeps for all
    later ones is no such change: call it before."""
    before = state_of(task)
    call()
    after = state_of(task)
    if names := [name for name, value in before.items() if after.get(name, value) != value]:
        raise Failure(
            f"{place(task)}: `{method}` changes {', '.join(names)}, which each process has for itself and no checkpoint "
            "holds, so that numbers depend on the processes and a resume changes them: compute it from the rows, or from "
            "`task.progress`"
        )


# ---- collate ---------------------------------------------------------------------------------------------------------


def differences(one: Batch, other: Batch) -> list[str]:
    """Return the names of the parts of two batches that differ."""
    first, second = parts_of(one), parts_of(other)
    return [name for name in first | second if not _equal(first.get(name), second.get(name))]


def parts_of(batch: Batch) -> dict[str, Any]:
    counts = {"weight": batch.weight, "tokens": batch.tokens, "padded_tokens": batch.padded_tokens}
    return counts | batch.sums | batch.inputs


def _equal(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        if one.is_floating_point():
            one, other = one.nan_to_num(), other.nan_to_num()
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other or one == other


def collate_seeded(task: Task, rows: list[dict], training: bool, seed: int) -> Seeded:
    """Return the batch of copies of `rows`, collated with this seed, and the generators after it."""
    return call_seeded(task, "collate", lambda: task.collate([dict(row) for row in rows], training), seed)


def check_collate(task: Task, rows: list[dict], training: bool) -> None:
    """Raise Failure unless the batch of `rows` is a function of the rows and the seed, and the seed stays."""
    first = {}
    for seed in SEEDS:
        first[seed] = collate_seeded(task, rows, training, seed)
        again = collate_seeded(task, rows, training, seed)
        if names := differences(first[seed].result, again.result):
            raise Failure(
                f"{place(task)}: `collate` returns another {', '.join(names)} for the same rows and the same seed: it "
                "draws from a generator without a seed, or of its own (np.random.default_rng(), random.Random(), "
                f"torch.Generator()), so no run can be repeated or resumed: {DRAW}"
            )
        if seed != SEEDS[0]:
            check_seeds_stay(task, "collate", first[seed], again, first[SEEDS[0]])
    check_keeps_no_state(task, "collate", lambda: collate_seeded(task, rows, training, SEEDS[0]))


def varied_ids(split: Any) -> np.ndarray:
    """Return a few rows of a split, the shortest and the longest of the first MANY among them."""
    lengths = split.lengths[: min(len(split), MANY)]
    return np.unique([*range(min(3, len(lengths))), lengths.argmin(), lengths.argmax()])


def check_weight(task: Task, split: Any) -> None:
    """Raise Failure unless the weight of a few rows is the sum of their weights, and in evaluation that of the `targets`
    that `encode` has counted."""
    ids = varied_ids(split)
    rows = split.rows(ids)
    for training in (False, True):
        batches = [collate_seeded(task, rows, training, seed).result for seed in (1, 2)]
        if differences(*batches):
            continue  # random in training
        alone = [collate_seeded(task, [row], training, 1).result.weight for row in rows]
        if not np.isclose(batches[0].weight, sum(alone)):
            raise Failure(
                f"{place(task)}: the weight that `collate` returns is {batches[0].weight:.6g} for {len(rows)} rows, but "
                f"{sum(alone):.6g} if each is a micro-batch: do not count padding, and take no mean over the rows"
            )
        counted = split.values("targets")[ids] if "targets" in (split.features() or {}) else alone
        if not training and not np.allclose(counted, alone):
            raise Failure(
                f"{place(task)}: rows with {', '.join(map(str, counted))} `targets`, as `encode` counts them, add "
                f"{', '.join(f'{weight:.6g}' for weight in alone)} to the weight that `collate` returns: make them equal"
            )


# ---- loss ------------------------------------------------------------------------------------------------------------


def measure_by(
    task: Task, model: torch.nn.Module, training: bool, autocast: Callable[[], AbstractContextManager] = nullcontext
) -> Callable[[list[dict], int], Seeded]:
    """Return a function of (rows, seed): the weight and the sums of a micro-batch of these rows."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    buffers = StepBuffers(model, device, False)
    model.train(training)

    def measure(rows: list[dict], seed: int) -> Seeded:
        batch = collate_seeded(task, rows, training, seed).result
        inputs = {name: value.to(device) for name, value in batch.inputs.items()}
        with torch.no_grad(), buffers.unchanged(), autocast():
            out, states = call_seeded(task, "loss", lambda: task.loss(model, inputs), seed)
        for name, value in out.items():
            if value.dtype in (torch.bfloat16, torch.float16) and value.dim() == 0:
                raise Failure(
                    f"{place(task)}: `{name}` of `loss` is a sum in {str(value.dtype).removeprefix('torch.')}: compute it in "
                    "float32 (at_least_float32 of src/losses/cross_entropy.py)"
                )
        scalars = {name: float(value) for name, value in out.items() if value.dim() == 0}
        return Seeded({"weight": float(batch.weight), **batch.sums, **scalars}, states)

    return measure


def check_loss(
    task: Task,
    model: torch.nn.Module,
    rows: list[dict],
    training: bool,
    tolerance: float,
    rounding: float,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """Raise Failure unless `loss` keeps the seed and, with the weight of `collate`, returns sums over the rows.

    A sum is twice as large for every row twice: this needs no other padding, and batch norm has the same statistics. A
    sum that is random (dropout, masking) is compared by its mean over many seeds. `tolerance` is relative: a mean is
    off by one half. `rounding` is what may be lost for each unit of the weight. A loss over the batch (docs/forking.md)
    is no sum: such a task returns vectors."""
    measure = measure_by(task, model, training, autocast)
    first, again, other = measure(rows, 1), measure(rows, 1), measure(rows, 2)
    check_seeds_stay(task, "loss", first, again, other)
    for name, value in first.result.items():
        if abs(value - again.result.get(name, value)) > REPEATS * abs(value):
            raise Failure(
                f"{place(task)}: `loss` returns another {name} for the same batch and the same seed ({value:.6g} and "
                f"{again.result[name]:.6g}): it draws from a generator without a seed, or of its own: {DRAW}"
            )
    check_keeps_no_state(task, "loss", lambda: measure(rows, 1))
    if not training and not hasattr(task, "sums_by_block"):
        sums = [{name: share * value for name, value in first.result.items()} for share in (0.5, 1, 0.25)]
        metrics = [partial(task.metrics, each, first.result["weight"]) for each in sums]
        metrics[0]()
        check_keeps_no_state(task, "metrics", lambda: [compute() for compute in metrics[1:]])
    seeds = MANY_SEEDS if first.result != other.result else SEEDS[:1]
    once = [measure(rows, seed).result for seed in seeds]
    twice = [measure(rows + rows, seed).result for seed in seeds]
    lost = rounding * abs(once[0]["weight"])
    for name in once[0]:
        of_once, of_twice = (np.array([sums.get(name, np.nan) for sums in table]) for table in (once, twice))
        noise = np.sqrt((of_twice.var() + 4 * of_once.var()) / len(seeds))
        error = _error_of_sum(of_once.mean(), of_twice.mean(), tolerance, STANDARD_ERRORS * noise + lost)
        if error:
            what = "the weight that `collate` returns" if name == "weight" else f"`{name}` of `loss`"
            raise Failure(
                f"{place(task)}: {what} in {'training' if training else 'evaluation'} {error}; return the sum, and its "
                "divisor as the weight of `collate`. A loss that compares the rows of a batch is declared by "
                "BatchLossTask (docs/forking.md, A loss over the batch)"
            )


def _error_of_sum(once: float, twice: float, tolerance: float, noise: float) -> str:
    """Return what is wrong if `twice`, of every row twice, is not two times `once`, else an empty string."""
    if not abs(twice - 2 * once) > tolerance * abs(2 * once) + noise:  # or it is not finite, which training handles
        return ""
    is_mean = abs(twice - once) <= tolerance * abs(once) + noise
    kind = "it is a mean, not a sum" if is_mean else "it is not a sum over the rows"
    return f"is {once:.6g} for some rows, and {twice:.6g} for a micro-batch with each of them twice: {kind}"
