"""Trainable parameters that the loss does not use, and changes of requires_grad: named before ranks wait for them.

Tests: tests/distributed/test_unused_parameters.py.
"""

import re
import zlib
from typing import TYPE_CHECKING

import torch

from src.config.errors import UsageError, warn
from src.distributed.sharded_tensors import plain_name
from src.runtime import private_apis

if TYPE_CHECKING:
    from src.distributed.strategies import Strategy

FIX = "freeze them by the field freeze (an adapter of peft: name the layers in its exclude_modules)"


class GradientCheck:
    """The trainable parameters of a prepared model, and the checks that each gets a gradient on every rank."""

    def __init__(self, strategy: "Strategy", model_with_loss: torch.nn.Module):
        self.strategy = strategy
        self.parameters = {plain_name(name): p for name, p in model_with_loss.named_parameters()}
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.is_first_step = True
        self.is_checked = False  # whether `before_backward` has asked all ranks in the last backward pass of that step

    def check_trainable(self) -> None:
        """Raise UsageError if a parameter was frozen or unfrozen after the optimizer and the reduction were built."""
        changed = [name for name, p in self.parameters.items() if p.requires_grad != (name in self.trainable)]
        if changed:
            raise UsageError(
                f"requires_grad of {in_words(changed)} was changed during training, which neither the optimizer nor the "
                "reduction of gradients notices: set it in `build` of the task; to change it later, train the second part "
                "as a run of its own with --init_from CHECKPOINT"
            )

    def before_backward(self, module: torch.nn.Module, loss: torch.Tensor, is_last: bool) -> None:
        """In the first step, raise UsageError on all ranks if the backward pass would fail or hang; a collective.

        DDP waits for the gradient of every parameter in the last backward pass of a step. Sharded strategies need the
        same parameters on every rank in each pass."""
        strategy = self.strategy
        world = strategy.accelerator.num_processes
        if not self.is_first_step or self.is_checked or world == 1 or not (is_last or strategy.is_sharded):
            return
        if strategy.cfg.ddp_find_unused_parameters:
            return
        self.is_checked = is_last
        reached = {id(p) for p in reached_parameters(loss)}
        used = {plain_name(name) for name, p in strategy.parameters_in_graph(module).items() if id(p) in reached}
        unused = [name for name in self.trainable if name not in used]
        is_ddp = isinstance(module, torch.nn.parallel.DistributedDataParallel)
        mine = [0.0] * world
        mine[strategy.accelerator.process_index] = float(zlib.crc32(repr(unused).encode()) if unused else 0)
        found = strategy.hosts.sum(mine).tolist()
        if not (any(found) if is_ddp else len(set(found)) > 1):
            if unused and not strategy.has_gradients:
                warn(
                    f"the loss does not use {in_words(unused)}, but {strategy.name} applies weight decay to them: {FIX}"
                )
            return
        raise UsageError(self._explain(unused, found))

    def _explain(self, unused: list[str], found: list[float]) -> str:
        """Return the message of the first step's error, the same on all ranks."""
        names = self.strategy.hosts.union(set(unused))
        ranks = [str(rank) for rank, value in enumerate(found) if value]
        where = "on all ranks" if len(ranks) == len(found) else f"on rank {', '.join(ranks)}"
        fix = FIX + ", or, if other rows use them, "
        fix += "use DDP or FSDP2 with " if not self.strategy.has_gradients else "set "
        return (
            f"the loss does not use {in_words(names)} in the first step ({where}), and {self.strategy.name} would wait for "
            f"their gradients: {fix}--ddp_find_unused_parameters true"
        )

    def after_last_backward(self, module: torch.nn.Module) -> None:
        """Raise UsageError if DDP is still waiting for a gradient; in step 1, warn of parameters without one."""
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            try:
                private_apis.check_reduced(module)
            except RuntimeError as error:
                raise UsageError(self._later_error(str(error))) from error
        if self.is_first_step and self.strategy.has_gradients:
            unused = [name for name, p in self.trainable.items() if p.grad is None]
            if unused:
                warn(
                    f"{in_words(unused)} got no gradient in the first step, because the loss does not use them: if no row "
                    f"does, {FIX}"
                )
        self.is_first_step = False

    def _later_error(self, text: str) -> str:
        """Return a message for torch's "Expected to have finished reduction", with names instead of indices."""
        names = list(self.trainable)
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
        missing = [names[int(index)] for index in found[1].split()] if found else ["some parameters"]
        return (
            f"the loss does not use {in_words(missing)} in this step, and the other ranks wait for their gradients: {FIX}, "
            "or, if other rows use them, set --ddp_find_unused_parameters true"
        )


def in_words(names: list[str]) -> str:
    """Return "a parameter, NAME" or "N parameters (NAME, …)" with at most five names."""
    if len(names) == 1:
        return f"parameter {names[0]}"
    return f"{len(names)} parameters ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})"


def reached_parameters(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves that get a gradient in the backward pass of `loss`."""
    nodes, seen, found = [loss.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return found
