"""One recipe per task of src/tasks/: rows and flags small enough for a test. A fork adds its own task here, and nothing
else; those of addons/tasks/ are in tests/addons/tasks/recipes.py.

A recipe writes train.jsonl and validation.jsonl into `folder` and returns flags. Its flags win over those of the suite
(tests/conformance/test_task.py), and data of any other format is a flag too: train_file, validation_file, dataset_name.
Switch dropout off. 203 rows to train on and 31 to evaluate on give the suite an epoch with a tail."""

import numpy as np

from engine.find_tasks import OPTIONS
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
SENTENCE = "the cat sat on a mat while one red fox ran over seven lazy dogs and no other saw it go home again"


def causal_lm(folder) -> list:
    """Ragged rows of ids."""
    generator = np.random.default_rng(1)
    for split, count in (("train", 203), ("validation", 31)):
        lengths = 3 + (40 * generator.random(count) ** 2).astype(int)
        rows = [{"input_ids": generator.integers(0, 500, length).tolist()} for length in lengths]
        kit.write_jsonl(folder / f"{split}.jsonl", rows)
    return kit.flags(model_config=kit.write_yaml(folder / "model.yaml", kit.EXACT))


def text_classification(folder) -> list:
    """Sentences of random words, labeled by whether the cat is in them."""
    generator = np.random.default_rng(2)
    for split, count in (("train", 203), ("validation", 31)):
        lengths = 2 + (20 * generator.random(count) ** 2).astype(int)
        texts = [" ".join(generator.choice(SENTENCE.split(), length)) for length in lengths]
        rows = [{"text": text, "label": "cat" if "cat" in text else "none"} for text in texts]
        kit.write_jsonl(folder / f"{split}.jsonl", rows)
    return kit.flags(
        task="text_classification",
        model_config=kit.write_yaml(folder / "model.yaml", BERT),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer"),
        metrics="none",
    )


RECIPES = [recipe for recipe in (causal_lm, text_classification) if recipe.__name__ in OPTIONS]  # a fork may lack one
