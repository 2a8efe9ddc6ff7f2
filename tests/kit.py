"""What the tests share: real processes over gloo, tiny models, whole runs in a folder, and how to compare them."""

import json
import os
import socket
import sys
import traceback
from importlib import import_module
from pathlib import Path

import torch
import torch.multiprocessing
import yaml
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parent.parent

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


def write_jsonl(path, rows) -> Path:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(path)


def write_yaml(path, values) -> Path:
    Path(path).write_text(yaml.safe_dump(values))
    return Path(path)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class RankFailed(AssertionError):
    """Some rank ended badly; carries the exit code of every rank (None: killed for being late) and what it printed."""

    def __init__(self, codes: list[int | None], texts: list[str]):
        super().__init__(f"exit codes {codes}\n" + "\n".join(texts))
        self.codes, self.texts = codes, texts


def _enter(rank, world, port, out, target, args, env):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    } | (env or {})
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


# What every forked child would otherwise import for itself, which takes seconds.
ONCE = ["train", "eval", "datasets", "accelerate.tracking", "torch._dynamo", "transformers.hf_argparser"]
ONCE += ["transformers.optimization", "transformers.convert_slow_tokenizer", "src.tasks.causal_lm"]
ONCE += [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2")]


def spawn(world: int, target, *args, out, env=None, timeout: float = 120) -> list:
    """Run `target(*args)` in `world` forked processes that see each other as ranks; return what each returned.

    Half a second instead of the fifteen of a launcher, because imports are done once. Raises RankFailed with the
    output of all ranks when one fails or does not end in time."""
    for name in ONCE:
        import_module(name)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    context = torch.multiprocessing.get_context("fork")
    port = free_port()
    ranks = [
        context.Process(target=_enter, args=(rank, world, port, str(out), target, args, env)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
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


def _command(script, argv, folder):
    from src import launch

    os.chdir(folder)
    sys.argv = [script, *(str(word) for word in argv)]
    launch.main(import_module(Path(script).stem).main)


def run_command(script: str, *argv, folder, world: int = 1, env=None, timeout: float = 60) -> tuple[list, list[str]]:
    """Run train.py or eval.py in `folder` as the command does, up to its exit; return exit codes and outputs by rank."""
    out = Path(folder).with_suffix(".out")
    try:
        spawn(world, _command, script, argv, folder, out=out, env=env, timeout=timeout)
    except RankFailed as failed:
        return failed.codes, failed.texts
    return [0] * world, [(out / f"rank{rank}.txt").read_text() for rank in range(world)]


def _train(argv):
    import torch.distributed as dist

    import train

    seen = {}
    original = train.train

    def spy(run, options, task, splits, accelerator):
        seen["world"] = accelerator.num_processes
        seen["initialised"] = dist.is_initialized()
        original(run, options, task, splits, accelerator)

    train.train = spy
    train.main([str(word) for word in argv])
    return seen


def run_training(world: int, folder, *argv, env=None, timeout: float = 180) -> "Run":
    """Train in `folder` on `world` processes through train.py's own main; assert that the group had that size."""
    argv = [*argv, "--output_dir", folder]
    seen = spawn(world, _train, argv, out=Path(folder).with_suffix(".out"), env=env, timeout=timeout)
    assert [s["world"] for s in seen] == [world] * world
    return Run(folder)


def _evaluate(argv):
    import eval as evaluation

    evaluation.main([str(word) for word in argv])


def run_evaluation(world: int, folder, *argv, env=None) -> dict:
    """Evaluate through eval.py's own main on `world` processes; return eval.json."""
    spawn(world, _evaluate, [*argv, "--output_dir", folder], out=Path(folder).with_suffix(".out"), env=env)
    return json.loads((Path(folder) / "eval.json").read_text())


def evaluate_here(argv) -> dict:
    """Evaluate in this process, which `spawn` has made; return eval.json."""
    argv = [str(word) for word in argv]
    _evaluate(argv)
    return json.loads((Path(argv[argv.index("--output_dir") + 1]) / "eval.json").read_text())


class Run:
    """A finished run, read back from its folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        self.weights = load_file(self.folder / "final" / "model.safetensors")

    def kind(self, kind: str) -> list[dict]:
        return [line for line in self.lines if line["kind"] == kind]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.kind("train")]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two sets of weights, relative to the largest weight of each tensor.

    A tensor that stays at zero but for rounding is measured against 0.001."""
    assert one.keys() == other.keys()
    assert one
    return max(((one[k] - other[k]).abs().max() / one[k].abs().max().clamp(min=1e-3)).item() for k in one)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two sets of weights are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def flags(**fields) -> list[str]:
    """Return the command line that sets these fields."""
    words = []
    for name, value in fields.items():
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return words


def open_data(**fields):
    """Return (task, its prepared splits), opened as train.py opens them."""
    from src import config, data
    from src.tasks import make_task

    run, options = config.parse(flags(**fields))
    config.check(run, options)
    task = make_task(run, options)
    task.load()
    return task, data.load_splits(run, task)


CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(folder, texts=(), size: int = 320, chat_template: str | None = None) -> Path:
    """Save a byte-level BPE tokenizer trained on `texts` as transformers expects it; it can write any text."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    model = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|pad|>"]
    model.train_from_iterator(list(texts), vocab_size=size, special_tokens=special, show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=model._tokenizer, eos_token=special[0], pad_token=special[1])
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return Path(folder)
