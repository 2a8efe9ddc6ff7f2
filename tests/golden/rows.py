"""Golden rows: ids, labels, statistics and refusals of everything that tests and cases.py prepare, as hashes in rows.json.

    python tests/golden/rows.py compare [pytest arguments]   what differs from rows.json: test, row and column; exit code 1
    python tests/golden/rows.py record [pytest arguments]    stores the rows of these tests (default: PATHS below)

Record before a change of rows and compare after it: rows.json is of the commit that changed it last, and tests change.
It sees the files of a prepared split when a process opens its statistics, the errors that a test expects, and what the
functions of CALLS return to a test. If one of them gets another name, correct CALLS; keys are the names of tests."""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("rows.json")
FOLDER, KEY, CONTEXT = "GOLDEN_ROWS", "GOLDEN_KEY", 300  # environment variables; characters of a value that are shown
PATHS = [
    "golden/cases.py",
    "engine/rows",
    "engine/plan",
    "addons/data",
    "addons/tasks",
    "addons/streaming",
    "src/tasks",
]
STATS, ROWS = "facts.json", "rows.arrow"  # of a prepared split
SKIPPED = {"blocks", "rows"}  # statistics: how rows were divided for the work, and a hash that depends on it
MANY = 64  # rows, or groups of rows that follow each other, with a hash of their own
# (module, name): results and errors are stored if a test calls it
CALLS = [("engine.rows.encode_chat", "encode_chat"), ("engine.rows.encode_rows", "Encoder.encode_batch")]
CALLS += [("engine.plan.dataset", "prepare_datasets")]
CHANGES = [  # what is another in each run -> its name
    (r"/tmp/pytest-of-[^/]+/pytest-\d+/(popen-gw\d+/)?[\w\-]+", "TMP"),
    (r"/tmp/tests-hf-\w+", "CACHE"),
    (r"/tmp/tmp\w{6,8}\b", "TMP"),
    (re.escape(str(REPOSITORY)), "REPOSITORY"),
    (r"(127\.0\.0\.1|localhost):\d+", "HOST"),
    (r"\b0x[0-9a-f]{6,}", "ADDRESS"),
    (r"\b[0-9a-f]{16,}(-[0-9a-f]{16})?\b", "HASH"),
    (r"\d{4}-\d\d-\d\dT[\d:.]+", "TIME"),
]


# ---- what is recorded, in each process ------------------------------------------------------------------------------


def install() -> None:
    """Record into $GOLDEN_ROWS, in this process and the ones that it forks."""
    busy = []

    def opened(event: str, arguments: tuple) -> None:
        if event != "open" or busy or not isinstance(arguments[0], str) or not arguments[0].endswith(STATS):
            return
        folder = Path(arguments[0]).parent
        mode, flags = arguments[1], arguments[2]
        if (isinstance(mode, str) and mode[0] != "r") or flags & 3 or not (folder / ROWS).exists():
            return
        busy.append(folder)
        try:
            emit({"what": "split"} | split_record(folder))
        finally:
            busy.clear()

    sys.addaudithook(opened)
    for module, name in CALLS:
        with suppress(ImportError, AttributeError):
            *classes, last = name.split(".")
            owner = functools.reduce(getattr, classes, importlib.import_module(module))
            setattr(owner, last, recorded(getattr(owner, last), last))


def recorded(function, name: str):
    """Return a function that records what `function` returns, or that it refuses, if a test calls it."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        caller = sys._getframe(1).f_code.co_filename
        by_test = f"{os.sep}tests{os.sep}" in caller
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            refused(error)
            raise
        if by_test and not isinstance(result, dict):  # sequences of a chat: ids, labels
            emit({"what": name} | rows_record([{"ids": each[0], "labels": each[1]} for each in result]))
        elif by_test and "input_ids" in result:
            columns = zip(*result.values(), strict=True)
            emit({"what": name} | rows_record([dict(zip(result, row, strict=True)) for row in columns]))
        return result

    return call


def refused(error: BaseException | None) -> None:
    if type(error).__name__ in ("UsageError", "Failure"):
        emit({"what": type(error).__name__, "text": plain(str(error))})


def emit(record: dict) -> None:
    """Append a record of the running test; one write, because processes do so at once."""
    line = json.dumps([os.environ.get(KEY, ""), record]) + "\n"
    file = os.open(Path(os.environ[FOLDER], "records.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


def split_record(folder: Path) -> dict:
    """Return hashes of a prepared split, and its statistics that are not empty."""
    import numpy as np
    import pyarrow as pa

    stats = json.loads((folder / STATS).read_text())
    stats["warnings"] = list(stats.get("warnings", {}).values())
    if not stats["examples"]:
        return rows_record([]) | {"stats": stats}
    with pa.memory_map(str(folder / ROWS)) as source:
        table = pa.ipc.open_file(source).read_all()
        names, columns = table.column_names, [column.to_pylist() for column in table.columns]
        record = rows_record([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)])
    kept = np.fromfile(folder / "kept", np.bool_)
    if not kept.all():
        record["kept"] = f"{kept.sum()} of {len(kept)}: {digest(kept.tolist())}"
    return record | {"stats": {name: value for name, value in stats.items() if value and name not in SKIPPED}}


def rows_record(rows: list[dict]) -> dict:
    """Return hashes of rows, one for each if they are few, and of their columns; and values, to be shown."""
    names = sorted({name for row in rows for name in row})
    groups = min(len(rows), MANY)
    bounds = [len(rows) * i // groups for i in range(groups + 1)] if groups else [0]
    parts = [rows[first:last] for first, last in pairwise(bounds)]
    columns = " ".join(f"{name}:{digest([simple(row.get(name)) for row in rows])}" for name in names)
    shown = [{name: shortened(row.get(name)) for name in names} for row in rows[:MANY]]
    each = " ".join(digest([sorted((n, simple(v)) for n, v in row.items()) for row in part])[:4] for part in parts)
    return {"count": len(rows), "columns": columns, "each": each, "shown": shown}


def shortened(value) -> str:
    text = re.sub(
        "(-100, ){2,}", lambda match: f"{len(match[0]) // 6} x -100, ", plain(repr(simple(value))[: 10 * CONTEXT])
    )
    return text[:CONTEXT]


def simple(value):
    """Return a value as Python's own types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [simple(each) for each in value] if isinstance(value, (list, tuple)) else value


def digest(value) -> str:
    import xxhash

    return f"{xxhash.xxh3_64_intdigest(plain(repr(value)).encode(errors='surrogatepass')):016x}"[:8]


def plain(text: str) -> str:
    """Return a text without what is another in each run."""
    for pattern, name in CHANGES:
        text = re.sub(pattern, name, text)
    return text


# ---- plugin of pytest -----------------------------------------------------------------------------------------------


def pytest_configure(config):
    import pytest
    from _pytest.raises import RaisesExc

    install()
    leave = RaisesExc.__exit__

    def exit_(self, kind, error, trace):
        result = leave(self, kind, error, trace)
        refused(error)
        return result

    RaisesExc.__exit__ = exit_

    class Keys:
        """Name the records of a test, and those of a fixture that several tests share."""

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item):
            os.environ[KEY] = item.nodeid
            result = yield
            emit({"ran": True})
            return result

        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef, request):
            before = os.environ.get(KEY, "")
            if fixturedef.scope != "function":
                number = getattr(request, "param_index", "")
                os.environ[KEY] = f"{fixturedef.baseid}::fixture {fixturedef.argname} {number}".strip()
            try:
                return (yield)
            finally:
                os.environ[KEY] = before

    config.pluginmanager.register(Keys())


# ---- the script -----------------------------------------------------------------------------------------------------


def run_tests(arguments: list[str]) -> dict[str, list[dict]]:
    """Run pytest with the hooks; return the records of each test, each once."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        site.mkdir()
        (site / "sitecustomize.py").write_text(
            f"import os, sys\nif os.environ.get({FOLDER!r}) and os.environ.get({KEY!r}):\n"
            f"    sys.path.insert(0, {str(REPOSITORY)!r})\n    import tests.golden.rows as rows\n    rows.install()\n"
        )
        paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {FOLDER: folder, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        env.pop(KEY, None)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.golden.rows", "-p", "no:cacheprovider"]
        code = subprocess.run(
            [*command, *(arguments or [f"tests/{path}" for path in PATHS])], cwd=REPOSITORY, env=env
        ).returncode
        if code > 1:
            sys.exit(f"pytest ended with {code}")
        if code:
            print("some tests failed: what they prepared is compared all the same")
        records: dict[str, list[dict]] = {}
        for line in Path(folder, "records.jsonl").read_text().splitlines():
            key, record = json.loads(line)
            if "stats" in record:
                record["stats"] = json.loads(plain(json.dumps(record["stats"])))
            of_test = records.setdefault(key, [])
            if "ran" not in record and record not in of_test:
                of_test.append(record)
    return records


def without_values(record: dict) -> dict:
    """Return a record without the values that are only shown."""
    return {name: value for name, value in record.items() if name != "shown"}


def differences(old: list[dict], new: list[dict]) -> list[str]:
    """Return what differs in the records of a test."""
    texts = [json.dumps(without_values(record), sort_keys=True) for record in new]
    old_texts = [json.dumps(record, sort_keys=True) for record in old]
    lost, more = Counter(old_texts) - Counter(texts), Counter(texts) - Counter(old_texts)
    lost = [record for record, text in zip(old, old_texts, strict=True) if text in lost]
    more = [record for record, text in zip(new, texts, strict=True) if text in more]
    found = []
    for before in lost:
        kind, number = before["what"], old.index(before)
        after = next((record for record in more if record["what"] == kind), None)
        if after is None:
            found.append(f"record {number} ({kind}) is missing: {json.dumps(before)[:CONTEXT]}")
            continue
        more.remove(after)
        found += [f"record {number}: {text}" for text in compared(before, after)]
    return found + [f"a new record: {json.dumps(without_values(record))[:CONTEXT]}" for record in more]


def compared(before: dict, after: dict) -> list[str]:
    """Return what differs in two records of a kind."""
    if "text" in before:
        return [f"{before['what']} was {before['text']}\n           is  {after['text']}"]
    found = []
    if before["count"] != after["count"]:
        found.append(f"{after['count']} rows, were {before['count']}")
    hashes = [dict(pair.split(":") for pair in each["columns"].split()) for each in (before, after)]
    names = [name for name in sorted(hashes[0].keys() | hashes[1].keys()) if hashes[0].get(name) != hashes[1].get(name)]
    if names:
        old, new = before["each"].split(), after["each"].split()
        different = [i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b] or [min(len(old), len(new))]
        what = "row" if before["count"] <= MANY else f"group of {before['count'] // MANY} rows,"
        found.append(f"{what} {different[0]} is the first of {len(different)} that differ, in {', '.join(names)}")
        if what == "row" and different[0] < len(after["shown"]):
            found += [f"{name} is now {after['shown'][different[0]].get(name)}" for name in names]
    if before.get("kept") != after.get("kept"):
        found.append(f"rows of the split: {after.get('kept')}, were {before.get('kept')}")
    stats = [each.get("stats", {}) for each in (before, after)]
    for name, value in stats[0].items():
        if stats[1].get(name) != value:
            found.append(f"statistics: {name} is {stats[1].get(name)}, was {value}")
    return found or ["columns or statistics that are new"]


def read_golden() -> dict[str, list[dict]]:
    """Return the stored records of each test; equal ones stand in the file once."""
    if not GOLDEN.exists():
        return {}
    stored = json.loads(GOLDEN.read_text())
    return {key: [stored["records"][each] for each in ids.split()] for key, ids in stored["tests"].items()}


def write_golden(golden: dict[str, list[dict]]) -> None:
    records, tests = {}, {}
    for key, of_test in golden.items():
        ids = [digest(json.dumps(record, sort_keys=True)) for record in of_test]
        records |= dict(zip(ids, of_test, strict=True))
        tests[key] = " ".join(ids)
    parts = []
    for name, values in (("records", records), ("tests", tests)):
        lines = [f"{json.dumps(key)}:{json.dumps(values[key], separators=(',', ':'))}" for key in sorted(values)]
        parts.append(f'"{name}":{{\n' + ",\n".join(lines) + "\n}")
    GOLDEN.write_text("{" + ",\n".join(parts) + "}\n")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in ("record", "compare"):
        sys.exit(__doc__)
    records = run_tests(sys.argv[2:])
    golden = read_golden()
    if sys.argv[1] == "record":
        golden = {key: of_test for key, of_test in golden.items() if key not in records}
        golden |= {key: [without_values(record) for record in found] for key, found in records.items() if found}
        write_golden(golden)
        print(f"{GOLDEN.name}: {len(golden)} tests, {sum(map(len, golden.values()))} records")
        return
    number = 0
    for key in sorted(records):
        if texts := differences(golden.get(key, []), records[key]):
            number += 1
            print(key, *texts, sep="\n    ")
    known = sum(len(golden.get(key, [])) for key in records)
    missing = sum(key not in records for key in golden)
    print(f"{len(records)} tests, {known} records: {number} tests differ ({missing} stored tests did not run)")
    sys.exit(number > 0)


if __name__ == "__main__":
    main()
