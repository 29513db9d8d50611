"""Plain-Python oracles for sampling and drafting: one token at a time, no tensors, no cleverness. Used by tests only."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.draft import Draft, empty_draft, host_draft
from engine.transforms import DraftPaths, Truncation, target_probs, transformed_logits
from protocol.sampling import SamplingParams

HOST = torch.device("cpu")


def single(value: float) -> float:
    """Rounded to float32, in which the bans, bias and penalties are computed."""
    return float(np.float32(value))


def reference_logits(
    logits: Sequence[float], params: SamplingParams, history: Sequence[int], num_prompt_tokens: int, eos: Sequence[int]
) -> list[float]:
    """Bans, bias and penalties of the token that follows `history`."""
    result = [single(value) for value in logits]
    output = list(history[num_prompt_tokens:])
    for token in range(len(result)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            result[token] = -math.inf
    for word in params.bad_words:
        prefix = list(word[:-1])
        if len(output) >= len(prefix) and output[len(output) - len(prefix) :] == prefix:
            result[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            result[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        result[token] = single(result[token] + single(bias))
    for token in range(len(result)):
        count = output.count(token)
        if token in history and params.repetition_penalty != 1.0:
            factor = single(params.repetition_penalty)
            result[token] = single(result[token] / factor if result[token] > 0 else result[token] * factor)
        result[token] = single(result[token] - single(single(params.frequency_penalty) * count))
        result[token] = single(result[token] - single(params.presence_penalty) * (count > 0))
    return result


def reference_probs(
    logits: Sequence[float], params: SamplingParams, history: Sequence[int], num_prompt_tokens: int, eos: Sequence[int]
) -> list[float]:
    """The law of the token that follows `history`: one-hot when greedy."""
    scores = reference_logits(logits, params, history, num_prompt_tokens, eos)
    best = max(range(len(scores)), key=lambda token: (scores[token], -token))
    if params.is_greedy:
        return [float(token == best) for token in range(len(scores))]
    weights = [math.exp((score - scores[best]) / params.temperature) for score in scores]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]  # relative to the most likely token
    if 0 < params.top_k < len(weights):
        edge = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [weight if weight >= edge else 0.0 for weight in weights]
    total = math.fsum(weights)
    kept, mass = [0.0] * len(weights), 0.0
    for token in sorted(range(len(weights)), key=lambda token: (-weights[token], token)):
        if mass < params.top_p:
            kept[token] = weights[token]
            mass += weights[token] / total
    return [weight / math.fsum(kept) for weight in kept]


def row_probs(
    logits: torch.Tensor, states: Sequence[SamplingState], counts: Sequence[int], draft: Draft
) -> torch.Tensor:
    """Float64 [R, V]: what the production transforms make of every logits row, greedy rows one-hot."""
    rows = SamplingRows.build(states, counts, HOST)
    parents = None if draft.parents is None else draft.parents.to(torch.int64)
    roots = None if draft.roots is None else draft.roots.to(torch.int64)
    paths = DraftPaths.of(draft.tokens.to(torch.int64), parents, roots, rows)
    target = transformed_logits(logits, paths, rows)
    result = torch.zeros(target.shape, dtype=torch.float64)
    for state, offset, count in zip(states, rows.offsets, counts, strict=True):
        part = target[offset : offset + count]
        if state.params.is_greedy:
            result[torch.arange(offset, offset + count), part.argmax(dim=1)] = 1.0
        else:
            truncation = Truncation.of([state.params] * count, logits.shape[1], HOST)
            result[offset : offset + count] = target_probs(part, truncation)
    return result


def longest_suffix_match(history: Sequence[int], lookup_min: int, lookup_max: int, num_tokens: int) -> Sequence[int]:
    """vLLM's n-gram rule by brute force: longest suffix, earliest occurrence, what followed it."""
    for length in range(min(lookup_max, len(history) - 1), lookup_min - 1, -1):
        suffix = list(history[len(history) - length :])
        for start in range(len(history) - length):
            if list(history[start : start + length]) == suffix:
                return history[start + length : start + length + num_tokens]
    return ()


class ToyTarget:
    """A tiny autoregressive model: logits are a fixed random function of the last `order` tokens."""

    def __init__(self, vocab_size: int, seed: int, order: int = 2, scale: float = 2.0) -> None:
        self.vocab_size = vocab_size
        self._seed, self._order, self._scale = seed, order, scale
        self._table: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, history: Sequence[int]) -> torch.Tensor:
        """Float32 [V] for the token behind `history`."""
        key = tuple(history[-self._order :])
        if key not in self._table:
            generator = np.random.default_rng([self._seed, *key])
            values = generator.normal(size=self.vocab_size) * self._scale
            self._table[key] = torch.tensor(values, dtype=torch.float32)
        return self._table[key]

    def verify(self, history: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """Float32 [1 + len(drafted), V]: one row per chain position."""
        return torch.stack([self.logits([*history, *drafted[:step]]) for step in range(len(drafted) + 1)])


def generate(
    target: ToyTarget, params: SamplingParams, seed: int, prompt: Sequence[int], model: SamplingModel
) -> list[int]:
    """Plain decoding to EOS or max_tokens, through `accept` with an empty draft: the twin of every speculative run."""
    from engine.accept import accept

    history = list(prompt)
    state = SamplingState(params, seed, history, len(prompt), model)
    while len(history) - len(prompt) < params.max_tokens:
        rows = SamplingRows.build([state], [1], HOST)
        verdict = accept(target.verify(history, []), empty_draft(1, 0, HOST), rows)
        token = int(verdict.tokens[0, 0])
        history.append(token)
        state.commit([token])
        if token in model.eos_token_ids and not params.ignore_eos:
            break
    return history[len(prompt) :]


def chain(proposals: Sequence[Sequence[int]], width: int) -> Draft:
    """A deterministic chain per span."""
    return host_draft(proposals, width)


def inverse_cdf_draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Stands in for `engine.race.draw` where a grid of numbers is to hit each token in proportion, exactly."""
    cumulative = weights.cumsum(dim=1)
    threshold = numbers[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).clamp(max=weights.shape[1] - 1).squeeze(1)
