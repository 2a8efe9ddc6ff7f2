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


def images(folder, name, split, column="image") -> list[np.ndarray]:
    rows = datasets.Dataset.from_parquet(str(folder / name / f"{split}.parquet"))
    return [np.asarray(image) for image in rows[column]]


def test_characters_are_the_same_in_every_call_and_no_two_are_alike(folder):
    drawn = [image for split in ("train", "validation") for image in images(folder, "drawn_characters", split)]
    again, _ = drawn_characters.draw_character(np.random.default_rng([0, len("drawn_characters")]), 0)
    assert (np.asarray(again) == drawn[0]).all()
    assert len({image.tobytes() for image in drawn}) == 72 + 36


def test_shapes_have_a_class_for_every_pixel(folder):
    labels = images(folder, "drawn_shapes", "train", "label")
    assert [label.shape for label in labels] == [image.shape[:2] for image in images(folder, "drawn_shapes", "train")]
    assert {*np.concatenate([np.unique(label) for label in labels])} == {0, 1, 2, 3}
