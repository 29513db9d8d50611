"""What this frontend measures of the requests it serves, and the /metrics page of both scopes.

The only user of prometheus_client: one registry of its own, nothing global. Families, labels and buckets are vLLM's (reference
1.2 to 1.4). Counts of the engine are never added up here: they come from its snapshot. Called by `frontend.completions`,
`frontend.admission`, `frontend.app` and `frontend.health`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client import samples as client_samples
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from frontend.engine_families import EngineView, engine_families
from frontend.exposition import CLASSIC_CONTENT_TYPE, Exemplar, MetricFamily, Sample, classic_text
from frontend.observations import FinishedChoice, OtlpObserver, SpanStats, TraceIds
from frontend.spans import DropReason

FINISHED_REASONS: Final = ("stop", "length", "abort", "error")
REJECTION_REASONS: Final = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "expired",
    "draining",
    "engine_down",
    "queue_timeout",
    "max_inflight_logprobs",
)
ABANDONED_STAGES: Final = ("body", "tokenize")
TRACE_DECISIONS: Final = ("sampled", "unsampled", "limited")
SPAN_DROP_REASONS: Final = tuple(reason.name.lower() for reason in DropReason)

_LATENCY: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
_FIRST_TOKEN: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
# Finer at the low end: a speculating step gives several tokens within a few milliseconds.
_PER_TOKEN: Final = (0.001, 0.0025, 0.005, *_INTER_TOKEN)
_PARAMS_N: Final = (1, 2, 5, 10, 20)
_HTTP: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ENGINE_LABELS: Final = ("engine", "model_name")


class FrontendMetrics:
    """Observations of one frontend process. `max_model_len` bounds the token histograms; labels come with `attach`."""

    def __init__(self, max_model_len: int) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._engine = self._model = ""
        self._retries: tuple[Counter, ...] = ()
        self.otlp: OtlpObserver | None = None
        tokens = _one_two_five(max_model_len)
        histogram = self._histogram
        self._success = self._counter(
            "vllm:request_success", "Finished requests.", (*_ENGINE_LABELS, "finished_reason")
        )
        self._first_token = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self._inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Gap between outputs of a request, one sample per step.", _INTER_TOKEN
        )
        self._per_token = histogram(
            "drafthouse:inter_token_latency_per_token_seconds", "The same gap per token of the step.", _PER_TOKEN
        )
        self._time_per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", _INTER_TOKEN
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _LATENCY)
        self._queue = histogram("vllm:request_queue_time_seconds", "Queued to scheduled.", _LATENCY)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Scheduled to first token.", _LATENCY)
        self._decode = histogram("vllm:request_decode_time_seconds", "First to last token.", _LATENCY)
        self._inference = histogram("vllm:request_inference_time_seconds", "Scheduled to last token.", _LATENCY)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens per finished request.", tokens)
        self._generation = histogram("vllm:request_generation_tokens", "Tokens per finished request.", tokens)
        self._computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens not taken from the cache.", tokens
        )
        self._max_generation = histogram(
            "vllm:request_max_num_generation_tokens", "Most tokens of any choice of a request.", tokens
        )
        self._params_n = histogram("vllm:request_params_n", "The n of requests.", _PARAMS_N)
        self._params_max_tokens = histogram("vllm:request_params_max_tokens", "The max_tokens of requests.", tokens)
        self._build_unlabelled()

    def _build_unlabelled(self) -> None:
        self._rejections = self._counter(
            "vllm:admission_rejections", "Requests refused for load.", ("model_name", "reason")
        )
        self._abandoned = self._counter(
            "drafthouse:requests_abandoned", "Clients gone before their request reached an engine.", ("stage",)
        )
        self._fence_timeouts = self._counter(
            "drafthouse:fence_timeouts", "Scrapes that did not hear from the engine in time.", ()
        )
        self._unknown_fields = self._counter(
            "drafthouse:unknown_fields", "Request fields nobody here knows, ignored.", ()
        )
        self._close_timeouts = self._counter(
            "drafthouse:close_timeouts", "Requests ended without the engine's closing answer.", ()
        )
        self._http_requests = self._counter("http_requests", "HTTP requests.", ("method", "status", "handler"))
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "Duration of HTTP requests.", ("method", "handler"),
            buckets=_HTTP, registry=self._registry,
        )  # fmt: skip
        for stage in ABANDONED_STAGES:
            self._abandoned.labels(stage)

    def trace_on(self) -> None:
        """Tracing is on: its families exist, at 0, from here."""
        self._traced = self._counter("drafthouse:requests_traced", "Requests by sampling decision.", ("decision",))
        self._malformed = self._counter(
            "drafthouse:traceparent_malformed", "Requests whose traceparent was ignored because it is malformed.", ()
        )
        for decision in TRACE_DECISIONS:
            self._traced.labels(decision)

    def watch_spans(self, read: Callable[[], SpanStats]) -> None:
        """Serve the span export's own counts, read at each scrape."""
        self._registry.register(_Watched(lambda: _span_families(read())))

    def watch_otlp(self, observer: OtlpObserver) -> None:
        """From now on `observer` sees what OTLP metrics are made of, and its failures are served."""
        self.otlp = observer
        name, text = "drafthouse:otlp_metrics_failures", "Exports of OTLP metrics that did not get through."
        self._registry.register(_Watched(lambda: [CounterMetricFamily(name, text, observer.failures)]))

    def watch_counts(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Serve what somebody else counts, by the values of one label. The set of values must be bounded."""

        def family() -> Iterable[Metric]:
            counts = CounterMetricFamily(name, text, labels=[label])
            for value, count in read().items():
                counts.add_metric([value], count)
            return [counts]

        self._registry.register(_Watched(family))

    def several_engines(self) -> None:
        """Requests may be given to another engine: the families of it exist from here."""
        by_engine = ("engine",)
        self._retries = (
            self._counter(
                "drafthouse:requests_retried",
                "Prompts given to another engine, by the engine that was lost.",
                by_engine,
            ),
            self._counter(
                "drafthouse:retried_tokens",
                "Tokens of them that the lost engine had given, and no answer has.",
                by_engine,
            ),
        )

    def attach(self, engine: str, model: str) -> None:
        """From now on requests run on `engine` too, under the served name `model`; their series exist at 0 from here."""
        if engine == self._engine and model == self._model:
            return
        self._engine, self._model = engine, model
        for reason in FINISHED_REASONS:
            self._success.labels(engine, model, reason)
        for reason in REJECTION_REASONS:
            self._rejections.labels(model, reason)
        for histogram in self._engine_histograms():
            histogram.labels(engine, model)
        for counter in self._retries:
            counter.labels(engine)

    def forget(self, engine: str) -> None:
        """Drop the series of an engine that is gone for good."""
        for reason in FINISHED_REASONS:
            self._success.remove(engine, self._model, reason)
        for histogram in self._engine_histograms():
            histogram.remove(engine, self._model)
        for counter in self._retries:
            counter.remove(engine)

    def retried(self, engine: str, num_tokens: int) -> None:
        """A prompt was given to another engine because `engine` was lost, and with it so many tokens of its answer."""
        for counter, count in zip(self._retries, (1, num_tokens)):
            counter.labels(engine).inc(count)

    def submitted(self, n: int, max_tokens: int | None, engine: str | None = None) -> None:
        """One request was sent to an engine. `max_tokens` as the client asked, None when it did not."""
        self._params_n.labels(*self._labels(engine)).observe(n)
        if max_tokens is not None:
            self._params_max_tokens.labels(*self._labels(engine)).observe(max_tokens)

    def first_token(
        self, seconds: float, trace: TraceIds | None = None, operation: str = "chat", engine: str | None = None
    ) -> None:
        self._first_token.labels(*self._labels(engine)).observe(seconds, _exemplar_labels(trace))
        if self.otlp is not None:
            self.otlp.first_token(operation, seconds, trace)

    def step_gap(
        self, seconds: float, num_tokens: int, trace: TraceIds | None = None, engine: str | None = None
    ) -> None:
        """One step gave a running request `num_tokens`, `seconds` after its step before."""
        labels, exemplar = self._labels(engine), _exemplar_labels(trace)
        self._inter_token.labels(*labels).observe(seconds, exemplar)
        per_token = self._per_token.labels(*labels)
        for _ in range(num_tokens):
            per_token.observe(seconds / num_tokens, exemplar)
            exemplar = None  # they fall into one bucket, which keeps one exemplar: once is enough, and costs 2 us

    def finished(self, choice: FinishedChoice, trace: TraceIds | None = None) -> None:
        """Count one child exactly once, at its end."""
        labels, exemplar = self._labels(choice.engine), _exemplar_labels(trace)
        prefill_s, decode_s = choice.prefill_s or 0.0, choice.decode_s or 0.0
        self._success.labels(*labels, choice.reason).inc()
        self._e2e.labels(*labels).observe(choice.e2e_s, exemplar)
        self._queue.labels(*labels).observe(choice.queue_s, exemplar)
        self._prefill.labels(*labels).observe(prefill_s, exemplar)
        self._decode.labels(*labels).observe(decode_s, exemplar)
        self._inference.labels(*labels).observe(prefill_s + decode_s, exemplar)
        self._prompt.labels(*labels).observe(choice.prompt_tokens)
        self._computed.labels(*labels).observe(choice.prompt_tokens - choice.cached_tokens)
        self._generation.labels(*labels).observe(choice.generation_tokens)
        # Every end is in every histogram, as vLLM has it: 0 stands for what an answer of one token or none does not have.
        self._time_per_token.labels(*labels).observe(choice.time_per_token_s or 0.0, exemplar)
        # The conventions measure successful answers only.
        if self.otlp is not None and choice.time_per_token_s is not None and choice.reason in ("stop", "length"):
            self.otlp.time_per_output_token(choice.operation, choice.time_per_token_s, trace)

    def request_ended(
        self,
        most_generation_tokens: int,
        seconds: float | None = None,
        operation: str = "chat",
        error_type: str | None = None,
        trace: TraceIds | None = None,
        engine: str | None = None,
    ) -> None:
        """One HTTP request is over, `seconds` after it came. `error_type` (a bounded set) when it did not succeed."""
        self._max_generation.labels(*self._labels(engine)).observe(most_generation_tokens)
        if self.otlp is not None and seconds is not None:
            self.otlp.request_finished(operation, seconds, error_type, trace)

    def trace_decided(self, decision: str) -> None:
        """Count one request by what was decided (`TRACE_DECISIONS`). Only after `trace_on`."""
        self._traced.labels(decision).inc()

    def malformed_traceparent(self) -> None:
        """Only after `trace_on`."""
        self._malformed.inc()

    def rejected(self, reason: str) -> None:
        self._rejections.labels(self._model, reason).inc()

    def abandoned(self, stage: str) -> None:
        self._abandoned.labels(stage).inc()

    def fence_missed(self) -> None:
        self._fence_timeouts.inc()

    def close_unanswered(self) -> None:
        self._close_timeouts.inc()

    def unknown_fields(self, count: int) -> None:
        self._unknown_fields.inc(count)

    def http(self, method: str, status: int, handler: str, seconds: float) -> None:
        """`handler` is the route's template, never the path: labels stay bounded."""
        self._http_requests.labels(method, f"{status // 100}xx", handler).inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def render(self, views: Iterable[EngineView], accept: str, scope: str) -> tuple[bytes, str]:
        """(page, content type) of `scope`: all, engine or frontend. OpenMetrics only when `accept` names it."""
        families = engine_families(views) if scope != "frontend" else []
        if scope != "engine":
            families += [_family(metric) for metric in self._registry.collect()]
        if "application/openmetrics-text" in accept:
            # The default escaping would turn the colons of vLLM's names into underscores.
            page: bytes = generate_latest(_Collected(families), ALLOWUTF8)  # type: ignore[no-untyped-call]
            return page, CONTENT_TYPE_LATEST
        return classic_text(families), CLASSIC_CONTENT_TYPE

    def _labels(self, engine: str | None) -> tuple[str, str]:
        return engine or self._engine, self._model

    def _counter(self, name: str, text: str, labels: Iterable[str]) -> Counter:
        return Counter(name, text, tuple(labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, _ENGINE_LABELS, buckets=tuple(buckets), registry=self._registry)

    def _engine_histograms(self) -> tuple[Histogram, ...]:
        return (
            self._first_token, self._inter_token, self._per_token, self._time_per_token, self._e2e, self._queue,
            self._prefill, self._decode, self._inference, self._prompt, self._generation, self._computed,
            self._max_generation, self._params_n, self._params_max_tokens,
        )  # fmt: skip


class _Collected:
    """What prometheus_client's OpenMetrics writer wants of a registry."""

    def __init__(self, families: list[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                exemplar = None
                if sample.exemplar is not None:
                    labels, value, timestamp_s = sample.exemplar
                    exemplar = client_samples.Exemplar(dict(labels), value, timestamp_s)
                metric.add_sample(sample.name, dict(sample.labels), sample.value, exemplar=exemplar)
            yield metric


class _Watched(Collector):
    """Families that somebody else counts, read when the page is made."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def _span_families(stats: SpanStats) -> Iterable[Metric]:
    yield CounterMetricFamily("drafthouse:spans_exported", "Spans the collector took.", stats.exported)
    dropped = CounterMetricFamily("drafthouse:spans_dropped", "Spans lost, by reason.", labels=["reason"])
    for reason, count in (dict.fromkeys(SPAN_DROP_REASONS, 0) | dict(stats.dropped)).items():
        dropped.add_metric([reason], count)
    yield dropped
    failures = CounterMetricFamily("drafthouse:span_export_failures", "Failed exports of spans.", labels=["reason"])
    for reason, count in sorted(stats.failures.items()):
        failures.add_metric([reason], count)
    yield failures
    yield GaugeMetricFamily("drafthouse:span_queue_size", "Spans waiting to be exported.", stats.size)
    yield GaugeMetricFamily("drafthouse:span_queue_capacity", "Most spans that may wait.", stats.capacity)


def _exemplar_labels(trace: TraceIds | None) -> dict[str, str] | None:
    return None if trace is None else {"trace_id": trace[0], "span_id": trace[1]}


def _family(metric: Metric) -> MetricFamily:
    # `_created` is left out: frontends started at different times would look like changes to bench clients.
    samples = [
        Sample(sample.name, sample.labels, sample.value, _exemplar(sample.exemplar))
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return MetricFamily(metric.name, metric.type, metric.documentation, samples)


def _exemplar(exemplar: client_samples.Exemplar | None) -> Exemplar | None:
    if exemplar is None:
        return None
    return Exemplar(exemplar.labels, exemplar.value, None if exemplar.timestamp is None else float(exemplar.timestamp))


def _one_two_five(largest: int) -> tuple[float, ...]:
    """1 2 5 10 20 50 ... up to `largest`: vLLM's buckets of token counts."""
    buckets: list[float] = []
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > largest:
                return tuple(buckets)
            buckets.append(step * power)
        power *= 10
