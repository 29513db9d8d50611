"""Telemetry begins whole or not at all, and both of its halves speak of the same frontend and engines."""

import threading

import pytest

from frontend.config import FrontendConfig
from frontend.metrics import FrontendMetrics
from frontend.telemetry import start_telemetry
from tests.frontend.otlp_metric_receivers import http_receiver, plain
from tests.frontend.otlp_receivers import refusing_port
from tests.frontend.test_otlp_metrics import ENGINE, FRONTEND, attached, engines
from tests.wiring import EPOCH

ATTRIBUTES = {"OTEL_RESOURCE_ATTRIBUTES": "team=b,host.name=mine", "OTEL_SERVICE_NAME": "chat"}


def exporters() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name in ("span export", "otlp metrics")}


@pytest.mark.parametrize(
    "refused",
    [
        {"OTEL_TRACES_SAMPLER": "sometimes"},
        {"OTEL_PROPAGATORS": "b3"},
        {"OTEL_RESOURCE_ATTRIBUTES": "novalue"},
        {"OTEL_METRICS_EXEMPLAR_FILTER": "some"},
        {"OTEL_BSP_SCHEDULE_DELAY": "0"},
    ],
    ids=str,
)
def test_a_refused_configuration_starts_nothing(refused: dict[str, str]):
    before = exporters()
    config = FrontendConfig(otlp_traces_endpoint="http://127.0.0.1:1", otlp_metrics_endpoint="http://127.0.0.1:1")
    with pytest.raises(ValueError, match=next(iter(refused))):
        start_telemetry(config, refused, FrontendMetrics(100), tuple)
    assert not exporters() - before  # one that an earlier test left behind may end meanwhile


@pytest.mark.parametrize("is_traced", [False, True])
def test_the_engines_sums_have_the_same_resource_with_and_without_tracing(is_traced: bool):
    with refusing_port() as nobody, http_receiver() as receiver:
        config = FrontendConfig(
            otlp_metrics_endpoint=receiver.url, otlp_traces_endpoint=f"http://{nobody}" if is_traced else None
        )
        telemetry = start_telemetry(config, ATTRIBUTES, FrontendMetrics(100), engines(attached()))
        assert telemetry.otlp is not None and (telemetry.tracing is not None) is is_traced
        telemetry.otlp.first_token("chat", 0.1, None)
        telemetry.close()
        [engine], [frontend] = receiver.resources(ENGINE), receiver.resources("chat")
        assert receiver.resources(FRONTEND) == []
    identity = {"service.name": ENGINE, "service.instance.id": f"0/{EPOCH}"}
    assert plain(engine.resource.attributes) == identity | {"team": "b"}
    assert plain(frontend.resource.attributes).items() >= {"team": "b", "host.name": "mine"}.items()
    if telemetry.tracing is not None:
        assert dict(telemetry.tracing.engine_resource("0", EPOCH).attributes) == plain(engine.resource.attributes)
        assert dict(telemetry.tracing.frontend_resource.attributes) == plain(frontend.resource.attributes)
