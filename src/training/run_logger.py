"""RunLogger: the values of train lines and eval lines, and what is printed when a run begins.

Add your own values here. engine/run/run_record.py writes them to metrics.jsonl, console and trackers.
Tests: tests/src/training/test_run_logger.py.
"""

from collections.abc import Callable

from engine.checkpointing.resume import Start
from engine.models.compile_and_recompute import compiled_graphs
from engine.plan.batch_plan import epochs_at
from engine.run.run_record import RunRecord
from engine.run.techniques import Techniques
from engine.run.totals_and_votes import StepLosses, StepTotals
from engine.run.train_state import Intervals, Run
from src.training.environment import environment, topology
from src.training.run_plan import plan_table, run_notes
from src.training.utilization import GpuUse


class RunLogger:
    """Logs a run. Every rank calls every method, because a train line sums over all of them."""

    def __init__(self, run: Run, due: Intervals):
        self.run = run
        self.due = due
        self.gpu_use = GpuUse(run)
        self.record = RunRecord(run, due)

    def begin(self, start: Start, techniques: Techniques, lr_at: Callable[[int], float]) -> None:
        """Print the plan. If steps are left, truncate the files to the state of the run and start trackers."""
        run = self.run
        plan = plan_table(run.cfg, run.datasets, run.model, run.optimizer, techniques, lr_at, self.due.num_steps)
        notes = start.notes + run_notes(run.cfg, run.datasets)
        self.record.begin(plan | topology(run.backend, run.cfg), environment(run), notes, start.checkpoint)

    def add_step(self, losses: StepLosses | None, totals: StepTotals, data_seconds: float) -> None:
        """Count one step without waiting for the device."""
        self.run.meter.add(losses, totals, data_seconds)
        self.record.add_step(totals)

    def train_line(self) -> None:
        """Write a train line over the steps since the last train line (a collective)."""
        run = self.run
        state = run.state
        state.finish_update(run.cfg.max_skipped_steps)
        state.logged = state.step
        values: dict = {"epoch": epochs_at(run.cfg, run.datasets["train"], state.step)}
        values |= run.meter.line(run.hosts)  # loss, further sums of the task, and speed
        values["learning_rate"] = state.learning_rate
        values["grad_norm"] = state.grad_norm
        values["skipped"] = state.step - state.updates
        values |= self.gpu_use.line(values["tokens_per_second"])
        values |= state.line_values  # of techniques
        values |= compiled_graphs(run.cfg)
        state.line_values = {}
        self.record.write("train", values)

    def eval_line(self, metrics: dict) -> None:
        """Write an eval line: what `evaluate` returned."""
        self.record.write("eval", metrics)

    def sample_lines(self, samples: list[dict]) -> None:
        """Write a line for each prompt of `sample_prompts` and its answer."""
        self.record.write_samples(samples)

    def finish(self, summary: str, sample: str | None, outcome: dict) -> None:
        """Print the summary, the task's sample and the last eval line; write status.json."""
        self.record.finish(summary, sample, outcome)
