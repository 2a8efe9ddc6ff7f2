"""Benchmark on one GPU: train.py against a plain compiled loop and the Trainer of transformers. See README.md.

python benchmarks/gpu.py [CASE …] [--programs ours plain trainer] [--tiny]   (make bench-gpu CASES="124m 1b")

Each program trains the same model on the same rows in a process of its own, one after the other, and prints the time of
every fifth step. The cases cpu_… are measured on a CPU, in float32, in rounds of all programs. `--tiny` runs the same
code with small models, also on a CPU, to see that it works; its figures say nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}  # dense bf16 FLOP/s, of NVIDIA's data sheets
EVERY = 5  # steps between two times


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; `against` names the case whose ours it is compared with."""

    model: dict
    longest: int
    micro_batch: int
    global_batch: int
    steps: int
    warmup: int = 10  # steps before the clock starts: compilation, allocation
    ragged: bool = False
    lora: bool = False
    compile: bool = True
    flags: dict = field(default_factory=dict)  # of train.py alone
    environment: dict = field(default_factory=dict)  # of every program
    programs: tuple[str, ...] = ("ours", "plain", "trainer")
    against: str = ""
    rounds: int = 1  # the programs take turns; medians

    @property
    def on_cpu(self) -> bool:
        return self.rounds > 1


def llama(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool = True) -> dict:
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


M124 = llama(50304, 768, 2048, 12, 12, 12)
M12 = llama(32000, 256, 768, 4, 4, 4)


def packed(**flags: str) -> Case:
    flags = {"packing": "true"} | flags
    return Case(M124, 1024, 32, 128, 40, ragged=True, flags=flags, programs=("ours",), against="124m")


RAGGED = Case(llama(49152, 960, 2560, 32, 15, 5), 2048, 8, 64, 20, 5, ragged=True, compile=False)


def ragged(**changes) -> Case:
    """Return the ragged case with one change, to find what it waits for; measured only if it is named."""
    return replace(RAGGED, programs=("ours",), against="ragged", **changes)


CASES = {
    "124m": Case(M124, 1024, 32, 128, 40),
    "1b": Case(llama(128256, 2048, 8192, 16, 32, 8), 4096, 2, 8, 30),
    "ragged": RAGGED,
    "ragged_cudnn": ragged(flags={"pad_to_multiple_of": 1}),  # the same rows; attention as torch chooses it
    "ragged_fixed_segments": ragged(environment={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
    "ragged_padded": ragged(flags={"pad_to_multiple_of": 64}),
    "ragged_compiled": ragged(flags={"pad_to_multiple_of": 64}, compile=True, warmup=10),
    "ragged_tokens": ragged(flags={"per_device_batch_tokens": 16384}),
    "packed": packed(),
    "packed_varlen": packed(attn_implementation="varlen"),
    "packed_flex": packed(attn_implementation="flex_attention"),
    "cpu_equal": Case(M12, 128, 8, 32, 20, 5, compile=False, rounds=3),
    "cpu_ragged": Case(M12, 512, 8, 16, 15, 5, ragged=True, compile=False, rounds=3),
    "8b_lora": Case(llama(128256, 4096, 14336, 32, 32, 8, False), 4096, 4, 16, 20, 5, lora=True),
}


def tiny(case: Case) -> Case:
    """Return the case in a size for a CPU."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}
    model = case.model | heads | {"num_hidden_layers": 2, "vocab_size": 512}
    return replace(case, model=model, longest=64, micro_batch=2, global_batch=4, steps=20, warmup=10, compile=False)


# ---- the same rows and model for every program -------------------------------------------------------------------------


def write_inputs(case: Case, folder: Path) -> None:
    """Write `rows.parquet` (token ids, Zipf distributed) and `model.json` into `folder`."""
    import numpy as np
    import pyarrow
    from pyarrow import parquet

    rng, count = np.random.default_rng(0), 4096
    lengths = [case.longest] * count
    if case.ragged:  # log-normal, mean 367 of 2,048 tokens: the shape of answers and short documents
        lengths = np.clip(rng.lognormal(5.5, 0.9, count) * case.longest / 2048, 8, case.longest).astype(int)
    rows = [(rng.zipf(1.2, length) % case.model["vocab_size"]).astype("int32") for length in lengths]
    parquet.write_table(pyarrow.table({"input_ids": rows}), folder / "rows.parquet")
    (folder / "model.json").write_text(json.dumps(case.model | {"max_position_embeddings": case.longest}))


def build_model(case: Case, folder: Path):
    """Return the model of the plain loop and the Trainer, on the device, with LoRA if the case has it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads((folder / "model.json").read_text()))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        dtype = torch.bfloat16 if case.lora else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def pad(rows: list[dict], mask_needed: bool) -> dict:
    import torch

    width = max(len(row["input_ids"]) for row in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[i, :length], mask[i, :length] = torch.as_tensor(row["input_ids"]), 1
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    return batch | {"attention_mask": mask} if mask_needed else batch


class Clock:
    """Prints the time of every fifth step, after the device has finished it, and at the end the peak of memory."""

    def __init__(self):
        import torch

        self.cuda = torch.cuda if torch.cuda.is_available() else None
        self.times: dict[int, float] = {}

    def step_done(self, step: int) -> None:
        if step % EVERY == 0:
            if self.cuda:
                self.cuda.synchronize()
            self.times[step] = time.time()

    def report(self) -> None:
        peak = self.cuda.max_memory_allocated() / 2**30 if self.cuda else None
        print(json.dumps({"times": self.times, "peak_gib": peak}))


# ---- the three programs ------------------------------------------------------------------------------------------------


def train_plain(case: Case, folder: Path) -> None:
    """The best hand-written loop: compiled model, fused AdamW, autocast, pinned rows, clipping, accumulation."""
    import torch
    from datasets import load_dataset

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = load_dataset("parquet", data_files=str(folder / "rows.parquet"), split="train")
    loader = torch.utils.data.DataLoader(
        rows,
        batch_size=case.micro_batch,
        shuffle=True,
        num_workers=2,
        pin_memory=device == "cuda",
        collate_fn=lambda rows: pad(rows, case.ragged),
    )
    model = build_model(case, folder).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    compiled = torch.compile(model) if case.compile else model
    clock, accumulate = Clock(), case.global_batch // case.micro_batch
    micro_batches = (batch for _ in range(1000) for batch in loader)
    for step in range(1, case.steps + 1):
        for _ in range(accumulate):
            batch = {name: value.to(device, non_blocking=True) for name, value in next(micro_batches).items()}
            with torch.autocast(device, dtype=torch.bfloat16, enabled=not case.on_cpu):
                loss = compiled(**batch).loss / accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step_done(step)
    clock.report()


def train_trainer(case: Case, folder: Path) -> None:
    """The Trainer of transformers with its fast options; its defaults where rows are ragged."""
    from datasets import load_dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock()

    class Times(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            clock.step_done(state.global_step)

    options = TrainingArguments(
        output_dir=str(folder / "trainer"),
        bf16=not case.on_cpu,
        torch_compile=case.compile,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.global_batch // case.micro_batch,
        max_steps=case.steps,
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        logging_steps=EVERY,
        save_strategy="no",
        report_to=[],
        dataloader_num_workers=2,
        remove_unused_columns=False,
        use_cpu=clock.cuda is None,
    )
    Trainer(
        model=build_model(case, folder),
        args=options,
        train_dataset=load_dataset("parquet", data_files=str(folder / "rows.parquet"), split="train"),
        data_collator=lambda rows: pad(rows, case.ragged),
        callbacks=[Times()],
    ).train()
    clock.report()


def train_ours(case: Case, folder: Path) -> None:
    """train.py itself: only its logger is watched, for the time of a step."""
    os.chdir(REPOSITORY)
    sys.path.insert(0, str(REPOSITORY))
    import train

    clock = Clock()

    class Timed(train.RunLogger):
        def add_step(self, *values):
            super().add_step(*values)
            clock.step_done(self.state.step)

    train.RunLogger = Timed
    train.main([str(word) for name, value in ours_flags(case, folder).items() for word in (f"--{name}", value)])
    clock.report()


def ours_flags(case: Case, folder: Path) -> dict:
    flags = {
        "model_config": folder / "model.json",
        "train_file": folder / "rows.parquet",
        "output_dir": folder / "ours",
        "cache_dir": folder / "cache",
        "max_length": case.longest,
        "global_batch_size": case.global_batch,
        "per_device_batch_size": case.micro_batch,
        "max_steps": case.steps,
        "learning_rate": 1e-4,
        "logging_steps": EVERY,
        "save_steps": 10**6,
        "resume": "never",
        "compile": str(case.compile).lower(),
    }
    if case.lora:
        adapter = {"type": "lora", "r": 16, "target": "all-linear"}
        flags |= {"peft": json.dumps(adapter), "dtype": "bfloat16", "gradient_checkpointing": "true"}
    return flags | case.flags


PROGRAMS = {"ours": train_ours, "plain": train_plain, "trainer": train_trainer}


# ---- figures -----------------------------------------------------------------------------------------------------------


def measure(program: str, case: Case, folder: Path, name: str, small: bool) -> dict:
    """Run a program in a process of its own; return seconds per step, seconds to its fifth step, and its peak memory."""
    command = [sys.executable, __file__, name, "--inner", program, "--folder", str(folder), *(["--tiny"] * small)]
    precision = "no" if case.on_cpu else "bf16"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "ACCELERATE_MIXED_PRECISION": precision} | case.environment
    if small or case.on_cpu:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    began = time.time()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    (folder / f"{program}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        return {"error": (done.stdout + done.stderr).strip().splitlines()[-1][:200]}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    times = {int(step): seconds for step, seconds in result["times"].items()}
    seconds = (times[case.steps] - times[case.warmup]) / (case.steps - case.warmup)
    return {"seconds": seconds, "start": times[EVERY] - began, "peak_gib": result["peak_gib"]}


def tokens_per_step(folder: Path, case: Case) -> float:
    """Return the mean count of real tokens in a step; rows are drawn evenly, packed rows are nearly full."""
    from pyarrow import parquet

    lengths = [len(row) for row in parquet.read_table(folder / "rows.parquet")["input_ids"]]
    if case.flags.get("packing"):
        run = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in run if line["kind"] == "train" and line["step"] > case.warmup]
        tokens = sum(line["tokens_per_second"] * line["seconds"] for line in lines)
        return tokens / (case.steps - case.warmup)
    return sum(lengths) / len(lengths) * case.global_batch


def flops_per_token(case: Case) -> float:
    """Return 6 N + 12 L H T (LoRA: 4 N + 12 L H T: the base has no weight gradients); attention is not halved.

    N counts all weights but an embedding that is not also the head. Recomputed activations do not count."""
    m = case.model
    hidden, layers, vocab = m["hidden_size"], m["num_hidden_layers"], m["vocab_size"]
    kv = hidden * m["num_key_value_heads"] // m["num_attention_heads"]
    weights = vocab * hidden + layers * (2 * hidden**2 + 2 * hidden * kv + 3 * hidden * m["intermediate_size"])
    return (4 if case.lora else 6) * weights + 12 * layers * hidden * case.longest


def machine() -> tuple[str, float | None]:
    """Return a line on device and versions, and the device's peak in FLOP/s, if it is known."""
    import accelerate
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}"
    )
    peak = next((value for name, value in PEAKS.items() if name in device), None)
    return f"{device}, {versions}, {time.strftime('%Y-%m-%d')}", peak


def table(results: dict[str, dict[str, dict]]) -> str:
    """Return the results as a Markdown table, with ours against the others."""
    title, peak = machine()
    lines = [title, "", "| case | program | s a step | tokens/s | TFLOP/s | of peak | peak GiB | start s | ours is |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, programs in results.items():
        for program, r in programs.items():
            if "error" in r:
                lines.append(f"| {name} | {program} | failed: {r['error']} | | | | | | |")
                continue
            flops, ours = r["flops"] / r["seconds"], programs.get("ours", {}).get("tokens_per_second")
            other = "" if program == "ours" or not ours else f"{ours / r['tokens_per_second']:.2f} ×"
            if equal := results.get(CASES[name].against, {}).get("ours", {}).get("tokens_per_second"):
                other = f"{ours / equal:.2f} × {CASES[name].against}"
            memory = "" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}"
            share = f"{flops / peak:.1%}" if peak else ""
            lines.append(
                f"| {name} | {program} | {r['seconds']:.4f} | {r['tokens_per_second']:,.0f} | {flops / 1e12:.1f} "
                f"| {share} | {memory} | {r['start']:.1f} | {other} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all for a GPU but ragged_…)")
    parser.add_argument("--programs", nargs="*", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU, to see that it works")
    parser.add_argument("--out", type=Path, help="folder for the table, results.json and the programs' logs")
    parser.add_argument("--inner", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {sorted(unknown)}: choose from {list(CASES)}")
    names = options.cases or [name for name, case in CASES.items() if not case.on_cpu and case.against != "ragged"]
    cases = {name: tiny(CASES[name]) if options.tiny else CASES[name] for name in names}
    if options.inner:
        [case] = cases.values()
        return PROGRAMS[options.inner](case, options.folder)
    results: dict[str, dict[str, dict]] = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_inputs(case, folder)
            programs, rounds = [program for program in case.programs if program in options.programs], {}
            for program in programs * case.rounds:
                rounds.setdefault(program, []).append(measure(program, case, folder, name, options.tiny))
            for program, each in rounds.items():
                failed = [result for result in each if "error" in result]
                result = failed[0] if failed else sorted(each, key=itemgetter("seconds"))[len(each) // 2]
                if "error" not in result:
                    tokens = tokens_per_step(folder, case)
                    result |= {"tokens_per_second": tokens / result["seconds"], "flops": tokens * flops_per_token(case)}
                results.setdefault(name, {})[program] = result
                print(f"{name} {program}: {result}", flush=True)
                if options.out:
                    (options.out / name).mkdir(parents=True, exist_ok=True)
                    shutil.copy(folder / f"{program}.log", options.out / name)
    text = table(results)
    print(text)
    if options.out:
        (options.out / "results.md").write_text(text + "\n")
        (options.out / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
