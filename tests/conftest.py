"""Settings of the whole suite: one thread per process, caches of its own, no network, small shared data, `--fast`."""

import os
import signal
import tempfile

# Before torch and the Hugging Face libraries are imported. Forked children inherit all of it.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # forked ranks would wait for worker processes that the suite began
    "TOKENIZERS_PARALLELISM": "false",
    "LANGUAGE": "en",  # of make and git
    "HF_HOME": tempfile.mkdtemp(prefix="tests-hf-"),
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_DEBUG_MODE": "1",  # collectives with different shapes raise instead of returning rubbish
}
for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "MASTER_ADDR", "WORLD_SIZE"):
    os.environ.pop(name, None)
for name in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS"):  # of `make test`: tests run make, too
    os.environ.pop(name, None)
for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"):  # of a git hook: tests commit elsewhere
    os.environ.pop(name, None)
# DeepSpeed compiles its communication here, for all workers of this run, and does not meet the lock of an earlier one.
EXTENSIONS = None if "TORCH_EXTENSIONS_DIR" in os.environ else tempfile.mkdtemp(prefix="tests-extensions-")
if EXTENSIONS:
    os.environ["TORCH_EXTENSIONS_DIR"] = EXTENSIONS

# `nohup make test` ignores SIGHUP, `make test &` in a script SIGINT and SIGQUIT, and children would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import re
import shutil
import subprocess
from contextlib import suppress

import numpy as np
import psutil
import pytest

from engine.config.errors import said
from engine.distributed import stop_signals
from tests.helpers import backend_runs, kit, plain_task

# The tests of tests/conformance that --fast runs, though they start processes: the basics of the promise.
BASICS = (
    "test_task.py",
    "test_weights_and_losses_do_not_depend_on_the_split[2-4-",
    "test_mutant_mean_of_means_is_caught",
)


def pytest_addoption(parser):
    parser.addoption(
        "--fast", action="store_true", help="skip tests that start processes, except the conformance basics"
    )


def pytest_configure(config):
    """With --fast, skip a test as soon as it, or one of its fixtures, starts a process."""
    if not config.getoption("--fast"):
        return

    def skip_outside_conformance(start):
        def call(*args, **kwargs):
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            if test and "tests/conformance" not in test:
                pytest.skip("starts processes")
            return start(*args, **kwargs)

        return call

    os.fork, os.forkpty = skip_outside_conformance(os.fork), skip_outside_conformance(os.forkpty)
    subprocess.Popen.__init__ = skip_outside_conformance(subprocess.Popen.__init__)


def pytest_collection_modifyitems(config, items):
    if config.getoption("--fast"):
        basic = [any(name in item.nodeid for name in BASICS) for item in items]
        items[:] = [i for i, keep in zip(items, basic, strict=True) if keep or "tests/conformance" not in i.nodeid]


def pytest_runtest_teardown(item):
    kit.kill_all()
    # Forked ranks would inherit it, and with it its socket: their signals would stop a run in the process of the tests.
    assert stop_signals._training is None, "train a run by kit.run_command"


def pytest_sessionfinish(session, exitstatus):
    for folder in filter(None, (os.environ["HF_HOME"], EXTENSIONS)):
        shutil.rmtree(folder, ignore_errors=True)


def _processes_of_tests() -> list[str]:
    """Return the command lines of processes that tests have started, also of those whose parents have ended."""
    processes = []
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.pid in children or process.environ().get("HF_HOME") == os.environ["HF_HOME"]
            if is_ours and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                processes.append(" ".join(process.cmdline()))
    return [words for words in processes if not re.search("resource_tracker|forkserver", words)]


@pytest.fixture(autouse=True)
def no_warning_is_said():
    """A warning that comes once in a process comes in each test."""
    said.clear()


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left():
    """Fail if processes of the tests are still alive a minute after the last one."""
    yield
    kit.kill_all()
    with suppress(AssertionError):
        kit.until(lambda: not _processes_of_tests(), 60)
    assert _processes_of_tests() == []


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with ragged rows of ids (1003 to train on, 103 to evaluate on) and tiny model configurations."""
    folder = tmp_path_factory.mktemp("files")
    generator = np.random.default_rng(0)
    for name, count in (("train", 1003), ("validation", 103)):
        lengths = 3 + (94 * generator.random(count) ** 2.5).astype(int)
        kit.write_jsonl(
            folder / f"{name}.jsonl", [{"input_ids": generator.integers(0, 500, n).tolist()} for n in lengths]
        )
    kit.write_yaml(folder / "llama.yaml", kit.LLAMA)
    kit.write_yaml(folder / "dropout.yaml", kit.LLAMA | {"attention_dropout": 0.2})
    kit.write_yaml(folder / "gpt2.yaml", kit.GPT2)
    kit.write_yaml(folder / "exact.yaml", kit.EXACT)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> dict:
    """The fields of kit.tiny_files: a model with dropout and steps of ten milliseconds, and its data."""
    return kit.tiny_files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The data fields of tests/helpers/plain_task.py; its task is registered while a module's tests run."""
    with plain_task.registered():
        yield plain_task.write_data(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A local hub that also serves the files of its folder `files`, beside a tiny model configuration."""
    from tests.helpers.fake_hub import Hub

    folder = tmp_path_factory.mktemp("served")
    (folder / "files").mkdir()
    kit.write_yaml(folder / "gpt2.yaml", kit.TINY)
    with Hub(folder) as hub:
        yield hub


@pytest.fixture
def hub(served):
    yield served
    served.faults.clear()


@pytest.fixture(scope="session")
def fsdp2_alone(files, tmp_path_factory) -> kit.Run:
    """The run of the FSDP2 tests on one process."""
    return kit.run_training(1, tmp_path_factory.mktemp("alone") / "run", *backend_runs.fsdp2_recipe(files))


@pytest.fixture(scope="session")
def fsdp2_two(files, tmp_path_factory) -> kit.Run:
    """The run of the FSDP2 tests on two ranks."""
    folder, env = tmp_path_factory.mktemp("two") / "run", backend_runs.where("fsdp2", 2)
    return kit.run_training(2, folder, *backend_runs.fsdp2_recipe(files), env=env)
