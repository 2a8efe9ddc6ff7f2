"""What only a GPU can show: precisions, fused updates, compiled layers, pinned copies, kernels of attention.

Skipped where there is no GPU; on one: make test-gpu, which runs four at a time (most of their time is the start of some 25
trainings; ARGS='-n 8' where processor and GPU have room: about four minutes on 16 cores).
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from filelock import FileLock

import train
from engine.checkpointing.async_writer import HostCopy
from engine.config.run_config import RunConfig
from engine.distributed.backends import Backend
from engine.models.varlen_attention import document_bounds, varlen_attention
from engine.process import private_apis
from engine.process.private_apis import attention_kernel
from src.losses import chunked_cross_entropy
from src.losses.cross_entropy import PLAIN, CrossEntropy
from tests.helpers import kit
from tests.helpers.losses import linear_sums

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
HEADS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def recipe(files, tmp_path_factory):
    """Flags of a model with heads of 32 dimensions, which the fast kernels of attention take."""
    model = kit.write_yaml(tmp_path_factory.mktemp("gpu") / "llama.yaml", kit.LLAMA | HEADS)
    values = {"model_config": model, "validation_file": files / "validation.jsonl", "learning_rate": 1e-3}
    values |= {"train_file": files / "train.jsonl", "global_batch_size": 32, "per_device_batch_size": 8}
    return lambda **fields: kit.flags(**values | {"max_steps": 20, "logging_steps": 1, "eval_steps": 10} | fields)


def launched(folder, flags, precision: str = "no", config: str = "gpu", script: str = "train.py") -> kit.Run:
    """Launch train.py, or another script, by `accelerate launch` on this GPU, or with `config` cpu on the CPU, and read the run back.

    A forked process cannot use a GPU that its parent has used, so each training is a command."""
    text = output([*launcher(precision, config), str(kit.REPOSITORY / script), *flags, "--output_dir", str(folder)])
    run = read_run(folder, text)
    assert run.environment["device"].startswith("cpu" if config == "cpu" else "cuda")
    return run


def read_run(folder, text: str) -> kit.Run:
    """Return a run with what it printed, and its environment.json."""
    run = kit.Run(folder)
    run.text = text
    run.environment = json.loads((folder / "environment.json").read_text())
    return run


def launcher(precision: str, config: str) -> list[str]:
    """Return the words of a launch before the script."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", precision, "--config_file"]
    return [*launch, str(kit.REPOSITORY / "accelerate_configs" / f"{config}.yaml")]


def output(command: list[str], limit: float = 150) -> str:
    """Return what a command prints; fail if it fails, or with the stacks of its processes if it does not end in time.

    Most commands take 25 to 50 s, ten at a time on 16 cores."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(kit.REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])])
    environment["PYTHONFAULTHANDLER"] = "1"  # SIGABRT then prints the stacks of all threads
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        text, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        end_with_stacks(psutil.Process(process.pid))
        text, _ = process.communicate()
        raise AssertionError(f"did not end within {limit} s:\n{text[-10_000:]}") from None
    assert process.returncode == 0, text[-6000:]
    return text


def end_with_stacks(process: psutil.Process) -> None:
    """End a process and all that it has started, one by one, so that their stacks do not mix."""
    family = [*reversed(process.children(recursive=True)), process]
    for member in family:
        with suppress(psutil.Error):
            member.send_signal(signal.SIGABRT)
            member.wait(5)
    for member in family:
        with suppress(psutil.Error):
            member.kill()


def test_endless_command_fails_with_its_stacks(tmp_path):
    (tmp_path / "endless.py").write_text("import time\n\n\ndef endless():\n    time.sleep(600)\n\n\nendless()\n")
    start = f"import subprocess, sys; subprocess.run([sys.executable, '{tmp_path}/endless.py'])"
    with pytest.raises(AssertionError, match=r"(?s)did not end within 10 s.*endless\.py.*in endless"):
        output([sys.executable, "-c", start], limit=10)


def losses_agree(run: kit.Run, other: kit.Run, bound: float) -> bool:
    return run.losses() == pytest.approx(other.losses(), rel=bound)


@pytest.fixture(scope="module")
def float32(recipe, tmp_path_factory) -> kit.Run:
    """The run in float32, trained once for all processes of pytest-xdist: the others wait for the first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "float32.lock"):
        run, text = folder / "float32", folder / "float32.txt"
        if not text.exists():
            text.write_text(launched(run, recipe()).text)
        return read_run(run, text.read_text())


# The tests with most launches come first: pytest-xdist begins in this order.


def test_a_classifier_trains_in_bf16_and_smoke_passes(files, tmp_path):
    kit.need_task("text_classification")
    rows = [{"text": f"{'good' if i % 2 else 'bad'} {i}", "label": i % 2} for i in range(64)]
    model = {"model_type": "bert", "num_hidden_layers": 2, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model |= {name: size for name, size in HEADS.items() if name != "num_key_value_heads"}
    model = kit.write_yaml(tmp_path / "bert.yaml", model)
    kit.tiny_tokenizer(tmp_path / "tokenizer", ["good bad"])
    values = {"task": "text_classification", "model_config": model, "tokenizer_name": tmp_path / "tokenizer"}
    values |= {"train_file": kit.write_jsonl(tmp_path / "rows.jsonl", rows), "global_batch_size": 16, "max_steps": 8}
    flags = kit.flags(**values | {"logging_steps": 1, "learning_rate": 1e-3})
    run, on_cpu = launched(tmp_path / "run", flags, "bf16"), launched(tmp_path / "cpu", flags, config="cpu")
    assert losses_agree(run, on_cpu, 2e-2)
    smoke = [sys.executable, "-m", "engine.tools.smoke", *launcher("bf16", "gpu"), str(kit.REPOSITORY / "train.py")]
    text = output([*smoke, *flags, "--output_dir", str(tmp_path / "smoke")], limit=450)  # three launches
    assert text.rstrip().endswith("because kernels on cuda may add in any order\nsmoke: passed")


@pytest.mark.parametrize("bits", [4, 8])
def test_base_of_few_bits_computes_the_losses_of_a_cpu_and_resumes_bitwise(recipe, float32, tmp_path, bits):
    kit.need_addon("adapters/low_bit_base")
    pytest.importorskip("peft")
    if private_apis.bitsandbytes() is None:
        pytest.skip("bitsandbytes is not installed")
    adapter = json.dumps({"type": "lora", "r": 4, "target": "all-linear"})
    values = {"peft": adapter, f"load_in_{bits}bit": True, "merge": True, "save_steps": 10, "save_total_limit": 2}
    [_, _, *flags] = recipe(**values)
    flags = ["--model_name_or_path", str(float32.folder / "final"), *flags]  # instead of --model_config
    run = launched(tmp_path / "run", flags, "bf16")
    assert losses_agree(run, launched(tmp_path / "cpu", flags, config="cpu"), 5e-2)
    resumed = launched(kit.rewind(tmp_path / "run", 10, tmp_path / "resumed"), flags, "bf16")
    assert "Resuming from step" in resumed.text
    assert kit.same(resumed.weights, run.weights)


TECHNIQUES = {
    "sam": None,
    "hard_examples": {"share": 0.75},
    "adaptive_clipping": None,
    "spike_watch": {"warmup": 2},
    "lookahead": {"k": 3},
    "ema": {"decay": 0.9},
    "swa": {"start": 5},
    "lawa": {"k": 2, "every": 2},
}


def test_techniques_compute_the_numbers_of_a_cpu(recipe, tmp_path):
    for name in TECHNIQUES:
        kit.need_addon(f"techniques/{name}")
    flags = recipe(techniques=json.dumps(TECHNIQUES))
    run = launched(tmp_path / "run", flags)
    on_cpu = launched(tmp_path / "cpu", flags, config="cpu")
    assert losses_agree(run, on_cpu, 1e-3)
    for name in ("ema/loss", "swa/loss", "lawa/loss"):
        assert run.kind("eval")[-1][name] == pytest.approx(on_cpu.kind("eval")[-1][name], rel=1e-3)


def test_packed_rows_compute_the_numbers_of_a_cpu(recipe, tmp_path, no_waiting):
    packed = {"packing": True, "max_length": 128}
    on_cpu = launched(tmp_path / "cpu", recipe(**packed), config="cpu")
    for attention in ("sdpa", "varlen"):
        flags = recipe(**packed, attn_implementation=attention)
        assert losses_agree(launched(tmp_path / attention, flags, "bf16", script=no_waiting), on_cpu, 2e-2)


def test_a_gpu_trains_the_numbers_of_a_cpu(recipe, float32, tmp_path):
    on_cpu = launched(tmp_path / "cpu", recipe(), config="cpu")
    assert losses_agree(float32, on_cpu, 1e-4)
    assert kit.ledger_text(float32.folder) == kit.ledger_text(on_cpu.folder)


STRICT = """
import torch
import train


def strict(function, calls=[0]):
    def call(*arguments):
        calls[0] += 1
        torch.cuda.set_sync_debug_mode("error" if calls[0] > 10 else "default")  # five steps compile and allocate
        result = function(*arguments)
        WAIT
        torch.cuda.set_sync_debug_mode("default")
        return result

    return call


train.compute_gradient = strict(train.compute_gradient)
train.optimizer_step = strict(train.optimizer_step)
train.run_main(train.main)
"""


@pytest.fixture
def no_waiting(tmp_path):
    """The path of a train.py of which no step may wait for the device."""
    (tmp_path / "strict.py").write_text(STRICT.replace("WAIT", "pass"))
    return tmp_path / "strict.py"


def test_mutant_step_that_waits_is_caught(recipe, no_waiting, tmp_path):
    no_waiting.write_text(STRICT.replace("WAIT", 'torch.zeros(1, device="cuda").item()'))
    with pytest.raises(AssertionError, match="synchroniz"):
        launched(tmp_path / "run", recipe(), "bf16", script=no_waiting)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_computes_and_float32_is_kept(recipe, float32, tmp_path, no_waiting, precision):
    script = no_waiting if precision == "bf16" else "train.py"  # in fp16, the scale depends on the gradient
    run = launched(tmp_path / "run", recipe(), precision, script=script)
    assert run.environment["precision"] == f"weights float32, computing in {precision}"
    assert {value.dtype for value in run.weights.values()} == {torch.float32}
    assert losses_agree(run, float32, 2e-2)
    assert not losses_agree(run, float32, 1e-9)  # it was not silently float32
    assert {"tflops", "gpu_memory_gib"} <= run.kind("train")[-1].keys()  # `mfu`, too, if the device is in the table


def test_fp8_losses_are_close(recipe, float32, tmp_path):
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    run = launched(tmp_path / "run", recipe(), "fp8", "gpu_fp8")
    assert losses_agree(run, float32, 5e-2)


def test_resume_is_bitwise(recipe, float32, tmp_path):
    """Fused AdamW on the device, pinned copies to the host and back."""
    flags = recipe(save_steps=10, save_total_limit=2)
    launched(tmp_path / "run", flags)
    run = launched(kit.rewind(tmp_path / "run", 10), flags)
    assert "Resuming from step" in run.text
    assert kit.same(run.weights, float32.weights)


def test_compiled_layers_compute_the_same(recipe, float32, tmp_path):
    run = launched(tmp_path / "run", recipe(compile=True, pad_to_multiple_of=32))
    assert losses_agree(run, float32, 1e-4)
    assert run.weights.keys() == float32.weights.keys()
    assert 0 < run.kind("train")[-1]["graphs"] <= 8


def test_offloaded_activations_leave_all_bits(recipe, float32, tmp_path):
    grade = json.dumps({"every_n_layers": 2, "offload": True})
    run = launched(tmp_path / "run", recipe(gradient_checkpointing=grade))
    assert "offload is ignored" not in run.text
    assert run.losses() == float32.losses()
    assert kit.same(run.weights, float32.weights)


def test_evaluation_uses_the_kernels_of_training(recipe, tmp_path):
    """Products in TF32, attention of rows of many lengths without cuDNN, layers uncompiled and the loss compiled."""
    run = launched(tmp_path / "run", recipe(tf32=True, compile=True))
    launched(run.folder, ["--checkpoint", str(run.folder)], script="eval.py")
    evaluated = json.loads((run.folder / "eval.json").read_text())
    assert evaluated["loss"] == run.kind("eval")[-1]["loss"]


@pytest.mark.parametrize("precision, kernel", [("bf16", "varlen"), ("no", "sdpa")])
def test_packed_rows_have_attention_by_lengths_in_16_bits(files, tmp_path, monkeypatch, precision, kernel):
    monkeypatch.delenv("ACCELERATE_USE_CPU")  # of tests/conftest.py; on a CPU no packed rows have it
    model = kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA | HEADS)
    task, _ = kit.open_data(model_config=model, train_file=files / "train.jsonl", packing=True, max_length=128)
    try:
        Accelerator(mixed_precision=precision)
        assert attention_kernel(task.build().config) == kernel
    finally:
        AcceleratorState._reset_state(True)


@pytest.mark.parametrize("window, key_heads", [(None, 4), (100, 4), (None, 2)])
def test_kernel_by_lengths_is_attention_within_documents(window, key_heads):
    torch.manual_seed(0)
    shapes = ((2, 4, 512, 64), (2, key_heads, 512, 64), (2, key_heads, 512, 64))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    lengths = torch.tensor([300, 211, 1, 512], device="cuda")
    results = []
    for on_gpu in (True, False):
        moved = inputs if on_gpu else [x.detach().double().cpu().requires_grad_() for x in inputs]
        bounds = document_bounds(lengths if on_gpu else lengths.cpu(), 512)
        out, _ = varlen_attention(None, *moved, None, scaling=0.125, sliding_window=window, **bounds)
        results.append([x.double().cpu() for x in (out, *torch.autograd.grad((out.float() ** 2).sum(), moved))])
    for value, exact in zip(*results, strict=True):
        assert (value - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("rows", [1, 64, 5000])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("options", [PLAIN, CrossEntropy(label_smoothing_factor=0.1, z_loss=1e-3, focal_gamma=0.5)])
def test_compiled_loss_whole_and_in_chunks(monkeypatch, capsys, rows, low, options):
    generator = torch.Generator("cuda").manual_seed(rows)
    values = {"device": "cuda", "generator": generator, "requires_grad": True}
    hidden, weight = torch.randn(rows, 64, **values), torch.randn(32_768, 64, **values)
    targets = torch.randint(-1, 32_768, (rows,), device="cuda", generator=generator)
    targets[targets < 0] = -100

    def result(function, low):
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            loss = function()
        return loss.item(), torch.autograd.grad(loss / rows, (hidden, weight))

    def errors(gradients):
        return [((a - b).norm() / b.norm()).item() for a, b in zip(gradients, exact, strict=True)]

    def ours():
        return linear_sums(hidden, weight, None, targets, options)["loss"]

    def full():
        return options.sums(torch.nn.functional.linear(hidden, weight).float(), targets)["loss"]

    torch.compiler.reset()
    _, exact = result(full, False)
    expected, gradients = result(full, low)
    bounds = [1.1 * error + 1e-4 for error in errors(gradients)]
    for share in (1, 1e-9):  # all logits at once; chunks of 16 rows
        monkeypatch.setattr(chunked_cross_entropy, "WHOLE_SHARE", share)
        monkeypatch.setattr(chunked_cross_entropy, "CHUNK_SHARE", share)
        loss, gradients = result(ours, low)
        assert loss == pytest.approx(expected, rel=1e-4)
        assert all(error <= most for error, most in zip(errors(gradients), bounds, strict=True))
    with torch.no_grad():
        sums = linear_sums(hidden, weight, None, targets, options, False)
        expected = chunked_cross_entropy.sums_from_logits(torch.nn.functional.linear(hidden, weight), targets, False)
    assert sums["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-6)
    assert capsys.readouterr().err == ""  # it was compiled


def test_memory_is_allocated_in_expandable_segments():
    """Rows of many lengths would leave gaps in others. tests/src/test_step.py: unless the user decides."""
    program = "import engine.startup, torch; torch.zeros(1, device='cuda'); print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=kit.REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_memory_of_saves_is_reserved_once():
    """Pinned, in the background, and used by each copy; tied weights have one."""
    weight, moment = (torch.randn(300, 40, device="cuda") for _ in range(2))
    tensors = {"model": {"embedding": weight, "head": weight}, "optimizer": {"exp_avg/embedding": moment}}
    memory = HostCopy()
    memory.reserve(tensors)
    memory.reserving.join()
    reserved = {key: value.data_ptr() for key, value in memory.memory.items()}
    assert sorted(reserved) == [("model", "embedding"), ("optimizer", "exp_avg/embedding")]
    for _ in range(2):
        weight += 1
        copies = memory.take(tensors)
        assert {key: value.data_ptr() for key, value in memory.memory.items()} == reserved
        assert copies["model"]["head"] is copies["model"]["embedding"]
        assert copies["model"]["head"].is_pinned()
        assert torch.equal(copies["model"]["head"], weight.cpu())
        assert torch.equal(copies["optimizer"]["exp_avg/embedding"], moment.cpu())


def test_a_non_finite_update_is_skipped_on_the_device():
    """The fused kernel reads the flag itself: weights and moments stay, and the host has not waited."""
    weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.AdamW([{"params": [weight], "lr_factor": 1.0}], lr=0.1, fused=True)
    accelerator = SimpleNamespace(
        scaler=None,
        mixed_precision="no",
        device=weight.device,
        parallelism_config=None,
        process_index=0,
        num_processes=1,
    )
    backend = Backend(accelerator, RunConfig())
    backend.parameters = {"weight": weight}
    for value, skipped in ((1.0, False), (float("nan"), True), (1.0, False)):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, value)
        _, flag = train.optimizer_step(backend, torch.nn.Module(), optimizer, 0.1, 1.0)
        assert bool(flag) == skipped
        assert torch.equal(before, weight.detach()) == skipped


def test_exact_sums_repeat(recipe, tmp_path):
    """One GPU can compare a process with itself; other numbers of processes: tests/conformance/test_exact_sums.py."""
    runs = [launched(tmp_path / name, recipe(exact_sums=True), "bf16") for name in ("one", "two")]
    assert kit.same(runs[0].weights, runs[1].weights)
    assert kit.timeless(runs[0].folder) == kit.timeless(runs[1].folder)
