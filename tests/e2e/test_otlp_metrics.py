"""OTLP metrics of real processes: one writer for an engine however many frontends it has, and nothing lost at the end."""

import json
import os
import re
import signal
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.e2e.servers import _attached_url, running, serve
from tests.e2e.test_fence import scrape, total
from tests.frontend.otlp_metric_receivers import MetricReceiver, grpc_receiver, http_receiver, plain

ENGINE, FRONTEND = "drafthouse-engine", "drafthouse-frontend"
SIM = ("--executor", "sim", "--num-draft-tokens", "4", "--check-laws")
SOON = {"OTEL_METRIC_EXPORT_INTERVAL": "100"}
ONLY_AT_THE_END = {"OTEL_METRIC_EXPORT_INTERVAL": "3600000"}


def complete(base_url: str, max_tokens: int, headers: dict[str, str] | None = None) -> int:
    """One request; its completion tokens."""
    data = json.dumps({"prompt": "x", "max_tokens": max_tokens}).encode()
    sent = {"Content-Type": "application/json"} | (headers or {})
    with urllib.request.urlopen(
        urllib.request.Request(base_url + "/v1/completions", data, sent), timeout=20
    ) as response:
        return int(json.loads(response.read())["usage"]["completion_tokens"])


def writers(receiver: MetricReceiver) -> list[int]:
    """Process ids of the frontends that exported the engine, in order. Each has measured something of its own."""
    found = []
    for request in list(receiver.requests):
        resources = [plain(resource.resource.attributes) for resource in request.resource_metrics]
        own = [resource["process.pid"] for resource in resources if resource["service.name"] == FRONTEND]
        if any(resource["service.name"] == ENGINE for resource in resources) and own:
            found.append(own[0])
    return found


def generated(receiver: MetricReceiver) -> list[tuple[int, int, int]]:
    """(start, time, value) of every exported total of generated tokens, as a backend orders them."""
    points = [found["drafthouse.generation_tokens"].sum.data_points[0] for found in receiver.metrics(ENGINE)]
    return sorted((point.start_time_unix_nano, point.time_unix_nano, point.as_int) for point in points)


def pid_of(log: Path) -> int:
    found = re.search(r" listening url=\S+ .*pid=(\d+)", log.read_text())
    assert found
    return int(found[1])


def test_one_frontend_exports_the_engine_and_the_next_goes_on_when_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)
    address = f"ipc://{tmp_path}/engine.sock"
    with ExitStack() as stack:
        receiver = stack.enter_context(http_receiver())
        stack.enter_context(running("engine", "--listen", address, *SIM))
        options = ("--engine", address, "--port", "0", "--otlp-metrics-endpoint", receiver.url)
        logs = [stack.enter_context(running("frontend", *options)) for _ in range(2)]
        urls = [_attached_url(log) for log in logs]
        pids = [pid_of(log) for log in logs]
        tokens = sum(complete(url, 10 + turn) for turn in range(5) for url in urls)
        receiver.wait(lambda: len(writers(receiver)) > 3 and generated(receiver)[-1][2] == tokens)
        first = pids.index(writers(receiver)[0])
        assert set(writers(receiver)) == {pids[first]}
        os.kill(pids[first], signal.SIGKILL)
        survivor = 1 - first
        tokens += complete(urls[survivor], 7)
        receiver.wait(lambda: writers(receiver)[-1] == pids[survivor] and generated(receiver)[-1][2] == tokens)
        seen = writers(receiver)
        assert seen == sorted(seen, key=lambda pid: pid == pids[survivor]), "never back, never both"
        assert total(scrape(urls[survivor]), "vllm:generation_tokens_total") == tokens
        instances = {plain(one.resource.attributes)["service.instance.id"] for one in receiver.resources(ENGINE)}
        series = generated(receiver)
        assert len(instances) == 1 and len({start for start, _, _ in series}) == 1, "one series"
        values = [value for _, _, value in series]
        assert values == sorted(values)


@pytest.mark.parametrize("receiving", [http_receiver, grpc_receiver], ids=["http", "grpc"])
def test_a_server_that_stops_before_its_first_export_loses_nothing(receiving):
    with receiving() as receiver:
        with serve(*SIM, "--otlp-metrics-endpoint", receiver.url, **ONLY_AT_THE_END) as server:
            tokens = sum(complete(server.base_url, 5 + turn) for turn in range(4))
            samples = scrape(server.base_url)
            assert not receiver.requests
            assert server.stop() == 0
        [found] = receiver.metrics(FRONTEND)
        [engine] = receiver.metrics(ENGINE)
    sums = {name: sum(point.as_int for point in metric.sum.data_points) for name, metric in engine.items()}
    assert sums["drafthouse.generation_tokens"] == tokens
    for name, family in (
        ("drafthouse.spec_decode.drafts", "vllm:spec_decode_num_drafts_total"),
        ("drafthouse.spec_decode.draft_tokens", "vllm:spec_decode_num_draft_tokens_total"),
        ("drafthouse.spec_decode.accepted_tokens", "vllm:spec_decode_num_accepted_tokens_total"),
        ("drafthouse.spec_decode.accepted_tokens_per_pos", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
        ("drafthouse.spec_decode.cut_tokens", "drafthouse:spec_cut_tokens_total"),
        ("drafthouse.spec_decode.aborted_rounds", "drafthouse:spec_aborted_rounds_total"),
        ("drafthouse.verify_rounds", "drafthouse:verify_rounds_total"),
    ):
        assert sums[name] == total(samples, family), name
    assert sums["drafthouse.spec_decode.accepted_tokens"] > 0
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        [point] = found[f"gen_ai.server.{name}"].histogram.data_points
        assert point.count == 4
        assert point.sum > 0 or name == "time_per_output_token", "steps of no length may arrive together"
        assert plain(point.attributes)["gen_ai.operation.name"] == "text_completion"


def test_a_collector_that_is_not_there_shows_on_the_page_and_in_no_request():
    with http_receiver() as receiver:
        pass  # its port is free again
    options = ("--otlp-metrics-endpoint", receiver.url)
    with serve(*SIM, *options, **SOON, OTEL_EXPORTER_OTLP_METRICS_TIMEOUT="0.2") as server:
        assert complete(server.base_url, 5) == 5
        while not (failures := total(scrape(server.base_url), "drafthouse:otlp_metrics_failures_total")):
            assert complete(server.base_url, 5) == 5
        assert failures >= 1
        assert server.log().count("otlp metrics fail") == 1
        assert server.stop() == 0


def test_a_latency_leads_to_the_trace_of_its_request():
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    traced = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    with serve(*SIM, "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces") as server:
        complete(server.base_url, 5, traced)
        accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
        with urllib.request.urlopen(urllib.request.Request(server.base_url + "/metrics", headers=accept)) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        assert trace_id not in urllib.request.urlopen(server.base_url + "/metrics").read().decode()
    seen = {
        family.name: sample.exemplar.labels["trace_id"]
        for family in families
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert set(seen.values()) == {trace_id}
    assert {"vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"} <= set(seen)
