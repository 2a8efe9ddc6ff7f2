"""Profile of the steps that `profile_steps` names: a table of operations and a trace in RUN/profile/.

Tests: tests/src/training/test_utilization.py.
"""

from functools import partial
from pathlib import Path

import torch

from engine.config.errors import call_or_warn
from engine.config.run_config import RunConfig


def step_profiler(cfg: RunConfig, step: int) -> torch.profiler.profile | None:
    """Return the profiler of `profile_steps`, begun after `step`: its `step` ends a step, its `stop` the profile.

    At the end of the profile, which waits for the device, it writes a table of the operations, and beside it a trace for
    ui.perfetto.dev. A run that begins between the steps profiles the rest. Return None if no step is left."""
    first, last = cfg.profile_steps or (0, 0)
    if step >= last:
        return None
    file = Path(cfg.output_dir, "profile", f"steps_{first}_to_{last}.txt")
    wait = max(0, first - 1 - step)
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=wait, warmup=0, active=last - step - wait, repeat=1),
        on_trace_ready=partial(call_or_warn, "the profile", _write_profile, file),
    )
    profiler.start()
    return profiler


def _write_profile(file: Path, profile: torch.profiler.profile) -> None:
    file.parent.mkdir(exist_ok=True)
    profile.export_chrome_trace(str(file.with_suffix(".json.gz")))
    column = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    file.write_text(profile.key_averages().table(sort_by=column, row_limit=40))
