"""Check of Python and its packages before anything else is imported; `python src/__init__.py` checks only the version.

Written for any Python, so that an old one reads it and prints one sentence instead of a SyntaxError.
"""

import os
import sys

OLDEST = (3, 11)
PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "yaml",
    "filelock",
    "xxhash",
)


def problem(version, packages):
    """Return why this Python cannot run the project, or None."""
    if tuple(version[:2]) < OLDEST:
        found = "%d.%d.%d at %s" % (tuple(version[:3]) + (sys.executable,))
        return (
            "Python %d.%d or newer is needed, found %s: install a newer one and name it, for example "
            "make setup PYTHON=python3.12" % (OLDEST + (found,))
        )
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        return "%s lacks %s: run make setup, then make train or .venv/bin/python train.py" % (
            sys.executable,
            ", ".join(missing),
        )
    return None


_problem = problem(sys.version_info, () if __name__ == "__main__" else PACKAGES)
if _problem:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write("error: %s\n" % _problem)
    sys.exit(2)


_words = [os.path.basename(word) for word in getattr(sys, "orig_argv", sys.argv)]


def _stop(number, _):
    """End at once, while libraries are imported or a model is evaluated: nothing can be lost."""
    training = "train.py" in _words
    if os.environ.get("RANK", "0") == "0":
        early = " before training began: there is nothing to save" if training else ""
        os.write(2, ("\nStopped by Ctrl-C%s.\n" % early).encode())
    os._exit(75 if training else 130)


if os.path.basename(sys.argv[0]) in ("train.py", "eval.py") or "src.distributed.run_launcher" in _words[1:3]:
    import signal

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a job in the background
        signal.signal(
            signal.SIGINT, _stop
        )  # until src/distributed/stop_signals.py or src/distributed/run_launcher.py takes over
