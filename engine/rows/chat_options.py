"""Options of tasks that read chats: the chat template, its variables, and which words are targets.

A copy that has removed chats keeps this file. Tests: tests/engine/rows/test_template_choice.py.
"""

from dataclasses import dataclass, field
from typing import Any

from engine.config.option import AS_GIVEN, option

CHATS = "chats"
PROMPT = "answers follow"  # in the plan and the model card


@dataclass
class ChatOptions:
    """The fields of the run file about chats; the `Options` of a task that reads chats derive from it."""

    # from_checkpoint is false: the tokenizer of a checkpoint has the template of a file, training_template the name.
    chat_template: str | None = option(
        "chat template: a name of configs/chat_templates, or a Jinja file (default: the tokenizer's own, or a template that "
        "writes the same and marks every turn)",
        is_path=AS_GIVEN,
        from_checkpoint=False,
    )
    # Harmless from a checkpoint: a template runs in a sandbox.
    chat_template_kwargs: dict | None = option(
        "variables of the chat template for all chats, such as {enable_thinking: false}; those in a row's column of this "
        "name take precedence",
        from_checkpoint=True,
    )
    train_turns: str = option(
        "all: each turn of the assistant is a target, and begins another sequence only if its prompt at inference does not "
        "continue the one before; each: always; last: only the last turn is a target",
        "all",
        choices=("all", "last", "each"),
    )
    # may_change_on_resume: the prepared rows are compared, which this decides.
    training_template: str | None = option(
        "what writes the chats in training: own (the tokenizer's template), or a name of configs/chat_templates "
        "(default: chosen at the start, and recorded here)",
        may_change_on_resume=True,
        from_checkpoint=True,
        is_rare=True,
    )


@dataclass(frozen=True)
class ChatFormat:
    """How chats become text, and which words of them are targets."""

    template: str | None = None  # stands in for the tokenizer's own one; None: that one
    variables: dict[str, Any] = field(default_factory=dict)
    train_turns: str = "all"
    one_sequence: bool = False  # of each row, as for tasks that compare answers
    choice: str = ""  # which template, and why, for the plan
    prompt: str = ""  # what the generation prompt adds to a question, for the plan

    def settings(self, tokenizer: Any) -> tuple:
        """Return everything that rows depend on, for the key of prepared data; at the defaults the template alone."""
        template = self.template or getattr(tokenizer, "chat_template", None)
        if not self.variables and self.train_turns == "all":
            return (template,)
        return template, sorted(self.variables.items()), self.train_turns

    def unused_fields(self) -> list[str]:
        """Return the fields of the run file that have no effect on rows that are not chats."""
        fields = {"chat_template_kwargs": self.variables, "train_turns": self.train_turns != "all"}
        return [name for name, value in fields.items() if value]

    def plan(self) -> dict[str, str]:
        """Return the rows of the plan: which template writes the chats, and why; how answers are prompted."""
        rows = {"chat template": self.choice}
        return rows | {PROMPT: repr(self.prompt)[1:-1]} if self.prompt else rows
