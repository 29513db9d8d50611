"""One copy from the device to the host per step, shown on a machine without a device.

Everything of an executor lives on torch's meta device, which has shapes and no content: whatever looks at a value there
is counted, and raises unless it is a plain copy.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import transforms
from engine.clock import HostClock
from engine.kv.pool import KVPool, KVShape
from engine.model.grouped import GroupedAttention
from engine.model.weights import load_model
from engine.model_executor import ModelExecutor
from engine.plan import RowBegin, RowCommit, Span, SpanKind, SpanResult, StepPlan
from engine.runner import Runner
from engine.sampling import SamplingModel
from engine.speculation.draft_model import DraftModelSpeculator
from engine.speculation.oracle import OracleSpeculator
from engine.speculation.speculator import Capabilities, Speculator
from engine.speculation.vocabulary import SharedVocabulary, TokenMap
from protocol.model_files import resolve
from tests.gpu.check import DeviceReads, devices_of
from tests.lossless import ORACLE_WIDTH, VOCAB, traffic
from tests.tiny import EOS_TOKEN_IDS, write_tiny_model

META = torch.device("meta")
BLOCK_SIZE, BLOCKS_PER_ROW = 4, 16


class AnsweredReads(DeviceReads):
    """A copy to the host comes back as ones: one accepted token, one of the target's own, everything finite.

    `uploads` remembers for every copy from the host whether it waits until the device has caught up.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.uploads: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = len(self.names)
        is_move = func.overloadpacket.__name__ in ("to", "_to_copy")
        if is_move and args[0].device.type == "cpu" and META in devices_of([*args[1:], *(kwargs or {}).values()]):
            self.uploads.append(not ((kwargs or {}).get("non_blocking") or any(value is True for value in args[1:])))
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except NotImplementedError:
            if len(self.names) == before or not is_move:
                raise
            return torch.ones(args[0].shape, dtype=args[0].dtype)


class Rows:
    """Rows that begin, decode and draft together, whatever they are told."""

    def __init__(self, executor: ModelExecutor) -> None:
        self.executor = executor
        self.submits = traffic(1)
        self.step_id = 0

    def begin(self) -> tuple[SpanResult, ...]:
        begins, spans = [], []
        for row, one in enumerate(self.submits):
            prompt = one.prompt_token_ids
            begins.append(RowBegin(row, prompt, len(prompt), one.sampling, row, None))
            spans.append(Span(row, 0, prompt, SpanKind.LAST_CHUNK, 0, blocks(row)))
        return self.execute(begins=tuple(begins), spans=tuple(spans))

    def decode(self, num_before: int, budget: int) -> tuple[SpanResult, ...]:
        """`num_before` tokens of value 1 were generated, the last of them in the step before."""
        commits, spans = [], []
        for row, one in enumerate(self.submits):
            computed = len(one.prompt_token_ids) + num_before - 1
            commits.append(RowCommit(row, (1,), computed, None))
            spans.append(Span(row, computed, (1,), SpanKind.ROUND, budget, blocks(row)))
        return self.execute(commits=tuple(commits), spans=tuple(spans))

    def execute(self, **parts: Any) -> tuple[SpanResult, ...]:
        self.step_id += 1
        return self.executor.execute(
            StepPlan(**{"step_id": self.step_id, "ends": (), "begins": (), "commits": (), **parts})
        ).spans


def blocks(row: int) -> tuple[int, ...]:
    return tuple(range(row * BLOCKS_PER_ROW, (row + 1) * BLOCKS_PER_ROW))


@pytest.fixture(params=["oracle", "draft_model"])
def rows(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The code of a device: on the host, the nucleus may look at values. A drafter on the host, and one on the device."""
    monkeypatch.setattr(transforms, "_LARGEST_ON_HOST", ())
    model = load_model(resolve(str(write_tiny_model(tmp_path, "qwen3"))), torch.float32, META)
    arch = model.arch
    pool = KVPool(KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, BLOCK_SIZE, torch.float32), 300, META)
    runner = Runner(model, pool, GroupedAttention(pool, arch.num_heads))
    speculator: Speculator
    if request.param == "oracle":
        truths = {one.prompt_token_ids: [1] * 20 for one in traffic(1)}
        speculator = OracleSpeculator(truths, ORACLE_WIDTH, VOCAB, is_right=True)
    else:
        capabilities = Capabilities(max_draft_len=ORACLE_WIDTH, sources=("draft_model",), gives_probs=True)
        tokens = TokenMap(other_vocabulary(VOCAB), META)
        speculator = DraftModelSpeculator(model, KVPool(pool.shape, 300, META), tokens, capabilities)
    return Rows(ModelExecutor(runner, speculator, SamplingModel(VOCAB, EOS_TOKEN_IDS, META), HostClock()))


def other_vocabulary(size: int) -> SharedVocabulary:
    """One in which every token has another id."""
    ids, others = tuple(range(size)), tuple(reversed(range(size)))
    return SharedVocabulary(size, size, ids, others, others, is_same=False)


def test_every_step_that_samples_copies_once_with_all_parameters_and_drafts(rows: Rows) -> None:
    with AnsweredReads("meta") as reads:
        for step in (rows.begin, lambda: rows.decode(1, ORACLE_WIDTH), lambda: rows.decode(2, 0)):
            reads.names.clear()
            results = step()
            assert all(result.failure is None for result in results)
            assert len(results) == len(rows.submits)
            assert len(reads.names) == 1, reads.names
        assert sum(result.drafted for result in results) == 0


def test_no_upload_of_a_step_waits_for_the_device(rows: Rows) -> None:
    with AnsweredReads("meta") as reads:
        torch.ones(1).to(META)
        assert reads.uploads == [True]
        for step in (rows.begin, lambda: rows.decode(1, ORACLE_WIDTH), lambda: rows.decode(2, 0)):
            reads.uploads.clear()
            step()
            assert len(reads.uploads) > 5
            assert not any(reads.uploads), f"{sum(reads.uploads)} of {len(reads.uploads)} uploads wait"


def test_drafts_were_part_of_it(rows: Rows) -> None:
    with AnsweredReads("meta"):
        rows.begin()
        assert all(result.drafted == ORACLE_WIDTH for result in rows.decode(1, ORACLE_WIDTH))


def test_a_step_of_chunks_copies_nothing(rows: Rows) -> None:
    prompt = rows.submits[0].prompt_token_ids
    begin = RowBegin(0, (*prompt, 7), len(prompt) + 1, rows.submits[0].sampling, 0, None)
    with AnsweredReads("meta") as reads:
        rows.execute(begins=(begin,), spans=(Span(0, 0, prompt, SpanKind.CHUNK, 0, blocks(0)),))
    assert reads.names == []


def test_a_look_at_a_value_is_found(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = rows.executor._runner.forward

    def looking(batch: Any) -> Any:
        output = forward(batch)
        output.logits.isfinite().all().cpu()
        return output

    monkeypatch.setattr(rows.executor._runner, "forward", looking)
    with AnsweredReads("meta") as reads:
        rows.begin()
    assert len(reads.names) == 2
