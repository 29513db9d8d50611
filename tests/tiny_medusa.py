"""Tiny Medusa checkpoints in every published layout, random or fitted to a tiny target so that some drafts are right.

Owns their tensors and config.json, and the heads' arithmetic in float64, written from the paper (arXiv 2401.10774) and
sharing no code with the engine; never touches a network. `write_medusa` is the entry; `fitted_medusa` is what tests of
the whole engine draft with. Fitting is least squares over text the target wrote: a random head would be right once in the
vocabulary, and equal answers would prove little.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from engine.model.decoder import DecoderModel
from engine.model.layers import rms_norm
from tests.tiny import Family, write_tiny_model
from tests.tiny_drafters import ridge, taps_of, target_model, target_texts

Weights = dict[str, torch.Tensor]
Teacher = Callable[[DecoderModel, "TinyHeads"], None]  # changes the outputs

NUM_HEADS = 4


@dataclass(frozen=True)
class PublishedMedusa:
    """What a publisher decided."""

    layout: Literal["fasterdecoding", "vllm"] = "fasterdecoding"
    num_heads: int = NUM_HEADS
    num_blocks: int = 1
    has_bias: bool = True
    draft_vocab_size: int | None = None  # None: the target's, and no map; D of vLLM's truncated vocabularies
    full_outputs: bool = False  # outputs keep the target's whole vocabulary beside a map
    output: Literal["own", "shared", "target"] = "own"  # of every head; one for all; the target's own
    prefix: str = ""
    pickled: bool = False


FITTED_MEDUSA = PublishedMedusa()


def fitted_medusa(directory: Path, target: Path) -> Path:
    return write_medusa(directory, target, FITTED_MEDUSA, teach=fit_text)


def write_medusa(
    directory: Path, target: Path, published: PublishedMedusa, *, seed: int = 0, teach: Teacher | None = None
) -> Path:
    """Heads for the Hugging Face directory `target`; random ones unless somebody teaches them."""
    model = target_model(target)
    heads = random_heads(model, published, seed)
    if teach is not None:
        teach(model, heads)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(medusa_config(model, published)))
    stored = named(heads, published)
    if published.pickled:
        torch.save(stored, directory / "medusa_lm_head.pt")
    else:
        save_file(stored, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def medusa_config(model: DecoderModel, published: PublishedMedusa) -> dict[str, Any]:
    """config.json as the layout's publishers write it; FasterDecoding's names two heads whatever there is."""
    if published.layout == "fasterdecoding":
        return {
            "base_model_name_or_path": "example/tiny",
            "medusa_num_heads": 2,
            "medusa_num_layers": published.num_blocks,
        }
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": model.arch.hidden_size,
        "vocab_size": model.arch.vocab_size,
        "truncated_vocab_size": published.draft_vocab_size or model.arch.vocab_size,
        "num_heads": published.num_heads,
        "num_hidden_layers": published.num_blocks,
        "medusa_fc_bias": published.has_bias,
        "original_lm_head": published.output != "own",
    }


@dataclass
class TinyHeads:
    """Heads by their meaning. Lists run over heads, then over blocks."""

    weights: list[list[torch.Tensor]]  # [h, h]
    biases: list[list[torch.Tensor]]  # [h]; empty lists without biases
    outputs: list[torch.Tensor]  # [D or V, h]
    token_map: torch.Tensor | None  # int64 [D], in no order

    def hidden(self, read: torch.Tensor, head: int) -> torch.Tensor:
        """Float64 [n, h], what a head's output reads, from what the target's own output reads [n, h]."""
        x = read.to(torch.float64)
        for block, weight in enumerate(self.weights[head]):
            y = x @ weight.to(torch.float64).T
            if self.biases[head]:
                y = y + self.biases[head][block].to(torch.float64)
            x = x + y / (1 + (-y).exp())
        return x

    def logits(self, read: torch.Tensor, head: int, vocab_size: int) -> torch.Tensor:
        """Float64 [n, V] from what the target's own output reads [n, h]; -inf for tokens the heads do not know."""
        logits = self.hidden(read, head) @ self.outputs[head].to(torch.float64).T
        if self.token_map is None:
            return logits
        known = logits[:, self.token_map] if logits.shape[1] == vocab_size else logits
        every = torch.full((len(logits), vocab_size), -torch.inf, dtype=torch.float64)
        for column, token in enumerate(self.token_map.tolist()):
            every[:, token] = known[:, column]
        return every


def random_heads(model: DecoderModel, published: PublishedMedusa, seed: int) -> TinyHeads:
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab_size = model.arch.hidden_size, model.arch.vocab_size

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    per_head = range(published.num_heads), range(published.num_blocks)
    weights = [[draw(hidden, hidden, scale=0.7 / math.sqrt(hidden)) for _ in per_head[1]] for _ in per_head[0]]
    biases = [[draw(hidden, scale=0.3) for _ in per_head[1]] if published.has_bias else [] for _ in per_head[0]]
    token_map = None
    if published.draft_vocab_size is not None:
        token_map = torch.randperm(vocab_size, generator=generator)[: published.draft_vocab_size]
    rows = vocab_size if published.full_outputs else published.draft_vocab_size or vocab_size
    outputs = [draw(rows, hidden, scale=0.4) for _ in per_head[0]]
    if published.output == "shared":
        outputs = [outputs[0]] * published.num_heads
    elif published.output == "target":
        outputs = [model.weights.output] * published.num_heads
    return TinyHeads(weights, biases, outputs, token_map)


def named(heads: TinyHeads, published: PublishedMedusa) -> Weights:
    """The checkpoint's tensors under the names of its layout."""
    is_vllm, num_blocks = published.layout == "vllm", published.num_blocks
    stored: Weights = {}
    for head in range(published.num_heads):
        for block in range(num_blocks):
            linear = f"blocks.{head}.layers.{block}" if is_vllm else f"{head}.{block}.linear"
            stored[f"{linear}.weight"] = heads.weights[head][block]
            if published.has_bias:
                stored[f"{linear}.bias"] = heads.biases[head][block]
        if published.output == "own":
            stored[f"lm_heads.{head}.weight" if is_vllm else f"{head}.{num_blocks}.weight"] = heads.outputs[head]
    if published.output == "shared":
        stored["lm_head.weight"] = heads.outputs[0]
    if heads.token_map is not None:
        stored["token_map"] = heads.token_map
    return {f"{published.prefix}{name}": tensor.contiguous() for name, tensor in stored.items()}


def read_by_heads(model: DecoderModel, token_ids: torch.Tensor) -> torch.Tensor:
    """[B, L, h]: what the target's own output reads at every position of B texts of L tokens."""
    states = taps_of(model, token_ids, (model.arch.num_layers,))[:, :, 0]
    return rms_norm(states, model.weights.final_norm, model.arch.norm_eps)


def fit_text(model: DecoderModel, heads: TinyHeads) -> None:
    """Head i's output, so that behind position p it says what the target's own output says behind p + 1 + i."""
    read = read_by_heads(model, target_texts(model, 60, 44))
    output = model.weights.output.to(torch.float64)
    for head in range(len(heads.outputs)):
        ahead = 1 + head
        x = heads.hidden(read[:, :-ahead].flatten(0, 1), head)
        wanted = read[:, ahead:].flatten(0, 1).to(torch.float64)
        heads.outputs[head] = (output @ ridge(x, wanted).T).float()


def teach_succession(model: DecoderModel, heads: TinyHeads) -> None:
    """Each head's output, to a target of `write_predictable_model`: behind which tokens each token follows."""
    tokens = torch.arange(model.arch.vocab_size)
    read = read_by_heads(model, tokens[:, None])[:, 0]
    follower = (read @ model.weights.output.T).argmax(dim=1)
    said = follower
    for head in range(len(heads.outputs)):
        said = follower[said]  # head 0 says what comes two places behind
        heads.outputs[head] = _classifier(heads.hidden(read, head).float(), said, len(tokens))


def _classifier(inputs: torch.Tensor, labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """[num_labels, inputs' width]: logistic regression by gradient descent."""
    output = torch.zeros(num_labels, inputs.shape[1])
    is_said = torch.nn.functional.one_hot(labels, num_labels).float()
    for _ in range(60):
        output += 0.3 * (is_said - (inputs @ output.T).softmax(dim=1)).T @ inputs
    return output


def write_predictable_model(directory: Path, family: Family = "llama", strength: float = 0.01) -> Path:
    """A tiny target whose next token depends on the newest one above all: its layers' outputs times `strength`.

    Two tokens ahead is then a matter of the state that was seen, as it is for text, and not chaos.
    """
    write_tiny_model(directory, family, seed=5)
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= strength
    save_file(weights, str(path), metadata={"format": "pt"})
    return directory
