import json

import torch

from tests.addons.tasks import images
from tests.helpers import kit, technique_runs

fields = images.run_fields  # for test_conformance.py
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
    plain = technique_runs.train(tmp_path / "plain", images.run_fields(tmp_path), 1, 4)
    values = images.run_fields(tmp_path, **CHANNELS_LAST)
    straight = technique_runs.check_resume(tmp_path, values)
    assert kit.distance(plain.weights, straight.weights) <= 1e-10
    argv = kit.flags(**values, per_device_batch_size=8, output_dir=tmp_path / "watched")
    found = kit.spawn(1, _watched, argv, out=tmp_path / "out")[0]
    assert len(found) > 20
    assert found[-1] == [True, True]
    assert all(pixels for pixels, _ in found[-4:])
