"""What a run consists of: one object that train.py makes and passes to checkpoints, reports and add-ons.

Tests: tests/training/test_techniques.py.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from src.config.schema import RunConfig
from src.distributed.host_group import HostGroup
from src.distributed.strategies import Strategy
from src.storage.jsonl import JsonlWriter
from src.tasks import Task
from src.training.meter import Meter
from src.training.step import ModelWithLoss
from src.training.train_state import TrainState


@dataclass(eq=False)
class Run:
    """What a run consists of. Every rank has one."""

    cfg: RunConfig
    strategy: Strategy
    hosts: HostGroup
    task: Task
    datasets: dict[str, Any]
    model: ModelWithLoss  # its parameters are trained; sharded under FSDP2
    module: torch.nn.Module  # the wrapped model, to call
    optimizer: torch.optim.Optimizer
    num_steps: int
    state: TrainState = field(default_factory=TrainState)  # in a step, state.step already counts this step
    meter: Meter = field(default_factory=Meter)  # sums for the next train line of metrics.jsonl
    files: list[JsonlWriter] = field(default_factory=list)  # of lines about steps: flushed before each checkpoint

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trainable parameters by name; sharded ones are DTensors."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
