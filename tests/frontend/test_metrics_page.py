"""/metrics: every field is exported or excused, and the text is what bench clients can read."""

import re
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from frontend.app import build_app
from frontend.engine_families import EngineView
from frontend.exposition import classic_text, histogram_samples, number
from frontend.families import (
    CACHE_INFO_LABELS,
    COUNTER_SERIES,
    ENGINE_INFO_LABELS,
    FAMILIES,
    HELLO_EXPORTED,
    HELLO_NOT_EXPORTED,
    LOAD_NOT_EXPORTED,
    LOAD_SERIES,
)
from frontend.metrics import FINISHED_REASONS, SPAN_DROP_REASONS, TRACE_DECISIONS, FinishedChoice, FrontendMetrics
from protocol.counters import Counters, bounds_of
from protocol.messages import Capacity, Hello, Load
from tests.frontend.fakes_client import MODEL, FakeEngineClient, hello, load, server_over

LABELS = f'{{engine="0",model_name="{MODEL}"'


def page(counters=None, accept="*/*", scope="all", up=True, engine_load=None, width=5):
    described = hello(max_draft_len=width)
    counters = counters or Counters.zero(width, len(described.sources))
    metrics = FrontendMetrics(1000)
    metrics.attach("0", MODEL)
    view = EngineView(described, counters, engine_load or load(), 7, up)
    return metrics.render([view], accept, scope)[0].decode()


def value(text, series):
    found = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(series + " ")]
    assert len(found) == 1, (series, found)
    return float(found[0])


def test_every_field_of_the_engine_is_exported_or_excused():
    assert set(COUNTER_SERIES) == set(Counters.__struct_fields__)
    assert set(LOAD_SERIES) | set(LOAD_NOT_EXPORTED) == set(Load.__struct_fields__)
    assert not set(LOAD_SERIES) & set(LOAD_NOT_EXPORTED)
    assert set(HELLO_EXPORTED) | set(HELLO_NOT_EXPORTED) == set(Hello.__struct_fields__)
    assert not set(HELLO_EXPORTED) & set(HELLO_NOT_EXPORTED)
    assert set(CACHE_INFO_LABELS) == set(Capacity.__struct_fields__)


def test_every_family_is_filled_by_a_field_and_every_field_has_its_family():
    named = {series.family for table in (COUNTER_SERIES, LOAD_SERIES) for all_ in table.values() for series in all_}
    derived = {"vllm:kv_cache_usage_perc", "drafthouse:engine_up", *HELLO_EXPORTED.values()}
    assert named | derived == set(FAMILIES)
    text = page()
    for name, family in FAMILIES.items():
        assert f"# TYPE {name}{'_total' if family.kind == 'counter' else ''} {family.kind}\n" in text


def test_each_total_lands_in_its_own_series():
    names = [f.name for f in msgspec.structs.fields(Counters) if f.type is int]
    counters = Counters.zero(5, 1)
    for number_, name in enumerate(names, start=1000):
        setattr(counters, name, number_)
    counters.accepted_per_pos = [50, 40, 30, 20, 10]
    counters.draft_tokens_by_source, counters.accepted_tokens_by_source = [70], [60]
    text = page(counters)
    for name in names:
        for series in COUNTER_SERIES[name]:
            labels = "".join(f',{k}="{v}"' for k, v in series.labels)
            assert value(text, f"{series.family}_total{LABELS}{labels}}}") == getattr(counters, name)
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total" + LABELS
    assert [value(text, f'{per_pos},position="{i}"}}') for i in range(5)] == [50, 40, 30, 20, 10]
    assert value(text, f'drafthouse:spec_draft_tokens_by_source_total{LABELS},source="ngram"}}') == 70


def test_bench_clients_can_read_every_line():
    counters = Counters.zero(5, 1)
    counters.draft_tokens = 10**15 + 1
    text = page(counters)
    assert "1000000000000001" in text
    assert "_created" not in text
    assert "_total_total{" not in text
    assert text.endswith("\n")
    for line in text.splitlines():
        if not line.startswith("#"):
            assert re.fullmatch(r'[a-z0-9_:]+(\{[a-z_]+="[^" ]*"(,[a-z_]+="[^" ]*")*\})? [0-9.e+-]+', line), line


def test_a_bench_clients_own_parsing_finds_the_four_families():
    text = page()
    found = [line for line in text.splitlines() if line.startswith("vllm:spec_decode")]
    assert {line.split("{")[0] for line in found} == {
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    }
    assert len(found) == 3 + 5
    assert all(float(line.split(maxsplit=1)[1]) == 0 for line in found)


def test_spec_families_are_absent_without_a_drafter():
    assert "spec_decode" not in page(width=0)
    assert "vllm:generation_tokens_total" in page(width=0)


def test_openmetrics_only_when_named():
    assert "# EOF" not in page(accept="*/*")
    assert "# EOF" not in page(accept="text/plain;q=0.5,text/html")
    text = page(accept="application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1")
    assert text.endswith("# EOF\n")
    assert "_created" not in text
    assert "# TYPE vllm:spec_decode_num_drafts counter\n" in text
    assert f"vllm:spec_decode_num_drafts_total{LABELS}}} 0" in text


def test_a_lost_engine_keeps_its_totals_and_loses_its_gauges():
    text = page(up=False, engine_load=load(running=3))
    assert 'drafthouse:engine_up{engine="0"} 0\n' in text
    assert "vllm:num_requests_running" not in text
    assert "vllm:kv_cache_usage_perc" not in text
    assert "vllm:cache_config_info" not in text
    assert f"vllm:generation_tokens_total{LABELS}}} 0\n" in text


def test_gauges_come_from_the_load():
    text = page(engine_load=load(running=3, waiting=2, blocks_used=25, paused=1))
    assert value(text, f"vllm:num_requests_running{LABELS}}}") == 3
    assert value(text, f"vllm:num_requests_waiting{LABELS}}}") == 2
    assert value(text, f"vllm:kv_cache_usage_perc{LABELS}}}") == 0.25


def test_scopes_are_two_halves_of_the_whole():
    whole, engine, frontend = (set(page(scope=scope).splitlines()) for scope in ("all", "engine", "frontend"))
    assert engine | frontend == whole
    assert not engine & frontend


def test_no_engine_series_before_the_first_hello():
    metrics = FrontendMetrics(1000)
    text = metrics.render((), "", "all")[0].decode()
    assert "engine=" not in text
    assert "drafthouse:fence_timeouts_total 0\n" in text


def test_histograms_cumulate_and_their_sum_is_exact():
    counters = Counters.zero(5, 1)
    for seconds in (0.00005, 0.0002, 3.0, 100.0):
        counters.step_seconds.observe(seconds, bounds_of("step_seconds"))
    text = page(counters)
    labels = f'{LABELS},clock="host"'
    assert value(text, f'drafthouse:step_seconds_bucket{labels},le="0.0001"}}') == 1
    assert value(text, f'drafthouse:step_seconds_bucket{labels},le="10.0"}}') == 3
    assert value(text, f'drafthouse:step_seconds_bucket{labels},le="+Inf"}}') == 4
    assert value(text, f"drafthouse:step_seconds_count{labels}}}") == 4
    assert value(text, f"drafthouse:step_seconds_sum{labels}}}") == 103.00025


@pytest.mark.parametrize(
    ("given", "text"),
    [(0, "0"), (2**70, str(2**70)), (7.0, "7"), (0.1, "0.1"), (True, "1"), (float("inf"), "+Inf"), (1e300, "1e+300")],
)
def test_numbers_are_written_in_full(given, text):
    assert number(given) == text


def test_label_values_are_escaped():
    from frontend.exposition import MetricFamily, Sample

    family = MetricFamily("x", "gauge", "a\nb", [Sample("x", {"b": 'q"\\\n', "engine": "0"}, 1)])
    assert classic_text([family]).decode() == '# HELP x a\\nb\n# TYPE x gauge\nx{engine="0",b="q\\"\\\\\\n"} 1\n'
    assert [s.value for s in histogram_samples("h", {}, (1.0,), (2, 3), 9.5)] == [2, 5, 9.5, 5]


def test_finished_choices_are_counted_with_their_times():
    metrics = FrontendMetrics(1000)
    metrics.attach("0", MODEL)
    metrics.finished(FinishedChoice("stop", 10, 4, 5, 2.0, 0.5, 0.5, 1.0))
    metrics.finished(FinishedChoice("abort", 10, 0, 0, 0.2, 0.2, None, None))
    text = metrics.render((), "", "frontend")[0].decode()
    counts = {
        reason: value(text, f'vllm:request_success_total{LABELS},finished_reason="{reason}"}}')
        for reason in FINISHED_REASONS
    }
    assert counts == {"stop": 1, "length": 0, "abort": 1, "error": 0}
    assert value(text, f"vllm:request_time_per_output_token_seconds_sum{LABELS}}}") == 0.25
    assert value(text, f"vllm:request_time_per_output_token_seconds_count{LABELS}}}") == 2, "every end, as vLLM has it"
    assert value(text, f"vllm:request_inference_time_seconds_sum{LABELS}}}") == 1.5
    assert value(text, f"vllm:request_prefill_kv_computed_tokens_sum{LABELS}}}") == 16


@dataclass
class Spans:
    """Counts of a span export."""

    exported: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    size: int = 0
    capacity: int = 65536


def test_tracing_families_exist_only_while_tracing_is_on():
    metrics = FrontendMetrics(1000)
    text = metrics.render((), "", "frontend")[0].decode()
    assert "traced" not in text and "traceparent" not in text and "span" not in text and "otlp" not in text
    metrics.trace_on()
    metrics.watch_spans(Spans)
    text = metrics.render((), "", "frontend")[0].decode()
    assert {line for line in text.splitlines() if "trac" in line or "span" in line if line[0] != "#"} == {
        *(f'drafthouse:requests_traced_total{{decision="{decision}"}} 0' for decision in TRACE_DECISIONS),
        "drafthouse:traceparent_malformed_total 0",
        "drafthouse:spans_exported_total 0",
        *(f'drafthouse:spans_dropped_total{{reason="{reason}"}} 0' for reason in SPAN_DROP_REASONS),
        "drafthouse:span_queue_size 0",
        "drafthouse:span_queue_capacity 65536",
    }


def test_decisions_and_span_counts_are_served_as_they_are_at_the_scrape():
    metrics = FrontendMetrics(1000)
    metrics.trace_on()
    spans = Spans()
    metrics.watch_spans(lambda: spans)
    metrics.trace_decided("sampled")
    metrics.trace_decided("sampled")
    metrics.trace_decided("limited")
    metrics.malformed_traceparent()
    spans.exported, spans.size = 10**15 + 1, 12
    spans.dropped, spans.failures = {"queue_full": 3, "shutdown": 1}, {"UNAVAILABLE": 2, "429": 1}
    text = metrics.render((), "", "frontend")[0].decode()
    decided = {name: value(text, f'drafthouse:requests_traced_total{{decision="{name}"}}') for name in TRACE_DECISIONS}
    assert decided == {"sampled": 2, "unsampled": 0, "limited": 1}
    assert value(text, "drafthouse:traceparent_malformed_total") == 1
    assert "drafthouse:spans_exported_total 1000000000000001\n" in text
    dropped = {name: value(text, f'drafthouse:spans_dropped_total{{reason="{name}"}}') for name in SPAN_DROP_REASONS}
    assert dropped == {"queue_full": 3, "export_failed": 0, "rejected": 0, "shutdown": 1}
    assert value(text, 'drafthouse:span_export_failures_total{reason="UNAVAILABLE"}') == 2
    assert value(text, 'drafthouse:span_export_failures_total{reason="429"}') == 1
    assert value(text, "drafthouse:span_queue_size") == 12
    openmetrics = metrics.render((), "application/openmetrics-text", "frontend")[0].decode()
    assert {family.name for family in text_string_to_metric_families(openmetrics)} >= {
        "drafthouse:spans_dropped",
        "drafthouse:span_queue_size",
    }


class Observer:
    """What would go out by OTLP."""

    def __init__(self) -> None:
        self.failures = 0
        self.seen: list[tuple[object, ...]] = []

    def request_finished(
        self, operation: str, seconds: float, error_type: str | None, trace: tuple[str, str] | None
    ) -> None:
        self.seen.append(("request", operation, seconds, error_type, trace))

    def first_token(self, operation: str, seconds: float, trace: tuple[str, str] | None) -> None:
        self.seen.append(("first", operation, seconds, trace))

    def time_per_output_token(self, operation: str, seconds: float, trace: tuple[str, str] | None) -> None:
        self.seen.append(("per_token", operation, seconds, trace))


def test_otlp_sees_what_its_conventions_define():
    metrics = FrontendMetrics(1000)
    metrics.attach("0", MODEL)
    assert metrics.otlp is None
    observer = Observer()
    metrics.watch_otlp(observer)
    ids = ("a" * 32, "b" * 16)
    metrics.first_token(0.5, ids, "text_completion")
    metrics.step_gap(0.1, 3, ids)
    metrics.finished(FinishedChoice("length", 10, 4, 5, 2.0, 0.5, 0.5, 1.0, "text_completion"), ids)
    metrics.finished(FinishedChoice("abort", 10, 4, 5, 2.0, 0.5, 0.5, 1.0), ids)  # not successful
    metrics.finished(FinishedChoice("stop", 10, 4, 1, 2.0, 0.5, 0.5, 0.0))  # no second token
    metrics.request_ended(5)  # a caller that does not measure the request
    metrics.request_ended(5, 2.5, "text_completion", "500", ids)
    assert observer.seen == [
        ("first", "text_completion", 0.5, ids),
        ("per_token", "text_completion", 0.25, ids),
        ("request", "text_completion", 2.5, "500", ids),
    ]
    observer.failures = 2
    assert "drafthouse:otlp_metrics_failures_total 2\n" in metrics.render((), "", "frontend")[0].decode()


def test_engine_info_names_what_runs():
    line = next(line for line in page().splitlines() if line.startswith("drafthouse:engine_info{"))
    assert all(f'{label}="' in line for label in ENGINE_INFO_LABELS)


async def test_a_scrape_fences_and_counts_the_misses():
    engine = FakeEngineClient()
    engine.fences_missed = 1
    async with TestClient(TestServer(build_app(server_over(engine)))) as http:
        for path in ("/metrics", "/metrics/", "/metrics/engine"):
            response = await http.get(path, allow_redirects=False)
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = await (await http.get("/metrics/frontend")).text()
    assert engine.fences == 3
    assert "drafthouse:fence_timeouts_total 1\n" in text


async def test_request_times_and_parameters_reach_the_page():
    engine = FakeEngineClient(play=lambda given: [[582, 827], [582], [827, 582, 827]])
    engine.cached_tokens = 1
    async with TestClient(TestServer(build_app(server_over(engine)))) as http:
        body = {"prompt": "a b c", "n": 2, "max_tokens": 6, "banana": 1}
        assert (await http.post("/v1/completions", json=body)).status == 200
        text = await (await http.get("/metrics")).text()
    assert value(text, f'vllm:request_success_total{LABELS},finished_reason="length"}}') == 2
    assert value(text, f"vllm:time_to_first_token_seconds_count{LABELS}}}") == 2
    assert value(text, f"vllm:inter_token_latency_seconds_count{LABELS}}}") == 4
    assert value(text, f"drafthouse:inter_token_latency_per_token_seconds_count{LABELS}}}") == 8
    assert value(text, f"vllm:request_params_n_sum{LABELS}}}") == 2
    assert value(text, f"vllm:request_params_max_tokens_sum{LABELS}}}") == 6
    assert value(text, f"vllm:request_generation_tokens_sum{LABELS}}}") == 12
    assert value(text, f"vllm:request_max_num_generation_tokens_sum{LABELS}}}") == 6
    assert value(text, f"vllm:request_prefill_kv_computed_tokens_sum{LABELS}}}") == 4
    assert value(text, "drafthouse:unknown_fields_total") == 1
    assert value(text, 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}') == 1


def test_several_engines_have_one_series_each_and_are_never_added_up():
    plain = msgspec.structs.replace(hello(max_draft_len=0), engine_id="1")
    views = [
        EngineView(hello(), Counters.zero(5, 1), load(), 7, up=True),
        EngineView(plain, Counters.zero(0, 0), load(), 9, up=False),
    ]
    metrics = FrontendMetrics(1000)
    metrics.several_engines()
    for view in views:
        metrics.attach(view.hello.engine_id, MODEL)
    metrics.finished(FinishedChoice("stop", 10, 4, 5, 2.0, 0.5, 0.5, 1.0, engine="0"))
    text = metrics.render(views, "", "all")[0].decode()
    assert text.count("# TYPE drafthouse:steps_total counter") == 1
    for engine in ("0", "1"):
        assert f'drafthouse:steps_total{{engine="{engine}",model_name="{MODEL}",outcome="ok"}} 0\n' in text
        ended = f'vllm:request_success_total{{engine="{engine}",model_name="{MODEL}",finished_reason="stop"}}'
        assert f"{ended} {int(engine == '0')}\n" in text
    assert 'num_drafts_total{engine="0"' in text and 'num_drafts_total{engine="1"' not in text
    assert 'num_requests_running{engine="1"' not in text
    metrics.forget("1")
    assert 'engine="1"' not in metrics.render((), "", "frontend")[0].decode()
