"""A URL with a password is refused; no file of a run or cache holds the query string of a URL."""

import base64
import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from engine.config import parsing, redact
from engine.config.errors import UsageError
from engine.config.redact import redact_all, url_error
from engine.find_tasks import OPTIONS
from engine.process import run_status
from tests.helpers import kit

PASSWORD, SIGNATURE, USER = "pa55word", "5ignature", "al1ce"
SECRETS = re.compile("|".join((PASSWORD, SIGNATURE, USER)))


@pytest.mark.parametrize(
    "text, clean",
    [
        ("http://h/x.jsonl?X-Amz-Signature=a&v=3: no such file", "http://h/x.jsonl?***: no such file"),
        ("['--train_file=http://a/x?s=1', 'http://b/y?s=2']", "['--train_file=http://a/x?***', 'http://b/y?***']"),
        ("https:/h/x?sig=a", "https:/h/x?***"),  # as pathlib writes a URL
        ("hf://datasets/org/name@main/x.jsonl", None),
        ("http://host:8080/a@b.jsonl", None),
        ("Is it http://h/x? It is a=b.", None),
    ],
)
def test_query_strings_and_nothing_else_are_removed(text, clean):
    assert redact_all({text: [text, 1]}) == {clean or text: [clean or text, 1]}
    assert clean or url_error(text) is None


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pass@host/x.jsonl",
        "http://user:p@ss/w?r#d@host/x.jsonl",
        "https://token@host/x",
        "s3://key:secret@bucket/x",
        "https://h/x.jsonl?name=a b&sig=c",  # would be shown after the space
    ],
)
def test_url_with_a_password_or_a_space_is_refused(url, tmp_path):
    run_file = tmp_path / "run.yaml"
    mixture = {name: {"train_file": [url]} for name in ("a", "b")}
    run_file.write_text(yaml.safe_dump({"model_config": "x.yaml", "mixture": mixture}))
    argvs = {"run.yaml: mixture: ": ["--config", str(run_file)], "--no_such_field: ": ["--no_such_field", url]}
    for place, argv in argvs.items():
        with pytest.raises(UsageError, match=place) as refused:
            parsing.parse(argv, OPTIONS)
        assert url not in str(refused.value)


# ---- whole runs ------------------------------------------------------------------------------------------------------


class _Guarded(SimpleHTTPRequestHandler):
    """Serves files to requests with the password."""

    def do_GET(self):
        known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {known}":
            return self.send_error(401)
        return super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def guarded(tmp_path, monkeypatch):
    """The fields of a tiny run with data behind a signed URL; the password for its server is in a netrc file."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # inherited by forked processes
    (tmp_path / "served").mkdir()
    fields = kit.tiny_files(tmp_path / "served")
    netrc = tmp_path / "served" / ".netrc"
    netrc.write_text(f"machine 127.0.0.1 login {USER} password {PASSWORD}")
    monkeypatch.setenv("NETRC", str(netrc))
    handler = partial(_Guarded, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("train_file", "validation_file"):
            address = f"http://127.0.0.1:{server.server_port}"
            fields[name] = f"{address}/{fields[name].name}?X-Amz-Signature={SIGNATURE}"
        fields |= {"max_steps": 3, "logging_steps": 1, "lr_scheduler_type": "constant"}
        fields |= {"cache_dir": tmp_path / "cache", "output_dir": tmp_path / "run"}
        yield fields
        server.shutdown()


def files_with_secrets(folder: Path) -> list[str]:
    """Return the names of the files of FOLDER/run and FOLDER/cache with a secret, except logs, which hold messages."""
    paths = [*(folder / "run").rglob("*"), *(folder / "cache").rglob("*")]
    texts = {path: path.read_bytes().decode(errors="replace") for path in paths if path.is_file()}
    return sorted({path.name for path in texts if path.parent.name != "logs" and SECRETS.search(texts[path])})


def test_query_strings_are_in_no_file(guarded, tmp_path):
    def command(script: str, *argv, **fields) -> tuple[int, str]:
        [code], [text] = kit.run_command(script, *argv, *kit.flags(**fields), folder=tmp_path / "served")
        assert files_with_secrets(tmp_path) == []
        return code, text

    code, text = command("train.py", **guarded)
    assert code == 0, text
    run, urls = guarded["output_dir"], {name: guarded[name] for name in ("train_file", "validation_file")}
    code, text = command("train.py", config=run / "config.yaml", **urls, max_steps=5)  # resumes the run
    assert code == 0, text
    assert command("train.py", **guarded | {"lr_scheduler_type": "linear"})[0] == 2  # the error says what changed
    for url in (urls["train_file"].replace("train", "absent"), f"http://127.0.0.1:1/absent.jsonl?sig={SIGNATURE}"):
        code, text = command("train.py", **guarded | {"train_file": url})
        assert (code, "absent.jsonl" in text) == (2, True)
    # The evaluation asks for what was removed, and takes it from the command line.
    known = {"checkpoint": run, "cache_dir": guarded["cache_dir"]}
    code, text = command("eval.py", **known)
    assert code == 2
    assert "--validation_file" in text
    code, text = command("eval.py", **known, validation_file=guarded["validation_file"])
    assert code == 0, text
    assert json.loads((run / "eval.json").read_text()) == kit.Run(run).kind("eval")[-1]
    [saved] = yaml.safe_load((run / "config.yaml").read_text())["train_file"]
    assert saved == guarded["train_file"].replace(f"X-Amz-Signature={SIGNATURE}", "***")


def test_reason_in_status_json_has_no_query_string(tmp_path):
    run_status.write_status(tmp_path, "failed", reason=f"https://h/x.jsonl?sig={SIGNATURE}: not fetched")
    assert run_status.read_status(tmp_path)["reason"] == "https://h/x.jsonl?***: not fetched"


def test_query_strings_of_a_stream_are_in_no_file(guarded, tmp_path):
    kit.need_addon("streaming")
    argv = kit.flags(**guarded, streaming=True)
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "served", world=2)
    assert codes == [0, 0], texts
    assert files_with_secrets(tmp_path) == []
    assert (tmp_path / "run" / "ledger.jsonl").exists()


def test_mutant_that_saves_query_strings_is_caught(guarded, tmp_path, monkeypatch):
    monkeypatch.setattr(redact, "_QUERY", re.compile("()(?!)"))
    codes, texts = kit.run_command("train.py", *kit.flags(**guarded), folder=tmp_path / "served")
    assert codes == [0], texts
    saved = ["config.yaml", "environment.json", "fetched.json", "run_config.yaml", "state.json"]
    assert files_with_secrets(tmp_path) == saved
