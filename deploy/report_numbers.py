"""What a request's spans and a server's /metrics say about speculation, as numbers.

Owns the arithmetic of a report: rounds from spans, acceptance from rounds or from counters, a request's key figures.
Never draws and never talks to a server. Used by deploy.report and by
the pictures' modules.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.report_spans import Request, Span

_PREFIX = "vllm:spec_decode_num_"
_SAMPLE = re.compile(r"^(?P<name>vllm:spec_decode_num_\w+)\{(?P<labels>.*)\} (?P<value>\S+)$")
_POSITION = re.compile(r'(?:^|,)position="([0-9]{1,4})"')
_ENGINE = re.compile(r'(?:^|,)engine="([^"]*)"')


@dataclass(frozen=True)
class Round:
    """One verify of one sequence. `draft` is None for a plain round."""

    draft: Span | None
    verify: Span

    @property
    def drafted(self) -> int:
        return self.draft.number("num_draft_tokens") if self.draft is not None else 0

    @property
    def correct(self) -> int:
        return self.verify.number("num_correct_drafts")


@dataclass(frozen=True)
class Acceptance:
    """Drafts and what became of them. `per_position[i]`: drafts whose token at position i (from 0) was accepted."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted: int
    per_position: tuple[int, ...]
    engines: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def length(self) -> float:
        """Tokens per draft, the target's own included: what vLLM's bench clients call the acceptance length."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def rate_per_position(self) -> tuple[float, ...]:
        return tuple(accepted / self.num_drafts if self.num_drafts else 0.0 for accepted in self.per_position)


def rounds_under(request: Request, decode: Span) -> list[Round]:
    """The rounds of one decode_forward span in time order: a spec_draft belongs to the spec_verify that follows it."""
    phases = [span for span in request.children(decode) if span.name in ("spec_draft", "spec_verify")]
    phases.sort(key=lambda span: (span.start_ns, span.name))  # "spec_draft" first where both start at once
    rounds = []
    draft: Span | None = None
    for span in phases:
        if span.name == "spec_draft":
            draft = span
        else:
            rounds.append(Round(draft, span))
            draft = None
    return rounds


def rounds_of(request: Request) -> list[Round]:
    return [one for decode in request.named("decode_forward") for one in rounds_under(request, decode)]


def is_complete(request: Request) -> bool:
    """Every round that the decode_forward spans count has its spec_verify."""
    decodes = request.named("decode_forward")
    return bool(decodes) and all(
        len(rounds_under(request, decode)) == decode.number("num_rounds") for decode in decodes
    )


def acceptance_of(rounds: Sequence[Round]) -> Acceptance:
    drafts = [one for one in rounds if one.drafted]
    longest = max((one.drafted for one in drafts), default=0)
    return Acceptance(
        num_drafts=len(drafts),
        num_draft_tokens=sum(one.drafted for one in drafts),
        num_accepted=sum(one.correct for one in drafts),
        per_position=tuple(sum(one.correct > position for one in drafts) for position in range(longest)),
    )


def acceptance_in(metrics: str) -> Acceptance | None:
    """The totals on a /metrics page in the classic text format, all its engines together; None without the families."""
    totals: dict[str, float] = {}
    per_position: dict[int, float] = {}
    engines: set[str] = set()
    for match in filter(None, map(_SAMPLE.match, metrics.splitlines())):
        name, value = match["name"].removeprefix(_PREFIX), float(match["value"])
        position = _POSITION.search(match["labels"])
        if position is not None:
            per_position[int(position[1])] = per_position.get(int(position[1]), 0.0) + value
        else:
            totals[name] = totals.get(name, 0.0) + value
        engine = _ENGINE.search(match["labels"])
        engines |= {engine[1]} if engine is not None else set()
    if "drafts_total" not in totals:
        return None
    return Acceptance(
        num_drafts=int(totals["drafts_total"]),
        num_draft_tokens=int(totals.get("draft_tokens_total", 0)),
        num_accepted=int(totals.get("accepted_tokens_total", 0)),
        per_position=tuple(int(per_position[position]) for position in sorted(per_position)),
        engines=tuple(sorted(engines)),
    )


def milliseconds(duration_ns: int) -> str:
    """Three significant digits: 0.042 ms, 4.2 ms, 1234 ms."""
    value = duration_ns / 1e6
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f} ms"


def key_figures(request: Request) -> list[tuple[str, str]]:
    """What a reader wants first, as (name, value)."""
    root = request.root
    figures = [
        ("trace id", root.trace_id),
        ("request", f"{root.name}, {milliseconds(root.duration_ns)}"),
        ("tokens", f"{root.number('gen_ai.usage.input_tokens')} in, {root.number('gen_ai.usage.output_tokens')} out"),
    ]
    if root.error is not None:
        figures.append(("error", root.error or "yes"))
    for name in ("tokenize", "prefill_waiting", "prefill_forward", "decode_forward"):
        spans = request.named(name)
        if spans:
            figures.append((name, ", ".join(milliseconds(span.duration_ns) for span in spans[:4])))
    decodes = request.named("decode_forward")
    if decodes:
        figures += _figures_of_rounds(request, decodes)
    return figures


def _figures_of_rounds(request: Request, decodes: list[Span]) -> list[tuple[str, str]]:
    def total(attribute: str) -> int:
        return sum(decode.number(attribute) for decode in decodes)

    num_drafts, num_draft_tokens, correct = (
        total("num_drafts"), total("num_draft_tokens"), total("num_correct_drafts")
    )  # fmt: skip
    figures = [
        ("rounds", f"{total('num_rounds')}, {num_drafts} with a draft"),
        ("draft tokens", f"{num_draft_tokens}, {correct} accepted"),
    ]
    if num_drafts:
        acceptance = Acceptance(num_drafts, num_draft_tokens, correct, ())
        figures.append(("accept rate", f"{acceptance.rate:.1%}"))
        figures.append(("accept length", f"{acceptance.length:.2f}"))
    cut, trimmed = total("num_cut_tokens"), total("num_trimmed_tokens")
    if cut or trimmed:
        figures.append(("not delivered", f"{cut} cut, {trimmed} behind a stop string"))
    rounds = rounds_of(request)
    if rounds:
        drafting_ns = sum(one.draft.duration_ns for one in rounds if one.draft is not None)
        verifying_ns = sum(one.verify.duration_ns for one in rounds)
        figures.append(("time in rounds", f"{milliseconds(drafting_ns)} draft, {milliseconds(verifying_ns)} verify"))
    figures.append(("clock", ", ".join(sorted({str(decode.attributes.get("clock", "?")) for decode in decodes}))))
    return figures
