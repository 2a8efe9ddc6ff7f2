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
    for part in range(count):
        # So large that a sum with it has no bits below the unit of this part.
        rounder = 1.5 * 2.0 ** (RANGE + 11 - 42 * part)
        rounded = (values + rounder).sub_(rounder)
        values.sub_(rounded)
        yield rounded


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
        self.scale: float | None = None  # of the loss (fp16); None outside of a step
        self.used: set[int] = set()  # parameters with a gradient from this rank in this step
        self.sums: dict[int, torch.Tensor] = {}  # by parameter: a slice of `flat`, (parts, values)
        self.flat: dict[torch.dtype, torch.Tensor] = {}
        for dtype in {p.dtype: 0 for p in parameters}:
            indices = [index for index, p in enumerate(parameters) if p.dtype == dtype]
            sizes = [parameters[index].numel() for index in indices]
            count = 3 if dtype == torch.float64 else 2
            self.flat[dtype] = torch.empty((count, sum(sizes)), dtype=torch.float64, device=device)
            self.sums |= zip(indices, self.flat[dtype].split(sizes, dim=1), strict=True)
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))

    @contextmanager
    def step(self, is_real: bool, scale: float) -> Iterator[None]:
        """Sum the gradients of the backward passes within; at exit, `.grad` is the sum over all ranks.

        It is None if no rank has one. Without `is_real`, this rank has only a dummy batch, which does not count."""
        self.used = set()
        self.scale = scale
        self.is_real = is_real
        try:
            yield
        finally:
            self.scale = None
        self._put(scale)

    @torch.no_grad()
    def _take(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Add the gradient of one backward pass to the sums, and free it."""
        gradient = parameter.grad
        if self.scale is None or gradient is None:
            return
        parameter.grad = None
        if not self.is_real:
            return
        is_first = index not in self.used
        self.used.add(index)
        pieces = gradient.reshape(-1).split(self.piece)
        for values, sums in zip(pieces, self.sums[index].split(self.piece, dim=1), strict=True):
            for total, part in zip(sums, split(values, LARGEST_GRADIENT, len(sums), self.scale), strict=True):
                total.copy_(part) if is_first else total.add_(part)

    @torch.no_grad()
    def _put(self, scale: float) -> None:
        """Sum over the ranks, and set `.grad` of each parameter that any of them has used."""
        used = self.hosts.sum([float(index in self.used) for index in range(len(self.parameters))]).tolist()
        for index, sums in self.sums.items():
            if index not in self.used:
                sums.zero_()
        for dtype, flat in self.flat.items():
            gradient = torch.empty(flat.shape[1], dtype=dtype, device=flat.device)
            if not self.hosts.is_single:
                for part in flat:
                    for piece in part.split(REDUCED):
                        dist.all_reduce(piece)
            for values, sums in zip(gradient.split(self.piece), flat.split(self.piece, dim=1), strict=True):
                values.copy_(join(sums, LARGEST_GRADIENT, scale))
            mine = [(index, p) for index, p in enumerate(self.parameters) if p.dtype == dtype]
            for (index, p), value in zip(mine, gradient.split([p.numel() for _, p in mine]), strict=True):
                p.grad = value.view_as(p) if used[index] else None
                if not p.is_contiguous() and p.grad is not None:  # optimizers want the layout of the weight
                    p.grad = torch.empty_like(p).copy_(p.grad)
