"""The architecture as data, and the checks that hold the code to it. Each check returns sentences, one per violation."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "engine", "frontend", "deploy")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_P90_FUNCTION_LINES = 30

# A module imports only modules of lower layers. A prefix (ending in ".") covers a package; the longest match wins.
ENGINE_LAYERS = {
    # data and clocks
    "engine.speculation.names": 0,
    "engine.speculation.batch_table": 0,
    "engine.speculation.acceptance_memory": 0,
    "engine.speculation.step_cost": 0,
    "engine.speculation.length_choice": 0.1,
    "engine.speculation.synthetic_rates": 0,
    "engine.plan": 1,
    "engine.sequence": 1,
    "engine.clock": 1,
    "engine.config": 1,
    "engine.noise": 1,
    "engine.race": 1.1,
    "engine.accounts": 1.1,
    "engine.handover": 1.1,
    "engine.peers": 1.1,
    "engine.heartbeats": 1.1,
    "engine.stages": 1.1,
    "engine.recorder": 1.2,
    "engine.profiler": 1.2,
    "engine.listening": 1.2,
    "engine.door": 1.2,
    # parts without policy
    "engine.sampling": 2,
    "engine.transforms": 2.1,
    "engine.waiting": 2,
    "engine.intake": 2.1,
    "engine.expiry": 2.2,
    "engine.draft_lengths": 2.2,
    "engine.kv.pool": 2,
    "engine.kv.blocks": 2,
    "engine.kv.prefix": 2,
    "engine.kv.cache": 2.1,
    "engine.model.": 2,
    "engine.speculation.draft": 2,
    "engine.speculation.budget": 2,
    # one forward and its verdict
    "engine.batch": 3,
    "engine.runner": 4,
    "engine.accept": 4,
    "engine.logprobs": 4.1,
    # drafters
    "engine.speculation.speculator": 5,
    "engine.speculation.recipe": 5.1,
    "engine.speculation.draft_step": 5.1,
    "engine.speculation.choice": 5.1,
    "engine.speculation.draft_options": 5.2,
    "engine.speculation.drafter_log": 5.1,
    "engine.speculation.shipped": 5.1,
    "engine.speculation.drafter_tensors": 5.2,
    "engine.speculation.drafter_weights": 5.3,
    "engine.speculation.first_token_watch": 5.2,
    "engine.speculation.growing_tree": 5.2,
    "engine.speculation.eagle_head": 5.2,
    "engine.speculation.eagle_layout": 5.3,
    "engine.speculation.eagle_passes": 5.3,
    "engine.speculation.eagle_chain": 5.4,
    "engine.speculation.eagle_tree": 5.4,
    "engine.speculation.eagle_weights": 5.4,
    "engine.speculation.markov_head": 5.2,
    "engine.speculation.block_model": 5.3,
    "engine.speculation.block_config": 5.3,
    "engine.speculation.block_layout": 5.4,
    "engine.speculation.block_passes": 5.4,
    "engine.speculation.block_weights": 5.5,
    "engine.speculation.block_levels": 5.45,
    "engine.speculation.block_tree": 5.5,
    "engine.speculation.block_chain": 5.5,
    "engine.speculation.block_shape": 5.6,
    "engine.speculation.suffix_tree": 5.2,
    "engine.speculation.suffix_cursor": 5.25,
    "engine.speculation.suffix_match": 5.3,
    "engine.speculation.suffix_cache": 5.3,
    "engine.speculation.uno_layout": 5.3,
    "engine.speculation.mtp_head": 5.2,
    "engine.speculation.mtp_layout": 5.3,
    "engine.speculation.mtp_modules": 5.4,
    "engine.speculation.mtp_weights": 5.4,
    "engine.speculation.frozen_kv_head": 5.2,
    "engine.speculation.frozen_kv_layout": 5.3,
    "engine.speculation.frozen_kv_weights": 5.4,
    "engine.speculation.": 6,
    "engine.speculation.frozen_kv_recipe": 6.05,
    "engine.speculation.block_recipe": 6.05,
    "engine.speculation.eagle_recipe": 6.05,
    "engine.speculation.mtp_recipe": 6.05,
    "engine.speculation.uno_recipe": 6.05,
    "engine.speculation.registry": 6.1,
    # mechanism
    "engine.executor": 7,
    "engine.model_executor": 8,
    "engine.start_up_profile": 8.05,
    "engine.construction": 8.1,
    "engine.simulate": 8,
    # policy
    "engine.ledger": 9,
    "engine.scheduler": 9,
    "engine.wire": 9,
    "engine.core": 10,
    "engine.alive_file": 10.1,
    "engine.assembly": 11,
    "engine.__main__": 12,
}
FRONTEND_LAYERS = {
    # values and words
    "frontend.errors": 0,
    "frontend.config": 0,
    "frontend.bodies": 0.1,
    "frontend.inflate": 0.1,
    "frontend.openai": 1,
    "frontend.deadlines": 1,
    "frontend.families": 1,
    "frontend.exposition": 1,
    # tracing: data, decisions, spelling, sending
    "frontend.spans": 1.6,
    "frontend.trace_context": 1.6,
    "frontend.stream_trace": 1.65,
    "frontend.request_trace": 1.7,
    "frontend.span_encoding": 1.7,
    "frontend.otlp_transport": 1.71,
    "frontend.otlp_delivery": 1.72,
    "frontend.span_export": 1.75,
    "frontend.otlp_environment": 1.76,
    "frontend.telemetry_resources": 1.77,
    "frontend.log_format": 1.75,
    # who may ask for what, and how much
    "frontend.key_files": 1.7,
    "frontend.admin": 1.75,
    "frontend.api_keys": 1.76,
    "frontend.rate_limit": 1.77,
    "frontend.gate": 1.78,
    "frontend.key_ring": 1.79,
    # the engine's side, the text side, the socket's side
    "frontend.streams": 1.8,
    "frontend.hello_check": 1.8,
    "frontend.retry": 1.9,
    "frontend.engine_addresses": 1.9,
    "frontend.joint_limits": 1.9,
    "frontend.routing": 1.9,
    "frontend.attachment": 1.9,
    "frontend.handshake": 1.9,
    "frontend.engine_client": 2,
    "frontend.deltas": 2,
    "frontend.connections": 1.9,
    "frontend.sse": 2,
    "frontend.gguf_tokenizer": 1.5,
    "frontend.tokenizer": 1.6,
    "frontend.detokenizer": 1.7,
    "frontend.stop_strings": 1.8,
    "frontend.chat_template": 1.8,
    "frontend.text": 2,
    # counting and refusing
    "frontend.observations": 2.5,
    "frontend.engine_families": 2.9,
    "frontend.engine_sums": 2.9,
    "frontend.otlp_metrics_settings": 2.9,
    "frontend.metrics": 3,
    "frontend.admission": 3.1,
    "frontend.engine_pool": 3.1,
    "frontend.tracing": 3.2,
    "frontend.otlp_metrics": 3.2,
    "frontend.spec_stats": 3.4,
    "frontend.prediction": 3.4,
    # a request
    "frontend.chat": 3.5,
    "frontend.sampling_fields": 3.5,
    "frontend.packed_logprobs": 3.4,
    "frontend.choices": 3.5,
    "frontend.prompt_run": 3.55,
    "frontend.generation": 3.6,
    "frontend.logprobs": 3.6,
    "frontend.answers": 3.7,
    "frontend.prompts": 3.7,
    "frontend.tracer": 3.75,
    "frontend.server": 3.8,
    "frontend.telemetry": 3.85,
    "frontend.span_attributes": 3.9,
    "frontend.completions": 4,
    "frontend.health": 4,
    "frontend.token_routes": 4.1,
    "frontend.openapi": 4.2,
    "frontend.profiling": 4.1,
    "frontend.app": 5,
    "frontend.__main__": 6,
}

# (importing modules, forbidden imports, why). A trailing dot in the first column means "and everything below".
BANS: list[tuple[str, tuple[str, ...], str]] = [
    (
        "protocol.",
        ("torch", "zmq", "aiohttp", "prometheus_client", "opentelemetry", "engine", "frontend", "deploy"),
        "any process must be able to speak the protocol",
    ),
    ("engine.", ("frontend", "deploy"), "engine and frontend meet in protocol only"),
    ("frontend.", ("engine", "deploy", "torch"), "a frontend has no GPU and no model, and starts in a moment"),
    (
        "engine.",
        ("aiohttp", "prometheus_client", "opentelemetry"),
        "the engine publishes counters, it serves no telemetry",
    ),
    (
        "engine.speculation.",
        (
            "engine.ledger",
            "engine.core",
            "engine.scheduler",
            "engine.wire",
            "engine.clock",
            "protocol.messages",
            "protocol.counters",
        ),
        "a drafter cannot count, time or publish",
    ),
    (
        "engine.model.",
        ("engine.speculation", "engine.scheduler", "engine.ledger", "engine.core", "engine.wire", "protocol.messages"),
        "model code knows nothing of scheduling, speculation or telemetry",
    ),
]
# (module that may, import only it may have, why)
ONLY: list[tuple[tuple[str, ...], str, str]] = [
    (
        ("engine.wire", "engine.door", "frontend.engine_client", "frontend.handshake", "deploy.keys"),
        "zmq",
        "sockets live in one place on each side; next to it who may connect, and the command that makes the keys",
    ),
    (("frontend.metrics",), "prometheus_client", "one place turns counters into families"),
    (
        ("frontend.otlp_transport", "frontend.otlp_metrics", "deploy.report_receiver"),
        "opentelemetry",
        "one place sends spans, one sends metrics, and the report receives; spans are made without the SDK (decision 5)",
    ),
]
# Modules a simulated engine and every frontend load: none may reach torch, directly or through others.
TORCH_FREE_ROOTS = (
    "engine.simulate",
    "engine.core",
    "engine.scheduler",
    "engine.ledger",
    "engine.wire",
    "frontend.app",
)


class Source:
    """One parsed module of the product."""

    def __init__(self, module: str, text: str) -> None:
        self.module = module
        self.text = text
        self.tree = ast.parse(text)

    def imports(self) -> Iterator[str]:
        """Fully qualified names of imported modules (`from a.b import c` gives `a.b.c`), at any depth of the file."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def top_level_imports(self) -> Iterator[str]:
        """Imports executed when the module is loaded (not those inside functions or TYPE_CHECKING)."""
        yield from Source.__imports_of(self.tree.body)

    @staticmethod
    def __imports_of(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def product_sources() -> list[Source]:
    """Every module of the four packages."""
    sources = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT).with_suffix("")
            parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
            sources.append(Source(".".join(parts), path.read_text()))
    return sources


def _under(name: str, prefix: str) -> bool:
    bare = prefix.rstrip(".")
    return name == bare or name.startswith(bare + ".")


def _layer_of(name: str, layers: dict[str, float]) -> tuple[str, float] | None:
    """The longest table entry that covers `name`; `a.b.symbol` is covered by `a.b`."""
    best = None
    for entry, layer in layers.items():
        if _under(name, entry) and (best is None or len(entry) > len(best[0])):
            best = (entry, layer)
    return best


def layer_violations(source: Source, layers: dict[str, float], package: str) -> list[str]:
    own = _layer_of(source.module, layers)
    if own is None:
        return [f"{source.module} has no layer: add it to the table in tests/architecture/rules.py"]
    found = []
    for name in source.imports():
        if not _under(name, package):
            continue
        other = _layer_of(name, layers)
        if other is None:
            found.append(f"{source.module} imports {name}, which has no layer")
        elif other[1] >= own[1] and other[0] != own[0]:
            found.append(f"{source.module} (layer {own[1]:g}) imports {name} (layer {other[1]:g}): only lower layers")
    return found


def ban_violations(source: Source) -> list[str]:
    return [
        f"{source.module} imports {name}: {reason}"
        for who, forbidden, reason in BANS
        if _under(source.module, who)
        for name in source.imports()
        if any(_under(name, target) for target in forbidden)
    ]


def only_violations(source: Source) -> list[str]:
    return [
        f"{source.module} imports {name}; only {' and '.join(allowed)} may: {reason}"
        for allowed, target, reason in ONLY
        if source.module not in allowed
        for name in source.imports()
        if _under(name, target)
    ]


def constructions(source: Source, struct: str) -> int:
    """How many times `struct(` is called in the module."""
    return sum(
        isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == struct)
            or (isinstance(node.func, ast.Attribute) and node.func.attr == struct)
        )
        for node in ast.walk(source.tree)
    )


def stdlib_name_violations(source: Source) -> list[str]:
    """A file that `python engine/x.py` would let shadow the standard library."""
    own = source.module.rsplit(".", 1)[-1]
    clash = own in sys.stdlib_module_names and own != "__main__"
    return [f"{source.module} is named like the standard library's {own}"] if clash else []


def forbidden_call_violations(source: Source) -> list[str]:
    """No pickle, no eval, no exec, no recv_pyobj: bytes from outside never become code."""
    found = [
        f"{source.module} imports {name}"
        for name in source.imports()
        if name.split(".")[0] in {"pickle", "marshal", "shelve", "dill"}
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in {"exec", "recv_pyobj", "send_pyobj"} or (name == "eval" and isinstance(node.func, ast.Name)):
                found.append(f"{source.module}:{node.lineno} calls {name}")
    return found


def function_lengths(source: Source) -> list[tuple[int, str]]:
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{source.module}.{node.name}")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def size_violations(source: Source) -> list[str]:
    lines = source.text.count("\n")
    found = [f"{source.module} has {lines} lines; the ceiling is {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    return found + [
        f"{name} has {length} lines; the ceiling is {MAX_FUNCTION_LINES}"
        for length, name in function_lengths(source)
        if length > MAX_FUNCTION_LINES
    ]


def torch_reachers(sources: list[Source], root: str) -> list[str]:
    """The chain of load-time imports by which `root` reaches torch; empty when it does not."""
    known = {source.module: source for source in sources}
    stack: list[tuple[str, list[str]]] = [(root, [root])]
    seen: set[str] = set()
    while stack:
        module, chain = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in known[module].top_level_imports():
            if _under(name, "torch"):
                return [*chain, name]
            if name in known:
                stack.append((name, [*chain, name]))
    return []
