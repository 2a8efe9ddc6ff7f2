"""Training templates of the package trl: they stand in for templates that no family that ships writes alike."""

import pytest

from engine.text.chat_options import ChatOptions, make_chat_format
from engine.text.template_families import DATE, family_of, trains_all_turns
from tests.addons.data.test_stock_templates import STOCK, cells, marks_of
from tests.helpers.chat_oracle import GEMMA4, tokenizer_of

TEXTS = {name: file.read_text(encoding="utf-8") for name, file in STOCK.items()}
# trl does not mark the token after a call, by which Gemma waits for the result.
OF_TRL = {"diffusion_gemma": GEMMA4._replace(ends=("<turn|>", "<tool_call|>"))}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Templates that end no turn, or write the date, warn; that is tested in test_chat.py."""
    monkeypatch.setattr("engine.text.chat.warn_once", lambda message: None)


@pytest.mark.parametrize("stock", TEXTS)
def test_template_of_a_run(stock):
    """The own template if it trains all rows, else that of its family, else one of trl. What the own one trains, this
    writes alike, and trains exactly. The mutant asks trl first."""
    tokenizer = tokenizer_of(TEXTS[stock])
    options = ChatOptions()
    chosen = make_chat_format(tokenizer, options)
    family = family_of(tokenizer)
    if trains_all_turns(tokenizer):
        assert options.training_template == "own"
    else:
        assert options.training_template in ((family,) if family else ("trl", "own"))
    if options.training_template != "trl":
        return
    assert chosen.template != TEXTS[stock]
    assert "{%- generation" in chosen.template or "{% generation" in chosen.template
    own = cells(TEXTS[stock], marks_of(stock))
    ours = cells(chosen.template, OF_TRL.get(stock, marks_of(stock)))
    assert None in own.values()
    assert list(ours.values()).count(None) <= list(own.values()).count(None)
    for name, text in own.items():
        assert text is None or DATE.sub("DATE", ours[name] or "") == DATE.sub("DATE", text), name


def test_trl_serves_some_of_them():
    chosen = []
    for text in TEXTS.values():
        options = ChatOptions()
        make_chat_format(tokenizer_of(text), options)
        chosen.append(options.training_template)
    assert chosen.count("trl") >= 5
    assert chosen.count("own") < 10
