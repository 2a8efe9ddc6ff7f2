"""Benchmark of preparation: chats, preference pairs, prompt and completion from .jsonl, Parquet and CSV.

    python benchmarks/preparation.py [--rows 10000 40000]   (make bench)

Prints the milliseconds that one row takes, and how they grow from few rows to many; writes results.json. See README.md.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.data import opened

QUESTION = " some words of a question" * 20
ANSWER = " some words of an answer" * 20
CASES = {  # format of the rows -> kinds of files; a CSV file cannot hold chats
    "chats": ("jsonl", "parquet"),
    "pairs": ("jsonl", "parquet", "csv"),
    "completions": ("jsonl", "parquet", "csv"),
}


def make_row(kind: str, i: int) -> dict:
    """Return a row of about 1 KB (pairs: 1.5 KB)."""
    question = f"question {i}{QUESTION}"
    answer = f" answer {i}{ANSWER}"
    if kind == "chats":
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    if kind == "pairs":
        return {"prompt": question, "chosen": answer, "rejected": f" no{answer}"}
    return {"prompt": question, "completion": answer}


def write_rows(folder: Path, kind: str, file_type: str, count: int) -> Path:
    """Write rows to a file and return its path."""
    file = folder / f"{kind}.{file_type}"
    rows = [make_row(kind, i) for i in range(count)]
    if file_type == "jsonl":
        with open(file, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)
    elif file_type == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    else:
        pyarrow.csv.write_csv(pa.Table.from_pylist(rows), file)
    return file


def milliseconds_by_row(folder: Path, kind: str, file_type: str, count: int) -> float:
    """Prepare `count` rows in this process and return the time that one of them took."""
    fields = {"train_file": write_rows(folder, kind, file_type, count), "max_length": 2048}
    fields |= {"tokenizer_name": "stdlib_code", "chat_template": "chatml"}
    if kind == "pairs":
        fields["task"] = "preference"
    began = time.perf_counter()
    _, _, split = opened(folder, **fields)
    seconds = time.perf_counter() - began
    assert len(split) == count
    return 1000 * seconds / count


def measure(folder: Path, few: int, many: int) -> dict[str, dict[str, float]]:
    """Return and print the times of all cases."""
    for kind in CASES:  # imports, and the sample's tokenizer
        milliseconds_by_row(folder, kind, "jsonl", 10)
    found = {}
    print(f"{'rows':12} {'file':8} {f'{few:,}':>9} {f'{many:,}':>9}  growth of the whole time")
    for kind, file_types in CASES.items():
        for file_type in file_types:
            times = [milliseconds_by_row(folder, kind, file_type, count) for count in (few, many)]
            growth = times[1] * many / (times[0] * few)
            found[f"{kind}, {file_type}"] = {"few_ms": times[0], "many_ms": times[1], "growth": growth}
            print(f"{kind:12} {file_type:8} {times[0]:6.2f} ms {times[1]:6.2f} ms  {growth:.2f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs=2, default=[10_000, 40_000], metavar=("FEW", "MANY"))
    few, many = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), few, many)
    file = REPOSITORY / "benchmarks/results.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | {"preparation": {"rows": [few, many], **found}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
