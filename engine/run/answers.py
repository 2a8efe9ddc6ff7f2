"""Answers in an evaluation: to `sample_prompts` and to validation rows, by all ranks together.

Tests: tests/src/training/test_answers.py.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.config.run_config import RunConfig
from engine.distributed.backends import Backend
from engine.distributed.stop_signals import StopSignals
from engine.plan.batch_plan import evaluation_order
from engine.plan.seeding import seed_everything
from engine.process import console
from engine.rows.prompts import Prompt
from engine.task import Task


def answer_rows(
    backend: Backend, module: torch.nn.Module, task: Task, cfg: RunConfig, signals: StopSignals | None
) -> dict | None:
    """Return the metrics of the answers to validation rows (`predict_with_generate`), None if a rank was asked to stop."""
    generation = task.generation
    if generation is None or not generation.of_rows:
        return {}
    options = task.options
    settings = {
        "max_new_tokens": generation.max_new_tokens,
        "num_beams": options.num_beams,
        "do_sample": options.do_sample,
    }
    tokens = generate_answers(backend, module, task, generation.of_rows, settings, cfg, signals)
    if tokens is None:
        return None
    texts = generation.texts(tokens)
    references = generation.texts([prompt.reference for prompt in generation.of_rows])
    metrics = backend.compute_on_main(lambda: task.answer_metrics(texts, references))
    return metrics | {"generated_examples": len(texts)}


def answer_samples(
    backend: Backend, module: torch.nn.Module, task: Task, cfg: RunConfig, signals: StopSignals | None = None
) -> list[dict] | None:
    """Return {"prompt", "answer"} of each of `sample_prompts`, on all ranks; None if a rank was asked to stop."""
    generation = task.generation
    if generation is None or not generation.samples:
        return []
    samples = generation.samples
    settings = {"max_new_tokens": task.options.sample_max_new_tokens}
    tokens = generate_answers(backend, module, task, samples, settings, cfg, signals)
    if tokens is None:
        return None
    answers = generation.texts(tokens)
    return [{"prompt": prompt.text, "answer": answer} for prompt, answer in zip(samples, answers, strict=True)]


@torch.no_grad()
def generate_answers(
    backend: Backend,
    module: torch.nn.Module,
    task: Task,
    prompts: Sequence[Prompt],
    settings: dict[str, Any],
    cfg: RunConfig,
    signals: StopSignals | None = None,
) -> np.ndarray | None:
    """Return the tokens generated after each prompt, (prompts, max_new_tokens), filled up with -100, on all ranks.

    Return None if a rank was asked to stop. Which prompts are padded together does not depend on the number of processes.
    `settings`: the arguments of `task.answer`. All ranks generate equally often, because each pass of a sharded model is
    a collective."""
    accelerator = backend.accelerator
    device = accelerator.device
    lengths = np.array([len(prompt.ids) for prompt in prompts])
    # Equal counts: the memory of a generation grows with its rows, not with the prompts.
    plan = list(evaluation_order(cfg, False, len(prompts), lengths))
    rounds = -(-len(plan) // backend.data_world_size)  # rounded up
    mine = backend.share_of_rank(plan, rounds)
    module = accelerator.unwrap_model(module)
    tokens = np.zeros((len(prompts), settings["max_new_tokens"]))
    times_seen = np.zeros(len(prompts))
    progress = console.Progress("answers", rounds, "batches", accelerator.is_main_process)
    with backend.evaluating(module, few_shapes=False), module.answering(partial(task.answer, **settings)):
        for number in range(rounds):
            if signals is not None and signals.any_rank_stops(backend.hosts):
                return None
            for micro in mine[number : number + 1]:  # a rank of DDP may have none in the last round
                inputs = task.generation.inputs([prompts[i] for i in micro.ids])
                seed_everything(micro.seed)
                out = module({name: value.to(device) for name, value in inputs.items()})
                if not micro.dummy:
                    tokens[micro.ids] = out["generated"].cpu().numpy()
                    times_seen[micro.ids] += 1
            progress.update()
    assert (backend.hosts.sum(times_seen) == 1).all(), "not every prompt was answered exactly once"
    return backend.hosts.sum(tokens).numpy().astype(np.int64)
