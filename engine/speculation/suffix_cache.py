"""The answers that drafts may be taken from: per scope, the oldest forgotten first.

Owns every scope's tree and the order in which answers go. What is said in one scope is never drafted in another. Both limits
are for all scopes together, so their number is bounded too: a scope without answers is forgotten. Used by
`engine.speculation.suffix`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.suffix_tree import SuffixTree

_LEAST_FORGOTTEN = 16  # tokens of answers that go, at each arrival: some 0.1 ms, and more than arrives in a round


@dataclass(eq=False, slots=True)
class Answer:
    """What one sequence has said. It may have been forgotten already: then it is not continued either."""

    scope: str
    prompt: bytes  # a digest
    text_id: int | None = None  # in the scope's tree; None before the first token, and once forgotten
    is_open: bool = True
    is_forgotten: bool = False


class AnswerCache:
    def __init__(self, max_depth: int, max_answers: int, max_tokens: int) -> None:
        self._max_depth = max_depth
        self._max_answers = max_answers  # 0: nothing is kept
        self._max_tokens = max_tokens
        self._trees: dict[str, SuffixTree] = {}
        self._answers: dict[Answer, None] = {}  # oldest first
        self._closed: dict[tuple[str, bytes], list[Answer]] = {}  # by scope and prompt, those that may be resumed
        self._leaving: deque[tuple[str, int]] = (
            deque()
        )  # (scope, text) of forgotten answers that are still being removed
        self.num_tokens = 0  # in all trees

    @property
    def scopes(self) -> tuple[str, ...]:
        return tuple(self._trees)

    def open(self, scope: str, prompt: bytes) -> Answer:
        """An answer that has not begun; it takes no place before its first token."""
        return Answer(scope, prompt)

    def resume(self, scope: str, prompt: bytes, token_ids: Sequence[int]) -> Answer | None:
        """The closed answer to this prompt that says exactly this, open again; None where there is none.

        A preempted sequence comes back like this. Where two said the same it does not matter which one goes on.
        """
        said = list(token_ids)
        for answer in reversed(self._closed.get((scope, prompt), [])):
            assert answer.text_id is not None  # narrowing: only answers with tokens are kept
            tree = self._trees[scope]
            if tree.text(answer.text_id).tolist() == said:
                self._no_longer_closed(answer)
                answer.is_open = True
                tree.reopen(answer.text_id)
                return answer
        return None

    def extend(self, answer: Answer, token_ids: Sequence[int]) -> None:
        """Learn what a sequence said next, and forget as much or a little more where that is due."""
        if token_ids and self._max_answers and not answer.is_forgotten:
            tree = self._trees.setdefault(answer.scope, SuffixTree(self._max_depth))
            if answer.text_id is None:
                answer.text_id = tree.open()
                self._answers[answer] = None
            tree.extend(answer.text_id, token_ids)
            self.num_tokens += len(token_ids)
        while len(self._answers) > self._max_answers:
            self._forget(next(iter(self._answers)))
        self._remove(max(_LEAST_FORGOTTEN, 2 * len(token_ids)))

    def close(self, answer: Answer) -> None:
        """The sequence ended; what it said stays."""
        answer.is_open = False
        if answer.text_id is not None:
            self._trees[answer.scope].close(answer.text_id)
            self._closed.setdefault((answer.scope, answer.prompt), []).append(answer)

    def tree(self, answer: Answer) -> SuffixTree | None:
        """Everything that is known in the answer's scope."""
        return self._trees.get(answer.scope)

    def _forget(self, answer: Answer) -> None:
        """It goes, from now on and piece by piece: a long answer at once would hold up a step for everybody."""
        assert answer.text_id is not None  # narrowing: only answers with tokens are kept
        self._leaving.append((answer.scope, answer.text_id))
        self._trees[answer.scope].close(answer.text_id)
        if not answer.is_open:
            self._no_longer_closed(answer)
        del self._answers[answer]
        answer.text_id, answer.is_forgotten = None, True

    def _remove(self, num_tokens: int) -> None:
        """At most so many tokens of what is forgotten, the oldest first; more is forgotten while there are too many."""
        while num_tokens and (self._leaving or self.num_tokens > self._max_tokens):
            if not self._leaving:
                self._forget(next(iter(self._answers)))
            scope, text_id = self._leaving[0]
            tree = self._trees[scope]
            num_removed, is_gone = tree.shrink(text_id, num_tokens)
            num_tokens -= num_removed
            self.num_tokens -= num_removed
            if is_gone:
                self._leaving.popleft()
                if not len(tree):
                    del self._trees[scope]

    def _no_longer_closed(self, answer: Answer) -> None:
        key = (answer.scope, answer.prompt)
        self._closed[key].remove(answer)
        if not self._closed[key]:
            del self._closed[key]
