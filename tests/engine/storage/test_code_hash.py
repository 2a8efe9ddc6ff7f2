"""Hash of code: what changes no behavior changes no hash, and what changes behavior does."""

import hashlib

import pytest

from engine.storage import code_hash as code_hash_module
from engine.storage.code_hash import code_hash

CODE = '''"""What the file does."""

import json
from functools import partial

from engine.rows.encode_chat import encode_chat
from engine.rows.labels import MASK, read_labels as labels_of

LIMIT = 3  # rows


class Encoder:
    """Encodes rows."""

    limit: int = LIMIT

    def encode(self, rows: list, *, key=None) -> list:
        """Return the rows, encoded."""
        import numpy as np

        # The first ones
        kept = [encode_chat(row) for row in rows[: self.limit] if row is not None]
        return [f"{json.dumps(row)}: {len(row) + 1:>5}" for row in np.array(kept)]
'''
SAME = {
    "comment": ("# The first ones", "# Those that come first"),
    "comment removed": ("  # rows", ""),
    "docstring": ('"""Return the rows, encoded."""', '"""Encode."""'),
    "docstring of the file": ('"""What the file does."""', ""),
    "docstring of a class": ('    """Encodes rows."""\n', ""),
    "blank lines": ("\n\n", "\n\n\n"),
    "layout": ("rows: list, *, key=None", "\n        rows: list,\n        *,\n        key=None,\n    "),
    "quotes": ('f"{json.dumps(row)}: {len(row) + 1:>5}"', "f'{json.dumps(row)}: {len(row) + 1:>5}'"),
    "import of a moved file": ("engine.rows.encode_chat", "addons.other"),
    "relative import": ("from engine.rows.encode_chat", "from ."),
    "order of imports": ("import json\nfrom functools import partial", "from functools import partial\nimport json"),
    "divided import": (
        "from engine.rows.labels import MASK, read_labels as labels_of",
        "from engine.rows.labels import MASK\nfrom src.text.other import read_labels as labels_of",
    ),
}
OTHER = {
    "constant": ("LIMIT = 3", "LIMIT = 4"),
    "type of a constant": ("LIMIT = 3", "LIMIT = 3.0"),
    "True for 1": ("len(row) + 1", "len(row) + True"),
    "None for nothing": ("[: self.limit]", "[None : self.limit]"),
    "operator": ("len(row) + 1", "len(row) - 1"),
    "called name": ("encode_chat(row) for", "encode_rows(row) for"),
    "attribute": ("json.dumps", "json.loads"),
    "imported name": ("import encode_chat", "import encode_rows as encode_chat"),
    "library of a name": ("from functools", "from other"),
    "default": ("key=None", "key=1"),
    "condition": ("is not None", "is None"),
    "format": (":>5", ":>6"),
    "text": ("}: {", "}:  {"),
    "decorator": ("    def encode", "    @property\n    def encode"),
    "annotation": ("limit: int", "limit: str"),
    "order of statements": ("import numpy as np\n", "import numpy as np\n\n        rows = rows[1:]\n"),
}


def hash_of(folder, *codes: str) -> str:
    """Return the hash of files with these codes, named by their number."""
    files = [folder / f"{number}.py" for number in range(len(codes))]
    for file, code in zip(files, codes, strict=True):
        file.write_text(code)
    return code_hash(files)


def changed(edit: tuple[str, str]) -> str:
    assert edit[0] in CODE
    return CODE.replace(*edit)


@pytest.mark.parametrize("name", SAME)
def test_edit_without_effect_keeps_the_hash(tmp_path, name):
    code = changed(SAME[name])
    assert code != CODE
    assert hash_of(tmp_path, code) == hash_of(tmp_path, CODE)


@pytest.mark.parametrize("name", OTHER)
def test_edit_with_an_effect_changes_the_hash(tmp_path, name):
    assert hash_of(tmp_path, changed(OTHER[name])) != hash_of(tmp_path, CODE)


def test_place_of_an_import_does_not_count(tmp_path):
    above, within = "import a\n\ndef f():\n    return a.b\n", "def f():\n    import a\n    return a.b\n"
    assert hash_of(tmp_path, above) == hash_of(tmp_path, within)


def test_name_and_order_of_files_do_not_count(tmp_path):
    assert hash_of(tmp_path, CODE, "a = 1") == hash_of(tmp_path, "a = 1", CODE) != hash_of(tmp_path, CODE, "a = 2")


def test_mutant_hash_of_the_text_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(code_hash_module, "_hash_of", lambda code: hashlib.sha256(code).hexdigest())
    for name in SAME:
        assert hash_of(tmp_path, changed(SAME[name])) != hash_of(tmp_path, CODE)


def test_hash_is_the_same_in_every_python(tmp_path):
    """Computed by Python 3.11. ast.dump changed in 3.12 (type parameters) and in 3.13 (no empty fields)."""
    assert hash_of(tmp_path, CODE) == "faf63fb8a3ddfeb141712133a18a3dea736484289ca6842b38e8f5e5793b0e3e"
