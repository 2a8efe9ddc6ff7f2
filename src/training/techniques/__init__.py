"""Registry of techniques: add yours as a file in this folder and a line of TECHNIQUES. base.py defines the
interface.
"""

from importlib import import_module

from src.training.techniques.base import Technique

__all__ = ["TECHNIQUES", "Technique"]


def _technique(name: str, file: str | None = None):
    """Return a function that imports the class `name` of a file of this folder, only when it is used."""
    file = file or name.lower()
    return lambda: getattr(import_module(f"src.training.techniques.{file}"), name)


# Name in the run file -> function that returns its class. The first is the outermost: it decides how often those below
# it compute a gradient. This order holds for any order in the run file.
TECHNIQUES = {
    # sees the update of the optimizer before others change the weights
    "gradient_statistics": _technique("GradientStatistics", "gradient_statistics"),
    # weights at which all below computes gradients
    "schedule_free": _technique("ScheduleFree", "schedule_free"),
    # two passes over a window: weights, then rows
    "sam": _technique("SAM", "sam"),
    "asam": _technique("ASAM", "sam"),
    "gradient_norm_penalty": _technique("GradientNormPenalty", "sam"),
    "hard_examples": _technique("HardExamples", "hard_examples"),
    # inputs and model
    "channels_last": _technique("ChannelsLast", "channels_last"),
    "progressive_resizing": _technique("ProgressiveResizing", "progressive_resizing"),
    "neftune": _technique("NEFTune"),
    # the gradient of the global batch
    "unfreeze": _technique("Unfreeze"),
    "gradient_noise": _technique("GradientNoise", "gradient_noise"),
    "adaptive_clipping": _technique("AdaptiveClipping", "adaptive_clipping"),
    "clip_by_value": _technique("ClipByValue", "clip_by_value"),
    "cycle_momentum": _technique("CycleMomentum", "cycle_momentum"),
    # updates: skip
    "spike_watch": _technique("SpikeWatch", "spike_watch"),
    # weights after an update, and their averages
    "lookahead": _technique("Lookahead"),
    "ema": _technique("EMA"),
    "swa": _technique("SWA"),
    "lawa": _technique("LAWA"),
}
