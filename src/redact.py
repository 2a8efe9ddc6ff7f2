"""Credentials in text: passwords and signatures of URLs, access tokens. Removed from all that a run writes or prints.

Leave alone. Guarded by tests/test_redact.py. A query parameter is kept only if its name is known to be harmless, or its value is
too small to be a secret: a new kind of signature is removed without anybody adding it here.
"""

import re

REMOVED = "***"


def _patterns(end: str) -> tuple[re.Pattern, re.Pattern]:
    """Return what finds the user and the query of a URL that ends before a sign of `end`."""
    # A password may hold any sign, though it should be encoded; a port is a number.
    user = rf"([A-Za-z][A-Za-z0-9+.-]*)://([^{end}/?#:]+:(?!\d+[/?#])[^{end}]*|[^{end}/?#]+)@"
    return re.compile(user), re.compile(rf"(://[^{end}?#]*[?#])([^{end}]*[^{end}{AFTER}])")


AFTER = r".,:;)\]}"  # punctuation of the sentence around a URL
END = r"\s\"'<>`\\"  # where a URL in a sentence, or in quotes, ends
IN_TEXT, ALONE = _patterns(END), _patterns(r"\s")  # a value that is a URL may hold quotes
_OF_PATH = re.compile(rf"((?<=[\w/.%*-])\?(?=[\w.%$\[\]-]+=))([^{END}]*[^{END}{AFTER}])")  # as libraries quote it
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|"
    r"\bsk-(?:\w+-)?[A-Za-z0-9]{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|(?<=\bBearer )[\w.~+/=-]{8,}|(?<=\bBasic )[\w+/=-]{12,}"
)
_TINY = re.compile(r"true|false|yes|no|\d{1,4}", re.IGNORECASE)
_PLAIN = re.compile(r"[\w.-]{0,40}")
_SECRET = re.compile(r"sig|token|key|secret|pass|pwd|pw$|^p$|auth|cred|session|policy|expire|amz|goog|code|pin", re.I)
SAFE = {"alt", "config", "dl", "download", "export", "file", "filename", "format", "inline", "limit", "offset", "page"}
SAFE |= {"partition", "raw", "ref", "rev", "revision", "split", "version", "versionid"}


def redact(text: str) -> str:
    """Return `text` without credentials; `***` stands where they stood."""
    if "://" in text:
        user, query = ALONE if re.match(r"(--[\w-]+=)?[\w+.-]+://\S+$", text) else IN_TEXT
        text = query.sub(_query, user.sub(_user, text))
    if "?" in text:
        text = _OF_PATH.sub(_query, text)
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
    secret = ":" in user or scheme.lower().startswith(("http", "ftp", "git"))
    return f"{scheme}://{REMOVED}@" if secret else match[0]


def _query(match: re.Match) -> str:
    parts = re.split(r"(&amp;|[&;#])", match[2])
    if match[1].endswith("#") and _PLAIN.fullmatch(match[2]):
        return match[0]  # the name of a place in a page
    return match[1] + "".join(part if i % 2 else _parameter(part) for i, part in enumerate(parts))


def _parameter(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals:
        return text if name.lower() in SAFE | {"", REMOVED} else REMOVED
    known = name.lower() in SAFE and _PLAIN.fullmatch(value)
    tiny = _TINY.fullmatch(value) and not _SECRET.search(name)
    return text if known or tiny or not value else f"{name}={REMOVED}"
