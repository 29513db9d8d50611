"""Where and in which numbers a model runs, and how much KV memory is there: the meaning of `auto`.

Owns the rules and their refusals; allocates nothing and changes no torch setting. Called by `engine.model_executor`.
"""

from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

_CPU_KV_TOKENS = 8192  # on a CPU, unless a longest sequence asks for more: 377 MB for the embedded model in float32
_CPU_MEMORY_SHARE = 0.5  # of what is available
_CUDA_MEMORY_SHARE = 0.9  # of what is free once the weights are there
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` to a device. Raises ValueError where there is no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device that torch can use")
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device {name!r} is not known; auto, cpu and cuda are")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 on CUDA and on CPUs that multiply it natively: elsewhere bf16 is several times slower than fp32."""
    if name == "auto":
        is_fast = device.type == "cuda" or cpu_multiplies_bf16()
        return torch.bfloat16 if is_fast else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"--dtype {name!r} is not known; auto, fp32 and bf16 are")
    return _DTYPES[name]


def cpu_multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """The CPU has AVX-512 BF16 or AMX BF16; False where the system does not say."""
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def default_kv_tokens(
    device: torch.device,
    bytes_per_token: int,
    wanted_tokens: int,
    most_tokens: int,
    step_bytes: int,
    share: float = 1.0,
) -> int:
    """Tokens of KV cache where the user does not say.

    `wanted_tokens`: the longest sequence the user asked for, or 0. `most_tokens`: what could ever be used. `step_bytes`:
    memory a step needs besides. `share`: the part of the memory that is this engine's. Raises ValueError when not even one
    token fits.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Of a part the weights that are loaded are taken off: engines that load one after the other all find theirs.
        own = int(total * share) - torch.cuda.memory_reserved(device)
        room = int(min(free, own) * _CUDA_MEMORY_SHARE) - step_bytes
        tokens = min(most_tokens, room // bytes_per_token)
    else:
        room = int(psutil.virtual_memory().available * _CPU_MEMORY_SHARE * share)
        tokens = min(most_tokens, max(_CPU_KV_TOKENS, wanted_tokens), room // bytes_per_token)
    if tokens < 1:
        part = "" if share == 1 else f" in --memory-share {share:g}"
        raise ValueError(
            f"--kv-cache-tokens: no memory is left{part} for a KV cache of {bytes_per_token} bytes per token"
        )
    return tokens
