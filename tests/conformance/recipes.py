"""One recipe per task: rows and flags small enough for a test. A fork adds its own task here, and nothing else."""

import numpy as np

from tests.helpers import kit

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "one",
    "red",
    "fox",
    "ran",
    "over",
    "seven",
    "lazy",
    "dogs",
    "and",
    "nobody",
    "saw",
    "it",
    "go",
    "home",
    "again",
]


def causal_lm(folder) -> list:
    """Ragged rows of ids."""
    generator = np.random.default_rng(1)
    for split, count in (("train", 203), ("validation", 31)):
        rows = [
            {"input_ids": generator.integers(0, 500, 3 + int(40 * generator.random() ** 2)).tolist()}
            for _ in range(count)
        ]
        kit.write_jsonl(folder / f"{split}.jsonl", rows)
    return ["--model_config", kit.write_yaml(folder / "model.yaml", kit.LLAMA)]


def text_classification(folder) -> list:
    """Sentences of random words, labelled by whether the cat is in them."""
    generator = np.random.default_rng(2)
    for split, count in (("train", 203), ("validation", 31)):
        texts = [" ".join(generator.choice(WORDS, 2 + int(20 * generator.random() ** 2))) for _ in range(count)]
        kit.write_jsonl(
            folder / f"{split}.jsonl", [{"text": t, "label": "cat" if "cat" in t else "none"} for t in texts]
        )
    tokenizer = kit.tiny_tokenizer(folder / "tokenizer")
    model = kit.write_yaml(folder / "model.yaml", BERT)
    return [
        "--task",
        "text_classification",
        "--model_config",
        model,
        "--tokenizer_name",
        tokenizer,
        "--metrics",
        "none",
    ]


RECIPES = [causal_lm, text_classification]
