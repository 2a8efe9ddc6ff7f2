"""The samples of drawn images: the same in every call, complete, and with a class for every pixel."""

import datasets
import numpy as np
import pytest

from samples import drawn_characters, drawn_shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch:
        for sample in (drawn_characters, drawn_shapes):
            patch.setattr(sample, "ROWS", {"train": 72, "validation": 36})
            name = sample.__name__.rpartition(".")[2]
            (folder / name).mkdir()
            sample.make(folder / name)
    return folder


def rows_of(folder, name, split="train"):
    return datasets.Dataset.from_parquet(str(folder / name / f"{split}.parquet"))


def test_characters_have_every_class_and_are_the_same_in_every_call(folder):
    rows = rows_of(folder, "drawn_characters")
    assert rows.features["label"].names == list(drawn_characters.CHARACTERS)
    assert sorted(rows["label"]) == sorted([*range(36)] * 2)
    again, _ = drawn_characters.draw_character(np.random.default_rng([0, len("drawn_characters")]), 0)
    assert (np.asarray(again) == np.asarray(rows[0]["image"])).all()
    images = [*rows["image"], *rows_of(folder, "drawn_characters", "validation")["image"]]
    assert len({np.asarray(image).tobytes() for image in images}) == 72 + 36


def test_shapes_have_a_class_for_every_pixel(folder):
    rows = rows_of(folder, "drawn_shapes")
    assert all(row["image"].size == row["label"].size for row in rows)
    assert {*np.concatenate([np.unique(np.asarray(row["label"])) for row in rows])} == {0, 1, 2, 3}
