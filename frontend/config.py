"""What a frontend process can be told.

Owns the option names, defaults and limits of the frontend; parsed once from file, environment and flags by
`protocol.options`, then frozen. Never reads the environment itself; never written back to. Used by `frontend.__main__` and,
in slices, by everything else in this package.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.curve_keys import check_curve_options
from protocol.endpoints import DEFAULT_ENGINE_ADDRESS, split_addresses, stays_here
from protocol.served_name import check_served_model_name


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one frontend process. Sizes in bytes, characters or tokens as named; times in seconds."""

    model: Annotated[str, Meta(description="model whose tokenizer and chat template are used (see the engine)")] = (
        "embedded"
    )
    served_model_name: Annotated[
        str | None, Meta(description="name clients use; default: the model's own name; must equal the engine's")
    ] = None
    engine: Annotated[
        str, Meta(description="address of the engine, or of several with commas; a DNS name means all its addresses")
    ] = DEFAULT_ENGINE_ADDRESS
    allow_plaintext_tcp: Annotated[
        bool, Meta(description="reach engines on other machines without encryption and without knowing who they are")
    ] = False
    host: Annotated[str, Meta(description="interface to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port; 0 takes a free one")] = 8000
    reuse_port: Annotated[bool, Meta(description="share the port with other frontends (SO_REUSEPORT)")] = False
    sse_ping_interval_s: Annotated[
        float, Meta(gt=0, le=3600, description="seconds between keep-alive comments while a stream has nothing to say")
    ] = 10.0
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30, description="largest request body in bytes")] = (
        16 * 1024 * 1024
    )
    max_prompt_chars: Annotated[
        int | None, Meta(ge=1, description="longest prompt text in characters; default: 64 per token of the context")
    ] = None
    max_prompts: Annotated[int, Meta(ge=1, le=65536, description="most prompts in one completions request")] = 256
    max_inflight_requests: Annotated[
        int | None,
        Meta(ge=1, description="most sequences in flight in this frontend; default: what the engine runs and queues"),
    ] = None
    max_inflight_prompt_tokens: Annotated[
        int | None,
        Meta(
            ge=1, description="most prompt tokens in flight in this frontend; default: what the engine holds and queues"
        ),
    ] = None
    max_inflight_logprobs_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 20,
            description="most MiB in this frontend for log-probabilities of answers in flight, each counted as long as its "
            "max_tokens allow",
        ),
    ] = 2048
    drain_timeout_s: Annotated[
        float, Meta(ge=0, le=3600, description="seconds that running requests get to finish after SIGTERM")
    ] = 8.0
    # 0: without a balancer that asks /ready nobody goes elsewhere meanwhile, and Ctrl-C would only take longer.
    drain_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="seconds after SIGTERM in which new requests are still served while /ready is 503 already, so that "
            "a balancer learns first; part of --drain-timeout-s",
        ),
    ] = 0.0
    keep_alive_s: Annotated[float, Meta(ge=1, le=3600, description="seconds an idle client connection is kept")] = 120.0
    access_log: Annotated[bool, Meta(description="log one line per HTTP request")] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least level logged")] = "info"
    log_format: Annotated[Literal["text", "json"], Meta(description="text, or json: one object per line")] = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="where spans are sent by OTLP; wins over OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and its general form"
        ),
    ] = None
    otlp_metrics_endpoint: Annotated[
        str | None,
        Meta(description="where metrics are sent by OTLP; wins over OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"),
    ] = None
    trace_level: Annotated[
        int,
        Meta(ge=0, le=3, description="how much of a traced request: 1 stages, 2 and rounds, 3 and steps; 0 nothing"),
    ] = 2
    trace_max_per_second: Annotated[
        float, Meta(gt=0, le=1e6, description="most requests traced per second, whoever asks for it")
    ] = 200.0
    admin_key_file: Annotated[
        str | None,
        Meta(description="file with the key of the admin routes and headers; without one they are refused"),
    ] = None
    per_request_spec_decode_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        Meta(description="speculation statistics in every answer; a request may ask for its own"),
    ] = "none"
    request_timeout_s: Annotated[
        float | None,
        Meta(gt=0, le=86_400, description="seconds a request may take that names no X-Request-Timeout; default: any"),
    ] = None
    api_key_file: Annotated[
        str | None,
        Meta(
            description="file with the keys of clients, KEY or NAME: KEY a line; without it and without a key in "
            "DRAFTHOUSE_API_KEY everybody may use the API"
        ),
    ] = None
    max_requests_per_key: Annotated[
        int | None, Meta(ge=1, le=1_000_000, description="most requests of one API key at a time, per frontend")
    ] = None
    requests_per_minute_per_key: Annotated[
        int | None, Meta(ge=1, le=1_000_000, description="most requests of one API key in any minute, per frontend")
    ] = None
    request_read_timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="seconds a client may take to send a request's head, and then its body")
    ] = 60.0
    max_connections: Annotated[
        int | None,
        Meta(
            ge=1,
            le=1_000_000,
            description="most client connections, per frontend; default: what the limit of open files allows",
        ),
    ] = None
    curve_key_file: Annotated[
        str | None, Meta(description="this frontend's secret key: encrypts tcp:// (see `drafthouse keys`)")
    ] = None
    curve_server_key_file: Annotated[
        str | None, Meta(description="public key that the engine must have; with --curve-key-file")
    ] = None

    def __post_init__(self) -> None:
        addresses = split_addresses(self.engine)
        has_curve = check_curve_options(
            self.curve_key_file, self.curve_server_key_file, "--curve-server-key-file", list(addresses)
        )
        if has_curve and self.allow_plaintext_tcp:
            raise ValueError(
                "--allow-plaintext-tcp and --curve-key-file contradict each other: with keys nothing is plain"
            )
        check_engine_addresses(addresses, allow_plaintext_tcp=self.allow_plaintext_tcp or has_curve)
        if self.drain_grace_s > self.drain_timeout_s:
            raise ValueError(
                f"--drain-grace-s {self.drain_grace_s:g} is longer than --drain-timeout-s {self.drain_timeout_s:g}, of "
                "which it is a part"
            )
        if not self.host:
            raise ValueError("host must not be empty")
        if self.served_model_name is not None:
            check_served_model_name(self.served_model_name)


def check_engine_addresses(addresses: Sequence[str], *, allow_plaintext_tcp: bool) -> None:
    """Raise ValueError for an engine to which prompts would go, and from which answers would come, unencrypted."""
    outside = next((address for address in addresses if not stays_here(address)), None)
    if outside is not None and not allow_plaintext_tcp:
        raise ValueError(
            f"--engine {outside} may lead to another machine, and the wire is neither encrypted nor authenticated without "
            "keys: give --curve-key-file and --curve-server-key-file (`drafthouse keys` makes them), use ipc:// or "
            "tcp://127.0.0.1, or say --allow-plaintext-tcp true"
        )
