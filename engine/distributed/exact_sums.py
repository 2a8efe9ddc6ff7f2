"""Exact sums: sums of floating-point numbers that do not depend on their order (`exact_sums`).

A number is split into parts. The first is a multiple of a large unit, the next one a multiple of a unit 2**42 times
smaller, made of what the first leaves, and so on. Parts are whole numbers of their units in float64, so up to ADDENDS of
them add without rounding, in any order, in a tensor or in an all-reduce. A sum is rounded once, when it is joined.
Infinities, and numbers beyond the range, become NaN, which no sum loses.
Tests: tests/engine/distributed/test_exact_sums.py, tests/conformance/test_exact_sums.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist

from engine.config.errors import UsageError
from engine.distributed.host_group import HostGroup

ADDENDS = 2**12  # micro-batches of a step
RANGE = 128  # numbers are scaled so that those beyond their range are the ones beyond that of float32
LARGEST_GRADIENT = 24  # exponents of 2: a gradient below 2**24 is kept to 2**-60 (float64: 2**-102);
LARGEST_VALUE = 52  # a loss, weight or statistic below 2**52 to 2**-74
VALUE_PARTS = 3
REDUCED = 2**24  # values that are all-reduced at once
PIECE = {"cpu": 2**16, "cuda": 2**22}  # values that are split at once: on a CPU they stay in its cache


def split(values: torch.Tensor, largest: int, count: int, scale: float = 1.0) -> Iterator[torch.Tensor]:
    """Yield `count` parts of `values` / `scale` (a power of 2), in float64; those of 2**`largest` or more become NaN."""
    if values.dtype == torch.float64:
        values = values * (2.0 ** (1024 - largest) / scale) * 2.0 ** (RANGE - 1024)
    else:
        values = (values.float() * (2.0 ** (RANGE - largest) / scale)).double()
    # So large that a sum with it has no bits below the unit of a part.
    *rounders, last = (1.5 * 2.0 ** (RANGE + 11 - 42 * part) for part in range(count))
    for rounder in rounders:
        rounded = (values + rounder).sub_(rounder)
        values.sub_(rounded)
        yield rounded
    yield values.add_(last).sub_(last)


def join(parts: torch.Tensor, largest: int, scale: float = 1.0) -> torch.Tensor:
    """Return the number, times `scale`, of sums of parts, which are the first dimension."""
    *larger, total = parts
    for part in reversed(larger):
        total = total + part
    return total * (2.0 ** (largest - RANGE) * scale)


def split_values(values: torch.Tensor) -> torch.Tensor:
    """Return the parts of losses, weights or statistics, (VALUE_PARTS, …)."""
    return torch.stack([*split(values.double(), LARGEST_VALUE, VALUE_PARTS)])


def join_values(parts: torch.Tensor) -> torch.Tensor:
    """Return the sums of such values from the sums of their parts."""
    return join(parts, LARGEST_VALUE)


def use_exact_kernels(device: torch.device) -> None:
    """Choose kernels whose results do not depend on the number of threads, or on the order in which threads add."""
    if device.type == "cpu":
        torch.set_num_threads(1)  # with more, the backward pass of a layer norm, and norms, add in as many parts
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


@contextmanager
def deterministic_or_refused() -> Iterator[None]:
    """Raise UsageError for torch's error about an operation without a deterministic kernel for this device."""
    try:
        yield
    except RuntimeError as error:
        if "use_deterministic_algorithms" in str(error):
            raise UsageError(
                f"exact_sums is true, but {str(error).split(', but')[0]}: set exact_sums to false"
            ) from error
        raise


class GradientSums:
    """The exact sum of a step's gradients over micro-batches and ranks, in place of DDP's.

    Hooks take each gradient out of `.grad` when a backward pass has computed it; `step` puts the sum there at exit."""

    def __init__(self, parameters: list[torch.nn.Parameter], hosts: HostGroup, device: torch.device):
        self.parameters = parameters
        self.hosts = hosts
        self.piece = PIECE.get(device.type, PIECE["cuda"])
        self.scale = 0.0  # of the loss (fp16: more than 1); 0 outside of a step
        self.used: set[int] = set()  # parameters with a gradient from this rank in this step
        self.pending: dict[int, torch.Tensor] = {}  # gradients by parameter, until there are enough to split at once
        self.flat: dict[torch.dtype, torch.Tensor] = {}  # (parts, values of all parameters of this dtype)
        self.slices: list[slice] = []  # of `flat`, by parameter
        sizes: dict[torch.dtype, int] = {}
        for index, parameter in enumerate(parameters):
            start = sizes.get(parameter.dtype, 0)
            sizes[parameter.dtype] = start + parameter.numel()
            self.slices.append(slice(start, start + parameter.numel()))
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))
        for dtype, size in sizes.items():
            count = 3 if dtype == torch.float64 else 2
            self.flat[dtype] = torch.empty((count, size), dtype=torch.float64, device=device)

    @contextmanager
    def step(self, is_real: bool, scale: float) -> Iterator[None]:
        """Sum the gradients of the backward passes within; at exit, `.grad` is the sum over all ranks.

        It is None if no rank has one. Without `is_real`, this rank has only a dummy batch, which does not count."""
        self.used = set()
        self.scale = scale
        self.is_real = is_real
        try:
            yield
            self._add()
        finally:
            self.scale = 0.0
            self.pending = {}
        self._put(scale)

    def _take(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Take the gradient of one backward pass out of `.grad`."""
        gradient = parameter.grad
        if not self.scale or gradient is None:
            return
        parameter.grad = None
        if not self.is_real:
            return
        if index in self.pending:  # of the micro-batch before
            self._add()
        self.pending[index] = gradient
        if sum(each.numel() for each in self.pending.values()) >= self.piece:
            self._add()

    @torch.no_grad()
    def _add(self) -> None:
        """Add the pending gradients to the sums, and free them; those of neighbors in `flat` together."""

        def neighbors(item: tuple[int, int]) -> tuple:
            position, index = item
            return index - position, self.parameters[index].dtype, index in self.used

        for (_, dtype, is_used), group in groupby(enumerate(sorted(self.pending)), neighbors):
            indices = [index for _, index in group]
            flat = [self.pending.pop(index).reshape(-1) for index in indices]
            gradient = torch.cat(flat) if len(flat) > 1 else flat[0]
            sums = self.flat[dtype][:, self.slices[indices[0]].start : self.slices[indices[-1]].stop]
            for values, totals in zip(gradient.split(self.piece), sums.split(self.piece, dim=1), strict=True):
                for total, part in zip(totals, split(values, LARGEST_GRADIENT, len(totals), self.scale), strict=True):
                    total.add_(part) if is_used else total.copy_(part)
            self.used.update(indices)

    @torch.no_grad()
    def _put(self, scale: float) -> None:
        """Sum over the ranks, and set `.grad` of each parameter that any of them has used."""
        used = self.hosts.sum([float(index in self.used) for index in range(len(self.parameters))]).tolist()
        for index, (parameter, place) in enumerate(zip(self.parameters, self.slices, strict=True)):
            if index not in self.used:
                self.flat[parameter.dtype][:, place].zero_()
        gradients = {dtype: self._reduced(flat, dtype, scale) for dtype, flat in self.flat.items()}
        for parameter, place, is_used in zip(self.parameters, self.slices, used, strict=True):
            gradient = gradients[parameter.dtype][place].view_as(parameter)
            if not parameter.is_contiguous():  # optimizers want the layout of the weight
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient if is_used else None

    def _reduced(self, flat: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Return the gradients of all parameters of one dtype, from the sums of all ranks."""
        if not self.hosts.is_single:
            for part in flat:
                for piece in part.split(REDUCED):
                    dist.all_reduce(piece)
        gradient = torch.empty(flat.shape[1], dtype=dtype, device=flat.device)
        for values, sums in zip(gradient.split(self.piece), flat.split(self.piece, dim=1), strict=True):
            values.copy_(join(sums, LARGEST_GRADIENT, scale))
        return gradient
