"""The programs that benchmarks/gpu.py compares: train.py, a plain compiled loop, the Trainer; the same rows and model for all."""

import json
import os
import sys
import time
from pathlib import Path

from gpu_cases import Case

REPOSITORY = Path(__file__).resolve().parent.parent
LOGGING_STEPS = 5  # of train.py and the Trainer


def write_inputs(case: Case, folder: Path) -> None:
    """Write `rows.parquet` (token ids, Zipf distributed) and `model.json` into `folder`; for LoRA a model to start from."""
    import numpy as np
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    rng, count = np.random.default_rng(0), 16384 if case.flags.get("packing") else 4096  # so that no epoch ends
    lengths = [case.longest] * count
    if case.ragged:  # log-normal, mean 367 of 2,048 tokens: the shape of answers and short documents
        lengths = np.clip(rng.lognormal(5.5, 0.9, count) * case.longest / 2048, 8, case.longest).astype(int)
    rows = [(rng.zipf(1.2, length) % case.model["vocab_size"]).astype("int32") for length in lengths]
    parquet.write_table(pyarrow.table({"input_ids": rows}), folder / "rows.parquet")
    (folder / "model.json").write_text(json.dumps(case.model | {"max_position_embeddings": case.longest}))
    if case.lora:
        import torch

        random_model(folder, "bfloat16").save_pretrained(folder / "model")
        torch.cuda.empty_cache()  # of this process, which waits for the programs


def random_model(folder: Path, dtype: str):
    """Return the model of `model.json` with random weights, made on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads((folder / "model.json").read_text()))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def build_model(case: Case, folder: Path):
    """Return the model of the plain loop and the Trainer, on the device, with LoRA if the case has it."""
    import torch
    from transformers import AutoModelForCausalLM

    if case.lora:
        from peft import LoraConfig, get_peft_model

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="bfloat16", device_map=device)
        if case.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    return random_model(folder, "float32")


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
    """Writes a line to the standard output after every turn of steps that the device has finished: `step`, `seconds` of
    them, `time`, and the peak of memory. After the warm-up it then waits for a line on the standard input, its turn."""

    def __init__(self, case: Case):
        import torch

        self.cuda = torch.cuda if torch.cuda.is_available() else None
        self.case, self.peak, self.began = case, 0.0, time.time()
        self.turns, self.lines = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # what the program prints goes to its log

    def step_done(self, step: int) -> None:
        if step % self.case.turn:
            return
        if self.cuda:
            self.cuda.synchronize()
            # Read here, because each train line of train.py resets it.
            self.peak = max(self.peak, self.cuda.max_memory_allocated() / 2**30)
        line = {"step": step, "seconds": time.time() - self.began, "time": time.time(), "peak_gib": self.peak or None}
        print(json.dumps(line), file=self.lines, flush=True)
        if step >= self.case.warmup:
            self.turns.readline()
        self.began = time.time()


# ---- the programs ------------------------------------------------------------------------------------------------------


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
        num_workers=case.workers,
        pin_memory=device == "cuda",
        collate_fn=lambda rows: pad(rows, case.ragged),
    )
    model = build_model(case, folder).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    compiled = torch.compile(model) if case.compile else model
    clock, accumulate = Clock(case), case.global_batch // case.micro_batch
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


def train_trainer(case: Case, folder: Path, **best) -> None:
    """The Trainer of transformers with its fast options and its default sampler; `best` adds options."""
    from datasets import load_dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock(case)

    class Times(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            clock.step_done(state.global_step)

    fast = {"torch_compile": case.compile} | best
    options = TrainingArguments(
        output_dir=str(folder / "trainer"),
        bf16=not case.on_cpu,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.global_batch // case.micro_batch,
        max_steps=case.steps,
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        logging_steps=LOGGING_STEPS,
        save_strategy="no",
        report_to=[],
        dataloader_num_workers=case.workers,
        remove_unused_columns=False,
        use_cpu=clock.cuda is None,
        **fast,
    )
    Trainer(
        model=build_model(case, folder),
        args=options,
        train_dataset=load_dataset("parquet", data_files=str(folder / "rows.parquet"), split="train"),
        data_collator=lambda rows: pad(rows, case.ragged),
        callbacks=[Times()],
    ).train()


def train_trainer_rebalance(case: Case, folder: Path) -> None:
    """The Trainer, dividing the rows of a step into micro-batches by their cost; it reads all lengths first."""
    train_trainer(case, folder, train_sampling_strategy="batch_rebalance")


def train_trainer_liger(case: Case, folder: Path) -> None:
    """The Trainer with the kernels of liger-kernel, which torch 2.11 does not compile; ragged rows divided by cost."""
    strategy = "batch_rebalance" if case.ragged else "random"
    train_trainer(case, folder, use_liger_kernel=True, torch_compile=False, train_sampling_strategy=strategy)


def train_ours(case: Case, folder: Path) -> None:
    """train.py itself: only its logger is watched, for the time of a step."""
    os.chdir(REPOSITORY)
    sys.path.insert(0, str(REPOSITORY))
    import train
    from engine.models import compile_and_recompute

    if case.whole_graph:
        compile_and_recompute.repeated_layers = lambda model: [model.base_model]  # the loss runs it without the head
    clock = Clock(case)

    class Timed(train.RunLogger):
        def add_step(self, *values):
            super().add_step(*values)
            clock.step_done(self.run.state.step)

    train.RunLogger = Timed
    train.main([str(word) for name, value in ours_flags(case, folder).items() for word in (f"--{name}", value)])


def ours_flags(case: Case, folder: Path) -> dict:
    flags = {
        "train_file": folder / "rows.parquet",
        "output_dir": folder / "ours",
        "cache_dir": folder / "cache",
        "max_length": case.longest,
        "global_batch_size": case.global_batch,
        "per_device_batch_size": case.micro_batch,
        "max_steps": case.steps,
        "learning_rate": 1e-4,
        "logging_steps": LOGGING_STEPS,
        "save_steps": 10**6,
        "resume": "never",
        "compile": str(case.compile).lower(),
    }
    if case.lora:
        adapter = {"type": "lora", "r": 16, "target": "all-linear"}
        flags |= {"peft": json.dumps(adapter), "dtype": "bfloat16"}
        flags |= {"gradient_checkpointing": str(case.recompute).lower()}
    flags |= {"model_name_or_path": folder / "model"} if case.lora else {"model_config": folder / "model.json"}
    return flags | case.flags


PROGRAMS = {
    "ours": train_ours,
    "plain": train_plain,
    "trainer": train_trainer,
    "trainer_rebalance": train_trainer_rebalance,
    "trainer_liger": train_trainer_liger,
}
