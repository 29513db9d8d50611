"""Recording and alert rules under promtool: the same results whatever scrapes what, and alerts that fire and stay quiet."""

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "monitoring" / "rules.yml"
MODEL = "model-a"
ENGINES = ("0", "1")
# Per engine and minute: an idle engine beside a busy one shows ratios that are averages of ratios.
DRAFTS = {"0": 60, "1": 600}
DRAFT_TOKENS = {"0": 300, "1": 3000}
ACCEPTED = {"0": 60, "1": 2400}
GENERATED = {"0": 120, "1": 6000}
WAITING = {"0": 3, "1": 5}
RUNNING = {"0": 4, "1": 6}
MINUTES = 20

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


@dataclass(frozen=True)
class Layout:
    """`scraped_once`: engine totals come through one target, as shipped; else from every frontend."""

    num_frontends: int
    scraped_once: bool

    @property
    def engine_targets(self) -> list[dict[str, str]]:
        if self.scraped_once:
            return [{"job": "drafthouse-engine", "instance": "balancer:8001"}]
        return self.frontend_targets

    @property
    def frontend_targets(self) -> list[dict[str, str]]:
        return [
            {"job": "drafthouse-frontend", "instance": f"10.0.0.{number}:8000"} for number in range(self.num_frontends)
        ]


LAYOUTS = [Layout(number, once) for number, once in product((1, 3), (True, False))]


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def rising(per_minute: float, minutes: int = MINUTES) -> str:
    return f"0+{per_minute:g}x{minutes}"


def steady(value: float, minutes: int = MINUTES) -> str:
    return f"{value:g}+0x{minutes}"


def engine_series(layout: Layout) -> Iterator[dict[str, str]]:
    counters = {
        "vllm:spec_decode_num_drafts_total": DRAFTS,
        "vllm:spec_decode_num_draft_tokens_total": DRAFT_TOKENS,
        "vllm:spec_decode_num_accepted_tokens_total": ACCEPTED,
        "vllm:generation_tokens_total": GENERATED,
    }
    for target, engine in product(layout.engine_targets, ENGINES):
        labels = {**target, "engine": engine, "model_name": MODEL}
        for name, per_minute in counters.items():
            yield series(name, rising(per_minute[engine]), **labels)
        yield series("vllm:num_requests_waiting", steady(WAITING[engine]), **labels)
        yield series("vllm:num_requests_running", steady(RUNNING[engine]), **labels)
        yield series("drafthouse:engine_up", steady(1), **target, engine=engine)
        yield series("drafthouse:step_seconds_bucket", rising(60), **labels, le="0.1")
        yield series("drafthouse:step_seconds_bucket", rising(60), **labels, le="+Inf")


def frontend_series(layout: Layout) -> Iterator[dict[str, str]]:
    """Sixty requests a minute in all, however many frontends share them; 54 of them see a token within 0.1 s."""
    share = 60 / layout.num_frontends
    for target, engine in product(layout.frontend_targets, ENGINES):
        labels = {**target, "engine": engine, "model_name": MODEL}
        part = share / len(ENGINES)
        for bound, fraction in (("0.1", 0.9), ("1", 1.0), ("+Inf", 1.0)):
            yield series("vllm:time_to_first_token_seconds_bucket", rising(part * fraction), **labels, le=bound)
        yield series("vllm:request_success_total", rising(part), **labels, finished_reason="stop")
    for target in layout.frontend_targets:
        ok = {"handler": "/v1/completions", "method": "POST", "status": "2xx"}
        yield series("http_requests_total", rising(share * 0.75), **target, **ok)
        yield series("http_requests_total", rising(share * 0.25), **target, **{**ok, "status": "5xx"})
        yield series("http_requests_total", rising(1000), **target, **{**ok, "handler": "/metrics"})
        yield series("up", steady(1), **target)


EXPECTED = {
    "model:generation_tokens:rate5m": sum(GENERATED.values()) / 60,
    "model:spec_acceptance_rate:ratio5m": sum(ACCEPTED.values()) / sum(DRAFT_TOKENS.values()),
    "model:spec_acceptance_length:ratio5m": 1 + sum(ACCEPTED.values()) / sum(DRAFTS.values()),
    "model:requests_waiting": sum(WAITING.values()),
    "model:requests_running": sum(RUNNING.values()),
    'engine:spec_acceptance_rate:ratio5m{engine="0"}': ACCEPTED["0"] / DRAFT_TOKENS["0"],
    'engine:spec_acceptance_length:ratio5m{engine="1"}': 1 + ACCEPTED["1"] / DRAFTS["1"],
    'engine:generation_tokens:rate5m{engine="1"}': GENERATED["1"] / 60,
    'engine:step_seconds:p95_5m{engine="0"}': 0.095,
    "sum(engine:up)": len(ENGINES),
    "sum(model:requests_finished:rate5m)": 1.0,
    "model:time_to_first_token_seconds:p50_5m": 0.1 * 0.5 / 0.9,
    "model:time_to_first_token_seconds:p95_5m": 0.1 + 0.9 * 0.5,
    'fleet:http_requests:rate5m{status="5xx"}': 0.25,
    "fleet:http_errors:ratio5m": 0.25,
}


def value_tests(expected: dict[str, float]) -> list[dict[str, Any]]:
    """Values, whatever labels stand beside them, to six digits behind the point: whole numbers, which promtool compares."""
    return [
        {
            "expr": f"round(1e6 * sum({expression}))",
            "eval_time": "15m",
            "exp_samples": [{"labels": "{}", "value": round(1e6 * value)}],
        }
        for expression, value in expected.items()
    ]


def promtool(directory: Path, *groups: dict[str, Any], evaluate: str = "1m") -> subprocess.CompletedProcess[str]:
    tests = directory / "rules_test.yml"
    common = {"interval": "1m"}
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": evaluate,
        "tests": [{**common, **group} for group in groups],
    }
    tests.write_text(yaml.safe_dump(document))
    return subprocess.run(["promtool", "test", "rules", str(tests)], capture_output=True, text=True, check=False)


def assert_passes(directory: Path, *groups: dict[str, Any], evaluate: str = "1m") -> None:
    result = promtool(directory, *groups, evaluate=evaluate)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda it: f"{it.num_frontends}-{'once' if it.scraped_once else 'each'}"
)
def test_rules_count_once_with_any_number_of_frontends(layout: Layout, tmp_path: Path) -> None:
    inputs = [*engine_series(layout), *frontend_series(layout)]
    assert_passes(tmp_path, {"input_series": inputs, "promql_expr_test": value_tests(EXPECTED)})


def test_a_plain_sum_would_count_three_times(tmp_path: Path) -> None:
    """The layouts above really contain copies: what the rules avoid is there to be avoided."""
    layout = Layout(3, scraped_once=False)
    naive = {"sum(rate(vllm:generation_tokens_total[5m]))": 3 * sum(GENERATED.values()) / 60}
    inputs = list(engine_series(layout))
    assert_passes(tmp_path, {"input_series": inputs, "promql_expr_test": value_tests(naive)})
    wrong = {"model:generation_tokens:rate5m": naive.popitem()[1]}
    assert promtool(tmp_path, {"input_series": inputs, "promql_expr_test": value_tests(wrong)}).returncode == 1


def test_a_new_epoch_is_a_counter_reset(tmp_path: Path) -> None:
    """An engine restarts after ten minutes; its counter begins again at zero and no rate goes negative or jumps."""
    values = "0+600x9 0+600x10"
    inputs = [series("vllm:generation_tokens_total", values, instance="b:1", engine="0", model_name=MODEL)]
    # Versions of Prometheus differ in whether a window has five or six samples, so in what they make of the missing minute.
    plausible = {"expr": "count(engine:generation_tokens:rate5m > 5 <= 10)", "eval_time": "12m"}
    assert_passes(
        tmp_path,
        {"input_series": inputs, "promql_expr_test": [{**plausible, "exp_samples": [{"labels": "{}", "value": 1}]}]},
    )


@dataclass(frozen=True)
class Incident:
    """One thing that is wrong, and the alert that must say so."""

    alert: str
    inputs: tuple[dict[str, str], ...]
    at: str = "18m"
    evaluate: str = "1m"  # every minute of a day is 16 s of promtool


_FRONTEND = {"job": "drafthouse-frontend", "instance": "10.0.0.0:8000"}
_ENGINE = {"job": "drafthouse-engine", "instance": "balancer:8001", "engine": "0", "model_name": MODEL}
_UP = series("drafthouse:engine_up", steady(1), job="drafthouse-engine", instance="balancer:8001", engine="0")
_FRONTEND_UP = series("up", steady(1), **_FRONTEND)
_DAY = 1500
_HTTP = {**_FRONTEND, "handler": "/v1/completions", "method": "POST"}


def _engine_up(values: str) -> dict[str, str]:
    return series("drafthouse:engine_up", values, job="drafthouse-engine", instance="balancer:8001", engine="0")


INCIDENTS = [
    Incident("DrafthouseNoFrontend", (_UP, series("up", steady(0), **_FRONTEND))),
    Incident("DrafthouseFrontendDown", (_UP, series("up", steady(0), **_FRONTEND))),
    Incident("DrafthouseNoEngine", (_FRONTEND_UP,)),
    Incident("DrafthouseNoEngine", (_FRONTEND_UP, _engine_up("1+0x9 0+0x10"))),
    Incident("DrafthouseEngineDown", (_FRONTEND_UP, _engine_up("1+0x9 0+0x10"))),
    Incident(
        "DrafthouseEngineRestarts",
        (_UP, _FRONTEND_UP, series("drafthouse:engine_epoch_start_time_seconds", "1x5 2x4 3x4 4x4", **_ENGINE)),
    ),
    Incident(
        "DrafthouseStepsFail",
        (_UP, _FRONTEND_UP, series("drafthouse:steps_total", rising(1), **_ENGINE, outcome="failed")),
    ),
    Incident(
        "DrafthouseHttpErrors",
        (
            _UP,
            _FRONTEND_UP,
            series("http_requests_total", rising(90), **_HTTP, status="2xx"),
            series("http_requests_total", rising(10), **_HTTP, status="5xx"),
        ),
    ),
    Incident(
        "DrafthouseRequestsEndInError",
        (
            _UP,
            _FRONTEND_UP,
            series("vllm:request_success_total", rising(90), **_FRONTEND, model_name=MODEL, finished_reason="stop"),
            series("vllm:request_success_total", rising(10), **_FRONTEND, model_name=MODEL, finished_reason="error"),
        ),
    ),
    Incident(
        "DrafthouseRejections",
        (
            _UP,
            _FRONTEND_UP,
            series("vllm:admission_rejections_total", rising(1), **_FRONTEND, model_name=MODEL, reason="expired"),
        ),
    ),
    Incident(
        "DrafthouseQueue",
        (
            _UP,
            _FRONTEND_UP,
            series("vllm:num_requests_waiting", steady(40), **_ENGINE),
            series("vllm:num_requests_running", steady(4), **_ENGINE),
        ),
    ),
    Incident(
        "DrafthouseFirstTokenSlow",
        (
            _UP,
            _FRONTEND_UP,
            series("vllm:time_to_first_token_seconds_bucket", rising(0), **_FRONTEND, model_name=MODEL, le="10"),
            series("vllm:time_to_first_token_seconds_bucket", rising(9), **_FRONTEND, model_name=MODEL, le="20"),
            series("vllm:time_to_first_token_seconds_bucket", rising(9), **_FRONTEND, model_name=MODEL, le="+Inf"),
        ),
    ),
    Incident(
        "DrafthouseTokensSlow",
        (
            _UP,
            _FRONTEND_UP,
            series("vllm:inter_token_latency_seconds_bucket", rising(0), **_FRONTEND, model_name=MODEL, le="1"),
            series("vllm:inter_token_latency_seconds_bucket", rising(9), **_FRONTEND, model_name=MODEL, le="2.5"),
            series("vllm:inter_token_latency_seconds_bucket", rising(9), **_FRONTEND, model_name=MODEL, le="+Inf"),
        ),
    ),
    Incident("DrafthouseKvCacheFull", (_UP, _FRONTEND_UP, series("vllm:kv_cache_usage_perc", steady(0.97), **_ENGINE))),
    Incident("DrafthousePreemptions", (_UP, _FRONTEND_UP, series("vllm:num_preemptions_total", rising(60), **_ENGINE))),
    Incident(
        "DrafthouseAcceptanceDropped",
        (
            series("drafthouse:engine_up", steady(1, _DAY), engine="0"),
            series("up", steady(1, _DAY), **_FRONTEND),
            series("vllm:spec_decode_num_drafts_total", rising(60, _DAY), **_ENGINE),
            series("vllm:spec_decode_num_accepted_tokens_total", "0+180x720 129600+6x780", **_ENGINE),
        ),
        at="24h45m",
        evaluate="5m",
    ),
    Incident("DrafthouseRowsPaused", (_UP, _FRONTEND_UP, series("drafthouse:paused_rows", steady(3), **_ENGINE))),
    Incident(
        "DrafthouseFrontendsCutOff",
        (_UP, _FRONTEND_UP, series("drafthouse:frontends_cut_off_total", "0x12 1x7", **_ENGINE)),
    ),
    Incident(
        "DrafthouseRefusedMessages",
        (_UP, _FRONTEND_UP, series("drafthouse:refused_messages_total", rising(1), **_ENGINE)),
    ),
    Incident(
        "DrafthouseFenceTimeouts",
        (_UP, _FRONTEND_UP, series("drafthouse:fence_timeouts_total", rising(6), **_FRONTEND)),
    ),
    Incident(
        "DrafthouseCloseTimeouts",
        (_UP, _FRONTEND_UP, series("drafthouse:close_timeouts_total", "0x12 1x7", **_FRONTEND)),
    ),
    Incident(
        "DrafthouseSpansDropped",
        (_UP, _FRONTEND_UP, series("drafthouse:spans_dropped_total", rising(5), **_FRONTEND, reason="queue_full")),
    ),
]


def alerts() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]


def firing(alert: str, at: str, count: int) -> list[dict[str, Any]]:
    samples = [{"labels": "{}", "value": count}] if count else []
    expression = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'
    return [{"expr": expression, "eval_time": at, "exp_samples": samples}]


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda it: it.alert)
def test_an_incident_fires_its_alert(incident: Incident, tmp_path: Path) -> None:
    group = {"input_series": list(incident.inputs), "promql_expr_test": firing(incident.alert, incident.at, 1)}
    assert_passes(tmp_path, group, evaluate=incident.evaluate)


def test_every_alert_has_an_incident() -> None:
    assert {incident.alert for incident in INCIDENTS} == set(alerts())


def test_a_healthy_fleet_is_quiet(tmp_path: Path) -> None:
    layout = Layout(3, scraped_once=True)
    healthy = [each for each in frontend_series(layout) if 'status="5xx"' not in each["series"]]
    inputs = [*engine_series(layout), *healthy]
    tests = [test for alert in alerts() for test in firing(alert, "18m", 0)]
    assert_passes(tmp_path, {"input_series": inputs, "promql_expr_test": tests})


def test_an_engine_that_was_scaled_away_stops_alerting(tmp_path: Path) -> None:
    """It stays at 0 on the frontends that knew it; fifteen minutes later nobody is told any more."""
    gone = series("drafthouse:engine_up", "1+0x5 0+0x40", instance="b:1", engine="1")
    stays = series("drafthouse:engine_up", steady(1, 45), instance="b:1", engine="0")
    up = series("up", steady(1, 45), **_FRONTEND)
    tests = firing("DrafthouseEngineDown", "10m", 1) + firing("DrafthouseEngineDown", "30m", 0)
    assert_passes(tmp_path, {"input_series": [gone, stays, up], "promql_expr_test": tests})
