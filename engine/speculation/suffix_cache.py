"""The answers that drafts may be taken from: per scope, the oldest forgotten first.

Owns every scope's tree and the order in which answers go. What is said in one scope is never drafted in another. Both limits
are for all scopes together, so their number is bounded too: a scope without answers is forgotten. Used by
`engine.speculation.suffix`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.suffix_tree import SuffixTree


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

    @property
    def num_tokens(self) -> int:
        return sum(tree.num_tokens for tree in self._trees.values())

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
        tree = self._trees.get(scope)
        for answer in reversed(self._answers):
            if answer.is_open or answer.scope != scope or answer.prompt != prompt:
                continue
            if tree is not None and answer.text_id is not None and list(tree.text(answer.text_id)) == list(token_ids):
                answer.is_open = True
                tree.reopen(answer.text_id)
                return answer
        return None

    def extend(self, answer: Answer, token_ids: Sequence[int]) -> None:
        """Learn what a sequence said next."""
        if not token_ids or answer.is_forgotten or not self._max_answers:
            return
        tree = self._trees.setdefault(answer.scope, SuffixTree(self._max_depth))
        if answer.text_id is None:
            answer.text_id = tree.open()
            self._answers[answer] = None
        tree.extend(answer.text_id, token_ids)
        while len(self._answers) > self._max_answers or self.num_tokens > self._max_tokens:
            self._forget(next(iter(self._answers)))

    def close(self, answer: Answer) -> None:
        """The sequence ended; what it said stays."""
        answer.is_open = False
        if answer.text_id is not None:
            self._trees[answer.scope].close(answer.text_id)

    def tree(self, answer: Answer) -> SuffixTree | None:
        """Everything that is known in the answer's scope."""
        return self._trees.get(answer.scope)

    def _forget(self, answer: Answer) -> None:
        assert answer.text_id is not None  # narrowing: only answers with tokens are kept
        tree = self._trees[answer.scope]
        tree.remove(answer.text_id)
        if not len(tree):
            del self._trees[answer.scope]
        del self._answers[answer]
        answer.text_id, answer.is_forgotten = None, True
