"""What a published Medusa checkpoint holds: one table of the names that publishers give its tensors.

Owns recognising a layout from tensor names, counting heads and blocks, and the check of every shape before a weight is
read; never loads one. Called by `medusa_recipe`. Of config.json only what tensors cannot say is believed: FasterDecoding's
own files name two heads and hold five. h = target's width, V = its vocabulary, D = the heads' vocabulary (D <= V).
Sources: FasterDecoding/Medusa and vLLM as published; their names, none of their code.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.speculation.drafter_tensors import DrafterTensors

logger = logging.getLogger(__name__)

MAX_HEADS = 64  # a draft is never longer
MAX_BLOCKS = 16
TOKEN_MAP = "token_map"


@dataclass(frozen=True)
class MedusaLayout:
    """One publisher's names. {head} and {block} count from 0, {blocks} is how many blocks a head has."""

    name: str
    prefix: str  # of every tensor
    linear: str  # of one block; with .weight, and .bias where it has one
    output: str
    shared_outputs: tuple[str, ...]  # the one output of all heads where config.json says original_lm_head
    count_keys: tuple[str, str]  # of config.json: heads, blocks per head


_FASTER_KEYS = ("medusa_num_heads", "medusa_num_layers")
_VLLM_KEYS = ("num_heads", "num_hidden_layers")
_FASTER = ("{head}.{block}.linear", "{head}.{blocks}.weight", (), _FASTER_KEYS)
_VLLM = ("blocks.{head}.layers.{block}", "lm_heads.{head}.weight", ("lm_head.weight", "lm_heads.0.weight"), _VLLM_KEYS)
# A checkpoint has the first layout of which it has the first block's weight.
LAYOUTS = (
    MedusaLayout("fasterdecoding", "", *_FASTER),
    MedusaLayout("fasterdecoding", "medusa_head.", *_FASTER),
    MedusaLayout("vllm", "", *_VLLM),
    MedusaLayout("vllm", "medusa_heads.", *_VLLM),
)


@dataclass(frozen=True)
class MedusaShape:
    """What the tensors and config.json agree on."""

    layout: MedusaLayout
    width: int  # h
    vocab_size: int  # V
    draft_vocab_size: int  # D
    num_heads: int
    num_blocks: int  # per head
    has_bias: bool
    has_map: bool
    shared_output: str | None  # the stored tensor all heads end in
    own_outputs: bool  # every head has an output of its own; else all end in `shared_output` or in the target's

    def linear(self, head: int, block: int) -> str:
        """Name of a block's product, without .weight."""
        return self.layout.prefix + self.layout.linear.format(head=head, block=block)

    def output(self, head: int) -> str | None:
        """Name of the tensor a head ends in; None: the target's own output."""
        if not self.own_outputs:
            return self.shared_output
        return self.layout.prefix + self.layout.output.format(head=head, blocks=self.num_blocks)

    @property
    def token_map(self) -> str:
        return self.layout.prefix + TOKEN_MAP

    def __str__(self) -> str:
        outputs = "own" if self.own_outputs else "one of its own" if self.shared_output else "the target's"
        return (
            f"layout={self.layout.name} heads={self.num_heads} blocks={self.num_blocks} "
            f"bias={str(self.has_bias).lower()} output={outputs!r} vocabulary={self.draft_vocab_size} of {self.vocab_size}"
        )


def read_shape(config: Mapping[str, object], tensors: DrafterTensors, width: int, vocab_size: int) -> MedusaShape:
    """The checkpoint's shape for a target of that width and vocabulary, every tensor checked.

    Raises `ModelFilesError` naming file and tensor, or the key of config.json.
    """
    layout = _recognise(tensors)
    num_heads, num_blocks = _counts(layout, config, tensors)
    flags = _Config(config, tensors)
    _refuse_scale(config, tensors)
    is_shared = flags.flag("original_lm_head") is True
    shared = [layout.prefix + name for name in layout.shared_outputs if layout.prefix + name in tensors]
    shape = MedusaShape(
        layout=layout,
        width=width,
        vocab_size=vocab_size,
        draft_vocab_size=_draft_vocab_size(flags, tensors, layout, vocab_size),
        num_heads=num_heads,
        num_blocks=num_blocks,
        has_bias=_has_bias(flags, tensors, layout),
        has_map=layout.prefix + TOKEN_MAP in tensors,
        shared_output=shared[0] if is_shared and shared else None,
        own_outputs=not is_shared,
    )
    tensors.check(_expected(shape, tensors), frozenset(), f"a Medusa drafter of {num_heads} heads")
    read_token_map(tensors, shape)
    return shape


def read_token_map(tensors: DrafterTensors, shape: MedusaShape) -> torch.Tensor | None:
    """int64 [D]: the target's token for each of the heads', in any order; None when they are the same tokens."""
    if not shape.has_map:
        return None
    stored = tensors.read(shape.token_map)
    if stored.dtype not in (torch.int64, torch.int32):
        raise tensors.refusal(f"the tensor {shape.token_map} is stored as {stored.dtype}; whole numbers are needed")
    token_ids = stored.to(torch.int64)
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= shape.vocab_size:
        raise tensors.refusal(f"the tensor {shape.token_map} leaves the target's {shape.vocab_size} tokens")
    if len(set(token_ids.tolist())) < len(token_ids):
        raise tensors.refusal(f"the tensor {shape.token_map} names a token twice")
    if shape.draft_vocab_size < shape.vocab_size:
        return token_ids
    if not torch.equal(token_ids, torch.arange(shape.vocab_size)):
        raise tensors.refusal(f"the tensor {shape.token_map} reorders the target's tokens, which nobody else reads so")
    return None


def _recognise(tensors: DrafterTensors) -> MedusaLayout:
    firsts = [f"{layout.prefix}{layout.linear.format(head=0, block=0)}.weight" for layout in LAYOUTS]
    for layout, first in zip(LAYOUTS, firsts, strict=True):
        if first in tensors:
            return layout
    raise tensors.refusal(f"it is no Medusa drafter: it has none of the tensors {', '.join(firsts)}")


def _counts(layout: MedusaLayout, config: Mapping[str, object], tensors: DrafterTensors) -> tuple[int, int]:
    """Heads, and blocks of each, by the highest numbers in tensor names: a gap is then a tensor that is missing."""
    pattern = re.escape(f"{layout.prefix}{layout.linear}.weight").replace(r"\{head\}", r"(\d{1,4})")
    linear = re.compile(pattern.replace(r"\{block\}", r"(\d{1,4})"))
    found = [match for name in tensors.matching(layout.prefix) if (match := linear.fullmatch(name)) is not None]
    counts = (1 + max(int(match[1]) for match in found), 1 + max(int(match[2]) for match in found))
    for count, most, what in zip(counts, (MAX_HEADS, MAX_BLOCKS), ("heads", "blocks per head"), strict=True):
        if count > most:
            raise tensors.refusal(f"it has {count} {what}; {most} can be used")
    for key, count in zip(layout.count_keys, counts, strict=True):
        said = config.get(key)
        if said is not None and said != count:
            logger.warning(
                "config.json contradicts the weights, which are believed path=%s key=%s says=%.40r weights=%d",
                tensors.directory, key, said, count,
            )  # fmt: skip
    return counts


class _Config:
    """Flags and numbers of config.json."""

    def __init__(self, config: Mapping[str, object], tensors: DrafterTensors) -> None:
        self._config = config
        self._tensors = tensors

    def flag(self, key: str) -> bool | None:
        value = self._config.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._tensors.refusal(f"{key} of config.json must be true or false, got {value!r:.40}")
        return value

    def number(self, key: str) -> int | None:
        value = self._config.get(key)
        if value is None or type(value) is int:
            return value
        raise self._tensors.refusal(f"{key} of config.json must be a whole number, got {value!r:.40}")


def _refuse_scale(config: Mapping[str, object], tensors: DrafterTensors) -> None:
    scale = config.get("logit_scale")
    if scale is not None and scale != 1:
        raise tensors.refusal(f"logit_scale of config.json is {scale!r:.40}; only heads without one are supported")


def _has_bias(flags: _Config, tensors: DrafterTensors, layout: MedusaLayout) -> bool:
    """As the first block; the others are checked against it."""
    said = flags.flag("medusa_fc_bias")
    first = f"{layout.prefix}{layout.linear.format(head=0, block=0)}.bias"
    if said is False and first in tensors:
        raise tensors.refusal(f"medusa_fc_bias of config.json is false, but there is a tensor {first}")
    return first in tensors if said is None else said


def _draft_vocab_size(flags: _Config, tensors: DrafterTensors, layout: MedusaLayout, vocab_size: int) -> int:
    said, name = flags.number("truncated_vocab_size"), layout.prefix + TOKEN_MAP
    stored = tensors.shape(name)
    if stored is None:
        if said not in (None, vocab_size):
            raise tensors.refusal(f"the tensor {name} is missing: the heads draft {said} of {vocab_size} tokens")
        return vocab_size
    if len(stored) != 1 or not 1 <= stored[0] <= vocab_size:
        raise tensors.refusal(f"the tensor {name} has shape {stored}; at most {vocab_size} tokens are needed")
    if said not in (None, stored[0]):
        raise tensors.refusal(f"truncated_vocab_size of config.json is {said}, but the tensor {name} has {stored[0]}")
    return stored[0]


def _expected(shape: MedusaShape, tensors: DrafterTensors) -> dict[str, tuple[int, ...]]:
    """Every tensor the checkpoint must hold. An output may have all V rows where the map takes D of them."""
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(shape.num_heads):
        for block in range(shape.num_blocks):
            expected[f"{shape.linear(head, block)}.weight"] = (shape.width, shape.width)
            if shape.has_bias:
                expected[f"{shape.linear(head, block)}.bias"] = (shape.width,)
        output = shape.output(head)
        if output is not None:
            whole = (shape.vocab_size, shape.width)
            expected[output] = whole if tensors.shape(output) == whole else (shape.draft_vocab_size, shape.width)
    if shape.has_map:
        expected[shape.token_map] = (shape.draft_vocab_size,)
    return expected
