"""The architecture holds, and every rule is able to fail (each has a sample that breaks it)."""

import pytest

from tests.architecture import rules
from tests.architecture.rules import Source

SOURCES = rules.product_sources()


def _report(violations: list[str]) -> None:
    assert not violations, "\n" + "\n".join(violations)


def test_engine_modules_import_only_lower_layers():
    engine = [source for source in SOURCES if source.module.startswith("engine.") and source.text]
    _report([v for s in engine for v in rules.layer_violations(s, rules.ENGINE_LAYERS, "engine")])


def test_frontend_modules_import_only_lower_layers():
    frontend = [source for source in SOURCES if source.module.startswith("frontend.") and source.text]
    _report([v for s in frontend for v in rules.layer_violations(s, rules.FRONTEND_LAYERS, "frontend")])


def test_no_module_imports_what_its_package_must_not_know():
    _report([v for s in SOURCES for v in rules.ban_violations(s)])


def test_sockets_and_metrics_live_in_one_place_each():
    _report([v for s in SOURCES for v in rules.only_violations(s)])


def test_step_output_is_constructed_once_and_in_the_ledger():
    places = {s.module: n for s in SOURCES if (n := rules.constructions(s, "StepOutput"))}
    assert places == {"engine.ledger": 1}


def test_no_module_shadows_the_standard_library():
    _report([v for s in SOURCES for v in rules.stdlib_name_violations(s)])


def test_bytes_from_outside_never_become_code():
    _report([v for s in SOURCES for v in rules.forbidden_call_violations(s)])


def test_files_and_functions_stay_readable():
    _report([v for s in SOURCES for v in rules.size_violations(s)])
    lengths = sorted(length for s in SOURCES for length, _ in rules.function_lengths(s))
    assert lengths[int(len(lengths) * 0.9)] <= rules.MAX_P90_FUNCTION_LINES


@pytest.mark.parametrize("root", rules.TORCH_FREE_ROOTS)
def test_frontends_and_simulated_engines_never_load_torch(root: str):
    assert rules.torch_reachers(SOURCES, root) == []


# ---- every rule was seen to fail ----


def test_a_higher_import_is_found():
    source = Source("engine.plan", "from engine.core import EngineCore\n")
    assert rules.layer_violations(source, rules.ENGINE_LAYERS, "engine")


def test_an_equal_layer_import_is_found():
    source = Source("engine.ledger", "from engine.scheduler import Scheduler\n")
    assert rules.layer_violations(source, rules.ENGINE_LAYERS, "engine")


def test_a_module_without_a_layer_is_found():
    assert rules.layer_violations(Source("engine.novel", ""), rules.ENGINE_LAYERS, "engine")


def test_a_lazy_import_does_not_escape_the_bans():
    source = Source("engine.speculation.ngram", "def f():\n    from engine.ledger import Ledger\n")
    assert rules.ban_violations(source)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("protocol.messages", "import torch"),
        ("engine.core", "import aiohttp"),
        ("engine.core", "from frontend.app import run"),
        ("frontend.app", "import torch.nn"),
        ("frontend.app", "from engine.plan import Span"),
        ("engine.speculation.ngram", "from protocol.counters import Counters"),
        ("engine.model.decoder", "from protocol.messages import Round"),
    ],
)
def test_a_banned_import_is_found(module: str, line: str):
    assert rules.ban_violations(Source(module, line + "\n"))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("engine.core", "import zmq"),
        ("frontend.app", "import zmq.asyncio"),
        ("frontend.app", "from prometheus_client import Counter"),
        ("frontend.app", "from opentelemetry import trace"),
    ],
)
def test_an_import_outside_its_one_place_is_found(module: str, line: str):
    assert rules.only_violations(Source(module, line + "\n"))


def test_a_second_construction_is_found():
    assert (
        rules.constructions(Source("engine.core", "x = StepOutput()\ny = messages.StepOutput(1)\n"), "StepOutput") == 2
    )


def test_a_shadowing_name_is_found():
    assert rules.stdlib_name_violations(Source("engine.queue", ""))


@pytest.mark.parametrize("line", ["import pickle", "eval('1')", "exec('1')", "socket.recv_pyobj()"])
def test_code_from_bytes_is_found(line: str):
    assert rules.forbidden_call_violations(Source("engine.wire", line + "\n"))


def test_a_long_file_and_a_long_function_are_found():
    body = "def f():\n" + "    x = 1\n" * 500
    assert len(rules.size_violations(Source("engine.core", body))) == 2


def test_torch_behind_another_module_is_found():
    sources = [Source("a", "import b\n"), Source("b", "def f():\n    pass\nfrom torch import nn\n")]
    assert rules.torch_reachers(sources, "a") == ["a", "b", "torch"]
