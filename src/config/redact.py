"""Redaction of credentials in everything that is printed, logged, saved or published.

Patterns find credentials in any text: user and password of URLs, query parameters, tokens. A query parameter is kept
only if its name is in the allowlist HARMLESS or its value is too short for a secret. So unknown kinds of signatures are
redacted, too. URLs from the user are also remembered, because libraries quote and split them and print the pieces.
Tests: tests/config/test_redact.py.
"""

import json
import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

REMOVED = "***"
HARMLESS = {"alt", "config", "dl", "download", "export", "file", "filename", "format", "inline", "limit", "offset"}
HARMLESS |= {"page", "partition", "raw", "ref", "rev", "revision", "split", "version", "versionid"}
SHORTEST = 8  # characters of a remembered piece: a shorter piece may be an ordinary word

# ---- patterns --------------------------------------------------------------------------------------------------------

_AFTER_URL = r".,:;)\]}"  # punctuation of the sentence around a URL
_URL_END = r"\s\"'<>`\\"


def _url_patterns(end: str) -> tuple[re.Pattern, re.Pattern]:
    """Return patterns of (scheme, user and password) and of (start, query) for a URL without the characters `end`."""
    # A password may contain any character, also unquoted. Digits after the colon are a port, not a password.
    user = rf"([A-Za-z][A-Za-z0-9+.-]+:/{{1,2}})([^{end}/?#:]+:(?!\d+[/?#])[^{end}]*|[^{end}/?#]+)@"
    return re.compile(user), re.compile(rf"(:/{{1,2}}[^{end}?#]*[?#])([^{end}]*[^{end}{_AFTER_URL}])")


_IN_TEXT = _url_patterns(_URL_END)
_URL_ALONE = _url_patterns(r"\s")  # for a text that is one URL, which may contain quotes
_URL_GIVEN = _url_patterns(r"\n")  # for a URL from the user, which may contain spaces
_QUERY_OF_PATH = re.compile(rf"((?<=[\w/.%*-])\?(?=[\w.%$\[\]-]+=))([^{_URL_END}]*[^{_URL_END}{_AFTER_URL}])")
_QUERY_IN_URLLIB3 = re.compile(r"(\burl: /[^\s?]*\?)(\S+)", re.IGNORECASE)
_PATH_PARAMETER = re.compile(rf"(;[\w.-]+=)([^{_URL_END};/?#&]*[^{_URL_END};/?#&{_AFTER_URL}])")  # /x.jsonl;token=…
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|"
    r"\bsk-(?:\w+-)?[A-Za-z0-9]{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[\w+/=-]{12,}"
)
_SMALL_VALUE = re.compile(r"true|false|yes|no|\d{1,4}", re.IGNORECASE)
_SHORT_NAME = re.compile(r"[\w.-]{0,40}")
_SECRET_NAME = re.compile(
    r"sig|token|key|secret|pass|pwd|pw$|^p$|auth|cred|session|policy|expire|amz|goog|code|pin", re.IGNORECASE
)
_DATE = re.compile(r"[\d:TZ.+-]+")
_SECRET_VARIABLE = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|ACCESS_KEY_ID)$")


def redact(text: str) -> str:
    """Return `text` with each credential replaced by ***."""
    for pattern in _remembered_pattern:
        text = pattern.sub(lambda match: _remembered[match[0]], text)
    if ":/" in text:
        is_url = re.match(r"(--[\w-]+=)?[\w+.-]+://\S+$", text)
        user, query = _URL_ALONE if is_url else _IN_TEXT
        text = query.sub(_clean_query, user.sub(_clean_user, text))
        text = _PATH_PARAMETER.sub(lambda m: m[1] + REMOVED if _SECRET_NAME.search(m[1]) else m[0], text)
    if "?" in text:  # a path with a query, without its host, as libraries print it
        text = _QUERY_OF_PATH.sub(_clean_query, _QUERY_IN_URLLIB3.sub(_clean_query, text))
    return _TOKEN.sub(REMOVED, text)


def redact_all(value: Any, by: Callable[[str], str] = redact) -> Any:
    """Return a copy of `value` in which every string, also in nested dicts and lists, is redacted."""
    if isinstance(value, dict):
        return {redact_all(key, by): redact_all(v, by) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(v, by) for v in value]
    return by(value) if isinstance(value, str) else value


def publishable(text: str) -> str:
    """Redact `text` for a public page: if it contains credentials, also remove the whole query of every URL."""
    clean = redact(text)
    return clean if clean == text and REMOVED not in text else _IN_TEXT[1].sub(rf"\g<1>{REMOVED}", clean)


def was_redacted(value: Any) -> bool:
    """Return True if a value, read from a saved file, contains a redacted URL."""
    if isinstance(value, dict | list):
        return any(map(was_redacted, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and bool(re.search(r"://[^/?#]*\*\*\*@|[?#]\*\*\*|[?&;#][^&;=]*=\*\*\*", value))


def _clean_user(match: re.Match) -> str:
    scheme, user = match.groups()
    # Without a password, the name is a token in HTTP URLs, but a container in abfs:// and an account in ssh://.
    is_secret = ":" in user or scheme.lower().startswith(("http", "ftp", "git"))
    return f"{scheme}{REMOVED}@" if is_secret else match[0]


def _clean_query(match: re.Match) -> str:
    start, query = match.groups()
    if start.endswith("#") and _SHORT_NAME.fullmatch(query):
        return match[0]  # the anchor of a heading, not a query
    parts = re.split(r"(&amp;|[&;#])", query)  # parameters, with separators between them
    return start + "".join(part if i % 2 else _clean_parameter(part) for i, part in enumerate(parts))


def _clean_parameter(text: str) -> str:
    name, _, value = text.partition("=")
    if not value.strip("="):  # a bare base64 value that ends in = looks like an empty parameter
        return text if name.lower() in HARMLESS | {"", REMOVED} else REMOVED
    harmless = name.lower() in HARMLESS and _SHORT_NAME.fullmatch(value)
    small = _SMALL_VALUE.fullmatch(value) and not _SECRET_NAME.search(name)
    return text if harmless or small else f"{name}={REMOVED}"


# ---- credentials that the user gave ----------------------------------------------------------------------------------

_remembered: dict[str, str] = {}  # a URL with credentials, or a piece of it, in each quoting -> replacement
_remembered_pattern: list[re.Pattern] = []  # empty, or one pattern that matches all keys of _remembered
_KEPT_BY_REQUESTS = "!#$%&'()*+,/:;=?@[]~"  # characters that the library `requests` does not quote


def remember_credentials(value: Any) -> None:
    """Remember the credentials of URLs in a value from the user: a string, or dicts and lists of strings."""
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            remember_credentials(part)
    elif isinstance(value, str) and (match := re.match(r"(?:--[\w-]+=)?([A-Za-z][\w+.-]+:/.*)$", value, re.DOTALL)):
        _remember_url(match[1])


def remember_environment() -> None:
    """Remember tokens and passwords in environment variables, and credentials of URLs in them (e.g. of a proxy)."""
    for name, value in os.environ.items():
        remember_credentials(value)
        if _SECRET_VARIABLE.search(name):
            _remember({value: REMOVED})


def _remember_url(url: str) -> None:
    user_pattern, query_pattern = _URL_GIVEN
    clean = query_pattern.sub(_clean_query, user_pattern.sub(_clean_user, url))
    if clean == url:
        return
    pieces, rest = [], url  # rest: the URL without its secrets
    for match in user_pattern.finditer(url):
        user = match[2]
        # Some libraries end the host at these characters and print the text before them as an invalid host.
        pieces += [user, user.partition(":")[2], *re.split(r"[\s\\/?#@<>\"\[\]]+", user)]
        rest = rest.replace(user, "")
    if match := query_pattern.search(url):
        query = match[2]
        secret = [part for part in re.split(r"&amp;|[&;#]", query) if _clean_parameter(part) != part]
        pieces += [query, *(part.partition("=")[2] or part for part in secret)]
        rest = rest[: rest.index(query)]
    _remember({url: clean} | {piece: REMOVED for piece in pieces if piece not in rest and not _DATE.fullmatch(piece)})


def _remember(found: dict[str, str]) -> None:
    for text, shown in found.items():
        forms = {text, unquote(text), repr(text)[1:-1], json.dumps(text)[1:-1]}
        for safe in ("", "/", _KEPT_BY_REQUESTS):
            forms |= {quote(text, safe=safe), quote(unquote(text), safe=safe)}
        shortest = SHORTEST // 2 if ":" in text else SHORTEST  # name:password
        _remembered.update({form: shown for form in forms if len(form) >= shortest and form not in _remembered})
    if _remembered:
        longest_first = "|".join(map(re.escape, sorted(_remembered, key=len, reverse=True)))
        _remembered_pattern[:] = [re.compile(rf"(?<![A-Za-z0-9_])(?:{longest_first})(?![A-Za-z0-9_])")]
