"""What a profile names: the four phases of every step, and inside them what each registered drafter does. Nothing otherwise."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from engine.clock import HostClock
from engine.model_executor import ModelExecutor
from engine.recorder import ProfiledClock, TorchRecorder
from engine.speculation.names import PREDICTION
from engine.speculation.recipe import SpeculationSettings
from engine.speculation.registry import names
from engine.stages import STAGES, StageRanges, named_methods
from protocol.messages import Phase
from tests.fakes import submit
from tests.inprocess import Drafter, InProcessEngine, Shape
from tests.tiny import write_tiny_model

PHASES = {"observe", "draft", "verify", "accept"}
PROMPT = [5, 6, 7, 8] * 4
# What a reader of a profile looks for. A drafter without a line here must show something of its own all the same.
EXPECTED: dict[str, set[str]] = {
    "none": set(),
    "ngram": {"draft/lookup"},
    "prediction": {"draft/lookup"},
    "suffix": {"observe/suffix_tree", "draft/suffix_match"},
    "draft_model": {"observe/model_forward", "draft/model_forward", "draft/choose"},
    "eagle": {"observe/head_keys", "draft/head_forward", "draft/head_logits", "draft/tree"},
    "eagle3": {"observe/head_keys", "draft/head_forward", "draft/head_logits"},
    "mtp": {"observe/head_keys", "draft/head_forward", "draft/head_logits"},
    "medusa": {"draft/heads_read", "draft/head_logits"},
    "dflash": {"observe/block_context", "draft/block_forward", "draft/block_logits"},
    "dspark": {"observe/block_context", "draft/block_forward", "draft/markov", "draft/confidence", "draft/tree"},
    "frozen_kv_mtp": {"draft/head_forward", "draft/head_logits"},
    "synthetic": {"draft/placeholders"},
    "uno": {"draft/noise_forward", "draft/choose"},
}
SETTINGS = {
    "draft_model": SpeculationSettings(draft_sampling="sampled"),
    "eagle": SpeculationSettings(num_draft_tokens=6, tree_top_k=3, tree_depth=3),
    "dspark": SpeculationSettings(num_draft_tokens=6, tree_top_k=3),
    "synthetic": SpeculationSettings(synthetic_acceptance="0.9,0.6"),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("stages") / "target", seed=5)


class Ranges:
    """Stands for the profiler: notes what is entered, and inside what."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, ...]] = []
        self._open: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._open.append(name)
        self.entered.append(tuple(self._open))
        try:
            yield
        finally:
            assert self._open.pop() == name

    @property
    def names(self) -> set[str]:
        return {path[-1] for path in self.entered}


class Profiled:
    """An engine that is, and is not, profiled."""

    def __init__(self, target: Path, name: str) -> None:
        self._engine = InProcessEngine(target, Shape(), Drafter(name, name, SETTINGS.get(name, SpeculationSettings())))
        executor = self._engine.executor._inner
        assert isinstance(executor, ModelExecutor)
        self.executor = executor
        self._numbers = itertools.count(1)

    def answer(self) -> None:
        one = submit(next(self._numbers), PROMPT, temperature=1.0, max_tokens=9, ignore_eos=True)
        if PREDICTION in self._engine.capabilities.sources:
            one = msgspec.structs.replace(one, prediction_token_ids=tuple(PROMPT))
        before = self._engine.counters.generation_tokens
        self._engine.submit(one)
        self._engine.run_dry()
        assert self._engine.counters.generation_tokens == before + 9

    @contextmanager
    def ranges(self) -> Iterator[Ranges]:
        plain, ranges, stages = self.executor.clock, Ranges(), StageRanges()
        clock = ProfiledClock(plain, ranges)
        stages.install(clock.stage)
        self.executor.clock = clock
        try:
            yield ranges
        finally:
            self.executor.clock = plain
            stages.remove()


@pytest.mark.parametrize("name", names())
def test_every_drafter_shows_its_phases_and_what_it_does_in_them(target: Path, name: str) -> None:
    profiled = Profiled(target, name)
    with profiled.ranges() as ranges:
        profiled.answer()
    drafts = name != "none"
    assert ranges.names >= PHASES - (set() if drafts else {"draft"})
    own = {path[-1] for path in ranges.entered if path[0] in ("observe", "draft") and len(path) > 1}
    assert own >= EXPECTED.get(name, set())
    assert bool(own - {"draft/read_draft"}) == drafts, "a line of engine.stages.STAGES names what this drafter does"
    assert all(path[-1].startswith(f"{path[0]}/") for path in ranges.entered if len(path) > 1)
    assert {"verify/target_forward", "accept/bring_back"} <= ranges.names
    seen = len(ranges.entered)
    profiled.answer()
    assert len(ranges.entered) == seen, "something was entered behind the profile"


def test_every_name_of_the_table_is_a_method_that_is_untouched_but_in_a_profile() -> None:
    before = list(named_methods())
    assert len(before) == sum(map(len, STAGES.values()))  # the registry loads every drafter
    stages = StageRanges()
    stages.install(Ranges())
    during = list(named_methods())
    assert all(new[2] is not old[2] for new, old in zip(during, before, strict=True))
    with pytest.raises(RuntimeError, match="another profile"):
        StageRanges().install(Ranges())
    stages.remove()
    assert all(new[2] is old[2] for new, old in zip(named_methods(), before, strict=True))


def test_a_stage_outside_the_phases_and_one_that_raises_leave_nothing_open() -> None:
    ranges = Ranges()
    clock = ProfiledClock(HostClock(), ranges)
    clock.start()
    with clock.stage("tree"):
        pass
    assert not ranges.entered
    with pytest.raises(ValueError, match="broken"), clock.phase(Phase.DRAFT), clock.stage("tree"):
        raise ValueError("broken")
    with clock.phase(Phase.ACCEPT), clock.stage("tree"):
        pass
    assert ranges.entered[-1] == ("accept", "accept/tree")


def test_torchs_trace_has_the_stages_inside_their_phases(target: Path, tmp_path: Path) -> None:
    profiled = Profiled(target, "dspark")
    before, plain = list(named_methods()), profiled.executor.clock
    recorder = TorchRecorder(profiled.executor, on_cuda=False)
    recorder.begin()
    profiled.answer()
    recorder.end(tmp_path / "trace.json")
    assert profiled.executor.clock is plain
    assert all(new[2] is old[2] for new, old in zip(named_methods(), before, strict=True))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = [event for event in trace if event.get("cat") == "user_annotation"]
    stages = [event for event in ranges if event["name"] in EXPECTED["dspark"]]
    assert {event["name"] for event in stages} == EXPECTED["dspark"]
    for stage in stages:
        phase = stage["name"].split("/")[0]
        around = [event for event in ranges if event["name"] == phase and event["ts"] <= stage["ts"]]
        assert any(stage["ts"] + stage["dur"] <= event["ts"] + event["dur"] for event in around), stage["name"]


def test_a_profiler_that_does_not_start_leaves_the_methods_as_they_were(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Profiled(target, "none").executor
    recorder, before, plain = TorchRecorder(executor, on_cuda=False), list(named_methods()), executor.clock

    def fails(self: object) -> None:
        raise RuntimeError("no profiler today")

    monkeypatch.setattr(torch.profiler.profile, "start", fails)
    with pytest.raises(RuntimeError, match="today"):
        recorder.begin()
    assert executor.clock is plain and recorder.num_steps == 0
    assert all(new[2] is old[2] for new, old in zip(named_methods(), before, strict=True))
