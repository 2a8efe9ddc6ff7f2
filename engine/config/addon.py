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

    def change_built_model(self, task: Any, model: Any, weights: Any, empty: bool) -> None:
        """Change the model in place after a task has built it; the arguments are those of `Task.build`."""

    def make_techniques(self, cfg: Any) -> Any:
        """Return the object whose methods change a step (engine/run/techniques.py); None: as without techniques."""

    # ---- files -------------------------------------------------------------------------------------------------------

    def names_of_base(self, model: Any) -> "Iterable[str]":
        """Return the names of the tensors of `model` that belong to a base model, which the run file names: checkpoints
        leave out the frozen ones and hold the identity of the base model instead. An add-on that defines this defines
        `write_own_tensors` and `has_trained`, too."""
        return ()

    def has_trained(self, folder: "Path") -> bool:
        """Return whether a folder holds what the add-on has trained, on a base model that may be elsewhere."""
        return False

    def writes_base(self) -> bool:
        """Return whether final/ holds a whole model, if checkpoints leave out the base model."""
        return True

    def write_own_tensors(
        self, model: Any, tensors: dict[str, Any], folder: "Path", rank: int, world: int
    ) -> dict[str, Any]:
        """Write the add-on's tensors to files of their own when a model is saved; return the others, by the names of the
        task's model. `rank` of the `world` processes that write."""
        return tensors

    def change_base_to_merge(self, task: Any, model: Any) -> Any:
        """Change the base model, as the task has built it, before another add-on merges an adapter into it; return the
        dtype of the merged weights, None: that of the base model."""

    def change_final_model(self, folder: "Path", task: Any) -> bool:
        """Change the files of final/ when it is complete, before it gets its name; return whether it has done so."""
        return False

    def accepts_final(self, folder: "Path") -> bool:
        """Return whether an intact final/ of an earlier start is what this run file asks for; else it is written anew."""
        return True

    def model_card(self, cfg: Any) -> str:
        """Return a paragraph for the model card of final/."""
        return ""

    def loading_lines(self, model: Any) -> list[str] | None:
        """Return lines of Python that load the model of final/ and import its library first; None: as a whole model."""

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
