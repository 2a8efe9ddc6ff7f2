"""No file of a run and no line of output holds credentials of URLs, or tokens."""

import base64
import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from huggingface_hub import constants
from requests.utils import requote_uri

from src.config import parsing, validation
from src.config import redact as module
from src.config.errors import UsageError
from src.config.redact import publishable, redact, redact_all, remember_credentials, remember_environment, was_redacted
from src.reporting import html_report
from src.tasks import OPTIONS
from tests.helpers import kit

# In pieces, because code.diff of a run may hold this file.
PASSWORD, SIGNATURE, USER = "pa55" + "word", "5ig" + "nature", "al" + "1ce"
SECRETS = re.compile("|".join((PASSWORD, SIGNATURE, USER)))


@pytest.mark.parametrize(
    "text, clean",
    [
        ("http://user:pass@host/x.jsonl", "http://***@host/x.jsonl"),
        ("http://user:p@ss/w?r#d@host/x.jsonl", "http://***@host/x.jsonl"),
        ("https://token@host/x", "https://***@host/x"),
        ("--train_file=http://us'er:pa\"ss@host/x?sig=a'b", "--train_file=http://***@host/x?sig=***"),
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"),
        (
            "http://h/x?X-Amz-Signature=a&download=true&v=3: no such file",
            "http://h/x?X-Amz-Signature=***&download=true&v=3: no such file",
        ),
        ("http://h/x?se=2030-01-01&sig=a%2Fb", "http://h/x?se=***&sig=***"),
        ("http://h/x?whatever=unknown", "http://h/x?whatever=***"),
        ("http://h/x?barevalue", "http://h/x?***"),
        ("http://h/x#access_token=a", "http://h/x#access_token=***"),
        ("exceeded with url: /x.jsonl?Signature=a (Caused by", "exceeded with url: /x.jsonl?Signature=*** (Caused by"),
        ("['--train_file=http://u:p@a/x', 'http://u:p@b/y']", "['--train_file=http://***@a/x', 'http://***@b/y']"),
        ("Authorization: Bearer abcdefgh12", "Authorization: Bearer ***"),
        ("exceeded with url: /x.jsonl?bare5ecret (Caused by", "exceeded with url: /x.jsonl?*** (Caused by"),
        ("http://h/x?YmFzZTY0LXRva2Vu==", "http://h/x?***"),
        ("http://h/x.jsonl;token=abc: no such file", "http://h/x.jsonl;token=***: no such file"),
        ("s3:/key:secret@bucket/x", "s3:/***@bucket/x"),  # as pathlib writes a URL
        ("a token: " + "hf_" + "AbCdEfGh12345678" * 2, "a token: ***"),
    ],
)
def test_redact_removes_credentials_and_nothing_else(text, clean):
    assert redact(text) == clean
    assert redact(clean) == clean
    assert redact_all({"a": [text]}) == {"a": [clean]}


@pytest.mark.parametrize(
    "text",
    [
        "hf://datasets/org/name@main/x.jsonl",
        "abfs://container@account.dfs.core.windows.net/x",
        "http://host:8080/a@b.jsonl",
        "http://host/x.jsonl?download=true",
        "Is it true? a=b, I ask hf_hub_download",
        "data/?.jsonl",
        "runs/hf_Llama3Chat8b",
        "runs/sk-learn-experiments-of-2024-01",
    ],
)
def test_redact_keeps_what_holds_no_credentials(text):
    assert redact(text) == publishable(text) == text
    assert not was_redacted(text)


@pytest.fixture
def forgotten(monkeypatch):
    """What this test makes the module remember is forgotten afterwards."""
    monkeypatch.setattr(module, "_remembered", {})
    monkeypatch.setattr(module, "_remembered_pattern", [])


@pytest.mark.parametrize(
    "url",
    [
        "http://alice:back\\slash5ECRET@h/x.jsonl",
        "http://alice:quote'5ECRET and space@h/x.jsonl",
        'https://h/x.jsonl?response-content-disposition=attachment; filename="a b"&X-Amz-Signature=5ECRET/a%2Fb',
        "https://h/x.jsonl?sig=<5ECRET>&sp=r",
        "https://h/däta/x.jsonl?sig=5ECRETä%C3%A4",
    ],
)
def test_remembered_credentials_are_found_in_any_quoting(url, forgotten):
    remember_credentials([f"--train_file={url}"])
    secret = url.partition("@")[0].partition("//")[2] if "@" in url else url.partition("?")[2]
    for form in (url, repr(url), json.dumps(url), quote(url), requote_uri(url), secret, requote_uri(secret)):
        for text in (form, f"it says {form}: no such file"):
            assert "5ECRET" not in redact(text), text
    assert redact(url).startswith(("http://***@h/x.jsonl", "https://h/"))
    assert was_redacted(redact(url))


def test_part_of_a_password_taken_for_a_host_is_removed(forgotten):
    remember_credentials("http://alice:pa'55\\\\word@h/x.jsonl")
    text = redact('Failed to parse: "alice:pa\'55" is not a valid host or port')
    assert text == 'Failed to parse: "***" is not a valid host or port'


def test_remembered_urls_hide_no_ordinary_words(forgotten):
    urls = ["http://h/data/train.jsonl?prefix=train.jsonl&se=2030-01-01T00:00:00Z", "http://u:pw@h/x"]
    remember_credentials({"train_file": urls})
    for text in ("train.jsonl", "pw", "2030-01-01T00:00:00Z", "data/train.jsonl"):
        assert redact(text) == text


def test_tokens_of_the_environment_are_removed(forgotten, monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", "0123" + "abcd5ECRET")
    monkeypatch.setenv("HTTPS_PROXY", "http://alice:proxy5ECRET@proxy:8080")
    remember_environment()
    assert redact("key 0123abcd5ECRET, proxy alice:proxy5ECRET") == "key ***, proxy ***"


def test_published_urls_lose_a_query_with_credentials():
    assert publishable("http://u:p@h/x?download=true&sig=a") == "http://***@h/x?***"


@pytest.mark.parametrize("value", ["http://u:p@h/x.jsonl", "http://h/x.jsonl?sig=a", "http://h/x.jsonl?a"])
def test_redacted_value_is_refused_when_read_back(value, tmp_path):
    cfg, options = parsing.parse(kit.flags(model_config="x.yaml", train_file=value), OPTIONS)
    validation.check(cfg, options)
    saved = tmp_path / "config.yaml"
    saved.write_text(parsing.to_yaml(cfg, options))
    with pytest.raises(UsageError, match=r"train_file.*--train_file"):
        validation.check(*parsing.parse(["--config", str(saved)], OPTIONS))
    validation.check(*parsing.parse(["--config", str(saved), "--train_file", value], OPTIONS))


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
    """The fields of a tiny run with data that needs a password and a signature."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # inherited by forked processes
    (tmp_path / "served").mkdir()
    fields = kit.tiny_files(tmp_path / "served")
    handler = partial(_Guarded, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("train_file", "validation_file"):
            address = f"{USER}:{PASSWORD}@127.0.0.1:{server.server_port}"
            fields[name] = f"http://{address}/{fields[name].name}?X-Amz-Signature={SIGNATURE}"
        fields |= {"max_steps": 3, "logging_steps": 1, "cache_dir": tmp_path / "cache", "output_dir": tmp_path / "run"}
        yield fields
        server.shutdown()


def assert_no_secrets(folder: Path, texts: list[str]) -> None:
    for text in texts:
        assert not SECRETS.search(text)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [str(path) for path in files if SECRETS.search(path.read_bytes().decode(errors="replace"))] == []


def test_credentials_are_in_no_file_and_no_output(guarded, tmp_path):
    def command(script: str, *argv, **fields) -> tuple[int, str]:
        [code], [text] = kit.run_command(script, *argv, *kit.flags(**fields), folder=tmp_path / "served")
        assert_no_secrets(tmp_path, [text])
        return code, text

    code, text = command("train.py", **guarded)
    assert code == 0, text
    run = guarded["output_dir"]
    html_report.write(run)
    assert command("train.py", **guarded | {"lr_scheduler_type": "constant"})[0] == 2  # the error says what changed
    absent = guarded["train_file"].replace("train", "absent")
    code, text = command("train.py", **guarded | {"train_file": absent})
    assert code == 2
    assert "absent.jsonl" in text
    # The evaluation asks for what was removed, and takes it from the command line.
    known = {"checkpoint": run, "cache_dir": guarded["cache_dir"]}
    code, text = command("eval.py", **known)
    assert code == 2
    assert "--validation_file" in text
    code, text = command("eval.py", **known, validation_file=guarded["validation_file"])
    assert code == 0, text
    assert json.loads((run / "eval.json").read_text()) == kit.Run(run).kind("eval")[-1]
    assert "***@127.0.0.1" in yaml.safe_load((run / "config.yaml").read_text())["train_file"][0]


def test_credentials_of_a_stream_are_in_no_file(guarded, tmp_path):
    argv = kit.flags(**guarded, streaming=True)
    codes, texts = kit.run_command("train.py", *argv, folder=tmp_path / "served", world=2)
    assert codes == [0, 0], texts
    assert_no_secrets(tmp_path, texts)
    assert (tmp_path / "run" / "ledger.jsonl").exists()
