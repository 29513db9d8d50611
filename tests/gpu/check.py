"""One command for a machine with a CUDA device: is speculation lossless there, are the numbers right, how fast is it?

    .venv/bin/python tests/gpu/check.py        (or `make gpu`; under 3 minutes, random weights, no downloads)

Owns the report; the claims are those of tests.lossless. Without a CUDA device it says so and tests nothing. Exit code 0
when all held (or nothing could be tested), 1 when something did not.
"""

import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.plan import StepPlan
from engine.speculation.oracle import OracleSpeculator
from engine.speculation.recipe import SpeculationSettings
from protocol.messages import Submit
from tests.inprocess import Drafter, InProcessEngine, Logits, Shape
from tests.lossless import (
    ORACLE_WIDTH,
    SCENARIOS,
    VOCAB,
    Plain,
    Scenario,
    check,
    check_drafting,
    oracle_drafter,
    registered_drafters,
    request,
)
from tests.near_ties import BF16, FP32, NearTies
from tests.tiny import EOS_TOKEN_IDS, Family, write_tiny_model

MODEL_SEED = 5
LOGITS_TOLERANCE = 2e-3  # float32 on two devices, logits whose spread is about 3
BENCH_ROWS = (1, 4, 16)
BENCH_TOKENS = 128
LARGER = {  # about 40 million parameters
    "num_layers": 8,
    "vocab_size": 8192,
    "context_length": 1024,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TOLERANCES = {"fp32": FP32, "bf16": BF16}


# ---- losslessness ----


@dataclass(frozen=True)
class Verified:
    """How many answers were compared, and how many of them parted at a near tie."""

    num_compared: int
    num_parted: int


def check_scenario(directory: Path, name: str, device: str, dtype: str, plain: Plain, logits: Logits) -> Verified:
    """One scenario with every drafter against plain decoding on the same device. Raises AssertionError."""
    scenario = _on(SCENARIOS[name](plain), device, dtype)
    oracles = [oracle_drafter(scenario, plain, is_right) for is_right in (True, False)]
    compared = parted = 0
    for drafter in (*registered_drafters(), *oracles):
        compare = NearTies(logits, EOS_TOKEN_IDS, TOLERANCES[dtype])
        counters = check(directory, scenario, drafter, plain, compare)
        # An answer that parted is no longer what the oracles believe: the extremes are extreme only without one.
        if not compare.num_parted:
            # A drafter with weights was fitted to another arithmetic and other traffic; lookup needs neither.
            check_drafting(counters, drafter, scenario, must_accept=drafter.name == "ngram")
        compared, parted = compared + compare.num_compared, parted + compare.num_parted
    return Verified(compared, parted)


def _on(scenario: Scenario, device: str, dtype: str) -> Scenario:
    shape = Shape(**{**vars(scenario.shape), "device": device, "dtype": dtype})
    return Scenario(**{**vars(scenario), "shape": shape})


# ---- logits ----


def logits_difference(directory: Path, device: str, vocab_size: int) -> float:
    """Largest absolute difference between the device's logits and the CPU's over prompts of 1 to 200 tokens (float32)."""
    ours, theirs = Logits(directory, device, "fp32"), Logits(directory, "cpu", "fp32")
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in (1, 17, 64, 200)]
    return max(float((ours(prompt) - theirs(prompt)).abs().max()) for prompt in prompts)


# ---- copies ----


class DeviceReads(TorchDispatchMode):
    """Counts the operators that bring something from a device to the host, each of which waits for the device.

    Under `torch.inference_mode` composite operators arrive whole (`to`, `item`), otherwise as what they are made of.
    """

    _ALWAYS = (
        "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select",
        "_unique2", "unique_dim", "unique_consecutive",
    )  # fmt: skip

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self._device_type = device_type

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._reads(func.overloadpacket.__name__, args, kwargs):
            self.names.append(str(func))
        return func(*args, **kwargs)

    def _reads(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        if name == "copy_":
            return self._is_on_device(args[1]) and not self._is_on_device(args[0])
        if not args or not self._is_on_device(args[0]):
            return False
        if name in ("to", "_to_copy"):
            return any(target.type != self._device_type for target in devices_of([*args[1:], *kwargs.values()]))
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = (part for part in args[1] if isinstance(part, torch.Tensor))
            return any(part.dtype in (torch.bool, torch.uint8) for part in masks)  # how many are set must be known
        return name in self._ALWAYS

    def _is_on_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self._device_type


def devices_of(values: Sequence[Any]) -> list[torch.device]:
    """The devices that `to` is told to go to, whichever of its forms was called."""
    tensors = [value.device for value in values if isinstance(value, torch.Tensor)]
    return tensors + [value for value in values if isinstance(value, torch.device)]


def check_copies(directory: Path, scenario: Scenario, drafter: Drafter, device_type: str) -> int:
    """Play the scenario and return the steps seen; AssertionError unless each that samples reads the device once."""
    engine = InProcessEngine(directory, scenario.shape, drafter)
    allowed = 1 if scenario.shape.device != "cpu" else 0
    wrong: list[str] = []
    with DeviceReads(device_type) as reads:

        def judge(plan: StepPlan) -> None:
            expected = allowed if any(span.kind.samples for span in plan.spans) else 0
            if len(reads.names) != expected:  # not raised here, where the engine would take it for the executor's
                wrong.append(f"step {plan.step_id} reads the device {len(reads.names)} times: {reads.names}")

        engine.executor.before = lambda plan: reads.names.clear()
        engine.executor.during = judge
        for submit in scenario.submits:
            engine.submit(submit)
        engine.run_dry()
    assert not wrong, f"{len(wrong)} of {engine.num_steps} steps, the first of them: {wrong[0]}"
    assert engine.counters.steps_failed == 0
    return engine.num_steps


# ---- speed ----


@dataclass(frozen=True)
class Speed:
    rows: int
    drafter: str
    tokens_per_s: float
    tokens_per_step: float  # of one row
    accepted: float  # share of the drafted tokens; 0 without drafts


def bench_requests(rows: int, vocab_size: int, num_tokens: int) -> list[Submit]:
    """Greedy requests with prompts of 32 tokens that repeat themselves."""
    generator = torch.Generator().manual_seed(rows)
    phrases = torch.randint(3, vocab_size, (rows, 8), generator=generator).tolist()
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": num_tokens}
    return [request(number, phrase * 4, sampling) for number, phrase in enumerate(phrases)]


def measure(
    directory: Path, shape: Shape, drafter: Drafter, submits: Sequence[Submit]
) -> tuple[Speed, InProcessEngine]:
    """Tokens per second of all rows together, prompts included, once everything is warm."""
    engine = InProcessEngine(directory, shape, drafter)
    for _ in range(2):  # the first pass warms up kernels and allocator
        engine.forget()
        before, started = engine.counters, time.perf_counter()
        for submit in submits:
            engine.submit(submit)
        engine.run_dry(checks=False)
        elapsed = time.perf_counter() - started
    counted, num_steps = engine.counters.minus(before), engine.num_steps
    accepted = counted.accepted_tokens / counted.draft_tokens if counted.draft_tokens else 0.0
    per_step = counted.generation_tokens / len(submits) / num_steps
    return Speed(len(submits), drafter.label, counted.generation_tokens / elapsed, per_step, accepted), engine


def bench(directory: Path, device: str, dtype: str, vocab_size: int, num_tokens: int) -> Iterator[Speed]:
    """Speculation off, n-gram lookup, and a drafter that is always right: what drafting costs and what it can give."""
    for rows in BENCH_ROWS:
        submits = bench_requests(rows, vocab_size, num_tokens)
        num_blocks = rows * (2 + (32 + num_tokens + ORACLE_WIDTH) // 16)
        shape = Shape(rows, 512, 16, num_blocks, prefix_caching=False, device=device, dtype=dtype)
        plain, engine = measure(directory, shape, Drafter("none"), submits)
        yield plain
        yield measure(directory, shape, Drafter("ngram", "ngram", SpeculationSettings()), submits)[0]
        answers = engine.answers()
        truths = {one.prompt_token_ids: answers[one.request_id, 0].token_ids for one in submits}
        oracle = OracleSpeculator(truths, ORACLE_WIDTH, vocab_size, is_right=True)
        yield measure(directory, shape, Drafter("always right", oracle=oracle), submits)[0]


# ---- report ----


class Report:
    """Runs checks one by one, prints a line for each, and remembers whether all held."""

    def __init__(self) -> None:
        self.num_failed = 0

    def run(self, title: str, body: Callable[[], str]) -> None:
        started = time.perf_counter()
        try:
            line = f"ok    {title}: {body()}"
        except Exception:  # noqa: BLE001  # the boundary of one check: the others still run
            self.num_failed += 1
            line = f"FAIL  {title}\n{traceback.format_exc()}"
        print(f"{line} ({time.perf_counter() - started:.1f} s)", flush=True)


def report_losslessness(report: Report, root: Path, device: str, dtype: str, names: Sequence[str]) -> None:
    """`names` of scenarios on llama, and the most crowded one on the other families."""
    wanted: list[tuple[Family, Sequence[str]]] = [("llama", names), ("qwen2", ["cramped"]), ("qwen3", ["cramped"])]
    for family, chosen in wanted:
        directory = write_tiny_model(root / family, family, seed=MODEL_SEED)
        plain, logits = Plain(directory, device, dtype), Logits(directory, device, dtype)
        for name in chosen:

            def body(
                directory: Path = directory, name: str = name, plain: Plain = plain, logits: Logits = logits
            ) -> str:
                verified = check_scenario(directory, name, device, dtype, plain, logits)
                return f"{verified.num_compared} answers equal plain decoding, {verified.num_parted} up to a near tie"

            report.run(f"lossless {dtype} {family} {name}", body)


def report_logits(report: Report, directory: Path, device: str, vocab_size: int, title: str) -> None:
    def body() -> str:
        difference = logits_difference(directory, device, vocab_size)
        assert difference <= LOGITS_TOLERANCE, f"{difference:.2e}, more than {LOGITS_TOLERANCE}"
        return f"largest difference {difference:.1e}"

    report.run(f"logits against the CPU's, {title}", body)


def report_copies(report: Report, directory: Path, device: str) -> None:
    plain = Plain(directory, device)
    scenario = _on(SCENARIOS["mixed"](plain), device, "fp32")
    watched = "meta" if device == "cpu" else device  # on a CPU there is nothing to copy
    for drafter in (Drafter("none"), Drafter("ngram", "ngram"), oracle_drafter(scenario, plain, is_right=True)):

        def body(drafter: Drafter = drafter) -> str:
            with _host_waits(device) as waits:
                num_steps = check_copies(directory, scenario, drafter, watched)
            return f"one in each of {num_steps} steps that sample; {waits() / num_steps:.1f} waits per step in all"

        report.run(f"copies to the host, {drafter.label}", body)


@contextmanager
def _host_waits(device: str) -> Iterator[Callable[[], int]]:
    """Counts torch's own warnings about calls that wait for the device (it does not see all of them); 0 on a CPU."""
    if device != "cuda":
        yield lambda: 0
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA operation" in str(one.message) for one in caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def print_speeds(title: str, speeds: Iterator[Speed]) -> None:
    print(f"\n{title}\n{'rows':>4}  {'drafter':<14}{'tokens/s':>10}  {'tokens/step':>11}  {'accepted':>8}", flush=True)
    for speed in speeds:
        line = f"{speed.rows:>4}  {speed.drafter:<14}{speed.tokens_per_s:>10.0f}  {speed.tokens_per_step:>11.2f}"
        print(f"{line}  {speed.accepted:>8.0%}", flush=True)


def run(device: str, machine: str) -> int:
    """Everything, on `device`; returns the exit code."""
    report = Report()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        tiny = write_tiny_model(root / "tiny", "llama", seed=MODEL_SEED)
        larger = write_tiny_model(root / "larger", "llama", seed=MODEL_SEED, **LARGER)
        report_logits(report, tiny, device, VOCAB, "tiny")
        report_logits(report, larger, device, LARGER["vocab_size"], "larger")
        report_copies(report, tiny, device)
        report_losslessness(report, root, device, "fp32", list(SCENARIOS))
        report_losslessness(report, root, device, "bf16", ["mixed", "cached", "preempted"])
        for dtype in ("fp32", "bf16"):
            speeds = bench(larger, device, dtype, LARGER["vocab_size"], BENCH_TOKENS)
            title = f"{machine}, torch {torch.__version__}, {dtype}, 40 M random weights, {BENCH_TOKENS} tokens a row"
            print_speeds(title, speeds)
    print(f"\n{report.num_failed} checks failed" if report.num_failed else "\nall checks held")
    return 1 if report.num_failed else 0


def main() -> int:
    if not torch.cuda.is_available():
        print("This machine has no CUDA device that torch can use, so nothing was tested.")
        return 0
    started = time.perf_counter()
    code = run("cuda", torch.cuda.get_device_name())
    print(f"{time.perf_counter() - started:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
