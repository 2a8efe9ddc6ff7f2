"""Turns as other trainers write them: ShareGPT's names of roles, calls as JSON text, prompts with completions.

Turns become those that a chat template takes (engine/rows/chat_turns.py). A row that would lose a part is refused.
Tests: tests/engine/rows/test_formats.py.
"""

from collections.abc import Iterable
from typing import Any

from engine.config.errors import warn_once
from engine.rows.chat_turns import ASSISTANT_NAMES, NOT_TRAINED_KEY, TRAIN_KEYS, from_json

# Roles as ShareGPT, LLaMA-Factory, axolotl and unsloth name them -> as templates do. Names that mean a call, or a call or
# its result, stand below.
ROLES = {
    "human": "user",
    "user": "user",
    "chatgpt": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function-response": "tool",
} | dict.fromkeys(ASSISTANT_NAMES, "assistant")
CALL_ROLES = ("function_call", "function-call", "tool_call")
FUNCTION = "function"  # OpenAI's name of a result; where no call goes before it, perhaps of a call
THINK_END = "</think>"


# ---- turns -----------------------------------------------------------------------------------------------------------


def read_turns(turns: Any, name: str, other_roles: bool = False) -> Any:
    """Return turns with `role` and `content`, made of those with `from` and `value`; any of them may be JSON text.
    A key that is null is not there.

    `name`: what holds the turns. `other_roles`: also of those with `role` the names are ShareGPT's. Raise ValueError for a
    turn that says its role or text twice, or whose role has no meaning."""
    turns = from_json(turns, name)
    if not isinstance(turns, list):
        return turns  # read_chat refuses it
    turns = [from_json(turn, f"turn {i} of {name}") for i, turn in enumerate(turns)]
    if not all(isinstance(turn, dict) for turn in turns):
        return turns
    turns = [{key: value for key, value in turn.items() if value is not None} for turn in turns]
    read = []
    before = ""  # the role of the turn before
    for i, turn in enumerate(turns):
        if other_roles or "from" in turn:
            turn = _read_turn(i, turn, before)
        before = turn.get("role", "")
        read.append(turn)
    return read


def _read_turn(i: int, turn: dict, before: str) -> dict:
    """Return turn `i` of ShareGPT as templates take it."""
    if "value" in turn:
        text = turn.pop("value")
        if turn.setdefault("content", text) != text:
            raise ValueError(f"turn {i} has `value` and `content`, which differ: remove one of them")
    names = [turn.pop(key) for key in ("role", "from") if key in turn]
    if not names:
        return turn  # read_chat refuses it
    calls = [isinstance(name, str) and name.strip().lower() in CALL_ROLES for name in names]
    if any(calls):
        return _read_call(i, turn)
    roles = {_role_of(i, name, before) for name in names}
    if len(roles) > 1:
        raise ValueError(f"turn {i} has `role` {names[0]!r} and `from` {names[1]!r}: remove one of them")
    return {"role": roles.pop()} | turn


def _role_of(i: int, name: Any, before: str) -> str:
    role = name.strip().lower() if isinstance(name, str) else None
    if role == FUNCTION:
        if before in ("assistant", "tool"):
            return "tool"
        raise ValueError(
            f"turn {i} has the role {name!r}, but no call goes before it: name it function_call if it is a call, or tool"
        )
    if role not in ROLES:
        known = ", ".join([*ROLES, *CALL_ROLES])
        raise ValueError(f"turn {i} has the role {name!r}, which has no meaning here: known are {known}")
    return ROLES[role]


def _read_call(i: int, turn: dict) -> dict:
    """Return a turn of LLaMA-Factory whose text is calls, as JSON, as the assistant's turn that calls.

    Reasoning may stand before the JSON, up to </think>."""
    text = turn.pop("content", "")
    before, tag, rest = text.rpartition(THINK_END) if isinstance(text, str) else ("", "", text)
    calls = from_json(rest, f"turn {i} is a function_call: what it says")
    calls = calls if isinstance(calls, list) and calls else [calls]
    functions = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            raise ValueError(
                f"turn {i} is a function_call: its text has to be JSON with `name` and `arguments`, or a list of such"
            )
        unread = sorted(call.keys() - {"name", "arguments"})
        if unread:
            raise ValueError(f"turn {i} is a function_call with `{unread[0]}` beside `name` and `arguments`: remove it")
        functions.append({"type": "function", "function": call})
    return {"role": "assistant", "content": before + tag} | turn | {"tool_calls": functions}


def wrap_tools(tools: Any) -> Any:
    """Return tools, which may be JSON text, each as `{"type": "function", "function": …}`, as templates take them."""
    tools = from_json(tools, "`tools` of the row")
    if isinstance(tools, list):
        return [wrap_tools(tool) for tool in tools]
    if not isinstance(tools, dict) or tools.get("function") is not None or not tools.get("name"):
        return tools
    if tools.get("type") not in (None, "function"):
        return tools
    return {"type": "function", "function": {key: value for key, value in tools.items() if key != "type"}}


# ---- prompts and completions -----------------------------------------------------------------------------------------


def split_prompt(prompt: Any, completion: Any, names: tuple[str, str]) -> tuple[list[dict], list[dict]]:
    """Return (the turns of a prompt, which are not trained on, the turns of its completion that follow them).

    A text beside turns is what the user says, or the assistant answers. The completion may repeat the turns of the
    prompt. Raise ValueError if it is not clear which turns are the prompt. `names`: the columns of both."""
    prompt_name, name = names
    answer = read_answer(completion, name)
    if isinstance(prompt, str):
        first = next((i for i, turn in enumerate(answer) if turn.get("role") != "system"), 0)
        if answer[first].get("role") == "assistant":
            return [*answer[:first], {"role": "user", "content": prompt}], answer[first:]
        count = _turns_with(prompt, answer)
        if not count:
            raise ValueError(
                f"`{prompt_name}` is text that no turn of the user in `{name}` says: begin `{name}` with the assistant's "
                f"turn, or remove `{prompt_name}`"
            )
        return not_trained(answer[:count], prompt_name), answer[count:]
    turns = _as_turns(prompt, "user", prompt_name)
    if turns and answer[: len(turns)] == turns:
        answer = answer[len(turns) :]
        if not answer:
            raise ValueError(f"`{name}` has no turn after those of `{prompt_name}`")
    if turns and turns[-1].get("role") == "assistant" and answer[0].get("role") == "assistant":
        raise ValueError(
            f"`{prompt_name}` ends with a turn of the assistant, and `{name}` begins with one: write them as one turn of "
            f"`{name}`"
        )
    return not_trained(turns, prompt_name), answer


def read_answer(answer: Any, name: str) -> list[dict]:
    """Return an answer, text or turns, as turns. Raise ValueError if it has none. `name`: its column."""
    turns = _as_turns(answer, "assistant", name)
    if not turns:
        raise ValueError(f"`{name}` has no turn")
    return turns


def _as_turns(value: Any, role: str, name: str) -> list[dict]:
    """Return a text as one turn of `role`, one turn as a list, and a list of turns with roles as templates name them."""
    if value is None:
        raise ValueError(f"`{name}` holds nothing")
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    turns = read_turns([value] if isinstance(value, dict) else value, f"`{name}`")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"`{name}` is not a list of turns, nor text")
    for i, turn in enumerate(turns):
        if not isinstance(turn.get("role"), str):
            raise ValueError(f"turn {i} of `{name}` has no role")
    return turns


def _turns_with(text: str, turns: list[dict]) -> int:
    """Return the number of turns up to the first one of the user that says `text`, 0 if none does."""
    for i, turn in enumerate(turns):
        content = turn.get("content")
        if turn.get("role") == "user" and isinstance(content, str) and content.strip() == text.strip():
            return i + 1
    return 0


def not_trained(turns: Iterable[dict], name: str) -> list[dict]:
    """Return turns that are not trained on, whatever they say; warn if they say otherwise. `name`: their column."""
    excluded = []
    for turn in turns:
        asked = [key for key in TRAIN_KEYS if turn.get(key)]
        if asked and turn.get("role") == "assistant":
            warn_once(f"`{asked[0]}` of turns of `{name}` is not used: only what follows it is trained on")
        kept = {key: value for key, value in turn.items() if key not in (*TRAIN_KEYS, NOT_TRAINED_KEY)}
        excluded.append(kept | {"train": False})
    return excluded
