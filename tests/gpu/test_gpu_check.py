"""The device check checks: in miniature on the CPU, and each of its claims seen to fail."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from engine.speculation.recipe import SpeculationSettings
from tests.gpu import check as gpu
from tests.inprocess import Answer, Drafter, Logits, Shape
from tests.lossless import Plain, Scenario, assert_equal, request, traffic
from tests.lossless import check as check_lossless
from tests.near_ties import BF16, FP32, NearTies
from tests.tiny import EOS_TOKEN_IDS, write_tiny_model

NGRAM = Drafter("ngram", "ngram", SpeculationSettings())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("gpu"), "llama", seed=gpu.MODEL_SEED)


# ---- the checks hold on the CPU ----


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_scenario_holds_for_every_drafter(directory: Path, dtype: str) -> None:
    verified = gpu.check_scenario(
        directory, "mixed", "cpu", dtype, Plain(directory, "cpu", dtype), Logits(directory, "cpu", dtype)
    )
    assert verified.num_compared >= 16 * 4
    assert verified.num_parted <= (0 if dtype == "fp32" else verified.num_compared // 4)


def test_logits_of_a_device_equal_themselves(directory: Path) -> None:
    assert gpu.logits_difference(directory, "cpu", 320) == 0.0


def test_speeds_are_measured_for_every_row_count_and_drafter(directory: Path) -> None:
    speeds = list(gpu.bench(directory, "cpu", "fp32", 320, 12))
    assert [speed.rows for speed in speeds] == [rows for rows in gpu.BENCH_ROWS for _ in range(3)]
    for plain, ngram, oracle in zip(speeds[::3], speeds[1::3], speeds[2::3], strict=True):
        assert (plain.drafter, ngram.drafter, oracle.drafter) == ("none", "ngram", "always right")
        assert plain.accepted == 0.0
        assert oracle.accepted == 1.0
        assert plain.tokens_per_step <= 1.0 < oracle.tokens_per_step
        assert min(plain.tokens_per_s, ngram.tokens_per_s, oracle.tokens_per_s) > 0.0
    gpu.print_speeds("a title", iter(speeds))


def test_every_step_is_looked_at_for_copies(directory: Path) -> None:
    scenario = Scenario(Shape(), (traffic(1, count=4),))
    assert gpu.check_copies(directory, scenario, NGRAM, "meta") > 10


def test_the_whole_report_runs_and_ends_in_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "LARGER", {"vocab_size": 320})
    monkeypatch.setattr(gpu, "BENCH_ROWS", (1, 2))
    monkeypatch.setattr(gpu, "BENCH_TOKENS", 8)
    monkeypatch.setattr(gpu, "SCENARIOS", {"mixed": small, "cramped": small, "cached": small, "preempted": small})
    monkeypatch.setattr(gpu, "registered_drafters", lambda: (NGRAM,))  # all of them: the scenarios above
    assert gpu.run("cpu", "a processor") == 0
    printed = capsys.readouterr().out
    # 2 of logits, 3 of copies, 4 + 2 scenarios in float32 and 3 + 2 in bfloat16
    assert printed.count("ok  ") == 16
    assert "a processor, torch" in printed
    assert printed.endswith("all checks held\n")
    monkeypatch.setattr(gpu, "LOGITS_TOLERANCE", -1.0)
    assert gpu.run("cpu", "a processor") == 1
    assert capsys.readouterr().out.endswith("2 checks failed\n")


def small(plain: Plain) -> Scenario:
    """Two requests that repeat themselves: enough for every drafter to draft."""
    greedy = {"temperature": 0.0, "allowed_token_ids": (5,), "ignore_eos": True, "max_tokens": 12}
    picky = {"temperature": 0.4, "allowed_token_ids": (5, 6), "ignore_eos": True, "max_tokens": 12}
    return Scenario(Shape(), ((request(1, [5] * 8, greedy), request(2, [5, 6] * 5, picky)),))


def test_without_a_device_one_sentence_says_that_nothing_was_tested() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    answer = subprocess.run([sys.executable, gpu.__file__], capture_output=True, text=True, timeout=100, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == "This machine has no CUDA device that torch can use, so nothing was tested.\n"


# ---- every claim was seen to fail ----


def test_a_failing_check_is_reported_and_the_others_still_run(capsys: pytest.CaptureFixture[str]) -> None:
    report = gpu.Report()

    def wrong() -> str:
        raise AssertionError("seven is not eight")

    report.run("first", wrong)
    report.run("second", lambda: "fine")
    printed = capsys.readouterr().out
    assert report.num_failed == 1
    assert "FAIL  first" in printed
    assert "seven is not eight" in printed
    assert "ok    second: fine" in printed


@pytest.mark.parametrize("is_inference", [False, True])
def test_reads_of_a_device_are_counted_and_nothing_else_is(is_inference: bool) -> None:
    """A meta tensor stands for one on a device: it is on no host, and asking for its content raises."""
    there = torch.zeros(4, device="meta")
    with gpu.DeviceReads("meta") as reads, torch.inference_mode(is_inference):
        (there + 1).to(torch.float64)[there.to(torch.int64)]
        torch.zeros(4).to("meta")
        torch.zeros(4).to(there)
        there.clone()[0] = 1.0
        int(torch.ones(4).sum())
    assert reads.names == []
    requests = (
        lambda: there.cpu(),
        lambda: there.to("cpu", torch.float64),
        lambda: there.to(torch.zeros(1)),
        lambda: there.sum().item(),
        lambda: bool(there.any()),
        lambda: int(there[0]),
        lambda: there.tolist(),
        lambda: there.nonzero(),
        lambda: there[there > 0],
        lambda: torch.zeros(4).copy_(there),
    )
    for number, ask in enumerate(requests):
        refused = contextlib.suppress(NotImplementedError, RuntimeError)
        with gpu.DeviceReads("meta") as reads, torch.inference_mode(is_inference), refused:
            ask()
        assert len(reads.names) == 1, f"{number}: {reads.names}"


def test_a_step_that_reads_more_than_it_may_is_an_error(directory: Path) -> None:
    """On a CPU nothing is to be read back; taking the host itself for the device, every look at a value is one."""
    scenario = Scenario(Shape(), (traffic(1, count=4),))
    with pytest.raises(AssertionError, match=r"reads the device \d+ times: .*aten.is_nonzero"):
        gpu.check_copies(directory, scenario, NGRAM, "cpu")


def test_answers_part_at_near_ties_only(directory: Path) -> None:
    plain, logits = Plain(directory), Logits(directory, "cpu", "fp32")
    for single in (request(1, [7, 8, 9], {"temperature": 0.0}), request(2, [7, 8, 9], {"temperature": 0.8})):
        wanted = plain.answer(single)
        compare = NearTies(logits, EOS_TOKEN_IDS, FP32)
        compare(single, wanted, wanted)
        assert compare.num_parted == 0
        assert all(compare.miss(single, wanted.token_ids[:at], one) == 0.0 for at, one in enumerate(wanted.token_ids))
        other = (wanted.token_ids[3] + 1) % 320
        got = Answer((*wanted.token_ids[:3], other, *wanted.token_ids[4:]), wanted.finish, (), ())
        with pytest.raises(AssertionError, match="parts at token 3"):
            compare(single, wanted, got)
        with pytest.raises(AssertionError, match="the same so far"):
            compare(single, wanted, Answer(wanted.token_ids[:3], wanted.finish, (), ()))


def test_a_true_near_tie_is_forgiven(directory: Path) -> None:
    """A bias lifts the second best token to 0.0001 below the best: one rounding more, and it would have been taken."""
    logits = Logits(directory, "cpu", "fp32")
    single = request(1, [7, 8, 9], {"temperature": 0.0, "max_tokens": 1})
    row = logits([7, 8, 9])[-1]
    first, second = row.topk(2).indices.tolist()
    gap = float(row[first] - row[second])
    biased = msgspec.structs.replace(
        single, sampling=msgspec.structs.replace(single.sampling, logit_bias={second: gap - 1e-4})
    )
    wanted = Plain(directory).answer(biased)
    assert wanted.token_ids == (first,)
    compare = NearTies(logits, EOS_TOKEN_IDS, FP32)
    compare(biased, wanted, Answer((second,), wanted.finish, (), ()))
    assert compare.num_parted == 1
    with pytest.raises(AssertionError, match="parts at token 0"):
        NearTies(logits, EOS_TOKEN_IDS, BF16)(biased, wanted, Answer((int(row.argmin()),), wanted.finish, (), ()))


def test_an_engine_that_answers_something_else_is_found(directory: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path, "llama", seed=gpu.MODEL_SEED + 1)
    scenario = Scenario(Shape(), (traffic(1, count=3),))
    with pytest.raises(AssertionError, match="differs from token"):
        check_lossless(other, scenario, NGRAM, Plain(directory), assert_equal)
