"""What a drafter is worth here and in vLLM: the same weights, prompts, drafts and options, one request at a time.

    .venv/bin/python -m tests.bench.peers                       # none, ngram and suffix, which need no files
    .venv/bin/python -m tests.bench.peers ngram 'eagle3 --draft-model DIR' 'dflash --draft-model DIR'

Owns the table. Our engine runs in this process, vLLM in one of `.venv-oracles` (`make oracles` makes it) per drafter, one
after another, never together. A GGUF target is written out in float32 for vLLM, so both multiply the same numbers, and a
drafter's files are completed by what vLLM would guess wrong (tests/oracles/exported_model.py). What vLLM cannot run is named with its own last words. Never a test.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig
from engine.model.decoder import DecoderModel
from engine.model.weights import load_model
from engine.speculation.names import NONE
from frontend.text import load_text
from protocol.model_files import ModelFiles, read_eos_token_ids, resolve
from protocol.options import parse
from protocol.sampling import SamplingParams
from tests.bench.__main__ import describe_machine
from tests.bench.drafters import WORKLOADS, Results, engine_options, prompts_of
from tests.bench.rounds import SEED, MeasuredEngine
from tests.oracles.exported_model import complete, export

ROOT = Path(__file__).resolve().parents[2]
PEER_PYTHON = ROOT / ".venv-oracles" / "bin" / "python"
METHODS = ("none", "ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "dflash")  # what vLLM has on a CPU
MAX_MODEL_LEN = 2048  # tokens; prompts and answers are shorter
LEGEND = """\
length: tokens per round with a draft, 1 + accepted / drafts, each by its own counters; vLLM counts a draft's tokens behind
an end of sequence as accepted and drafts whole at the end of an answer, where we draft what can be kept. tok/s: of decoding alone, vLLM's between its first and last token of each answer.
x none: against plain decoding of the same engine. Suffix in vLLM: the first repetition only, for it knows the answers then.\
"""


def main() -> None:
    options = read_options()
    if not PEER_PYTHON.exists():
        raise SystemExit(f"{PEER_PYTHON} is missing: tests/oracles/create_environment.sh makes it")
    settings = [NONE, *(setting for setting in options.drafters if setting != NONE)]
    console = Console(width=150)
    console.print(describe_machine(), highlight=False)
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        peer = Peer(Path(scratch), options)
        rows: dict[str, tuple[Results, list[Mapping[str, Any]]]] = {}
        for setting in settings:
            console.print(f"measuring {setting}", highlight=False)
            ours = measure(setting, options)
            config = parse(EngineConfig, engine_options(setting, options.engine_options), {}, program="peers")
            try:
                theirs = peer.measure(config, ours.engine.num_draft_tokens)
            except PeerError as error:
                skipped[setting], theirs = str(error), []
            rows[setting] = (ours, theirs)
    console.print(table(rows, options))
    console.print(LEGEND, highlight=False)
    for setting, reason in skipped.items():
        console.print(f"vLLM does not run {setting}: {reason}", highlight=False, markup=False, soft_wrap=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "drafters", nargs="*", default=["ngram", "suffix"], metavar="DRAFTER",
        help=f"one of {', '.join(METHODS)}, with further options of the engine behind it in the same word",
    )  # fmt: skip
    parser.add_argument("--engine-options", default="--dtype fp32", help="options of every engine of ours")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens per request (default 128)")
    parser.add_argument("--repeats", type=int, default=1, help="repetitions (default 1)")
    parser.add_argument("--prompts", type=int, default=100, help="most prompts of each workload (default: all)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every request (default 0: greedy)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of either engine (default: all cores)")
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the model, which takes it minutes")
    return parser.parse_args()


def prompts(model: str, options: argparse.Namespace) -> dict[str, list[list[int]]]:
    text = load_text(resolve(model))
    return {name: [list(ids) for ids in prompts_of(name, text)[: options.prompts]] for name in WORKLOADS}


def measure(setting: str, options: argparse.Namespace) -> Results:
    torch.set_num_threads(options.threads)
    results = Results(MeasuredEngine(engine_options(setting, options.engine_options)))
    by_workload = prompts(results.engine.model, options)
    results.engine.run(by_workload["chat"][:1], SamplingParams(max_tokens=8, temperature=0.0), 1, scope="warm up")
    sampling = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=SEED)
    for repeat in range(options.repeats):
        for workload in WORKLOADS:
            run = results.engine.run(by_workload[workload], sampling, 1, scope=f"repetition {repeat}")
            results.by_workload[workload].append(run)
    return results


class PeerError(Exception):
    """vLLM did not measure; the text is its last words."""


class Peer:
    """vLLM over one target."""

    def __init__(self, scratch: Path, options: argparse.Namespace) -> None:
        self._scratch = scratch
        self._options = options
        self._num_drafters = 0

    def measure(self, config: EngineConfig, width: int) -> list[Mapping[str, Any]]:
        """A record per repetition and workload, as `tests.oracles.vllm_bench` writes them. Raises `PeerError`."""
        options = self._options
        job = {
            "model": str(self._target(config.model)),
            "speculative_config": self._drafter(config, speculative_config(config, width)),
            "workloads": prompts(config.model, options),
            "tokens": options.tokens,
            "temperature": options.temperature,
            "seed": SEED,
            "repeats": 1 if config.speculator == "suffix" else options.repeats,
            "eos_token_ids": list(read_eos_token_ids(resolve(config.model))),
            "max_model_len": MAX_MODEL_LEN,
            "compiles": options.compile,
        }
        job_path, result_path = self._scratch / "job.json", self._scratch / "result.json"
        job_path.write_text(json.dumps(job))
        done = subprocess.run(
            [str(PEER_PYTHON), "-m", "tests.oracles.vllm_bench", str(job_path), str(result_path)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise PeerError(last_words(done.stderr))
        records: list[Mapping[str, Any]] = json.loads(result_path.read_text())
        return records

    def _target(self, model: str) -> Path:
        files = resolve(model)
        directory = self._scratch / "target"
        if files.kind == "gguf" and not directory.exists():
            export(_loaded(files), read_eos_token_ids(files), directory)
        return directory if files.kind == "gguf" else files.path

    def _drafter(self, config: EngineConfig, wanted: dict[str, Any] | None) -> dict[str, Any] | None:
        """With a copy of the drafter's files that says what vLLM cannot know. A draft model is a model like any other."""
        if config.draft_model is None or wanted is None or config.speculator == "draft_model":
            return wanted
        self._num_drafters += 1
        directory = self._scratch / f"drafter-{self._num_drafters}"
        try:
            completed = complete(resolve(config.draft_model).path, _loaded(resolve(config.model)), directory)
        except OSError as error:
            raise PeerError(f"its files cannot be completed for vLLM: {error}") from error
        return {**wanted, "model": str(completed)}


def _loaded(files: ModelFiles) -> DecoderModel:
    return load_model(files, torch.float32, torch.device("cpu"))


def speculative_config(config: EngineConfig, width: int) -> dict[str, Any] | None:
    """vLLM's words for our options. Raises `PeerError` for a drafter it has not."""
    method = config.speculator
    common = {"method": method, "num_speculative_tokens": width}
    match method:
        case "none":
            return None
        case "ngram":
            return {**common, "prompt_lookup_min": config.lookup_min, "prompt_lookup_max": config.lookup_max}
        case "suffix":
            return {
                **common,
                "suffix_decoding_max_tree_depth": config.suffix_max_depth,
                "suffix_decoding_max_cached_requests": config.suffix_max_cached_requests,
                "suffix_decoding_max_spec_factor": config.suffix_factor,
                "suffix_decoding_min_token_prob": config.suffix_min_probability,
            }
        case _ if method in METHODS:
            return {**common, "model": config.draft_model}
    raise PeerError(f"vLLM on a CPU has no {method}; it has {', '.join(METHODS)}")


def last_words(text: str) -> str:
    """The error a process ended with: the last line that names one, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return (errors or lines or ["it ended without a word"])[-1][:400]


def table(rows: Mapping[str, tuple[Results, list[Mapping[str, Any]]]], options: argparse.Namespace) -> Table:
    engine = rows[NONE][0].engine
    kind = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}"
    title = f"{engine.model} ({engine.runs_on}), {kind}, at most {options.tokens} tokens, one at a time"
    out = Table("workload", "drafter", title=title)
    for name in ("length", "vLLM length", "tok/s", "vLLM tok/s", "x none", "vLLM x none"):
        out.add_column(name, justify="right", no_wrap=True)
    for workload in WORKLOADS:
        plain_ours, plain_theirs = rows[NONE][0].tokens_per_s(workload), their_rate(rows[NONE][1], workload)
        for setting, (ours, theirs) in rows.items():
            rate, their = ours.tokens_per_s(workload), their_rate(theirs, workload)
            out.add_row(
                workload, setting, our_length(ours, workload), their_length(theirs, workload), f"{rate:.1f}",
                f"{their:.1f}" if their else "", ratio(rate, plain_ours), ratio(their, plain_theirs),
            )  # fmt: skip
        out.add_section()
    return out


def our_length(results: Results, workload: str) -> str:
    drafts, accepted = results.count(workload, "draft_rounds"), results.count(workload, "accepted_tokens")
    return f"{1 + accepted / drafts:.2f}" if drafts else ""


def their_length(runs: Sequence[Mapping[str, Any]], workload: str) -> str:
    own = [run for run in runs if run["workload"] == workload]
    drafts = sum(run["drafts"] for run in own)
    return f"{1 + sum(run['accepted'] for run in own) / drafts:.2f}" if drafts else ""


def their_rate(runs: Sequence[Mapping[str, Any]], workload: str) -> float:
    """Tokens per second; 0 where vLLM did not run."""
    own = [run for run in runs if run["workload"] == workload]
    seconds = sum(run["decode_s"] for run in own)
    return sum(run["tokens"] for run in own) / seconds if seconds else 0.0


def ratio(rate: float, plain: float) -> str:
    return f"{rate / plain:.2f}" if rate and plain else ""


if __name__ == "__main__":
    main()
