"""The samples of drawn images: the same in every call, and no two rows alike."""

import datasets
import numpy as np
import pytest

from samples import drawn_characters, drawn_shapes


@pytest.mark.parametrize("sample, column", [(drawn_characters, "image"), (drawn_shapes, "label")])
def test_rows_are_the_same_in_every_call_and_no_two_are_alike(tmp_path, monkeypatch, sample, column):
    monkeypatch.setattr(sample, "ROWS", {"train": 72, "validation": 36})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        sample.make(tmp_path / name)
    files = [f"{split}.parquet" for split in sample.ROWS]
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)
    rows = datasets.Dataset.from_parquet([str(tmp_path / "one" / file) for file in files])
    assert len({np.asarray(value).tobytes() for value in rows[column]}) == 72 + 36
