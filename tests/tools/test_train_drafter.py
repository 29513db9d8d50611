"""What is trained is what drafts, and training teaches something: the trainer over a tiny model."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.speculation.recipe import SpeculationSettings, Target, TargetFacts
from engine.speculation.registry import prepare
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart
from protocol.model_files import read_eos_token_ids, resolve
from protocol.sampling import SamplingParams
from tests.bench.__main__ import PROMPTS
from tests.tiny import write_tiny_model
from tests.tiny_drafters import taps_of, target_model
from tools import train_drafter
from tools.drafter_training.answers import Answer, AnswerWriter, WritingLimits, load_answers, save_answers
from tools.drafter_training.block_model import BlockSize, DFlashModel, DSparkModel
from tools.drafter_training.prompts import training_prompts
from tools.drafter_training.training import Prediction, batches, loss_of
from tools.train_drafter import without_last

BLOCK_SIZE, NUM_BLOCKS = 4, 32
DRAFT_TOKENS = 3
SAMPLED = SamplingParams(max_tokens=100, temperature=1.0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m", num_layers=8)


def options(drafter: str, out: Path, target: Path, *more: str) -> list[str]:
    own = {"dflash": ("--ahead", "3", "--layers", "2"), "dspark": ("--ahead", "3", "--markov-rank", "16")}
    common = ("--model", str(target), "--vocabulary", "200")
    return ["train_drafter", drafter, str(out), *common, *own.get(drafter, ()), *more]


@pytest.mark.parametrize("drafter", train_drafter.DRAFTERS)
def test_the_distributions_that_were_trained_are_those_that_draft(
    drafter: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.argv", options(drafter, tmp_path / "d", target))
    model = target_model(target)
    generator = torch.Generator().manual_seed(4)
    vocabulary = torch.randperm(320, generator=generator)[:200].sort().values
    parsed = train_drafter.read_options()
    taps = (2, 4, 5, 8)
    trainable = train_drafter.make(parsed, model, taps[:3], vocabulary)
    with torch.no_grad():
        for parameter in trainable.module.parameters():
            noisy = parameter + 0.05 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noisy.to(torch.bfloat16).float())  # as it is written
    trainable.module.eval()
    trainable.write(parsed.out)
    history = torch.randint(3, 320, (14,), generator=generator).tolist()
    drafted, probs = _draft(drafter, target, parsed.out, history)
    text = [*history, *drafted, 5]  # a last token that no step reads
    states = taps_of(model, torch.tensor([text]), taps)[0][:-1]
    (batch,) = batches([Answer(torch.tensor(text), len(history) - 1, states)], 100, random.Random(0))
    root = torch.zeros_like(batch.counts)
    root[0, len(history) - 2] = True  # the pair whose token is the root
    with torch.no_grad():
        trained = [prediction.logits(root)[0].softmax(dim=-1) for prediction in trainable.predict(batch)]
    assert len(trained) == DRAFT_TOKENS
    for step, distribution in enumerate(trained):
        drawn_from = probs[step][vocabulary]
        if drafter == "mtp":  # it drafts from the target's whole vocabulary, and is trained on a part of it
            drawn_from = drawn_from / drawn_from.sum()
        torch.testing.assert_close(drawn_from, distribution, rtol=1e-3, atol=1e-6)
    if drafter == "dspark":  # drafts that are cut where the trained head says, just above what it says of each place
        with torch.no_grad():
            sure = [float(p.confidence(root).sigmoid()) for p in trainable.predict(batch) if p.confidence is not None]
        assert len(sure) == DRAFT_TOKENS and len({round(one, 3) for one in sure}) == DRAFT_TOKENS
        for threshold in (one + 1e-4 for one in sure):
            cut, _ = _draft(drafter, target, parsed.out, history, threshold)
            assert cut == drafted[: [one < threshold for one in sure].index(True)]


def _draft(
    drafter: str, target: Path, files: Path, history: list[int], threshold: float = 0.0
) -> tuple[list[int], torch.Tensor]:
    """Tokens drawn behind `history` by the engine's own drafter, and what they were drawn from [W, V]."""
    model = target_model(target)
    settings = SpeculationSettings(
        num_draft_tokens=DRAFT_TOKENS,
        draft_model=str(files),
        draft_sampling="sampled",
        confidence_threshold=threshold,
    )
    facts = TargetFacts(model.arch, torch.float32, torch.device("cpu"), BLOCK_SIZE, 512, resolve(str(target)))
    speculator = prepare(drafter, settings, facts).build(Target(model, NUM_BLOCKS, BLOCK_SIZE))
    block_ids = tuple(range(8))
    with torch.inference_mode():
        taps = taps_of(model, torch.tensor([history]), speculator.capabilities.taps)[0]
        speculator.begin(SequenceStart(0, tuple(history), len(history)))
        speculator.observe([CommittedSpan(0, 0, history[:-1], history[-1], block_ids, taps[:-1])])
        draft = speculator.propose([DraftRow(0, tuple(history), DRAFT_TOKENS, 1, SAMPLED, 3, block_ids)])
    assert draft.probs is not None and (threshold or draft.lengths.tolist() == [DRAFT_TOKENS])
    return draft.tokens[0, : int(draft.lengths[0])].tolist(), draft.probs[0]


def test_the_text_is_the_target_s_own_and_the_states_are_those_of_a_run_in_one_piece(target: Path, tmp_path: Path):
    model = target_model(target)
    prompts = [[5, 6, 7 + number, 40] for number in range(7)]
    limits = WritingLimits(answer_tokens=9, total_tokens=40, max_prompt_tokens=8, rows=3)
    writer = AnswerWriter(model, read_eos_token_ids(resolve(str(target))), (2, 8), limits, seed=0)
    reported: list[int] = []
    answers = list(writer.write(prompts, lambda done, total: reported.append(done)))
    assert sum(len(answer.token_ids) - answer.num_prompt_tokens for answer in answers) >= 40 and reported[-1] == 40
    save_answers(tmp_path / "answers.safetensors", answers)
    greedy_right = []
    for answer in load_answers(tmp_path / "answers.safetensors"):
        tokens = answer.token_ids[None, :-1]
        states = taps_of(model, tokens, (2, 8))[0]
        torch.testing.assert_close(answer.states.float(), states, rtol=1e-2, atol=1e-2)  # kept in bfloat16
        choices = model.logits(states[answer.num_prompt_tokens - 1 :, 1]).argmax(dim=1)
        greedy_right.append(torch.equal(choices, answer.token_ids[answer.num_prompt_tokens :]))
    assert 0 < sum(greedy_right) < len(answers)  # half are greedy, the others are drawn


def test_training_prompts_are_many_mixed_and_none_of_the_benchmark_s():
    prompts = training_prompts(400)
    assert training_prompts(400) == prompts != training_prompts(400, seed=1)
    assert len(set(prompts)) > 350
    assert not {prompt["prompt"] for prompt in PROMPTS}.intersection(training_prompts(5000))


@pytest.mark.parametrize("drafter", train_drafter.DRAFTERS)
def test_the_command_writes_a_drafter_that_learned(
    drafter: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    losses: list[float] = []
    run = train_drafter.Trainer.run

    def watched(*args, **kwargs):
        for report in run(*args, **kwargs):
            losses.append(report.loss)
            yield report

    monkeypatch.setattr(train_drafter.Trainer, "run", watched)
    more = f"--answer-tokens 600 --steps 60 --batch-tokens 200 --answers {tmp_path}/a.safetensors".split()
    monkeypatch.setattr("sys.argv", options(drafter, tmp_path / "d", target, *more))
    train_drafter.main()
    assert "--speculator " + drafter in capsys.readouterr().out
    assert sum(losses[-15:]) < 0.96 * sum(losses[:15])  # the tiny target's text has little to learn
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "d" / "model.safetensors").values())


@pytest.mark.parametrize("drafter", train_drafter.BLOCKS)
def test_blocks_of_a_text_are_trained_as_if_each_were_alone(drafter: str, target: Path) -> None:
    """Every prediction of a batch of texts of several lengths is that of its block by itself behind the text so far."""
    model = target_model(target)
    size = BlockSize(num_layers=2, num_drafts=3, num_anchors=4, mask_token_id=7)
    torch.manual_seed(3)
    spark = DSparkModel(model, 1, size, rank=8, vocab_size=320).eval()
    block = (DFlashModel(model, 1, size) if drafter == "dflash" else spark).eval()
    torch.nn.init.normal_(spark.successors)
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(3, 320, (length,), generator=generator) for length in (9, 12)]
    answers = [Answer(text, 3, torch.randn(len(text) - 1, 2, 64, generator=generator)) for text in texts]
    (together,) = batches(answers, 100, random.Random(0))
    alone = [next(batches([one], 100, random.Random(0))) for one in sorted(answers, key=lambda one: len(one.states))]
    rows = sorted(range(2), key=lambda row: int(together.lengths[row]))
    output = model.weights.output
    for row, batch in zip(rows, alone, strict=True):
        for many, few in zip(
            block.predictions(without_last(together), output),
            block.predictions(without_last(batch), output),
            strict=True,
        ):
            assert many.begun is not None and few.begun is not None
            length = int(batch.lengths) - few.ahead + 1  # behind it there is no text to predict
            for column in few.begun[0, :length].nonzero()[:, 0].tolist():
                short = torch.zeros_like(few.begun)
                short[0, column] = True
                wide = torch.zeros_like(many.begun)
                wide[row, column] = True
                torch.testing.assert_close(many.logits(wide), few.logits(short), rtol=1e-4, atol=1e-5)
    assert sum(int(next(block.predictions(without_last(one), output)).begun.sum()) for one in alone) == 5 + 8


def test_training_draws_blocks_from_the_answers_and_no_more_than_asked(target: Path) -> None:
    model = target_model(target)
    block = DFlashModel(model, 1, BlockSize(num_layers=1, num_drafts=3, num_anchors=4, mask_token_id=7))
    answer = Answer(torch.arange(3, 33), 10, torch.randn(29, 2, 64))
    (batch,) = batches([answer], 100, random.Random(0))
    begun = [next(block.predictions(without_last(batch), model.weights.output)).begun for _ in range(30)]
    places = [set(one[0].nonzero()[:, 0].tolist()) for one in begun if one is not None]
    assert all(len(one) == 4 for one in places) and len(set(map(frozenset, places))) > 20
    assert set.union(*places) == set(range(9, 28)), "from the token behind the prompt's last to one before the last run"


def test_confidence_is_taught_what_two_distributions_have_in_common() -> None:
    """A quarter of the mass where the drafter has three quarters: half of what is drafted is accepted."""
    taught, drafted = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.75, 0.25]])
    everywhere = torch.ones(1, 1, dtype=torch.bool)
    said = torch.zeros(1, requires_grad=True)

    def pull(logit: float) -> float:
        with torch.no_grad():
            said.fill_(logit)
        prediction = Prediction(2, lambda chosen: drafted.log(), 1.0, everywhere, 0.9, lambda chosen: said)
        (gradient,) = torch.autograd.grad(loss_of(prediction, everywhere, drafted.log(), taught), said)
        return float(gradient)

    assert pull(0.0) == pytest.approx(0.0, abs=1e-6) and pull(1.0) > 0.1 and pull(-1.0) < -0.1


def test_an_option_of_another_drafter_is_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for drafter, flag in (("eagle3", "--layers"), ("medusa", "--anchors"), ("dflash", "--markov-rank")):
        monkeypatch.setattr("sys.argv", options(drafter, tmp_path / "d", target, flag, "2"))
        with pytest.raises(SystemExit):
            train_drafter.read_options()
        assert f"{flag} says nothing about {drafter}" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", options("dflash", tmp_path / "d", target, "--layers", "0"))
    with pytest.raises(SystemExit):
        train_drafter.read_options()
    assert "--layers must be at least 1" in capsys.readouterr().err


def test_the_mask_is_a_token_that_nobody_drafts() -> None:
    assert train_drafter.mask_token(torch.tensor([0, 1, 3, 5]), 6) == 4
    assert train_drafter.mask_token(torch.arange(6), 6) == 5


def test_a_target_that_cannot_be_trained_for_is_refused_by_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = write_tiny_model(tmp_path / "m", "qwen3")
    monkeypatch.setattr("sys.argv", options("eagle3", tmp_path / "d", target))
    with pytest.raises(SystemExit, match="norms its queries"):
        train_drafter.main()
