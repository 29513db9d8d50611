"""The loop: batches of the target's own text, the loss against the target's own distribution, one pass of the optimizer.

Owns what is learned from and how; knows the drafters only as functions from a batch to predictions. Called by
`tools.train_drafter`. The loss of a predicted token is its cross entropy against the target's distribution over the
drafter's vocabulary (EAGLE-3, arXiv 2503.01840), or partly the distance between the two (DSpark). B = texts of a batch,
T = pairs of the longest (positions the target ran), N = predictions of one step that count, D = drafter's vocabulary.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn

from engine.model.decoder import DecoderModel
from tools.drafter_training.answers import Answer

WARM_UP = 0.05  # of all steps
RATE = 1e-3


@dataclass(frozen=True)
class Batch:
    token_ids: torch.Tensor  # int64 [B, T + 1]
    states: torch.Tensor  # float32 [B, T, taps, h]
    counts: torch.Tensor  # bool [B, T]: rounds begin with the token behind this position, and it is no padding
    lengths: torch.Tensor  # int64 [B], positions that the target ran


@dataclass(frozen=True)
class Prediction:
    """What one step says: for every begun chain the logits of the token `ahead` places behind its first position."""

    ahead: int  # pair r predicts the token at position r + ahead
    logits: Callable[[torch.Tensor], torch.Tensor]  # from a bool [B, T] with N true to float32 [N, D]
    weight: float  # of its loss
    begun: torch.Tensor | None = None  # bool [B, T], pairs at which there is a chain; None: at all
    overlap: float = 0.0  # share of the loss that is the sum of |difference| of the distributions, not cross entropy
    confidence: Callable[[torch.Tensor], torch.Tensor] | None = None  # to [N], logits of being accepted


Predict = Callable[[Batch], Iterable[Prediction]]


@dataclass(frozen=True)
class Progress:
    """Of one step."""

    step: int
    loss: float  # of the first step of the chain, which is always trained
    agreement: tuple[float, ...]  # by step of the chain: how often the first choice is the target's, of what both know


class Teacher:
    """The target's distribution of the token behind any position, over the drafter's vocabulary."""

    def __init__(self, target: DecoderModel, vocabulary: torch.Tensor) -> None:
        """`vocabulary` int64 [D]: the target's token for each of the drafter's."""
        self._norm, self._eps = target.weights.final_norm.clone(), target.arch.norm_eps
        self._output = target.weights.output[vocabulary].clone()

    @torch.no_grad()
    def distribution(self, states: torch.Tensor) -> torch.Tensor:
        """[N, h], the target's last hidden states, to [N, D]."""
        normed = F.rms_norm(states, self._norm.shape, self._norm, self._eps)
        return F.linear(normed, self._output).softmax(dim=-1)


def batches(answers: Sequence[Answer], num_tokens: int, source: random.Random) -> Iterator[Batch]:
    """Every answer once: about `num_tokens` in a batch, texts of similar length together, batches in random order."""
    ordered = sorted(answers, key=lambda answer: (len(answer.states), source.random()))
    groups: list[list[Answer]] = []
    for answer in ordered:
        if not groups or (len(groups[-1]) + 1) * len(answer.states) > num_tokens:
            groups.append([])
        groups[-1].append(answer)
    source.shuffle(groups)
    for group in groups:
        yield _batch(group)


def _batch(answers: Sequence[Answer]) -> Batch:
    length = max(len(answer.states) for answer in answers)
    states = torch.zeros(len(answers), length, *answers[0].states.shape[1:])
    tokens, counts = torch.zeros(len(answers), length + 1, dtype=torch.int64), torch.zeros(len(answers), length)
    for row, answer in enumerate(answers):
        states[row, : len(answer.states)] = answer.states.float()
        tokens[row, : len(answer.token_ids)] = answer.token_ids
        counts[row, answer.num_prompt_tokens - 1 : len(answer.states)] = 1
    lengths = torch.tensor([len(answer.states) for answer in answers])
    return Batch(tokens, states, counts.bool(), lengths)


class Trainer:
    def __init__(
        self, model: nn.Module, predict: Predict, teacher: Teacher, num_steps: int, first_step_alone: float = 0.0
    ) -> None:
        """`first_step_alone`: the share of the training in which only the first step of a chain is trained.

        That step is worth the most, the others read its output, and alone it costs a third of three.
        """
        self._model, self._predict, self._teacher, self._num_steps = model, predict, teacher, num_steps
        self._first_step_alone = first_step_alone
        self._parameters = list(model.parameters())
        # Muon would need fewer steps, but torch computes its in bfloat16: 35 s a step on a CPU without such arithmetic.
        self._optimizer = torch.optim.AdamW(self._parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)

    def run(self, answers: Sequence[Answer], batch_tokens: int, seed: int, minutes: float) -> Iterator[Progress]:
        """`num_steps` steps, fewer when the minutes are over: the rate of learning ends at nothing either way."""
        source, step, began_s = random.Random(seed), 0, time.monotonic()
        while True:
            for batch in batches(answers, batch_tokens, source):
                share = max(step / self._num_steps, (time.monotonic() - began_s) / (60 * minutes))
                if share >= 1:
                    return
                judged = self._step(batch, share)
                if judged is not None:
                    step += 1
                    yield Progress(step, *judged)

    @torch.no_grad()
    def agreement(self, answers: Sequence[Answer], batch_tokens: int) -> tuple[float, ...]:
        """On texts that were not learned from, by step of the chain: how often the first choice is the target's.

        Empty where every text is too short.
        """
        right: list[list[float]] = []
        self._model.eval()
        for batch in batches(answers, batch_tokens, random.Random(0)):
            wanted = self._teacher.distribution(batch.states[batch.counts][:, -1])
            judged = [_judge(batch, prediction, wanted) for prediction in self._predict(batch)]
            if all(one is not None for one in judged):
                weight = int(batch.counts.sum())
                right.append([weight, *(weight * one[1] for one in judged if one is not None)])
        self._model.train()
        if not right:
            return ()
        weight, *sums = (sum(column) for column in zip(*right, strict=True))
        return tuple(value / weight for value in sums)

    def _step(self, batch: Batch, share: float) -> tuple[float, tuple[float, ...]] | None:
        """Loss and agreement; None for texts too short to predict anything of."""
        factor = share / WARM_UP if share < WARM_UP else 0.5 * (1 + math.cos(math.pi * share))
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * max(factor, 0.02)
        wanted = self._teacher.distribution(batch.states[batch.counts][:, -1])
        losses, agreement = [], []
        for prediction in self._predict(batch):
            judged = _judge(batch, prediction, wanted)
            if judged is not None:
                losses.append(prediction.weight * judged[0])
            agreement.append(0.0 if judged is None else judged[1])
            if share < self._first_step_alone:
                break
        if not losses:
            return None
        total = torch.stack(losses).sum()
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(losses[0].detach()), tuple(agreement)


def _judge(batch: Batch, prediction: Prediction, wanted: torch.Tensor) -> tuple[torch.Tensor, float] | None:
    """Mean loss, and how often the first choice is the target's; None where no text goes on for so long.

    `wanted` [sum of counts, D]: the target's distribution behind each counted position.
    """
    offset = prediction.ahead - 1  # from the pair to the state behind which the predicted token follows
    positions = torch.arange(batch.states.shape[1])
    chosen = batch.counts & (positions + offset < batch.lengths[:, None])
    if prediction.begun is not None:
        chosen &= prediction.begun
    number = batch.counts.flatten().cumsum(0).view_as(batch.counts) - 1  # of each counted state, in `wanted`
    if not bool(chosen.any()):
        return None
    rows, columns = chosen.nonzero(as_tuple=True)
    taught = wanted[number[rows, columns + offset]]
    logits = prediction.logits(chosen)
    loss = loss_of(prediction, chosen, logits.log_softmax(dim=-1), taught)
    return loss, float((logits.detach().argmax(-1) == taught.argmax(-1)).float().mean())


def loss_of(
    prediction: Prediction, chosen: torch.Tensor, log_probs: torch.Tensor, taught: torch.Tensor
) -> torch.Tensor:
    """Mean over N. What is drawn from one distribution is accepted by the other as often as they have mass in common."""
    loss = -(taught * log_probs).sum(-1).mean()
    if not prediction.overlap and prediction.confidence is None:
        return loss
    distance = (log_probs.exp() - taught).abs().sum(-1)
    loss = (1 - prediction.overlap) * loss + prediction.overlap * distance.mean()
    if prediction.confidence is None:
        return loss
    accepted = 1 - distance.detach() / 2
    return loss + F.binary_cross_entropy_with_logits(prediction.confidence(chosen), accepted.clamp(0, 1))
