"""stdlib_tokens: the tokens of functions (`tokens`), tagged by their role in Python (`tags`)."""

import io
import keyword
import tokenize
from pathlib import Path

from samples import _stdlib


def make(folder: Path) -> None:
    """Write train.jsonl, validation.jsonl and tokenizer/."""
    _stdlib.write_sample(folder, _stdlib.rows_of_functions(tagged_tokens), ["tokens"])


def tagged_tokens(source: str) -> dict | None:
    """Return the tokens of a function, of 20 characters at most, and their tags; None if it is incomplete."""
    try:
        parts = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.string.strip()]
    except (tokenize.TokenError, SyntaxError):
        return None
    texts = [token.string for token in parts]
    kinds = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.COMMENT: "comment"}
    tags = []
    for token, before, after in zip(parts, ["", *texts], [*texts[1:], ""], strict=False):
        tag = kinds.get(token.type, "O")  # O: operators and brackets
        if token.type == tokenize.NAME:
            tag = "call" if after == "(" else "attribute" if before == "." else "name"
            tag = "keyword" if keyword.iskeyword(token.string) else tag
        tags.append(tag)
    return {"tokens": [text[:20] for text in texts], "tags": tags} if texts else None
