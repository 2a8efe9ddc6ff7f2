"""Models of transformers through the whole program: two steps, evaluation, save and load; or one sentence.

`make test` runs one model of each kind, `make test-cluster` the others.
"""

import json
import re
import traceback
from collections.abc import Callable

import pytest

from src.config.errors import UsageError
from tests.conformance import recipes
from tests.helpers import kit, plain_task
from tests.models import signal_task, tiny_models

LM, CLASSIFIER, IMAGE, SOUND = "causal_lm", "text_classification", "image", "sound"
STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
CONVOLUTIONS = {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}

# Task, model type, fields that the shrunk configuration needs besides.
FEW = [
    (LM, "llama", {}),
    (LM, "bloom", {}),  # ALiBi
    (LM, "gemma2", {}),  # capped logits, sliding windows
    (LM, "mixtral", {}),  # experts
    (LM, "mamba", {}),  # recurrent
    (LM, "gemma3", {}),  # its text is one part of the configuration
    (CLASSIFIER, "roberta", {"max_position_embeddings": 66}),
    (CLASSIFIER, "qwen3", {}),  # a decoder classifies
    (IMAGE, "vit", {}),
    (IMAGE, "resnet", STAGES | {"embedding_size": 8}),  # BatchNorm
    (SOUND, "wav2vec2", CONVOLUTIONS),
]
REFUSED = [  # … and what the sentence names
    (LM, "t5", {}, "t5.yaml: the model could not be built: .*AutoModelForCausalLM"),
    (LM, "gptj", {"rotary_dim": 64}, "does not run on a row of tokens"),
]
TASKS = {
    LM: "gpt2 opt mistral qwen2 qwen3_moe gemma gemma3_text phi falcon falcon_mamba olmo2 stablelm starcoder2 cohere "
    "gpt_bigcode xglm mpt gpt_oss granite bert helium lfm2 gptj codegen biogpt phi3 glm4 deepseek_v3 rwkv recurrent_gemma "
    "jamba bart gpt_neox",
    CLASSIFIER: "bert distilbert albert electra deberta-v2 mpnet modernbert xlm-roberta squeezebert convbert gpt2 llama",
    IMAGE: "beit clip data2vec-vision dinov2 siglip vit_msn ijepa cvt mobilenet_v1 mobilenet_v2 mobilevitv2 pvt_v2 "
    "swiftformer focalnet",
}
MORE = [(task, model, {}) for task, models in TASKS.items() for model in models.split()]
MORE += [(IMAGE, model, STAGES) for model in ("convnext", "convnextv2", "poolformer")]
MORE += [(SOUND, model, CONVOLUTIONS) for model in ("hubert", "wavlm", "data2vec-audio", "unispeech", "unispeech-sat")]
MORE += [
    (LM, "mamba2", {"num_heads": 8, "head_dim": 8}),
    (IMAGE, "regnet", STAGES | {"embedding_size": 8, "groups_width": 8}),
    (IMAGE, "segformer", STAGES | {"hidden_sizes": [8, 16, 32, 32], "num_attention_heads": [1, 1, 2, 2]}),
    (IMAGE, "swin", {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    (SOUND, "audio-spectrogram-transformer", {"max_length": 64, "num_mel_bins": 40}),
]
SHAPES = {IMAGE: [3, 64, 64], SOUND: [4000], "audio-spectrogram-transformer": [64, 40]}


def command(task: str, model: str, values: dict, folder) -> list[str]:
    """Return the flags of a run of two steps with a tiny model."""
    file = tiny_models.model_file(folder, model, **values)
    fields = {"max_steps": 2, "global_batch_size": 4, "per_device_batch_size": 2, "output_dir": folder / model}
    if task in (LM, CLASSIFIER):
        words = getattr(recipes, task)(folder)
        words[words.index("--model_config") + 1] = file
        fields |= {f"{split}_file": folder / f"{split}.jsonl" for split in ("train", "validation")} | {"max_length": 48}
        return words + kit.flags(**fields)
    auto_class = {IMAGE: "AutoModelForImageClassification", SOUND: "AutoModelForAudioClassification"}[task]
    fields |= {"task": signal_task.NAME, "model_config": file, "auto_class": auto_class}
    return kit.flags(**fields, **signal_task.write_data(folder), shape=SHAPES.get(model, SHAPES[task]))


def _through(task: str, model: str, values: dict, folder) -> dict:
    """Return {"trained": loss, "evaluated": loss} of one model, or {"refused" or "crashed": text}."""
    import eval as evaluation
    import train

    try:
        _fresh(train.main, command(task, model, values, folder))
        lines = [json.loads(line) for line in (folder / model / "metrics.jsonl").read_text().splitlines()]
        trained = [line["loss"] for line in lines if line["kind"] == "eval"][-1]
        _fresh(evaluation.main, ["--checkpoint", folder / model, "--output_dir", folder / "eval"])
        return {"trained": trained, "evaluated": json.loads((folder / "eval" / "eval.json").read_text())["loss"]}
    except UsageError as error:
        return {"refused": str(error)}
    except BaseException:
        return {"crashed": traceback.format_exc()}


def _fresh(main: Callable, argv: list) -> None:
    """Run a command in a process in which others have run before."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    main([str(word) for word in argv])


def _all_through(models: list[tuple], folder) -> list[dict]:
    return [_through(*model, folder) for model in models]


def run_all(models: list[tuple], folder) -> list[dict]:
    """Return the result of each model; all run in one process."""
    with plain_task.registered(signal_task, signal_task.NAME):
        return kit.spawn(1, _all_through, models, folder, out=folder / "out", timeout=600)[0]


def check(models: list[tuple], folder) -> None:
    for model, result in zip(models, run_all(models, folder), strict=True):
        assert result.keys() == {"trained", "evaluated"}, (model, result)
        assert result["trained"] == result["evaluated"], model


def test_models_of_each_kind_train_save_and_evaluate(tmp_path):
    check(FEW, tmp_path)


@pytest.mark.cluster
@pytest.mark.parametrize("first", range(0, len(MORE), 12))
def test_models_train_save_and_evaluate(tmp_path, first):
    check(MORE[first : first + 12], tmp_path)


def test_models_that_do_not_fit_are_refused(tmp_path):
    for result, (*_, message) in zip(run_all([model[:3] for model in REFUSED], tmp_path), REFUSED, strict=True):
        assert re.search(message, result.get("refused", ""), re.DOTALL), result
