"""What a program does before slow imports: check Python and its packages, show --help or --schema. Importing this does none of it.

`python engine/startup.py` checks the version only.

Written for any Python, so that an old one prints one sentence instead of a SyntaxError.
"""

import os
import sys
import time

STARTED = time.monotonic()  # of this process
OLDEST_PYTHON = (3, 11)
PACKAGES = ["torch", "accelerate", "transformers", "datasets", "tokenizers", "safetensors"]
PACKAGES += ["yaml", "pydantic", "filelock", "xxhash"]


def _find_launcher():
    """Return the id of the parent process if it is a launcher, a Python program that set these variables; else 0.

    They may also be exported, or left from another launch: then the parent is a shell, which may end before the run."""
    if not {"TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_USE_FULLGRAPH"} & set(os.environ):
        return 0
    parent = os.getppid()
    try:
        program = os.path.basename(os.readlink("/proc/%d/exe" % parent))
    except OSError:  # not Linux
        return parent
    return parent if program.startswith("python") else 0


LAUNCHER_PID = _find_launcher()  # now: the launcher may end during the imports


def find_problem(version):
    """Return why this Python cannot run the project, or None."""
    if tuple(version[:2]) < OLDEST_PYTHON:
        return (
            "Python %d.%d or newer is needed, found %d.%d.%d at %s: install a newer one and name it, for example "
            "make setup PYTHON=python3.12" % (OLDEST_PYTHON + tuple(version[:3]) + (sys.executable,))
        )
    from importlib.util import find_spec

    if __name__ != "__main__" and any(find_spec(name) is None for name in PACKAGES):
        return "%s lacks a package of requirements.txt: run make setup, then source .venv/bin/activate" % sys.executable
    return None


# Rows of many lengths leave gaps in the memory of a GPU, which expandable segments fill. Pinned host memory, which saves
# copy to, is allocated by several threads, so that kernels do not wait for it. torch reads this when it is imported.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    _settings = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    os.environ.setdefault("PYTORCH_ALLOC_CONF", _settings)


def begin(is_training=False, has_help=True):
    """Begin a program: exit if the installation cannot run it, end at Ctrl-C, show --help or --schema. Call it first."""
    _check_installation()
    sys.excepthook = _end  # until run_main: imports of libraries read the environment, too
    import signal

    def stop(number, frame):
        """End at once: there is nothing to save."""
        if os.environ.get("RANK", "0") == "0":
            detail = " before training began: there is nothing to save" if is_training else ""
            os.write(2, ("\nStopped by Ctrl-C%s.\n" % detail).encode())
        os._exit(75 if is_training else 130)

    # In train.py until engine/distributed/stop_signals.py takes over.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in a background job
        signal.signal(signal.SIGINT, stop)
    if has_help and {"-h", "--help", "--help=all"} & set(sys.argv):
        from engine.config.show_help import show_help

        show_help(sys.argv)
    if has_help and "--schema" in sys.argv:
        from engine.config.show_help import show_schema
        from engine.find_tasks import OPTIONS

        show_schema(OPTIONS)
    if has_help and os.environ.get("RANK", "0") == "0":
        from contextlib import suppress

        with suppress(OSError):  # a full disk of the output does not end a run
            os.write(1, b"Importing torch, transformers and datasets: some seconds\n")


def _end(kind, error, trace):
    """End as run_main does."""
    from engine.process.exit_codes import end_process

    end_process(error)


def _check_installation():
    problem = find_problem(sys.version_info)
    if problem:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write("error: %s\n" % problem)
        sys.exit(2)


if __name__ == "__main__":
    _check_installation()
