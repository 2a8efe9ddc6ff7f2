"""Allowlists for values from a checkpoint or a dataset: data names and attention kernels without code.

Tests: tests/config/test_foreign_code.py.
"""

STORES = ("http", "https", "s3", "gs", "gcs", "hf", "az", "abfs", "abfss", "adl")  # other schemes may run code


def plain_data(value) -> bool:
    """Return True if all data names in `value`, also in lists and dicts, are local paths, Hub ids or URLs of STORES."""
    if isinstance(value, dict | list):
        return all(map(plain_data, value.values() if isinstance(value, dict) else value))
    scheme, separator, _ = str(value).partition("://")
    return "::" not in str(value) and (not separator or scheme.lower() in STORES)


def plain_name(value) -> bool:
    """Return True if `value` is a plain name, as of transformers' own attention kernels; a Hub repository runs code."""
    return isinstance(value, str) and value.replace("_", "").isalnum()
