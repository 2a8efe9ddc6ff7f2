"""Image classification: data of every form, labels, the same images in training and evaluation, and transformers."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification

from engine.config.errors import UsageError
from tests.addons.tasks import images
from tests.addons.tasks.images import classification_fields as fields
from tests.helpers import kit

STEPS = {"max_steps": 8, "global_batch_size": 24, "learning_rate": 2e-3, "dtype": "float64", "save_steps": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return images.write_classification(tmp_path_factory.mktemp("pictures"))


def rows(split):
    return split.rows(np.arange(len(split)))


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_prepared_rows_are_the_files_without_a_copy(folder):
    task, splits = kit.open_data(**fields(folder))
    raw = datasets.Dataset.from_parquet(str(folder / "train.parquet")).cast_column(
        "image", datasets.Image(decode=False)
    )
    for row, before in zip(rows(splits["train"]), raw, strict=True):
        assert row["image"].tobytes() == before["image"]["bytes"]
        assert not row["image"].flags.owndata
        assert row["label"] == before["label"]
    assert task.labels == images.CLASSES


def test_folder_of_images_gives_the_same_batches(folder, tmp_path):
    for split in ("train", "validation"):
        raw = datasets.Dataset.from_parquet(str(folder / f"{split}.parquet"))
        for i, row in enumerate(raw):
            target = tmp_path / "pictures" / split / images.CLASSES[row["label"]]
            target.mkdir(parents=True, exist_ok=True)
            row["image"].save(target / f"{i:03}.png")
    named = fields(folder, train_file=None, validation_file=None, dataset_name=tmp_path / "pictures")
    task, splits = kit.open_data(**named)
    assert task.labels == sorted(images.CLASSES)  # datasets sorts the names of the folders
    assert len(splits["validation"]) == 31
    _, first = kit.open_data(**fields(folder))
    known = {row["image"].tobytes() for row in rows(first["train"])}
    assert {row["image"].tobytes() for row in rows(splits["train"])} == known

    broken = tmp_path / "pictures" / "train" / "rows" / "broken.png"
    broken.write_bytes(b"\x89PNG nothing")
    with pytest.raises(UsageError, match=rf"row \d+: train data: {broken}: the image cannot be read"):
        kit.open_data(**named)


def test_classes_of_a_mixture_are_those_of_its_first_source(folder, tmp_path):
    generator = np.random.default_rng(0)
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog", "bird"]))
    pictures = {"image": [images.picture(generator, 0)] * 3, "label": [0, 1, 2]}
    datasets.Dataset.from_dict(pictures, features).to_parquet(tmp_path / "animals.parquet")
    files = {"plain": folder / "train.parquet", "animals": tmp_path / "animals.parquet"}
    mixture = {name: {"train_file": str(file)} for name, file in files.items()}
    for _ in range(2):  # also if the first source is prepared already
        with pytest.raises(UsageError, match="the label 'cat' is none of the 3 known labels"):
            kit.open_data(**fields(folder, train_file=None, mixture=mixture, cache_dir=tmp_path))


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_only_training_augments(folder):
    task, splits = kit.open_data(**fields(folder, mixup=0.3))
    chosen = rows(splits["train"])[:6]
    np.random.seed(0)
    one, other = (task.collate(chosen, False).inputs["pixels"] for _ in range(2))
    assert torch.equal(one, other)
    assert one.shape == (6, 3, 16, 16)
    assert one.dtype == torch.uint8
    changed = task.collate(chosen, True).inputs["pixels"]
    assert not any(torch.equal(a, b) for a, b in zip(one, changed, strict=True))
    options = {"random_crop": 1, "horizontal_flip": 0}
    task, _ = kit.open_data(**fields(folder, **options))
    assert torch.equal(task.collate(chosen, True).inputs["pixels"], one)


def test_soft_targets_equal_those_of_torch(folder):
    """The loss of mixed and smoothed labels is the cross-entropy with class probabilities."""
    task, splits = kit.open_data(**fields(folder, mixup=0.5, cutmix=0.5, label_smoothing_factor=0.2, dtype="float64"))
    np.random.seed(0)
    inputs = task.collate(rows(splits["train"])[:8], True).inputs
    model = task.build().train()
    shares = inputs["shares"][:, None].double()
    one_hot = torch.nn.functional.one_hot
    soft = shares * one_hot(inputs["labels"], 3) + (1 - shares) * one_hot(inputs["other_labels"], 3)
    soft = 0.8 * soft + 0.2 / 3
    pixels = (inputs["pixels"].double() / 255 - 0.5) / 0.5
    expected = torch.nn.functional.cross_entropy(model(pixel_values=pixels).logits, soft, reduction="sum")
    assert task.loss(model, inputs)["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert 0 < shares.min() < shares.max() <= 1


def test_top5_for_ten_classes(tmp_path):
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=[str(i) for i in range(10)]))
    made = {"image": [Image.new("L", (16, 16), 25 * i) for i in range(10)], "label": list(range(10))}
    datasets.Dataset.from_dict(made, features).to_parquet(tmp_path / "train.parquet")
    model = kit.write_yaml(tmp_path / "model.yaml", images.VIT)
    file = tmp_path / "train.parquet"
    task, splits = kit.open_data(**fields(tmp_path, model_config=model, validation_file=file))
    model, batch = task.build().eval(), task.collate(rows(splits["validation"]), False)
    with torch.no_grad():
        sums = task.loss(model, batch.inputs)
        logits = model(pixel_values=(batch.inputs["pixels"] / 255 - 0.5) / 0.5).logits
    ranks = (logits > logits.gather(1, batch.inputs["labels"][:, None])).sum(1)
    found = task.metrics({name: value.item() for name, value in sums.items() if not value.dim()}, 10)
    assert found == {"accuracy": (ranks < 1).sum() / 10, "top5_accuracy": (ranks < 5).sum() / 10}


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    flags = kit.flags(**fields(folder, random_crop=1, horizontal_flip=0), **STEPS)
    return kit.run_training(1, tmp_path_factory.mktemp("trained") / "run", *flags)


def test_final_works_in_a_pipeline(folder, trained):
    from transformers import pipeline

    model, info = AutoModelForImageClassification.from_pretrained(trained.folder / "final", output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.id2label == dict(enumerate(images.CLASSES))
    task, splits = kit.open_data(**fields(folder, model_config=None, model_name_or_path=trained.folder / "final"))
    assert task.labels == images.CLASSES
    inputs = task.collate(rows(splits["validation"])[:5], False).inputs
    with torch.no_grad():
        expected = task.loss(task.build().eval(), inputs)["prediction"]
    raw = datasets.Dataset.from_parquet(str(folder / "validation.parquet"))["image"][:5]
    found = pipeline("image-classification", model=str(trained.folder / "final"))(list(raw))
    assert [one[0]["label"] for one in found] == [images.CLASSES[i] for i in expected]


def test_other_classes_than_the_model_give_a_new_head(folder, trained, tmp_path):
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    made = {"image": [Image.new("RGB", (16, 16))] * 4, "label": [0, 1, 0, 1]}
    datasets.Dataset.from_dict(made, features).to_parquet(tmp_path / "cats.parquet")
    given = fields(folder, model_config=None, model_name_or_path=trained.folder / "final")
    task, _ = kit.open_data(
        **given | {"train_file": tmp_path / "cats.parquet", "validation_file": tmp_path / "cats.parquet"}
    )
    assert task.build().config.id2label == {0: "cat", 1: "dog"}
    with pytest.raises(UsageError, match=r"'cat' is none of the 3 known labels"):  # evaluation keeps the classes
        kit.open_data(**given | {"validation_file": tmp_path / "cats.parquet"})
