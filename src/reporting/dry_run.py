"""The model of a dry run, for its plan: on the CPU, changed and frozen as the run file says, not trained.

`--smoke` checks what a plan cannot show. Tests: tests/config/test_dry_run.py.
"""

import inspect
import sys
from contextlib import redirect_stderr
from io import StringIO

from src.config.schema import RunConfig
from src.tasks import Task
from src.training.optimizers import make_optimizer
from src.training.step import ModelWithLoss
from src.training.technique_chain import TechniqueChain

BUILT = 1e9  # parameters of a model that gets its weights; more may not fit into this machine


def planned_model(cfg: RunConfig, task: Task) -> ModelWithLoss:
    """Return the model of a run; with more than BUILT parameters, these have no values, and take no memory."""
    empty = "empty" in inspect.signature(task.build).parameters  # only sharded runs of a fork need it
    with redirect_stderr(StringIO()) as warnings:
        model = task.build_model(empty=True) if empty else task.build_model()
    if empty and sum(p.numel() for p in model.parameters()) <= BUILT:
        model = task.build_model()
    else:
        print(warnings.getvalue(), end="", file=sys.stderr)
    module = ModelWithLoss(model, task)
    TechniqueChain(cfg).change_model(module, cfg)
    make_optimizer(cfg, module, fused=False)  # freezes parameters
    return module
