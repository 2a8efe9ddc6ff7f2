"""Shared test tools: ranks over gloo, tiny models and data, runs in a folder, comparisons."""

import contextlib
import gc
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing
import yaml
from safetensors.torch import load_file

from src.config import validation
from src.distributed import stop_signals
from src.tasks import OPTIONS

REPOSITORY = Path(__file__).resolve().parents[2]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2 = {  # has dropout in the embedding, the attention and the residual stream
    "model_type": "gpt2",
    "vocab_size": 500,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 256,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.2,
    "resid_pdrop": 0.2,
}
TINY = GPT2 | {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_positions": 32}


def write_jsonl(path, rows) -> Path:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(path)


def write_yaml(path, values) -> Path:
    Path(path).write_text(yaml.safe_dump(values))
    return Path(path)


def free_port() -> int:
    """Return a port that nothing listens on, below the range from which the system takes ports of outgoing connections.

    A port of that range could be taken between this call and the process that listens on it."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RankFailed(AssertionError):
    """A rank failed; has the exit code (None: killed after the timeout) and the output of every rank."""

    def __init__(self, codes: list[int | None], texts: list[str]):
        super().__init__(f"exit codes {codes}\n" + "\n".join(texts))
        self.codes, self.texts = codes, texts


def where(name: str, world: int, **keys) -> dict[str, str]:
    """Return the variables that `accelerate launch --config_file accelerate_configs/NAME.yaml` sets for `world` processes.

    accelerate's own code makes them; `keys` replace keys of the file, also those of its fsdp, DeepSpeed and parallelism parts."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    values = yaml.safe_load((REPOSITORY / "accelerate_configs" / f"{name}.yaml").read_text())
    for key, value in keys.items():
        inside = [part for part in values.values() if isinstance(part, dict) and key in part]
        (inside[0] if inside else values)[key] = value
    before = dict(os.environ)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(values, file)
            file.flush()
            words = ["--config_file", file.name, "--num_processes", str(world), "train.py"]
            args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
        deepspeed = values["distributed_type"] == "DEEPSPEED"
        args.deepspeed_fields_from_accelerate_config = ",".join(
            [*values.get("deepspeed_config", {}), "mixed_precision"]
        )
        made = prepare_deepspeed_cmd_env(args)[1] if deepspeed else prepare_multi_gpu_env(args)
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = {key: value for key, value in made.items() if before.get(key) != value}
    return {key: value for key, value in found.items() if not key.startswith(("MASTER_", "OMP_"))}


def _over_gloo(self, cpu=False, sagemaker_dp=False, backend=None):
    from accelerate.utils import DistributedType

    return "gloo", DistributedType.MULTI_GPU


def _enter(rank, world, port, out, target, args, env):
    gc.freeze()  # a collection that walks over everything the parent has imported takes 0.3 s, twice a run
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    } | (env or {})
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test of this pytest process may have made one
    if {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & set(env or {}):
        # On a CPU accelerate would use plain DDP; with this backend its own FSDP and DeepSpeed code runs over gloo.
        PartialState._prepare_backend = _over_gloo
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        os.environ.pop("ACCELERATE_USE_CPU", None)
    stop_signals.LAUNCHER_PID = os.getppid()  # normally set when the process imports the module
    stream = open(f"{out}/rank{rank}.txt", "w", buffering=1)  # noqa: SIM115 (open until the process ends)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    torch.set_num_threads(1)
    try:
        result = target(*args)
        torch.save(result, f"{out}/rank{rank}.pt")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    stream.flush()
    os._exit(code)


# Imported before the fork, which saves seconds in every child.
ONCE = ["train", "eval", "datasets", "accelerate.tracking", "torch._dynamo", "transformers.hf_argparser"]
ONCE += ["transformers.optimization", "transformers.convert_slow_tokenizer", "src.tasks.causal_lm"]
ONCE += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2")]
ONCE_SHARDED = ["torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "accelerate.utils.fsdp_utils"]


def fork(world: int, target, *args, out, env=None) -> list:
    """Start `target(*args)` in `world` forked processes, the ranks of one group; return the processes.

    Takes half a second (a launcher: fifteen), because imports are done once."""
    for name in ONCE + (ONCE_SHARDED if "ACCELERATE_USE_FSDP" in (env or {}) else []):
        import_module(name)
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # cached: hundreds of patterns that every save needs
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    context = torch.multiprocessing.get_context("fork")
    port = free_port()
    ranks = [
        context.Process(target=_enter, args=(rank, world, port, str(out), target, args, env)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    return ranks


def spawn(world: int, target, *args, out, env=None, timeout: float = 120) -> list:
    """Return the results of `target(*args)` on `world` forked ranks.

    Raise RankFailed with the output of all ranks if one fails or does not end in time."""
    ranks, out = fork(world, target, *args, out=out, env=env), Path(out)
    for process in ranks:
        process.join(timeout)
    late = [process for process in ranks if process.is_alive()]
    codes = [process.exitcode for process in ranks]
    for process in late:
        process.kill()
    texts = [(out / f"rank{rank}.txt").read_text() for rank in range(world)]
    if any(codes) or None in codes:
        raise RankFailed(codes, texts)
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


class Ranks:
    """A command in `world` forked ranks that run beside the test; each rank and its loaders are one process group."""

    def __init__(self, script: str, *argv, folder, world: int = 1, env=None):
        self.out = Path(folder).with_suffix(".out")
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.processes = fork(world, _lead, script, argv, folder, out=self.out, env=env)

    def signal(self, number: int, *ranks: int, group: bool = False) -> None:
        """Send a signal to these ranks (default: all); with `group`, also to their loaders."""
        chosen = [self.processes[rank].pid for rank in ranks] or [process.pid for process in self.processes]
        for pid in chosen:
            (os.killpg if group else os.kill)(pid, number)

    def wait(self, timeout: float = 60) -> list[int | None]:
        """Wait for all ranks; return their exit codes, None for a rank that did not end in time."""
        end = time.monotonic() + timeout
        while time.monotonic() < end and any(process.exitcode is None for process in self.processes):
            time.sleep(0.01)  # `join` would wait for their loaders as well
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes

    def text(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.out.glob("rank*.txt")))


def _lead(script, argv, folder):
    os.setpgrp()
    _command(script, argv, folder)


def until(true, timeout: float = 60):
    """Wait until `true()` is true; return its value."""
    end = time.monotonic() + timeout
    while not (found := true()):
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.005)
    return found


def _command(script, argv, folder):
    from src.runtime.exit_codes import run_main

    os.chdir(folder)
    sys.argv = [script, *(str(word) for word in argv)]
    run_main(import_module(Path(script).stem).main)


def run_command(script: str, *argv, folder, world: int = 1, env=None, timeout: float = 60) -> tuple[list, list[str]]:
    """Run train.py or eval.py in `folder` like the command line; return exit codes and outputs by rank."""
    out = Path(folder).with_suffix(".out")
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        spawn(world, _command, script, argv, folder, out=out, env=env, timeout=timeout)
    except RankFailed as failed:
        return failed.codes, failed.texts
    return [0] * world, [(out / f"rank{rank}.txt").read_text() for rank in range(world)]


def finish_saves() -> None:
    """Wait in this process for the checkpoint that is being written: a failing run would interrupt it."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint writer":
            thread.join()


def after_prepare(look) -> None:
    """Call `look(strategy, module, optimizer)` in this process after train.py's strategy has prepared them."""
    import train

    make = train.strategies.make_strategy

    def made(accelerator, cfg):
        strategy = make(accelerator, cfg)
        prepare = strategy.prepare

        def prepared(*args):
            module, optimizer = prepare(*args)
            look(strategy, module, optimizer)
            return module, optimizer

        strategy.prepare = prepared
        return strategy

    train.strategies.make_strategy = made


def _train(argv):
    import torch.distributed as dist

    import train

    seen = {}
    original = train.train

    def spy(*args):
        accelerator = args[-1]
        seen["world"] = accelerator.num_processes
        seen["initialised"] = dist.is_initialized()
        original(*args)

    def look(strategy, module, optimizer):
        mesh = getattr(next(module.parameters()), "device_mesh", None)
        seen["mesh"] = mesh and tuple(mesh.shape)
        seen["units"] = mesh and sum(isinstance(part, torch.distributed.fsdp.FSDPModule) for part in module.modules())

    train.train = spy
    after_prepare(look)
    train.main([str(word) for word in argv])
    return seen


def run_training(world: int, folder, *argv, env=None, timeout: float = 180, units: int = 2) -> "Run":
    """Train in `folder` on `world` processes through train.py's main; return the run.

    Assert that the group had that size and that FSDP2, if chosen, sharded at least so many units over its mesh."""
    argv = [*argv, "--output_dir", folder]
    seen = spawn(world, _train, argv, out=Path(folder).with_suffix(".out"), env=env, timeout=timeout)
    assert [s["world"] for s in seen] == [world] * world
    copies = int((env or {}).get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))
    mesh = (copies, world // copies) if copies > 1 else (world,)
    for s in seen:
        assert s["mesh"] == (mesh if "ACCELERATE_USE_FSDP" in (env or {}) else None)
        assert s["mesh"] is None or s["units"] >= units
    return Run(folder)


def _evaluate(argv):
    import eval as evaluation

    evaluation.main([str(word) for word in argv])


def run_evaluation(world: int, folder, *argv, env=None) -> dict:
    """Evaluate through eval.py's main on `world` processes; return eval.json."""
    spawn(world, _evaluate, [*argv, "--output_dir", folder], out=Path(folder).with_suffix(".out"), env=env)
    return json.loads((Path(folder) / "eval.json").read_text())


def evaluate_here(argv) -> dict:
    """Evaluate in this process, a child of `spawn`; return eval.json."""
    argv = [str(word) for word in argv]
    _evaluate(argv)
    return json.loads((Path(argv[argv.index("--output_dir") + 1]) / "eval.json").read_text())


def last_step(folder) -> int:
    """Return the step of the last metrics line of a run, also while it trains."""
    file = Path(folder) / "metrics.jsonl"
    lines = [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


class Run:
    """A finished run, read back from its folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        self.weights = load_weights(self.folder / "final")

    def kind(self, kind: str) -> list[dict]:
        return [line for line in self.lines if line["kind"] == kind]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.kind("train")]


def load_weights(folder, part: str = "model") -> dict[str, torch.Tensor]:
    """Return the tensors of a part of a checkpoint or final model, from one file or several shards."""
    paths = [*Path(folder).glob(f"{part}.safetensors"), *Path(folder).glob(f"{part}-*-of-*.safetensors")]
    found = [item for path in paths for item in load_file(path).items()]
    assert len(found) == len(dict(found)) > 0
    return dict(found)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of weights, relative to the largest weight of each tensor.

    Tensors that are zero except for rounding are measured against 0.001."""
    assert one.keys() == other.keys()
    assert one
    return max(((one[k] - other[k]).abs().max() / one[k].abs().max().clamp(min=1e-3)).item() for k in one)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two sets of weights are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def timeless(folder) -> list[dict]:
    """Return the lines of metrics.jsonl without times and rates."""
    lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def ledger_text(folder) -> str:
    """Return the text of ledger.jsonl."""
    return (Path(folder) / "ledger.jsonl").read_text()


def tiny_files(folder) -> dict[str, Path]:
    """Return fields for a model with dropout (10 ms per step) and 83 rows of data.

    With a global batch of 8 an epoch has 11 steps; the last has 3 examples."""
    generator = np.random.default_rng(0)
    fields = {"model_config": write_yaml(Path(folder, "gpt2.yaml"), TINY)}
    for name, count in (("train", 83), ("validation", 21)):
        lengths = generator.integers(3, 12, count)
        rows = [{"input_ids": generator.integers(0, 50, n).tolist()} for n in lengths]
        fields[f"{name}_file"] = write_jsonl(Path(folder, f"{name}.jsonl"), rows)
    return fields


def flags(**fields) -> list[str]:
    """Return the command line that sets these fields."""
    words = []
    for name, value in fields.items():
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return words


def open_data(**fields):
    """Return (task, its prepared splits), opened as train.py opens them."""
    from src.config import parsing
    from src.data import dataset
    from src.tasks import make_task

    run, options = parsing.parse(flags(**fields), OPTIONS)
    validation.check(run, options)
    task = make_task(run, options)
    return task, dataset.prepare_datasets(run, task)


CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_model(folder, config: dict, seed: int = 7) -> Path:
    """Save a causal language model with random weights, as transformers does; return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    return Path(folder)


def tiny_tokenizer(folder, texts=(), size: int = 320, chat_template: str | None = None) -> Path:
    """Save a byte-level BPE tokenizer trained on `texts`; it can encode any text."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    model = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|pad|>"]
    model.train_from_iterator(list(texts), vocab_size=size, special_tokens=special, show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=model._tokenizer, eos_token=special[0], pad_token=special[1])
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return Path(folder)
