"""Streams of files behind URLs and of the Hub: read in parts, only the needed columns."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from engine.rows import read
from tests.engine.storage.test_hub_downloads import make_hub, recipe, since, train
from tests.helpers import kit


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with make_hub(tmp_path_factory.mktemp("served")) as (hub, _, _):
        yield hub


def put_table(path: Path, groups: int = 2, rows: int = 512, note: int = 40_000) -> int:
    """Write a Parquet file that is nearly all `note`, a column that is not used; return its size."""
    generator = np.random.default_rng(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int64()), "note": pyarrow.binary()})
    with pyarrow.parquet.ParquetWriter(path, schema, compression="none") as file:
        for _ in range(groups):
            ids = generator.integers(0, 50, (rows, 5)).tolist()
            columns = [pyarrow.array(ids), pyarrow.array([generator.bytes(note) for _ in range(rows)])]
            file.write_table(pyarrow.table(columns, schema=schema))
    return path.stat().st_size


def stream(hub, folder, steps: int = 2, **fields) -> list[str]:
    fields = {"streaming": True, "max_steps": steps, "global_batch_size": 8, "dataset_name": None} | fields
    if fields["dataset_name"] is None or "model_config" in fields:
        fields |= {"model_name_or_path": None, "model_config": hub.folder / "gpt2.yaml"}
    return recipe(folder, **fields)


def read_all_columns():
    """The mutant."""
    parts_of_file = read.parts_of_file
    read.parts_of_file = lambda file, columns, *rest: parts_of_file(file, None, *rest)


@pytest.mark.parametrize("where", ["http", "hub"])
def test_parquet_stream_reads_needed_columns_only(hub, tmp_path, where):
    if where == "http":
        size = put_table(hub.folder / "files/table.parquet")
        fields, name = {"train_file": f"{hub.files_url}/table.parquet"}, "/files/table.parquet"
    else:
        size = put_table(hub.folder / "datasets/org/table/train.parquet")
        fields, name = {"dataset_name": "org/table", "model_config": None}, "*/org/table/resolve/*.parquet"
    sent = []
    for before in (lambda: None, read_all_columns):
        began = hub.sent(name)
        train(hub.environment(tmp_path), tmp_path, stream(hub, tmp_path, resume="never", **fields), 1, before)
        sent.append(hub.sent(name) - began)
    shutil.rmtree(hub.folder / "datasets/org/table", ignore_errors=True)
    assert 2 * sent[0] < sent[1], (sent, size)
    assert sent[0] < size


def test_stream_of_the_hub_is_not_downloaded(hub, tmp_path):
    """Training rows arrive in parts, the validation split whole: without the download of the other splits."""
    before = len(hub.requests)
    train(hub.environment(tmp_path), tmp_path, stream(hub, tmp_path, dataset_name="org/ds"), world=2)
    assert kit.Run(tmp_path / "run").kind("eval")[-1]["examples"] == 4
    assert {r.status for r in since(hub, before, "/datasets/org/ds/resolve/", "GET")} == {206}
    assert not list(tmp_path.rglob("train.jsonl"))
