import json
from pathlib import Path

import torch
import torch.nn.functional as F

from tests.addons.tasks import images
from tests.helpers import kit, technique_runs

OPTIONS = {"initial_scale": 0.5, "delay_fraction": 0.2, "finetune_fraction": 0.2, "multiple": 4}
SIZES = [12, 12, 16, 20, 24]  # scale 1/2, then 1/2 + k/6 for k = 0, 1, 2, then 1, of 24 pixels, to multiples of 4
VIT = images.VIT | {"image_size": 24, "patch_size": 4, "num_hidden_layers": 1}


def fields(folder, **more) -> dict:
    more = {"weight_decay": 0.1, "max_grad_norm": 0, "adam_epsilon": 1e-4} | more
    values = images.run_fields(folder, techniques=json.dumps({"progressive_resizing": OPTIONS}), **more)
    return values | {"model_config": kit.write_yaml(folder / "vit.yaml", VIT)}


def plain_weights(values: dict, sizes: list[int] = SIZES) -> dict[str, torch.Tensor]:
    """Return the weights of a plain loop over images of these sizes."""
    names = ("task", "model_config", "train_file", "dtype", "metrics", "random_crop", "horizontal_flip")
    task, splits = kit.open_data(**{name: values[name] for name in names}, output_dir="unused")
    torch.manual_seed(42)
    model = task.build(None).train()
    inputs = task.collate(splits["train"].rows(range(technique_runs.ROWS)), training=True).inputs
    mean, std = (inputs[name].view(-1, 1, 1) for name in ("mean", "std"))
    pixels = (inputs["pixels"].double() - mean) / std
    decay = {True: 0.1, False: 0.0}
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() >= 2) == wide], "weight_decay": decay[wide]}
        for wide in decay
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    for size in sizes:
        small = pixels if size == 24 else F.interpolate(pixels, (size, size), mode="bilinear")
        optimizer.zero_grad()
        logits = model(pixel_values=small, interpolate_pos_encoding=True).logits
        F.cross_entropy(logits, inputs["labels"]).backward()
        optimizer.step()
    folder = Path(values["model_config"]).parent / f"plain_{sizes[0]}"
    model.save_pretrained(folder)  # under the names of a folder
    return kit.load_weights(folder)


def test_mutant_full_images_differ(tmp_path):
    values = fields(tmp_path)
    assert kit.distance(plain_weights(values), plain_weights(values, [24] * len(SIZES))) > 1e-4


def test_evaluation_sees_full_images(tmp_path):
    values = fields(tmp_path, validation_file=images.write_pictures(tmp_path / "validation.parquet", 9, 1))
    run = technique_runs.train(tmp_path / "run", values | {"max_steps": 1, "learning_rate": 0})
    found = kit.run_evaluation(1, tmp_path / "eval", "--checkpoint", tmp_path / "run" / "final")
    assert found["loss"] == run.kind("eval")[0]["loss"]
