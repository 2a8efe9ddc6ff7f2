"""Training templates of the package trl: they stand in for templates that no family that ships writes alike."""

import importlib.util
from pathlib import Path

import pytest

from engine.config.errors import UsageError
from engine.text.chat_options import ChatOptions, make_chat_format
from engine.text.template_families import family_of, trains_all_turns
from tests.helpers.chat_oracle import CHATML, GEMMA4, LLAMA, ROWS, Marks, check_targets, tokenizer_of

TRL = importlib.util.find_spec("trl")
if TRL is None:
    pytest.skip("trl is not installed: pip install -r requirements-extra.txt", allow_module_level=True)
pytestmark = pytest.mark.cluster  # with the other extra packages
FOLDER = Path(TRL.submodule_search_locations[0]) / "chat_templates"
STOCK = {
    file.stem: file.read_text(encoding="utf-8")
    for file in sorted(FOLDER.glob("*.jinja"))
    if not file.stem.endswith("_training")
}
ASSISTANT = Marks("Assistant:", ("<end_of_utterance>",))
COHERE = Marks("<|CHATBOT_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",))
SERVED = {  # those that trl serves, and what stands around a turn
    "cohere": COHERE,
    "cohere2": COHERE._replace(header="<|CHATBOT_TOKEN|><|START_RESPONSE|>"),
    # trl does not mark the token after a call, by which Gemma waits for the result.
    "diffusion_gemma": GEMMA4._replace(ends=("<turn|>", "<tool_call|>")),
    "idefics3": ASSISTANT,
    "lfm2": CHATML,
    "lfm2_v2": CHATML,
    "llama3": LLAMA,
    "llava_next": Marks("[/INST]", ("</s>",)),
    "qwen2_5_vl": CHATML,
    "smolvlm": ASSISTANT,
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Templates that end no turn, or write the date, warn; that is tested in test_chat.py."""
    monkeypatch.setattr("engine.text.chat.warn_once", lambda message: None)


def choose(stock: str) -> tuple[str, str | None]:
    """Return the name and the text of the template that writes chats in place of a stock one."""
    options = ChatOptions()
    chosen = make_chat_format(tokenizer_of(STOCK[stock]), options)
    return options.training_template, chosen.template


@pytest.mark.parametrize("stock", STOCK)
def test_template_of_a_run_by_its_stock_template(stock):
    """The own one if it trains all rows, else that of its family, else one of trl. The mutant asks trl first."""
    tokenizer = tokenizer_of(STOCK[stock])
    family = family_of(tokenizer)
    name, _ = choose(stock)
    if trains_all_turns(tokenizer):
        assert name == "own"
    elif family:
        assert name == family
    else:
        assert name == ("trl" if stock in SERVED else "own")


def cells(template: str, marks: Marks) -> dict[str, str | None]:
    """Return the text of each row; None if it is refused. Raise Wrong for targets that are not exact."""
    texts: dict[str, str | None] = {}
    for name, (row, tools) in ROWS.items():
        try:
            texts[name] = check_targets(tokenizer_of(template), row, tools, marks)
        except UsageError:
            texts[name] = None
    return texts


@pytest.mark.parametrize("stock", SERVED)
def test_templates_of_trl_train_exactly_and_write_what_the_own_ones_train(stock):
    name, template = choose(stock)
    assert name == "trl"
    ours = cells(template, SERVED[stock])
    assert ours["several turns"] is not None
    own_marks = GEMMA4 if stock == "diffusion_gemma" else SERVED[stock]
    for row, text in cells(STOCK[stock], own_marks).items():
        assert text in (None, ours[row]), row
