"""OTLP metrics are off unless asked for; every standard variable is honoured or refused by its name."""

import subprocess
import sys
from pathlib import Path

import pytest

from frontend.config import FrontendConfig
from frontend.otlp_metrics_settings import ExemplarFilter, metrics_settings
from frontend.otlp_transport import Compression, OtlpProtocol

ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
ON = {ENDPOINT: "http://collector:4317"}


def settings(environment: dict[str, str], **options: object):
    return metrics_settings(FrontendConfig(**options), environment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"},
        {ENDPOINT: "  "},
        {**ON, "OTEL_SDK_DISABLED": "TRUE"},
        {**ON, "OTEL_METRICS_EXPORTER": "none"},
    ],
    ids=str,
)
def test_off_unless_asked_for(environment):
    assert settings(environment) is None


def test_each_way_of_asking():
    by_option = settings({}, otlp_metrics_endpoint="http://a:4317")
    by_variable = settings({ENDPOINT: "http://b:4317"})
    by_exporter = settings({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"})
    by_default = settings({"OTEL_METRICS_EXPORTER": "otlp"})
    found = [made.collector.address for made in (by_option, by_variable, by_exporter, by_default) if made]
    assert found == ["a:4317", "b:4317", "c:4317", "localhost:4317"]
    both = settings({ENDPOINT: "http://b:4317"}, otlp_metrics_endpoint="http://a:4317")
    assert both is not None and both.collector.address == "a:4317", "the option wins"


@pytest.mark.parametrize(
    ("environment", "protocol", "address"),
    [
        ({ENDPOINT: "http://c:4317"}, OtlpProtocol.GRPC, "c:4317"),
        ({ENDPOINT: "http://c:4317/"}, OtlpProtocol.GRPC, "c:4317"),
        ({ENDPOINT: "c:4317", "OTEL_EXPORTER_OTLP_INSECURE": "true"}, OtlpProtocol.GRPC, "c:4317"),
        ({ENDPOINT: "http://c:4318"}, OtlpProtocol.HTTP, "http://c:4318"),
        ({ENDPOINT: "https://c/otlp/v1/metrics"}, OtlpProtocol.HTTP, "https://c/otlp/v1/metrics"),
        ({ENDPOINT: "http://c:9/x", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, OtlpProtocol.HTTP, "http://c:9/x"),
        (
            {
                ENDPOINT: "http://c:4318",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc",
            },
            OtlpProtocol.GRPC,
            "c:4318",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/base/"},
            OtlpProtocol.HTTP,
            "http://c:4318/base/v1/metrics",
        ),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            OtlpProtocol.HTTP,
            "http://localhost:4318/v1/metrics",
        ),
    ],
    ids=str,
)
def test_protocol_and_address(environment, protocol, address):
    made = settings(environment)
    assert made is not None
    assert (made.collector.protocol, made.collector.address) == (protocol, address)
    assert made.collector.is_secure == environment.get(ENDPOINT, "").startswith("https")


def test_tls_by_scheme_and_without_one_unless_insecure(tmp_path: Path):
    bare = settings({ENDPOINT: "c:4317"})
    secure = settings({ENDPOINT: "https://c:4317", "OTEL_EXPORTER_OTLP_INSECURE": "true"})
    assert bare is not None and bare.collector.is_secure
    assert secure is not None and secure.collector.is_secure, "the scheme wins"
    for name in ("ca", "key", "chain"):
        (tmp_path / name).write_text("x")
    files = settings(
        {
            ENDPOINT: "https://c:4317",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca"),
            "OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY": str(tmp_path / "key"),
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(tmp_path / "chain"),
        }
    )
    assert files is not None
    collector = files.collector
    assert [collector.certificate, collector.client_key, collector.client_certificate] == [
        str(tmp_path / name) for name in ("ca", "key", "chain")
    ]


def test_every_number_and_choice_is_taken():
    made = settings(
        {
            **ON,
            "OTEL_METRIC_EXPORT_INTERVAL": "1500",
            "OTEL_METRIC_EXPORT_TIMEOUT": "2500",
            "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "Delta",
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "base2_exponential_bucket_histogram",
            "OTEL_METRICS_EXEMPLAR_FILTER": "always_off",
            "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "X-Api-Key=a%20b, second = 2=3 ",
            "OTEL_EXPORTER_OTLP_HEADERS": "ignored=1",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        }
    )
    assert made is not None
    assert (made.interval_s, made.is_delta, made.is_exponential) == (1.5, True, True)
    assert made.exemplar_filter is ExemplarFilter.ALWAYS_OFF
    assert made.collector.headers == (("x-api-key", "a b"), ("second", "2=3"))
    assert made.collector.compression is Compression.GZIP
    assert made.collector.timeout_s == 2.5, "an attempt ends with the export it belongs to"
    plain = settings(ON)
    assert plain is not None
    assert (plain.interval_s, plain.is_delta, plain.is_exponential) == (60.0, False, False)
    assert (plain.exemplar_filter, plain.collector.timeout_s) == (ExemplarFilter.TRACE_BASED, 10.0)
    low = settings({**ON, "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "lowmemory"})
    assert low is not None and low.is_delta


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_SDK_DISABLED", "yes"),
        ("OTEL_METRICS_EXPORTER", "console"),
        ("OTEL_METRICS_EXPORTER", "prometheus"),
        ("OTEL_METRICS_EXPORTER", "otlp,console"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "soon"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "inf"),
        ("OTEL_METRIC_EXPORT_TIMEOUT", "-1"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "sometimes"),
        ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "summary"),
        ("OTEL_METRICS_EXEMPLAR_FILTER", "some"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "udp"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "deflate"),  # gRPC has none
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "nan"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/no/such/key"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "no-equals-sign"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "a b=c"),
        (ENDPOINT, "http://c:4317/some/path"),
        (ENDPOINT, "ftp://c:4317"),
        (ENDPOINT, "http://user:secret@c:4317"),
        (ENDPOINT, "http://"),
    ],
)
def test_what_is_malformed_or_not_supported_is_refused_by_name(name: str, value: str):
    with pytest.raises(ValueError, match=name):
        settings({**ON, name: value})


def test_the_option_is_refused_by_its_name():
    with pytest.raises(ValueError, match="--otlp-metrics-endpoint"):
        settings({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, otlp_metrics_endpoint="collector:4318")


@pytest.mark.parametrize("headers", ["api-key s3cret", "api-key=s3cret%0Ax"])
def test_a_refusal_never_repeats_a_key(headers: str):
    with pytest.raises(ValueError) as refusal:
        settings({**ON, "OTEL_EXPORTER_OTLP_HEADERS": headers})
    assert "s3cret" not in str(refusal.value)


def test_where_clients_reach_this_frontend():
    named = settings(ON, host="10.0.0.7", port=8080)
    assert named is not None and named.server_attributes == {"server.address": "10.0.0.7", "server.port": 8080}
    anywhere = settings(ON, host="0.0.0.0", port=0)
    assert anywhere is not None
    assert (
        set(anywhere.server_attributes) == {"server.address"} and "0.0.0.0" not in anywhere.server_attributes.values()
    )


def test_a_server_without_otlp_metrics_never_loads_the_sdk():
    program = (
        "import sys\n"
        "from frontend.config import FrontendConfig\n"
        "import frontend.otlp_metrics\n"
        "from frontend.otlp_metrics_settings import metrics_settings\n"
        "assert metrics_settings(FrontendConfig(), {}) is None\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'opentelemetry', 'grpc', 'google', 'requests'}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd(), timeout=60)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
