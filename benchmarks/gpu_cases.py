"""The cases of benchmarks/gpu.py: models, rows and how they are trained."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; `against` names the case that ours is compared with."""

    model: dict
    longest: int
    micro_batch: int
    global_batch: int
    steps: int
    warmup: int = 5  # steps before the clock starts, a multiple of `turn`: compilation, allocation
    ragged: bool = False
    lora: bool = False
    recompute: bool = True  # activations, with LoRA: gradient checkpointing
    compile: bool = True
    whole_graph: bool = False  # train.py compiles the model below the head as one graph, not layer by layer
    flags: dict = field(default_factory=dict)  # of train.py alone
    environment: dict = field(default_factory=dict)  # of every program
    programs: tuple[str, ...] = ("ours", "plain", "trainer")
    against: str = ""
    only_if_named: bool = False  # a case that changes one thing, to find where time goes
    on_cpu: bool = False  # and in float32
    turn: int = 5  # steps that a program trains while the others wait
    workers: int = 2  # processes that read rows for the plain loop and the Trainer


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
SMALL = llama(512, 64, 128, 2, 4, 4)


PEERS = ("ours", "plain", "trainer", "trainer_liger")
RAGGED_PEERS = ("ours", "plain", "trainer", "trainer_rebalance")
FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"}  # as accelerate_configs/gpu_fp8.yaml


def packed(**flags: str) -> Case:
    flags = {"packing": "true"} | flags
    return Case(M124, 1024, 32, 128, 20, ragged=True, flags=flags, programs=("ours",), against="124m")


RAGGED = Case(llama(49152, 960, 2560, 32, 15, 5), 2048, 8, 64, 25, ragged=True, compile=False)


def ragged(**changes) -> Case:
    """Return the ragged case with one change, to find what it waits for."""
    return replace(RAGGED, programs=("ours",), against="ragged", only_if_named=True, **changes)


EQUAL = Case(M124, 1024, 32, 128, 20, programs=PEERS)


def equal(inductor: str = "", **changes) -> Case:
    """Return the case 124m with one change: an option of torch's compiler, by the end of its environment variable."""
    environment = {f"TORCHINDUCTOR_{inductor}": "1"} if inductor else {}
    changes = {"environment": environment} | changes
    return replace(EQUAL, programs=("ours",), against="124m", only_if_named=True, **changes)


B1 = Case(llama(128256, 2048, 8192, 16, 32, 8), 4096, 2, 8, 20, programs=PEERS)
B8 = Case(llama(128256, 4096, 14336, 32, 32, 8, False), 4096, 4, 4, 15, lora=True)


CASES = {
    "124m": EQUAL,
    "124m_autotune": equal("MAX_AUTOTUNE"),
    "124m_descent": equal("COORDINATE_DESCENT_TUNING"),
    "124m_whole": equal(whole_graph=True),
    "1b": B1,
    "1b_fp8": replace(B1, environment=FP8, programs=("ours",), against="1b"),
    "ragged": replace(RAGGED, programs=(*RAGGED_PEERS, "trainer_liger")),
    "ragged_cudnn": ragged(flags={"pad_to_multiple_of": 1}),  # the same rows; attention as torch chooses it
    "ragged_fixed_segments": ragged(environment={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
    "ragged_padded": ragged(flags={"pad_to_multiple_of": 64}),
    "ragged_compiled": ragged(compile=True),
    "ragged_tokens": ragged(flags={"per_device_batch_tokens": 16384}),
    "packed": packed(),
    "packed_sdpa": packed(attn_implementation="sdpa"),  # with a mask
    "packed_flex": packed(attn_implementation="flex_attention"),
    "cpu_equal": Case(M12, 128, 8, 32, 20, compile=False, on_cpu=True),
    "cpu_ragged": Case(M12, 512, 8, 64, 10, ragged=True, compile=False, on_cpu=True, programs=RAGGED_PEERS),
    "cpu_short": Case(SMALL, 64, 8, 8, 2100, warmup=100, compile=False, on_cpu=True, turn=100, workers=0),
    "8b_lora": B8,
    "8b_lora_kept": replace(B8, recompute=False),  # activations are kept: about 87 GiB
    "8b_lora_kept_2": replace(B8, recompute=False, micro_batch=2),
    "8b_lora_fp8": replace(B8, environment=FP8, programs=("ours",), against="8b_lora"),
}


def tiny(case: Case) -> Case:
    """Return the case in a size for a CPU."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}
    model = case.model | heads | {"num_hidden_layers": 2, "vocab_size": 512}
    size = {"longest": 64, "micro_batch": 2, "global_batch": 4, "steps": 20, "warmup": 10, "turn": 5}
    programs = tuple(name for name in case.programs if name != "trainer_liger")  # its kernels need a GPU
    return replace(case, model=model, compile=False, programs=programs, **size)
