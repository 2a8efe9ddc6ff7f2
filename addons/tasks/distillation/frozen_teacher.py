"""A frozen second model beside the trained one: its folder, the version of its weights, the module that holds both.

Base of the tasks distillation (a teacher), and by reference.py of preference and kto (a reference).
Tests: tests/addons/tasks/test_frozen_teacher.py and tests/addons/tasks/test_preference.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.config.errors import UsageError
from engine.config.paths import locate
from engine.config.run_config import RunConfig
from engine.models.build_model import build_model
from engine.models.compile_and_recompute import recompute_activations
from engine.models.config_and_tokenizer import (
    CONFIG_OF_ADAPTER,
    check_fit,
    load_tokenizer,
    pretrained_config,
    vocabulary_size,
)
from engine.models.model_checks import check_packing, has_plain_lm_head
from engine.models.new_tokens import new_ids, rows_missing
from engine.process import private_apis
from engine.storage import hub
from engine.storage.atomic_folder import rewrite
from engine.storage.cache_folder import cache_root, run_once
from engine.storage.verify_hashes import hash_file
from src.losses.chunked_cross_entropy import Scored, score_tokens
from src.tasks import causal_lm

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RANDOM = "(random weights of the seed)"  # instead of a folder or Hub id; no folder and no Hub id has such a name
HASH = "xxh3:"  # begins the version of a local folder: the hash of its files


class StudentAndTeacher(torch.nn.Module):
    """A trained and a frozen model in one module, so that every backend shards and places both alike.

    The teacher has no gradients, no optimizer state and no dropout, also in training mode. Where the core asks a model for
    its layers or embeddings, the student answers."""

    def __init__(self, student: torch.nn.Module, teacher: torch.nn.Module):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False).eval()
        private_apis.set_layer_class_names(self, private_apis.layer_class_names(self))

    def train(self, mode: bool = True) -> "StudentAndTeacher":
        """Set the mode of the student; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def tie_weights(self) -> None:
        """Tie the weights of both models again."""
        for model in (self.student, self.teacher):
            if hasattr(model, "tie_weights"):
                model.tie_weights()

    @property
    def config(self) -> Any:
        return self.student.config

    @property
    def base_model(self) -> Any:
        return self.student.base_model

    @property
    def supports_gradient_checkpointing(self) -> bool:
        return getattr(self.student, "supports_gradient_checkpointing", False)

    def activation_checkpointing_enable(self, arguments: dict, every_n_layers: int = 1, offload: bool = False) -> None:
        """Recompute activations of the student; the teacher keeps none."""
        is_plain = every_n_layers == 1 and not offload
        recompute_activations(self.student, is_plain or {"every_n_layers": every_n_layers, "offload": offload})

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.student.get_output_embeddings()


class TaughtTask(causal_lm.Task):
    """A language model with a frozen one beside it, which the options FROZEN_name_or_path and FROZEN_revision name."""

    frozen = "teacher"
    frozen_model: "FrozenModel | None" = None
    frozen_plain_head = False
    attributes_from_weights = (*causal_lm.Task.attributes_from_weights, "frozen_plain_head")

    def load(self) -> None:
        super().load()
        if self.has_frozen_model:
            self._load_frozen_model()

    @property
    def has_frozen_model(self) -> bool:
        """Return whether a frozen model stands beside the trained one."""
        return True

    def _load_frozen_model(self) -> None:
        names = [f"{self.frozen}_{end}" for end in ("name_or_path", "revision")]
        self.frozen_model = FrozenModel(self.cfg, self.frozen, *(getattr(self.options, name) for name in names))
        self.frozen_model.check_fit(self.config, self.vocab_size, self.tokenizer, self.max_length)
        # Now an option of the run, which resume and eval.py compare.
        setattr(self.options, names[1], self.frozen_model.version)

    def build(self, weights: str | None = None, empty: bool = False) -> torch.nn.Module:
        student = super().build(weights, empty)
        if self.frozen_model is None:
            return student
        teacher = self.frozen_model.build(empty)
        if not empty:
            self.frozen_plain_head = has_plain_lm_head(teacher, self.vocab_size)
            if self.options.packing:
                check_packing(teacher, self.vocab_size)
        return StudentAndTeacher(student, teacher)

    def saved(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.get_submodule("student") if self.frozen_model else model

    def score_both(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[Scored, Scored]:
        """Return what the trained and the frozen model compute for each token.

        The trained one first: FSDP2 gathers layers for backward in the reverse order of forward, ending with its own."""
        student = score_tokens(model.get_submodule("student"), inputs, self.plain_head)
        with torch.no_grad():
            return student, score_tokens(model.get_submodule("teacher"), inputs, self.frozen_plain_head)


class FrozenModel:
    """A frozen language model: a folder, the version of its weights, and its configuration.

    The result of training depends on its weights in every step. So their version is an option of the task: config.yaml
    records it, a resumed run with other weights is refused, and eval.py compares it. It is the commit of a Hub model
    or the hash of a local folder."""

    def __init__(self, cfg: RunConfig, role: str, name: str, version: str | None):
        """Find the model `name` for the options ROLE_name_or_path and ROLE_revision.

        Raise UsageError if it does not exist, or if a local folder does not hold the weights of `version`."""
        self.cfg, self.role, self.name, self.version = cfg, role, name, version
        self.folder: str | None = None
        if name == RANDOM:
            return
        if Path(locate(name)).is_dir() or (version or "").startswith(HASH):
            self.folder = str(self._local_folder(Path(locate(name))))
            self._check_version(_hash_of_weights(cfg, Path(self.folder)))
            return
        revision = version or (cfg.model_revision if name == cfg.model_name_or_path else "main")
        field = f"{role}_name_or_path"
        self.folder = hub.fetch_model(name, revision, field, True, cfg.trust_remote_code)
        self.version = hub.records[f"model {name}@{revision}"].get("commit") or revision

    def _local_folder(self, folder: Path) -> Path:
        """Return `folder` or its final/, the one that holds a model."""
        for candidate in (folder, folder / "final"):
            if (candidate / "config.json").exists():
                return candidate
        if any((candidate / CONFIG_OF_ADAPTER).exists() for candidate in (folder, folder / "final")):
            raise UsageError(
                f"{self.role}_name_or_path: {folder} holds an adapter without its model: start that run again with --merge true, which "
                "merges without training, and give its final/, where both are one model"
            )
        raise UsageError(
            f"{self.role}_name_or_path: {folder} holds no model, and no final/ with one: give "
            f"--{self.role}_name_or_path FOLDER, the folder of a model or of a finished run"
        )

    def _check_version(self, actual: str) -> None:
        if self.version not in (None, actual):
            raise UsageError(
                f"{self.role}_revision is {self.version}, but the weights in {self.folder} are {actual}: give "
                f"--{self.role}_name_or_path FOLDER with the weights that this run was trained with"
            )
        self.version = actual

    def check_fit(self, config: "PreTrainedConfig", vocab_size: int, tokenizer: Any, max_length: int) -> None:
        """Read its configuration. Raise UsageError if its vocabulary is not that of the trained model (`config`)."""
        self.config, self.new_ids = config, []
        if self.folder is None:
            return
        field = f"{self.role}_name_or_path"
        cfg = replace(self.cfg, tokenizer_name=None, model_name_or_path=self.folder)
        self.config = pretrained_config(cfg, self.folder, field)
        if getattr(self.config, "is_decoder", None) is False:
            self.config.is_decoder = True
        if (size := vocabulary_size(cfg, self.config)) != vocab_size:
            raise UsageError(
                f"{field}: {self.name} has a vocabulary of {size} tokens, but the trained model has {vocab_size}: "
                "give a model with the same vocabulary"
            )
        check_fit(cfg, self.config, tokenizer, max_length)
        other = load_tokenizer(cfg) if tokenizer is not None else None
        if cfg.add_tokens and other is None:  # under eval.py the tokenizer of the run has them all
            raise UsageError(
                f"{field}: {self.name} has no tokenizer that tells which tokens of add_tokens it has: save it beside the weights"
            )
        self.new_ids = new_ids(other)
        if other is not None and other.get_vocab() != tokenizer.get_vocab():
            raise UsageError(
                f"{field}: the tokenizer of {self.name} gives other ids than that of the trained model: give a model "
                "with the same tokenizer"
            )

    def build(self, empty: bool) -> torch.nn.Module:
        """Return the model with its own weights, or those that the seed gives, on the CPU in `cfg.dtype`."""
        from transformers import AutoModelForCausalLM

        # Without model_name_or_path: under eval.py it is the trained checkpoint. Without the adapter of the trained model.
        cfg = replace(self.cfg, model_name_or_path=None, addons=())
        with rows_missing(self.new_ids):
            return build_model(cfg, self.config, AutoModelForCausalLM, self.folder, empty=empty)


def _hash_of_weights(cfg: RunConfig, folder: Path) -> str:
    """Return a hash of the configuration and weights in `folder`; one process reads them, until a file changes."""
    import xxhash

    names = ("config.json", "model*.safetensors", "pytorch_model*.bin")
    files = sorted({path for name in names for path in folder.glob(name)})

    def compute() -> None:
        hashes = json.dumps({path.name: hash_file(path)["xxh3_128"] for path in files}, sort_keys=True)
        rewrite(target, HASH + xxhash.xxh3_128_hexdigest(hashes.encode()))

    stats = [(str(path.resolve()), path.stat()) for path in files]
    key = repr([(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in stats])
    target = cache_root(cfg) / "teachers" / xxhash.xxh3_128_hexdigest(key.encode())
    run_once(target, compute, f"reading the weights in {folder}")
    return target.read_text()
