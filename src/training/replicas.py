"""Model replicas of all ranks: averaging under local SGD, comparison before each save.

Tests: tests/training/test_local_sgd.py and tests/distributed/test_replica_check.py.
"""

import torch

from src.config.schema import RunConfig
from src.distributed import replica_check
from src.distributed.host_group import HostGroup
from src.distributed.strategies import Strategy
from src.training.local_sgd import LocalSGD
from src.training.train_state import TrainState


class Replicas:
    """Averages and compares replicas for the training loop. Does nothing on one process or if the model is sharded."""

    def __init__(
        self,
        strategy: Strategy,
        host_group: HostGroup,
        cfg: RunConfig,
        model_with_loss: torch.nn.Module,
        optimizer,
        state: TrainState,
        total_steps: int,
    ):
        self.host_group, self.cfg, self.state, self.total_steps = host_group, cfg, state, total_steps
        self.model = model_with_loss
        self.comparable = strategy.accelerator.num_processes > 1 and not strategy.is_sharded
        self.local_sgd = None
        if strategy.uses_local_sgd:
            self.local_sgd = LocalSGD(strategy, host_group, cfg, optimizer, state)

    def after_step(self) -> None:
        """Average replicas every `local_sgd_steps`, compare every `drift_check_steps`; do both after the last step."""
        if self.local_sgd and self._due(self.cfg.local_sgd_steps):
            self.local_sgd.average()
        if self._due(self.cfg.drift_check_steps):
            self._compare()

    def before_save(self) -> None:
        """Average the replicas under local SGD; then raise Failure if any two replicas differ."""
        if self.local_sgd:
            self.local_sgd.average()
        self._compare()

    def _due(self, every: int | None) -> bool:
        return bool(every) and (self.state.step % every == 0 or self.state.step == self.total_steps)

    def _compare(self) -> None:
        if self.comparable:
            replica_check.check_replicas(self.host_group, self.model, self.state.step)
