"""What `drafthouse serve` makes of its options: the command lines of engines and frontends, read back as these read them."""

import pytest

from deploy.serve import _summary, programs, read_plan
from engine.config import EngineConfig
from frontend.config import FrontendConfig
from protocol.options import OptionsError, parse

KINDS = {"engine": EngineConfig, "frontend": FrontendConfig}


def resolved(role: str, *arguments: str) -> list:
    """The configuration of every process of a role, without anything started."""
    plan = read_plan(list(arguments), {})
    addresses = [f"ipc:///run/{number}" for number in range(plan.serve.engines)]
    commands = [program.command for program in programs(plan, addresses, 8000) if program.name.split()[0] == role]
    return [parse(KINDS[role], command[list(command).index(role) + 1 :], {}, program=role) for command in commands]


def test_one_engine_has_all_the_memory():
    [engine] = resolved("engine")
    assert (engine.memory_share, engine.kv_cache_tokens, engine.engine_id) == (1.0, None, "0")


@pytest.mark.parametrize("num_engines", [2, 3, 7])
def test_several_engines_have_equal_parts_of_the_memory(num_engines: int):
    engines = resolved("engine", "--engines", str(num_engines))
    assert [engine.engine_id for engine in engines] == [str(number) for number in range(num_engines)]
    for engine in engines:
        assert engine.memory_share == pytest.approx(1 / num_engines, abs=1e-6)
        assert engine.kv_cache_tokens is None
    assert sum(engine.memory_share for engine in engines) <= 1.000001
    summary = "\n".join(_summary(read_plan(["--engines", str(num_engines)], {})))
    assert f"sized by memory, an equal part for each of {num_engines} engines" in summary


def test_engines_whose_size_was_given_have_that_size():
    for engine in resolved("engine", "--engines", "2", "--kv-cache-tokens", "4096"):
        assert (engine.kv_cache_tokens, engine.memory_share) == (4096, 1.0)
    for engine in resolved("engine", "--engines", "2", "--memory-share", "0.25"):
        assert engine.memory_share == 0.25
    for engine in resolved("engine", "--engines", "2", "--executor", "sim"):
        assert engine.memory_share == 1.0


def test_parts_that_are_more_than_the_whole_are_refused():
    with pytest.raises(OptionsError, match=r"--memory-share 0\.6 for each of --engines 2 is more than there is"):
        read_plan(["--engines", "2", "--memory-share", "0.6"], {})


def test_the_grace_reaches_the_frontends_and_is_part_of_serves_own_drain():
    for frontend in resolved("frontend", "--frontends", "2", "--drain-grace-s", "1.5"):
        assert (frontend.drain_grace_s, frontend.drain_timeout_s) == (1.5, 5.0)
    [frontend] = resolved("frontend")
    assert frontend.drain_grace_s == 0, "Ctrl-C ends an idle server at once"
    assert resolved("frontend", "--drain-grace-s", "6", "--drain-timeout-s", "6")[0].drain_grace_s == 6
    with pytest.raises(OptionsError, match=r"--drain-grace-s 6 is longer than --drain-timeout-s 5"):
        read_plan(["--drain-grace-s", "6"], {})
