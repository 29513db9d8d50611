"""Suffix drafts against arctic-inference's own tree (0.3.0), on random texts that grow at the same time.

Where tokens followed equally often its choice depends on the history of its lists, so paths are compared where no tie was met
and trees by their score, which ties cannot change. Thresholds are numbers that no ratio of counts meets: it rounds to float32.
"""

import random

import pytest

from engine.speculation.suffix_cursor import Cursor
from engine.speculation.suffix_match import MatchRule, best_proposal
from engine.speculation.suffix_tree import SuffixTree

suffix_decoding = pytest.importorskip("arctic_inference.suffix_decoding")
LEAST = (0.0101, 0.0971, 0.2973)


def compare(seed: int, is_tree: bool) -> tuple[int, int]:
    """(drafts compared, those equal token for token); AssertionError for one that cannot be explained by a tie."""
    generator = random.Random(seed)
    depth, alphabet, num_texts = (
        generator.choice([4, 8, 24]),
        generator.choice([2, 5, 12, 60]),
        generator.choice([1, 3]),
    )
    theirs, ours = suffix_decoding._C.SuffixTree(depth), SuffixTree(depth)
    texts = {ours.open(): [] for _ in range(num_texts)}
    cursors = {text_id: Cursor(ours) for text_id in texts}
    phrase = [generator.randrange(alphabet) for _ in range(generator.randint(1, 30))]
    compared = equal = 0
    for _ in range(150):
        text_id = generator.choice(sorted(texts))
        history = texts[text_id]
        new = [
            phrase[(len(history) + step) % len(phrase)] if generator.random() < 0.8 else generator.randrange(alphabet)
            for step in range(generator.randint(1, 4))
        ]
        theirs.extend(text_id, new)
        ours.extend(text_id, new)
        history += new
        factor, most, least = (
            generator.choice([0.5, 1.0, 2.0]),
            generator.choice([1, 3, 8, 16]),
            generator.choice(LEAST),
        )
        expected = theirs.speculate(history[-depth:], most, factor, 0.0, least, is_tree)
        proposal = best_proposal(ours, cursors[text_id].suffixes(history), MatchRule(factor, least, is_tree), most)
        same = expected.token_ids == list(proposal.token_ids) and expected.parents == list(proposal.parents)
        compared, equal = compared + 1, equal + same
        if is_tree or same:
            assert proposal.score == pytest.approx(expected.score, abs=1e-4)
    return compared, equal


@pytest.mark.parametrize("seed", range(30))
def test_trees_have_the_score_of_its_trees(seed: int) -> None:
    compare(seed, is_tree=True)


def test_nearly_all_paths_are_its_paths() -> None:
    """Ties are why not all: small alphabets make many."""
    results = [compare(seed, is_tree=False) for seed in range(30)]
    compared, equal = (sum(column) for column in zip(*results, strict=True))
    assert equal / compared > 0.8, f"{equal} of {compared}"
