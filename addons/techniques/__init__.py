"""Technique: what an entry of the run file's `techniques` may change in a step, an evaluation and a checkpoint.

Write your own as one file here: its name is the name in the run file, and it defines one subclass of Technique
(docs/techniques.md). Tests: tests/addons/techniques/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.config.addon import Addon
from engine.config.errors import UsageError
from engine.config.find_addons import addon_names, load_addon
from engine.config.option import option
from engine.config.run_config import RunConfig
from engine.run.techniques import Techniques
from engine.run.totals_and_votes import ComputeGradient, StepBatch, StepLosses, StepTotals
from engine.run.train_state import Run

# compute_gradient of train.py without its first arguments
Compute = Callable[[StepBatch, StepTotals], StepLosses]


@dataclass(frozen=True)
class NamedTechniques(Addon):
    """The techniques that a run file names."""

    techniques: dict | None = option(
        "techniques by name, each with its options: {NAME: {OPTION: VALUE}, …} (docs/techniques.md)", group="techniques"
    )

    def errors(self, cfg: RunConfig, training: bool) -> list[str]:
        """Return a sentence for each unknown name, invalid option or rule that is violated."""
        from addons.techniques._chain import read_techniques

        return read_techniques(cfg)[1] if training else []

    def complete(self, cfg: RunConfig) -> dict[str, Any]:
        """Return `techniques` with all options, so that config.yaml and checkpoints record defaults that may change."""
        from addons.techniques._chain import read_techniques
        from addons.techniques._options import options_of

        techniques, problems = read_techniques(cfg)
        return {} if problems else {"techniques": {name: options_of(each) for name, each in techniques.items()}}

    def make_techniques(self, cfg: RunConfig) -> Techniques:
        """Return the techniques of a run, as train.py calls them."""
        from addons.techniques._chain import TechniqueChain

        return TechniqueChain(cfg)

    @classmethod
    def identity(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a run with an entry for each technique, to compare two runs."""
        by_name: dict[str, dict[str, Any]] = {}
        for name, options in (values.get("techniques") or {}).items():
            entry = {key: list(v.items()) if isinstance(v, dict) else v for key, v in options.items()}
            by_name[f"techniques.{name}"] = entry
        for name, load in TECHNIQUES.items():  # a checkpoint may name others, which are not here any more
            key = f"techniques.{name}"
            if key in by_name and load().depends_on_length:
                by_name[key] |= {field: values[field] for field in ("max_steps", "num_train_epochs")}
        return {name: value for name, value in values.items() if name != "techniques"} | by_name

    @classmethod
    def may_change(cls) -> set[str]:
        """Return the entries of `identity` that a resumed run may change: techniques that change no number."""
        return {f"techniques.{name}" for name, load in TECHNIQUES.items() if not load().changes_training}


class Technique:
    """One technique. Subclass it as a dataclass; its fields, declared by `option(...)`, are its options.

    A method that you do not define does nothing. All ranks call the methods in the same order, so a method may use
    collectives, and none may let a rank decide alone. What it draws at random must depend on (seed, step) or on the
    micro-batch, and what it remembers between steps belongs in `state_dict`: then results do not depend on the number
    of processes, and a resumed run continues exactly."""

    order = 50  # among the techniques of a run: the lowest is the outermost, and computes the gradient of those above
    deepspeed = False  # whether it works under DeepSpeed, which owns gradients and weights
    depends_on_length = False  # whether its steps depend on the number of steps, which a resumed run then cannot change
    changes_training = True  # False: it changes no number, so a resumed run may add, remove or change it; has no state
    copies = 0  # of the trained weights, in float32, in memory and checkpoints: for estimates of memory and disk
    copies_in_step = 0  # more of them within a step: for the estimate of memory
    moves_weights = False  # whether it computes a gradient at other weights; one technique at most
    final = False  # whether final/ holds `average` instead of the weights of training; one technique at most
    gradient: ComputeGradient | None = None  # replaces compute_gradient of train.py, while it is set
    run: Run  # set before `begin`

    def errors(self) -> list[str]:
        """Return one sentence for each rule between the options that is violated."""
        return []

    # ---- before training ---------------------------------------------------------------------------------------------

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        """Change the model, or freeze parameters, before it is wrapped and the optimizer is made; add hooks."""

    def check(self) -> None:
        """Raise UsageError if `self.run` does not fit."""

    def begin(self) -> None:
        """Prepare for training with `self.run`. Weights are loaded; in a resumed run, `load_state_dict` follows."""

    # ---- in a step, in this order ------------------------------------------------------------------------------------

    def around_gradient(self, compute: Compute, batch: StepBatch, totals: StepTotals) -> StepLosses:
        """Fill `.grad` with the gradient of the step and return the losses; `compute` may be called several times."""
        return compute(batch, totals)

    def change_gradient(self) -> None:
        """Change `.grad`, the gradient of the global batch on every rank (its shard, if sharded), before it is clipped
        by its norm. It has no loss scale (fp16). Keep what is not finite, so that the update is skipped.

        `self.run.state` has the step and its learning rate. The weights before the update are here for the last
        time."""

    def after_update(self, skipped: torch.Tensor) -> None:
        """Use or change the weights after the optimizer's update; `.grad` is cleared.

        `skipped` is a bool on the device: do not wait for it. The gradient of a skipped update may hold NaN, so commit
        what is remembered of gradients here (`torch.where`). A step without targets calls no technique."""

    # ---- beside the model --------------------------------------------------------------------------------------------

    def average(self) -> dict[str, torch.Tensor] | None:
        """Return weights to evaluate beside those of training (`NAME/loss`), or None; {}: the weights of training.

        Names are those of `run.model` without the prefixes of wrappers; buffers may be among them."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold: a flat dict of tensors (sharded like parameters), numbers and strings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def technique_class(name: str) -> type[Technique]:
    """Return the subclass of Technique that addons/techniques/NAME.py defines."""
    module = load_addon("techniques", name)
    [subclass] = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Technique) and each.__module__ == module.__name__
    ]
    if hasattr(subclass, "compute_gradient"):
        raise UsageError(
            f"techniques: {name}: {subclass.__name__} has a method `compute_gradient`, which is not called: rename it to "
            "`around_gradient(compute, batch, totals)`"
        )
    return subclass


# name in the run file -> function that returns its class, and imports its file
TECHNIQUES: Mapping[str, Callable[[], type[Technique]]] = {
    name: partial(technique_class, name) for name in addon_names("techniques")
}
