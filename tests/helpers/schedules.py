"""Learning rates of a schedule, as a list."""

from engine.config.run_config import RunConfig
from src.training.schedules import make_schedule


def rates(name: str, total: int = 40, warmup: int = 4, peak: float = 2.0, **kwargs) -> list[float]:
    cfg = RunConfig(learning_rate=peak, lr_scheduler_type=name, warmup_steps=warmup, lr_scheduler_kwargs=kwargs)
    schedule = make_schedule(cfg, total)
    return [schedule(update) for update in range(total)]
