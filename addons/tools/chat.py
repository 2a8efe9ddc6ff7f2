# Needs addons/tools/_open_model.py.
"""A chat in the terminal with a run, a checkpoint, a final model or a Hub model.

    make chat [RUN=folder] [ARGS='--system "Be brief." --temperature 0.7']

Each line is a turn; the answer is printed token by token, and the turns are kept. A line /new begins another chat. A model
without a chat template continues each line as a text. Ctrl-D or Ctrl-C ends it. Tests: tests/addons/tools/test_chat_and_predict.py.
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from addons.tools._open_model import OpenModel, most_tokens, open_model
from engine.config.errors import UsageError
from engine.distributed.init_accelerator import shutdown
from engine.plan.seeding import seed_everything
from engine.process.exit_codes import run_main
from engine.rows.prompts import Prompt

NEW = "/new"
MOST_TOKENS = 512  # of an answer, unless a flag says otherwise


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="make chat", allow_abbrev=False, epilog="and the flags of eval.py, such as --checkpoint"
    )
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        help="tokens of an answer at most (default: 512, or half of the model's positions)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: draw tokens by chance (default: 0)")
    parser.add_argument(
        "--top_p", type=float, default=1.0, help="draw among the likeliest tokens of this share (default: 1)"
    )
    parser.add_argument("--system", help="text of a first turn of the system (default: none)")
    own, rest = parser.parse_known_args(argv)
    if own.temperature < 0 or not 0 < own.top_p <= 1:
        raise UsageError("temperature must be 0 or more, top_p above 0 and at most 1")
    opened = open_model(rest)
    if opened.backend.accelerator.num_processes > 1:
        raise UsageError("a chat runs on one process: launch it without accelerate, as make chat does")
    if own.system and not opened.task.generation.tokenizer.chat_template:
        raise UsageError("system: the model has no chat template: give --chat_template chatml, or omit it")
    settings: dict[str, Any] = {"max_new_tokens": most_tokens(opened.task, own.max_new_tokens, MOST_TOKENS)}
    if own.temperature:
        settings |= {"do_sample": True, "temperature": own.temperature, "top_p": own.top_p}
    try:
        chat(opened, settings, own.system)
    except KeyboardInterrupt:
        print()
    shutdown(opened.backend.accelerator)


def chat(opened: OpenModel, settings: dict[str, Any], system: str | None) -> None:
    """Answer each line of the standard input until it ends."""
    generation = opened.task.generation
    is_chat = bool(generation.tokenizer.chat_template)
    first = [{"role": "system", "content": system}] if system else []
    turns = list(first)
    if sys.stdin.isatty():
        kept = "turns are kept" if is_chat else "no chat template: each line is continued as a text"
        print(f"{opened.cfg.model_name_or_path}: {kept}. {NEW} begins another chat, Ctrl-D ends.", flush=True)
    seed_everything(opened.cfg.seed)
    for line in lines():
        if line == NEW:
            turns = list(first)
            continue
        asked = [*turns, {"role": "user", "content": line}]
        prompt = generation.read_prompt(asked if is_chat else line, "the chat")
        if not generation.has_room(prompt, settings["max_new_tokens"]):
            print(
                f"error: {len(prompt.ids):,} tokens and an answer of {settings['max_new_tokens']:,} do not fit into the "
                f"model's {generation.limit:,} positions: {NEW} begins another chat; --max_new_tokens allows shorter answers",
                flush=True,
            )
            continue
        answer = stream_answer(opened, prompt, settings)
        turns = [*asked, {"role": "assistant", "content": answer}]


def lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not empty; in a terminal with a prompt and line editing."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401 (input() then edits lines and remembers them)

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


@torch.no_grad()
def stream_answer(opened: OpenModel, prompt: Prompt, settings: dict[str, Any]) -> str:
    """Print the answer to a prompt token by token; return it."""
    from transformers import TextStreamer

    task = opened.task
    generation = task.generation
    streamer = TextStreamer(generation.tokenizer, skip_prompt=True, skip_special_tokens=True)
    device = opened.backend.accelerator.device
    inputs = {name: value.to(device) for name, value in generation.inputs([prompt]).items()}
    module = opened.module.eval()
    with module.answering(partial(task.answer, streamer=streamer, **settings)):
        tokens = module(inputs)["generated"]
    return generation.texts(tokens.cpu().numpy())[0]


if __name__ == "__main__":
    run_main(main)
