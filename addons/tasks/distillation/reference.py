"""The frozen reference of a language model that learns from preferences: by default the weights that its run begins with.

With an adapter (`peft`), that is the model itself without its adapter, so no second model is in memory. Base of the tasks
preference and kto. Tests: tests/addons/tasks/test_reference.py.
"""

from dataclasses import dataclass

import torch

from addons.tasks.distillation.frozen_teacher import RANDOM, TaughtTask
from engine.config.errors import UsageError
from engine.config.option import option
from engine.config.run_config import field_values
from engine.process import private_apis
from src.losses.chunked_cross_entropy import Scored, score_tokens

BASE = "(this model without its adapter)"  # instead of a folder or Hub id


@dataclass
class ReferenceOptions:
    """Options of a task with a reference."""

    needs_model = True  # model_name_or_path or model_config

    # may_change_on_resume, because reference_revision tells whether the weights are the same.
    reference_name_or_path: str | None = option(
        "Hub id, folder or run of the frozen reference (default: the weights that this run begins with; with peft on "
        "model_name_or_path, the model without its adapter, which needs no second model in memory)",
        is_path=True,
        may_change_on_resume=True,
        from_checkpoint=True,
    )
    reference_revision: str | None = option(
        "branch, tag or commit of a Hub reference (default: main); of a folder the hash of its weights, filled in",
        from_checkpoint=True,
    )


class ReferenceTask(TaughtTask):
    """A language model with a frozen reference, or without one if `has_reference` is false."""

    frozen = "reference"
    can_shorten = False
    cut_by_cost = False  # a row has two texts, each with a length of its own

    @property
    def has_reference(self) -> bool:
        """Return whether there is a reference."""
        return True

    def load(self) -> None:
        # Options of the run: a resumed run and eval.py use the same reference, not the weights that they begin with.
        cfg, o = self.cfg, self.options
        if self.has_reference and o.reference_name_or_path is None:
            begins_with = cfg.init_from or cfg.model_name_or_path or RANDOM
            o.reference_name_or_path = BASE if self._begins_with_base() else begins_with
        if o.reference_name_or_path == BASE and not self._adapter:
            raise UsageError(f"reference_name_or_path is {BASE}, but there is no adapter (peft): remove it")
        super().load()

    @property
    def has_frozen_model(self) -> bool:
        return self.has_reference and self.options.reference_name_or_path != BASE

    @property
    def _adapter(self) -> dict | None:
        return field_values(self.cfg).get("peft")  # a field of an add-on

    def _begins_with_base(self) -> bool:
        """Return whether the weights that the run begins with are those of the model without its adapter."""
        if self._adapter is None or self.cfg.init_from:  # a run may have an adapter, which is trained further
            return False
        return str(self._adapter.get("bias", "none")) == "none"  # else biases of the base model are trained

    def score_both(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[Scored, Scored]:
        if self.options.reference_name_or_path != BASE:
            return super().score_both(model, inputs)
        student = score_tokens(model, inputs, self.plain_head)
        is_training = model.training
        with torch.no_grad(), private_apis.without_adapters(model):
            model.eval()  # without dropout, as a reference of its own
            reference = score_tokens(model, inputs, self.plain_head)
            model.train(is_training)
        return student, reference
