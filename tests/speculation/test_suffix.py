"""Suffix decoding as a drafter: who learns from whom, what is forgotten, and that a resumed sequence is learnt once."""

from engine.speculation.recipe import SpeculationSettings, SuffixSettings
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart
from engine.speculation.suffix import SuffixSpeculator
from protocol.sampling import SamplingParams
from tests.speculation.on_host import speculator_on_host

PARAMS = SamplingParams(max_tokens=99)
ANSWER = [40, 41, 42, 43, 44, 45]


def suffix(**options: object) -> SuffixSpeculator:
    settings = SpeculationSettings(8, suffix=SuffixSettings(**options))  # type: ignore[arg-type]
    speculator = speculator_on_host("suffix", settings, 100)
    assert isinstance(speculator, SuffixSpeculator)
    return speculator


def say(speculator: SuffixSpeculator, row: int, prompt: list[int], answer: list[int], scope: str = "") -> None:
    """A whole sequence, told token by token."""
    speculator.begin(SequenceStart(row, tuple(prompt), len(prompt), scope))
    tell(speculator, row, prompt, answer)
    speculator.end(row)


def tell(speculator: SuffixSpeculator, row: int, known: list[int], new: list[int]) -> None:
    history, start = [*known, *new], len(known) - 1
    for index in range(start, len(history) - 1):
        speculator.observe([CommittedSpan(row, index, (history[index],), history[index + 1], (), None)])


def propose(speculator: SuffixSpeculator, row: int, history: list[int], budget: int = 8) -> tuple[list[int], int]:
    draft = speculator.propose([DraftRow(row, tuple(history), budget, 1, PARAMS)])
    return draft.tokens[0, : int(draft.lengths[0])].tolist(), int(draft.sources[0])


def asked(speculator: SuffixSpeculator, prompt: list[int], scope: str = "", row: int = 9) -> list[int]:
    """What a new sequence is drafted right behind its prompt."""
    speculator.begin(SequenceStart(row, tuple(prompt), len(prompt), scope))
    drafted, _ = propose(speculator, row, prompt)
    speculator.end(row)
    return drafted


def test_an_answer_drafts_for_the_next_one_and_says_so() -> None:
    speculator = suffix()
    say(speculator, 0, [1, 2], ANSWER)
    speculator.begin(SequenceStart(1, (5, 40, 41), 3))
    assert propose(speculator, 1, [5, 40, 41]) == ([42, 43], 1)
    speculator.begin(SequenceStart(2, (7, 8, 9, 7, 8), 5))
    assert propose(speculator, 2, [7, 8, 9, 7, 8]) == ([9, 7], 0)
    assert speculator.capabilities.sources == ("suffix_local", "suffix_global")


def test_answers_that_go_on_draft_already() -> None:
    speculator = suffix()
    speculator.begin(SequenceStart(0, (1, 2), 2))
    tell(speculator, 0, [1, 2], ANSWER)
    assert asked(speculator, [5, 40, 41]) == [42, 43]


def test_prompts_draft_for_nobody_else() -> None:
    speculator = suffix()
    say(speculator, 0, [1, 2, *ANSWER], [60])
    assert asked(speculator, [5, 40, 41]) == []


def test_no_scope_learns_from_another_unless_shared() -> None:
    speculator = suffix()
    say(speculator, 0, [1, 2], ANSWER, scope="a")
    assert asked(speculator, [5, 40, 41], scope="b") == []
    assert asked(speculator, [5, 40, 41], scope="") == []
    assert asked(speculator, [5, 40, 41], scope="a") == [42, 43]
    shared = suffix(share=True)
    say(shared, 0, [1, 2], ANSWER, scope="a")
    assert asked(shared, [5, 40, 41], scope="b") == [42, 43]


def test_the_oldest_answers_are_forgotten_and_with_them_their_scopes() -> None:
    speculator = suffix(max_cached_requests=2)
    for number in range(4):
        say(speculator, 0, [1, 2], [50 + number, 60 + number], scope=f"s{number}")
    assert speculator._cache.scopes == ("s2", "s3")
    assert asked(speculator, [5, 51], scope="s1") == []
    assert asked(speculator, [5, 53], scope="s3") == [63]


def test_tokens_are_bounded_too() -> None:
    speculator = suffix(max_cached_tokens=20)
    for number in range(10):
        say(speculator, 0, [1, 2], [number * 6 + index for index in range(6)])
    assert speculator._cache.num_tokens == 18
    say(speculator, 0, [1, 2], list(range(30)))
    assert speculator._cache.num_tokens == 0  # too long by itself: it went while it was said
    say(speculator, 0, [1, 2], ANSWER)
    assert asked(speculator, [5, 40, 41]) == [42, 43]


def test_a_long_answer_is_forgotten_in_pieces() -> None:
    """All at once it would hold up a step for everybody; what arrives meanwhile goes on being learnt."""
    speculator = suffix(max_cached_tokens=1000)
    speculator.begin(SequenceStart(0, (1, 2), 2))
    speculator.observe([CommittedSpan(0, 1, (2, *([300] * 999)), 300, (), None)])
    speculator.end(0)
    speculator.begin(SequenceStart(1, (1, 2), 2))
    known, most = speculator._cache.num_tokens, 0
    for token in range(200):
        tell(speculator, 1, [1, 2, *range(token)], [token])
        most = max(most, known + 1 - speculator._cache.num_tokens)
        known = speculator._cache.num_tokens
    assert 1 < most <= 16
    assert known == 200
    assert asked(speculator, [5, 300]) == []
    assert asked(speculator, [5, 40, 41]) == [42, 43]


def test_a_piece_is_larger_than_what_arrives() -> None:
    speculator = suffix(max_cached_tokens=500)
    for number in range(8):
        speculator.begin(SequenceStart(0, (1, 2), 2))
        speculator.observe([CommittedSpan(0, 1, (2, *([number] * 299)), number, (), None)])
        speculator.end(0)
        assert speculator._cache.num_tokens <= 500


def test_an_answer_that_is_being_forgotten_is_not_resumed() -> None:
    speculator = suffix(max_cached_requests=1)
    say(speculator, 0, [1, 2], ANSWER * 20)
    say(speculator, 0, [5, 6], [60])
    speculator.begin(SequenceStart(3, (1, 2, *ANSWER * 20), 2))
    tell(speculator, 3, [1, 2, *ANSWER * 20], [61])
    speculator.end(3)
    assert speculator._cache.num_tokens == 20 * len(ANSWER) + 1


def test_no_cache_means_no_cache() -> None:
    speculator = suffix(max_cached_requests=0)
    say(speculator, 0, [1, 2], ANSWER)
    assert asked(speculator, [5, 40, 41]) == []
    assert speculator._cache.scopes == ()


def test_a_preempted_sequence_is_learnt_once_and_across_the_gap() -> None:
    """Twice would make its own text look twice as likely as another's."""
    speculator = suffix()
    speculator.begin(SequenceStart(0, (1, 2), 2))
    tell(speculator, 0, [1, 2], ANSWER[:3])
    speculator.end(0)
    speculator.begin(SequenceStart(4, (1, 2, *ANSWER[:3]), 2))
    tell(speculator, 4, [1, 2], ANSWER[:3])  # computed again
    tell(speculator, 4, [1, 2, *ANSWER[:3]], ANSWER[3:])
    speculator.end(4)
    assert speculator._cache.num_tokens == len(ANSWER)
    assert asked(speculator, [5, 41, 42]) == [43, 44]


def test_a_resumed_sequence_drafts_from_its_whole_text() -> None:
    speculator = suffix(max_cached_requests=0)
    history = [7, 8, 9, 20, 7, 8]
    speculator.begin(SequenceStart(0, tuple(history), 3))
    assert propose(speculator, 0, history) == ([9, 20], 0)


def test_a_tree_draft_has_parents_and_keeps_the_budget() -> None:
    speculator = suffix(mode="tree", max_cached_requests=0)
    history = [1, 2, 3, 1, 2, 4, 1, 2]
    speculator.begin(SequenceStart(0, tuple(history), len(history)))
    draft = speculator.propose([DraftRow(0, tuple(history), 2, len(history), PARAMS)])
    assert draft.parents is not None
    assert sorted(draft.tokens[0, :2].tolist()) == [3, 4]
    assert draft.parents[0, :2].tolist() == [-1, -1]
    assert speculator.capabilities.tree


def test_a_long_prompt_is_indexed_in_pieces() -> None:
    speculator = suffix(max_cached_requests=0)
    prompt = [*range(20, 90)] * 60
    speculator.begin(SequenceStart(0, (*prompt, 20, 21), len(prompt) + 2))
    row = speculator._rows[0]
    assert row.tree.num_tokens == 4096
    assert propose(speculator, 0, [*prompt, 20, 21])[0][:2] == [22, 23]
    assert row.tree.num_tokens == len(prompt) + 2
