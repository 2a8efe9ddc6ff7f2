"""The field of runs in stores, which --help reads before slow imports."""

from dataclasses import dataclass

from engine.config.addon import Addon
from engine.config.option import option

LEASE = 90.0


@dataclass(frozen=True)
class Stores(Addon):
    store_lease: float = option(
        "seconds after which another machine may take over a run in a store whose machine is gone",
        LEASE,
        group="checkpoints",
        min=2,
        may_change_on_resume=True,
        from_checkpoint=False,
        is_rare=True,
    )
