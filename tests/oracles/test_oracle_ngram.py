"""Prompt lookup against vLLM's own function, on random texts that repeat themselves, at every length they pass through."""

import itertools
import random

import numpy as np
import pytest
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as vllm_lookup

from engine.speculation.ngram import NgramSpeculator
from engine.speculation.speculator import DraftRow, SequenceStart
from protocol.sampling import SamplingParams

SAMPLING = SamplingParams(max_tokens=1)
TEXTS_PER_RULE = 12
TEXT_LENGTH = 60


def random_text(generator: random.Random, alphabet: int) -> list[int]:
    """Fresh tokens and copies of what went before, so that matches of every length occur."""
    text: list[int] = []
    while len(text) < TEXT_LENGTH:
        if text and generator.random() < 0.4:
            start = generator.randrange(len(text))
            text += text[start : start + generator.randint(1, 9)]
        else:
            text.append(generator.randrange(alphabet))
    return text[:TEXT_LENGTH]


@pytest.mark.parametrize(("lookup_min", "lookup_max"), [(1, 1), (1, 3), (2, 2), (2, 4), (3, 7), (5, 5)])
@pytest.mark.parametrize("alphabet", [2, 3, 8])
def test_prompt_lookup_drafts_what_vllm_drafts(lookup_min: int, lookup_max: int, alphabet: int):
    seed = hash((lookup_min, lookup_max, alphabet))  # of integers: the same in every process
    generator = random.Random(seed)
    num_drafts = 0
    for row, width in itertools.product(range(TEXTS_PER_RULE), (1, 3, 8)):
        text = random_text(generator, alphabet)
        speculator = NgramSpeculator(width, lookup_min, lookup_max, vocab_size=alphabet)
        num_prompt_tokens = generator.randint(1, TEXT_LENGTH)
        speculator.begin(SequenceStart(row, text[:num_prompt_tokens], num_prompt_tokens))
        num_tokens = num_prompt_tokens
        while num_tokens <= TEXT_LENGTH:
            room = TEXT_LENGTH - num_tokens  # vLLM clips to the longest length itself; the scheduler to `budget`
            expected = vllm_lookup(
                np.array(text[:num_tokens], dtype=np.int32), lookup_min, lookup_max, TEXT_LENGTH, width
            ).tolist()
            drafted = propose(speculator, row, text[:num_tokens], num_prompt_tokens, min(width, room))
            assert drafted == expected, f"seed {seed}, after {text[:num_tokens]}"
            num_drafts += bool(expected)
            num_tokens += generator.randint(1, width + 1)  # as many as a round commits
    assert num_drafts > 100, "the texts repeat too little to say anything"


def propose(
    speculator: NgramSpeculator, row: int, token_ids: list[int], num_prompt_tokens: int, budget: int
) -> list[int]:
    if budget == 0:
        return []
    draft = speculator.propose([DraftRow(row, token_ids, budget, num_prompt_tokens, SAMPLING)])
    return draft.tokens[0, : int(draft.lengths[0])].tolist()
