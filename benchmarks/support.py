"""docs/project/support.md: which tasks and techniques are tested under which backend, read from the lists of the tests.

    .venv/bin/python benchmarks/support.py

Tests: tests/project/test_pages.py.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from addons.techniques import TECHNIQUES  # noqa: E402
from engine.find_tasks import OPTIONS  # noqa: E402
from tests.addons.techniques import test_conformance as lists  # noqa: E402

PAGE = REPOSITORY / "docs" / "project" / "support.md"
TEXT = """# What is tested with what

✓: a test (its number is below) trains it there and compares weights or losses with one process; *refused*: one sentence
at the start says so; –: not tried. `.venv/bin/python benchmarks/support.py` writes this page from the lists
that the tests run through; a test compares both. All ran over gloo on CPUs; [performance on GPUs](../performance.md)
is another question. Every task also evaluates bitwise on three processes and resumes bitwise.
"""
SEVERAL, FSDP2, HSDP, TP, ZERO, COMPILE, STREAM, LORA = COLUMNS = (
    "2, 4 processes (DDP)", "FSDP2", "HSDP", "tensor parallel", "ZeRO-2, 3", "`compile`", "`streaming`", "`peft`"
)  # fmt: skip
PLACES = {"fsdp2": FSDP2, "hsdp": HSDP, "fsdp2_tp": TP, "zero2": ZERO, "zero3": ZERO}
CONFORMANCE = "tests/addons/techniques/test_conformance.py"
OF_TASKS = {True: "tests/conformance/test_task.py", False: "tests/addons/tasks/test_conformance.py"}
MORE = [  # what has a test of its own: (row, column, file)
    ("causal_lm", ZERO, "tests/addons/backends/test_deepspeed.py"),
    ("causal_lm", TP, "tests/addons/backends/test_tensor_parallel.py"),
    ("causal_lm", FSDP2, "tests/engine/distributed/test_fsdp2.py"),
    ("causal_lm", HSDP, "tests/engine/distributed/test_fsdp2.py"),
    ("causal_lm", COMPILE, "tests/engine/models/test_compile_and_recompute.py"),
    ("causal_lm", STREAM, "tests/addons/streaming/test_streaming.py"),
    ("causal_lm", LORA, "tests/addons/adapters/test_peft.py"),
    ("distillation", FSDP2, "tests/addons/tasks/test_frozen_teacher.py"),
    ("any torch module", SEVERAL, "tests/engine/models/test_plain_model.py"),
    ("any torch module", FSDP2, "tests/engine/distributed/test_plain_models.py"),
    ("any torch module", ZERO, "tests/addons/backends/test_deepspeed.py"),
    ("any torch module", LORA, "tests/addons/adapters/test_peft.py"),
    *((name, SEVERAL, "tests/addons/techniques/test_averages.py") for name in ("ema", "swa", "lawa", "lookahead")),
    *(
        ("gradient_statistics", column, "tests/addons/techniques/test_gradient_statistics.py")
        for column in (SEVERAL, FSDP2)
    ),
    ("neftune", SEVERAL, "tests/addons/techniques/test_neftune.py"),
]


def technique_of(test: str, options: dict) -> str:
    """Return the technique that a module of tests is about."""
    return options.get("name") or test.rpartition("test_")[2]


def cells() -> dict[tuple[str, str], str]:
    """Return {(row, column): file of the test, or "refused"}."""
    table = {(name, ZERO): "refused" for name, kind in TECHNIQUES.items() if not kind().deepspeed}
    table |= {("peft", ZERO): "refused", ("peft", TP): "refused"}
    core = {task for task in OPTIONS if (REPOSITORY / "src" / "tasks" / f"{task}.py").exists()}
    table |= {(task, SEVERAL): OF_TASKS[task in core] for task in OPTIONS}
    for tests, column in ((lists.SPLITS, SEVERAL), (lists.FSDP2, FSDP2)):
        table |= {(technique_of(test, options), column): CONFORMANCE for test, options, _ in tests}
    for task, _, fields, place, _ in lists.RUNS:
        columns = [PLACES[place], *([COMPILE] if fields.get("compile") else [])]
        for row in [
            *([] if fields.get("techniques") and not task else [task or "causal_lm"]),
            *fields.get("techniques", ()),
        ]:
            table |= {(row, column): CONFORMANCE for column in columns}
    return table | {(row, column): file for row, column, file in MORE}


def page() -> str:
    """Return the text of docs/project/support.md."""
    table, text = cells(), TEXT
    files = sorted({*table.values(), *OF_TASKS.values()} - {"refused"})
    groups = [("task", [*OPTIONS, "any torch module"], COLUMNS), ("technique", sorted(TECHNIQUES), COLUMNS[:6])]
    for heading, rows, columns in [*groups, ("optimizer", ["muon"], COLUMNS[:2])]:
        text += f"\n| {heading} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
        for row in rows:
            found = [table.get((row, column), "–") for column in columns]
            marks = [mark if mark in ("–", "refused") else f"✓ {files.index(mark) + 1}" for mark in found]
            text += f"| {row} | {' | '.join(marks)} |\n"
    text += "\nAdapters (`peft`) are refused with DeepSpeed and tensor parallelism, and tested under FSDP2.\n\n"
    return text + "".join(f"{number}. `{file}`\n" for number, file in enumerate(files, 1))


if __name__ == "__main__":
    assert all((REPOSITORY / file).exists() for *_, file in MORE)
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
