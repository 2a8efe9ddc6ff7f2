"""timm's models as image classifiers, through transformers' wrapper: fine-tuned from a folder as on the Hub."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.addons.tasks import images
from tests.helpers import kit

if not importlib.util.find_spec("timm"):
    pytest.skip("timm is not installed: pip install -r requirements-extra.txt", allow_module_level=True)
try:
    import torchvision
except RuntimeError:  # its wheel on PyPI needs torch with CUDA, but timm uses only what is written in Python
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision
import timm

assert torchvision.__version__
images.import_before_fork("timm_wrapper")
ARGS = {"test_vit": {"img_size": 32, "drop_path_rate": 0.2}}


def hub_folder(folder, name: str):
    """Write a model of ten classes as timm's repositories on the Hub hold it; return its folder and weights."""
    model = timm.create_model(name, num_classes=10, **ARGS.get(name, {}))
    weights = {key: value.contiguous() for key, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    known = {key: value for key, value in model.pretrained_cfg.items() if isinstance(value, str | int | float | tuple)}
    config = {"architecture": name, "num_classes": 10, "model_args": ARGS.get(name, {})}
    config["pretrained_cfg"] = known | {"input_size": [3, 32, 32], "crop_pct": 0.8, "mean": [0.1, 0.2, 0.3]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, weights


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_byobnet"])  # heads: fc, head, head.fc
def test_folder_as_on_the_hub_is_fine_tuned_on_other_classes(tmp_path, name):
    """The head alone is new; size and normalization are the model's; transformers opens the result."""
    from transformers import AutoModelForImageClassification, pipeline

    (tmp_path / "hub").mkdir()
    hub, before = hub_folder(tmp_path / "hub", name)
    images.write_classification(tmp_path)
    values = {"model_config": None, "model_name_or_path": hub, "learning_rate": 0, "max_steps": 1}
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**images.classification_fields(tmp_path, **values)))
    head = timm.create_model(name).pretrained_cfg["classifier"]
    for key, value in before.items():
        if not key.startswith(head) and "running_" not in key and "num_batches" not in key:
            assert torch.equal(run.weights[key], value)
    assert run.weights[f"{head}.weight"].shape[0] == len(images.CLASSES)
    processor = json.loads((run.folder / "final" / "preprocessor_config.json").read_text())
    assert (processor["image_mean"], processor["crop_size"]["height"]) == ([0.1, 0.2, 0.3], 32)
    assert processor["size"] == {"shortest_edge": 40}
    model, info = AutoModelForImageClassification.from_pretrained(run.folder / "final", output_loading_info=True)
    assert not any(info.values())
    assert kit.same({key.removeprefix("timm_model."): value for key, value in model.state_dict().items()}, run.weights)
    picture = images.picture(np.random.default_rng(0), 0)
    found = pipeline("image-classification", model=str(run.folder / "final"))(picture)
    assert {row["label"] for row in found} == set(images.CLASSES)
