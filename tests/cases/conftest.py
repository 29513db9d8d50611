"""The set-ups of the case book, as real processes started once per session and shared.

REF: speculation off. SPEC: n-gram, K = 5, lookup 1 to 4. SIM: simulated engine, K = 5. All in fp32, where texts are exact.
The ordinary run puts a small stand-in with the embedded model's vocabulary behind REF and SPEC (tests/stand_in.py); the
long form runs the embedded model everywhere, and "embedded" is that model in both.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cases.client import Client
from tests.e2e.servers import Server, serve
from tests.stand_in import write_stand_in

IS_LONG = os.environ.get("CASES_LONG") == "1"
MODEL = ("--dtype", "fp32", "--check-laws", "true")
SPEC = ("--speculator", "ngram", "--num-draft-tokens", "5", "--lookup-min", "1", "--lookup-max", "4")
SETUPS: dict[str, tuple[str, ...]] = {
    "ref": (*MODEL, "--speculator", "none"),
    "spec": (*MODEL, *SPEC),
    "embedded": (*MODEL, *SPEC),
    "embedded_ref": (*MODEL, "--speculator", "none"),
    "spec_nocache": (*MODEL, *SPEC, "--prefix-caching", "false"),
    "tiny_kv": (*MODEL, *SPEC, "--kv-cache-tokens", "640", "--max-model-len", "640"),
    "short": (*MODEL, *SPEC, "--max-model-len", "128"),
    "short_ref": (*MODEL, "--speculator", "none", "--max-model-len", "128"),
    "sim": ("--executor", "sim", "--num-draft-tokens", "5", "--check-laws", "true"),
    "sim15": ("--executor", "sim", "--num-draft-tokens", "15", "--check-laws", "true"),
    "sim_slow": ("--executor", "sim", "--num-draft-tokens", "5", "--sim-step-ms", "20", "--check-laws", "true"),
    "sim_4f": ("--executor", "sim", "--num-draft-tokens", "5", "--frontends", "4", "--check-laws", "true"),
}


OWN_MODEL = ("embedded", "embedded_ref", "sim", "sim15", "sim_slow", "sim_4f")


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stand_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def setup(stand_in: Path) -> Iterator[Callable[[str], Client]]:
    """`setup("spec")` gives a client of that set-up's server, starting it on first use."""
    with ExitStack() as stack:
        clients: dict[str, Client] = {}
        servers: list[Server] = []

        def get(name: str) -> Client:
            if name not in clients:
                model = () if name in OWN_MODEL or IS_LONG else ("--model", str(stand_in))
                servers.append(stack.enter_context(serve(*SETUPS[name], *model)))
                clients[name] = Client(servers[-1].base_url)
            return clients[name]

        yield get
        for server in servers:  # all at once; the stack then waits for each
            server.process.terminate()


@pytest.fixture
def ref(setup: Callable[[str], Client]) -> Client:
    return setup("ref")


@pytest.fixture
def spec(setup: Callable[[str], Client]) -> Client:
    return setup("spec")


@pytest.fixture
def embedded(setup: Callable[[str], Client]) -> Client:
    return setup("embedded")


@pytest.fixture
def embedded_ref(setup: Callable[[str], Client]) -> Client:
    return setup("embedded_ref")


@pytest.fixture
def sim(setup: Callable[[str], Client]) -> Client:
    return setup("sim")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long form of a case may take many minutes; the ordinary bound on a test is for the ordinary form."""
    for item in items:
        if IS_LONG and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))
