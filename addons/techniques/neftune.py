"""NEFTune: uniform noise on the input embeddings in training (Jain et al. 2023, arXiv 2310.05914)."""

from dataclasses import dataclass

import torch

from addons.techniques import Compute, Technique
from engine.config.errors import UsageError
from engine.config.option import option
from engine.config.run_config import RunConfig
from engine.run.totals_and_votes import StepBatch, StepLosses, StepTotals


@dataclass(eq=False)
class NEFTune(Technique):
    """Add noise from ±alpha / √(tokens of the row × features) to each embedding; padding does not count as tokens.

    The noise is drawn in the forward pass, which the micro-batch seeds, as dropout is: passes that repeat a micro-batch
    repeat its noise. transformers and TRL count the padded width, so their noise depends on the longest row beside
    it."""

    order = 42
    deepspeed = True  # it only changes the forward pass

    alpha: float = option("size of the noise (neftune_noise_alpha of transformers); 5 to 15 in the paper", 5.0, above=0)

    def change_model(self, model: torch.nn.Module, cfg: RunConfig) -> None:
        self.lengths, self.used = None, False
        trained = model.task.saved(model.model)  # without a frozen teacher
        is_pair = getattr(getattr(trained, "config", None), "is_encoder_decoder", False)
        try:
            embeddings = (trained.get_encoder() if is_pair else trained).get_input_embeddings()
        except (AttributeError, NotImplementedError):
            embeddings = None
        if embeddings is None:
            raise UsageError(
                f"techniques: neftune: {type(trained).__name__} has no get_input_embeddings() that returns a module: remove "
                "neftune, or define that method"
            )
        model.register_forward_pre_hook(self._note_lengths)
        embeddings.register_forward_hook(self._add_noise)

    def around_gradient(self, compute: Compute, batch: StepBatch, totals: StepTotals) -> StepLosses:
        losses = compute(batch, totals)
        if batch and not self.used:
            raise UsageError("techniques: neftune: the model does not use its get_input_embeddings(): remove neftune")
        return losses

    def _note_lengths(self, model: torch.nn.Module, arguments: tuple) -> None:
        inputs, self.lengths = arguments[0], None
        if "attention_mask" in inputs:
            self.lengths = inputs["attention_mask"].sum(-1).flatten()
        elif "lengths" in inputs:
            self.lengths = inputs["lengths"]

    def _add_noise(self, embeddings: torch.nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor | None:
        if not embeddings.training:
            return None
        rows, width, features = output.shape
        self.used = True
        lengths = torch.full((rows,), width, device=output.device) if self.lengths is None else self.lengths
        scale = self.alpha / (lengths.repeat(rows // len(lengths)).clamp(min=1) * features).to(output.dtype).sqrt()
        return output + torch.empty_like(output).uniform_(-1, 1) * scale[:, None, None]
