"""Exemplars lead from a latency histogram to a trace: in OpenMetrics asked for by name, and nowhere else."""

import time

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from frontend.metrics import FinishedChoice, FrontendMetrics
from tests.frontend.fakes_client import MODEL

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
FIRST, SECOND = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"), ("f" * 32, "e" * 16)
LATENCIES = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "drafthouse:inter_token_latency_per_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_time_per_output_token_seconds",
}


def observed(*traces: tuple[str, str] | None) -> FrontendMetrics:
    """A frontend that served one request per trace, each half a second slower than the one before."""
    metrics = FrontendMetrics(1000)
    metrics.attach("0", MODEL)
    for turn, trace in enumerate(traces):
        slow = 0.5 * turn
        metrics.first_token(0.03 + slow, trace)
        metrics.step_gap(0.02 + slow, 4, trace)
        metrics.finished(FinishedChoice("stop", 10, 4, 5, 2.0 + slow, 0.4 + slow, 0.6, 1.0), trace)
        metrics.request_ended(5, 2.0 + slow, "chat", None, trace)
    return metrics


def exemplars(metrics: FrontendMetrics) -> dict[str, list[tuple[tuple[str, str], float, float, str]]]:
    """By histogram: ((trace id, span id), value, time, le) of every exemplar on the page."""
    page, content_type = metrics.render((), OPENMETRICS, "frontend")
    assert content_type.startswith("application/openmetrics-text")
    found: dict[str, list[tuple[tuple[str, str], float, float, str]]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.exemplar is not None:
                labels, value, at_s = sample.exemplar
                assert sample.name == family.name + "_bucket" and set(labels) == {"trace_id", "span_id"}
                ids = (labels["trace_id"], labels["span_id"])
                found.setdefault(family.name, []).append((ids, value, float(at_s), sample.labels["le"]))
    return found


def test_every_latency_of_a_traced_request_leads_to_its_trace():
    before_s = time.time()
    found = exemplars(observed(FIRST))
    assert set(found) == LATENCIES
    for family, those in found.items():
        assert [ids for ids, *_ in those] == [FIRST], family
        assert all(before_s - 1 <= at_s <= time.time() + 1 for _, _, at_s, _ in those)
    [(_, value, _, bound)] = found["vllm:time_to_first_token_seconds"]
    assert (value, bound) == (0.03, "0.04"), "an exemplar lies in its own bucket"
    [(_, value, _, _)] = found["drafthouse:inter_token_latency_per_token_seconds"]
    assert value == 0.005
    [(_, value, _, _)] = found["vllm:request_time_per_output_token_seconds"]
    assert value == 0.25


def test_untraced_requests_leave_no_exemplar_and_hide_none():
    assert exemplars(observed(None, None)) == {}
    found = exemplars(observed(FIRST, None, SECOND))
    slow_and_fast = found["vllm:time_to_first_token_seconds"]
    assert [(ids, value) for ids, value, _, _ in slow_and_fast] == [(FIRST, 0.03), (SECOND, 1.03)]


def test_the_newest_trace_of_a_bucket_is_the_one_shown():
    found = exemplars(observed(SECOND, FIRST))
    [(ids, value, _, _)] = found["vllm:e2e_request_latency_seconds"][-1:]
    assert (ids, value) == (FIRST, 2.5)
    [(ids, _, _, _)] = found["vllm:request_decode_time_seconds"]
    assert ids == FIRST


def test_the_classic_page_is_the_same_byte_for_byte():
    with_exemplars = observed(FIRST, SECOND).render((), "*/*", "frontend")
    without = observed(None, None).render((), "*/*", "frontend")
    assert with_exemplars == without
    assert FIRST[0].encode() not in with_exemplars[0]


def test_openmetrics_differs_by_the_exemplars_alone():
    with_exemplars = observed(FIRST).render((), OPENMETRICS, "frontend")[0].decode()
    without = observed(None).render((), OPENMETRICS, "frontend")[0].decode()
    stripped = "\n".join(line.split(" # {")[0] for line in with_exemplars.splitlines()) + "\n"
    assert with_exemplars != without and stripped == without
