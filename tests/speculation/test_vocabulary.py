"""Tokens of two tokenizers belong together by what they stand for, whatever their ids and spelling."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.speculation.vocabulary import SharedVocabulary, TokenMap, share_vocabulary
from protocol.model_files import ModelFiles, resolve
from tests.speculation.reference import HOST
from tests.tiny import write_tiny_model

BYTE_LEVEL = ["</s>", "Ġthe", "Ġa", "he", "l", "o", "Ã©", "Ċ", "Ġhello", "Ġworld"]
METASPACE = ["<unk>", "é", "▁the", "o", "<0x0A>", "l", "he", "▁a", "<|x|>"]


def files(directory: Path, tokens: Sequence[str], eos: int = 0) -> ModelFiles:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": len(tokens), "eos_token_id": eos}))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return resolve(str(directory))


def shared(root: Path, ours: Sequence[str], theirs: Sequence[str], eos: int = 0) -> SharedVocabulary:
    return share_vocabulary(files(root / "ours", ours), files(root / "theirs", theirs, eos), len(ours), len(theirs))


def test_tokens_are_compared_by_the_bytes_they_stand_for(tmp_path: Path) -> None:
    found = shared(tmp_path, BYTE_LEVEL, METASPACE)
    pairs = {
        (BYTE_LEVEL[ours], METASPACE[theirs]) for ours, theirs in zip(found.target_ids, found.draft_ids, strict=True)
    }
    assert pairs == {
        ("Ġthe", "▁the"), ("Ġa", "▁a"), ("he", "he"), ("l", "l"), ("o", "o"), ("Ã©", "é"), ("Ċ", "<0x0A>"),
    }  # fmt: skip
    assert found.target_ids == tuple(sorted(found.target_ids))
    assert not found.is_same
    assert str(found) == "7 tokens shared of 9 here and 10 there"


def test_a_token_the_draft_model_lacks_is_read_as_its_longest_known_end(tmp_path: Path) -> None:
    found = shared(tmp_path, BYTE_LEVEL, METASPACE, eos=8)
    read = {BYTE_LEVEL[token]: METASPACE[fed] for token, fed in enumerate(found.fed)}
    assert read["Ġhello"] == "o" and read["Ġthe"] == "▁the"
    assert read["Ġworld"] == "<|x|>" and read["</s>"] == "<|x|>"  # nothing of it is known: the end of a text


def test_logits_are_those_of_shared_tokens_alone(tmp_path: Path) -> None:
    found = shared(tmp_path, BYTE_LEVEL, METASPACE)
    tokens = TokenMap(found, HOST)
    draft_logits = torch.arange(2.0 * len(METASPACE)).view(2, -1)
    got = tokens.target_logits(draft_logits)
    assert got.shape == (2, len(BYTE_LEVEL))
    assert torch.equal(got[:, list(found.target_ids)], draft_logits[:, list(found.draft_ids)])
    assert int(got.isinf().sum()) == 2 * 3
    assert tokens.fed_tokens(torch.tensor([1, 8, 1])).tolist() == [2, 3, 2]


@pytest.mark.parametrize(("target_size", "draft_size"), [(384, 384), (448, 384), (384, 448)])
def test_one_tokenizer_needs_no_map_whatever_the_padding(tmp_path: Path, target_size: int, draft_size: int) -> None:
    ours = resolve(str(write_tiny_model(tmp_path / "ours", vocab_size=target_size)))
    theirs = resolve(str(write_tiny_model(tmp_path / "theirs", "qwen2", vocab_size=draft_size)))
    found = share_vocabulary(ours, theirs, target_size, draft_size)
    assert found.is_same and found.target_ids == found.draft_ids == tuple(range(384))
    tokens = TokenMap(found, HOST)
    draft_logits = torch.randn(3, draft_size)
    got = tokens.target_logits(draft_logits)
    assert got.shape == (3, target_size)
    assert torch.equal(got[:, :384], draft_logits[:, :384])
    assert bool((got[:, 384:] == -torch.inf).all())
    fed = tokens.fed_tokens(torch.arange(target_size))
    assert fed[:384].tolist() == list(range(384))
    assert set(fed[384:].tolist()) <= {2}  # rows of padding stand for no text: read as its end


def test_a_draft_model_that_shares_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--draft-model .*theirs: only 1 of the 5 tokens .* at least 25% must be"):
        shared(tmp_path, ["a", "b", "c", "d", "e"], ["a", "v", "w", "x", "y", "z"])
    (tmp_path / "enough").mkdir()
    assert shared(tmp_path / "enough", ["a", "b", "c", "d"], ["a", "w", "x", "y", "z"]).target_ids == (0,)
