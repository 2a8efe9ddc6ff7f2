"""Choose the checkpoint to resume from, the same on all ranks, and refuse another run's.

Tests: tests/checkpointing/test_resume.py, tests/checkpointing/test_format.py and tests/conformance/.
"""

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import yaml

from src.checkpointing import run_identity
from src.checkpointing.checkpoint_list import list_checkpoints, read_state, step_of
from src.config.errors import Failure, Stopped, UsageError
from src.config.parsing import to_yaml
from src.config.schema import RunConfig, changeable_fields
from src.runtime import run_status
from src.storage import atomic_folder
from src.training.optimizers import make_schedule, total_steps


class ResumePoint(NamedTuple):
    """Where a run goes on from."""

    folder: Path | None  # the checkpoint; None: from the beginning
    notes: list[str]  # what the user should know of it


def choose_on_all_ranks(accelerator, cfg: RunConfig, options, splits: dict) -> ResumePoint:
    """Return where to go on from as the main process decides it for all; faults reach all ranks alike.

    A micro-batch size of `auto` becomes that of the checkpoint."""
    from accelerate.utils import broadcast_object_list

    outcome = [None, None]
    if accelerator.is_main_process:
        folder = Path(cfg.output_dir)
        try:
            if folder.is_dir():
                run_status.lock_run_folder(folder)
                for place in (folder, folder / "checkpoints"):  # final/ is written as checkpoints are
                    atomic_folder.remove_leftovers(place)
            also, config = run_identity.of_launch(accelerator, splits), yaml.safe_load(to_yaml(cfg, options))
            outcome[0] = find(cfg, splits["train"].stats, config, type(options), also)
            run_status.clear_failure(folder)
        except (UsageError, Failure, Stopped, OSError) as error:
            outcome[1] = error if not isinstance(error, OSError) else UsageError(f"resume: {error}")
    broadcast_object_list(outcome)
    if outcome[1]:
        raise outcome[1]
    start = outcome[0]
    if start.folder and cfg.per_device_batch_size == "auto":
        cfg.per_device_batch_size = read_state(start.folder)["config"]["per_device_batch_size"]
    return start


def find(cfg: RunConfig, stats: dict, config: dict, options: type, also: dict | None = None) -> ResumePoint:
    """Return the newest intact checkpoint that `run.resume` asks for, checked to be of the same run.

    UsageError when there are checkpoints and none is intact, when they are of another run, or when the run that is in
    `output_dir` has not begun from the checkpoint that is asked for."""
    if stopped := _restarted_after_stop(cfg):
        raise Stopped(stopped)
    asked = "auto" if _heals(cfg) and list_checkpoints(cfg.output_dir) else cfg.resume
    if asked == "never":
        return ResumePoint(None, [])
    own, notes = Path(cfg.output_dir), []
    if asked != "auto" and not belongs_to(Path(asked), own):
        if not run_identity.began_from(own, Path(asked)):
            if not (_is_checkpoint(Path(asked)) or list_checkpoints(asked)):
                raise UsageError(_nothing_at(cfg.resume))
            run_identity.check_alone(own, Path(asked))
        elif run_identity.has_trained(own):
            notes = [f"{own} holds the run that began from {asked}: it is resumed from its newest checkpoint"]
            asked = "auto"
    folder = own if asked == "auto" else Path(asked)
    if asked != "auto" and _is_checkpoint(folder):
        if faults := atomic_folder.verify(folder):
            raise UsageError(f"resume: {folder} is damaged: {'; '.join(faults)}")
        return ResumePoint(folder, check_same_run(folder, cfg, stats, config, options, also))
    found = list_checkpoints(folder)
    for checkpoint in reversed(found):
        if faults := atomic_folder.verify(checkpoint):
            notes.append(f"{checkpoint} is damaged and not used: {'; '.join(faults)}")
            continue
        return ResumePoint(checkpoint, notes + check_same_run(checkpoint, cfg, stats, config, options, also))
    if found:
        raise UsageError(
            "none of the checkpoints is intact: "
            + "; ".join(notes)
            + ". Restore one, or start anew with --resume never"
        )
    if asked != "auto":
        raise UsageError(_nothing_at(cfg.resume))
    return ResumePoint(None, [])


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("state.json", atomic_folder.MANIFEST))


def _nothing_at(name: str) -> str:
    return f"resume: {name} is neither a checkpoint nor a run with one: give auto, never, or such a folder"


def belongs_to(asked: Path, own: Path) -> bool:
    """Return whether `asked`, a checkpoint or a run, is of the run in the folder `own`, or that folder itself."""
    return asked.resolve() == own.resolve() or run_identity.belongs(asked, own)


def _restarted_after_stop(cfg: RunConfig) -> str | None:
    """Return why the run was stopped, if a launcher that does not know better starts it again after that."""
    last = run_status.read_status(Path(cfg.output_dir))
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return (
        last["reason"] if again and last.get("status") == "stopped" and last.get("launcher") == os.getppid() else None
    )


def _heals(cfg: RunConfig) -> bool:
    """Return whether this launch has begun the run already: then `never`, or another run's checkpoint, was for that start."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return again and run_status.read_status(Path(cfg.output_dir)).get("launcher") == os.getppid()


# ---- the same run ----------------------------------------------------------------------------------------------------


def run_metadata(accelerator, cfg: RunConfig, resolved: str, splits: dict, start: Path | None) -> dict:
    """Return what a checkpoint says of its run: the configuration, what data and model hold, and where the run began."""
    known = run_identity.identity(cfg, splits["train"].stats, run_identity.of_launch(accelerator, splits))
    return {"config": yaml.safe_load(resolved), "identity": known, "lineage": run_identity.lineage(cfg, start)}


def check_same_run(checkpoint: Path, cfg: RunConfig, stats: dict, config: dict, options: type, also=None) -> list[str]:
    """Return remarks about what changed and does no harm; UsageError lists what changes the mathematics, old → new.

    Every field counts as mathematics unless it is declared `option(..., may_change_on_resume=True)`."""
    state = read_state(checkpoint)
    old, free = state["config"], changeable_fields(options)
    defaults = {f.name: f.default for kind in (RunConfig, options) for f in dataclasses.fields(kind)}
    names = [name for name in config | old if name in defaults]
    differs = [n for n in names if old.get(n, defaults[n]) != config.get(n, defaults[n])]
    said = {name: f"{name}: {old.get(name)} → {config.get(name)}" for name in differs}
    known = run_identity.identity(cfg, stats, also)
    if (commit := known.get("model_commit")) and commit == state["identity"].get("model_commit"):
        free = free | {"model_revision"}  # another name of the same commit
    folders = [values.get("model_name_or_path") or "" for values in (old, config)]
    if all(map(os.path.isabs, folders)) and state["identity"].get("model"):
        free = free | {"model_name_or_path"}  # a folder that was moved: its configuration is compared below
    wrong = [text for name, text in said.items() if name not in free]
    contents, remarks = run_identity.differences(state["identity"], known)
    wrong += contents + _schedule(cfg, old, stats, state)
    if wrong:
        raise UsageError(
            f"{checkpoint.parent.parent} holds another run ({'; '.join(wrong)}): to train beside it, give another --output_dir "
            "(and --init_from to begin from its weights); to start over in this folder, give --resume never once, which keeps "
            "the old run there under other names"
        )
    quiet = {"output_dir", "resume"} | {name for name in differs if config.get(name) == "auto"}
    remarks = [text for name, text in said.items() if name not in quiet] + remarks
    before, now = (values.get("processes") for values in (state["identity"], known))
    if before and now and before != now:
        depends = [name for name in ("local_sgd_steps", "ddp_comm_hook") if getattr(cfg, name) not in (None, "no")]
        more = f": with {depends[0]} the numbers depend on it" if depends else ""
        remarks.append(f"number of processes: {before} → {now}{more}")
    return [f"changed since {checkpoint.name}: {text}" for text in remarks]


def _schedule(cfg: RunConfig, old: dict, stats: dict, state: dict) -> list[str]:
    """Return a fault if, with the new length, the updates already done would have had other learning rates."""
    then = dataclasses.replace(cfg, max_steps=old.get("max_steps"), num_train_epochs=old["num_train_epochs"])
    before, now = (total_steps(r, stats["examples"]) for r in (then, cfg))
    if before == now:
        return []
    one, two = make_schedule(then, before), make_schedule(cfg, now)
    done = state["progress"]["updates"]
    sampled = {*range(min(done, 1000)), *range(max(0, done - 1000), done)}
    if all(one(update) == two(update) for update in sampled):
        return []
    return [
        f"length: {before} → {now} steps, with which {cfg.lr_scheduler_type} would have had other learning rates in the "
        f"{done} updates that are done (constant, constant_with_warmup, inverse_sqrt can be prolonged)"
    ]


# ---- the folder ------------------------------------------------------------------------------------------------------


def archive_stale_outputs(accelerator, cfg: RunConfig, start: Path | None, lineage: dict) -> None:
    """Rename what the run that begins now would contradict: everything there for a new one, and for one that goes on
    the checkpoints after `start` and the final model. Nothing is lost."""
    if not accelerator.is_main_process:
        return
    folder = Path(cfg.output_dir)
    run_status.lock_run_folder(folder)
    if start is None and cfg.resume == "auto" and list_checkpoints(folder):
        raise UsageError(
            f"output_dir: another process has trained in {folder} meanwhile: the same command goes on from there"
        )
    stale, own = [folder / "final"], start is not None and run_identity.belongs(start, folder)
    if not own:
        stale += [folder / "metrics.jsonl", folder / "ledger.jsonl"]
    if start is None:
        stale.append(folder / "checkpoints")
        stale += [folder / "trackers.json"] if cfg.resume == "never" else []  # another run for wandb, too
    else:
        step = read_state(start)["progress"]["step"]  # its folder may have any name
        stale += [old for old in list_checkpoints(folder) if _contradicts(old, start, step)]
    for path in filter(Path.exists, stale):
        base = path.with_name(f"old_{path.name}") if own else path
        n = next(n for n in range(1, 10_000) if not base.with_name(f"{base.name}.old{n}").exists())
        path.rename(base.with_name(f"{base.name}.old{n}"))
    if start and not own and cfg.metric_for_best_model:
        run_identity.bring_best(start, folder, lineage)


def _contradicts(old: Path, start: Path, step: int) -> bool:
    """Return whether the run that continues from `start` at `step` will write other contents than the checkpoint `old` has.

    A link to `start`, and a copy of it under a name that the user gave, stay."""
    found, ours = step_of(old), old.name.startswith("step_") and not old.is_symlink()
    return found > step or (found == step and ours and not old.samefile(start))
