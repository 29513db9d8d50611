"""The Grafana dashboard and the rules, held to what a real server exports: no query asks for what is not there."""

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.deploy.dashboard import board, panels, queries, with_values
from tests.e2e.servers import Server, serve

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="')
WAIT_S = 60.0
SCRAPED = {"job", "instance"}  # what Prometheus adds to every series
ROWS = ("Overview", "Traffic", "Latency", "Speculation", "KV cache", "Engines", "Telemetry health")

Exported = dict[str, set[str]]  # name of a series -> its labels, over all its samples


@pytest.fixture(scope="module")
def exported() -> Iterator[Exported]:
    """What a server shows that speculates, traces, and has served a request and lost its collector."""
    with serve("--executor", "sim", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1/v1/traces") as server:
        _complete(server)
        deadline_s = time.monotonic() + WAIT_S
        while "drafthouse:span_export_failures_total{" not in (page := _page(server)):
            assert time.monotonic() < deadline_s, "no failed export was counted"
            time.sleep(0.1)
    names: Exported = {"up": set(SCRAPED), "ALERTS": {"alertname", "alertstate"}}
    for name, labels in SAMPLE.findall(page):
        names.setdefault(name, set(SCRAPED)).update(LABEL.findall(labels))
    yield names


def _complete(server: Server) -> None:
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 16}).encode()
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=WAIT_S).close()


def _page(server: Server) -> str:
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=WAIT_S) as answer:
        return str(answer.read().decode())


@cache
def rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@cache
def recorded() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def nodes(query: str) -> list[object]:
    found: list[object] = []
    promql_parser.walk(promql_parser.parse(query), lambda node: found.append(node))
    return found


def mistakes(query: str, exported: Exported) -> list[str]:
    """Names and labels in `query` that no server exports. A recorded name is checked where it is recorded."""
    tree = nodes(query)
    selectors = [node for node in tree if isinstance(node, promql_parser.VectorSelector)]
    raw = [selector for selector in selectors if selector.name not in recorded()]
    found = [f"{each.name} is exported by nobody" for each in raw if each.name not in exported]
    known = set().union(*(exported.get(each.name, set()) for each in raw))
    found += [
        f"{selector.name} has no label {matcher.name}"
        for selector in raw
        for matcher in selector.matchers.matchers
        if matcher.name not in exported.get(selector.name, set())
    ]
    if len(raw) == len(selectors):
        grouped = [label for node in tree for label in _grouped_by(node)]
        found += [f"nothing in the query has the label {label}" for label in grouped if label not in known]
    return found


def _grouped_by(node: object) -> list[str]:
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        return list(node.modifier.labels)
    return []


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_a_panel_asks_for_what_is_exported(query: str, exported: Exported) -> None:
    assert mistakes(with_values(query), exported) == []


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("record") or rule["alert"])
def test_a_rule_asks_for_what_is_exported(rule: dict[str, str], exported: Exported) -> None:
    assert mistakes(rule["expr"], exported) == []


def test_the_check_finds_a_wrong_name_and_a_wrong_label(exported: Exported) -> None:
    assert mistakes("rate(vllm:spec_decode_drafts_total[5m])", exported)
    assert mistakes('vllm:num_requests_running{reason="x"}', exported)
    assert mistakes("sum by (position) (vllm:num_requests_running)", exported)


def test_engine_totals_are_merged_before_they_are_summed() -> None:
    """A panel that adds engine totals without `max by (engine` counts each as often as it is scraped."""
    engine_scope = re.compile(
        r"vllm:(spec_decode|generation|prompt|prefix|num_|kv_|iteration)|drafthouse:(steps|verify|draft_|spec_[^a-z]*)"
    )
    for query in map(with_values, queries()):
        for node in nodes(query):
            if isinstance(node, promql_parser.AggregateExpr) and str(node.op) == "sum":
                inner = node.expr.prettify().lstrip("( ")
                assert not engine_scope.search(inner) or inner.startswith(("max by (engine", "sum")), query


def test_rows_are_what_operators_look_for() -> None:
    assert tuple(panel["title"] for panel in board()["panels"] if panel["type"] == "row") == ROWS


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in board()["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    identities = [panel["id"] for panel in board()["panels"]]
    assert len(identities) == len(set(identities))


def test_panels_use_the_provisioned_source_and_latencies_show_exemplars() -> None:
    sources = yaml.safe_load((MONITORING / "grafana/provisioning/datasources/drafthouse.yaml").read_text())
    by_type = {source["type"]: source for source in sources["datasources"]}
    (chosen,) = [each for each in board()["templating"]["list"] if each["type"] == "datasource"]
    assert chosen["current"]["value"] == by_type["prometheus"]["uid"]
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in panels() for target in panel["targets"])
    (link,) = by_type["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert link == {"name": "trace_id", "datasourceUid": by_type["jaeger"]["uid"]}
    latencies = [t for panel in panels() for t in panel["targets"] if "time_to_first_token" in t["expr"]]
    assert any(target.get("exemplar") for target in latencies)
