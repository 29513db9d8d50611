"""What one step costs besides the model: scheduler, ledger and encoding, with the simulated executor in process.

The simulated rows accept about half of five draft tokens; their own cost (random tokens) is measured apart and not
subtracted, so the figure is an upper bound of what policy adds.
"""

import statistics
import time

from engine.simulate import SimExecutor, SimSettings
from protocol.codec import encode
from protocol.messages import StepOutput
from tests.fakes import VOCAB, Engine, FakePublisher

MAX_DRAFT_LEN = 5


class EncodingPublisher(FakePublisher):
    """Encodes what a wire would send and keeps nothing."""

    def send(self, outputs: dict[str, StepOutput], snapshot: StepOutput) -> None:
        for output in outputs.values():
            encode(output)


def measure_step_overhead(rows: int, steps: int = 300, repeats: int = 5) -> float:
    """Median microseconds per step with `rows` decoding rows and one frontend."""
    samples = []
    for _ in range(repeats):
        engine = _decoding_engine(rows, steps)
        started = time.perf_counter()
        for _ in range(steps):
            engine.core.step()
        samples.append((time.perf_counter() - started) / steps * 1e6)
    return statistics.median(samples)


def _decoding_engine(rows: int, steps: int) -> Engine:
    settings = SimSettings(MAX_DRAFT_LEN, VOCAB, tuple(range(10, VOCAB)), acceptance=0.5)
    length = 16 + (steps + 10) * (MAX_DRAFT_LEN + 1)
    engine = Engine(
        max_num_seqs=rows,
        max_num_batched_tokens=rows * 16,
        block_size=16,
        num_blocks=rows * (length // 16 + 2),
        max_model_len=length,
        max_draft_len=MAX_DRAFT_LEN,
        executor=SimExecutor(settings),
        check_laws=False,
    )
    engine.core.publisher = EncodingPublisher()
    for request_id in range(rows):
        engine.submit(request_id, prompt=[10 + request_id % 50] * 8, max_tokens=length - 8)
    for _ in range(5):
        engine.core.step()
    return engine
