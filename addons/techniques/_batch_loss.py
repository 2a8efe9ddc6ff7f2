"""Exact gradient and evaluation of a loss over the whole global batch, in the memory of one micro-batch.

A contrastive loss couples all rows of a batch, and so does the choice of the hardest rows. Pass 1 computes the vectors
of all micro-batches without gradients and gathers them from all ranks. Every rank then computes the loss and its
gradient with respect to the vectors. Pass 2 repeats each micro-batch, with the same dropout because the seed belongs to
it, and backpropagates its rows of that gradient (GradCache: Gao et al., "Scaling Deep Contrastive Learning Batch Size
under Memory Limited Setup", 2021). The price: a second forward pass. Tests: tests/addons/techniques/test_batch_loss.py.
"""

from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.config.errors import UsageError
from engine.distributed.backends import Backend
from engine.find_tasks import Batch, Task
from engine.plan.batch_plan import MicroBatch
from engine.plan.seeding import seed_everything
from engine.run.totals_and_votes import ComputeGradient, StepBatch, StepLosses, StepTotals
from src.training.evaluation import Part

Vectors = dict[str, torch.Tensor]  # name -> (rows, ...)
REPEATABLE = 0.01  # largest relative difference between the vectors of both passes


class BatchLoss(Protocol):
    """A loss over a global batch."""

    def represent(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Vectors:
        """Return tensors of shape (rows, …), floating point if they have a gradient, that `batch_loss` needs.

        All parameters must act here, also a learned temperature: multiply the vectors by it."""
        ...

    def batch_loss(self, vectors: Vectors, weight: float) -> dict[str, torch.Tensor]:
        """Return sums over a whole global batch: `loss`, and in evaluation the sums for `metrics`. No parameters here.

        `vectors` holds what `represent` returned for all rows of the global batch, in an order that does not depend on
        the number of processes; `weight` is their weight. The loss of a step is `loss` / `weight`. In evaluation, a
        global batch is `global_batch_size` consecutive rows."""
        ...


class BatchLossTask(Task, BatchLoss):
    """A task whose loss is over the whole global batch: it defines `represent` and `batch_loss` instead of `loss`."""

    def loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Vectors:
        """Return the vectors of a micro-batch: evaluation collects them, training has `batch_loss_gradient` below."""
        return self.represent(model, inputs)

    def wrap_gradient(self, compute: ComputeGradient) -> ComputeGradient:
        """Return what takes the place of `compute`, compute_gradient of train.py."""
        return partial(batch_loss_gradient, self)

    def sums_by_block(
        self, names: list[str], table: np.ndarray, values: dict[str, np.ndarray], blocks: list[Part]
    ) -> tuple[list[str], np.ndarray]:
        """Return names and sums like those of `table`, by block instead of micro-batch, with the sums of `batch_loss`.

        `table` is (micro-batches, names); `values` are the vectors of all rows."""
        by_block = []
        for block in blocks:
            sums = dict(zip(names, np.cumsum(table[block.micro_batches], axis=0)[-1].tolist(), strict=True))
            vectors = {name: torch.from_numpy(value[block.rows]) for name, value in values.items()}
            by_block.append(sums | {n: float(value) for n, value in self.batch_loss(vectors, sums["weight"]).items()})
        keys = ["weight", *sorted(by_block[0].keys() - {"weight"})]
        return keys, np.array([[sums[key] for key in keys] for sums in by_block])


class _Part(NamedTuple):
    """Shape of the vectors of one micro-batch, known on the host."""

    index: int  # of the micro-batch in the step's plan
    rows: int
    columns: dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape behind the rows, dtype)


def batch_loss_gradient(
    batch_loss: BatchLoss, backend: Backend, module: torch.nn.Module, step_batch: StepBatch, totals: StepTotals
) -> StepLosses:
    """Fill `.grad` with the gradient of batch_loss / its weight; return a loss for each micro-batch of this rank.

    The losses of all ranks add up to the loss of the global batch, which is the first entry of data rank 0, as are the
    further sums of `batch_loss`. If the loss is not finite, so are the gradient of every rank and the losses of the
    micro-batches that caused it. Raise UsageError on every rank if micro-batches have different vectors, or if pass 2
    differs from pass 1 in the first step. The host waits for other hosts, not for the device, except in that step."""
    losses, sums = _backward_in_two_passes(batch_loss, backend, module, step_batch, totals)
    return StepLosses(torch.stack(losses).detach(), {name: value.detach().double() for name, value in sums.items()})


def _backward_in_two_passes(
    batch_loss: BatchLoss, backend: Backend, module: torch.nn.Module, step_batch: StepBatch, totals: StepTotals
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model_with_loss = backend.accelerator.unwrap_model(module)
    task: Task = model_with_loss.task
    is_first_step = backend.is_first_step
    vectors, places = _global_vectors(backend, model_with_loss, module, step_batch)
    loss, gradients, sums = _gradient_of_vectors(task, batch_loss, vectors, totals.weight)
    # Exactly the scale for backends that average over ranks, or NaN on every rank if the loss is not finite.
    factor = 0.0 * loss + backend.loss_scale(totals)
    losses, unequal = [], set()
    for (micro, batch), rows in zip(step_batch, places, strict=True):
        with backend.no_sync(module, unless=micro.last):
            again = _represent(backend, module, micro, batch)
            product = torch.zeros_like(loss)  # its gradient is that of the loss by the rows of this micro-batch
            for name, gradient in gradients.items():
                scaled = gradient[rows] * factor if rows else 0.0  # a dummy batch adds nothing
                product = product + (again[name] * scaled).sum()
            if not product.requires_grad:
                raise UsageError(f"task {task.cfg.task}: no tensor of `represent` has a gradient: do not detach them")
            backend.accelerator.backward(product)
        mine = {name: vectors[name][rows] for name in gradients} if rows else {}
        if is_first_step:
            unequal |= _unequal(mine, again)
        losses.append(_blame(loss, mine, vectors))
    if is_first_step and (differing := backend.hosts.union(unequal)):
        raise UsageError(
            f"task {task.cfg.task}: the same micro-batch twice gives {differing[0]}, so the gradient would be wrong: draw "
            "random numbers only from torch, numpy or random"
        )
    if backend.data_rank == 0:
        losses[0] = losses[0] + torch.where(loss.isfinite(), loss, 0.0)
    return losses, sums if backend.data_rank == 0 else {}


def _gradient_of_vectors(
    task: Task, batch_loss: BatchLoss, vectors: Vectors, weight: float
) -> tuple[torch.Tensor, Vectors, Vectors]:
    """Return (loss of the global batch, its gradient by each floating-point vector, further sums) on every rank."""
    leaves = {n: v.clone().requires_grad_() if v.is_floating_point() else v for n, v in vectors.items()}
    floating = {name: value for name, value in leaves.items() if value.requires_grad}
    out = batch_loss.batch_loss(leaves, weight)
    if "loss" not in out or not out["loss"].requires_grad:
        raise UsageError(f"task {task.cfg.task}: `batch_loss` returned no sum named loss that depends on the vectors")
    loss = out["loss"]
    gradients = torch.autograd.grad(loss, list(floating.values()), materialize_grads=True)
    # Further sums appear in the train line.
    sums = {name: value.detach() for name, value in out.items() if name != "loss" and value.dim() == 0}
    return loss.detach(), dict(zip(floating, gradients, strict=True)), sums


# ---- vectors of the global batch -------------------------------------------------------------------------------------


def _represent(backend: Backend, module: torch.nn.Module, micro: MicroBatch, batch: Batch) -> Vectors:
    """Return what `represent` returns for a micro-batch, floating point in float32 or better."""
    device = backend.accelerator.device
    inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
    seed_everything(micro.seed)
    low = (torch.bfloat16, torch.float16)
    return {name: value.float() if value.dtype in low else value for name, value in module(inputs).items()}


@torch.no_grad()
def _global_vectors(
    backend: Backend, model_with_loss: torch.nn.Module, module: torch.nn.Module, step_batch: StepBatch
) -> tuple[Vectors, list[slice | None]]:
    """Run pass 1. Return (vectors of the global batch, this rank's rows of them by micro-batch, None for dummies).

    Rows are in the order of the plan, which does not depend on the number of ranks or the micro-batch size."""
    # Only the forward pass of a sharded model is a collective; without DDP's wrapper no other is.
    caller = module if backend.is_sharded else model_with_loss
    computed = []
    for micro, batch in step_batch:
        with backend.buffers.unchanged():  # pass 2 updates running statistics
            needed = backend.is_sharded or not micro.dummy
            computed.append(_represent(backend, caller, micro, batch) if needed else {})
    real = [(micro, vectors) for (micro, _), vectors in zip(step_batch, computed, strict=True) if not micro.dummy]
    parts = [_Part(m.index, len(m.ids), {n: (tuple(v.shape), v.dtype) for n, v in vs.items()}) for m, vs in real]
    parts_by_rank = _all_parts(backend, parts)
    columns = _check_columns(model_with_loss.task, [part for of_rank in parts_by_rank for part in of_rank])
    height = max(sum(part.rows for part in of_rank) for of_rank in parts_by_rank)
    gathered = {}
    for name, (shape, dtype) in columns.items():
        padded = torch.zeros((height, *shape), dtype=dtype, device=backend.accelerator.device)
        if real:
            mine = torch.cat([vectors[name] for _, vectors in real])
            padded[: len(mine)] = mine
        gathered[name] = backend.accelerator.gather(padded)
    order, starts = _plan_order(parts_by_rank, height)
    index = torch.from_numpy(order).to(backend.accelerator.device, non_blocking=True)
    places = [
        None if micro.dummy else slice(starts[micro.index], starts[micro.index] + len(micro.ids))
        for micro, _ in step_batch
    ]
    return {name: value[index] for name, value in gathered.items()}, places


def _all_parts(backend: Backend, parts: list[_Part]) -> list[list[_Part]]:
    """Return the parts of each rank, by rank; [] for all but the first rank of a tensor parallel group."""
    by_rank = [(backend.data_rank, parts)]
    if not backend.hosts.is_single:
        by_rank = [by_rank[0]] * backend.accelerator.num_processes
        torch.distributed.all_gather_object(by_rank, (backend.data_rank, parts), group=backend.hosts.group)
    seen: set[int] = set()
    return [[] if rank in seen or seen.add(rank) else theirs for rank, theirs in by_rank]


def _check_columns(task: Task, parts: list[_Part]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return {name: (shape behind the rows, dtype)}; raise UsageError unless it is the same in all micro-batches."""
    first = parts[0]
    expected = {name: (shape[1:], dtype) for name, (shape, dtype) in first.columns.items()}
    for part in parts:
        has_rows = all(shape[:1] == (part.rows,) for shape, _ in part.columns.values())
        if not has_rows or {name: (shape[1:], dtype) for name, (shape, dtype) in part.columns.items()} != expected:
            raise UsageError(
                f"task {task.cfg.task}: `represent` returned {part.columns} for {part.rows} rows and {first.columns} for "
                f"{first.rows}: the first dimension must be the rows, all else the same in each micro-batch"
            )
    return expected


def _plan_order(parts_by_rank: list[list[_Part]], height: int) -> tuple[np.ndarray, dict[int, int]]:
    """Return (position of each row of the global batch in the gathered vectors, first row of each micro-batch)."""
    begins = {}
    for rank, parts in enumerate(parts_by_rank):
        begin = rank * height
        for part in parts:
            begins[part.index] = (begin, part.rows)
            begin += part.rows
    order, starts, row = [], {}, 0
    for index in sorted(begins):
        begin, rows = begins[index]
        order.append(np.arange(begin, begin + rows))
        starts[index] = row
        row += rows
    return np.concatenate(order), starts


# ---- checks on the values --------------------------------------------------------------------------------------------


def _unequal(first: Vectors, again: Vectors) -> set[str]:
    """Return the vectors that pass 2 returned otherwise than pass 1, in words; this waits for the device."""
    differences = {name: ((again[name].detach() - value).norm() / value.norm()).item() for name, value in first.items()}
    return {f"`{name}` that differ by {value:.1%}" for name, value in differences.items() if value > REPEATABLE}


def _blame(loss: torch.Tensor, mine: Vectors, vectors: Vectors) -> torch.Tensor:
    """Return NaN if the loss is not finite because of this micro-batch's vectors, or of no vectors at all; else 0."""

    def spoiled(values: Vectors) -> torch.Tensor:  # 0 or NaN
        return sum(((0.0 * value).sum() for value in values.values()), torch.zeros_like(loss))

    nan = torch.full_like(loss, float("nan"))
    return torch.where(loss.isfinite(), 0.0, torch.where(spoiled(vectors).isnan(), spoiled(mine), nan))
