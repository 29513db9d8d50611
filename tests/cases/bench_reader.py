"""How vLLM's two bench clients read /metrics, written again from their behaviour: what they print must be true.

The Python client (0.33) and the Rust client differ in how they split a line; both sum every series whose name matches.
Source: reference/metrics-and-bench-clients.md sections 2.1 and 2.2.
"""

from dataclasses import dataclass, field

import requests

PREFIX = "vllm:spec_decode"


@dataclass
class Snapshot:
    """One scrape, as a bench client keeps it. `found` is False when no speculation series was there."""

    found: bool = False
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_pos: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """The Speculative Decoding section a bench client prints. Rates in percent."""

    rate: float
    length: float
    drafts: int
    draft_tokens: int
    accepted: int
    per_pos: list[float]


def scrape(base_url: str, accept: str | None = None) -> str:
    """One GET on a connection of its own, status 200 without a redirect."""
    headers = {"Accept": accept} if accept else {}
    response = requests.get(base_url + "/metrics", headers=headers, timeout=10, allow_redirects=False)
    assert response.status_code == 200
    return response.text


def read_as_python(page: str) -> Snapshot:
    """The value is everything behind the first whitespace of the line."""
    snapshot = Snapshot()
    for line in page.splitlines():
        if line.startswith(PREFIX) and _name(line).endswith("_total"):
            _, value = line.split(None, 1)
            _add(snapshot, line, _whole(value))
    return snapshot


def read_as_rust(page: str) -> Snapshot:
    """The value is the last whitespace-separated word of the line."""
    snapshot = Snapshot()
    for line in page.splitlines():
        if line.startswith(PREFIX) and _name(line).endswith("_total"):
            _add(snapshot, line, _whole(line.split()[-1]))
    return snapshot


def section(before: Snapshot, after: Snapshot) -> Section | None:
    """What is printed; None when the client leaves the section out, which it does silently."""
    draft_tokens, drafts = after.draft_tokens - before.draft_tokens, after.drafts - before.drafts
    if not (before.found and after.found) or draft_tokens <= 0:
        return None
    accepted = after.accepted - before.accepted
    positions = sorted(before.per_pos.keys() | after.per_pos.keys())
    return Section(
        rate=100 * accepted / draft_tokens,
        length=1 + accepted / drafts if drafts else 0.0,
        drafts=drafts,
        draft_tokens=draft_tokens,
        accepted=accepted,
        per_pos=[100 * (after.per_pos.get(i, 0) - before.per_pos.get(i, 0)) / drafts for i in positions],
    )


def _name(line: str) -> str:
    return line.split("{", 1)[0].split(" ", 1)[0]


def _whole(value: str) -> int:
    try:
        return int(float(value))
    except ValueError:
        return 0  # both clients skip a value they cannot read, without a word


def _add(snapshot: Snapshot, line: str, value: int) -> None:
    snapshot.found = True
    name = _name(line)
    if "num_drafts" in name:
        snapshot.drafts += value
    elif "num_draft_tokens" in name:
        snapshot.draft_tokens += value
    elif "num_accepted_tokens_per_pos" in name:
        position = int(line.split('position="', 1)[1].split('"', 1)[0])
        snapshot.per_pos[position] = snapshot.per_pos.get(position, 0) + value
    elif "num_accepted_tokens" in name:
        snapshot.accepted += value
