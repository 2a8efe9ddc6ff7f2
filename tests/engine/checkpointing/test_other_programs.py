"""final/ in other programs: llama.cpp, CTranslate2 and lm-eval give the tokens and the likelihood that transformers gives.

What is not installed is skipped; docs/finetuning.md says how each is installed. sentence-transformers:
tests/addons/tasks/test_embeddings.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conformance.recipes import SENTENCE
from tests.helpers import kit

pytestmark = pytest.mark.cluster

WORDS = SENTENCE.split()
ROPE = {"rope_type": "default", "rope_theta": 300.0}  # a program that does not find it takes another one: other tokens
NEW_TOKENS = 24
PROMPTS = ("the cat sat", "one red fox ran over", "no")


RUNS = {
    "full": {},
    "add_tokens": {"add_tokens": ["<extra>"]},
    "lora": {"peft": {"type": "lora", "r": 4, "target": "all-linear"}},
    "qlora": {"peft": {"type": "lora", "r": 4, "target": "all-linear"}, "load_in_4bit": True, "merge": True},
}


def train(kind: str, base: Path, folder: Path) -> Path:
    """Fine-tune a tiny Llama, whose tokenizer is in `base`, on prompts and completions; return the run folder."""
    kit.need_task("causal_lm")
    fields = RUNS[kind]
    if "peft" in fields:
        kit.need_addon("adapters/peft")
        pytest.importorskip("peft")
    if "load_in_4bit" in fields:
        kit.need_addon("adapters/low_bit_base")
        pytest.importorskip("bitsandbytes")
    vocabulary = len(AutoTokenizer.from_pretrained(base))
    kit.save_model(base, kit.LLAMA | {"vocab_size": vocabulary, "rope_parameters": ROPE, "tie_word_embeddings": False})
    generator = np.random.default_rng(0)
    for split, count in (("train", 64), ("validation", 20)):
        starts = generator.integers(0, len(WORDS) - 8, count)
        rows = [
            {"prompt": " ".join(WORDS[i : i + 3]), "completion": " " + " ".join(WORDS[i + 3 : i + 8])} for i in starts
        ]
        kit.write_jsonl(folder / f"{split}.jsonl", rows)
    flags = kit.flags(
        model_name_or_path=base,
        train_file=folder / "train.jsonl",
        validation_file=folder / "validation.jsonl",
        append_eos=False,
        global_batch_size=8,
        per_device_batch_size=8,
        learning_rate=1e-2,
        max_steps=40,
        cache_dir=folder / "cache",
        **{name: json.dumps(value) for name, value in fields.items()},
    )
    return kit.run_training(1, folder / "run", *flags).folder


def greedy(final: Path) -> list[tuple[list[int], list[int]]]:
    """Return (ids of the prompt, ids that `generate` of transformers writes after it) of each of PROMPTS."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(final, dtype="float32"),
        AutoTokenizer.from_pretrained(final),
    )
    pairs = []
    for text in PROMPTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        answer = model.generate(ids, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
        pairs.append((ids[0].tolist(), answer[0, ids.shape[1] :].tolist()))
    assert len({token for _, answer in pairs for token in answer}) > 8  # no model that repeats itself
    return pairs


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer = AutoTokenizer.from_pretrained(kit.tiny_tokenizer(folder / "tokenizer", [SENTENCE] * 3))
    tokenizer.bos_token = tokenizer.unk_token = tokenizer.eos_token  # CTranslate2 reads no model without them
    tokenizer.save_pretrained(folder / "base")
    return train(request.param, folder / "base", folder)


def test_greedy_tokens_of_ctranslate2(run, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    final, tokenizer = run / "final", AutoTokenizer.from_pretrained(run / "final")
    ctranslate2.converters.TransformersConverter(str(final)).convert(str(tmp_path / "model"))
    generator = ctranslate2.Generator(str(tmp_path / "model"), device="cpu", compute_type="float32")
    for prompt, expected in greedy(final):
        [result] = generator.generate_batch(
            [tokenizer.convert_ids_to_tokens(prompt)],
            min_length=NEW_TOKENS,
            max_length=NEW_TOKENS,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        assert result.sequences_ids[0] == expected


def test_likelihood_of_lm_eval(run):
    """Of the completions of the validation data, to 1e-4 that of the evaluation."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    rows = [json.loads(line) for line in (run.parent / "validation.jsonl").read_text().splitlines()]
    pairs = [(row["prompt"], row["completion"]) for row in rows]
    model = huggingface.HFLM(pretrained=str(run / "final"), device="cpu", dtype="float32", batch_size=4)
    requests = [instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    line = kit.Run(run).kind("eval")[-1]
    total = sum(value for value, _ in model.loglikelihood(requests, disable_tqdm=True))
    assert line["weight"] == sum(len(model.tok_encode(completion)) for _, completion in pairs)
    assert -total / line["weight"] == pytest.approx(line["loss"], rel=1e-4)


@pytest.fixture(scope="module", params=RUNS)
def converted(request, tmp_path_factory) -> tuple[Path, Path]:
    """Return final/ of a base with a SentencePiece tokenizer, and what llama.cpp's converter makes of it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("llama_cpp")
    source = os.environ.get("LLAMA_CPP", "")
    if not Path(source, "convert_hf_to_gguf.py").exists():
        pytest.skip("LLAMA_CPP names no folder with convert_hf_to_gguf.py")
    folder = tmp_path_factory.mktemp("sentencepiece")
    base = folder / "base"
    base.mkdir()
    with (base / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([SENTENCE] * 20),
            model_writer=file,
            vocab_size=340,
            model_type="bpe",
            byte_fallback=True,
            minloglevel=2,
        )
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "</s>", "add_bos_token": True}))
    final = train(request.param, base, folder) / "final"
    command = [
        sys.executable,
        f"{source}/convert_hf_to_gguf.py",
        final,
        "--outfile",
        folder / "f32.gguf",
        "--outtype",
        "f32",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return final, folder / "f32.gguf"


def test_greedy_tokens_of_llama_cpp(converted):
    import llama_cpp

    final, file = converted
    float32 = llama_cpp.GGML_TYPE_F32
    model = llama_cpp.Llama(str(file), n_ctx=128, n_threads=1, type_k=float32, type_v=float32, verbose=False)
    for prompt, expected in greedy(final):
        stream = model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
        assert [next(stream) for _ in expected] == expected


def test_llama_cpp_tokenizes_as_transformers_does(converted):
    import llama_cpp

    final, file = converted
    model, tokenizer = llama_cpp.Llama(str(file), vocab_only=True, verbose=False), AutoTokenizer.from_pretrained(final)
    generator = np.random.default_rng(1)
    # transformers adds no space before a text that begins with one, SentencePiece does.
    lines = ["a" + "".join(generator.choice([*" aeo\n", "é", "cat", "the", "ran"], 12)) for _ in range(200)]
    lines += [" ".join(generator.choice(WORDS, 12)) for _ in range(200)]
    differs = [line for line in lines if model.tokenize(line.encode(), add_bos=True) != tokenizer(line)["input_ids"]]
    assert differs == []
