"""`EngineConfig`: the settings of an engine's core; see `python -m services.engine --help`."""

from dataclasses import dataclass

from services.common.config.settings import setting
from services.engine.contract.memory_size import bad_size

DTYPES = ("float32", "bfloat16", "float16", "int8")
POLICIES = ("fcfs", "priority", "shortest_prefill", "tenant_fair")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the core: model, numerics, memory and scheduling."""

    model: str = setting("", "a folder in Hugging Face layout, a .gguf file, or a known name")
    served_name: str = setting("", "name that requests use; default: derived from the model")
    dtype: str = setting("float32", "number format of weights and products", choices=DTYPES)
    device: str = setting("auto", "where to run", choices=("auto", "cpu", "cuda"))
    threads: int = setting(
        0, "threads of one product; 0 is all cores, shared by ranks", low=0, high=1024
    )
    deterministic: bool = setting(
        False,
        "the same tokens for any batch, chunking, cache state or engine, at some cost in speed",
    )
    max_model_len: int = setting(
        0, "longest prompt plus output; 0 is what the model allows", unit="tokens", low=0
    )
    kernels: str = setting(
        "auto",
        "auto: rounds of llama, mistral, qwen2, qwen3 and qwen3_moe are compiled for this CPU "
        "where possible; "
        "torch: always torch's operators",
        choices=("auto", "torch"),
    )
    kv_dtype: str = setting(
        "auto",
        "number format of keys and values; auto: that of activations, and bfloat16 in compiled "
        "rounds with dtype=bfloat16; bfloat16: with dtype=int8 in compiled rounds, half the memory "
        "for keys and values at another numerics_id",
        choices=("auto", "bfloat16"),
    )
    block_size: int = setting(32, "positions in one block", unit="tokens", low=1, high=1024)
    kv_memory: str = setting(
        "0.5",
        "memory for blocks: a fraction of the free memory (0.9) or a size (2GiB)",
        check=bad_size,
    )
    num_blocks: int = setting(0, "number of blocks; 0 computes it from kv_memory", low=0)
    state_slots: int = setting(
        0,
        "slots of fixed-size state, for models that have it: one per running sequence, the others "
        "hold snapshots; 0 is twice max_num_seqs (once without prefix_cache), but at most half of "
        "kv_memory and at least one",
        low=0,
    )
    bounded_replay: bool = setting(
        False,
        "a cached prefix restarts by computing its last window again, not from a snapshot: less "
        "memory, slightly other logits; for deepseek_v41, not with deterministic",
    )
    max_num_seqs: int = setting(64, "sequences running at once", low=1, high=4096)
    max_num_batched_tokens: int = setting(
        512, "positions computed in one round, all sequences together", unit="tokens", low=1
    )
    max_waiting: int = setting(256, "most waiting requests; further ones are refused", low=0)
    policy: str = setting("fcfs", "order of admission", choices=POLICIES)
    prefix_cache: bool = setting(True, "reuse the blocks of equal prefixes")
    tensor_parallel: int = setting(
        1, "ranks (processes of this engine) that split the layers of a dense model", low=1, high=64
    )
    expert_parallel: int = setting(
        1, "ranks (processes of this engine) that split the experts of a model", low=1, high=64
    )
    redundant_experts: int = setting(
        0, "expert slots of each layer beyond one per expert, all ranks together", low=0, high=4096
    )
    expert_load_window: int = setting(
        100, "rounds over which tokens per expert are counted", low=1, high=100_000
    )
    mtp: bool = setting(
        True,
        "keep the layers that draft tokens (MTP) of DeepSeek V3, V4 and GLM 4.5 in memory for "
        "speculation, which is not served yet; never kept with expert_parallel above 1",
    )
    grammar_timeout_s: float = setting(
        8.0, "longest compilation of a constraint", unit="s", low=0.1, high=600.0
    )
    grammar_memory_mib: int = setting(
        1024, "memory limit of one compilation", unit="MiB", low=64, high=1 << 20
    )
    warm_grammars: bool = setting(
        False,
        "start the compiler of constraints with the engine and keep it (about 300 MiB); otherwise "
        "the first structured answer, and one resumed here, waits seconds for it",
    )
    keep_weights: bool = setting(
        True,
        "keep packed weights in the user's cache folder, so that the next start reads them instead "
        "of packing them anew; compiled rounds only",
    )
    simulate: str = setting(
        "",
        "run arithmetic instead of a model, for tests and load simulation: comma list of "
        "vocab_size=512, max_model_len=2048, eos=0, forward_ms=0, token_us=0, window=0, "
        "state_boundary=0; or 'yes'",
    )
