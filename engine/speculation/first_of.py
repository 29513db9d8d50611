"""Several drafters in an order: each row is drafted for by the first that has something to say.

Owns who is asked for which row, and how what they answer becomes one Draft; every member hears everything. Never drafts
itself. Built by `first_of_recipe`. B = rows asked for, W = the longest member's max_draft_len, V = vocabulary.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from engine.speculation.budget import uses_any
from engine.speculation.draft import Draft, empty_draft
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class _Answer:
    """What one member said when it was asked for some of the rows."""

    draft: Draft
    sources: torch.Tensor  # int8 [rows it was asked for], in the numbering of all where it drafts for any
    found: tuple[tuple[int, int], ...]  # (row of `draft`, row of the whole) of those it drafts for

    def covers(self, num_rows: int, width: int) -> bool:
        """It was asked for every row, and its draft is as wide as the whole."""
        return self.draft.tokens.shape == (num_rows, width)


class FirstOfSpeculator(Speculator):
    def __init__(self, members: Sequence[Speculator], capabilities: Capabilities, vocab_size: int) -> None:
        """`capabilities` as `first_of_recipe.combined` gives them for these members."""
        self.capabilities = capabilities
        self._members = tuple(members)
        self._vocab_size = vocab_size
        hearing = [member for member in members if type(member).observe is not Speculator.observe]
        self._on_host = tuple(member for member in hearing if member.capabilities.drafts_on_host)
        self._on_device = tuple(member for member in hearing if not member.capabilities.drafts_on_host)
        # What members on the host made of the spans of a call that failed; its repetition must not tell them again.
        self._told: dict[int, tuple[CommittedSpan, Exception | None]] = {}

    def begin(self, start: SequenceStart) -> None:
        for member in self._members:
            member.begin(start)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        waiting = list(range(len(rows)))
        answers: list[_Answer] = []
        for member in self._members:
            unsupported = member.capabilities.unsupported_sampling
            asked = waiting
            if unsupported:
                asked = [index for index in waiting if not uses_any(rows[index].sampling, unsupported)]
            if asked:
                answer = self._ask(member, [rows[index] for index in asked], asked)
                answers.append(answer)
                if answer.found:
                    found = {index for _, index in answer.found}
                    waiting = [index for index in waiting if index not in found]
        return self._joined(answers, len(rows))

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        """Members on the device hear all spans in one call, members on the host one span per call and each once.

        When one of them raises, the engine tells the spans again, one by one: then the members on the host hear only
        what they have not heard, and the row whose span they failed on fails.
        """
        for member in self._on_device:
            member.observe([self._as_seen_by(member, span) for span in spans])
        if not self._on_host:
            return
        is_repeated = all(id(span) in self._told for span in spans)
        if not is_repeated:
            self._told = {id(span): (span, self._tell(span)) for span in spans}
        errors = [error for span in spans if (error := self._told[id(span)][1]) is not None]
        if errors:
            raise errors[0]
        if not is_repeated:
            self._told = {}

    def end(self, row: int) -> None:
        """Every member forgets the row, also when one of them cannot."""
        with ExitStack() as every:
            for member in self._members:
                every.callback(member.end, row)

    # ---- one member ----

    def _ask(self, member: Speculator, rows: Sequence[DraftRow], indices: Sequence[int]) -> _Answer:
        width = member.capabilities.max_draft_len
        limited = [row if row.budget <= width else replace(row, budget=width) for row in rows]
        draft = member.propose(limited)
        lengths = draft.lengths.tolist()  # free where lengths are known on the host
        found = tuple((place, index) for place, index in enumerate(indices) if lengths[place])
        return _Answer(draft, self._numbered(draft.sources, member) if found else draft.sources, found)

    def _numbered(self, sources: torch.Tensor, member: Speculator) -> torch.Tensor:
        """A member's sources in the numbering of all."""
        numbers = [self.capabilities.sources.index(name) for name in member.capabilities.sources]
        return torch.tensor([numbers[source] for source in sources.tolist()], dtype=torch.int8)

    def _as_seen_by(self, member: Speculator, span: CommittedSpan) -> CommittedSpan:
        """The span with the hidden states that this member asked for."""
        wanted = member.capabilities.taps
        if span.taps is None or wanted == self.capabilities.taps:
            return span
        columns = [self.capabilities.taps.index(tap) for tap in wanted]
        return replace(span, taps=span.taps[:, columns] if columns else None)

    def _tell(self, span: CommittedSpan) -> Exception | None:
        """Tell the members on the host; what one of them raised fails the row, so the others need not hear."""
        try:
            for member in self._on_host:
                member.observe([self._as_seen_by(member, span)])
        except Exception as error:  # noqa: BLE001  # of one row: raised again in the call that is the row's own
            return error
        return None

    # ---- one draft ----

    def _joined(self, answers: Sequence[_Answer], num_rows: int) -> Draft:
        drafting = [answer for answer in answers if answer.found]
        num_forwards = sum(answer.draft.num_forwards for answer in answers)
        width = self.capabilities.max_draft_len
        if not drafting:
            none = empty_draft(num_rows, width, _HOST)
            return replace(none, num_forwards=num_forwards) if num_forwards else none
        [first, *others] = drafting
        if (
            not others
            and first.covers(num_rows, width)
            and (first.draft.probs is None) != self.capabilities.gives_probs
        ):
            return replace(first.draft, sources=first.sources, num_forwards=num_forwards)  # the usual case, uncopied
        device = next((one.draft.tokens.device for one in drafting if one.draft.tokens.device != _HOST), _HOST)
        joined = _Join(num_rows, width, device)
        tokens = joined.of([(answer, answer.draft.tokens) for answer in drafting])
        return Draft(
            tokens=tokens,
            lengths=_Join(num_rows, 0, _HOST).of([(answer, answer.draft.lengths) for answer in drafting]),
            parents=_joined_parents(joined, drafting),
            probs=self._joined_probs(joined, drafting) if self.capabilities.gives_probs else None,
            roots=_joined_roots(joined, drafting),
            has_root=_joined_flags(_Join(num_rows, 0, _HOST), drafting),
            sources=_Join(num_rows, 0, _HOST).of([(answer, answer.sources) for answer in drafting]),
            num_forwards=num_forwards,
        )

    def _joined_probs(self, joined: "_Join", answers: Sequence[_Answer]) -> torch.Tensor:
        """What tokens were drawn from; of a deterministic draft, all mass on its token.

        Also in a step in which nobody drew: the rule that judges a row must not depend on its neighbours.
        """
        return joined.of([(answer, _probs(answer.draft, self._vocab_size)) for answer in answers])


@dataclass(frozen=True)
class _Join:
    """Puts rows of several drafts in the places they have among B rows, each as wide as W."""

    num_rows: int
    width: int  # W; not read for values without a width
    device: torch.device

    def of(self, parts: Sequence[tuple[_Answer, torch.Tensor]], fill: int = 0) -> torch.Tensor:
        """[B] from parts [rows], or [B, W, ...] from parts [rows, up to W, ...]."""
        like = parts[0][1]
        shape = (self.num_rows, *((self.width,) if like.dim() > 1 else ()), *like.shape[2:])
        whole = torch.full(shape, fill, dtype=like.dtype, device=self.device)
        for answer, part in parts:
            places = torch.tensor(answer.found, dtype=torch.int64)
            taken = part[places[:, 0].to(part.device, non_blocking=True)].to(self.device, non_blocking=True)
            where = places[:, 1].to(self.device, non_blocking=True)
            if part.dim() > 1:
                whole[where, : part.shape[1]] = taken
            else:
                whole[where] = taken
        return whole


def _joined_parents(joined: _Join, answers: Sequence[_Answer]) -> torch.Tensor | None:
    """Beside a tree a chain is a tree whose every node has one child; without a tree all are chains."""
    if all(answer.draft.parents is None for answer in answers):
        return None
    return joined.of([(answer, _parents(answer.draft)) for answer in answers], fill=-1)


def _parents(draft: Draft) -> torch.Tensor:
    if draft.parents is not None:
        return draft.parents
    num_rows, width = draft.tokens.shape
    chain = torch.arange(-1, width - 1, dtype=torch.int32, device=draft.tokens.device)
    return chain.expand(num_rows, width)


def _probs(draft: Draft, vocab_size: int) -> torch.Tensor:
    """Float32 [rows, width, V]; entries at and beyond a row's length are undefined, as in any Draft."""
    if draft.probs is not None:
        return draft.probs
    one_hot = torch.zeros(*draft.tokens.shape, vocab_size, device=draft.tokens.device)
    return one_hot.scatter_(2, draft.tokens.to(torch.int64).clamp(0, vocab_size - 1)[:, :, None], 1.0)


def _joined_roots(joined: _Join, answers: Sequence[_Answer]) -> torch.Tensor | None:
    """-1 where drafting produced none."""
    given = [(answer, answer.draft.roots) for answer in answers if answer.draft.roots is not None]
    return joined.of(given, fill=-1) if given else None


def _joined_flags(joined: _Join, answers: Sequence[_Answer]) -> torch.Tensor | None:
    """Which rows have a root."""
    given = [(answer, answer.draft.has_root) for answer in answers if answer.draft.has_root is not None]
    return joined.of(given) if given else None
