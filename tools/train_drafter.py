"""`make train-drafter`: a small drafter for a model that serves, trained on the model's own text on a CPU.

    make train-drafter ARGS="eagle3 OUT"        then: drafthouse serve --speculator eagle3 --draft-model OUT

Owns the order: the target answers the prompts of `tools.drafter_training.prompts` (once; --answers keeps the text for the
next drafter), the drafter learns from it, its files are written. Nothing is downloaded. For the embedded model the text
took 23 minutes on two busy AVX2 cores; a drafter takes the --minutes it is given.
"""

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine.model.decoder import DecoderModel
from engine.model.weights import load_model
from frontend.text import load_text
from protocol.model_files import ModelFiles, ModelFilesError, read_eos_token_ids, resolve
from tools.drafter_training.answers import Answer, AnswerWriter, WritingLimits, load_answers, save_answers
from tools.drafter_training.block_model import BlockSize, DFlashModel, DSparkModel
from tools.drafter_training.checkpoint import write_dflash, write_dspark, write_eagle3, write_medusa, write_mtp
from tools.drafter_training.medusa_model import MedusaModel
from tools.drafter_training.pair_model import Eagle3Model, MtpModel, PairModel
from tools.drafter_training.prompts import training_prompts
from tools.drafter_training.training import Batch, Prediction, Teacher, Trainer

BLOCKS = ("dflash", "dspark")
DRAFTERS = ("eagle3", "mtp", "medusa", *BLOCKS)
STEP_WEIGHT = 0.8  # of each step ahead, against the one before
# By name: who reads it, its default, what it is.
OPTIONS_OF_SOME: dict[str, tuple[tuple[str, ...], int, str]] = {
    "--layers": (BLOCKS, 1, "layers of a block drafter"),
    "--anchors": (BLOCKS, 16, "blocks that a step trains in one text, at random places of the answer"),
    "--markov-rank": (("dspark",), 128, "numbers by which the Markov head knows a token"),
}
REPORT_EVERY, CHECK_EVERY = 20, 100  # steps
HELD_OUT = 20
FIRST_STEP_ALONE = 0.5


@dataclass(frozen=True)
class Trainable:
    """A drafter as the trainer sees it, and the function that writes what became of it."""

    module: torch.nn.Module
    predict: Callable[[Batch], Iterable[Prediction]]
    write: Callable[[Path], None]
    first_step_alone: float = 0.0  # see Trainer


def main() -> None:
    options = read_options()
    torch.manual_seed(options.seed)
    try:
        files = resolve(options.model)
        target = load_model(files, torch.float32, torch.device("cpu"))
    except ModelFilesError as error:
        raise SystemExit(f"train-drafter: {error}") from error
    refuse_unsupported(target)
    num_layers = target.arch.num_layers
    middle = {max(tap, 1) for tap in (2, num_layers // 2, num_layers - 3)}  # as EAGLE-3's authors have it
    taps = (*sorted(middle), num_layers)  # the last is everybody else's
    answers = answers_of(target, files, taps, options)
    vocabulary = likely_tokens(answers, options.vocabulary, target.arch.vocab_size)
    trainable = make(options, target, taps[:-1], vocabulary)
    trainer = Trainer(
        trainable.module, trainable.predict, Teacher(target, vocabulary), options.steps, trainable.first_step_alone
    )
    train(trainer, answers, options)
    trainable.write(options.out)
    print(f"written: {options.out}. Try it: drafthouse serve --model {options.model} --speculator {options.drafter} "
          f"--draft-model {options.out}")  # fmt: skip


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make train-drafter ARGS=...", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", choices=DRAFTERS)
    parser.add_argument("out", type=Path, help="directory that config.json and weights are written to")
    parser.add_argument("--model", default="embedded", help="the target, named as for serve (default: embedded)")
    parser.add_argument(
        "--answers", type=Path, help="file that keeps the target's text: read if it exists, else written"
    )
    parser.add_argument("--answer-tokens", type=int, default=80_000, help="tokens of text (default 80000)")
    parser.add_argument("--vocabulary", type=int, default=12288, help="tokens the drafter knows (default 12288)")
    parser.add_argument("--minutes", type=float, default=22, help="most minutes of training (default 22)")
    parser.add_argument("--steps", type=int, default=2000, help="most steps of training (default 2000)")
    parser.add_argument(
        "--ahead", type=int, help="tokens ahead that are trained; heads of medusa (default 3), tokens of a block (7)"
    )
    parser.add_argument("--batch-tokens", type=int, default=1024, help="tokens in a batch (default 1024)")
    parser.add_argument("--seed", type=int, default=0)
    for name, (_, default, meaning) in OPTIONS_OF_SOME.items():
        parser.add_argument(name, type=int, help=f"{meaning} (default {default})")
    options = parser.parse_args()
    if options.ahead is None:
        options.ahead = 7 if options.drafter in BLOCKS else 3
    for name, (readers, default, _) in OPTIONS_OF_SOME.items():
        key = name.removeprefix("--").replace("-", "_")
        if getattr(options, key) is None:
            setattr(options, key, default)
        elif options.drafter not in readers:
            parser.error(f"{name} says nothing about {options.drafter}: it is for {' and '.join(readers)}")
        elif getattr(options, key) < 1:
            parser.error(f"{name} must be at least 1")
    return options


def refuse_unsupported(target: DecoderModel) -> None:
    """Targets whose last layer a drafter cannot start from as it is written here."""
    layer = target.weights.layers[-1]
    for what, value in (("biases", layer.qkv_bias), ("biases", layer.out_bias), ("biases", layer.down_bias)):
        if value is not None:
            raise SystemExit(f"train-drafter: this target has {what} in its layers, which is not supported")
    if layer.query_norm is not None:
        raise SystemExit("train-drafter: this target norms its queries (Qwen3), which is not supported")
    if target.arch.rope.scaling is not None:
        raise SystemExit("train-drafter: this target scales its rotary embedding, which is not supported")


def answers_of(
    target: DecoderModel, files: ModelFiles, taps: tuple[int, ...], options: argparse.Namespace
) -> list[Answer]:
    if options.answers is not None and options.answers.exists():
        answers = load_answers(options.answers)
        if answers[0].states.shape[1:] != (len(taps), target.arch.hidden_size):
            raise SystemExit(f"train-drafter: {options.answers} was written by another model")
        return answers
    text = load_text(files)
    written = training_prompts(options.answer_tokens // 40)  # more than will be needed
    if text.chat_template is None:
        prompts = [text.encode_prompt(prompt) for prompt in written]
    else:
        prompts = [text.encode_chat([{"role": "user", "content": prompt}]) for prompt in written]
    limits = WritingLimits(total_tokens=options.answer_tokens)
    writer = AnswerWriter(target, read_eos_token_ids(files), taps, limits, options.seed)
    with bar() as progress:
        task = progress.add_task("the target writes", total=options.answer_tokens, note="")
        answers = list(writer.write(prompts, lambda done, total: progress.update(task, completed=done)))
    if options.answers is not None:
        save_answers(options.answers, answers)
    return answers


def likely_tokens(answers: list[Answer], size: int, vocab_size: int) -> torch.Tensor:
    """int64 [D], ascending: the tokens the text has most often, then those the tokenizer learned first."""
    counted = Counter(token for answer in answers for token in answer.token_ids.tolist())
    ranked = [token for token, _ in counted.most_common(size)]
    others = (token for token in range(vocab_size) if token not in counted)
    ranked += [token for token, _ in zip(others, range(size - len(ranked)))]
    return torch.tensor(sorted(ranked))


def make(
    options: argparse.Namespace, target: DecoderModel, taps: tuple[int, ...], vocabulary: torch.Tensor
) -> Trainable:
    output = target.weights.output[vocabulary].clone()
    if options.drafter == "medusa":
        heads = MedusaModel(target, options.ahead, vocabulary)
        return Trainable(
            heads, lambda batch: medusa_predictions(heads, batch), lambda out: write_medusa(out, heads, vocabulary)
        )
    if options.drafter == "mtp":
        module = MtpModel(target)
        return Trainable(
            module,
            lambda batch: pair_predictions(module, batch, output, options.ahead),
            lambda out: write_mtp(out, module),
            FIRST_STEP_ALONE,
        )
    if options.drafter in BLOCKS:
        return make_block(options, target, taps, vocabulary, output)
    head = Eagle3Model(target, len(taps))
    return Trainable(
        head,
        lambda batch: pair_predictions(head, without_last(batch), output, options.ahead),
        lambda out: write_eagle3(out, head, taps, vocabulary),
        FIRST_STEP_ALONE,
    )


def make_block(
    options: argparse.Namespace,
    target: DecoderModel,
    taps: tuple[int, ...],
    vocabulary: torch.Tensor,
    output: torch.Tensor,
) -> Trainable:
    if options.layers > target.arch.num_layers:
        raise SystemExit(f"train-drafter: --layers must be at most the target's {target.arch.num_layers}")
    mask = mask_token(vocabulary, target.arch.vocab_size)
    size = BlockSize(options.layers, options.ahead, options.anchors, mask)
    if options.drafter == "dflash":
        flash = DFlashModel(target, len(taps), size)
        return Trainable(
            flash,
            lambda batch: flash.predictions(without_last(batch), output),
            lambda out: write_dflash(out, flash, taps, vocabulary),
        )
    spark = DSparkModel(target, len(taps), size, options.markov_rank, len(vocabulary))
    return Trainable(
        spark,
        lambda batch: spark.predictions(without_last(batch), output),
        lambda out: write_dspark(out, spark, taps, vocabulary),
    )


def mask_token(vocabulary: torch.Tensor, vocab_size: int) -> int:
    """The last token that nobody drafts, hence one the text does not have; the last of all where every one is drafted."""
    others = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, vocabulary, False).nonzero()
    return int(others[-1]) if len(others) else vocab_size - 1


def without_last(batch: Batch) -> Batch:
    """EAGLE-3 and block drafters do not read the target's last state."""
    return Batch(batch.token_ids, batch.states[:, :, :-1], batch.counts, batch.lengths)


def pair_predictions(model: PairModel, batch: Batch, output: torch.Tensor, num_steps: int) -> Iterator[Prediction]:
    """`output` [D, h]: the target's own product with the vocabulary."""
    for step, unrolled in enumerate(model.unroll(batch.states, batch.token_ids, num_steps)):
        hidden = F.pad(unrolled.hidden, (0, 0, 0, step))  # chains that would leave the text are never chosen
        yield Prediction(step + 2, partial(_vocabulary_logits, output, hidden), STEP_WEIGHT**step)


def medusa_predictions(model: MedusaModel, batch: Batch) -> Iterator[Prediction]:
    read = model.read(batch.states)
    for head in range(len(model.outputs)):
        yield Prediction(head + 2, partial(_head_logits, model, head, read), STEP_WEIGHT**head)


def _vocabulary_logits(output: torch.Tensor, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return F.linear(hidden[chosen], output)


def _head_logits(model: MedusaModel, head: int, read: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return model.logits(head, read[chosen])


def train(trainer: Trainer, answers: list[Answer], options: argparse.Namespace) -> None:
    """One answer of `HELD_OUT` is kept back, to see now and then what the drafter makes of text it does not know."""
    random.Random(options.seed).shuffle(answers)
    unseen, seen = answers[::HELD_OUT], [answer for index, answer in enumerate(answers) if index % HELD_OUT]
    with bar() as progress:
        task = progress.add_task(f"{options.drafter} learns", total=options.steps, note="")
        recent: list[tuple[float, ...]] = []
        for report in trainer.run(seen, options.batch_tokens, options.seed, options.minutes):
            recent = [
                *(old for old in recent[1 - REPORT_EVERY :] if len(old) == len(report.agreement)),
                report.agreement,
            ]
            mean = tuple(sum(column) / len(recent) for column in zip(*recent, strict=True))
            progress.update(task, completed=report.step, note=f"agrees with the target {percent(mean)}")
            if report.step % CHECK_EVERY == 0:
                new = percent(trainer.agreement(unseen, options.batch_tokens))
                note = f"step {report.step}: agrees with the target {percent(mean)}, in new text {new}"
                progress.console.print(note, highlight=False)
    print(f"in new text agrees with the target {percent(trainer.agreement(unseen, options.batch_tokens))}")


def percent(shares: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.0f}%" for share in shares) or "(all of it is too short)"


def bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} {task.fields[note]}"),
        TimeElapsedColumn(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
