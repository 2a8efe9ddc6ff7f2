"""final/ on the Hub: pushed once, read back; a failure is a warning, a missing token an error before the run."""

# ruff: noqa: F811 (fixtures of another file)

import pytest
import yaml

from addons.tools import hub_upload
from engine.storage import verify_hashes
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
    names = {str(path.relative_to(final)) for path in final.rglob("*") if path.is_file()}
    for name in names - {"run_config.yaml", "manifest.json"}:
        assert (pushed / name).read_bytes() == (final / name).read_bytes()
    assert str(tmp_path) in (final / "run_config.yaml").read_text()
    for path in pushed.rglob("*"):  # no local path, in a folder that is intact
        assert str(tmp_path).encode() not in (path.read_bytes() if path.is_file() else b"")
    assert verify_hashes.verify(pushed) == []
    card = yaml.safe_load((pushed / "README.md").read_text().split("---")[1])
    assert (card["base_model"], card["datasets"]) == ("org/model", ["org/ds"])
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
