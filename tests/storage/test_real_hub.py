"""configs/finetune_hub.yaml, run on local folders in the formats of the Hub."""

from transformers import AutoTokenizer

from tests.helpers import kit

CHATS = [
    [
        {"role": "user", "content": f"What is {a} plus {b}?"},
        {"role": "assistant", "content": f"It is {a + b}."},
        {"role": "user", "content": "Thank you."},
        {"role": "assistant", "content": "You are welcome."},
    ]
    for a in range(8)
    for b in range(8)
]


def test_finetune_hub_config_on_chats(tmp_path):
    texts = [turn["content"] for chat in CHATS for turn in chat]
    model = kit.save_model(tmp_path / "model", kit.LLAMA | {"vocab_size": 320})
    kit.tiny_tokenizer(model, texts, chat_template=kit.CHATML)
    (tmp_path / "chats").mkdir()
    kit.write_jsonl(tmp_path / "chats" / "train.jsonl", [{"messages": chat} for chat in CHATS[:56]])
    kit.write_jsonl(tmp_path / "chats" / "test.jsonl", [{"messages": chat} for chat in CHATS[56:]])
    values = {"max_length": 250, "global_batch_size": 8, "max_steps": 2, "compile": False}
    local = kit.flags(model_name_or_path=model, dataset_name=tmp_path / "chats", **values)
    flags = ["--config", "configs/finetune_hub.yaml", *local]
    run = kit.run_training(2, tmp_path / "run", *flags)
    assert run.kind("eval")[-1]["examples"] < 8  # packed

    # The weight counts the tokens of the assistant only.
    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = sum(
        len(tokenizer(turn["content"] + "<|endoftext|>\n", add_special_tokens=False)["input_ids"])
        for chat in CHATS[56:]
        for turn in chat
        if turn["role"] == "assistant"
    )
    assert run.kind("eval")[-1]["weight"] == answers
    assert AutoTokenizer.from_pretrained(run.folder / "final").chat_template == kit.CHATML
