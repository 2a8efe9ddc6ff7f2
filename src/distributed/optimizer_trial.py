"""Trial of an optimizer before step 1: does it update, resume and shard exactly? On small copies of the run's shapes.

An optimizer that keeps a number outside of its state, draws at random or looks only at its shard would train
something else without a word. AdamW and SGD are known. Tests: tests/training/test_optimizer_names.py.
"""

import copy
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from src.config.errors import UsageError
from src.distributed import optimizer_state
from src.distributed.sharded_tensors import gather_full

if TYPE_CHECKING:
    from src.distributed.strategies import Strategy

STEPS = 2  # before the state is saved, and after
SAME, CLOSE = 1e-5, 2e-2  # bars for a resumed and for a sharded trial: distance / size of the whole update


def try_optimizer(strategy: "Strategy", optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError on every rank if `optimizer` cannot train, resume or shard exactly. A collective.

    Costs some updates of one parameter of each shape and group, and memory for about six copies of these."""
    if optimizer_state.is_simple(optimizer):
        return
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without accelerate's wrapper
    try:
        reason = _try(optimizer)
    except UsageError as error:
        reason = str(error)
    except Exception as error:
        text = str(error).strip().split("\n")[0][:300]
        reason = f"its trial update fails with {type(error).__name__}: {text}"
    if reasons := strategy.hosts.union({reason} if reason else set()):
        raise UsageError(
            f"optim is {strategy.cfg.optim}, which cannot train here ({strategy.name}): {reasons[0]}. Choose another optimizer"
        )


def _try(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why the optimizer cannot be used, or None."""
    if any("lr" not in group for group in optimizer.param_groups):
        return "it has no learning rate, and a schedule sets one here"
    chosen = _one_of_each_shape(optimizer)
    sharded = any(isinstance(p, DTensor) for p in chosen)
    first, second = _Trial(optimizer, chosen, whole=False), _Trial(optimizer, chosen, whole=False)
    whole = _Trial(optimizer, chosen, whole=True) if sharded else first
    began = _random_states()
    trials = [first, whole] if sharded else [first]
    for trial in trials:
        trial.steps(0, STEPS)
    second.resume(first)
    for trial in [*trials, second]:
        trial.steps(STEPS, 2 * STEPS)
    if _random_states() != began:
        return "it draws random numbers, which would differ between processes and after a resume"
    if not first.distance(second) <= SAME:
        return "a resumed run would differ: it keeps something outside of its state"
    if not first.distance(whole) <= CLOSE:
        return "a sharded matrix is updated in another way than a whole one"
    return None


def _one_of_each_shape(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found: dict[tuple, torch.Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            mesh = (p.placements, id(p.device_mesh)) if isinstance(p, DTensor) else None
            found.setdefault((index, p.shape, p.dtype, p.stride(), mesh), p)
    return list(found.values())


def _random_states() -> list:
    torch_state = torch.random.get_rng_state().tolist()
    return [torch_state, random.getstate(), [str(part) for part in np.random.get_state()]]


class _Trial:
    """A copy of the optimizer with copies of the chosen parameters, or with `whole` copies that are not sharded."""

    def __init__(self, optimizer: torch.optim.Optimizer, chosen: list[torch.Tensor], whole: bool):
        values = [gather_full(p) if whole else p.detach() for p in chosen]
        self.parameters = [torch.nn.Parameter(value.clone(memory_format=torch.preserve_format)) for value in values]
        # The copy refers to these parameters instead of the model's, and to empty ones instead of the rest.
        memo: dict[int, Any] = {id(p): torch.nn.Parameter(torch.zeros(0)) for p in _parameters(optimizer)}
        memo |= {id(p): own for p, own in zip(chosen, self.parameters, strict=True)}
        # Not copy.deepcopy(optimizer): torch copies no attributes but state and groups.
        self.optimizer = memo[id(optimizer)] = object.__new__(type(optimizer))
        vars(self.optimizer).update(copy.deepcopy(vars(optimizer), memo))
        mine = {id(p) for p in self.parameters}
        for p in set(self.optimizer.state) & {memo[id(p)] for p in _parameters(optimizer)} - set(self.parameters):
            del self.optimizer.state[p]  # Adagrad has a state before its first update
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in mine]
            group["lr"] = group["lr"] or 1e-3
        self.parameters = _parameters(self.optimizer)  # in the order of the groups
        self.start = [gather_full(p).detach().clone() for p in self.parameters]
        self.names = [str(index) for index in range(len(self.parameters))]

    def steps(self, begin: int, end: int) -> None:
        """Update `end - begin` times with gradients that depend on the number of the step only."""
        for step in range(begin, end):
            for index, p in enumerate(self.parameters):
                generator = torch.Generator().manual_seed(1000 * step + index)
                value = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
                p.grad = _like(p, value)
            self.optimizer.step()

    def resume(self, other: "_Trial") -> None:
        """Take the weights of `other`, and its state by way of the bytes of a checkpoint."""
        for own, p in zip(self.parameters, other.parameters, strict=True):
            own.data.copy_(p.data)
        state = optimizer_state.flatten(other.optimizer, other.names)
        tensors = {path: gather_full(value).contiguous() for path, value in state.items() if torch.is_tensor(value)}
        numbers = {path: value for path, value in state.items() if not torch.is_tensor(value)}
        saved = safetensors.torch.save({path: value.clone() for path, value in tensors.items()})
        reader = _Reader(safetensors.torch.load(saved))
        optimizer_state.restore(self.optimizer, self.names, reader, json.loads(json.dumps(numbers, allow_nan=False)))

    def distance(self, other: "_Trial") -> float:
        """Return the largest distance of a parameter from that of `other`, over the size of its update."""
        found = 0.0
        for p, q, start in zip(self.parameters, other.parameters, self.start, strict=True):
            moved = (gather_full(p).detach() - start).double().norm()
            apart = (gather_full(p).detach() - gather_full(q).detach()).double().norm()
            if not torch.isfinite(moved):
                raise UsageError("its trial update is not finite")
            found = max(found, float(apart / moved.clamp(min=1e-30)))
        return found


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _like(p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, sharded like `p` if it is."""
    if not isinstance(p, DTensor):
        return value
    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)


class _Reader:
    """Tensors that were saved, read as TensorReader reads them."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.where = tensors

    def like(self, path: str, parameter: torch.Tensor | None) -> torch.Tensor:
        value = self.where[path]
        return _like(parameter, value) if parameter is not None and value.shape == parameter.shape else value
