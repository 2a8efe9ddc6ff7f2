"""Language models: the targets of a row, packed documents that do not see each other, exact numbers."""

import copy
import json
import math
from contextlib import suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Metaspace, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from engine.config.errors import UsageError
from engine.models import model_checks, packed_attention
from engine.models import varlen_attention as varlen
from engine.models.model_checks import check_packing
from engine.models.varlen_attention import (
    document_bounds,
    fits_flash_kernel,
    is_default_for,
    takes_lengths,
    varlen_attention,
)
from engine.process.private_apis import attention_kernel
from src.losses import chunked_cross_entropy
from tests.conformance import checks
from tests.helpers import kit

EOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ragged texts, some with characters of several bytes, with a tokenizer and models that fit them."""
    folder = tmp_path_factory.mktemp("lm")
    generator = np.random.default_rng(0)
    words = ["def", "return", "self", "für", "x", "漢字", "import", "naïve", "if", "🙂", "else", "(a, b)"]
    sizes = 2 + (30 * generator.random(90) ** 2).astype(int)
    kit.write_jsonl(folder / "train.jsonl", [{"text": " ".join(["row", *generator.choice(words, n)])} for n in sizes])
    kit.tiny_tokenizer(folder / "tokenizer", ["def return self import if else row"] * 3, chat_template=kit.CHATML)
    for name, config in (("gpt2", kit.EXACT), ("llama", kit.LLAMA), ("dropout", kit.GPT2)):
        kit.write_yaml(folder / f"{name}.yaml", {k: v for k, v in config.items() if k != "vocab_size"})
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder / "tokenizer")


def open_data(folder, train="train.jsonl", model="gpt2.yaml", **fields):
    """Return (task, splits) for a file of the folder, or for rows."""
    if not isinstance(train, str):
        kit.write_jsonl(folder / "rows.jsonl", train)
        train = "rows.jsonl"
    fields = {"model_config": folder / model, "tokenizer_name": folder / "tokenizer", "max_length": 128} | fields
    return kit.open_data(train_file=folder / train, cache_dir=folder / "cache", **fields)


def open_batch(folder, train, **fields):
    """Return (task, all prepared rows, the batch made of them, statistics)."""
    task, splits = open_data(folder, train, **fields)
    rows, stats = kit.all_rows(splits["train"]), splits["train"].stats
    batch = task.collate(rows, True)
    assert batch.weight == stats["targets"]
    return task, rows, batch, stats


def target_rows(batch):
    return [[t for t in row if t != -100] for row in batch.inputs["targets"].tolist()]


# ---- packed documents do not see each other --------------------------------------------------------------------------


def packed_and_alone(folder, model, attention, packing, change=None) -> float:
    """Return the deviation of the task's loss and gradient from those of the documents alone; `change` edits the model's
    input."""
    asked = {"attn_implementation": attention} if attention else {}
    task, splits = open_data(folder, model=model, dtype="float64", packing=packing, **asked)
    alone, documents = open_data(folder, model=model, dtype="float64", packing=False, **asked)
    rows, documents = kit.all_rows(splits["train"]), kit.all_rows(documents["train"])
    network = task.build().train()
    alone.build()
    assert len(documents) == 90
    assert (len(rows) < 60) == packing

    def summed(losses) -> tuple[float, torch.Tensor]:
        losses = [(loss.backward(), loss.item())[1] for loss in losses]
        gradient = torch.cat([p.grad.flatten() for p in network.parameters()])
        network.zero_grad()
        return sum(losses), gradient

    expected, reference = summed(alone.loss(network, alone.collate([row], True).inputs)["loss"] for row in documents)
    if change is not None:
        forward = network.base_model.forward
        network.base_model.forward = lambda **inputs: forward(**inputs | change(inputs))
    batches = (task.collate(rows[start : start + 2], True) for start in range(0, len(rows), 2))
    loss, gradient = summed(task.loss(network, batch.inputs)["loss"] for batch in batches)
    return max(abs(loss - expected) / expected, ((gradient - reference).abs().max() / reference.abs().max()).item())


# Llama's RMSNorm and rotary embedding compute in float32 whatever the weights are, GPT-2 computes in float64.
@pytest.mark.parametrize(
    "model, packing, tolerance", [("gpt2.yaml", True, 1e-10), ("gpt2.yaml", False, 1e-10), ("llama.yaml", True, 1e-6)]
)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen"])
def test_rows_equal_each_document_alone(folder, model, packing, tolerance, attention):
    assert packed_and_alone(folder, model, attention, packing) <= tolerance


OFF_SWITCHES = [  # without an error; transformers looks for documents in position_ids only in micro-batches of one row
    ("sdpa", lambda inputs: {"use_cache": True}),
    ("sdpa", lambda inputs: {"attention_mask": torch.ones_like(inputs["input_ids"])}),
    ("eager", lambda inputs: {"position_ids": None}),
    ("varlen", lambda inputs: {"cu_seq_lens_q": None}),
]


@pytest.mark.parametrize("attention, switch", OFF_SWITCHES)
def test_mutant_silent_off_switches_of_packing_are_caught(folder, attention, switch):
    assert packed_and_alone(folder, "llama.yaml", attention, True, switch) > 1e-3
    assert takes_lengths(attention) == (attention == "varlen")
    assert takes_lengths("flash_attention_2")  # runs on GPUs only


NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
KINDS = [  # model_type, attention, further sizes, what the error says; None: it is exact
    ("opt", "sdpa", {"ffn_dim": 64, "word_embed_proj_dim": 32} | NO_DROPOUT, "packing is true.*--packing false"),
    ("bloom", "eager", {}, "packing is true.*--packing false"),  # ALiBi
    ("opt", "varlen", {"ffn_dim": 64, "word_embed_proj_dim": 32} | NO_DROPOUT, None),
    ("mistral", "varlen", {"intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 5}, None),
    ("gpt_neox_japanese", "varlen", {}, "scaled_dot_product_attention"),  # needs a mask
    ("camembert", "varlen", {}, "packing is true"),  # its positions begin at 2
]


@pytest.mark.parametrize("kind, attention, sizes, error", KINDS)
def test_packing_is_exact_or_refused(folder, kind, attention, sizes, error):
    common = {"model_type": kind, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    kit.write_yaml(folder / f"{kind}.yaml", common | sizes)
    if error is None:
        assert packed_and_alone(folder, f"{kind}.yaml", attention, True) <= 1e-6
    else:
        task, _ = open_data(folder, model=f"{kind}.yaml", attn_implementation=attention, packing=True)
        with pytest.raises(UsageError, match=error):
            task.build()


# Hybrids: their attention separates the documents of a row, their other layers do not.
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32},
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention"], "mamba_d_head": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def causal_lm_of(kind: str, hidden: int, dtype: torch.dtype = torch.float32, **sizes):
    common = {"vocab_size": 500, "hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common | sizes), dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_packing_of_a_hybrid_is_refused(kind, dtype):
    with pytest.raises(UsageError, match="packing is true"):
        check_packing(causal_lm_of(kind, 32, dtype, **HYBRIDS[kind]), 500)


def test_mutant_probe_of_logits_passes_a_small_hybrid(monkeypatch):
    """Its convolution moves the logits of the next document by less than 1e-4 of the largest one."""
    model = causal_lm_of("lfm2", 16, **HYBRIDS["lfm2"])
    with pytest.raises(UsageError, match="packing is true"):
        check_packing(model, 500)
    monkeypatch.setattr(model_checks, "influence_of_first_half", lambda *args: torch.zeros(()))
    check_packing(model, 500)


@pytest.mark.parametrize(
    "kind, sizes",
    [
        ("llama", {}),
        ("gpt2", {"n_head": 4}),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 4}),
        ("mixtral", {"num_local_experts": 4}),
        ("lfm2", HYBRIDS["lfm2"]),
    ],
)
def test_influence_between_documents_is_far_from_its_bound(monkeypatch, kind, sizes):
    """Zero where documents are separate; where they are not, a thousand times the bound."""
    measured, influence = [], model_checks.influence_of_first_half

    def noted(*args):
        measured.append(influence(*args))
        return measured[-1]

    monkeypatch.setattr(model_checks, "influence_of_first_half", noted)
    with suppress(UsageError):
        check_packing(causal_lm_of(kind, 32, **sizes), 500)
    packed, whole = measured
    assert whole > 0
    if kind == "lfm2":
        assert packed > 1e3 * model_checks.LEAK * whole
    else:
        assert packed == 0


LLAMA = {"intermediate_size": 64, "num_key_value_heads": 2}


def swallow_lengths(model):
    """Let the lengths of documents never reach the attention of the last layer."""
    attend = model.model.layers[-1].self_attn.forward
    model.model.layers[-1].self_attn.forward = lambda *args, cu_seq_lens_q=None, **more: attend(*args, **more)
    return model


def test_small_leaks_are_found_in_16_bits_too(folder, monkeypatch):
    """ALiBi, and lengths that do not reach a layer of a Gemma, move the logits by a few percent of the largest one."""
    common = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    kit.write_yaml(folder / "alibi.yaml", {"model_type": "bloom"} | common)
    kit.write_yaml(folder / "gemma.yaml", {"model_type": "gemma", "head_dim": 16} | common | LLAMA)
    task, _ = open_data(folder, model="alibi.yaml", dtype="bfloat16", packing=True)
    with pytest.raises(UsageError, match="packing is true"):
        task.build()
    use_in = varlen.use_in
    monkeypatch.setattr(varlen, "is_default_for", fits_flash_kernel)
    for change, kernel in ((lambda model: model, "varlen"), (swallow_lengths, "sdpa")):
        task, _ = open_data(folder, model="gemma.yaml", dtype="bfloat16", packing=True)
        monkeypatch.setattr(varlen, "use_in", lambda model, change=change: change(use_in(model)))
        assert (attention_kernel(task.build().config), task.packed_attention.by_lengths) == (kernel, kernel == "varlen")


def test_rounding_of_another_row_is_no_leak(folder):
    task, _ = open_data(folder, model="llama.yaml", packing=True)
    model = task.build()
    model.lm_head.register_forward_hook(
        lambda head, inputs, logits: logits + 5e-4 * logits.abs().max() * torch.arange(len(logits))[:, None, None]
    )
    check_packing(model, task.vocab_size)


GEMMA4 = {"head_dim": 8, "global_head_dim": 264, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
DEFAULTS = [  # model_type, sizes, the kernel of packed rows on a GPU
    ("llama", LLAMA, "varlen"),
    ("llama", LLAMA | {"attention_dropout": 0.1}, "sdpa"),
    ("llama", LLAMA | {"hidden_size": 48}, "sdpa"),  # heads of 12: the kernel takes multiples of 8
    ("gemma4_text", LLAMA | GEMMA4, "sdpa"),  # the kernel takes at most 256
    ("gemma4_text", LLAMA | GEMMA4 | {"global_head_dim": 16}, "varlen"),
    ("gemma2", LLAMA | {"head_dim": 8, "attn_logit_softcapping": 50.0}, "eager"),
    ("gpt_neox_japanese", {"attention_dropout": 0.0}, "eager"),
]


@pytest.mark.parametrize("kind, sizes, kernel", DEFAULTS)
def test_packed_rows_on_a_gpu_have_attention_by_lengths_if_the_model_can(folder, monkeypatch, kind, sizes, kernel):
    """tests/gpu asks a GPU; here the model decides as there, and the result is exact."""
    common = {"model_type": kind, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    kit.write_yaml(folder / "default.yaml", common | sizes)
    task, _ = open_data(folder, model="default.yaml", packing=True)
    assert not is_default_for(task.build())  # there is no GPU
    monkeypatch.setattr(varlen, "is_default_for", fits_flash_kernel)
    model = task.build()
    assert (attention_kernel(model.config), task.packed_attention.by_lengths) == (kernel, kernel == "varlen")
    if kernel == "varlen":
        other, _ = open_data(folder, model="default.yaml", packing=True)  # of another rank, as FSDP2 builds it
        other.packed_attention = task.packed_attention
        assert attention_kernel(other.build(empty=True).config) == "varlen"
        assert packed_and_alone(folder, "default.yaml", None, True) <= 1e-6


def test_ranks_with_an_empty_model_keep_the_kernel_of_its_configuration(folder, monkeypatch):
    """A configuration may name a flash kernel, which takes lengths, too: rank 0 has it, so all have it."""
    AttentionInterface.register("fast", varlen_attention)  # transformers builds no model with `flash` without a GPU
    monkeypatch.setattr(packed_attention, "takes_lengths", lambda kernel: kernel == "fast")
    sizes = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    kit.write_yaml(folder / "fast.yaml", sizes | LLAMA | {"attn_implementation": "fast"})
    task, _ = open_data(folder, model="fast.yaml", packing=True)
    assert task.packed_attention.by_lengths
    assert attention_kernel(task.build(empty=True).config) == "fast"


REFUSED = [
    {"dropout": 0.1},
    {"softcap": 50.0},
    {"attention_mask": torch.ones(1, 1, 4, 4)},
    {"value": torch.ones(1, 2, 4, 16)},
]


@pytest.mark.parametrize("option", REFUSED)
def test_varlen_refuses_what_it_would_ignore(option):
    x = torch.randn(1, 2, 4, 8)
    options = {"value": x, "attention_mask": None} | document_bounds(torch.tensor([4]), 4)
    with pytest.raises(UsageError, match=r"varlen has no .*--attn_implementation sdpa"):
        varlen_attention(None, x, x, **options | option)


def test_varlen_computes_in_the_dtype_of_autocast(monkeypatch):
    """Also where a norm has left all of them in float32, which the kernel of a GPU does not take."""
    x, seen = torch.randn(1, 2, 4, 8), []
    monkeypatch.setattr(varlen, "_document_by_document", lambda *args: seen.extend(args[:3]) or args[0])
    with torch.autocast("cpu", torch.bfloat16):
        varlen_attention(None, x, x, x, None, **document_bounds(torch.tensor([4]), 4))
    assert [value.dtype for value in seen] == [torch.bfloat16] * 3


@pytest.mark.parametrize("key_heads", [4, 2])
def test_varlen_gives_the_kernel_of_a_gpu_what_it_takes(key_heads):
    """Of tensors without memory, so that no GPU is needed; tests/gpu computes it."""
    with FakeTensorMode():
        query, key = (torch.empty(2, heads, 8, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, key_heads))
        bounds = document_bounds(torch.empty(6, dtype=torch.int32, device="cuda"), 8)
        out, _ = varlen_attention(None, query.float(), key.float(), key, None, sliding_window=4, **bounds)
    assert (out.shape, out.dtype, out.device.type) == ((2, 8, 4, 16), torch.bfloat16, "cuda")


def test_cudnn_does_not_compute_attention_by_lengths(monkeypatch):
    """Where torch chooses between kernels (2.15), only its own is allowed, and only there."""
    allowed = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "_varlen_attn" in str(function):
                allowed.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(varlen, "CHOOSES_KERNEL", True)
    with FakeTensorMode(), Watch():
        heads = torch.empty(2, 4, 256, 64, dtype=torch.bfloat16, device="cuda")
        bounds = document_bounds(torch.empty(6, dtype=torch.int32, device="cuda"), 256)
        varlen_attention(None, heads, heads, heads, None, **bounds)
    assert allowed == [(False, True)]
    assert torch.backends.cuda.cudnn_sdp_enabled()


# ---- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("append", [True, False])
def test_text(folder, tokenizer, append):
    texts = ["def f", "", f"return {EOS}", "x"]
    eos = tokenizer.eos_token_id
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    expected = [ids + [eos] * (append and ids[-1:] != [eos]) for ids in encoded]
    rows = [{"code": text, "text": "no"} for text in texts]
    _, got, batch, _ = open_batch(folder, rows, append_eos=append, columns={"text": "code"})
    assert [row["input_ids"].tolist() for row in got] == expected
    assert target_rows(batch) == [ids[1:] for ids in expected]
    assert batch.weight == sum(max(0, len(ids) - 1) for ids in expected)
    assert batch.tokens == sum(map(len, expected))
    assert batch.padded_tokens == 4 * max(map(len, expected))


CHATS = [
    [("system", "be"), ("user", "hi"), ("assistant", "self für"), ("user", "def"), ("assistant", "return")],
    [("assistant", "import"), ("user", "self")],
    [("user", "def")],
]


def as_rows(*chats):
    return [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]


def chat_by_hand(tokenizer, chat):
    """Return (ids, labels): each turn tokenized alone, its header and the turns of others ignored."""
    ids, labels = [], []
    for role, content in chat:
        head = tokenizer(f"<|{role}|>")["input_ids"]
        body = tokenizer(f"{content}{EOS}\n")["input_ids"]
        ids += head + body
        labels += [-100] * len(head) + (body if role == "assistant" else [-100] * len(body))
    return ids, labels


def test_messages_train_on_the_assistants_turns(folder, tokenizer):
    _, rows, batch, _ = open_batch(folder, as_rows(*CHATS))
    by_hand = [chat_by_hand(tokenizer, chat) for chat in CHATS]
    assert [row["input_ids"].tolist() for row in rows] == [ids for ids, _ in by_hand]
    for row, (_, labels) in zip(batch.inputs["targets"].tolist(), by_hand, strict=True):
        assert row[: len(labels) - 1] == labels[1:]
    spoken = sum(len(f"{c}{EOS}\n".encode()) for chat in CHATS for role, c in chat if role == "assistant")
    assert batch.sums["bytes"] == spoken  # a chat's first token is a header's


def test_marked_turns_tools_and_reasoning_of_a_row_reach_the_model(folder, tokenizer):
    (folder / "tools.jinja").write_text(
        "{% for tool in tools or [] %}<|system|>{{ tool.name }}{% for key in tool.of %} {{ key }}{% endfor %}. {% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{%- generation -%}{{ m.thinking or '' }}: "
        "{{ m.content }}{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}. {% endfor %}"
    )
    chats = as_rows(CHATS[1][::-1], CHATS[1][::-1])
    chats[0]["messages"][1]["thinking"] = "row"
    chats[0]["tools"] = [{"name": "def", "of": {"if": 1}}, {"name": "return", "of": {"else": 1}}]
    _, rows, batch, _ = open_batch(folder, chats, chat_template=folder / "tools.jinja")
    texts, chat = [tokenizer.decode(row["input_ids"]) for row in rows], "<|user|>self. <|assistant|>"
    assert texts == [f"<|system|>def if. <|system|>return else. {chat}row: import. ", f"{chat}: import. "]
    assert [tokenizer.decode(row) for row in target_rows(batch)] == ["row: import", ": import"]


def test_prompt_and_completion_train_on_the_completion(folder, tokenizer):
    pairs = [("def f", "return für"), ("", "x 漢"), ("if", "")]
    _, rows, batch, _ = open_batch(folder, [{"prompt": p, "completion": c} for p, c in pairs])
    heads = [tokenizer(prompt)["input_ids"] for prompt, _ in pairs]
    tails = [[*tokenizer(completion)["input_ids"], tokenizer.eos_token_id] for _, completion in pairs]
    assert [row["input_ids"].tolist() for row in rows] == [h + t for h, t in zip(heads, tails, strict=True)]
    # Without a prompt nothing predicts the first token.
    assert target_rows(batch) == [t if h else t[1:] for h, t in zip(heads, tails, strict=True)]
    assert batch.sums["bytes"] == len("return für".encode()) + len(" 漢".encode())


def test_logits_are_computed_where_there_is_a_target(folder, monkeypatch):
    """In training and evaluation; a row without padding and prompt has a target nearly everywhere."""
    row = {"prompt": "def return self", "completion": "import"}
    task, _, batch, _ = open_batch(folder, [row] * 3, dtype="float64")
    model, inputs = task.build(), dict(batch.inputs)
    positions = inputs["target_positions"]
    targets = inputs["targets"].flatten()
    assert torch.equal(targets[positions], targets[targets != -100])
    seen, original = [], chunked_cross_entropy.sums_from_logits
    monkeypatch.setattr(
        chunked_cross_entropy, "sums_from_logits", lambda x, *rest: seen.append(len(x)) or original(x, *rest)
    )
    for mode in (True, False):
        sums = task.loss(model.train(mode), inputs)
        assert seen.pop() == len(positions)
        everywhere = task.loss(model, {k: v for k, v in inputs.items() if k != "target_positions"})
        assert {k: v.item() for k, v in sums.items()} == pytest.approx(
            {k: v.item() for k, v in everywhere.items()}, rel=1e-12
        )
    _, _, batch, _ = open_batch(folder, [{"text": "def " * 60}])
    assert "target_positions" not in batch.inputs


def test_prompt_keeps_only_its_own_end_of_text(folder, tokenizer):
    """Of a tokenizer that ends each text with one."""
    eos, texts, changed = tokenizer.eos_token_id, ["def f", f"def{EOS}"], copy.deepcopy(tokenizer)
    changed.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, eos)])
    changed.save_pretrained(folder / "own")
    rows = [{"prompt": text, "completion": "if"} for text in texts]
    _, rows, _, _ = open_batch(folder, rows, tokenizer_name=folder / "own")
    tail = [*tokenizer("if")["input_ids"], eos]
    assert [row["input_ids"].tolist() for row in rows] == [ids + tail for ids in tokenizer(texts)["input_ids"]]


def test_completion_is_tokenized_as_it_follows_its_prompt(folder):
    """SentencePiece begins a text with a space, which a completion does not have; "if" would be one token of "i" and "f"."""
    words = {word: i for i, word in enumerate(["<unk>", EOS, "▁def", "▁f", "f", "▁return", "▁", ":", "i", "▁if"])}
    model = Tokenizer(WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = Sequence([Metaspace(), Split(Regex("▁?(if|[a-z]+|:)"), "isolated")])
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token=EOS).save_pretrained(folder / "own")
    pairs = [("def:", "f"), ("def", " return"), ("i", "f")]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    _, rows, _, _ = open_batch(folder, rows, tokenizer_name=folder / "own")
    texts = [["▁def", ":", "f", EOS], ["▁def", "▁return", EOS], ["<unk>", "f", EOS]]
    assert [row["input_ids"].tolist() for row in rows] == [[words[word] for word in text] for text in texts]


@pytest.mark.parametrize(
    "prompt, completion",
    [("Answer: ", "yes"), ("Answer:", " yes"), ("Answer:", "yes"), ("no ", ""), ("Answer:\n", "\nyes")],
)
def test_prompt_and_completion_are_the_text_of_the_row(folder, prompt, completion):
    """The mutant tokenizes the completion alone, and trains on "Answer:  yes"."""
    model = Tokenizer(BPE(unk_token="<unk>"))
    model.pre_tokenizer, model.decoder = Metaspace(prepend_scheme="always"), MetaspaceDecoder()
    trainer = BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", EOS], show_progress=False)
    model.train_from_iterator(["Answer : yes no yes Answer: yes Question: is it so: yes\n\nno"] * 50, trainer)
    model.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token=EOS)
    tokenizer.save_pretrained(folder / "pieces")
    rows = [{"prompt": prompt, "completion": completion}]
    _, [row], batch, _ = open_batch(folder, rows, tokenizer_name=folder / "pieces")
    assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == prompt + completion
    head = tokenizer(prompt)["input_ids"]
    assert row["input_ids"].tolist()[: len(head)] == head  # as at generation
    assert batch.sums["bytes"] == len(completion)
    if (prompt, completion) == ("Answer: ", "yes"):
        mutant = head + tokenizer(completion, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(mutant, skip_special_tokens=True) == "Answer:  yes"


@pytest.mark.parametrize("chat", [True, False])
def test_answers_that_are_rated_as_bad_are_refused(folder, chat):
    """Rows of KTO, whose `label` says whether an answer is good."""
    row = as_rows(CHATS[1])[0] if chat else {"prompt": "def", "completion": "return"}
    _, rows, _, _ = open_batch(folder, [row | {"label": True}] * 2)
    assert len(rows) == 2
    with pytest.raises(UsageError, match=r"line 2.*`label` is false"):
        open_batch(folder, [row | {"label": True}, row | {"label": False}])


@pytest.mark.parametrize("packing", [True, False])
def test_input_ids_are_used_as_they_are(folder, packing):
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [5, -100, 70, 8]},
        {"input_ids": [9, 10], "labels": None},
        {"input_ids": [11, 12, 13], "labels": [-100, -100, -100]},
    ]
    _, _, batch, stats = open_batch(folder, rows, packing=packing)
    if packing:
        assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8, 11, 12, 13, 9, 10]]
        assert batch.inputs["targets"].tolist() == [[-100, 70, 8, -100, -100, -100, -100, 10, -100]]
        assert batch.inputs["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    else:
        assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 0, 0], [11, 12, 13, 0]]
        assert batch.inputs["targets"].tolist() == [[-100, 70, 8, -100], [10, -100, -100, -100], [-100] * 4]
        assert stats["without_target"] == 1
    assert batch.weight == 3
    assert batch.sums["bytes"] == 0  # unknown: there is no text


def test_prompt_that_packing_splits_is_warned_of_once(folder, capfd):
    row = {"prompt": "def f(x): " * 9, "completion": "return x"}
    pairs = [{"prompt": "a", "completion": "b"}, row, row]
    for rows, packing, is_split in (
        (pairs, True, True),
        (pairs, "whole", False),
        ([{"text": row["prompt"]}], True, False),
    ):
        open_data(folder, rows, packing=packing, max_length=12)
        warnings = capfd.readouterr().err
        assert warnings.count("packing splits such rows") == is_split
        assert not is_split or "rows.jsonl, line 2" in warnings
    open_data(folder, [row, row], packing=False, max_length=12 * 9)
    assert not capfd.readouterr().err


@pytest.mark.parametrize("packing", [True, "whole"])
@pytest.mark.parametrize("long_rows", ["cut", "drop"])
def test_answers_of_packed_documents_are_those_of_rows(folder, packing, long_rows):
    """Cut ones have none; a document as long as max_length may be cut, unless such documents are dropped."""
    rows = [{"prompt": "a" * n, "completion": "b"} for n in range(2, 12)]
    fields = {"predict_with_generate": True, "long_rows": long_rows, "max_length": 9, "max_new_tokens": 2}
    fields["validation_file"] = kit.write_jsonl(folder / "answers.jsonl", rows)
    alone, by_row = open_data(folder, rows, packing=False, **fields)
    expected = {len(prompt.ids) for prompt in alone.generation.of_rows}
    assert expected == {*range(2, 8 if long_rows == "drop" else 7)}  # each has an answer and an end
    if (packing, long_rows) == (True, "cut"):
        with pytest.raises(UsageError, match="packing whole"):
            open_data(folder, rows, packing=packing, **fields)
        return
    packed, splits = open_data(folder, rows, packing=packing, **fields)
    assert {len(prompt.ids) for prompt in packed.generation.of_rows} == expected
    assert splits["validation"].stats["examples"] < by_row["validation"].stats["examples"]


def test_columns_that_are_not_used_are_warned_about(folder, capfd):
    """Rows that fit two formats are of the first."""
    open_data(folder, [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "position_ids": [0, 1, 0], "text": "a"}])
    warnings = capfd.readouterr().err
    assert warnings.count("the columns loss_mask, position_ids, text are not used") == 1


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_length, packing", [(128, True), (12, False)])
def test_bits_per_byte_count_the_text_of_all_targets(folder, tokenizer, max_length, packing):
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    task, splits = open_data(folder, max_length=max_length, packing=packing, dtype="float64")
    sums, _ = checks.run_batch(task, task.build().eval(), kit.all_rows(splits["train"]), training=False)
    size = targets = 0
    for text in texts:
        encoded = tokenizer(text, return_offsets_mapping=True)
        ends = [end for _, end in encoded["offset_mapping"][:max_length]]
        size += len(text[ends[0] : ends[-1]].encode())  # all that follows the first token, whole characters
        targets += min(len(encoded["input_ids"]) + 1, max_length) - 1
    assert sums["weight"] == targets
    assert task.metrics(sums, targets)["bits_per_byte"] == pytest.approx(sums["loss"] / math.log(2) / size, rel=1e-12)


# ---- heads -----------------------------------------------------------------------------------------------------------


def test_heads_that_are_not_plain_are_seen(folder, tmp_path):
    """The mutant computes the loss of capped logits from hidden states."""
    capped = kit.LLAMA | {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0}
    task, _, batch, _ = open_batch(folder, "train.jsonl", model_config=kit.write_yaml(tmp_path / "model.yaml", capped))
    model = task.build().eval()
    assert not task.plain_head
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)  # logits as large as those of a trained model
        logits = model(input_ids=batch.inputs["input_ids"]).logits.flatten(0, 1)
        expected = F.cross_entropy(logits, batch.inputs["targets"].flatten(), reduction="sum").item()
        assert task.loss(model, batch.inputs)["loss"].item() == pytest.approx(expected, rel=1e-5)
        task.plain_head = True
        assert task.loss(model, batch.inputs)["loss"].item() != pytest.approx(expected, rel=1e-2)


# ---- what training leaves --------------------------------------------------------------------------------------------


def test_final_loads_with_transformers_and_says_the_printed_sample(folder, tmp_path):
    """A model with tied embeddings and dropout, from the command to final/."""
    fields = {"model_config": folder / "dropout.yaml", "tokenizer_name": folder / "tokenizer", "dtype": "float64"}
    fields |= {"train_file": folder / "train.jsonl", "max_length": 128, "packing": True, "global_batch_size": 8}
    fields |= {"max_steps": 6, "learning_rate": 1e-2, "sample_prompt": "def", "sample_tokens": 12}
    run = kit.run_training(1, tmp_path / "run", *kit.flags(**fields))
    final = run.folder / "final"
    model, info = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    task, _ = kit.open_data(**fields)
    sample = task.sample(task.build(str(final)).train())
    assert len(sample) > 3
    assert sample in (tmp_path / "run.out" / "rank0.txt").read_text()
