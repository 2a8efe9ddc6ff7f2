# Needs addons/tools/_open_model.py.
"""Answers to the rows of a .jsonl file: each row with its own keys and a key `prediction`, in the order of the file.

    make predict FILE=rows.jsonl [RUN=folder] [NPROC=2] [ARGS='--max_new_tokens 64 --output answers.jsonl']

A row has any format that the task trains on, and is read as there. Its last answer is left out, and answered anew; it may
be missing. Chats are rendered by the chat template with the beginning of an answer; a block of reasoning is a part of the
prediction unless it is empty. The answers are the same on any number
of processes. Tests: tests/addons/tools/test_chat_and_predict.py.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from addons.tools._open_model import OpenModel, most_tokens, open_model
from engine.config.addresses import path_of_flag
from engine.config.errors import UsageError, may_be_removed, writes_to
from engine.config.paths import locate
from engine.distributed.host_group import run_on_main
from engine.distributed.init_accelerator import shutdown
from engine.process.exit_codes import run_main
from engine.rows.chat_options import CHATS
from engine.rows.columns import columns_by_name, named_in_errors
from engine.rows.formats import Ids, Texts
from engine.rows.prompts import Prompt, last_answer
from engine.run.answers import generate_answers
from engine.storage.atomic_folder import rewrite

KEY = "prediction"
MOST_TOKENS = 256  # of an answer, unless a flag says otherwise


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="make predict", allow_abbrev=False, epilog="and the flags of eval.py, such as --checkpoint"
    )
    parser.add_argument("--file", required=True, help="rows to answer, one JSON object a line")
    parser.add_argument("--output", help="file to write (default: predictions_FILE in the run folder)")
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        help="tokens of an answer at most (default: 256, or half of the model's positions)",
    )
    own, rest = parser.parse_known_args(argv)
    file = Path(locate(path_of_flag(own.file, "--file")))
    opened = open_model(rest)
    output = Path(path_of_flag(own.output, "--output") if own.output else default_output(opened, file))
    predict(opened, file, output, most_tokens(opened.task, own.max_new_tokens, MOST_TOKENS))
    shutdown(opened.backend.accelerator)


def default_output(opened: OpenModel, file: Path) -> Path:
    """Return the file in the run folder that has the answers to the rows of `file`."""
    return Path(opened.cfg.output_dir, f"predictions_{file.stem}.jsonl")


def predict(opened: OpenModel, file: Path, output: Path, max_new_tokens: int) -> None:
    """Write the rows of `file` with their answers to `output`, by one rename; on all ranks."""
    cfg, task, backend, module = opened
    if output.resolve() == file.resolve():
        raise UsageError(f"output: {output} is the file with the rows: give another one")
    accelerator = backend.accelerator
    rows, prompts = run_on_main(accelerator, lambda: read_rows(file, task, max_new_tokens))
    tokens = generate_answers(backend, module, task, prompts, {"max_new_tokens": max_new_tokens}, cfg)
    texts = task.generation.texts(tokens)
    block = empty_reasoning(task)
    texts = [
        text.removeprefix(block) if isinstance(prompt.text, list) else text
        for text, prompt in zip(texts, prompts, strict=True)
    ]

    def write() -> None:
        lines = [json.dumps(row | {KEY: text}, ensure_ascii=False) for row, text in zip(rows, texts, strict=True)]
        with writes_to(output.parent, "output"):
            output.parent.mkdir(parents=True, exist_ok=True)
            rewrite(output, "".join(f"{line}\n" for line in lines))
        print(f"{len(rows):,} answers are written to {output.resolve()}", flush=True)

    run_on_main(accelerator, write)


def empty_reasoning(task: Any) -> str:
    """Return what the chat template writes between a prompt and the words of an answer without reasoning, as the answer's
    text has it: without special tokens. It is no part of the words."""
    tokenizer = task.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return ""
    with may_be_removed(CHATS):
        from engine.rows.find_targets import block_before_words  # pyrefly: ignore
    block = block_before_words(tokenizer, task.chat_format.template, task.chat_format.variables)
    return tokenizer.decode(tokenizer(block, add_special_tokens=False)["input_ids"], skip_special_tokens=True)


def read_rows(file: Path, task: Any, max_new_tokens: int) -> tuple[list[dict], list[Prompt]]:
    """Return the rows of a .jsonl file and their prompts. Raise UsageError with the line of a row that has none."""
    rows = []
    prompts = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"file: {file} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: no JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}: {type(row).__name__}, not a JSON object")
        if KEY in row:
            raise UsageError(f"{where}: the row has a key `{KEY}`, which the answer would replace: rename it")
        prompt = prompt_of_row(row, task, where)
        if not task.generation.has_room(prompt, max_new_tokens):
            raise UsageError(
                f"{where}: {len(prompt.ids):,} tokens and an answer of {max_new_tokens:,} do not fit into the model's "
                f"{task.generation.limit:,} positions: give a smaller --max_new_tokens, or shorten the row"
            )
        rows.append(row)
        prompts.append(prompt)
    if not rows:
        raise UsageError(f"file: {file} has no row")
    return rows, prompts


def prompt_of_row(row: dict, task: Any, where: str) -> Prompt:
    """Return what stands before the last answer of a row, which may lack it, read by its columns as in training.

    Raise UsageError for a row that cannot be read."""
    columns = task.cfg.columns
    row = {name: row[column] for name, column in columns_by_name(row, columns).items()}
    with named_in_errors(columns):
        encoder, row = choose_format(row, task.encoder, where)
        batch = {name: [value] for name, value in row.items()}
        [made] = encoder.read_batch(batch, [where])
        if isinstance(made, Ids):
            return prompt_before_answer(encoder, batch, task.max_length, where)
        if isinstance(made, Texts):
            return task.generation.read_prompt(made.text if made.prompt is None else made.prompt, where)
        if not isinstance(made.turns, list):
            [part] = encoder.format.required
            raise UsageError(f"{where}: `{part}` holds {type(made.turns).__name__}, not a list of turns")
        return task.generation.read_prompt(before_answer(made.turns), where, made.tools, made.variables)


def choose_format(row: dict, encoder: Any, where: str) -> tuple[Any, dict]:
    """Return an encoder for a row, and the row with an empty answer if it has none. Raise UsageError if it has no prompt.

    A text is continued only if the row has nothing else that the encoder reads."""
    encoder = replace(encoder, is_mixed=True)  # rows may have several formats, and lack columns that are named
    read = {name: value for name, value in row.items() if value is not None}
    others = {name: value for name, value in read.items() if name != "text"}
    for there in (others, with_answer(others), read):
        try:
            encoder.choose([*there], "the file's", there.get)
        except UsageError:
            continue
        return encoder, there
    raise UsageError(
        f"{where}: no prompt among {', '.join(row) or 'no keys'}: a row needs `messages`, `prompt` or a text"
    )


def with_answer(row: dict) -> dict:
    """Return a row with an empty answer to its prompt or instruction, or the better one of a pair of answers."""
    row = dict(row)
    better = row.pop("chosen", "")
    row.pop("rejected", None)
    if "prompt" in row and isinstance(row["prompt"], list) and not better:
        row["prompt"] = before_answer(row["prompt"])
    if "prompt" in row:
        row.setdefault("completion", better)
    if "instruction" in row:
        row.setdefault("output", "")
    return row


def before_answer(turns: list) -> list:
    """Return turns without those of the assistant at their end."""
    while turns and isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant":
        turns = turns[:-1]
    return turns


def prompt_before_answer(encoder: Any, batch: dict[str, list], max_length: int, where: str) -> Prompt:
    """Return what stands before the answer of a row of token ids."""
    encoded = encoder.encode_batch(batch, [where])
    ids = np.array(encoded["input_ids"][0])
    prompt = last_answer(ids, np.array(encoded.get("labels", encoded["input_ids"])[0]))
    if prompt is None or len(ids) >= max_length:
        raise UsageError(f"{where}: the row has no answer within max_length {max_length}: give `messages` or `prompt`")
    return prompt


if __name__ == "__main__":
    run_main(main)
