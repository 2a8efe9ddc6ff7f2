"""final/ on the Hub: pushed once, read back; a failure is a warning, a missing token an error before the run."""

# ruff: noqa: F811 (fixtures of another file)

import pytest

from addons.tools import hub_upload
from tests.engine.storage.test_hub_downloads import hub, recipe, refused, served, train  # noqa: F401
from tests.helpers import kit
from tests.helpers.fake_hub import Fault


def test_final_model_is_pushed_and_read_back(hub, tmp_path):
    environment, fields = hub.environment(tmp_path), {"push_to_hub": True, "hub_model_id": "org/pushed"}
    before = len(hub.requests)
    refused(environment, tmp_path, recipe(tmp_path, **fields), "push_to_hub", "no token", world=2)
    assert hub.requests[before:] == []  # before anything is fetched

    text = train(environment, tmp_path, recipe(tmp_path, **fields), 2, HF_TOKEN=hub.token)
    final, pushed = tmp_path / "run/final", hub.folder / "models/org/pushed"
    for file in (path for path in final.rglob("*") if path.is_file()):
        assert (pushed / file.relative_to(final)).read_bytes() == file.read_bytes()
    assert "org/pushed" in hub.private
    assert f"{hub.url}/org/pushed" in text
    train(environment, tmp_path, recipe(tmp_path, "again", model_name_or_path="org/pushed"), HF_TOKEN=hub.token)
    assert kit.same(kit.Run(tmp_path / "again").weights, kit.Run(tmp_path / "run").weights)

    (final / "link.txt").symlink_to(__file__)  # by another author, it could publish any file of this machine
    train(environment, tmp_path, recipe(tmp_path, **fields | {"hub_model_id": "org/linked"}), 2, HF_TOKEN=hub.token)
    names = {path.name for path in (hub.folder / "models/org/linked").iterdir()}
    assert names & {"config.json", "link.txt"} == {"config.json"}


@pytest.mark.parametrize(
    "path, fault",
    [("/api/repos/create", Fault(status=403)), ("/api/models/org/failing/commit/*", Fault(silent=True))],
)
def test_failed_push_is_a_warning(hub, tmp_path, path, fault):
    hub.faults[path] = fault
    argv = recipe(tmp_path, push_to_hub=True, hub_model_id="org/failing")
    text = train(
        hub.environment(tmp_path), tmp_path, argv, 1, lambda: setattr(hub_upload, "SILENCE", 1), HF_TOKEN=hub.token
    )
    assert "warning: push_to_hub" in text
    assert f"hf upload org/failing {tmp_path / 'run/final'}" in text
    assert (tmp_path / "run/final/model.safetensors").exists()
