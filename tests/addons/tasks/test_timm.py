"""timm's models as image classifiers, through transformers' wrapper: trained, sharded, fine-tuned from a folder as on the Hub."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.addons.tasks import images
from tests.helpers import kit, technique_runs

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
ARGS = {
    "test_resnet": {},  # batch norm
    "test_vit": {"img_size": 32, "drop_path_rate": 0.2},
    "one_size": {"img_size": 32, "dynamic_img_size": False},  # of test_vit
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    images.classification_flags(folder)
    return folder


def fields(folder, name: str, **more) -> dict:
    args, name = ARGS.get(name, {}), name.replace("one_size", "test_vit")
    model = {"model_type": "timm_wrapper", "architecture": name, "model_args": args}
    values = {
        "task": "image_classification",
        "model_config": kit.write_yaml(folder / f"{name}.yaml", model),
        "train_file": folder / "train.parquet",
        "validation_file": folder / "validation.parquet",
        "image_size": 32,
        "metrics": "none",
        "dtype": "float64",
        "global_batch_size": 16,
        "max_steps": 4,
        "save_steps": 2,
        "save_total_limit": 10,
        "eval_steps": 4,
        "learning_rate": 1e-3,
    }
    return {name: value for name, value in (values | more).items() if value is not None}


@pytest.mark.parametrize("place", [None, pytest.param("fsdp2", marks=pytest.mark.cluster)])
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_two_processes_train_the_weights_of_one_and_resume(pictures, tmp_path, name, place):
    values = fields(pictures, name)
    one = technique_runs.train(tmp_path / "one", values, 1, 4)
    values["gradient_checkpointing"] = name == "test_vit"
    env = kit.where("fsdp2", 2, mixed_precision="no") if place else None
    two = technique_runs.check_resume(tmp_path, values, 2, 4, env, units=1)
    assert kit.distance(two.weights, one.weights) <= 1e-10
    found = kit.run_evaluation(2, tmp_path / "eval", "--checkpoint", two.folder, env=env)
    assert found["loss"] == two.kind("eval")[-1]["loss"] == pytest.approx(one.kind("eval")[-1]["loss"], rel=1e-12)


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
def test_folder_as_on_the_hub_is_fine_tuned_on_other_classes(pictures, tmp_path, name):
    """The head alone is new; size and normalization are the model's; transformers opens the result."""
    from transformers import AutoModelForImageClassification, pipeline

    (tmp_path / "hub").mkdir()
    hub, before = hub_folder(tmp_path / "hub", name)
    values = fields(pictures, name, model_config=None, model_name_or_path=hub, image_size=None, dtype="float32")
    run = technique_runs.train(tmp_path / "run", values | {"learning_rate": 0, "max_steps": 1}, 1, 16)
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
