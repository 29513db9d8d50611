"""Block drafters that can be trained: DFlash, and DSpark with its heads.

Owns the parameters and the arithmetic with gradients, over many blocks of whole texts at once; never drafts. What it
computes is what `engine.speculation.block_model` and `markov_head` compute without gradients, which a test holds it to.
Sources: DFlash (arXiv 2602.06036): blocks that begin at random places of an answer, losses that decay with the distance from
the anchor; DSpark (DeepSeek and Peking University, 2026): the Markov head, taught with the text's own tokens before each
place, and the confidence head, which learns how much the draft's distribution has in common with the target's.

An anchor is a token of the text at position c: its block sees the target's states of positions 0 .. c - 1 and its own rows,
nothing of another block. It predicts the tokens at c + 1 .. c + K. B = texts, T = positions the target ran, A = blocks of a
text, R = rows of a block, K = tokens it drafts, N = blocks of all texts, h = width, H = heads, r = rank of the Markov head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn

from engine.model.arch import ArchConfig
from engine.model.decoder import DecoderModel
from engine.model.layers import LayerWeights
from engine.model.rope import attention_factor, inverse_frequencies, rotate
from tools.drafter_training.training import Batch, Prediction

DROPPED = 0.1
PLACE_WEIGHT = 0.78  # of each place, against the one before: exp(-1/4), as both papers have it for blocks of this size
OVERLAP = 0.9  # share of DSpark's loss that is the distance between the distributions, as published

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class BlockSize:
    """How a block drafter is made and trained."""

    num_layers: int
    num_drafts: int  # K
    num_anchors: int  # blocks of a text in a step, at most
    mask_token_id: int


class BlockLayer(nn.Module):
    """One decoder layer that starts as one of the target's."""

    def __init__(self, arch: ArchConfig, start: LayerWeights) -> None:
        super().__init__()
        self.arch = arch
        self.input_norm, self.ffn_norm = nn.Parameter(start.input_norm.clone()), nn.Parameter(start.ffn_norm.clone())
        self.qkv, self.out = nn.Parameter(start.qkv.clone()), nn.Parameter(start.out.clone())
        self.gate_up, self.down = nn.Parameter(start.gate_up.clone()), nn.Parameter(start.down.clone())

    def forward(
        self, rows: torch.Tensor, features: torch.Tensor, unseen: torch.Tensor, turned: tuple[Rotation, Rotation]
    ) -> torch.Tensor:
        """`rows` [B, A, R, h], `features` [B, T, h], `unseen` bool [B, A, T]; rotations of positions and of rows."""
        normed = self._blurred(self._normed(rows, self.input_norm))
        rows = rows + F.linear(self._attended(normed, features, unseen, turned), self.out)
        gate, up = F.linear(self._normed(rows, self.ffn_norm), self.gate_up).chunk(2, dim=-1)
        return rows + F.linear(self._blurred(F.silu(gate) * up), self.down)

    def _attended(
        self, normed: torch.Tensor, features: torch.Tensor, unseen: torch.Tensor, turned: tuple[Rotation, Rotation]
    ) -> torch.Tensor:
        arch, num_rows = self.arch, normed.shape[2]
        sizes = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        fused = F.linear(normed, self.qkv).view(*normed.shape[:3], -1, arch.head_dim)
        queries, own_keys, own_values = torch.split_with_sizes(fused, sizes, dim=3)
        queries, own_keys = rotate(queries, *turned[1]), rotate(own_keys, *turned[1])
        queries, own_keys, own_values = (self._by_head(x) for x in (queries, own_keys, own_values))  # [B, H, A, R, D]
        context = F.linear(features, self.qkv[arch.query_size :]).view(*features.shape[:2], -1, arch.head_dim)
        keys, values = torch.split_with_sizes(context, sizes[1:], dim=2)
        keys, values = self._by_head(rotate(keys, *turned[0])), self._by_head(values)  # [B, H, T, D]
        seen = (queries.flatten(2, 3) @ keys.transpose(2, 3)).view(*queries.shape[:4], -1)
        seen = seen.masked_fill(unseen[:, None, :, None], -torch.inf)
        scores = torch.cat([seen, queries @ own_keys.transpose(3, 4)], dim=-1) * arch.head_dim**-0.5
        of_context, of_block = scores.softmax(dim=-1).split([keys.shape[2], num_rows], dim=-1)
        attended = (of_context.flatten(2, 3) @ values).view_as(queries) + of_block @ own_values
        result: torch.Tensor = attended.permute(0, 2, 3, 1, 4).flatten(3)
        return result

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[B, ..., heads, D] to [B, H, ..., D], keys and values once for each head that reads them."""
        return x.movedim(-2, 1).repeat_interleave(self.arch.num_heads // x.shape[-2], dim=1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.arch.norm_eps)

    def _blurred(self, x: torch.Tensor) -> torch.Tensor:
        """Some of it is missing while it learns: the text is short and soon known by heart."""
        return F.dropout(x, DROPPED, self.training)


class DFlashModel(nn.Module):
    """Row i of a block is the token at its own position, so the anchor's drafts nothing."""

    anchor_rows = 1

    def __init__(self, target: DecoderModel, num_taps: int, size: BlockSize) -> None:
        super().__init__()
        self.arch, self.size = target.arch, size
        starts, hidden = target.weights.layers[-size.num_layers :], target.arch.hidden_size
        self.layers = nn.ModuleList([BlockLayer(target.arch, start) for start in starts])
        fc = torch.zeros(hidden, num_taps * hidden)
        fc[:, -hidden:] = torch.eye(hidden)  # begin with the deepest tap, which is nearly what the layers read before
        nn.init.normal_(fc[:, :-hidden], std=0.01)
        self.fc = nn.Parameter(fc)
        self.hidden_norm = nn.Parameter(starts[0].input_norm.clone())
        self.output_norm = nn.Parameter(target.weights.final_norm.clone())
        self.embedding = target.weights.embedding.clone()  # the target's: frozen
        self._frequencies = inverse_frequencies(target.arch.rope, target.arch.head_dim)
        self._rope_factor = attention_factor(target.arch.rope)

    @property
    def num_rows(self) -> int:
        return self.size.num_drafts + self.anchor_rows

    def predictions(self, batch: Batch, output: torch.Tensor) -> Iterator[Prediction]:
        """Of blocks at random places while it learns, else of all there are. `output` [D, h]: the target's own."""
        positions, is_block = self._anchors(batch)
        hidden = self._blocks(batch, positions)[is_block]
        begun = torch.zeros_like(batch.counts)
        rows = torch.arange(len(positions))[:, None].expand_as(positions)
        begun[rows[is_block], positions[is_block] - 1] = True
        places = positions[is_block][:, None] + torch.arange(self.size.num_drafts)
        before = batch.token_ids[rows[is_block][:, None], places.clamp(max=batch.token_ids.shape[1] - 1)]
        told = self.told(before)
        for place in range(self.size.num_drafts):
            yield self.prediction(place, hidden[:, place], told[:, place], begun, output)

    def told(self, before: torch.Tensor) -> torch.Tensor:
        """What places are told of the text's tokens in front of them, int64 [N, K], to [N, K, ...]: nothing here."""
        return before

    def prediction(
        self, place: int, hidden: torch.Tensor, told: torch.Tensor, begun: torch.Tensor, output: torch.Tensor
    ) -> Prediction:
        """`hidden` [N, h] of the rows that predict the place, `told` [N, ...] what they are told."""
        return Prediction(place + 2, partial(_logits, output, hidden, begun), PLACE_WEIGHT**place, begun)

    def _anchors(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions int64 [B, A], ascending, and whether each is a block at all, bool [B, A].

        The target's state of an anchor's own position teaches its first prediction, so it must have run it.
        """
        after = torch.arange(1, batch.counts.shape[1] + 1)
        possible = batch.counts & (after < batch.lengths[:, None])
        most = max(1, int(possible.sum(1).max()))
        count = min(self.size.num_anchors, most) if self.training else most
        drawn, chosen = torch.where(possible, torch.rand(possible.shape), -1.0).topk(count, dim=1)
        last = possible.shape[1]
        places = torch.where(drawn >= 0, chosen + 1, last).sort(dim=1).values
        return places, places < last

    def _blocks(self, batch: Batch, positions: torch.Tensor) -> torch.Tensor:
        """[B, A, K, h], normed, of the rows that draft. Blocks that are none are computed like any other."""
        token_ids = torch.full((*positions.shape, self.num_rows), self.size.mask_token_id)
        token_ids[:, :, 0] = batch.token_ids.gather(1, positions)
        rows = F.embedding(token_ids, self.embedding)
        features = F.linear(batch.states.flatten(2), self.fc)
        features = F.rms_norm(features, self.hidden_norm.shape, self.hidden_norm, self.arch.norm_eps)
        features = F.dropout(features, DROPPED, self.training)
        everywhere = torch.arange(batch.states.shape[1])
        unseen = everywhere >= positions[:, :, None]
        turned = (self._rotation(everywhere), self._rotation(positions[:, :, None] + torch.arange(self.num_rows)))
        for layer in self.layers:
            rows = layer(rows, features, unseen, turned)
        drafting = rows[:, :, self.anchor_rows :]
        return F.rms_norm(drafting, self.output_norm.shape, self.output_norm, self.arch.norm_eps)

    def _rotation(self, positions: torch.Tensor) -> Rotation:
        """cos and sin [..., 1, D / 2] for positions [...]."""
        angles = positions[..., None, None] * self._frequencies
        return angles.cos() * self._rope_factor, angles.sin() * self._rope_factor


class DSparkModel(DFlashModel):
    """Every row predicts the token behind its position; what it predicts is told the token before that."""

    anchor_rows = 0

    def __init__(self, target: DecoderModel, num_taps: int, size: BlockSize, rank: int, vocab_size: int) -> None:
        """`vocab_size`: D, tokens it drafts."""
        super().__init__(target, num_taps, size)
        hidden = self.arch.hidden_size
        normed = self.embedding / self.embedding.square().mean(dim=1, keepdim=True).sqrt()
        # Tokens that mean the same begin as the same predecessor: the text has few examples of most.
        start = (normed - normed.mean(dim=0)) @ (torch.randn(hidden, rank) * hidden**-0.5)
        self.predecessors = nn.Parameter(start)  # [V, r]
        self.successors = nn.Parameter(torch.zeros(vocab_size, rank))  # [D, r]: no bias at first
        self.confidence = nn.Parameter(torch.zeros(1, hidden + rank))
        self.confidence_bias = nn.Parameter(torch.zeros(1))

    def told(self, before: torch.Tensor) -> torch.Tensor:
        """[N, K, r], for all places at once: a gradient as large as the whole table is made once in a step."""
        return F.embedding(before, self.predecessors)

    def prediction(
        self, place: int, hidden: torch.Tensor, told: torch.Tensor, begun: torch.Tensor, output: torch.Tensor
    ) -> Prediction:
        return Prediction(
            place + 2,
            partial(_told_logits, output, hidden, self.successors, told, begun),
            PLACE_WEIGHT**place,
            begun,
            overlap=OVERLAP,
            confidence=partial(self._confidence, hidden.detach(), told.detach(), begun),
        )

    def _confidence(
        self, hidden: torch.Tensor, embedded: torch.Tensor, begun: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """It learns what the drafter is worth, and changes nothing of the drafter: hence the detached inputs."""
        read = torch.cat([hidden, embedded], dim=1)[chosen[begun]]
        return F.linear(read, self.confidence, self.confidence_bias)[:, 0]


def _logits(output: torch.Tensor, hidden: torch.Tensor, begun: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden[chosen[begun]], output)


def _told_logits(
    output: torch.Tensor,
    hidden: torch.Tensor,
    successors: torch.Tensor,
    embedded: torch.Tensor,
    begun: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    return _logits(output, hidden, begun, chosen) + F.linear(embedded[chosen[begun]], successors)
