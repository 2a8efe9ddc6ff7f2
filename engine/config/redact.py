"""URLs with secrets: refuse user and password, never save a query string.

The query string of a signed URL is a secret. It is used, but the files of a run and of the cache have `?***` instead.
Tests: tests/engine/config/test_redact.py.
"""

import re
from typing import Any

_LOGIN = re.compile(r"https?://[^\s/?#]*@|://[^\s/?#@:\[]*:(?!:|\d+(?:[/?#]|$))\S*@", re.IGNORECASE)  # :8080/ is a port
_SPACE = re.compile(r"[\w+.-]+://(?:[^/?#]*|[^?]*\?.*)\s")  # in the host or the query string
_QUERY = re.compile(r"(:/[^\s?]*)\?\S*[^\s.,:;'\")\]}>]")  # pathlib writes https:/host


def url_error(value: Any) -> str | None:
    """Return why the URLs of a value from the user (a string, or dicts and lists of strings) are refused, or None."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        errors = (url_error(item) for item in value)
        return next((error for error in errors if error), None)
    if not isinstance(value, str) or "://" not in value:
        return None
    if _LOGIN.search(value):
        return (
            "a URL must not name a user or password, because files and messages show it: put them into ~/.netrc (http, "
            "https), or into the environment variables or configuration file of the object store"
        )
    if "reference://" in value:
        return "reference:// is refused, because some versions of fsspec run code in such a file: give the files themselves"
    return "write the spaces in the URL as %20" if _SPACE.match(value) else None


def redact_all(value: Any) -> Any:
    """Return a copy of `value` with `?***` for the query string of each URL, also in nested dicts and lists."""
    if isinstance(value, dict):
        return {redact_all(key): redact_all(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(inside) for inside in value]
    return _QUERY.sub(r"\1?***", value) if isinstance(value, str) else value


def was_redacted(value: Any) -> bool:
    """Return True if a value, read from a saved file, contains a redacted URL."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(was_redacted(item) for item in value)
    return isinstance(value, str) and "://" in value and "?***" in value
