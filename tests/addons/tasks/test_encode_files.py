"""The cache key of prepared rows follows the code of a task in addons/, also that of another add-on."""

from addons.tasks import masked_lm, segmentation
from src.data.prepare import encode_files
from tests.helpers import kit


def test_code_behind_encode():
    for module, file in ((segmentation, "image_classification/decoding.py"), (masked_lm, "masked_lm/masking.py")):
        assert kit.REPOSITORY / "addons/tasks" / file in encode_files(module.Task(None, None))
