"""The techniques of a run, as train.py uses them: each step goes through all of them, the lowest `order` first.

Tests: tests/addons/techniques/test_technique_chain.py.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from addons.techniques import TECHNIQUES, Technique
from addons.techniques._options import in_words, options_of, read_options
from addons.techniques._weight_copies import assign
from engine.config.errors import UsageError, did_you_mean, list_errors
from engine.config.run_config import RunConfig, field_values
from engine.distributed.backends import Backend
from engine.distributed.sharded_tensors import plain_name, reshard
from engine.run.techniques import Techniques
from engine.run.totals_and_votes import ComputeGradient, StepBatch, StepLosses, StepTotals
from engine.run.train_state import Run


def read_techniques(cfg: Any) -> tuple[dict[str, Technique], list[str]]:
    """Return (the techniques that the run file names, the outermost first; one sentence for each error)."""
    techniques: dict[str, Technique] = {}
    errors = []
    for name, options in (field_values(cfg).get("techniques") or {}).items():
        if name not in TECHNIQUES:
            there = f"{did_you_mean(name, TECHNIQUES)}; choose from {', '.join(TECHNIQUES)}"
            errors.append(f"techniques: {name}: unknown{there}")
            continue
        try:
            techniques[name] = read_options(TECHNIQUES[name](), options)
        except ValueError as error:
            errors.append(f"techniques: {name}: {error}")
    techniques = dict(sorted(techniques.items(), key=lambda item: item[1].order))
    for name, technique in techniques.items():
        errors += [f"techniques: {name}: {error}" for error in technique.errors()]
    return techniques, [*errors, *_errors_between(techniques, cfg)]


class TechniqueChain(Techniques):
    """The techniques that the run file names."""

    def __init__(self, cfg: RunConfig):
        """Raise one UsageError that lists all unknown names and invalid options."""
        self.techniques, errors = read_techniques(cfg)
        if errors:
            raise UsageError(list_errors(errors))
        self.final = next((name for name, each in self.techniques.items() if each.final), "")

    @property
    def copies(self) -> int:  # pyrefly: ignore
        """Return the number of copies of the trained weights, in float32, that the techniques keep."""
        return sum(technique.copies for technique in self.techniques.values())

    @property
    def copies_in_step(self) -> int:  # pyrefly: ignore
        """Return the number of such copies in memory within a step, those that are kept included."""
        return self.copies + sum(technique.copies_in_step for technique in self.techniques.values())

    def plan(self) -> dict[str, str]:
        """Return "sam (rho 0.05), ema (decay 0.999, final)": the techniques with their options, outermost first."""
        words = {name: in_words(options_of(technique)) for name, technique in self.techniques.items()}
        return {"techniques": ", ".join(f"{name} ({text})" if text else name for name, text in words.items())}

    # ---- before training ---------------------------------------------------------------------------------------------

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        """Let the techniques change the model before it is compiled, wrapped and given to the optimizer."""
        for technique in self.techniques.values():
            technique.change_model(model, cfg)

    def check(self, run: Run) -> None:
        """Raise UsageError if a technique does not fit the run."""
        for name, technique in self.techniques.items():
            if run.backend.accelerator.distributed_type.value == "DEEPSPEED" and not technique.deepspeed:
                raise UsageError(
                    f"techniques: {name} does not support {run.backend.name}, which owns gradients and weights: use FSDP2 "
                    "(accelerate_configs/fsdp2.yaml)"
                )
            technique.run = run
            technique.check()

    def begin(self, run: Run) -> dict[str, Technique]:
        """Prepare all techniques; return those with a state, by name: the parts of a checkpoint beside the model."""
        self.run = run
        self.check(run)
        for technique in self.techniques.values():
            technique.begin()
        return {n: t for n, t in self.techniques.items() if type(t).state_dict is not Technique.state_dict}

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def wrap_gradient(self, compute: ComputeGradient) -> ComputeGradient:
        """Return `compute` with all techniques around it, the first one outermost."""

        def compute_with_techniques(
            backend: Backend, module: torch.nn.Module, batch: StepBatch, totals: StepTotals
        ) -> StepLosses:
            def innermost(batch: StepBatch, totals: StepTotals) -> StepLosses:
                replaced = next((each.gradient for each in self.techniques.values() if each.gradient), None)
                used = backend.wrap_gradient(replaced) if replaced else compute
                return used(backend, module, batch, totals)

            inner = innermost
            for technique in reversed(self.techniques.values()):
                inner = partial(technique.around_gradient, inner)
            return inner(batch, totals)

        return compute_with_techniques

    @torch.no_grad()
    def change_gradient(self) -> None:
        """Change the gradient of the global batch before it is clipped by its norm."""
        changing = [t for t in self.techniques.values() if type(t).change_gradient is not Technique.change_gradient]
        if changing:
            self.run.backend.unscale_gradients()
        for technique in changing:
            technique.change_gradient()

    @torch.no_grad()
    def after_update(self, skipped: torch.Tensor) -> None:
        """Let the techniques follow an update of the weights, which the device may have skipped."""
        for technique in self.techniques.values():
            technique.after_update(skipped)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, metrics: dict | None, evaluate: Callable[[], dict | None]) -> dict | None:
        """Return the metrics of the weights, those of averages as NAME/metric; None if a stop interrupted it."""
        if metrics is None:
            return None
        run, raw = self.run, metrics
        for name, technique in self.techniques.items():
            if (average := technique.average()) is None:
                continue
            of_average = raw
            if average:
                with exchanged(run.model, average):
                    of_average = evaluate()
            if of_average is None:
                return None
            sizes = ("weight", "examples")  # of the data, the same for all weights
            of_average = {key: value for key, value in of_average.items() if key.rpartition("/")[2] not in sizes}
            metrics = metrics | {f"{name}/{key}": value for key, value in of_average.items()}
        return metrics

    def load_final(self, load: Callable[[str, Any], None] | None) -> bool:
        """Give the model the average that final/ holds; return whether there is one.

        There is none if none is asked for, or if no weights had been averaged by then."""
        if not self.final:
            return False
        technique = self.techniques[self.final]
        if load is not None:
            load(self.final, technique)
        weights = technique.average()
        if weights:
            assign(named_tensors(self.run.model), weights)
        return bool(weights)


@contextmanager
def exchanged(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within, the parameters and buffers named in `weights` have these values; afterwards, bitwise their own again."""
    named = named_tensors(model)
    before = {name: named[name].detach().clone() for name in weights}
    assign(named, weights)
    try:
        yield
    finally:
        assign(named_tensors(model), before)


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by name, sharded if it is; tied ones appear once."""
    reshard(model)
    return {plain_name(name): value for name, value in (*model.named_parameters(), *model.named_buffers())}


def _errors_between(techniques: Mapping[str, Technique], cfg: RunConfig) -> Iterator[str]:
    """Yield a sentence for each rule between the techniques, or between them and the data, that is violated."""
    final = [name for name, technique in techniques.items() if technique.final]
    if len(final) > 1:
        yield f"techniques: {' and '.join(final)} have final: true, but final/ can hold one average: keep it for one of them"
    moving = [name for name, technique in techniques.items() if technique.moves_weights]
    if len(moving) > 1:
        yield f"techniques: {' and '.join(moving)} are given, but each moves the weights for a second gradient: keep one"
    for name in techniques.keys() & set(cfg.mixture or ()):
        yield f"mixture: {name} is also the name of a technique, which names its metrics {name}/loss: rename the source"
