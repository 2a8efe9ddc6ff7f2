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


def read(folder, name, split):
    return datasets.Dataset.from_parquet(str(folder / name / f"{split}.parquet"))


def test_characters_have_every_class(folder):
    rows = read(folder, "drawn_characters", "train")
    assert rows.features["label"].names == list(drawn_characters.CHARACTERS)
    assert sorted(rows["label"]) == sorted([*range(36)] * 2)
    assert {image.size for image in rows["image"]} == {(32, 32)}
    again, _ = drawn_characters.draw_character(np.random.default_rng([0, len("drawn_characters")]), 0)
    assert (np.asarray(again) == np.asarray(rows[0]["image"])).all()
    first = {np.asarray(image).tobytes() for image in rows["image"]}
    assert len(first) == 72
    assert not first & {
        np.asarray(image).tobytes() for image in read(folder, "drawn_characters", "validation")["image"]
    }


def test_shapes_have_a_class_for_every_pixel(folder):
    rows = read(folder, "drawn_shapes", "train")
    assert len({image.size for image in rows["image"]}) > 50
    seen = set()
    for row in rows:
        assert row["image"].size == row["label"].size
        seen |= set(np.unique(np.asarray(row["label"])))
    assert seen == {0, 1, 2, 3}
