"""vLLM's own engine on a CPU, watched: what its drafter drafted in every round, behind which text, from which logits.

Owns the process that vLLM runs in, because it binds threads and forbids others to set their number; judges nothing.
`vllm_rounds` is the entry. Targets and drafters need heads of `HEAD_DIM`: vLLM's attention on a CPU knows none of 16.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import write_tiny_model

HEAD_DIM = 32
BLOCK_SIZE = 32  # the smallest its kernels take
NUM_TOKENS = 24
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Round:
    """One call of the drafter."""

    history: list[int]  # prompt and everything sampled since: its last token is the root
    drafted: list[int]  # W tokens
    logits: torch.Tensor  # float32 [W, V], from which each was chosen


def vllm_rounds(target: Path, drafter: Path, method: str, width: int, prompts: Sequence[list[int]]) -> list[Round]:
    """Rounds of greedy texts behind `prompts`, drafted for by `drafter` as a `method` of vLLM's speculative_config.

    Raises AssertionError with vLLM's last words.
    """
    stem = drafter.with_name(f"{drafter.name}-vllm")
    job = {"target": str(target), "drafter": str(drafter), "method": method, "width": width, "prompts": list(prompts)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracles.vllm_rounds", str(stem), json.dumps(job)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    texts = json.loads(stem.with_suffix(".json").read_text())
    logits = load_file(stem.with_suffix(".safetensors"))["logits"]
    return [Round(one["history"], one["drafted"], rows) for one, rows in zip(texts, logits, strict=True)]


def with_beginnings(rounds: Sequence[Round]) -> Iterator[tuple[Round, bool]]:
    """Each round, and whether it is the first of its text."""
    before: list[int] = []
    for one in rounds:
        yield one, not before or one.history[: len(before)] != before
        before = one.history


def num_accepted(rounds: Sequence[Round]) -> int:
    """Draft tokens that vLLM's target kept, of rounds that were not the last of their text."""
    pairs = zip([None, *rounds], with_beginnings(rounds), strict=False)
    return sum(len(one.history) - len(last.history) - 1 for last, (one, is_new) in pairs if last and not is_new)


def write_target(directory: Path, strength: float, num_layers: int = 2) -> Path:
    """A tiny model whose layers' outputs are scaled by `strength`, so that a fitted drafter is right in some rounds."""
    write_tiny_model(directory, seed=5, num_layers=num_layers, head_dim=HEAD_DIM)
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= strength
    save_file(weights, str(path), metadata={"format": "pt"})
    return directory


# ---- in vLLM's process ----


class Watch:
    """Notes what passes between vLLM's model runner and its drafter, for one request at a time."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.history: list[int] = []
        self._logits: list[torch.Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        inner = GPUModelRunner.propose_draft_token_ids

        def propose(runner: Any, scheduler_output: Any, sampled: Any, *rest: Any, **named: Any) -> Any:
            # [1, W + 1] with -1 for what was rejected, or a list of what was not
            new = sampled.flatten().tolist() if isinstance(sampled, torch.Tensor) else sampled[0]
            self.history += [token for token in new if token >= 0]
            self._listen(runner.drafter.model)
            drafted = inner(runner, scheduler_output, sampled, *rest, **named)
            self.rounds.append(Round(list(self.history), drafted.flatten().tolist(), torch.cat(self._logits)))
            return drafted

        GPUModelRunner.propose_draft_token_ids = propose
        try:
            yield
        finally:
            GPUModelRunner.propose_draft_token_ids = inner

    def _listen(self, model: Any) -> None:
        self._logits = []
        if "compute_logits" in vars(model):
            return
        compute = model.compute_logits

        def compute_logits(*arguments: Any, **named: Any) -> Any:
            logits = compute(*arguments, **named)
            self._logits += [rows.float().clone() for rows in (logits if isinstance(logits, list) else [logits])]
            return logits

        model.compute_logits = compute_logits


def run(stem: Path, job: Mapping[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=1,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=16,
        enable_prefix_caching=False,
        async_scheduling=False,
        speculative_config={"method": job["method"], "model": job["drafter"], "num_speculative_tokens": job["width"]},
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    watch = Watch()
    with watch.watching():
        for prompt in job["prompts"]:
            watch.history = list(prompt)
            llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    texts = [{"history": one.history, "drafted": one.drafted} for one in watch.rounds]
    stem.with_suffix(".json").write_text(json.dumps(texts))
    save_file({"logits": torch.stack([one.logits for one in watch.rounds])}, str(stem.with_suffix(".safetensors")))


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))
