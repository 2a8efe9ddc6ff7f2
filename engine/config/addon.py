"""Add-on: what one with fields of its own may do; methods that do nothing, called by name throughout engine/ and src/.

An add-on derives one class from Addon in a file of addons/, as a frozen dataclass: its fields, each declared by
`option(...)`, are fields of the run file. The core makes an instance with the values of the run file, and calls its
methods, if one of the fields has another value than its default. Tests: tests/project/test_without_addons.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from engine.config.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Addon:
    """One add-on. A method that it does not define does nothing, or returns its argument.

    What it defines besides begins with `_`: any other name is refused, since nothing would call it."""

    # False: training rows are read while training, so that no one knows all of them before.
    knows_all_rows: ClassVar[bool] = True

    # ---- the run file ------------------------------------------------------------------------------------------------

    def errors(self, cfg: Any, training: bool) -> Iterable[str]:
        """Yield a sentence for each rule between fields that is violated; False for `training`: in an evaluation."""
        return ()

    def complete(self, cfg: Any) -> dict[str, Any]:
        """Return values of its fields with all defaults filled in, for config.yaml and checkpoints."""
        return {}

    @classmethod
    def names_elsewhere(cls) -> dict[str, str]:
        """Return {field of another trainer: what to give instead}."""
        return {}

    # ---- a resume, which compares the fields of two runs -------------------------------------------------------------

    @classmethod
    def identity(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a run as they are compared with those of the checkpoint."""
        return values

    @classmethod
    def may_change(cls) -> set[str]:
        """Return the names in `identity` that a resumed run may change, besides fields that say so."""
        return set()

    # ---- data --------------------------------------------------------------------------------------------------------

    def check_task(self, cfg: Any, task: Any) -> None:
        """Raise UsageError if the task, with its tokenizer loaded, does not fit; before data is prepared."""

    def find_sources(self, cfg: Any, split: str) -> dict[str, Any] | None:
        """Return the sources of a split by name, of a class derived from Source; None: as engine/rows/sources.py does."""

    def fetch_source(self, source: Any, cfg: Any) -> Any:
        """Return a source with its files downloaded, or looked up; None: as engine/rows/sources.py does."""

    def open_source(self, cfg: Any, task: Any, source: Any) -> Any:
        """Return training data with a method `step_batches`, which reads them while training; None: rows are prepared,
        as engine/plan/dataset.py does."""

    def after_preparation(self, cfg: Any, task: Any, source: Any, split: Any) -> None:
        """Use the prepared rows of a source, on all processes; an add-on that defines this needs prepared rows."""

    # ---- the plan: which rows are in which step ----------------------------------------------------------------------

    def step_sizes(self, cfg: Any, num_examples: int) -> Any:
        """Return the StepSizes (engine/plan/batch_plan.py): the examples of each step; None: global_batch_size."""

    def change_plan(self, plan: Any, cfg: Any, task: Any, train_set: Any) -> Any:
        """Return the PlanConfig (engine/plan/batch_plan.py) with other values for its last fields. The ledger records the
        fields of an add-on that defines this."""
        return plan

    def change_rows(self, task: Any, rows: list[dict], step: int) -> list[dict]:
        """Return the prepared rows of a micro-batch as they are collated at this step of training."""
        return rows

    def plan_rows(self, cfg: Any, task: Any, train_set: Any, total: int, rows: dict[str, str]) -> dict[str, str]:
        """Return lines that are added to the printed plan `rows`, or replace lines of it; `total`: steps of the run."""
        return {}

    # ---- the model and the step --------------------------------------------------------------------------------------

    def change_config(self, cfg: Any, config: Any) -> None:
        """Change the config of a model of transformers when it was read."""

    def build(self, task: Any, weights: Any, empty: bool) -> Any:
        """Return the model in place of `Task.build`, if the folder `weights` of a run may lack a part of it; None: as the
        task builds it."""

    def change_built_model(self, task: Any, model: Any, weights: Any, empty: bool) -> None:
        """Change the model in place after a task has built it; the arguments are those of `Task.build`."""

    def make_techniques(self, cfg: Any) -> Any:
        """Return the object whose methods change a step (engine/run/techniques.py); None: as without techniques."""

    # ---- files -------------------------------------------------------------------------------------------------------

    def left_out(self, model: Any, tensors: dict[str, Any], final: bool) -> set[str]:
        """Return the names in `tensors`, of the saved part `model`, that a checkpoint, or final/ if `final`, leaves out: they
        are elsewhere. An add-on that defines this defines `build` and `save`, too."""
        return set()

    def save(
        self, task: Any, model: Any, tensors: dict[str, Any], folder: "Path", rank: int, world: int
    ) -> dict[str, Any] | None:
        """Write files of the add-on's own when a model is saved; return the tensors that are left to be written as its
        weights, None: it is saved without. `rank` of the `world` processes that write."""
        return tensors

    def finish(self, task: Any, folder: "Path") -> bool:
        """Change the files of final/ when it is complete, before it gets its name; return whether it has done so. A run that
        is started again with other fields of the add-on writes final/ again."""
        return False

    def change_card(self, card: Any, task: Any, model: Any) -> None:
        """Change what the model card of final/ says, a Card (engine/checkpointing/model_card.py)."""

    def final_is_written(self, cfg: Any) -> str:
        """Use final/, on the main process at the end of a run; return a line to print."""
        return ""


def overrides(addon: Addon | type[Addon], *methods: Callable[..., Any]) -> bool:
    """Return whether an add-on, or its class, defines one of these methods of Addon."""
    cls = addon if isinstance(addon, type) else type(addon)
    return any(getattr(cls, method.__name__) is not method for method in methods)


def check_names(cls: type[Addon]) -> None:
    """Raise UsageError for a name that Addon does not know, such as a misspelled method, and no `option`."""
    known = {name for name in vars(Addon) if not name.startswith("_")}
    declared = {field.name for field in fields(cls)}
    defined = {name for name in vars(cls) if not name.startswith("_")}
    for name in sorted(defined - declared - known):
        raise UsageError(
            f"{cls.__module__}: {cls.__name__} has `{name}`, which is no method of Addon{did_you_mean(name, known)} "
            "(engine/config/addon.py has all of them; a name of your own begins with _, a field is declared by option(...))"
        )
