"""Remove credentials from everything that is printed, logged, saved or published.

Tests: tests/config/test_redact.py. A query parameter is kept only if its name is known to be harmless, or its value is
too small to be a secret: a new kind of signature is removed without anybody adding it here. URLs that the user gives are
remembered (`learn`), so their credentials are also found in pieces, encoded, or with characters that end a URL in a sentence.
"""

import json
import os
import re
from urllib.parse import quote, unquote

REMOVED = "***"


def _patterns(end: str) -> tuple[re.Pattern, re.Pattern]:
    """Return what finds the user and the query of a URL that ends before a sign of `end`."""
    # A password may hold any sign, though it should be encoded; a port is a number.
    user = rf"([A-Za-z][A-Za-z0-9+.-]+:/{{1,2}})([^{end}/?#:]+:(?!\d+[/?#])[^{end}]*|[^{end}/?#]+)@"
    return re.compile(user), re.compile(rf"(:/{{1,2}}[^{end}?#]*[?#])([^{end}]*[^{end}{AFTER}])")


AFTER = r".,:;)\]}"  # punctuation of the sentence around a URL
END = r"\s\"'<>`\\"  # where a URL in a sentence, or in quotes, ends
IN_TEXT, ALONE = _patterns(END), _patterns(r"\s")  # a value that is a URL may hold quotes
WHOLE = _patterns(r"\n")  # and one that the user gave may hold spaces
_OF_PATH = re.compile(rf"((?<=[\w/.%*-])\?(?=[\w.%$\[\]-]+=))([^{END}]*[^{END}{AFTER}])")  # as libraries quote it
_BARE = re.compile(r"(\burl: /[^\s?]*\?)(\S+)", re.IGNORECASE)  # as urllib3 does
_OF_SEGMENT = re.compile(rf"(;[\w.-]+=)([^{END};/?#&]*[^{END};/?#&{AFTER}])")  # http://h/x.jsonl;token=…
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|"
    r"\bsk-(?:\w+-)?[A-Za-z0-9]{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[\w+/=-]{12,}"
)
_TINY = re.compile(r"true|false|yes|no|\d{1,4}", re.IGNORECASE)
_PLAIN = re.compile(r"[\w.-]{0,40}")
_SECRET = re.compile(r"sig|token|key|secret|pass|pwd|pw$|^p$|auth|cred|session|policy|expire|amz|goog|code|pin", re.I)
SAFE = {"alt", "config", "dl", "download", "export", "file", "filename", "format", "inline", "limit", "offset", "page"}
SAFE |= {"partition", "raw", "ref", "rev", "revision", "split", "version", "versionid"}


_known: dict[str, str] = {}  # what the user gave, or a piece of it -> what is shown instead
_finds_known: list[re.Pattern] = []
SHORTEST = 8  # characters of a piece that is removed wherever it stands: shorter ones may be ordinary words
_DATE = re.compile(r"[\d:TZ.+-]+")
_REQUOTED = "!#$%&'()*+,/:;=?@[]~"  # what requests leaves as it is
_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|ACCESS_KEY_ID)$")


def learn(value) -> None:
    """Remember the credentials of URLs in a value that the user gave: a string, or dicts and lists of them."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            learn(part)
    elif isinstance(value, str) and (match := re.match(r"(?:--[\w-]+=)?([A-Za-z][\w+.-]+:/.*)$", value, re.DOTALL)):
        _learn_url(match[1])


def learn_environment() -> None:
    """Remember the tokens and passwords of the environment, and those of URLs in it, such as a proxy's."""
    for name, value in os.environ.items():
        learn(value)
        if _VARIABLE.search(name):
            _remember({value: REMOVED})


def _learn_url(url: str) -> None:
    clean = WHOLE[1].sub(_query, WHOLE[0].sub(_user, url))
    if clean == url:
        return
    pieces, path = [], url
    for user in WHOLE[0].finditer(url):
        # Libraries end a host at these signs, and quote what stands before as one that is not valid.
        pieces += [user[2], user[2].partition(":")[2], *re.split(r"[\s\\/?#@<>\"\[\]]+", user[2])]
        path = path.replace(user[2], "")
    if query := WHOLE[1].search(url):
        parts = [part for part in re.split(r"&amp;|[&;#]", query[2]) if _parameter(part) != part]
        pieces += [query[2], *(part.partition("=")[2] or part for part in parts)]
        path = path[: path.index(query[2])]
    _remember({url: clean} | {p: REMOVED for p in pieces if p not in path and not _DATE.fullmatch(p)})


def _remember(found: dict[str, str]) -> None:
    for text, shown in found.items():
        plain = unquote(text)
        forms = {quote(one, safe=safe) for one in (text, plain) for safe in ("", "/", _REQUOTED)}
        forms |= {text, plain, repr(text)[1:-1], json.dumps(text)[1:-1]}
        enough = SHORTEST // 2 if ":" in text else SHORTEST
        _known.update({form: shown for form in forms if len(form) >= enough and form not in _known})
    if _known:
        longest_first = "|".join(map(re.escape, sorted(_known, key=len, reverse=True)))
        _finds_known[:] = [re.compile(rf"(?<![A-Za-z0-9_])(?:{longest_first})(?![A-Za-z0-9_])")]


def redact(text: str) -> str:
    """Return `text` without credentials; `***` stands where they stood."""
    for pattern in _finds_known:
        text = pattern.sub(lambda match: _known[match[0]], text)
    if ":/" in text:
        user, query = ALONE if re.match(r"(--[\w-]+=)?[\w+.-]+://\S+$", text) else IN_TEXT
        text = query.sub(_query, user.sub(_user, text))
        text = _OF_SEGMENT.sub(lambda match: match[1] + REMOVED if _SECRET.search(match[1]) else match[0], text)
    if "?" in text:
        text = _OF_PATH.sub(_query, _BARE.sub(_query, text))
    return _TOKEN.sub(REMOVED, text)


def redact_all(value, by=redact):
    """Return `value` with every string in its dicts and lists redacted."""
    if isinstance(value, dict):
        return {redact_all(key, by): redact_all(v, by) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(v, by) for v in value]
    return by(value) if isinstance(value, str) else value


def publishable(text: str) -> str:
    """Return `text` as strangers may read it: of a URL that held credentials, nothing of the query is left."""
    clean = redact(text)
    return clean if clean == text and REMOVED not in text else IN_TEXT[1].sub(rf"\g<1>{REMOVED}", clean)


def was_redacted(value) -> bool:
    """Return whether credentials were removed from a value that is read back."""
    if isinstance(value, dict | list):
        return any(map(was_redacted, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and bool(re.search(r"://[^/?#]*\*\*\*@|[?#]\*\*\*|[?&;#][^&;=]*=\*\*\*", value))


def _user(match: re.Match) -> str:
    """Of some stores, what stands before an @ alone is a container (abfs) or an account (ssh)."""
    scheme, user = match.groups()
    return f"{scheme}{REMOVED}@" if ":" in user or _holds_password(scheme) else match[0]


def _holds_password(scheme: str) -> bool:
    return scheme.lower().startswith(("http", "ftp", "git"))


def _query(match: re.Match) -> str:
    parts = re.split(r"(&amp;|[&;#])", match[2])
    if match[1].endswith("#") and _PLAIN.fullmatch(match[2]):
        return match[0]  # the name of a place in a page
    return match[1] + "".join(part if i % 2 else _parameter(part) for i, part in enumerate(parts))


def _parameter(text: str) -> str:
    name, _, value = text.partition("=")
    if not value.strip("="):  # the end of a bare base64 value looks like an empty parameter
        return text if name.lower() in SAFE | {"", REMOVED} else REMOVED
    known = name.lower() in SAFE and _PLAIN.fullmatch(value)
    tiny = _TINY.fullmatch(value) and not _SECRET.search(name)
    return text if known or tiny else f"{name}={REMOVED}"
