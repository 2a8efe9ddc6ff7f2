"""Models of transformers through the whole program: dry run, two steps, evaluation, save and load; or one sentence.

`make test` runs one model of each kind, `make test-cluster` the others.
"""

import contextlib
import io
import json
import re
import traceback
from collections.abc import Callable

import pytest

from src.config.errors import UsageError
from tests.conformance import recipes
from tests.helpers import kit, plain_task
from tests.models import signal_task, tiny_models

PER_PROCESS = 12
LM, CLASSIFIER, IMAGE, SOUND = "causal_lm", "text_classification", "image", "sound"
STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
CONVOLUTIONS = {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
STATE_SPACE = {"num_heads": 8, "head_dim": 8}

# Task, model type, fields that the shrunk configuration needs besides. The first ones of each task run in `make test`.
FEW = [
    (LM, "llama", {}),
    (LM, "gpt_neox", {}),
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
TASKS = {
    LM: "gpt2 opt mistral qwen2 qwen3_moe gemma gemma3_text phi falcon falcon_mamba olmo2 stablelm starcoder2 cohere "
    "gpt_bigcode xglm mpt gpt_oss granite bert helium lfm2 gptj codegen biogpt phi3 glm4 deepseek_v3 rwkv recurrent_gemma "
    "jamba bart",
    CLASSIFIER: "bert distilbert albert electra deberta-v2 mpnet modernbert xlm-roberta squeezebert convbert gpt2 llama",
    IMAGE: "beit clip data2vec-vision dinov2 siglip vit_msn ijepa cvt mobilenet_v1 mobilenet_v2 mobilevitv2 pvt_v2 "
    "swiftformer focalnet",
}
MORE = [(task, kind, {}) for task, kinds in TASKS.items() for kind in kinds.split()]
MORE += [(IMAGE, kind, STAGES) for kind in ("convnext", "convnextv2", "poolformer")]
MORE += [(SOUND, kind, CONVOLUTIONS) for kind in ("hubert", "wavlm", "data2vec-audio", "unispeech", "unispeech-sat")]
MORE += [
    (LM, "mamba2", STATE_SPACE),
    (IMAGE, "regnet", STAGES | {"embedding_size": 8, "groups_width": 8}),
    (IMAGE, "segformer", STAGES | {"hidden_sizes": [8, 16, 32, 32], "num_attention_heads": [1, 1, 2, 2]}),
    (IMAGE, "swin", {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    (SOUND, "audio-spectrogram-transformer", {"max_length": 64, "num_mel_bins": 40}),
]
SHAPES = {IMAGE: [3, 64, 64], SOUND: [4000], "audio-spectrogram-transformer": [64, 40]}
REFUSED = [  # … and what the sentence names
    (LM, "t5", {}, "t5.yaml: the model could not be built: .*AutoModelForCausalLM"),
    (LM, "gptj", {"rotary_dim": 64}, "does not run on token ids alone"),
]


def command(task: str, kind: str, values: dict, folder) -> list[str]:
    """Return the flags of a run of two steps with a tiny model."""
    file = tiny_models.model_file(folder, kind, **values)
    if task in (LM, CLASSIFIER):
        words = getattr(recipes, task)(folder)
        words[words.index("--model_config") + 1] = file
        words += kit.flags(**{f"{split}_file": folder / f"{split}.jsonl" for split in ("train", "validation")})
        words += kit.flags(max_length=48)
    else:
        auto_class = {IMAGE: "AutoModelForImageClassification", SOUND: "AutoModelForAudioClassification"}[task]
        words = kit.flags(
            task=signal_task.NAME, model_config=file, auto_class=auto_class, **signal_task.write_data(folder)
        )
        words += kit.flags(shape=SHAPES.get(kind, SHAPES[task]))
    return words + kit.flags(max_steps=2, global_batch_size=4, per_device_batch_size=2, output_dir=folder / kind)


def _through(task: str, kind: str, values: dict, folder) -> dict:
    """Return {"plan": text, "trained": loss, "evaluated": loss} of one model, or {"refused" or "crashed": text}."""
    import eval as evaluation
    import train

    argv, plan = command(task, kind, values, folder), io.StringIO()
    try:
        with contextlib.redirect_stdout(plan):
            _fresh(train.main, [*argv, "--dry_run", "true"])
        _fresh(train.main, argv)
        lines = [json.loads(line) for line in (folder / kind / "metrics.jsonl").read_text().splitlines()]
        trained = [line["loss"] for line in lines if line["kind"] == "eval"][-1]
        _fresh(evaluation.main, ["--checkpoint", folder / kind, "--output_dir", folder / "eval"])
        evaluated = json.loads((folder / "eval" / "eval.json").read_text())["loss"]
        return {"plan": plan.getvalue(), "trained": trained, "evaluated": evaluated}
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


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return a function from (models, one of them) to its result; PER_PROCESS of them share a process."""
    found = {}

    def get(models: list[tuple], model: tuple) -> dict:
        part, place = divmod(models.index(model), PER_PROCESS)
        if (id(models), part) not in found:
            folder = tmp_path_factory.mktemp("models")
            chosen = models[part * PER_PROCESS :][:PER_PROCESS]
            with plain_task.registered(signal_task, signal_task.NAME):
                one_rank = kit.spawn(1, _all_through, chosen, folder, out=folder / "out", timeout=600)
            found[id(models), part] = one_rank[0]
        return found[id(models), part][place]

    return get


def name(model: tuple) -> str:
    return "-".join(model[:2])


def check(result: dict) -> None:
    assert result.keys() == {"plan", "trained", "evaluated"}, result.get("crashed") or result.get("refused")
    assert result["trained"] == result["evaluated"]
    assert "for weights, gradients and optimizer" in result["plan"]


@pytest.mark.parametrize("model", FEW, ids=name)
def test_model_of_each_kind_trains_saves_and_evaluates(outcome, model):
    check(outcome(FEW, model))


@pytest.mark.cluster
@pytest.mark.parametrize("model", MORE, ids=name)
def test_model_trains_saves_and_evaluates(outcome, model):
    check(outcome(MORE, model))


IMPOSSIBLE = [model[:3] for model in REFUSED]


@pytest.mark.parametrize(
    "model, message", [(model[:3], model[3]) for model in REFUSED], ids=lambda m: m[1] if isinstance(m, tuple) else ""
)
def test_model_that_does_not_fit_is_refused(outcome, model, message):
    result = outcome(IMPOSSIBLE, model)
    assert "crashed" not in result, result
    assert re.search(message, result["refused"], re.DOTALL), result
