"""Credentials of URLs and tokens are in no file of a run and in no line that it prints."""

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

from src.config import parsing, validation
from src.config.errors import UsageError
from src.config.redact import publishable, redact, redact_all, remember_credentials, remember_environment, was_redacted
from src.tasks import OPTIONS
from tests.helpers import kit

PASSWORD, SIGNATURE, USER = (
    "pa55" + "word",
    "5ig" + "nature",
    "al" + "1ce",
)  # not as they are: code.diff may hold this file


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
    """Nothing learned by this test is remembered by others."""
    from src.config import redact as module

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
def test_credentials_that_no_pattern_finds_are_known_from_what_was_given(url, forgotten):
    from requests.utils import requote_uri

    remember_credentials([f"--train_file={url}"])
    secret = url.partition("@")[0].partition("//")[2] if "@" in url else url.partition("?")[2]
    forms = [url, repr(url), json.dumps(url), quote(url), requote_uri(url), secret, requote_uri(secret)]
    for text in forms + [f"it says {form}: no such file" for form in forms]:
        assert "5ECRET" not in redact(text), text
    assert redact(url).startswith(("http://***@h/x.jsonl", "https://h/"))
    assert was_redacted(redact(url))


def test_piece_of_a_password_that_a_library_takes_for_a_host_is_known(forgotten):
    remember_credentials("http://alice:pa'55\\\\word@h/x.jsonl")
    assert redact('Failed to parse: "alice:pa\'55" is not a valid host or port') == (
        'Failed to parse: "***" is not a valid host or port'
    )


def test_learning_a_url_hides_no_ordinary_words(forgotten):
    remember_credentials(
        {"train_file": ["http://h/data/train.jsonl?prefix=train.jsonl&se=2030-01-01T00:00:00Z", "http://u:pw@h/x"]}
    )
    for text in ("train.jsonl", "pw", "2030-01-01T00:00:00Z", "data/train.jsonl"):
        assert redact(text) == text


def test_tokens_of_the_environment_are_known(forgotten, monkeypatch):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", "0123" + "abcd5ECRET")
    monkeypatch.setenv("HTTPS_PROXY", "http://alice:proxy5ECRET@proxy:8080")
    remember_environment()
    assert redact("key 0123abcd5ECRET, proxy alice:proxy5ECRET") == "key ***, proxy ***"


@pytest.mark.parametrize("name", ["output_dir", "cache_dir"])
def test_folder_that_is_a_url_is_refused(name, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = kit.flags(model_config=files / "llama.yaml", train_file="x.jsonl", **{name: "s3://key:secret@bucket/run"})
    with pytest.raises(UsageError, match=f"{name}: s3.*URL"):
        validation.check(*parsing.parse(given, OPTIONS))
    assert not list(tmp_path.iterdir())


def test_published_urls_lose_a_query_with_credentials():
    assert publishable("http://u:p@h/x?download=true&sig=a") == "http://***@h/x?***"


@pytest.mark.parametrize("value", ["http://u:p@h/x.jsonl", "http://h/x.jsonl?sig=a", "http://h/x.jsonl?a"])
def test_redacted_value_is_refused_when_read_back(value, files, tmp_path):
    given = kit.flags(model_config=files / "llama.yaml", train_file=value)
    run, options = parsing.parse(given, OPTIONS)
    validation.check(run, options)
    saved = tmp_path / "config.yaml"
    saved.write_text(parsing.to_yaml(run, options))
    with pytest.raises(UsageError, match=r"train_file.*--train_file"):
        validation.check(*parsing.parse(["--config", str(saved)], OPTIONS))
    validation.check(*parsing.parse(["--config", str(saved), "--train_file", value], OPTIONS))


class _Guarded(SimpleHTTPRequestHandler):
    """Serves files to who knows the password."""

    def do_GET(self):
        known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {known}":
            return self.send_error(401)
        return super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """The fields of a tiny run whose data needs a password and a signature."""
    folder = tmp_path_factory.mktemp("guarded")
    fields = kit.tiny_files(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Guarded, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://{USER}:{PASSWORD}@127.0.0.1:{server.server_port}"
        for name in ("train_file", "validation_file"):
            fields[name] = f"{base}/{fields[name].name}?X-Amz-Signature={SIGNATURE}"
        yield fields | {"max_steps": 3, "logging_steps": 1, "cache_dir": str(folder / "cache")}
        server.shutdown()


def leaks(folder) -> list[str]:
    secrets = re.compile("|".join((PASSWORD, SIGNATURE, USER)).encode())
    return [str(path) for path in folder.rglob("*") if path.is_file() and secrets.search(path.read_bytes())]


def test_credentials_are_in_no_file_and_no_output(guarded, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from src.reporting import html_report

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # inherited by what is forked

    run, work = tmp_path / "run", tmp_path / "work"
    work.mkdir()
    flags = kit.flags(**guarded, output_dir=run)
    codes, texts = kit.run_command("train.py", *flags, folder=work)
    assert codes == [0], texts
    html_report.write(run)
    # Resuming and a failure: a server that is gone is named in the error.
    codes, again = kit.run_command("train.py", *flags, "--max_steps", 4, "--lr_scheduler_type", "constant", folder=work)
    assert codes == [2]  # another schedule; says what changed
    absent = guarded | {"train_file": guarded["train_file"].replace("train", "absent")}
    codes, failed = kit.run_command("train.py", *kit.flags(**absent, output_dir=run), folder=work)
    assert codes == [2]
    assert "absent.jsonl" in failed[0]
    for text in (*texts, *again, *failed):
        assert not re.search("|".join((PASSWORD, SIGNATURE, USER)), text)
    assert leaks(run) == []
    assert leaks(tmp_path) == []
    assert leaks(Path(guarded["cache_dir"])) == []
    # The evaluation asks for what was removed, and takes it from the command line.
    known = ["--checkpoint", run, "--cache_dir", guarded["cache_dir"]]
    codes, texts = kit.run_command("eval.py", *known, folder=work)
    assert codes == [2]
    assert "--validation_file" in texts[0]
    codes, texts = kit.run_command(
        "eval.py", *known, *kit.flags(validation_file=guarded["validation_file"]), folder=work
    )
    assert codes == [0], texts
    reported = [
        line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "eval"
    ]
    assert json.loads((run / "eval.json").read_text()) == reported[-1]
    assert leaks(run) == []
    assert "***@127.0.0.1" in yaml.safe_load((run / "config.yaml").read_text())["train_file"][0]


def test_credentials_of_a_stream_are_in_no_file(guarded, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    fields = guarded | {"streaming": True, "cache_dir": tmp_path / "cache", "output_dir": tmp_path / "run"}
    codes, texts = kit.run_command("train.py", *kit.flags(**fields), folder=tmp_path, world=2)
    assert codes == [0, 0], texts
    assert not re.search("|".join((PASSWORD, SIGNATURE, USER)), "".join(texts))
    assert leaks(tmp_path) == []
    assert (tmp_path / "run" / "ledger.jsonl").exists()
