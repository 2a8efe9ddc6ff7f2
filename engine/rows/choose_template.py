"""Choice of the chat template that writes the chats of a run in training, and of the one that is saved with the model.

Both are functions of the tokenizer and the options alone, so all ranks choose the same. Tests:
tests/engine/rows/test_template_choice.py.
"""

from pathlib import Path
from typing import Any, NamedTuple

from engine.config.errors import UsageError, did_you_mean, errors_of
from engine.config.paths import locate
from engine.rows.chat_options import ChatFormat, ChatOptions
from engine.rows.find_targets import beginning_of_answer
from engine.rows.render_chat import without_marks
from engine.rows.template_families import family_files, family_of, trains_probes
from engine.rows.template_variables import names_in, split_defaults, variables_of, with_defaults

OWN = "own"
KEPT = "final/ keeps the tokenizer's own"


class Choice(NamedTuple):
    """A template that writes chats: `name` is recorded as `training_template`; `text` is None for the tokenizer's own."""

    name: str
    text: str | None
    reason: str


def choose_template(tokenizer: Any, options: ChatOptions) -> ChatFormat:
    """Return how the chats of a run become text.

    Sets `options.training_template`, and gives the tokenizer the template that is saved with the model, with the run's
    variables as defaults. Raise UsageError for a template that does not exist, or variables that it does not read."""
    defaults: dict[str, Any] = {}
    if tokenizer.chat_template:  # of a run's final/, it has defaults already
        tokenizer.chat_template, defaults = split_defaults(tokenizer.chat_template)
    if options.chat_template:
        choice = _choose_given(tokenizer, options.chat_template)
    elif not tokenizer.chat_template:
        _check_variables(tokenizer, Choice(OWN, None, ""), options.chat_template_kwargs or {})
        return ChatFormat(train_turns=options.train_turns)
    elif options.training_template:
        choice = _choose_recorded(tokenizer, options.training_template)
    else:
        choice = _choose_by_tokenizer(tokenizer)
    if options.training_template not in (None, choice.name):
        raise UsageError(
            f"training_template is {options.training_template}, but chat_template {options.chat_template} makes it "
            f"{choice.name}: give --training_template {choice.name}, or remove one of them"
        )
    options.training_template = choice.name
    given = options.chat_template_kwargs or {}
    _check_variables(tokenizer, choice, given)
    variables = {name: value for name, value in (defaults | given).items() if value is not None}
    what = f"{choice.name}: {choice.reason}"
    if options.train_turns != "all":
        turns = "only the last one is trained" if options.train_turns == "last" else "each one is a sequence of its own"
        what += f"; of the assistant's turns {turns}"
    prompt = beginning_of_answer(tokenizer, variables)
    tokenizer.chat_template = with_defaults(tokenizer.chat_template, variables)
    return ChatFormat(choice.text, variables, options.train_turns, choice=what, prompt=prompt)


def _choose_given(tokenizer: Any, given: str) -> Choice:
    """Return the template that the field chat_template names, and let the tokenizer have it where it must be saved."""
    families = family_files()
    file = Path(locate(given))
    if given in families:
        text = families[given].read_text(encoding="utf-8")
        if tokenizer.chat_template and family_of(tokenizer) == given:
            return Choice(given, text, f"chat_template names it, and it writes what the tokenizer's own writes; {KEPT}")
        tokenizer.chat_template = without_marks(text)
        return Choice(given, text, "chat_template names it; final/ has it, too")
    if "/" not in given and "." not in given and not file.is_file():
        raise UsageError(
            f"chat_template: {given} is neither a file nor one of the templates {', '.join(families)}"
            f"{did_you_mean(given, families)}"
        )
    with errors_of(f"chat_template: {given} cannot be read"):
        tokenizer.chat_template = file.read_text(encoding="utf-8-sig")
    with errors_of(f"chat_template: {given} is not a Jinja template"):
        names_in(tokenizer.chat_template)
    return Choice(OWN, None, f"the file {given}, as chat_template says; final/ has it, too")


def _choose_recorded(tokenizer: Any, name: str) -> Choice:
    """Return the template that an earlier start of this run has chosen, or the checkpoint that is evaluated."""
    if name == OWN:
        return Choice(OWN, None, "the tokenizer's, as training_template says")
    families = family_files()
    if name not in families:
        raise UsageError(
            f"training_template: {name} is none of {OWN}, {', '.join(families)}{did_you_mean(name, (OWN, *families))}"
        )
    return Choice(name, families[name].read_text(encoding="utf-8"), f"as training_template says; {KEPT}")


def _choose_by_tokenizer(tokenizer: Any) -> Choice:
    """Return the tokenizer's own template if it marks what is trained, else one that writes the same and does."""
    if trains_probes(tokenizer):
        return Choice(OWN, None, "the tokenizer's, which marks what is trained")
    family = family_of(tokenizer)
    if family is None:
        return Choice(
            OWN, None, "the tokenizer's; chats that it does not write whole, or whose prompts it changes, are refused"
        )
    reason = f"it marks every turn with its reasoning, and else writes what the tokenizer's own writes; {KEPT}"
    return Choice(family, family_files()[family].read_text(encoding="utf-8"), reason)


# ---- variables -------------------------------------------------------------------------------------------------------


def _check_variables(tokenizer: Any, choice: Choice, given: dict[str, Any]) -> None:
    """Raise UsageError for a variable that the template does not read, so that it would be ignored."""
    own = tokenizer.chat_template or ""
    templates = [choice.text or "", *([own] if isinstance(own, str) else own.values())]
    names: set[str] = set()
    for template in templates:
        names |= variables_of(tokenizer, template)
    for name in given:
        if name not in names:
            of_it = f"its variables are {', '.join(sorted(names))}" if names else "it has no variables"
            raise UsageError(
                f"chat_template_kwargs: {name} is not read by the chat template ({choice.name}), so it would be ignored: {of_it}"
                f"{did_you_mean(name, names)}"
            )
