"""The model of a dry run, for its plan: on the CPU, changed and frozen as the run file says, not trained.

`--smoke` checks what a plan cannot show. Tests: tests/config/test_dry_run.py.
"""

import inspect

from src.config.schema import RunConfig
from src.tasks import Task
from src.training.optimizers import make_optimizer
from src.training.step import ModelWithLoss
from src.training.techniques import Techniques


def planned_model(cfg: RunConfig, task: Task, techniques: Techniques) -> ModelWithLoss:
    """Return the model of a run. Its parameters have no values, and take no memory, if the task can build it so."""
    empty = "empty" in inspect.signature(task.build).parameters  # only sharded runs of a fork need it
    module = ModelWithLoss(task.build_model(empty=True) if empty else task.build_model(), task)
    techniques.change_model(module, cfg)
    make_optimizer(cfg, module, fused=False)  # freezes parameters
    return module
