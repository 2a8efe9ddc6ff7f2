"""stdlib_chats: chats of one turn (`messages`): a question for a function of a module, and its source as the answer."""

import json
from pathlib import Path

from samples import _stdlib


def make(folder: Path) -> None:
    """Write train.jsonl, validation.jsonl and tokenizer/, which has no chat template."""
    rows = {split: [chat(row) for row in rows] for split, rows in _stdlib.function_rows().items()}
    for split, examples in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples), encoding="utf-8")
    texts = [turn["content"] for row in rows["train"] for turn in row["messages"]]
    _stdlib.train_tokenizer(texts, folder / "tokenizer")


def chat(row: dict) -> dict:
    """Return a chat for a row of functions: its first line is asked for, the whole source is the answer."""
    first = row["text"].split("\n")[0]
    question = f"Write this function of {row['path']}: {first}"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["text"]}]
    return {"messages": turns, "path": row["path"]}
