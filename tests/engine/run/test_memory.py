"""What fits where: the arithmetic gives the bytes that two ranks really hold."""

import pytest

from engine.config.run_config import RunConfig
from engine.distributed.sharded_tensors import local_part
from engine.run.memory import count_parameters, resting_bytes
from tests.helpers import alive, kit

pytestmark = pytest.mark.cluster


def _bytes_at_the_end(argv):
    """Train a step; return what this rank has in memory at its end."""
    import train

    sizes, optimizer_step = {}, train.optimizer_step

    def measured_step(backend, module, optimizer, *rest):
        tensors = {"weights": list(module.parameters()), "gradients": [p.grad for p in module.parameters()]}
        result = optimizer_step(backend, module, optimizer, *rest)
        tensors["optimizer"] = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
        tensors["gradients"] += backend.sums.flat.values() if backend.sums else []
        sizes.update({name: sum(local_part(tensor).nbytes for tensor in each) for name, each in tensors.items()})
        return result

    train.optimizer_step = measured_step
    train.main([str(word) for word in argv])
    return sizes


@pytest.mark.parametrize("exact_sums", [False, True])
def test_arithmetic_gives_what_two_ranks_hold(files, tmp_path, exact_sums):
    """Under FSDP2; exact sums under DDP."""
    fields = {"model_config": files / "llama.yaml", "train_file": files / "train.jsonl", "max_steps": 1}
    fields |= {"global_batch_size": 8, "per_device_batch_size": 2, "max_length": 64}
    fields |= {"exact_sums": exact_sums}
    argv = kit.flags(**fields, output_dir=tmp_path / "run")
    env = None if exact_sums else kit.where("fsdp2", 2, mixed_precision="no")
    ranks = kit.spawn(2, _bytes_at_the_end, argv, out=tmp_path / "out", env=env)
    task, _ = kit.open_data(**fields)
    sizes = count_parameters(task.build(empty=True))
    shards, mutant = (1, 2) if exact_sums else (2, 1)
    assert ranks == [resting_bytes(RunConfig(exact_sums=exact_sums), *sizes, shards)] * 2
    assert ranks[0] != resting_bytes(RunConfig(), *sizes, mutant)


def test_plan_says_what_a_run_has(files, tmp_path):
    model = kit.write_yaml(tmp_path / "llama.yaml", kit.LLAMA | {"hidden_size": 128, "intermediate_size": 256})
    fields = {"model_config": model, "train_file": files / "train.jsonl", "max_steps": 5, "save_steps": 2}
    fields |= {"global_batch_size": 2, "per_device_batch_size": 2, "save_total_limit": 9}
    for name, (planned, had) in alive.measure(tmp_path, kit.flags(**fields)).items():
        assert planned == pytest.approx(had, rel=0.1), name
