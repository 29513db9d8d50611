"""The shipped docker-compose.yml in a real Docker engine, under load, with things killed in it.

Long (images are built), so it runs with `make compose-test`; elsewhere it skips and says why. The tests run in order on one
stack of three frontends and two engines, and each leaves it quiet.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.dashboard import queries, with_values
from tests.deploy.load import Load
from tests.deploy.stack import Stack, docker, get, inspect, running, wait_until, why_not

SKIP = why_not()
pytestmark = [
    pytest.mark.skipif(SKIP is not None, reason=SKIP or ""),
    pytest.mark.timeout(2400),
    pytest.mark.xdist_group("compose"),
]

RULES = Path(__file__).resolve().parents[2] / "deploy" / "monitoring" / "rules.yml"
FRONTENDS, ENGINES = 3, 2
CLIENTS = 12
SPANS_KEPT_S = 7.0  # an exporter that failed once waits some seconds
SAMPLE = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(frontend=FRONTENDS, engine=ENGINES) as stack:
        wait_until_settled(stack, FRONTENDS, ENGINES)
        yield stack


def engine_total(page: str, family: str) -> dict[str, float]:
    """By engine, summed over the family's other labels."""
    totals: dict[str, float] = {}
    for name, labels, value in SAMPLE.findall(page):
        if name == family:
            engine = dict(re.findall(r'(\w+)="([^"]*)"', labels))["engine"]
            totals[engine] = totals.get(engine, 0.0) + float(value)
    return totals


def up_engines(page: str) -> int:
    return int(sum(engine_total(page, "drafthouse:engine_up").values()))


def wait_until_settled(stack: Stack, num_frontends: int, num_engines: int) -> None:
    """Every frontend has every engine, the balancer has every frontend, and nothing runs or is held."""
    wait_until("frontends run", lambda: len(stack.containers("frontend")) == num_frontends or stack.logs("frontend"))

    def sees_all(container: str) -> bool:
        return up_engines(stack.page(container, "/metrics/engine")) == num_engines

    wait_until("every frontend has every engine", lambda: all(map(sees_all, stack.containers("frontend"))))
    wait_until("the balancer has every frontend", lambda: balanced(stack) == num_frontends or balanced(stack))
    wait_until("nothing runs", lambda: not any(held(stack).values()) or held(stack))


def balanced(stack: Stack) -> int:
    """How many frontends the balancer would send a request to."""
    (balancer,) = stack.containers("balancer")
    page = docker("exec", balancer, "wget", "-q", "-O", "-", "http://127.0.0.1:8404/metrics")
    states = re.findall(r'haproxy_server_status\{proxy="ready",server="[^"]+",state="UP"\} (\d)', page)
    return sum(map(int, states))


def held(stack: Stack) -> dict[str, float]:
    """What live engines run, queue and hold."""
    page = get(f"{stack.api_url}/metrics/engine")
    families = ("vllm:num_requests_running", "vllm:num_requests_waiting", "drafthouse:kv_blocks_used")
    return {family: sum(engine_total(page, family).values()) for family in families}


def totals(page: str) -> dict[str, float]:
    """What responses can be held against, over all engines."""
    families = {
        "completion_tokens": "vllm:generation_tokens_total",
        "num_spec_steps": "vllm:spec_decode_num_drafts_total",
        "num_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "num_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    }
    return {name: sum(engine_total(page, family).values()) for name, family in families.items()}


def sums(load: Load) -> dict[str, float]:
    """The same, added up over the answers."""
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    added = {name: float(sum(each.statistics[name] for each in load.outcomes)) for name in names}
    return {"completion_tokens": float(sum(each.completion_tokens for each in load.outcomes)), **added}


def serve_exactly(stack: Stack, num_requests: int) -> None:
    """A load whose answers must add up to the counters' increments, read through every frontend."""
    before = totals(get(f"{stack.api_url}/metrics/engine"))
    spans_before = last_span_counts(stack)
    with Load(stack.api_port, CLIENTS, max_tokens=48, num_requests=num_requests) as load:
        load.wait()
    assert load.summary() == {"complete": num_requests}
    answered = sums(load)
    for frontend in stack.containers("frontend"):
        page = totals(stack.page(frontend, "/metrics/engine"))
        assert {name: page[name] - before[name] for name in page} == answered, f"through {frontend}"
    expect_spans(stack, spans_before, answered, num_requests)
    expect_prometheus(stack)


def last_span_counts(stack: Stack) -> dict:
    """What the collector was sent once the spans of what ran before have come: a failed export is tried again."""
    counts, unchanged_since_s = stack.span_counts(), time.monotonic()
    while time.monotonic() - unchanged_since_s < SPANS_KEPT_S:
        time.sleep(0.5)
        now = stack.span_counts()
        if now != counts:
            counts, unchanged_since_s = now, time.monotonic()
    return counts


def expect_spans(stack: Stack, before: dict, answered: dict[str, float], num_requests: int) -> None:
    """The collector was sent every request, every draft, and the accepted tokens of all rounds."""
    expected = {
        "POST /v1/completions": num_requests,
        "spec_draft": answered["num_spec_steps"],
        "correct drafts": answered["num_accepted_draft_tokens"],
    }

    def received() -> dict[str, float]:
        now = stack.span_counts()
        spans = {name: now["spans"].get(name, 0) - before["spans"].get(name, 0) for name in now["spans"]}
        spans["correct drafts"] = now["correct_drafts"] - before["correct_drafts"]
        return {name: spans.get(name, 0) for name in expected}

    wait_until("the collector has all spans", lambda: received() == expected or (received(), expected), 30)


def expect_prometheus(stack: Stack) -> None:
    """Prometheus' own totals are the engines', through whatever it scraped."""
    page = get(f"{stack.api_url}/metrics/engine")
    expected = engine_total(page, "vllm:generation_tokens_total")

    def recorded() -> dict[str, float]:
        result = stack.query("max by (engine) (vllm:generation_tokens_total)")
        return {sample["metric"]["engine"]: float(sample["value"][1]) for sample in result}

    wait_until("Prometheus has the engines' totals", lambda: recorded() == expected or (recorded(), expected), 40)
    (count,) = stack.query("count(vllm:generation_tokens_total)")
    assert float(count["value"][1]) == len(expected), "an engine's series exists more than once"


def test_answers_spans_counters_and_prometheus_agree(stack: Stack) -> None:
    serve_exactly(stack, 120)
    page = get(f"{stack.api_url}/metrics/engine")
    assert all(value > 0 for value in engine_total(page, "vllm:generation_tokens_total").values()), "an engine idled"


def test_frontends_share_the_load_and_are_scraped_each(stack: Stack) -> None:
    """Each frontend is scraped at a time of its own, so its numbers come when they come; then they add up."""

    def served() -> list[float]:
        result = stack.query('sum by (instance) (vllm:request_success_total{finished_reason="length"})')
        return [float(sample["value"][1]) for sample in result]

    wait_until("every answer is in some frontend's numbers", lambda: sum(served()) == 120 or served(), 40)
    assert len(served()) == FRONTENDS and all(number > 0 for number in served())
    (answered,) = stack.query('sum(http_requests_total{handler="/v1/completions",status="2xx"})')
    assert float(answered["value"][1]) == 120, "an answer that was complete counts as its client's departure"
    assert len(stack.query('up{job="drafthouse-frontend"} == 1')) == FRONTENDS


def test_rules_and_dashboard_evaluate_in_the_real_prometheus(stack: Stack) -> None:
    def health() -> dict[str, str]:
        groups = stack.prometheus("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    recorded = [rule["record"] for group in rule_groups() for rule in group["rules"] if "record" in rule]
    wait_until("all rules are evaluated", lambda: set(health().values()) == {"ok"} or health())
    asked = [query for query in [*recorded, *map(with_values, queries())] if not is_rare(query)]
    with Load(stack.api_port, 4, max_tokens=48):  # a rate needs increments between two scrapes
        wait_until(
            "rules and panels have values",
            lambda: all(map(stack.query, asked)) or [query for query in asked if not stack.query(query)],
        )
    for query in filter(is_rare, map(with_values, queries())):
        stack.query(query)  # raises when Prometheus refuses it


def rule_groups() -> list:
    return yaml.safe_load(RULES.read_text())["groups"]


def is_rare(query: str) -> bool:
    """Whether a healthy fleet of simulated engines, which neither observe nor accept, has nothing to show there."""
    names = ("span_export_failures", "observe_seconds", "accept_seconds")
    return query.endswith("> 0") or query.startswith("ALERTS") or any(name in query for name in names)


def test_an_engine_that_dies_costs_clear_errors_and_comes_back(stack: Stack) -> None:
    with Load(stack.api_port, CLIENTS, max_tokens=64) as load:
        wait_until("the load runs", lambda: load.count() > CLIENTS)
        stack.crash(stack.containers("engine")[0])
        wait_until(
            "its death is noticed", lambda: up_engines(get(f"{stack.api_url}/metrics/engine")) < ENGINES or "all up"
        )
        wait_until("it is back", lambda: up_engines(get(f"{stack.api_url}/metrics/engine")) == ENGINES or "not back")
    assert load.count(lambda it: it.kind in ("cut", "wrong")) == 0, load.summary()
    assert load.count(lambda it: it.kind == "complete") > load.count(lambda it: it.kind == "refused"), load.summary()
    wait_until_settled(stack, FRONTENDS, ENGINES)
    serve_exactly(stack, 60)


def test_a_frontend_that_dies_cuts_only_its_own_streams(stack: Stack) -> None:
    with Load(stack.api_port, CLIENTS, max_tokens=64) as load:
        wait_until("the load runs", lambda: load.count() > CLIENTS)
        stack.crash(stack.containers("frontend")[0])
        asked = load.count()
        wait_until("the others go on", lambda: load.count() > asked + 3 * CLIENTS or load.count())
    assert load.count(lambda it: it.kind == "wrong") == 0, load.summary()
    # A stream of a killed process can only break off, and does so visibly; at most one per client was on it.
    assert load.count(lambda it: it.kind == "cut") <= CLIENTS, load.summary()
    wait_until_settled(stack, FRONTENDS, ENGINES)
    serve_exactly(stack, 60)


def test_scaling_down_and_up_under_load_loses_nothing(stack: Stack) -> None:
    """Clients that ask again when told to, as OpenAI's do, get all they asked for."""
    with Load(stack.api_port, CLIENTS, max_tokens=64, retries=2) as load:
        wait_until("the load runs", lambda: load.count() > CLIENTS)
        stack.up(frontend=1, engine=1)
        wait_until("fewer are there", lambda: balanced(stack) == 1 or balanced(stack))
        stack.up(frontend=4, engine=2)
        wait_until("more are there", lambda: balanced(stack) == 4 or balanced(stack))
    assert set(load.summary()) == {"complete"}, load.summary()
    # Between a frontend's first word that it leaves and the balancer's next question lies a quarter of a second.
    assert load.num_retries < load.count() / 5, (load.num_retries, load.summary())
    wait_until_settled(stack, 4, ENGINES)


def test_containers_are_locked_down(stack: Stack) -> None:
    for service in ("engine", "frontend", "balancer", "collector", "prometheus"):
        for container in stack.containers(service):
            described = inspect(container)
            host = described["HostConfig"]
            assert host["ReadonlyRootfs"], service
            assert host["CapDrop"] == ["ALL"] and "no-new-privileges:true" in host["SecurityOpt"], service
            assert described["Config"]["User"] not in ("", "root", "0"), service
    for service in ("engine", "frontend"):
        for container in stack.containers(service):
            assert not any(inspect(container)["NetworkSettings"]["Ports"].values()), f"{service} publishes a port"
    (engine, *_) = stack.containers("engine")
    assert list(inspect(engine)["NetworkSettings"]["Networks"]) == [f"{stack.project}_wire"]


def test_prometheus_configuration_names_what_answers(stack: Stack) -> None:
    def down() -> list[str]:
        return [sample["metric"]["job"] for sample in stack.query("up == 0")]

    # rotel, which stands in for the collector here, has no metrics of its own; what was scaled away leaves DNS with a delay.
    wait_until("all targets answer", lambda: set(down()) <= {"collector"} or json.dumps(down()))
