"""One recipe per task of addons/tasks/: rows and flags small enough for a test. A fork adds its own task here.

What a recipe does is written in tests/conformance/recipes.py; test_conformance.py runs the same checks."""

import numpy as np

from engine.config.find_addons import addon_names
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


def write_rows(folder, make_row) -> None:
    """Write 203 and 31 rows `make_row(words)` of random words; most are short."""
    generator = np.random.default_rng(3)
    for split, count in (("train", 203), ("validation", 31)):
        lengths = 2 + (20 * generator.random(count) ** 2).astype(int)
        rows = [make_row(generator.choice(SENTENCE.split(), length).tolist()) for length in lengths]
        kit.write_jsonl(folder / f"{split}.jsonl", rows)


def bert(folder, **fields) -> list:
    """Return flags of a tiny BERT and a tokenizer of whole words."""
    model = kit.write_yaml(folder / "model.yaml", BERT)
    return kit.flags(
        model_config=model, tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", [SENTENCE] * 3), **fields
    )


def pair(words) -> dict:
    """Return a pair of completions of random words; of a few words they may be equal."""
    parts = (words[:3], words, words[len(words) // 2 :][::-1])
    return dict(zip(("prompt", "chosen", "rejected"), map(" ".join, parts), strict=True))


def preference(folder) -> list:
    """Pairs of random words; the reference is the model itself before training."""
    write_rows(folder, pair)
    return kit.flags(
        task="preference",
        model_config=kit.write_yaml(folder / "model.yaml", kit.EXACT),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", [SENTENCE] * 3),
        beta=0.5,
    )


def reward(folder) -> list:
    """Pairs of random words, and a head that is random."""
    write_rows(folder, pair)
    return kit.flags(
        task="reward",
        model_config=kit.write_yaml(folder / "model.yaml", kit.EXACT),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", [SENTENCE] * 3),
        center_rewards_coefficient=0.1,
    )


def kto(folder) -> list:
    """Random words after their beginning, good if there are many of them; the reference is the model before training."""

    def row(words):
        return {"prompt": " ".join(words[:3]), "completion": " " + " ".join(words), "label": len(words) > 6}

    write_rows(folder, row)
    return kit.flags(
        task="kto",
        model_config=kit.write_yaml(folder / "model.yaml", kit.EXACT),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", [SENTENCE] * 3),
        beta=0.5,
        desirable_weight=2.0,
        undesirable_weight=0.5,
        learning_rate=1e-2,
    )


def distillation(folder) -> list:
    """The rows of causal_lm, and a larger teacher."""
    flags = causal_lm(folder)
    teacher = kit.save_model(folder / "teacher", kit.EXACT | {"n_embd": 48, "initializer_range": 0.4})
    return flags + kit.flags(task="distillation", teacher_name_or_path=teacher, distillation_alpha=0.7)


def masked_lm(folder) -> list:
    """Sentences of random words; some are longer than a row."""
    write_rows(folder, lambda words: {"text": " ".join(words)})
    return bert(folder, task="masked_lm", max_length=24)


def token_classification(folder) -> list:
    """Sentences of random words, each tagged by its length; with all options of the cross-entropy."""
    tags = {1: "O", 2: "O", 3: "B-THREE"}
    write_rows(folder, lambda words: {"tokens": words, "tags": [tags.get(len(word), "B-LONG") for word in words]})
    losses = {"label_smoothing_factor": 0.1, "z_loss": 0.01, "focal_gamma": 1.5, "class_weights": [1, 2, 0.25]}
    return bert(folder, task="token_classification", **losses)


def seq2seq(folder) -> list:
    """Sentences of random words, and a short text that tells whether the cat is in them: generated and compared."""
    write_rows(folder, lambda words: {"source": " ".join(words), "target": "a cat" if "cat" in words else "none"})
    return kit.flags(
        task="seq2seq",
        model_config=kit.write_yaml(folder / "model.yaml", BART),
        tokenizer_name=kit.tiny_tokenizer(folder / "tokenizer", [SENTENCE]),
        max_target_length=12,
        learning_rate=1e-2,
    )


def image_classification(folder) -> list:
    """Small images with crops, flips, mixup and cutmix, which the seed of a micro-batch draws."""
    mixed = {"mixup": 0.5, "cutmix": 0.5, "label_smoothing_factor": 0.1}
    return kit.flags(**images.classification_fields(images.write_classification(folder), **mixed))


def embeddings(folder) -> list:
    """Sentences of random words, some of the same words in another order, and a sentence of others."""

    def row(words):
        third = 1 + len(words) // 3
        texts = {"anchor": words[third:] or words, "positive": words[: -third - 1 : -1], "negative": words[:third]}
        return {name: " ".join(text) for name, text in texts.items()}

    write_rows(folder, row)
    return bert(folder, task="embeddings", columns={"negative": "negative"}, learn_temperature=True)


def segmentation(folder) -> list:
    """Images of different sizes, without random crops and flips; cross-entropy with class weights, and Dice."""
    more = {"class_weights": [0.5, 1, 2, 1], "dice_loss": 0.5}
    return kit.flags(**images.segmentation_fields(folder, random_crop=1, horizontal_flip=0, **more))


ALL = [
    preference,
    reward,
    kto,
    distillation,
    masked_lm,
    token_classification,
    image_classification,
    segmentation,
    seq2seq,
    embeddings,
]
RECIPES = [recipe for recipe in ALL if recipe.__name__ in addon_names("tasks")]  # a fork may have removed some
