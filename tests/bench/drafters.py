"""`make bench-drafters`: what each drafter is worth on each kind of prompt, against plain decoding. Never a test.

Engines with a user's own options run side by side in this process, without HTTP, and take turns prompt set by prompt set,
because machines drift. A drafter that cannot start is named with the engine's own sentence.
"""

import argparse
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engine.speculation.names import NONE, SPECULATORS, SYNTHETIC
from frontend.text import Text, load_text
from protocol.messages import Phase
from protocol.model_files import ModelFilesError, resolve
from protocol.options import OptionsError
from protocol.sampling import SamplingParams
from tests.bench.__main__ import PROMPTS, describe_machine
from tests.bench.rounds import SEED, MeasuredEngine, Measurement

WORKLOADS = ("extractive", "chat", "qa")
SMALL_ENGINE = {"--kv-cache-tokens": "16384", "--max-num-seqs": "16"}  # unless the options say otherwise: several fit
NARROWEST = 150  # columns
EXAMPLES = """examples:
  make bench-drafters
  make bench-drafters ARGS="ngram 'ngram --num-draft-tokens 8' 'eagle3 --draft-model DIR'"
  make bench-drafters ARGS="--engine-options='--model DIR' --temperature 0.8 suffix"
"""


@dataclass
class Results:
    """One drafter's measurements, by workload and repetition."""

    engine: MeasuredEngine
    by_workload: dict[str, list[Measurement]] = field(default_factory=lambda: {name: [] for name in WORKLOADS})

    def tokens_per_s(self, workload: str) -> float:
        return statistics.median(run.tokens_per_s for run in self.by_workload[workload])

    def count(self, workload: str, counter: str) -> int:
        """What a counter rose by in all repetitions."""
        return sum(getattr(run.after, counter) - getattr(run.before, counter) for run in self.by_workload[workload])

    def per_position(self, workload: str) -> list[int]:
        pairs = [(run.before.accepted_per_pos, run.after.accepted_per_pos) for run in self.by_workload[workload]]
        return [sum(after[i] - before[i] for before, after in pairs) for i in range(self.engine.num_draft_tokens)]

    def phase_ms(self, workload: str, phase: Phase) -> float:
        """Of the steps of all repetitions in which the phase ran; 0 where it never did."""
        spans_ns = [span for run in self.by_workload[workload] for span in run.phase_ns[phase]]
        return statistics.median(spans_ns) / 1e6 if spans_ns else 0.0


def main() -> None:
    options = read_options()
    console = Console()
    if console.width < NARROWEST:
        console = Console(width=NARROWEST)  # a pipe is 80 columns wide, where no number would be readable
    console.print(describe_machine(), highlight=False)
    settings = [NONE, *(setting for setting in options.drafters if setting != NONE)]
    results: dict[str, Results] = {}
    skipped: dict[str, str] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("loading", total=len(settings) * (1 + options.repeats * len(WORKLOADS)))
        for setting in settings:
            progress.update(task, description=f"loading {setting}")
            try:
                results[setting] = Results(MeasuredEngine(engine_options(setting, options.engine_options)))
            except (OptionsError, ModelFilesError, ValueError) as error:
                skipped[setting] = str(error)
                progress.advance(task, options.repeats * len(WORKLOADS))
            progress.advance(task)
        if NONE in results:
            measure(results, options, progress)
    if NONE not in results:
        raise SystemExit(f"plain decoding does not start: {skipped[NONE]}")
    console.print(table(results, options))
    console.print(LEGEND, highlight=False)
    for setting, reason in skipped.items():
        console.print(f"skipped {setting}: {reason}", highlight=False, markup=False, soft_wrap=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-drafters ARGS=...", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "drafters", nargs="*", default=[name for name in SPECULATORS if name != SYNTHETIC], metavar="DRAFTER",
        help="a --speculator, with further options of the engine behind it in the same word; default: every one whose "
        "drafts are judged",
    )  # fmt: skip
    parser.add_argument("--engine-options", default="", help="options of every engine, such as '--model DIR'")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens per request (default 128)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions (default 3; 1 with --suffix-share true)")
    parser.add_argument("--streams", type=int, default=1, help="requests at a time (default 1)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every request (default 0: greedy)")
    return parser.parse_args()


def engine_options(setting: str, shared: str) -> list[str]:
    """The command line of one engine."""
    options = ["--speculator", *shlex.split(setting), *shlex.split(shared)]
    given = {option.partition("=")[0] for option in options}
    small = [word for flag, value in SMALL_ENGINE.items() if flag not in given for word in (flag, value)]
    return options + small


def measure(results: dict[str, Results], options: argparse.Namespace, progress: Progress) -> None:
    """Fill `results`: every repetition gives every drafter every workload, the drafters in turn."""
    sampling = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=SEED)
    text = load_text(resolve(results[NONE].engine.model))
    prompts = {workload: prompts_of(workload, text) for workload in WORKLOADS}
    for result in results.values():
        result.engine.run(prompts["chat"][:1], SamplingParams(max_tokens=8, temperature=0.0), 1, scope="warm up")
    task = progress.task_ids[0]
    for repeat in range(options.repeats):
        for workload in WORKLOADS:
            for setting, result in results.items():
                progress.update(task, description=f"{setting}: {workload}, {repeat + 1} of {options.repeats}")
                # A scope of its own: a drafter that learns from answers must not meet the same answer again.
                run = result.engine.run(prompts[workload], sampling, options.streams, scope=f"repetition {repeat}")
                result.by_workload[workload].append(run)
                progress.advance(task)


def prompts_of(workload: str, text: Text) -> list[Sequence[int]]:
    """Token ids of the workload's prompts, in the model's chat template where it has one."""
    written = [prompt["prompt"] for prompt in PROMPTS if prompt["kind"] == workload]
    if text.chat_template is None:
        return [text.encode_prompt(prompt) for prompt in written]
    return [text.encode_chat([{"role": "user", "content": prompt}]) for prompt in written]


LEGEND = """\
rounds: those that had a draft. rate: accepted of drafted tokens (of a tree: of its nodes). length: tokens per round with a
draft. position: accepted at each position (of a tree: depth), of the rounds with a draft. ms: medians of the steps in which
the phase ran. tok/s: of steps that only decode. A drafter of predictions gets each prompt as the prediction of its answer.\
"""


def table(results: dict[str, Results], options: argparse.Namespace) -> Table:
    engine = results[NONE].engine
    kind = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}"
    title = (
        f"{engine.model} ({engine.runs_on}), {kind}, at most {options.tokens} tokens, {options.streams} at a time, "
        f"{options.repeats} repetitions"
    )
    numbers = ("rounds %", "rate %", "length", "position %", "observe ms", "draft ms", "verify ms", "tok/s", "x none")
    out = Table("workload", "drafter", title=title)
    for name in numbers:
        out.add_column(name, justify="left" if name == "position %" else "right", no_wrap=True)
    for workload in WORKLOADS:
        for setting, result in results.items():
            plain = results[NONE].tokens_per_s(workload)
            out.add_row(workload, setting, *cells(result, workload, plain))
        out.add_section()
    return out


def cells(result: Results, workload: str, plain_tokens_per_s: float) -> list[str]:
    drafts, drafted = result.count(workload, "draft_rounds"), result.count(workload, "draft_tokens")
    accepted, rounds = result.count(workload, "accepted_tokens"), drafts + result.count(workload, "plain_rounds")
    acceptance = ["", "", "", ""]
    if drafts:
        positions = " ".join(f"{100 * count / drafts:.0f}" for count in result.per_position(workload))
        acceptance = [
            f"{100 * drafts / rounds:.0f}", f"{100 * accepted / drafted:.1f}", f"{1 + accepted / drafts:.2f}", positions,
        ]  # fmt: skip
    phases = [result.phase_ms(workload, phase) for phase in (Phase.OBSERVE, Phase.DRAFT, Phase.VERIFY)]
    speed = result.tokens_per_s(workload)
    ratio = f"{speed / plain_tokens_per_s:.2f}" if plain_tokens_per_s else ""
    return [*acceptance, *(f"{ms:.2f}" if ms else "" for ms in phases), f"{speed:.1f}", ratio]


if __name__ == "__main__":
    main()
