"""Which engines a frontend may be told to reach, and what it refuses."""

import pytest

from frontend.config import FrontendConfig
from protocol.options import OptionsError, parse

CURVE = ("--curve-key-file", "k", "--curve-server-key-file", "s")


def config(*arguments: str) -> FrontendConfig:
    return parse(FrontendConfig, arguments, {}, program="frontend")


OUTSIDE = [
    "tcp://10.1.2.3:5570",
    "tcp://[2001:db8::1]:5570",
    "tcp://0.0.0.0:5570",
    "tcp://engine:5570",  # whatever it means today
    "tcp://127.0.0.1.example.com:5570",
    "ipc:///run/x,tcp://127.0.0.1:1,tcp://10.1.2.3:5570",
]


@pytest.mark.parametrize("addresses", OUTSIDE)
def test_an_engine_that_may_be_on_another_machine_needs_keys_or_a_permission(addresses: str):
    with pytest.raises(OptionsError) as caught:
        config("--engine", addresses)
    outside = addresses.rpartition(",")[2]
    assert str(caught.value).startswith(f"--engine {outside} may lead to another machine")
    for way_out in ("--curve-key-file", "--curve-server-key-file", "ipc://", "--allow-plaintext-tcp true"):
        assert way_out in str(caught.value)
    assert config("--engine", addresses, "--allow-plaintext-tcp").allow_plaintext_tcp
    if "ipc://" not in addresses:
        assert not config("--engine", addresses, *CURVE).allow_plaintext_tcp


def test_a_socket_path_that_cannot_be_connected_is_refused():
    with pytest.raises(OptionsError, match="is longer than 100 bytes"):
        config("--engine", f"ipc:///run/{'x' * 120}")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///run/x"])
def test_engines_of_this_machine_need_neither(address: str):
    assert config("--engine", f"ipc:///run/y,{address}").engine.endswith(address)


def test_keys_and_the_permission_to_do_without_contradict_each_other():
    with pytest.raises(OptionsError, match="contradict"):
        config("--engine", "tcp://10.1.2.3:5570", "--allow-plaintext-tcp", *CURVE)


def test_the_grace_is_part_of_the_drain():
    assert config("--drain-grace-s", "8").drain_timeout_s == 8
    with pytest.raises(OptionsError, match=r"--drain-grace-s 8\.5 is longer than --drain-timeout-s 8"):
        config("--drain-grace-s", "8.5")


def test_a_log_level_that_does_not_exist_is_refused_by_its_flag():
    with pytest.raises(OptionsError, match=r"^--log-level: expected one of debug, info, warning, error, got 'loud'$"):
        config("--log-level", "loud")
