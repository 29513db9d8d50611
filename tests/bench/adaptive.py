"""What `--adaptive-draft true` is worth: tokens per second against no drafts and every fixed length, by load. Never a test.

Engines run side by side in this process, without HTTP, and take turns prompt set by prompt set, because machines drift.
Run as `python -m tests.bench.adaptive [DRAFTER ...]` with nothing else on the machine.
"""

import argparse
import shlex
import statistics

from rich.console import Console
from rich.table import Table

from engine.speculation.names import NONE
from frontend.text import load_text
from protocol.model_files import ModelFilesError, resolve
from protocol.options import OptionsError
from protocol.sampling import SamplingParams
from tests.bench.__main__ import describe_machine
from tests.bench.drafters import NARROWEST, WORKLOADS, engine_options, prompts_of
from tests.bench.rounds import SEED, MeasuredEngine

FIXED = (1, 2, 3, 5, 8)
Speeds = dict[tuple[str, int, str], list[float]]  # tokens per second by (workload, streams, setting)


def main() -> None:
    options = read_options()
    console = Console()
    console = console if console.width >= NARROWEST else Console(width=NARROWEST)
    console.print(describe_machine(), highlight=False)
    for drafter in options.drafters:
        engines, skipped = engines_of(drafter, options.engine_options, options.lengths)
        console.print(table(drafter, measured(engines, options), list(engines), options))
        for setting, reason in skipped.items():
            console.print(f"skipped {setting}: {reason}", highlight=False, markup=False, soft_wrap=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.adaptive", description=__doc__)
    parser.add_argument("drafters", nargs="*", default=["ngram"], help="a --speculator with its options in one word")
    parser.add_argument("--engine-options", default="", help="options of every engine, such as '--model DIR'")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(FIXED), help="fixed lengths (default 1 2 3 5 8)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="requests at a time (1 4 16)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="kinds of prompts")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens per request (default 128)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; medians are printed (default 3)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every request (default 0: greedy)")
    return parser.parse_args()


def engines_of(drafter: str, shared: str, lengths: list[int]) -> tuple[dict[str, MeasuredEngine], dict[str, str]]:
    """By setting, and why some do not start."""
    settings = {"off": NONE, **{f"k={length}": f"{drafter} --num-draft-tokens {length}" for length in lengths}}
    settings["adaptive"] = f"{drafter} --num-draft-tokens {max(lengths)} --adaptive-draft true"
    engines: dict[str, MeasuredEngine] = {}
    skipped: dict[str, str] = {}
    for setting, words in settings.items():
        try:
            engines[setting] = MeasuredEngine(engine_options(words, shared))
        except (OptionsError, ModelFilesError, ValueError) as error:
            skipped[setting] = str(error)
    if "off" not in engines or "adaptive" not in engines:
        raise SystemExit(f"{shlex.quote(drafter)} cannot be compared: {'; '.join(skipped.values())}")
    return engines, skipped


def measured(engines: dict[str, MeasuredEngine], options: argparse.Namespace) -> Speeds:
    text = load_text(resolve(engines["off"].model))
    sampling = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=SEED)
    speeds: Speeds = {}
    for engine in engines.values():
        engine.run(prompts_of("chat", text)[:1], SamplingParams(max_tokens=8, temperature=0.0), 1, scope="warm up")
    for repeat in range(options.repeats):
        for workload in options.workloads:
            for streams in options.streams:
                written = prompts_of(workload, text)
                prompts = (written * -(-max(streams, len(written)) // len(written)))[: max(streams, len(written))]
                for setting, engine in engines.items():
                    # A scope of its own: a drafter that learns from answers must not meet the same answer again.
                    run = engine.run(prompts, sampling, streams, scope=f"{repeat} {streams}")
                    speeds.setdefault((workload, streams, setting), []).append(run.tokens_per_s)
    return speeds


def table(drafter: str, speeds: Speeds, settings: list[str], options: argparse.Namespace) -> Table:
    title = f"{drafter}: decode tok/s of all streams, at most {options.tokens} tokens, medians of {options.repeats}"
    out = Table("workload", "streams", *settings, "adaptive / best other", title=title)
    for workload in options.workloads:
        for streams in options.streams:
            medians = {setting: statistics.median(speeds[workload, streams, setting]) for setting in settings}
            best = max(speed for setting, speed in medians.items() if setting != "adaptive")
            share = f"{medians['adaptive'] / best:.2f}" if best else ""
            out.add_row(workload, str(streams), *(f"{speed:.1f}" for speed in medians.values()), share)
        out.add_section()
    return out


if __name__ == "__main__":
    main()
