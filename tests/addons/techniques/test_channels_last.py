import json

import torch

from tests.addons.tasks import images
from tests.helpers import kit, technique_runs

CONVNEXT = {
    "model_type": "convnext",
    "image_size": 16,
    "patch_size": 2,
    "num_stages": 2,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
}


def fields(folder, **more) -> dict:
    """Return fields of a run on 16 images, all of them in each global batch, without augmentation."""
    kit.need_task("image_classification")
    images.import_before_fork("convnext", "vit")
    images.write_pictures(folder / "train.parquet", technique_runs.ROWS)
    kit.write_yaml(folder / "model.yaml", CONVNEXT)
    return (
        images.classification_fields(folder, validation_file=None)
        | {
            "random_crop": 1,
            "horizontal_flip": 0,
            "dtype": "float64",
            "global_batch_size": technique_runs.ROWS,
            "max_steps": technique_runs.STEPS,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "save_steps": 2,
            "save_total_limit": 10,
        }
        | more
    )


CHANNELS_LAST = {"techniques": json.dumps({"channels_last": None})}
formats = []  # of the inputs and weights of convolutions


def _watched(argv):
    import train

    forward = torch.nn.Conv2d.forward

    def watched(module, pixels):
        formats.append([t.is_contiguous(memory_format=torch.channels_last) for t in (pixels, module.weight)])
        return forward(module, pixels)

    torch.nn.Conv2d.forward = watched
    train.main([str(word) for word in argv])
    return formats


def test_channels_last_has_the_same_numbers_and_resumes(tmp_path):
    plain = technique_runs.train(tmp_path / "plain", fields(tmp_path), 1, 4)
    values = fields(tmp_path, **CHANNELS_LAST)
    straight = technique_runs.check_resume(tmp_path, values)
    assert kit.distance(plain.weights, straight.weights) <= 1e-10
    argv = kit.flags(**values, per_device_batch_size=8, output_dir=tmp_path / "watched")
    found = kit.spawn(1, _watched, argv, out=tmp_path / "out")[0]
    assert len(found) > 20
    assert found[-1] == [True, True]
    assert all(pixels for pixels, _ in found[-4:])
