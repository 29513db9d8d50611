"""Tiny UNO adapters in PEFT's published layout, random or fitted to a tiny target so that some drafts are right.

Owns their tensors and adapter_config.json; never touches a network. `write_uno` is the entry, `fitted_uno` is what tests
of the whole engine draft with: a random adapter would be right once in the vocabulary, and equal answers would prove
little. Fitting is least squares: what the last feed-forward layer must add on a noise row so that the row ends where the
target's own row does.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.noise import Purpose, uniforms
from engine.speculation.budget import uses_any
from engine.speculation.uno_recipe import UNSUPPORTED_SAMPLING
from tests.tiny_drafters import ridge
from tests.uno_reference import MODULES, DenseTarget

Adapter = dict[str, tuple[torch.Tensor, torch.Tensor]]  # `layers.0.mlp.up_proj` -> (A [r, in], B [out, r])

RANK, ALPHA = 64, 128.0
ALL = tuple(name for names in MODULES.values() for name in names)
NUM_LEARNT = 5  # places at the beginning of an answer
NUM_FITTED = 1  # noise rows behind each place of an answer
PREFIX = "base_model.model.model."


def fitted_uno(directory: Path, target: Path) -> Path:
    return write_uno(directory, target, fitted_adapter(target))


def write_uno(
    directory: Path, target: Path, adapter: Adapter | None = None, *, seed: int = 0, prefix: str = PREFIX, **config: Any
) -> Path:
    """The adapter, or a random one, as PEFT writes it; `config` replaces or adds keys of adapter_config.json."""
    adapter = random_adapter(target, seed) if adapter is None else adapter
    stored = {
        f"{prefix}{name}.lora_{factor}.weight": tensor.float().contiguous()
        for name, pair in adapter.items()
        for factor, tensor in zip("AB", pair, strict=True)
    }
    return write_adapter(directory, adapter_config(adapter, **config), stored)


def write_adapter(directory: Path, config: Mapping[str, Any], stored: Mapping[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(stored), str(directory / "adapter_model.safetensors"), metadata={"format": "pt"})
    return directory


def adapter_config(adapter: Adapter, **config: Any) -> dict[str, Any]:
    modules = {name.rsplit(".", 1)[1] for name in adapter}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "example/tiny",
        "r": next(iter(adapter.values()))[0].shape[0],
        "lora_alpha": ALPHA,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": sorted(modules),
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
        **config,
    }


def random_adapter(
    target: Path, seed: int = 0, modules: Sequence[str] = ALL, rank: int = RANK, strength: float = 0.7
) -> Adapter:
    """Strong enough that no draft is as without it."""
    dense = DenseTarget(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    adapter: Adapter = {}
    for layer in range(dense.config["num_hidden_layers"]):
        for part, names in MODULES.items():
            for name in (name for name in names if name in modules):
                full = f"layers.{layer}.{part}.{name}"
                out, width = dense.weights[f"{full}.weight"].shape
                a = torch.randn(rank, width, generator=generator) / width**0.5
                b = torch.randn(out, rank, generator=generator) * strength / rank**0.5 * rank / ALPHA
                adapter[full] = (a, b)
    return adapter


def fitted_adapter(target: Path) -> Adapter:
    """Random and weak everywhere but in the last feed-forward layer, which is fitted to the traffic of `tests.lossless`.

    With the very noise that its requests draw: what a random target of two layers says two tokens ahead follows from nothing
    that a row of noise sees (5 % of guesses were right on other text), so it is learnt by heart.
    """
    adapter = random_adapter(target, seed=4, strength=0.02)
    dense = DenseTarget(target, adapter, ALPHA / RANK, torch.float32)
    last = f"layers.{dense.config['num_hidden_layers'] - 1}.mlp.down_proj"
    del dense.adapter[last]
    read, missing = zip(*(_examples(dense, text) for text in _texts(target)), strict=True)
    update = ridge(torch.cat(read), torch.cat(missing), strength=0.1).T  # [h, in]
    left, sizes, right = torch.linalg.svd(update, full_matrices=False)
    adapter[last] = (right[:RANK], left[:, :RANK] * sizes[:RANK] * RANK / ALPHA)
    return adapter


@dataclass(frozen=True)
class _Text:
    seed: int
    token_ids: tuple[int, ...]  # a prompt and its plain answer
    anchors: range  # last committed tokens behind which noise is learnt


def _texts(target: Path) -> list[_Text]:
    """Of every request for which UNO drafts: the beginning of its answer, and all of it where few drafts are asked for."""
    from tests.lossless import SCENARIOS, Plain, alone  # which imports what gives every test its drafters

    plain = Plain(target)
    texts = []
    for name, build in SCENARIOS.items():
        for one in build(plain).submits:
            if one.sampling.max_tokens >= 4 and not uses_any(one.sampling, UNSUPPORTED_SAMPLING):
                first, answer = len(one.prompt_token_ids), plain.answer(alone(one, 0)).token_ids
                count = len(answer) if name in ("cramped", "chunked") else NUM_LEARNT
                anchors = range(first, min(first + count, first + len(answer) - NUM_FITTED))
                texts.append(_Text(one.sampling.seed or 0, (*one.prompt_token_ids, *answer), anchors))
    return texts


def _examples(dense: DenseTarget, text: _Text) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the noise behind every place of an answer: what the last down_proj reads, and what it should add."""
    size, vocab_size, anchors = len(text.token_ids), dense.config["vocab_size"], text.anchors
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    total = size + len(anchors) * NUM_FITTED
    visible = torch.zeros(total, total, dtype=torch.bool)
    visible[:size, :size] = causal
    places: list[int] = []
    for number, anchor in enumerate(anchors):
        first = size + number * NUM_FITTED
        visible[first : first + NUM_FITTED, : anchor + 1] = True
        visible[first : first + NUM_FITTED, first : first + NUM_FITTED] = causal[:NUM_FITTED, :NUM_FITTED]
        places += range(anchor + 1, anchor + 1 + NUM_FITTED)
    noise = (uniforms(torch.tensor(text.seed), torch.tensor(places), Purpose.NOISE) * vocab_size).long().tolist()
    hidden, read = dense.hidden(
        [*text.token_ids, *noise], [*range(size), *places], visible, torch.arange(total) >= size
    )
    return read[size:], hidden[torch.tensor(places)] - hidden[size:]  # where the true text ends at the same places
