"""The suffix tree counts like a scan of its texts, through growth, removal and coming back; drafts follow the published rule."""

import random
from array import array
from collections import Counter

import pytest

from engine.speculation.suffix_match import MatchRule, Proposal, best_proposal
from engine.speculation.suffix_tree import Few, SuffixTree

Texts = dict[int, list[int]]


def grow(seed: int) -> tuple[SuffixTree, Texts, random.Random]:
    """A tree after a random life, and the texts it should know."""
    generator = random.Random(seed)
    tree = SuffixTree(generator.choice([2, 5, 9]))
    alphabet = generator.choice([1, 2, 4, 30])
    phrase = [generator.randrange(alphabet) for _ in range(generator.randint(1, 25))]
    texts: Texts = {}
    is_open: dict[int, bool] = {}
    for _ in range(generator.choice([30, 120])):
        action = generator.random()
        if action < 0.15 or not texts:
            text_id = tree.open()
            texts[text_id], is_open[text_id] = [], True
        chosen = generator.choice(sorted(texts))
        if action > 0.95:
            tree.remove(chosen)
            del texts[chosen], is_open[chosen]
        elif action > 0.8:
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
        assert tree.count(found) == len(there)
        assert tree.goes_on(found) == bool(expected)
        assert {one.token_id: one.times for one in tree.continuations(found, 0)} == expected
        best = tree.likeliest(found)
        assert (None if best is None else best.times) == max(expected.values(), default=None)
        if isinstance(found, Few) and len(run) > 1:
            shorter = tree.find(array("i", run[1:]))
            if isinstance(shorter, Few):
                preceded = tree.preceded(shorter, run[0])
                assert preceded is not None and sorted(preceded.places) == sorted(found.places)


def test_nothing_is_left_of_removed_texts() -> None:
    for seed in range(20):
        tree, texts, _ = grow(seed)
        for text_id in texts:
            tree.remove(text_id)
        assert len(tree) == tree.num_tokens == 0
        assert tree._root.children == {}
        assert tree._root.ends == set()


def scanned(texts: Texts, history: list[int], rule: MatchRule, most: int, depth: int) -> tuple[float, set[float]]:
    """(best score by scanning, all scores ties could lead to): the likeliest path, every way ties can be broken."""
    best: set[float] = set()
    for match_len in range(1, min(len(history), depth)):
        run = history[-match_len:]
        if not following(texts, run):
            break
        room = min(most, int(match_len * rule.factor + 1e-9), depth - match_len)
        best |= _path_scores(texts, run, room, 1.0, rule.min_probability)
    return max(best, default=0.0), best


def _path_scores(texts: Texts, run: list[int], room: int, probability: float, least: float) -> set[float]:
    expected = following(texts, run)
    if not room or not expected:
        return {0.0}
    most = max(expected.values())
    reached = probability * most / len(occurrences(texts, run))
    if reached < least - 1e-9:
        return {0.0}
    equals = [token for token, count in expected.items() if count == most]
    return {
        round(reached + behind, 9)
        for token in equals
        for behind in _path_scores(texts, [*run, token], room - 1, reached, least)
    }


@pytest.mark.parametrize("seed", range(30))
def test_a_path_is_a_likeliest_way_behind_the_best_match(seed: int) -> None:
    tree, texts, generator = grow(seed)
    for text in [text for text in texts.values() if len(text) > 1][:3]:
        rule = MatchRule(generator.choice([0.5, 1.0, 2.0]), generator.choice([0.01, 0.29]))
        most = generator.choice([1, 3, 6])
        proposal = best_proposal(tree, text, rule, most)
        highest, possible = scanned(texts, text, rule, most, tree.max_depth)
        assert any(proposal.score == pytest.approx(score) for score in possible | {0.0})
        assert proposal.score <= highest + 1e-6
        _check_path(texts, text, proposal)


def _check_path(texts: Texts, history: list[int], proposal: Proposal) -> None:
    """Each token followed most often, and the score is what counting says."""
    assert list(proposal.parents) == list(range(-1, len(proposal.token_ids) - 1))
    if not proposal.token_ids:
        return
    run = history[-proposal.match_len :]
    probability = score = 1.0
    score = 0.0
    for token_id in proposal.token_ids:
        expected = following(texts, run)
        assert expected[token_id] == max(expected.values())
        probability *= expected[token_id] / len(occurrences(texts, run))
        score += probability
        run = [*run, token_id]
    assert score == pytest.approx(proposal.score)


@pytest.mark.parametrize("seed", range(30))
def test_a_tree_holds_the_likeliest_nodes(seed: int) -> None:
    tree, texts, generator = grow(seed)
    for text in [text for text in texts.values() if len(text) > 1][:2]:
        most, least = generator.choice([1, 3, 6]), generator.choice([0.013, 0.091])
        proposal = best_proposal(tree, text, MatchRule(1.0, least, tree=True), most)
        expected = max(
            (
                sum(sorted(_node_probabilities(texts, text[-size:], 1.0, least, tree.max_depth), reverse=True)[:room])
                for size in range(1, min(len(text), tree.max_depth))
                if (room := min(most, size)) and following(texts, text[-size:])
            ),
            default=0.0,
        )
        assert proposal.score == pytest.approx(expected)
        assert all(-1 <= parent < node for node, parent in enumerate(proposal.parents))
        siblings = list(zip(proposal.parents, proposal.token_ids, strict=True))
        assert len(set(siblings)) == len(siblings)


def _node_probabilities(texts: Texts, run: list[int], probability: float, least: float, depth: int) -> list[float]:
    if len(run) == depth:
        return []
    total, found = len(occurrences(texts, run)), []
    for token, count in following(texts, run).items():
        reached = probability * count / total
        if reached >= least:
            found += [reached, *_node_probabilities(texts, [*run, token], reached, least, depth)]
    return found


def test_known_drafts() -> None:
    tree = SuffixTree(24)
    text = tree.open()
    tree.extend(text, [1, 2, 3, 1, 2, 3, 1, 2])
    proposal = best_proposal(tree, [1, 2, 3, 1, 2, 3, 1, 2], MatchRule(), 8)
    assert list(proposal.token_ids) == [3, 1, 2]  # what arctic-inference 0.3.0 says, score and match included
    assert (proposal.score, proposal.match_len) == (1.5, 5)


def test_of_equals_the_one_seen_last_is_drafted() -> None:
    tree = SuffixTree(24)
    tree.extend(tree.open(), [7, 1, 7, 2, 7])
    assert list(best_proposal(tree, [9, 7], MatchRule(), 8).token_ids) == [2]
    many = SuffixTree(24)
    text = many.open()
    many.extend(text, [7, 1, 7, 2] * 20)
    assert list(best_proposal(many, [9, 7], MatchRule(), 8).token_ids) == [2]
    many.extend(text, [7, 1])
    assert list(best_proposal(many, [9, 7], MatchRule(), 8).token_ids) == [1]
