"""How often a chat of a .jsonl file is parsed and rendered until it is ids, in one process, with a template that has marks."""

import io
import json
import sys
from collections import Counter
from pathlib import Path

import jinja2
import pyarrow.json
import pytest

from engine.config.paths import REPOSITORY
from tests.helpers import kit
from tests.helpers.chat_oracle import CALLING, QUESTIONS, REASONED, RESULT, TOOLS, tokenizer_of

PARSES = 2  # of the JSON of a row, at most: the first rows are looked at, too
READERS = 1  # files of the engine that call for them
ANSWER = {"role": "assistant", "content": "A"}
ROWS = 20
CASES = {  # template, turns after the first question, other columns, renderings at most
    "one answer": ("chatml", [ANSWER], {}, 4),
    "six turns": ("chatml", [ANSWER, QUESTIONS[1]] * 2 + [ANSWER], {}, 4),
    "reasoning": ("qwen3", [REASONED[0], QUESTIONS[1]] * 2 + [REASONED[1]], {}, 4),
    "tools": ("qwen3", [CALLING, RESULT, ANSWER], {"tools": TOOLS}, 6),
}


def mark(row: int) -> str:
    return f"<{row}>"


class Work:
    """Counts what is done with the text of each row: it is found by its mark."""

    def __init__(self):
        self.parses, self.renderings, self.readers = Counter(), Counter(), set()

    def see_parse(self, text: str) -> None:
        rows = [row for row in range(ROWS) if mark(row) in text]
        if not rows:
            return
        self.parses.update(rows)
        frame = sys._getframe(1)
        while not frame.f_code.co_filename.startswith(str(REPOSITORY / "engine")):
            frame = frame.f_back
        self.readers.add(Path(frame.f_code.co_filename).name)

    def see_rendering(self, messages: object) -> None:
        self.renderings.update(row for row in range(ROWS) if mark(row) in repr(messages))


@pytest.fixture
def work(monkeypatch):
    work = Work()
    decode, read_json = json.JSONDecoder.raw_decode, pyarrow.json.read_json

    def counted_decode(decoder, text, idx=0):
        value, end = decode(decoder, text, idx)
        work.see_parse(text[idx:end])
        return value, end

    def counted_read(file, *args, **kwargs):
        content = file.read()
        work.see_parse(content.decode())
        return read_json(io.BytesIO(content), *args, **kwargs)

    def counted(render):
        def call(template, *args, **kwargs):
            work.see_rendering(kwargs.get("messages"))
            return render(template, *args, **kwargs)

        return call

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted_decode)
    monkeypatch.setattr(pyarrow.json, "read_json", counted_read)
    for name in ("render", "generate"):
        monkeypatch.setattr(jinja2.Template, name, counted(getattr(jinja2.Template, name)))
    return work


@pytest.mark.parametrize("case", CASES)
def test_work_for_a_chat(case, work, tmp_path):
    """What is cached for a template is done for the first rows; the last one shows what each row takes."""
    name, turns, columns, renderings = CASES[case]
    template = REPOSITORY / f"configs/chat_templates/{name}.jinja"
    tokenizer_of(template.read_text(encoding="utf-8")).save_pretrained(tmp_path / "tokenizer")
    rows = [{"messages": [{"role": "user", "content": mark(row)}, *turns], **columns} for row in range(ROWS)]
    fields = {
        "model_config": kit.write_yaml(
            tmp_path / "model.yaml", kit.LLAMA | {"vocab_size": 1000, "max_position_embeddings": 2048}
        )
    }
    fields |= {"tokenizer_name": tmp_path / "tokenizer", "chat_template": template, "cache_dir": tmp_path / "cache"}
    kit.open_data(train_file=kit.write_jsonl(tmp_path / "rows.jsonl", rows), max_length=2048, **fields)
    assert 0 < work.parses[ROWS - 1] <= PARSES
    assert len(work.readers) <= READERS, work.readers
    assert 0 < work.renderings[ROWS - 1] <= renderings
