"""Your own fields of the run file: type, help, default, bounds. `make schema` shows them to --help and editors.

engine/config/run_config.py has all others. Tests: tests/src/test_fields.py.
"""

from dataclasses import dataclass

from engine.config import run_config


@dataclass(frozen=True)
class RunConfig(run_config.RunConfig):
    """All fields that say what is trained. Add one line for each field of yours, such as

    calm: float = option("weight of the entropy in the loss", 0.0, min=0)

    A resumed run may not change it, unless it says `may_change_on_resume=True`."""
