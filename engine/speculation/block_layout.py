"""What a published block drafter (DFlash, DSpark) means: one table of conventions, converted to the only one used here.

Owns recognising a layout from config.json and turning its conventions (which hidden states, which row of a block predicts
which token, what each layer sees) into `BlockFacts`; never loads a weight. A wrong convention raises nothing anywhere: it
only makes every draft wrong. So each is resolved once, logged, and can be overridden. Called by `block_recipe`.

Numbers of hidden states: 0 is the embedding, i the residual stream behind i layers; the target has N layers.
Sources: z-lab/dflash, SpecForge, DeepSpec and speculators as published; their conventions, none of their code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from engine.speculation.block_config import BlockConfig
from engine.speculation.drafter_tensors import DrafterTensors
from engine.speculation.recipe import BlockOverrides

MAX_BLOCK_SIZE = 65  # rows; a draft is never longer than 64 tokens
CAUSAL = ("none", "sliding", "all")


class Anchor(StrEnum):
    """Which rows of a block draft. The anchor, the last committed token, is row 0; the others are masks.

    Both layouts have the same shapes, so nothing but a convention tells them apart.
    """

    DROP = "drop"  # rows 1, 2, ..., each the token at its own position: a block of B rows drafts B - 1 tokens
    FIRST = "first"  # all rows, each the token behind its position: B tokens


@dataclass(frozen=True)
class BlockLayout:
    """One publisher's conventions. A checkpoint has the first layout of which config.json shows a mark."""

    name: str
    marks: tuple[str, ...]  # keys at the top of config.json
    architectures: tuple[str, ...]  # names in `architectures` that are marks too
    layer_config: str | None  # the key under which the decoder layers are described; None: the top
    tap_key: str
    tap_offset: int  # added to the publisher's number
    anchor: Anchor  # where `sample_from_anchor` is missing and the drafter has no Markov head
    markov_anchor: Anchor  # with a Markov head
    causal: str  # which layers see only what is before a row, where config.json does not say


LAYOUTS = (
    # speculators numbers hidden states as they are numbered here; full attention is never causal.
    BlockLayout(
        "speculators", ("speculators_model_type",), (), "transformer_layer_config",
        "aux_hidden_state_layer_ids", 0, Anchor.DROP, Anchor.FIRST, "sliding",
    ),
    # DeepSpec numbers layers from 0 and reads what comes out of them; its DFlash is a DSpark without a Markov head.
    BlockLayout(
        "deepspec", ("num_anchors",), ("Qwen3DSparkModel", "Gemma4DSparkModel"), None,
        "target_layer_ids", 1, Anchor.FIRST, Anchor.FIRST, "none",
    ),
    # z-lab and SpecForge, which keeps everything in dflash_config. Layers are numbered as DeepSpec's.
    BlockLayout(
        "z-lab", ("dflash_config", "block_size"), ("DFlashDraftModel", "DFlash2DraftModel"), None,
        "target_layer_ids", 1, Anchor.DROP, Anchor.DROP, "sliding",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class BlockFacts:
    """A checkpoint's conventions in the one form used here."""

    layout: BlockLayout
    taps: tuple[int, ...]  # numbers of hidden states, in the order in which fc reads them
    final_norm: bool  # a tap behind the last layer is read after the target's final norm
    anchor: Anchor
    block_size: int  # rows it was trained for
    mask_token_id: int
    windows: tuple[int | None, ...]  # per layer: tokens a row sees; None: all
    causal: tuple[bool, ...]  # per layer: rows of a block see only what is before them
    embedding_scale: float
    output_multiplier: float
    softcap: float | None  # logits are squeezed into (-softcap, softcap)

    @property
    def anchor_rows(self) -> int:
        """Rows of a block that draft nothing."""
        return 1 if self.anchor is Anchor.DROP else 0

    @property
    def max_tokens(self) -> int:
        """Most tokens one block drafts."""
        return self.block_size - self.anchor_rows

    def __str__(self) -> str:
        windows = ",".join("all" if window is None else str(window) for window in self.windows)
        return (
            f"layout={self.layout.name} anchor={self.anchor} taps={','.join(map(str, self.taps))} "
            f"final_norm={str(self.final_norm).lower()} block_size={self.block_size} mask_token={self.mask_token_id} "
            f"windows={windows} causal={','.join(str(one).lower() for one in self.causal)}"
        )


def recognise(config: Mapping[str, object], tensors: DrafterTensors) -> BlockLayout:
    """The checkpoint's layout. Raises `ModelFilesError` for what is no block drafter, by its own name where it has one."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "dflash", "dspark"):
        raise tensors.refusal(
            f"it is a speculators model of type {kind!r:.40}; of those dflash and dspark are read here"
        )
    listed = config.get("architectures")
    architectures = listed if isinstance(listed, list) else []
    for layout in LAYOUTS:
        if any(mark in config for mark in layout.marks) or any(one in layout.architectures for one in architectures):
            return layout
    raise tensors.refusal(
        "it is no block drafter (DFlash, DSpark): config.json has neither block_size nor dflash_config"
    )


def resolve_facts(
    layout: BlockLayout, config: BlockConfig, num_layers: int, vocab_size: int, num_target_layers: int,
    has_markov: bool, overrides: BlockOverrides,
) -> BlockFacts:  # fmt: skip
    """Every convention, from the files where nobody said otherwise; `num_layers` of the drafter.

    Raises ValueError naming the option that cannot be, `ModelFilesError` for a config.json that cannot be used.
    """
    taps = _taps(layout, config, num_layers, num_target_layers) if overrides.taps is None else _asked(overrides.taps)
    for tap in taps:
        if not 0 <= tap <= num_target_layers:
            raise ValueError(
                f"{config.directory} reads hidden state {tap} of a target that has 0 to {num_target_layers}: "
                "it was made for another model, or --block-taps must say which to read"
            )
    mask = config.whole_number("mask_token_id", least=0)
    if mask >= vocab_size:
        raise config.refusal(f"mask_token_id {mask} is none of the target's {vocab_size} tokens")
    windows = _windows(config, num_layers)
    block_size = config.whole_number("block_size", default=16 if layout.name == "z-lab" else None)
    anchor = _anchor(layout, config, has_markov, overrides)
    least = 2 if anchor is Anchor.DROP else 1
    if not least <= block_size <= MAX_BLOCK_SIZE:
        raise config.refusal(f"a block_size of {block_size} is not between {least} and {MAX_BLOCK_SIZE}")
    return BlockFacts(
        layout=layout,
        taps=taps,
        final_norm=bool(overrides.final_norm),
        anchor=anchor,
        block_size=block_size,
        mask_token_id=mask,
        windows=windows,
        causal=_causal(layout, config, windows, overrides),
        embedding_scale=config.number("input_embedding_scale") or 1.0,
        output_multiplier=(config.number("output_multiplier") or 1.0) * (config.number("logit_scale") or 1.0),
        softcap=config.number("final_logit_softcapping"),
    )


def _taps(layout: BlockLayout, config: BlockConfig, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    listed = config.whole_numbers(layout.tap_key)
    if listed is not None:
        return tuple(number + layout.tap_offset for number in listed)
    if layout.name != "z-lab":
        raise config.refusal(f"{layout.tap_key} of config.json is missing: --block-taps must say which states it reads")
    # What z-lab's code reads when its files do not say: layers spread evenly from the second to the third from the end.
    if num_layers == 1:
        return (num_target_layers // 2 + 1,)
    span = num_target_layers - 4
    return tuple(2 + round(index * span / (num_layers - 1)) for index in range(num_layers))


def _asked(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--block-taps must be whole numbers separated by commas (2,10,18), got {text!r:.60}")
    return tuple(int(part) for part in parts)


def _anchor(layout: BlockLayout, config: BlockConfig, has_markov: bool, overrides: BlockOverrides) -> Anchor:
    if overrides.anchor is not None:
        if overrides.anchor not in tuple(Anchor):
            raise ValueError(f"--block-anchor must be one of {', '.join(Anchor)}, got {overrides.anchor!r:.40}")
        return Anchor(overrides.anchor)
    given = config.flag("sample_from_anchor")
    if given is not None:
        return Anchor.FIRST if given else Anchor.DROP
    return layout.markov_anchor if has_markov else layout.anchor


def _windows(config: BlockConfig, num_layers: int) -> tuple[int | None, ...]:
    """Per layer. `use_swa` gives every layer a window unless layer_types tells some apart."""
    kinds = config.names("layer_types")
    if kinds is not None and (len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}):
        raise config.refusal(
            f"layer_types of config.json must name full_attention or sliding_attention for each of {num_layers} layers"
        )
    is_sliding = [kind == "sliding_attention" for kind in kinds or []] or [False] * num_layers
    if config.flag("use_swa") and not any(is_sliding):
        is_sliding = [True] * num_layers
    if not any(is_sliding):
        return (None,) * num_layers
    key = "swa_window_size" if config.has("swa_window_size") else "sliding_window"
    window = config.whole_number(key)
    return tuple(window if one else None for one in is_sliding)


def _causal(
    layout: BlockLayout, config: BlockConfig, windows: tuple[int | None, ...], overrides: BlockOverrides
) -> tuple[bool, ...]:
    chosen = overrides.causal or _causal_of_files(layout, config)
    if chosen not in CAUSAL:
        raise ValueError(f"--block-causal must be one of {', '.join(CAUSAL)}, got {chosen!r:.40}")
    return tuple(chosen == "all" or (chosen == "sliding" and window is not None) for window in windows)


def _causal_of_files(layout: BlockLayout, config: BlockConfig) -> str:
    if layout.name == "speculators":
        return "none" if config.flag("sliding_window_non_causal") else layout.causal
    for key in ("is_causal", "causal"):
        given = config.flag(key)
        if given is not None:
            return "all" if given else "none"
    return layout.causal
