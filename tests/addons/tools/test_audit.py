"""`make audit`: an unchanged run, changed weights, rates and rows, other kernels, a run without exact sums."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from addons.tools import audit
from engine.checkpointing.tensor_files import weights_sha256
from engine.storage import verify_hashes
from tests.helpers import kit

ALONE = [sys.executable, "train.py"]
BIAS = "transformer.h.1.mlp.c_fc.bias"


def fields(folder: Path) -> dict:
    files = kit.tiny_files(folder) | {"model_config": kit.write_yaml(folder / "larger.yaml", kit.GPT2)}
    steps = {"max_steps": 6, "save_steps": 2, "save_total_limit": 9, "logging_steps": 2, "eval_steps": 3}
    batch = {"global_batch_size": 8, "per_device_batch_size": 2, "learning_rate": 1e-3}
    return files | steps | batch


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> Path:
    """A run with exact sums on two processes, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("exact")
    return kit.run_training(2, folder / "run", *kit.flags(**fields(folder), exact_sums=True)).folder


@pytest.fixture
def run(exact, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(exact, tmp_path / "run"))


def command(run: Path, *flags, segments="all", seed=0, launch=ALONE, **env) -> tuple[int, str]:
    """Return exit code and output of an audit."""
    words = [sys.executable, "-m", "addons.tools.audit", "--segments", segments, "--seed", seed, run, *launch, *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | env
    words = [str(word) for word in words]
    done = subprocess.run(words, cwd=kit.REPOSITORY, env=env, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def seed_of(run: Path, begin: int) -> int:
    """Return a seed that chooses the interval from step `begin` alone."""
    intervals, _ = audit.all_intervals(run)
    return next(seed for seed in range(99) if audit.choose(intervals, "1", seed)[0].begin == begin)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mode) for path in files}


def rewrite_hashes(checkpoint: Path, **state) -> None:
    """Change state.json of a checkpoint, and make all of its hashes those of its files."""
    state = json.loads((checkpoint / "state.json").read_text()) | state | {"weights_sha256": weights_sha256(checkpoint)}
    (checkpoint / "state.json").write_text(json.dumps(state))
    files = {name: checkpoint / name for name in verify_hashes.read_manifest(checkpoint)["files"]}
    text = verify_hashes.manifest_text(files, {}, verify_hashes.read_metadata(checkpoint))
    (checkpoint / "manifest.json").write_text(text)
    assert verify_hashes.verify(checkpoint) == []


def change_weight(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights[BIAS][3] = weights[BIAS][3].nextafter(torch.tensor(1.0))
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})


def test_unchanged_run_is_reproduced_on_one_process(run):
    """By accelerate; nothing of the run is changed but the card of final/."""
    before = contents(run)
    launch = [Path(sys.executable).with_name("accelerate"), "launch", "--config_file", "accelerate_configs/cpu.yaml"]
    code, text = command(run, launch=[*launch, "--num_processes", "1", "train.py"])
    assert code == 0, text
    assert "3 of 3 intervals reproduced on 1 process (the run had 2)" in text
    assert json.loads((run / "audit.json").read_text())["exit_code"] == 0
    after = contents(run)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"audit.json", "final/README.md", "final/manifest.json"}
    assert verify_hashes.verify(run / "final") == []
    audit.add_to_card(run / "final", f"{audit.LINE}again")
    card = (run / "final" / "README.md").read_text()
    assert card == before["final/README.md"][0].decode() + "\nAudit: again\n"


def test_one_bit_of_a_weight_is_found_by_name(run):
    """With its hashes rewritten; without that, before anything is trained."""
    change_weight(run / "checkpoints" / "step_00000004")
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("weight_decay: 0.01", "weight_decay: 0.02"))
    code, text = command(run, segments=1, seed=seed_of(run, 2))
    assert (code, "audit: steps" in text) == (1, False)
    assert "step_00000004 is damaged: model.safetensors: " in text
    assert "weight_decay: 0.01 → 0.02" in text  # config.yaml is not that of the checkpoints
    rewrite_hashes(run / "checkpoints" / "step_00000004")
    code, text = command(run, segments=1, seed=seed_of(run, 2))
    assert code == 1
    assert f"1 of 112 tensors and numbers, the first is model/{BIAS}" in text
    assert json.loads((run / "audit.json").read_text())["intervals"][0]["differ"] == 1
    assert "weight_decay: 0.01 → 0.02" in (run / "final" / "README.md").read_text()


def test_changed_learning_rate_is_found(run):
    """In all that records it; a checkpoint is gone."""
    shutil.rmtree(run / "checkpoints" / "step_00000002")
    for step in (4, 6):
        checkpoint = run / "checkpoints" / f"step_{step:08d}"
        config = json.loads((checkpoint / "state.json").read_text())["config"]
        rewrite_hashes(checkpoint, config=config | {"learning_rate": 2e-3})
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("learning_rate: 0.001", "learning_rate: 0.002"))
    code, text = command(run, segments=3)
    assert code == 1
    assert re.search(r"the train line of step 6: .*learning_rate ", text)
    assert "steps 1 to 4 cannot be judged" in text
    assert "0 of 1 intervals reproduced" in text


def test_a_strangers_configuration_chooses_no_code_and_no_upload():
    config = {"trust_remote_code": True, "push_to_hub": True, "cache_dir": "/", "report_to": ["wandb"], "seed": 1}
    assert audit.recorded(config).keys() == {"seed", "save_steps"}


def test_changed_row_and_missing_data_are_named(run, exact):
    data = exact.parent / "train.jsonl"
    rows = data.read_text()
    moved = run.parent / "moved.jsonl"
    try:
        data.write_text(rows.replace("[", "[7, ", 1))
        code, text = command(run)
        assert (code, "audit: steps" in text) == (1, False)
        assert text.count("data.rows: ") >= 3
        data.unlink()
        code, text = command(run)
        assert (code, str(data) in text) == (2, True)
        moved.write_text(rows)
        for name in ("metrics.jsonl", "ledger.jsonl"):
            (run / name).unlink()
        assert command(run, "--train_file", moved, segments=1, seed=seed_of(run, 0))[0] == 0
        assert "no metrics.jsonl and ledger.jsonl" in (run / "final" / "README.md").read_text()
    finally:
        data.write_text(rows)


def test_a_missing_line_is_no_number_that_differs():
    lines = [{"kind": "train", "step": step, "loss": 1 / step} for step in (1, 2, 3)]
    assert audit._first_difference([lines[0], lines[2]], lines).startswith(
        "the train line of step 3 is only in the run"
    )
    assert "loss 0.5 → 9" in audit._first_difference(lines, [lines[0], lines[1] | {"loss": 9}, lines[2]])


def test_other_kernels_are_told_from_a_changed_run(run):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this CPU has no other kernels")
    code, text = command(run, segments=1, seed=seed_of(run, 4), ATEN_CPU_CAPABILITY="default")
    assert code == audit.CANNOT_JUDGE, text
    assert "1 cannot be judged on this machine: other kernels" in text
    intervals, _ = audit.all_intervals(run)
    for each, result in zip(intervals, (audit.REPRODUCED, audit.DIFFERS, audit.DIFFERS), strict=True):
        each.result, each.begins_near, each.begins_rounded = result, True, result == audit.DIFFERS
    assert audit.judge(intervals) == 1  # one interval was reproduced here: these are the kernels of the run


def test_without_exact_sums(tmp_path):
    """Bitwise on the same stack, within rounding on another one, and refused on another number of processes."""
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**fields(tmp_path))).folder
    recorded = json.loads((run / "environment.json").read_text())["device"]
    threads = int(recorded.split()[-1])
    seed = seed_of(run, 2)
    code, text = command(run, segments=1, seed=seed, OMP_NUM_THREADS=str(threads))
    assert (code, "1 of 1 intervals reproduced on 1 process" in text) == (0, True), text
    code, text = command(run, segments=1, seed=seed, OMP_NUM_THREADS=str(threads + 1))
    assert (code, "1 of 1 intervals reproduced within rounding" in text) == (0, True), text
    code, text = command(run, launch=["torchrun", "--nproc_per_node", "2", "train.py"])
    assert (code, "give NPROC=1" in text) == (2, True)
