"""Start and end the process group: check what accelerate made, handle every way to exit.

Tests: tests/distributed/test_launch.py.
"""

import gc
import json
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from src.config.errors import Failure, Stopped, UsageError, did_you_mean, warn
from src.config.redact import learn, learn_environment, redact, redact_all
from src.config.schema import RunConfig
from src.distributed import stop_signals, strategies, tensor_parallel
from src.runtime import console, run_status
from src.runtime.exit_hooks import run_exit_hooks

log = logging.getLogger("run")
CONNECTION = ("connection", "gloo", "nccl", "timed out", "peer", "socket")  # in what a broken collective says
_folder: list[Path] = []  # of the run, from the moment on when it is this process's to write to


def check_environment() -> None:
    """Raise UsageError when several processes were asked for and accelerate launch started one, as it sometimes does, or
    when the launcher's variables make no sense."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise UsageError(
                f"the environment variable {name} is {value!r}, where a launcher sets a whole number: unset it"
            )
    alone = os.environ.get("MASTER_ADDR") == "127.0.0.1" and "ACCELERATE_MIXED_PRECISION" in os.environ
    if alone and not {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"} & set(os.environ):
        raise UsageError(
            "several processes were asked for, but accelerate launch started one (it does so for --cpu and for "
            "distributed_type: MULTI_CPU without mpirun): use --config_file accelerate_configs/cpu_ddp.yaml, or torchrun"
        )


def init_accelerator(cfg: RunConfig):
    """Return an Accelerator whose process group is the one that was asked for; UsageError says what differs and why."""
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.utils import DDPCommunicationHookType

    stop_signals.check_launcher()
    console.reroute()
    asked = int(os.environ.get("WORLD_SIZE", 1))
    sharded = [name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"]
    accelerated = torch.accelerator.is_available()
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes") or (not accelerated and not sharded)
    # broadcast_buffers would be a collective per forward pass, and ranks may run different numbers of those.
    hook = DDPCommunicationHookType(cfg.ddp_comm_hook)
    # static_graph would be a little faster, but fails an assertion in torch when the first backward pass is one of no_sync.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True, comm_hook=hook)
    # accelerate has no field for what torch would have instead.
    warnings.filterwarnings("ignore", ".*broadcast_buffers. is deprecated", FutureWarning)
    check_trackers(cfg.report_to)
    if "FSDP" in sharded:
        strategies.check_version()
    strategies.complete_mesh(asked)
    try:
        accelerator = Accelerator(
            cpu=cpu,
            kwargs_handlers=[ddp, _group(InitProcessGroupKwargs, timedelta(seconds=cfg.ddp_timeout))],
            log_with=[name for name in cfg.report_to if name != "none"] or None,
            project_dir=cfg.output_dir,
        )
    except (ValueError, ImportError) as error:
        if dist.is_initialized():  # who ends first would be a lost connection to those that still set up theirs
            with suppress(RuntimeError):
                dist.barrier()
        raise UsageError(f"accelerate cannot start what its configuration asks for: {error}") from error
    accelerator.wait_for_everyone()  # who refuses below would end while others still connect to it
    for name in sharded:
        if accelerator.distributed_type.value != name:
            raise UsageError(
                f"{name} was asked for, but accelerate gave {accelerator.distributed_type.value}: it needs a GPU or NPU"
            )
    got = accelerator.num_processes
    if asked != got:
        raise UsageError(
            f"the launcher started {asked} processes, but accelerate made a group of {got}: each would train alone on all "
            "data and write to the same folder; set ACCELERATE_USE_CPU=true for CPU, or launch with torchrun"
        )
    if accelerator.mixed_precision not in (known := ("no", "bf16", "fp16", "fp8")):
        raise UsageError(
            f"mixed_precision is {accelerator.mixed_precision!r}: give one of {', '.join(known)} in the accelerate file"
        )
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UsageError(
            "mixed_precision is fp16, which a CPU would silently ignore: use 'no' or bf16 in the accelerate file"
        )
    if accelerator.mixed_precision != "no" and cfg.dtype == "float64":
        raise UsageError(
            f"dtype is float64, but the accelerate file asks for {accelerator.mixed_precision}: use mixed_precision: 'no'"
        )
    if accelerator.gradient_accumulation_steps != 1:
        warn(
            f"gradient accumulation of {accelerator.gradient_accumulation_steps} is set for accelerate and ignored here: it "
            "follows from global_batch_size and per_device_batch_size in the run file",
        )
        accelerator.gradient_accumulation_steps = 1  # or backward would divide the loss once more
    strategies.configure(accelerator, cfg)
    return accelerator


def _group(kind, timeout: timedelta):
    """Return accelerate's settings of the process group; after a restart with a store that forgets the attempt before.

    torchrun keeps one store over its restarts, in which ranks find the addresses of processes that are dead, and fail or
    not as the race goes (torch 2.13, pytorch#135712). Among several nodes the count of restarts is no common name for an
    attempt: there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps, in the environment of the launchers."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    settings = kind(timeout=timeout)
    if not attempt or num_nodes() > 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return settings
    host, port, world = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(f"attempt_{attempt}", dist.TCPStore(host, port, world, False, timeout))

    passed = {"timeout": timeout, "store": store, "rank": int(os.environ["RANK"]), "world_size": world}
    settings.to_kwargs = lambda: passed  # it has no field for a store, but hands on what it returns
    return settings


def check_trackers(names: list[str]) -> None:
    """Raise UsageError for a tracker that accelerate does not know, or would leave out because its package is missing."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    own = set(LOGGER_TYPE_TO_CLASS) - {str(kind) for kind in LoggerType}  # registered by a fork
    known = [*LOGGER_TYPE_TO_CLASS, "all", "none"]
    ready = [*map(str, get_available_trackers()), *own, "all", "none"]
    for name in names:
        if name not in known:
            raise UsageError(
                f"report_to: unknown tracker {name!r}{did_you_mean(name, known)}; there is {', '.join(known)}"
            )
        if name not in ready:
            raise UsageError(f"report_to: the package of {name} is not installed: install it, or leave {name} out")


class HostAllReduce:
    """Adds a small vector over all ranks, on the host: every decision that a rank could take alone goes through it.

    Over gloo even when gradients travel over NCCL, so no rank waits for its device to learn what the others say.
    """

    def __init__(self, accelerator, timeout: int):
        self.alone = accelerator.num_processes == 1
        self.copies = tensor_parallel.tp_size(accelerator)  # ranks that read the same data, and say the same of it
        own = not self.alone and dist.get_backend() != "gloo"
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if own else None

    def __call__(self, values) -> torch.Tensor:
        """Return the sum of `values` (numbers or a tensor, the same shape on every rank) in float64."""
        vector = torch.as_tensor(values, dtype=torch.float64)
        if not self.alone:
            dist.all_reduce(vector, group=self.group)
        return vector / self.copies if self.copies > 1 else vector


def record_exit_in(folder: str | Path) -> None:
    """From now on, how this process ends is noted in the run folder."""
    _folder[:] = [Path(folder)]


def num_nodes() -> int:
    return max(1, int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1) or 1))


def shutdown(accelerator) -> None:
    """End trackers and the process group; the caller holds no wrapped model any more.

    The wrapper of DDP must be gone before its group is: freed later, it waits for a thread that waits for the GIL.
    """
    accelerator.free_memory()
    gc.collect()
    run_exit_hooks()
    accelerator.trackers.clear()  # or it would close them once more
    accelerator.end_training()


def run_main(work: Callable[[list[str]], None]) -> None:
    """Run `work(argv)`; on a fault print what matters last and end this process at once, so that no other waits for it."""
    console.prepare()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that knows only ASCII gets a question mark, not a traceback
        _forgive(stream)
    learn(sys.argv[1:])
    learn_environment()
    argv, sys.argv[1:] = sys.argv[1:], redact_all(sys.argv[1:])  # trackers upload it
    if argv != sys.argv[1:]:
        warn(
            "there are credentials on the command line, which `ps` shows to all users of this machine, and which accelerate launch "
            "prints if this process fails (unless it is given --quiet): put them into the run file"
        )
    try:
        work(argv)
        if not run_exit_hooks():  # what hangs in there could hang the interpreter's own end as well
            _exit(0)
    except SystemExit as error:
        if not _folder:  # --help
            raise
        _fail(error)  # somebody's sys.exit in the middle of a run
    except UsageError as error:
        if getattr(error, "alone", False):  # met by this rank in the middle of a run
            _fail(error)
        _end(2, str(error), "error: ", error)
    except Stopped as error:
        _end(run_status.EXIT_STOPPED, str(error))
    except Failure as error:
        _end(1, f"failed: {error}", "", error)
    except KeyboardInterrupt:
        _end(130, "Stopped by Ctrl-C.")
    except Exception as error:
        _fail(error)


def _forgive(stream) -> None:
    """Redact what is printed, by libraries too. What cannot be printed is lost: a pipe without a reader, or a log on a
    full disk, is no reason to end a run."""

    def forgiving(original):
        def call(*args):
            with suppress(OSError):
                return original(*map(redact, args))
            return len(args[0]) if args else None

        return call

    stream.write, stream.flush = forgiving(stream.write), forgiving(stream.flush)


def _end(code: int, message: str, prefix: str = "", error: Exception | None = None) -> None:
    """End every rank alike, with one message: the fault, or the stop, is the same on all of them.

    What one rank alone has met (`told`: it left word of it) it says itself, and those that heard of it are silent."""
    _keep(message)
    # Of a stop only the main process knows the step; a rank of another node may end after it.
    rank = os.environ.get("RANK" if code == run_status.EXIT_STOPPED else "LOCAL_RANK", "0")
    first = getattr(error, "already_reported", rank == "0") and not getattr(error, "reported_elsewhere", False)
    if first:
        _note(code, message)
        _say(prefix + message)
    else:
        time.sleep(1)  # let rank 0 be the first to end, and the launcher quote it
    _exit(code)


def _fail(error: BaseException) -> None:
    """End this rank because of what went wrong on it; or without a word, because another one had failed before."""
    rank, text = int(os.environ.get("RANK", 0)), traceback.format_exc()
    text = str(error) if isinstance(error, UsageError) else text
    if any(sign in str(error).lower() for sign in ("out of memory", "can't allocate memory")):
        text += (
            f"\nrank {rank} ran out of memory: give a smaller --per_device_batch_size (the global batch stays, accumulation "
            "grows); the same command then goes on from the last checkpoint"
        )
    text = console.unwritten() + text
    _keep(text)
    lost = isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in CONNECTION)
    if _folder:
        until = time.monotonic() + (5 if lost else 0)  # where a rank that failed left its word, this is no news
        while not (first := run_status.failed_rank(_folder[0], rank)) and time.monotonic() < until:
            time.sleep(0.1)
        if first or not run_status.report_failure(_folder[0], rank, text):
            time.sleep(2)  # the launcher is to notice the rank that failed first, and quote it
            _exit(1)
        if lost:
            text += f"\nrank {rank} lost the connection to another rank, which ended without a word (killed?)"
    elif lost:  # before there is a folder where ranks leave their word
        time.sleep(2)
        text = f"the connection to another rank was lost before the first step; that one says why ({error})"
    _note(1, text)
    _say(f"rank {rank} failed:\n{text}")
    _exit(1)


def _exit(code: int) -> None:
    """Close the trackers and end at once: destructors of a group in which others still wait could wait themselves."""
    run_exit_hooks()
    sys.stdout.flush()
    os._exit(code)


def _note(code: int, message: str) -> None:
    """Tell the launcher, which prints it last whatever other ranks print, and whoever reads status.json."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": redact(message), "timestamp": int(time.time())}))
    if _folder:
        with suppress(OSError):
            kind = "stopped" if code == run_status.EXIT_STOPPED else "failed"
            last = message.strip().splitlines()[-1]
            run_status.write_status(_folder[0], kind, run_status.read_status(_folder[0]).get("step"), code, last)


def _keep(message: str) -> None:
    """Write to this rank's log file, if it has one by now."""
    if log.hasHandlers():
        log.error("%s", message)


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"\n{message}", file=sys.stderr, flush=True)
