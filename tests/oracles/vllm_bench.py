"""vLLM's side of `tests.bench.peers`: one speculative method over the same prompts, its own counters and clocks.

Owns a process of `.venv-oracles`: `python -m tests.oracles.vllm_bench JOB.json RESULT.json`; knows nothing of our engine.
Counts are vLLM's Prometheus counters, times those of its request statistics: from the first token to the last, so that
neither side's prefill is in a rate.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def main(job_path: str, result_path: str) -> None:
    # Read when vLLM is imported: no network, no plugins that patch it, no threads bound to cores others use as well.
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_PLUGINS="", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    )  # fmt: skip
    job = json.loads(Path(job_path).read_text())
    llm = engine(job)
    generate(llm, job, next(iter(job["workloads"].values()))[:1], num_tokens=8)  # what runs first is slow
    runs = [
        {"workload": workload, **measured(llm, job, prompts)}
        for _ in range(job["repeats"])
        for workload, prompts in job["workloads"].items()
    ]
    Path(result_path).write_text(json.dumps(runs))


def engine(job: Mapping[str, Any]) -> Any:
    from vllm import LLM

    return LLM(
        model=job["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=not job["compiles"],
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=job["speculative_config"],
    )


def measured(llm: Any, job: Mapping[str, Any], prompts: list[list[int]]) -> dict[str, float]:
    """Every prompt once, one at a time."""
    before = counters(llm)
    num_tokens, decode_s = generate(llm, job, prompts, job["tokens"])
    after = counters(llm)
    return {name: after[name] - before[name] for name in COUNTERS} | {"tokens": num_tokens, "decode_s": decode_s}


def generate(llm: Any, job: Mapping[str, Any], prompts: list[list[int]], num_tokens: int) -> tuple[int, float]:
    """Tokens behind the first of each answer, and the seconds they took."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=job["temperature"], seed=job["seed"], max_tokens=num_tokens, detokenize=False,
        stop_token_ids=job["eos_token_ids"], ignore_eos=True,
    )  # fmt: skip
    count, seconds = 0, 0.0
    for prompt in prompts:
        [answer] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        count += len(answer.outputs[0].token_ids) - 1
        seconds += answer.metrics.last_token_ts - answer.metrics.first_token_ts
    return count, seconds


def counters(llm: Any) -> dict[str, int]:
    """Zero where vLLM has no such counter, as without a drafter."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {name: values.get(family, 0) for name, family in COUNTERS.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
