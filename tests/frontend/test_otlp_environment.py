"""The standard environment variables, of traces and of metrics: as the SDK's exporters read them, and refused by name where we cannot."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

from frontend.config import FrontendConfig
from frontend.otlp_environment import Signal, collector_from
from frontend.otlp_metrics_settings import metrics_settings
from frontend.otlp_transport import Collector, Compression, OtlpProtocol
from frontend.span_encoding import SpanLimits
from frontend.span_export import QueueSettings
from frontend.telemetry_resources import resources_from
from frontend.tracing import Tracing, TracingSettings, settings_from
from tests.frontend.otlp_receivers import refusing_port

GENERAL = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
HTTP = {PROTOCOL: "http/protobuf"}
GRPC = {PROTOCOL: "grpc"}
BOTH_SIGNALS = pytest.mark.parametrize("signal", list(Signal))


def settings(environment: dict[str, str], **options: object) -> TracingSettings | None:
    return settings_from(FrontendConfig(**options), environment)  # type: ignore[arg-type]


def on(environment: dict[str, str], **options: object) -> TracingSettings:
    found = settings(environment, **options)
    assert found is not None
    return found


def collector(environment: dict[str, str], **options: object) -> Collector:
    return on(environment, **options).collector


def of_signal(environment: dict[str, str], signal: Signal) -> dict[str, str]:
    """Variables of traces as those of another signal."""
    return {name.replace("_TRACES_", f"_{signal.upper()}_"): value for name, value in environment.items()}


# ---- on or off ----


@pytest.mark.parametrize(
    "environment",
    [{GENERAL: "http://c:4317"}, {TRACES: "http://c:4317"}, {"OTEL_TRACES_EXPORTER": "otlp"}, {GENERAL: " http://c "}],
)
def test_tracing_is_on_when_somebody_says_where_or_that(environment: dict[str, str]):
    assert settings(environment) is not None
    assert settings(environment | {"OTEL_SDK_DISABLED": "TRUE"}) is None
    assert settings(environment | {"OTEL_SDK_DISABLED": "false"}) is not None
    assert settings(environment | {"OTEL_TRACES_EXPORTER": "none"}) is None


@pytest.mark.parametrize("environment", [{}, {GENERAL: ""}, {TRACES: " "}, HTTP, {"OTEL_SERVICE_NAME": "x"}])
def test_tracing_is_off_when_nobody_does(environment: dict[str, str]):
    assert settings(environment) is None


def test_the_option_is_enough_and_wins_over_the_environment():
    assert collector({}, otlp_traces_endpoint="http://o:1").address == "o:1"
    environment = {GENERAL: "http://g:1", TRACES: "http://t:1"}
    assert collector(environment, otlp_traces_endpoint="http://o:1").address == "o:1"


@pytest.mark.parametrize("switch", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}], ids=str)
def test_an_option_that_the_environment_switches_off_is_said_aloud(
    switch: dict[str, str], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    assert settings(switch, otlp_traces_endpoint="http://o:1") is None
    config = FrontendConfig(otlp_metrics_endpoint="http://o:1")
    assert metrics_settings(config, of_signal(switch, Signal.METRICS)) is None
    assert [record.message for record in caplog.records] == [
        "traces are off: the environment says so, --otlp-traces-endpoint has no effect",
        "metrics are off: the environment says so, --otlp-metrics-endpoint has no effect",
    ]
    caplog.clear()
    assert settings(switch) is None and not caplog.records


def test_nothing_of_opentelemetry_is_loaded_while_tracing_is_off():
    script = (
        "import sys, frontend.tracing, frontend.config\n"
        "assert frontend.tracing.settings_from(frontend.config.FrontendConfig(), {}) is None\n"
        "heavy = {'opentelemetry', 'grpc', 'requests', 'google'} & {name.split('.')[0] for name in sys.modules}\n"
        "print(*heavy)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "\n"


# ---- as the SDK reads them ----

BOTH: list[dict[str, str]] = [
    {"OTEL_TRACES_EXPORTER": "otlp"},
    {GENERAL: "http://collector:4317"},
    {GENERAL: "https://collector:4317"},
    {GENERAL: "http://collector:4317/"},
    {GENERAL: "http://[::1]:4317"},
    {GENERAL: "http://general:1", TRACES: "http://traces:2"},
    {GENERAL: "http://general:1", TRACES: ""},
    {TRACES: "https://traces"},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "3"},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "3", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "0.5"},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_COMPRESSION": "GZIP "},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "gzip"},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20a%3Db%2Cc,x-scope = one"},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_HEADERS": "a=1", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "b=2==,,"},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer plain text"},
]
HTTP_ONLY: list[dict[str, str]] = [
    {GENERAL: "http://collector:4318/base/"},
    {GENERAL: "http://collector:4318/base", TRACES: "http://traces:4318/verbatim"},
    {TRACES: "http://traces:4318"},
    {TRACES: "http://user:word@traces:4318/v1/traces?tenant=1"},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_COMPRESSION": "deflate"},
    {GENERAL: "http://c:1", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"},
]
GRPC_ONLY: list[dict[str, str]] = [
    {GENERAL: "collector:4317"},
    {GENERAL: "collector:4317", "OTEL_EXPORTER_OTLP_INSECURE": "true"},
    {GENERAL: "collector:4317", "OTEL_EXPORTER_OTLP_INSECURE": "false"},
    {GENERAL: "c:1", "OTEL_EXPORTER_OTLP_INSECURE": "false", "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true"},
    {GENERAL: "https://collector:4317", "OTEL_EXPORTER_OTLP_INSECURE": "true"},
    {GENERAL: "127.0.0.1:4317", "OTEL_EXPORTER_OTLP_INSECURE": "True"},
]


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    return monkeypatch


@BOTH_SIGNALS
@pytest.mark.parametrize("environment", BOTH + HTTP_ONLY, ids=str)
def test_http_settings_are_the_sdks(environment: dict[str, str], signal: Signal, process: pytest.MonkeyPatch):
    environment = of_signal(environment, signal)
    for name, value in environment.items():
        process.setenv(name, value)
    sdk = HttpSpanExporter() if signal is Signal.TRACES else HttpMetricExporter()
    ours = collector_from(None, environment | HTTP, signal)
    client = sdk._client
    assert ours.protocol is OtlpProtocol.HTTP
    assert ours.address == sdk._endpoint
    assert ours.timeout_s == client._timeout
    assert ours.compression.value == sdk._compression.value
    not_ours = ("content-type", "user-agent", "content-encoding")
    sent = {name.lower(): value for name, value in client._headers.items() if name.lower() not in not_ours}
    assert dict(ours.headers) == sent
    sdk.shutdown()


@BOTH_SIGNALS
@pytest.mark.parametrize("environment", BOTH + GRPC_ONLY, ids=str)
def test_grpc_settings_are_the_sdks(environment: dict[str, str], signal: Signal, process: pytest.MonkeyPatch):
    environment = of_signal(environment, signal)
    for name, value in environment.items():
        process.setenv(name, value)
    sdk = GrpcSpanExporter() if signal is Signal.TRACES else GrpcMetricExporter()
    ours = collector_from(None, environment | GRPC, signal)
    assert ours.protocol is OtlpProtocol.GRPC
    assert ours.address == sdk._endpoint
    assert ours.is_secure == (not sdk._insecure)
    assert ours.timeout_s == sdk._timeout
    assert (ours.compression is Compression.GZIP) == (sdk._compression is grpc.Compression.Gzip)
    assert ours.headers == tuple(sdk._headers)
    sdk.shutdown()


# ---- protocol ----


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({GENERAL: "http://c:4317"}, OtlpProtocol.GRPC),
        ({GENERAL: "http://c"}, OtlpProtocol.GRPC),
        ({GENERAL: "http://c:4318"}, OtlpProtocol.HTTP),
        ({TRACES: "https://c/v1/traces"}, OtlpProtocol.HTTP),
        ({GENERAL: "http://c:4318"} | GRPC, OtlpProtocol.GRPC),
        ({GENERAL: "http://c:4317", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"} | GRPC, OtlpProtocol.HTTP),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, OtlpProtocol.GRPC),
    ],
    ids=str,
)
def test_without_a_word_the_address_tells_the_protocol(environment: dict[str, str], protocol: OtlpProtocol):
    assert collector(environment).protocol is protocol


# ---- refused by name ----

REFUSED: list[tuple[dict[str, str], str]] = [
    ({"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER"),
    ({"OTEL_TRACES_EXPORTER": "otlp,console"}, "OTEL_TRACES_EXPORTER"),
    ({"OTEL_SDK_DISABLED": "yes"}, "OTEL_SDK_DISABLED"),
    ({PROTOCOL: "http/json"}, PROTOCOL),
    ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "udp"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
    ({GENERAL: "ftp://c"}, GENERAL),
    ({GENERAL: "http://c:port"}, GENERAL),
    ({GENERAL: "http://c:99999"}, GENERAL),
    ({GENERAL: "http://[::1"}, GENERAL),
    ({GENERAL: "http://"}, GENERAL),
    ({TRACES: "unix:///tmp/socket"}, TRACES),
    ({TRACES: "c:4318"} | HTTP, TRACES),
    ({TRACES: "http://c:4317/v1/traces"} | GRPC, TRACES),
    ({TRACES: "http://user:word@c:4317"} | GRPC, TRACES),
    ({"OTEL_EXPORTER_OTLP_INSECURE": "1"}, "OTEL_EXPORTER_OTLP_INSECURE"),
    ({"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
    ({"OTEL_EXPORTER_OTLP_TIMEOUT": "0"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
    ({"OTEL_EXPORTER_OTLP_TIMEOUT": "nan"}, "OTEL_EXPORTER_OTLP_TIMEOUT"),
    ({"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "10000"}, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"),
    ({"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "OTEL_EXPORTER_OTLP_COMPRESSION"),
    ({"OTEL_EXPORTER_OTLP_COMPRESSION": "deflate"} | GRPC, "OTEL_EXPORTER_OTLP_COMPRESSION"),
    ({"OTEL_EXPORTER_OTLP_HEADERS": "hush"}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ({"OTEL_EXPORTER_OTLP_HEADERS": "a=1,sp ace=hush"}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ({"OTEL_EXPORTER_OTLP_HEADERS": "a=hush%0aX: y"}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ({"OTEL_EXPORTER_OTLP_HEADERS": "a=hushé"}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ({"OTEL_EXPORTER_OTLP_HEADERS": "content-type=hush"}, "OTEL_EXPORTER_OTLP_HEADERS"),
    ({"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a-bin=hush"} | GRPC, "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
    ({GENERAL: "https://c", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/file"}, "OTEL_EXPORTER_OTLP_CERTIFICATE"),
    ({"OTEL_EXPORTER_OTLP_CLIENT_KEY": "/k"}, "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"),
    ({"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": "/c"} | GRPC, "OTEL_EXPORTER_OTLP_CLIENT_KEY"),
    ({"OTEL_CONFIG_FILE": "otel.yaml"}, "OTEL_CONFIG_FILE"),
    ({"OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "os"}, "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS"),
    (
        {"OTEL_PYTHON_EXPORTER_OTLP_GRPC_TRACES_CREDENTIAL_PROVIDER": "x"},
        "OTEL_PYTHON_EXPORTER_OTLP_GRPC_TRACES_CREDENTIAL_PROVIDER",
    ),
    (
        {"OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES": "UNAVAILABLE"},
        "OTEL_PYTHON_EXPORTER_OTLP_GRPC_RETRYABLE_ERROR_CODES",
    ),
]
REFUSED_OF_SPANS: list[tuple[dict[str, str], str]] = [
    ({"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "OTEL_BSP_MAX_QUEUE_SIZE"),
    ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE"),
    ({"OTEL_BSP_MAX_QUEUE_SIZE": "-5"}, "OTEL_BSP_MAX_QUEUE_SIZE"),
    (
        {"OTEL_BSP_MAX_QUEUE_SIZE": "100", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "101"},
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    ),
    ({"OTEL_BSP_SCHEDULE_DELAY": "0"}, "OTEL_BSP_SCHEDULE_DELAY"),
    ({"OTEL_BSP_EXPORT_TIMEOUT": "1.5"}, "OTEL_BSP_EXPORT_TIMEOUT"),
    ({"OTEL_ATTRIBUTE_COUNT_LIMIT": "x"}, "OTEL_ATTRIBUTE_COUNT_LIMIT"),
    ({"OTEL_SPAN_EVENT_COUNT_LIMIT": "-1"}, "OTEL_SPAN_EVENT_COUNT_LIMIT"),
]


@pytest.mark.parametrize(("environment", "name"), REFUSED, ids=str)
def test_metrics_refuse_the_same_in_the_same_words(environment: dict[str, str], name: str):
    with pytest.raises(ValueError, match=name) as of_traces:
        settings({GENERAL: "http://c:4317", "OTEL_TRACES_EXPORTER": "otlp"} | environment)
    ask = {GENERAL: "http://c:4317", "OTEL_METRICS_EXPORTER": "otlp"}
    with pytest.raises(ValueError) as of_metrics:
        metrics_settings(FrontendConfig(), ask | of_signal(environment, Signal.METRICS))
    assert str(of_metrics.value) == str(of_traces.value).replace("_TRACES_", "_METRICS_")


@pytest.mark.parametrize(("environment", "name"), REFUSED + REFUSED_OF_SPANS, ids=str)
def test_what_cannot_be_honoured_is_refused_by_name(environment: dict[str, str], name: str):
    with pytest.raises(ValueError, match=name) as refusal:
        settings({GENERAL: "http://c:4317"} | environment)
    assert "hush" not in str(refusal.value) and "word" not in str(refusal.value).replace("password", "")


def test_a_bad_option_is_named_as_the_user_wrote_it():
    with pytest.raises(ValueError, match="--otlp-traces-endpoint must be"):
        settings({}, otlp_traces_endpoint="file:///x")


# ---- queue, limits, files ----


def test_the_queue_is_sized_for_its_rate_unless_told():
    assert on({GENERAL: "http://c"}).queue == QueueSettings(65_536, 2_048, 1.0, 10.0)
    told = {
        "OTEL_BSP_MAX_QUEUE_SIZE": "4096",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "512",
        "OTEL_BSP_SCHEDULE_DELAY": "250",
        "OTEL_BSP_EXPORT_TIMEOUT": "4000",
    }
    assert on({GENERAL: "http://c"} | told).queue == QueueSettings(4_096, 512, 0.25, 4.0)
    assert on({GENERAL: "http://c", "OTEL_BSP_MAX_QUEUE_SIZE": "100"}).queue.batch_size == 100
    shorter = {"OTEL_BSP_EXPORT_TIMEOUT": "60000", "OTEL_EXPORTER_OTLP_TIMEOUT": "2"}
    assert on({GENERAL: "http://c"} | shorter).queue.timeout_s == 2.0


def test_limits_of_spans_win_over_general_ones():
    assert on({GENERAL: "http://c"}).limits == SpanLimits(128, 128, 128, None)
    general = {"OTEL_ATTRIBUTE_COUNT_LIMIT": "7", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "9"}
    assert on({GENERAL: "http://c"} | general).limits == SpanLimits(7, 7, 128, 9)
    special = {
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "0",
        "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": "2",
        "OTEL_SPAN_EVENT_COUNT_LIMIT": "3",
        "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "4",
    }
    assert on({GENERAL: "http://c"} | general | special).limits == SpanLimits(0, 2, 3, 4)


def test_files_of_tls_are_read_at_start_and_named_per_signal(tmp_path: Path):
    for name in ("ca", "key", "certificate", "other"):
        (tmp_path / name).write_text("PEM")
    found = collector(
        {
            GENERAL: "https://c",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "other"),
            "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": str(tmp_path / "ca"),
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(tmp_path / "key"),
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(tmp_path / "certificate"),
        }
    )
    paths = (found.certificate, found.client_key, found.client_certificate)
    assert paths == tuple(str(tmp_path / name) for name in ("ca", "key", "certificate"))


def test_no_credential_is_shown():
    found = collector(
        {TRACES: "https://user:word@c:4318/v1/traces?key=hush", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=hush"}
    )
    assert found.shown == "https://c:4318/v1/traces"
    assert "hush" not in repr(found) and "word" not in repr(found)


# ---- who telemetry is about ----


@pytest.mark.parametrize("value", ["novalue", "=x"])
def test_malformed_attributes_of_the_resource_are_refused_by_name(value: str):
    with pytest.raises(ValueError, match="OTEL_RESOURCE_ATTRIBUTES must be"):
        resources_from({"OTEL_RESOURCE_ATTRIBUTES": value})


def tracing(**environment: str) -> Tracing:
    with refusing_port() as address:
        started = Tracing(on({GENERAL: f"http://{address}"} | environment), resources_from(environment))
        started.start()
        started.close(1.0)
        return started


def test_a_frontend_is_itself_and_an_engine_is_never_renamed():
    one = tracing(
        OTEL_SERVICE_NAME="chat",
        OTEL_RESOURCE_ATTRIBUTES="service.name=lost,service.instance.id=pod-1,service.version=9,team=a%20b,"
        "host.name=h,process.pid=1,container.id=c,k8s.pod.name=p,k8s.namespace.name=n,",
    )
    frontend = dict(one.frontend_resource.attributes)
    assert frontend["service.name"] == "chat" and frontend["service.instance.id"] == "pod-1"
    assert frontend["team"] == "a b" and frontend["k8s.pod.name"] == "p"
    engine = dict(one.engine_resource("east", 7).attributes)
    assert engine == {
        "service.name": "drafthouse-engine",
        "service.instance.id": "east/7",
        "team": "a b",
        "k8s.namespace.name": "n",
    }


def test_a_frontend_has_a_name_an_instance_and_no_sdk():
    first, second = (dict(tracing().frontend_resource.attributes) for _ in range(2))
    assert first["service.name"] == "drafthouse-frontend" and first["service.version"]
    assert first["process.pid"] == os.getpid()
    assert first["service.instance.id"] != second["service.instance.id"]
    assert not any(name.startswith("telemetry.sdk") for name in first)


def test_each_life_of_an_engine_is_one_resource():
    one = tracing()
    assert one.engine_resource("0", 1) is one.engine_resource("0", 1)
    assert one.engine_resource("0", 1) is not one.engine_resource("0", 2)
    first = one.engine_resource("0", 1)
    for epoch in range(2, 200):
        one.engine_resource("0", epoch)
    assert one.engine_resource("0", 1).attributes == first.attributes, "forgotten, and the same again"
    assert len(one._engines) <= 64
