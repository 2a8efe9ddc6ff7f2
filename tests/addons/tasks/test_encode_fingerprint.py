"""The cache key of prepared rows follows the code of a task in addons/, also that of another add-on."""

import shutil

import pytest

from tests.data.test_dataset import fingerprints
from tests.helpers import kit

DECODING = "addons/tasks/image_classification/decoding.py"
EDITS = {  # file, old text, new text -> does it make other rows?
    "a helper of encode": (DECODING, "image = ImageOps.exif_transpose(image)", "image.load()", True),
    "augmentation": ("addons/tasks/image_classification/augmentation.py", "math.log(4 / 3)", "math.log(2)", False),
    "a comment": (DECODING, "    image.load()", "    # decodes it\n    image.load()", False),
}


@pytest.mark.parametrize("task", ["image_classification", "segmentation"])
def test_only_edits_of_encode_code_prepare_again(tmp_path, task):
    for folder in ("src", "addons"):
        shutil.copytree(kit.REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    [found] = kit.spawn(1, fingerprints, tmp_path, f"addons.tasks.{task}", EDITS, out=tmp_path / "out")
    assert found == {name: other_rows for name, (*_, other_rows) in EDITS.items()}
