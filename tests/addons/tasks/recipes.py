"""One recipe per task of addons/tasks/: rows and flags small enough for a test. A fork adds its own task here.

What a recipe does is written in tests/conformance/recipes.py; test_conformance.py runs the same checks."""

import numpy as np

from src.config.addons import addon_names
from tests.addons.tasks import images
from tests.conformance.recipes import BERT, SENTENCE, causal_lm, text_classification  # noqa: F401 (tests of add-ons)
from tests.helpers import kit

BART = {
    "model_type": "bart",
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "dropout": 0.0,
}


def preference(folder) -> list:
    """Pairs of random words; the reference is the model itself before training."""
    generator = np.random.default_rng(3)
    for split, count in (("train", 203), ("validation", 31)):
        rows = []
        for length in 2 + (20 * generator.random(count) ** 2).astype(int):
            texts = [" ".join(generator.choice(SENTENCE.split(), size)) for size in (3, length, length // 2 + 1)]
            rows.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
        kit.write_jsonl(folder / f"{split}.jsonl", rows)
    return kit.flags(
        task="preference",
        model_config=kit.write_yaml(folder / "model.yaml", kit.EXACT),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer"),
        beta=0.5,
    )


def distillation(folder) -> list:
    """The rows of causal_lm, and a larger teacher."""
    flags = causal_lm(folder)
    teacher = kit.save_model(folder / "teacher", kit.EXACT | {"n_embd": 48, "initializer_range": 0.4})
    return flags + kit.flags(task="distillation", teacher_name_or_path=teacher, distillation_alpha=0.7)


def masked_lm(folder) -> list:
    """Sentences of random words; some are longer than a row."""
    generator = np.random.default_rng(3)
    for split, count in (("train", 203), ("validation", 31)):
        lengths = 2 + (20 * generator.random(count) ** 2).astype(int)
        texts = [" ".join(generator.choice(SENTENCE.split(), length)) for length in lengths]
        kit.write_jsonl(folder / f"{split}.jsonl", [{"text": text} for text in texts])
    return kit.flags(
        task="masked_lm",
        model_config=kit.write_yaml(folder / "model.yaml", BERT),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", [SENTENCE] * 3),
        max_length=24,
    )


def token_classification(folder) -> list:
    """Sentences of random words, each tagged by its length; with all options of the cross-entropy."""
    generator = np.random.default_rng(4)
    for split, count in (("train", 203), ("validation", 31)):
        lengths = 1 + (20 * generator.random(count) ** 2).astype(int)
        rows = [generator.choice(SENTENCE.split(), length).tolist() for length in lengths]
        tags = [[{1: "O", 2: "O", 3: "B-THREE"}.get(len(word), "B-LONG") for word in row] for row in rows]
        kit.write_jsonl(
            folder / f"{split}.jsonl", [{"tokens": row, "tags": t} for row, t in zip(rows, tags, strict=True)]
        )
    return kit.flags(
        task="token_classification",
        model_config=kit.write_yaml(folder / "model.yaml", BERT),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", [SENTENCE] * 3),
        label_smoothing_factor=0.1,
        z_loss=0.01,
        focal_gamma=1.5,
        class_weights=[1, 2, 0.25],
    )


def seq2seq(folder) -> list:
    """Sentences of random words, and a short text that tells whether the cat is in them: generated and compared."""
    generator = np.random.default_rng(3)
    for split, count in (("train", 203), ("validation", 31)):
        lengths = 2 + (20 * generator.random(count) ** 2).astype(int)
        texts = [" ".join(generator.choice(SENTENCE.split(), length)) for length in lengths]
        rows = [{"source": text, "target": "a cat" if "cat" in text else "none"} for text in texts]
        kit.write_jsonl(folder / f"{split}.jsonl", rows)
    return kit.flags(
        task="seq2seq",
        model_config=kit.write_yaml(folder / "model.yaml", BART),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", [SENTENCE]),
        max_target_length=12,
        learning_rate=1e-2,
    )


def image_classification(folder) -> list:
    """Small images with crops, flips, mixup and cutmix, which the seed of a micro-batch draws."""
    return images.classification_flags(folder, mixup=0.5, cutmix=0.5, label_smoothing_factor=0.1)


def embeddings(folder) -> list:
    """Sentences of random words, some of the same words in another order, and a sentence of others."""
    generator = np.random.default_rng(3)
    for split, count in (("train", 203), ("validation", 31)):
        rows = []
        for length in 3 + (15 * generator.random(count) ** 2).astype(int):
            anchor, negative = generator.choice(SENTENCE.split(), (2, length))
            positive = generator.permutation(anchor)[: generator.integers(2, length + 1)]
            texts = {"anchor": anchor, "positive": positive, "negative": negative}
            rows.append({name: " ".join(words) for name, words in texts.items()})
        kit.write_jsonl(folder / f"{split}.jsonl", rows)
    return kit.flags(
        task="embeddings",
        model_config=kit.write_yaml(folder / "model.yaml", BERT),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer"),
        negative_column="negative",
        learn_temperature=True,
    )


def segmentation(folder) -> list:
    """Images of different sizes, without random crops and flips; cross-entropy with class weights, and Dice."""
    more = {"class_weights": [0.5, 1, 2, 1], "dice_loss": 0.5}
    return images.segmentation_flags(folder, random_crop=1, horizontal_flip=0, **more)


ALL = [
    preference,
    distillation,
    masked_lm,
    token_classification,
    image_classification,
    segmentation,
    seq2seq,
    embeddings,
]
RECIPES = [recipe for recipe in ALL if recipe.__name__ in addon_names("tasks")]  # a fork may have removed some
