"""The suffix tree counts like a scan of its texts, through growth, removal and coming back; drafts are those of the rule."""

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest

from engine.speculation.suffix_cursor import Cursor
from engine.speculation.suffix_match import MatchRule, Proposal, best_proposal
from engine.speculation.suffix_tree import Branch, Few, SuffixTree, times
from tests.speculation.suffix_reference import Clocked, reference_proposal

Texts = dict[int, list[int]]


def grow(seed: int) -> tuple[SuffixTree, Texts, random.Random]:
    """A tree after a random life, and what of its texts it should know."""
    generator = random.Random(seed)
    tree = SuffixTree(generator.choice([2, 5, 9]))
    alphabet = generator.choice([1, 2, 4, 30])
    phrase = [generator.randrange(alphabet) for _ in range(generator.randint(1, 25))]
    texts: Texts = {}
    is_open: dict[int, bool] = {}
    leaving: set[int] = set()
    for _ in range(generator.choice([30, 120])):
        action = generator.random()
        if action < 0.15 or not texts:
            text_id = tree.open()
            texts[text_id], is_open[text_id] = [], True
        chosen = generator.choice(sorted(texts))
        if action > 0.95:
            size = generator.choice([1, 5, 99])
            num_gone, is_gone = tree.shrink(chosen, size)
            assert (num_gone, is_gone) == (min(size, len(texts[chosen])), size >= len(texts[chosen]))
            texts[chosen], is_open[chosen] = texts[chosen][size:], False
            leaving.add(chosen)
            if is_gone:
                del texts[chosen], is_open[chosen]
        elif action > 0.8 and chosen not in leaving:
            (tree.close if is_open[chosen] else tree.reopen)(chosen)
            is_open[chosen] = not is_open[chosen]
        elif is_open[chosen]:
            start = len(texts[chosen])
            new = [
                phrase[(start + index) % len(phrase)] if generator.random() < 0.8 else generator.randrange(alphabet)
                for index in range(generator.randint(1, 12))
            ]
            tree.extend(chosen, new)
            texts[chosen] += new
    return tree, texts, generator


def occurrences(texts: Texts, run: list[int]) -> list[tuple[int, int]]:
    """(text, index behind it) of every occurrence, by looking everywhere."""
    size = len(run)
    return [
        (text_id, end)
        for text_id, text in texts.items()
        for end in range(size, len(text) + 1)
        if text[end - size : end] == run
    ]


def following(texts: Texts, run: list[int]) -> Counter[int]:
    return Counter(texts[text_id][end] for text_id, end in occurrences(texts, run) if end < len(texts[text_id]))


@pytest.mark.parametrize("seed", range(40))
def test_every_run_is_counted_as_a_scan_counts_it(seed: int) -> None:
    tree, texts, generator = grow(seed)
    assert tree.num_tokens == sum(map(len, texts.values()))
    assert len(tree) == len(texts)
    for _ in range(40):
        source = generator.choice(sorted(texts.values())) if texts else []
        size = generator.randint(1, tree.max_depth - 1) if tree.max_depth > 1 else 1
        start = generator.randint(0, max(0, len(source) - size))
        run = source[start : start + size]
        if generator.random() < 0.2:
            run = [*run[:-1], generator.randrange(30)]
        if not run:
            continue
        expected, there = following(texts, run), occurrences(texts, run)
        found = tree.find(array("i", run))
        assert (found is None) == (not there)
        if found is None:
            continue
        assert (found.count if isinstance(found, Branch) else len(found.places)) == len(there)
        assert followed(tree, found) == expected
        if isinstance(found, Branch):
            best = tree.likeliest(found)
            assert (None if best is None else times(found.children[best])) == max(expected.values(), default=None)


def followed(tree: SuffixTree, run: Branch | Few) -> Counter[int]:
    """How often each token followed, by the tree's own account."""
    if isinstance(run, Branch):
        return Counter({token_id: times(child) for token_id, child in run.children.items()})
    ends = tree.occurrences(run.places, run.depth)
    return Counter(text.token_ids[end] for text, end in ends if end < len(text.token_ids))


def drafted(tree: SuffixTree, history: Sequence[int], rule: MatchRule, most: int) -> Proposal:
    return best_proposal(tree, Cursor(tree).suffixes(history), rule, most)


def test_nothing_is_left_of_removed_texts() -> None:
    for seed in range(20):
        tree, texts, _ = grow(seed)
        for text_id, text in texts.items():
            tree.shrink(text_id, len(text))
        assert len(tree) == tree.num_tokens == 0
        assert tree.root.children == {}
        assert tree.root.ends == set()


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_draft_is_the_rule_s(seed: int, is_tree: bool) -> None:
    """Token for token and through ties, with the place in the tree kept from step to step."""
    generator = random.Random(seed)
    depth, alphabet = generator.choice([3, 6, 12]), generator.choice([1, 2, 3, 8])
    tree, scanned = SuffixTree(depth), Clocked()
    texts = [tree.open() for _ in range(generator.choice([1, 3]))]
    history: list[int] = []  # of the first text, behind a beginning that only it knows
    cursor = Cursor(tree)
    phrase = [generator.randrange(alphabet) for _ in range(generator.randint(1, 12))]
    for step in range(40):
        text = texts[step % len(texts)]
        said = len(scanned.texts.get(text, ()))
        new = [
            phrase[(said + index) % len(phrase)] if generator.random() < 0.85 else generator.randrange(alphabet)
            for index in range(generator.randint(1, 4))
        ]
        tree.extend(text, new)
        scanned.extend(text, new)
        history += new if text == texts[0] else ()
        rule = MatchRule(generator.choice([0.5, 1.0, 2.0]), generator.choice([0.013, 0.1, 0.29]), is_tree)
        most = generator.choice([1, 3, 8])
        expected = reference_proposal(scanned.texts, history, rule, most, depth)
        proposal = best_proposal(tree, cursor.suffixes(history), rule, most)
        if not is_tree or len(texts) == 1:  # a tree's ties go by when the match was seen, which texts may interleave
            assert list(proposal.token_ids) == list(expected.token_ids)
            assert list(proposal.parents) == list(expected.parents)
        assert proposal.score == pytest.approx(expected.score)
        only_better = best_proposal(tree, cursor.suffixes(history), rule, most, above=expected.score)
        assert not only_better.token_ids


@pytest.mark.parametrize("seed", range(30))
def test_a_place_that_was_kept_is_the_place_that_is_found(seed: int) -> None:
    """While texts grow around it, become frequent, are forgotten piece by piece and come again."""
    generator = random.Random(seed)
    tree = SuffixTree(generator.choice([3, 7, 12]))
    phrase = [generator.randrange(4) for _ in range(generator.randint(1, 9))]
    history = [generator.randrange(4)]
    cursor, texts = Cursor(tree), list[int]()
    for _ in range(100):
        if generator.random() < 0.4:
            texts.append(tree.open())
            start = generator.randrange(len(phrase))
            tree.extend(texts[-1], [phrase[(start + index) % len(phrase)] for index in range(generator.randint(1, 40))])
        elif texts and generator.random() < 0.6 and tree.shrink(texts[0], generator.choice([3, 50]))[1]:
            texts.pop(0)
        for _ in range(generator.choice([0, 1, 1, 3, 20])):
            history.append(phrase[len(history) % len(phrase)] if generator.random() < 0.9 else generator.randrange(4))
        kept, found = cursor.suffixes(history), Cursor(tree).suffixes(history)
        assert kept.longest == found.longest
        assert kept.branches[: kept.longest] == found.branches[: found.longest]
        assert [(id(text), end) for text, end in kept.occurrences] == [
            (id(text), end) for text, end in found.occurrences
        ]
        assert list(kept.lengths) == list(found.lengths)


@pytest.mark.parametrize("seed", range(20))
def test_matches_are_those_a_scan_finds_where_texts_were_forgotten(seed: int) -> None:
    tree, texts, _ = grow(seed)
    for text in [text for text in texts.values() if len(text) > 1][:3]:
        suffixes = Cursor(tree).suffixes(text)
        sizes = range(1, min(len(text), tree.max_depth))
        assert suffixes.longest == max((size for size in sizes if following(texts, text[-size:])), default=0)
        for size in range(1, suffixes.longest + 1):
            if size <= len(suffixes.branches):
                number = suffixes.branches[size - 1].count
            else:
                number = sum(length >= size for length in suffixes.lengths)
            assert number == len(occurrences(texts, text[-size:]))


def test_known_drafts() -> None:
    tree = SuffixTree(24)
    text = tree.open()
    tree.extend(text, [1, 2, 3, 1, 2, 3, 1, 2])
    proposal = drafted(tree, [1, 2, 3, 1, 2, 3, 1, 2], MatchRule(), 8)
    assert list(proposal.token_ids) == [3, 1, 2]  # what arctic-inference 0.3.0 says, score included
    assert proposal.score == 1.5


def test_of_equals_the_one_seen_last_is_drafted() -> None:
    tree = SuffixTree(24)
    tree.extend(tree.open(), [7, 1, 7, 2, 7])
    assert list(drafted(tree, [9, 7], MatchRule(), 8).token_ids) == [2]
    many = SuffixTree(24)
    text = many.open()
    many.extend(text, [7, 1, 7, 2] * 20)
    assert list(drafted(many, [9, 7], MatchRule(), 8).token_ids) == [2]
    many.extend(text, [7, 1])
    assert list(drafted(many, [9, 7], MatchRule(), 8).token_ids) == [1]
