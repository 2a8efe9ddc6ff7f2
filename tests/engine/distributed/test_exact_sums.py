"""Exact sums: the same bits in any order, over any number of ranks; accurate; what is beyond the range is NaN."""

import math

import pytest
import torch
from accelerate import Accelerator

from engine.distributed import exact_sums
from engine.distributed.exact_sums import GradientSums, join, join_values, split, split_values
from engine.distributed.host_group import HostGroup
from tests.helpers import kit

COUNT = {torch.float32: 2, torch.bfloat16: 2, torch.float64: 3}


def total(addends: list[torch.Tensor]) -> torch.Tensor:
    parts = [torch.stack([*split(value.clone(), 24, COUNT[value.dtype])]) for value in addends]
    return join(sum(parts[1:], parts[0]), 24).to(addends[0].dtype)


def gradients(dtype: torch.dtype, size: float, count: int = 12) -> list[torch.Tensor]:
    """Return gradients of one tensor: values of many magnitudes, which partly cancel."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(count, 5000, generator=generator, dtype=torch.float64)
    wide *= size * 10.0 ** (-4 * torch.rand(5000, generator=generator, dtype=torch.float64))
    wide[1::2] -= 0.999 * wide[::2]
    return [*wide.to(dtype)]


@pytest.mark.parametrize("dtype", COUNT)
def test_order_does_not_matter(dtype):
    """Mutant: floating-point sums."""
    addends = gradients(dtype, 1e-3)
    exact = {tuple(total([*addends[k:], *addends[:k]]).tolist()) for k in range(len(addends))}
    plain = {tuple(sum([*addends[k:], *addends[:k]]).tolist()) for k in range(len(addends))}
    assert len(exact) == 1
    assert len(plain) > 1


@pytest.mark.parametrize("size", [1e-10, 1e-6, 1e-2, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_is_not_more_than_of_plain_sums(dtype, size):
    addends = gradients(dtype, size)
    columns = torch.stack(addends).double().T.tolist()
    right = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
    error, plain = ((value.double() - right).norm() / right.norm() for value in (total(addends), sum(addends)))
    assert error <= plain
    assert dtype == torch.float32 or error <= 1e-14


def test_range_ends_in_nan():
    largest = torch.tensor(2.0**24).nextafter(torch.tensor(0.0))
    assert total([largest] * 2048 + [-largest] * 2047) == largest
    for value in (2.0**24, -(2.0**24), math.inf, -math.inf, math.nan):
        assert total([torch.tensor(1.0), torch.tensor(value), torch.tensor(-1.0)]).isnan()
        assert total([torch.tensor(value, dtype=torch.float64)]).isnan()


def test_losses_are_exact():
    values = torch.tensor([1e9, 1e-9, 1 / 3, -1e9, 12345.678, -(2.0**51)], dtype=torch.float64)
    assert join_values(split_values(values).sum(1)) == pytest.approx(math.fsum(values.tolist()), rel=1e-15)
    assert torch.allclose(join_values(split_values(values)), values, rtol=1e-16, atol=2.0**-74)
    assert join_values(split_values(torch.tensor([1.0, 2.0**52])).sum(1)).isnan()


# ---- over ranks ------------------------------------------------------------------------------------------------------

BEYOND = {3: 2.0**23.9, 4: 2.0**24, 5: math.inf, 6: math.nan}  # by parameter: a factor in the third micro-batch


def _sum_on_this_rank(scale: float, piece: int) -> tuple[int, list[torch.Tensor | None]]:
    """Return (world size, sums of seven micro-batches, the ranks taking turns) of parameters; the second of them is used
    by the last micro-batch only, the third by none but a dummy batch, the last twice."""
    exact_sums.PIECE["cpu"] = piece
    accelerator = Accelerator(cpu=True)
    hosts = HostGroup(accelerator, timeout=60)
    rank, world = accelerator.process_index, accelerator.num_processes
    dtypes = [
        torch.float32,
        torch.float64,
        torch.float32,
        *[torch.float32] * len(BEYOND),
        torch.bfloat16,
        torch.float32,
    ]
    parameters = [torch.nn.Parameter(torch.ones(3, 7, dtype=dtype)) for dtype in dtypes]
    sums = GradientSums(parameters, hosts, accelerator.device)
    mine = [*range(7)][rank::world]
    with sums.step(bool(mine), scale):
        for index in mine or [0]:
            generator = torch.Generator().manual_seed(index)
            loss = torch.zeros((), dtype=torch.float64)
            for number, parameter in enumerate(parameters):
                value = torch.randn(3, 7, generator=generator) * (BEYOND.get(number, 1) if index == 2 else 1)
                if number in BEYOND and index == 2:
                    value = value.sign() * BEYOND[number]
                uses = {1: index == 6, 2: not mine, len(dtypes) - 1: 2}.get(number, True)
                loss = loss + (parameter * value).double().sum() * int(uses) if uses else loss
            (loss * scale).backward()
    result = [None if p.grad is None else p.grad / scale for p in parameters]
    (parameters[2] * 3).sum().backward()  # outside of a step, `.grad` is as ever
    assert (parameters[2].grad == 3).all()
    return world, result


@pytest.mark.parametrize("world, scale, piece", [(2, 1.0, 2**16), (3, 2.0**16, 5), (8, 1.0, 2**16)])
def test_ranks_get_the_sum_of_one_process(tmp_path, world, scale, piece):
    """Eight ranks: one has only a dummy batch."""
    [(_, alone)] = kit.spawn(1, _sum_on_this_rank, 1.0, 2**16, out=tmp_path / "one")
    assert alone[2] is None
    assert [bool(value.isfinite().all()) for value in alone[3:7]] == [True, False, False, False]
    for size, others in kit.spawn(world, _sum_on_this_rank, scale, piece, out=tmp_path / "several"):
        assert size == world
        for one, other in zip(alone, others, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one.nan_to_num(7), other.nan_to_num(7))
