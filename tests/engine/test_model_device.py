"""What `auto` means: dtype by what the processor multiplies, KV memory by what is there."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from engine.model.device import choose_dtype, cpu_multiplies_bf16, default_kv_tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fma avx2", False), ("avx512f avx512_bf16", True), ("amx_bf16 amx_tile", True), ("avx512_bf16x", False)],
)
def test_auto_is_bf16_only_where_the_cpu_multiplies_it(tmp_path: Path, flags: str, expected: bool):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nmodel name : X\nflags\t\t: {flags}\n", encoding="ascii")
    assert cpu_multiplies_bf16(cpuinfo) is expected
    assert cpu_multiplies_bf16(tmp_path / "absent") is False


def test_dtypes_are_chosen_by_name_and_cuda_defaults_to_bf16():
    assert choose_dtype("fp32", CUDA) == torch.float32
    assert choose_dtype("bf16", CPU) == torch.bfloat16
    assert choose_dtype("auto", CUDA) == torch.bfloat16


def test_a_cpu_gets_8192_tokens_more_for_a_longer_sequence_and_less_for_little_memory(monkeypatch: pytest.MonkeyPatch):
    available = SimpleNamespace(available=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    assert default_kv_tokens(CPU, 1024, 0, 1 << 20, 0) == 8192
    assert default_kv_tokens(CPU, 1024, 20_000, 1 << 20, 0) == 20_000
    assert default_kv_tokens(CPU, 1024, 0, 3000, 0) == 3000  # no more than could ever be used
    available.available = 2 << 20
    assert default_kv_tokens(CPU, 1024, 0, 1 << 20, 0) == 1024
    available.available = 100
    with pytest.raises(ValueError, match="--kv-cache-tokens"):
        default_kv_tokens(CPU, 1024, 0, 1 << 20, 0)


def test_cuda_gets_nine_tenths_of_what_is_free_less_a_steps_own_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000_000, 80_000_000))
    assert default_kv_tokens(CUDA, 1000, 0, 1 << 20, 1_000_000) == 8000
    with pytest.raises(ValueError, match="no memory"):
        default_kv_tokens(CUDA, 1000, 0, 1 << 20, 9_000_000)
