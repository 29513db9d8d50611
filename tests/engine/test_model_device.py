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


def test_on_a_cpu_engines_that_share_the_memory_have_no_more_room_than_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 << 20))
    alone = default_kv_tokens(CPU, 1024, 0, 1 << 20, 0)
    assert alone == 2048
    assert default_kv_tokens(CPU, 1024, 0, 1 << 20, 0, share=1 / 4) == alone // 4
    with pytest.raises(ValueError, match=r"no memory is left in --memory-share 0\.0001"):
        default_kv_tokens(CPU, 1024, 0, 1 << 20, 0, share=0.0001)


@pytest.mark.parametrize("num_engines", [2, 3])
@pytest.mark.parametrize("weights", [1_000_000, 20_000_000])
@pytest.mark.parametrize("in_turn", [True, False], ids=["one after the other", "weights of all first"])
def test_on_a_gpu_engines_that_share_it_all_fit_in_whatever_order_they_load(
    num_engines: int, weights: int, in_turn: bool, monkeypatch: pytest.MonkeyPatch
):
    total = 80_000_000
    used = 0 if in_turn else num_engines * weights
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - used, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: weights)
    caches = []
    for _ in range(num_engines):
        used += weights if in_turn else 0
        caches.append(default_kv_tokens(CUDA, 1000, 0, 1 << 20, 0, share=1 / num_engines))
        used += 1000 * caches[-1]
    assert used <= total
    assert len(set(caches)) == 1, "an equal part for each"
    assert caches[0] == (total // num_engines - weights) * 9 // 10 // 1000
