"""A run whose folder is an address: the same numbers, resumed on a machine that has nothing else, and read by other programs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import train
from addons.stores._lease import Lease
from addons.stores._store import Store
from engine.checkpointing.tensor_files import weights_sha256
from engine.storage import verify_hashes
from tests.addons.stores import server
from tests.engine.checkpointing import recipe
from tests.helpers import backend_runs, kit


def command(flags: list, folder: Path, address: str, *more) -> tuple[int, str]:
    """Return exit code and output of train.py with this address as output_dir."""
    [code], [text] = kit.run_command("train.py", *flags, "--output_dir", address, *more, folder=folder / "here")
    return code, text


def interrupted_at_step(step: int):
    """Return compute_gradient of train.py that sends this process SIGTERM in a step."""
    original = train.compute_gradient

    def gradient(backend, module, batch, totals):
        if batch[0][0].step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(backend, module, batch, totals)

    return gradient


@pytest.fixture
def flags(tiny, tmp_path) -> list:
    return recipe.flags(tiny, cache_dir=tmp_path / "cache", eval_steps=6, save_total_limit=2)


def test_stopped_run_is_resumed_on_another_machine(address, flags, tmp_path):
    """With the numbers of a run in a local folder, its files, and no more checkpoints than it keeps."""
    local = kit.run_training(1, tmp_path / "local", *flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "compute_gradient", interrupted_at_step(7))
        code, text = command(flags, tmp_path, address)
    assert code == 75, text
    assert f"Saved to {address};" in text
    assert server.newest_whole(address) == 7
    assert json.loads(Store(address, "").read("status.json") or b"")["status"] == "stopped"
    server.forget(tmp_path / "cache")

    code, text = command(flags, tmp_path, address)
    assert (code, server.resumed_from(text)) == (0, 7)
    run = server.download(address, tmp_path / "downloaded")
    assert kit.same(kit.load_weights(run / "final"), local.weights)
    assert kit.timeless(run) == kit.timeless(local.folder)
    assert kit.ledger_text(run) == kit.ledger_text(local.folder)
    assert verify_hashes.verify(run / "final") == []
    assert len(list((run / "checkpoints").iterdir())) == 2
    assert {path.name for path in run.iterdir()} - {".lease"} == {path.name for path in local.folder.iterdir()}
    assert yaml.safe_load((run / "config.yaml").read_text())["output_dir"] == address
    assert json.loads((run / "status.json").read_text())["status"] == "complete"
    assert len(list((run / ".lease").iterdir())) == 1

    server.forget(tmp_path / "cache")
    code, text = command(flags, tmp_path, address)
    assert (code, "nothing is left to train" in text) == (0, True)
    assert verify_hashes.verify(server.download(address, tmp_path / "again") / "final") == []


@pytest.mark.parametrize("address", ["file"], indirect=True)
def test_local_folder_that_differs_from_the_store(address, flags, tmp_path):
    """The store decides: what only this machine has is gone, and what it lacks is fetched."""
    assert command(flags, tmp_path, address)[0] == 0
    [here] = (tmp_path / "cache" / "stores").glob("*/store")
    assert server.newest_whole(address) == 12
    Store(address, "").delete(f"final/{verify_hashes.MANIFEST}", f"checkpoints/step_00000012/{verify_hashes.MANIFEST}")
    (here / "checkpoints" / "step_00000008" / "model.safetensors").unlink()
    code, text = command(flags, tmp_path, address)
    assert (code, server.resumed_from(text)) == (0, 8)
    run = server.download(address, tmp_path / "downloaded")
    assert (verify_hashes.verify(run / "final"), server.newest_whole(address)) == ([], 12)
    assert [line["step"] for line in kit.Run(run).kind("train")] == [*range(1, 13)]


@pytest.mark.parametrize("address", ["file"], indirect=True)
def test_damage_here_is_no_damage_of_the_store(address, flags, tmp_path):
    """A damaged local copy is fetched again. A file `stop` in the store stops no start."""
    assert command(flags, tmp_path, address)[0] == 0
    store = Store(address, "")
    store.delete(*store.list("final"))
    for path in (tmp_path / "cache" / "stores").glob("*/store/checkpoints/*/model.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    store.create("stop", b"")
    code, text = command(flags, tmp_path, address)
    assert (code, server.resumed_from(text), "is damaged" in text) == (0, 12, False), text


@pytest.mark.parametrize("address", ["file"], indirect=True)
def test_checkpoint_without_its_state_is_damaged(address, flags, tmp_path):
    """Though what a resume fetches first of all depends on it."""
    assert command(flags, tmp_path, address)[0] == 0
    store = Store(address, "")
    store.delete("checkpoints/step_00000012/state.json", *store.list("final"))
    server.forget(tmp_path / "cache")
    code, text = command(flags, tmp_path, address, "--metric_for_best_model", "loss")
    assert (code, server.resumed_from(text)) == (0, 8), text
    assert "step_00000012 is damaged" in text


@pytest.mark.parametrize("address", ["file"], indirect=True)
def test_damaged_checkpoint_in_the_store_is_not_used(address, flags, tmp_path):
    assert command(flags, tmp_path, address)[0] == 0
    server.forget(tmp_path / "cache")
    store = Store(address, "")
    name = "checkpoints/step_00000012/optimizer.safetensors"
    data = bytearray(store.read(name) or b"")
    data[-1] ^= 1
    store.files.pipe_file(store._path(name), bytes(data))
    code, text = command(flags, tmp_path, address)
    assert (code, server.resumed_from(text)) == (0, 8)
    assert "step_00000012 is damaged" in text
    assert f"checkpoints/old_step_00000012.old1/{verify_hashes.MANIFEST}" in store.list()


def test_upload_to_a_disk_that_is_killed_leaves_the_earlier_file(tmp_path, monkeypatch):
    """A start that is killed while it uploads its ledger must not lose the lines of the starts before it."""
    store = Store(f"file://{tmp_path}/store", "")
    for number, lines in enumerate(("first\n", "first\nsecond\n")):
        (tmp_path / f"{number}.jsonl").write_text(lines)
    store.put(tmp_path / "0.jsonl", "ledger.jsonl")

    def killed(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:3])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfile", killed)
        store.put(tmp_path / "1.jsonl", "ledger.jsonl")
    assert store.read("ledger.jsonl") == b"first\n"
    store.put(tmp_path / "1.jsonl", "ledger.jsonl")
    assert store.read("ledger.jsonl") == b"first\nsecond\n"
    assert [*store.list()] == ["ledger.jsonl"]


@pytest.mark.parametrize("address", ["file"], indirect=True)
def test_start_over_deletes_nothing_in_the_store(address, flags, tmp_path):
    assert command(flags, tmp_path, address)[0] == 0
    before = Store(address, "").list()
    for number in (1, 2):
        server.forget(tmp_path / "cache")
        assert command(flags, tmp_path, address, "--resume", "never", "--seed", number)[0] == 0
        names = Store(address, "").list()
        for name in before:
            if name.startswith(("checkpoints/", "final/")):
                first, rest = name.split("/", 1)
                assert f"{first}.old{number}/{rest}" in names
        assert {f"metrics.jsonl.old{number}", f"ledger.jsonl.old{number}"} <= names.keys()


@pytest.mark.parametrize("address", ["file"], indirect=True)
def test_two_runs_of_one_address(address, flags, tmp_path):
    """The second one is refused with host and process of the first one. One whose lease is taken ends, and writes nothing more."""
    long = [*flags, "--max_steps", 100_000, "--save_steps", 20, "--store_lease", 4]
    first = kit.Ranks("train.py", *long, "--output_dir", address, folder=tmp_path / "first")
    kit.until(lambda: server.newest_whole(address), 120)
    code, text = command(long, tmp_path, address)
    assert code == 2
    assert re.search(rf"error: output_dir: {address}: process {first.processes[0].pid} on .* at 20", text)

    lease = Lease(Store(address, ""), 4, "launch")
    lease.holder["machine"] = "another"
    while not lease._create(lease.newest()[0] + 1):  # as a machine whose clock is hours ahead would take it
        pass
    assert first.wait(120) == [1]
    assert f"{address}: process {lease.holder['process']} on" in first.text()
    assert (
        json.loads(Store(address, "").read("status.json") or b"")["status"] == "running"
    )  # the last one who may write


@pytest.mark.parametrize("address", ["file"], indirect=True)
def test_addresses_where_a_run_or_a_model_is_read(address, flags, tmp_path):
    assert command(flags, tmp_path, address)[0] == 0
    last = kit.Run(server.download(address, tmp_path / "downloaded")).kind("eval")[-1]

    def program(name: str, *argv) -> str:
        [code], [text] = kit.run_command(name, *argv, folder=tmp_path / "program")
        assert code == 0, text
        return text

    for name in ("", "/checkpoints/step_00000012"):
        text = program("eval.py", "--checkpoint", address + name)
        assert re.search(rf"\bloss +{re.escape(repr(last['loss']))}\b", text)
    assert "fetching" not in program("eval.py", "--checkpoint", address)  # it is up to date
    report = Path(program("addons/tools/html_report.py", address).split()[-1])
    assert report.exists()
    assert not list(report.parent.rglob("*.safetensors"))
    for field, value in {"init_from": address, "model_name_or_path": f"{address}/final"}.items():
        argv = [*flags, "--max_steps", 2, f"--{field}", value, "--output_dir", tmp_path / field]
        argv += ["--model_config", "none"] if field == "model_name_or_path" else []
        for _ in range(2):  # the second time it is compared with what the checkpoint records
            text = program("train.py", *argv)
        assert "nothing is left to train" in text
        assert yaml.safe_load((tmp_path / field / "config.yaml").read_text())[field] == value


@pytest.mark.cluster
def test_credentials_stand_in_no_file_of_the_run(s3, flags, tmp_path):
    assert command(flags, tmp_path, s3)[0] == 0
    for path in server.download(s3, tmp_path / "downloaded").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert b"key-of-the-test" not in data
        assert b"secret-of-the-test" not in data


@pytest.mark.parametrize(
    ("address", "words"),
    [("nothing://bucket/run", "Protocol not known"), ("https://host/run", "s3://bucket/run")],
)
def test_address_of_no_store_is_refused(address, words, flags, tmp_path):
    code, text = command(flags, tmp_path, address)
    assert code == 2
    assert re.search(f"error: output_dir: {address}: .*{words}", text)


@pytest.mark.cluster
def test_missing_bucket_is_named(s3, flags, tmp_path):
    code, text = command(flags, tmp_path, s3.replace("bucket", "no-bucket"))
    assert code == 2
    assert "error: output_dir: s3://no-bucket" in text


@pytest.mark.cluster
def test_name_that_leaves_the_folder_is_ignored(s3):
    """A bucket may be anyone's, and a name in it any text: here one of a file beside the local folder."""
    store = Store(s3, "")
    for name in ("inside", "a/../../outside", "/outside"):
        store.files.pipe_file(store._path(name), b"text")
    assert len(Store(s3.rpartition("/")[0], "").list()) >= 1
    assert [*store.list()] == ["inside"]


# ---- a store that fails ----------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(s3, s3_server, monkeypatch):
    proxy = server.Proxy(s3_server["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.setattr("addons.stores._store.WAITS", (0.05,))
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore, which waits longer each time
    yield proxy
    proxy.shutdown()


@pytest.mark.cluster
def test_store_that_loses_every_tenth_request(s3, proxy, flags, tmp_path):
    proxy.fault = lambda number, method, path: "lose" if number % 10 == 0 else None
    code, text = command(flags, tmp_path, s3)
    assert (code, proxy.number > 50) == (0, True), text
    run = server.download(s3, tmp_path / "downloaded")
    assert kit.same(kit.load_weights(run / "final"), kit.run_training(1, tmp_path / "local", *flags).weights)
    assert kit.timeless(run) == kit.timeless(tmp_path / "local")


@pytest.mark.cluster
@pytest.mark.parametrize("status", [503, 507])
def test_store_that_refuses_to_write(s3, proxy, flags, tmp_path, status):
    """As on a full disk: the run goes on without checkpoints, then ends; the older one is intact and is resumed."""

    def is_later(path: str) -> bool:
        return "step_" in path and "step_00000004" not in path

    proxy.fault = lambda number, method, path: status if method == "PUT" and is_later(path) else None
    code, text = command(flags, tmp_path, s3, "--max_failed_saves", 2, "--max_steps", 40)
    assert code == 1, text
    assert "COULD NOT BE SAVED" in text
    assert (server.newest_whole(s3), "2 failed in a row" in text) == (4, True)
    proxy.fault = lambda number, method, path: None
    server.forget(tmp_path / "cache")
    code, text = command(flags, tmp_path, s3, "--max_steps", 40)
    assert (code, server.resumed_from(text)) == (0, 4)
    assert server.newest_whole(s3) == 40


@pytest.mark.cluster
def test_signal_saves_in_the_store(s3, flags, tmp_path):
    ranks = kit.Ranks("train.py", *flags, "--max_steps", 100_000, "--output_dir", s3, folder=tmp_path / "first")
    kit.until(lambda: server.newest_whole(s3), 120)
    ranks.signal(signal.SIGTERM)
    assert ranks.wait(120) == [75]
    step = int(re.search(r"at step ([\d,]+)\.", ranks.text())[1].replace(",", ""))
    assert server.newest_whole(s3) == step


# ---- two nodes, each with a disk of its own ----------------------------------------------------------------------------


def train_as_node(folder: Path, argv: list) -> None:
    """Train as the only process of a node, which shares no folder with the other one."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "SCRATCH": str(folder / f"node_{os.environ['RANK']}")}
    train.main([str(word) for word in argv])


@pytest.mark.cluster
@pytest.mark.parametrize("backend", ["cpu_ddp", "fsdp2"])
def test_two_nodes_without_a_shared_disk(backend, address, files, tmp_path):
    """Each uploads its shards; on a new machine each fetches what it needs, and a run on one process reads them all."""
    flags = backend_runs.recipe(files, "gpt2.yaml", dtype="float64", max_steps=6, save_steps=3)
    flags += ["--metric_for_best_model", "loss", "--eval_steps", 3]
    one = kit.run_training(1, tmp_path / "one", *flags)
    argv = [*flags, "--output_dir", address, "--cache_dir", "$SCRATCH/cache"]
    env = backend_runs.where(backend, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "compute_gradient", interrupted_at_step(5))
        with pytest.raises(kit.RankFailed) as failed:
            kit.spawn(2, train_as_node, tmp_path, argv, out=tmp_path / "out", env=env)
    assert "Stopped by SIGTERM at step" in str(failed.value)
    assert server.newest_whole(address) >= 4
    here = [{path.name for path in tmp_path.glob(f"node_{rank}/cache/stores/*/*/checkpoints/*/*")} for rank in (0, 1)]
    assert not any("of-00002" in name for name in here[1])
    for rank in (0, 1):
        shutil.rmtree(tmp_path / f"node_{rank}")
    kit.spawn(2, train_as_node, tmp_path, argv, out=tmp_path / "out", env=env)
    run = server.download(address, tmp_path / "downloaded")
    for folder in (run / "final", *(run / "checkpoints").iterdir()):
        assert verify_hashes.verify(folder) == []
        assert any("of-00002" in path.name for path in folder.iterdir()) == (backend == "fsdp2")
    assert kit.distance(kit.load_weights(run / "final"), one.weights) <= 1e-10
    assert kit.ledger_text(run) == kit.ledger_text(one.folder)
    assert len(list((run / "logs").glob("rank_*.log"))) == 2
    state = json.loads((run / "checkpoints" / "step_00000006" / "state.json").read_text())
    assert state["weights_sha256"] == weights_sha256(run / "checkpoints" / "step_00000006")
    assert not list((run / ".parts").rglob("*.json"))


def test_run_in_a_local_folder_imports_nothing_of_it(flags, tmp_path):
    """Neither the add-on nor a package of it."""
    argv = [*map(str, flags), "--max_steps", "2", "--output_dir", str(tmp_path / "run")]
    code = "import sys, train; train.main(sys.argv[1:]); print('imported', *[n for n in sys.modules if n.startswith(('addons.stores', 's3fs'))])"
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=kit.REPOSITORY, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].split() == ["imported"], done.stderr
