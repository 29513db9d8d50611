"""Our decoder's logits equal transformers', for every family, scaling rule, chunking and mix of rows (float32)."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.kv.pool import KVPool, KVShape
from engine.model.attention import PagedAttention, ReferenceAttention, SpanLayout, ancestor_mask
from engine.model.decoder import DecoderModel, ForwardInput
from engine.model.grouped import GroupedAttention
from engine.model.weights import load_model
from protocol.model_files import resolve
from tests.tiny import write_tiny_model

CPU = torch.device("cpu")
TOLERANCE = 2e-4  # absolute, on logits whose spread is about 3: float32 rounding over two layers
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


def load(directory: Path) -> DecoderModel:
    return load_model(resolve(str(directory)), torch.float32, CPU)


def reference(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def make_pool(model: DecoderModel, block_size: int = 8, num_blocks: int = 64) -> KVPool:
    arch = model.arch
    shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, block_size, torch.float32)
    return KVPool(shape, num_blocks, CPU)


def make_attention(kind: str, pool: KVPool, model: DecoderModel) -> PagedAttention:
    return ReferenceAttention(pool) if kind == "reference" else GroupedAttention(pool, model.arch.num_heads)


def run(
    model: DecoderModel,
    attention: PagedAttention,
    spans: list[tuple[list[int], SpanLayout]],
    taps: tuple[int, ...] = (),
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """One step over (tokens, layout) spans: each span's logits, and the taps of all."""
    tokens, positions, slots = [], [], []
    for token_ids, layout in spans:
        tokens += token_ids
        positions += range(layout.start, layout.end)
        slots += [attention.pool.slot(layout.block_ids, position) for position in range(layout.start, layout.end)]
    step = ForwardInput(torch.tensor(tokens), torch.tensor(positions), torch.tensor(slots))
    hidden, tapped = model.forward(step, attention, attention.layout([layout for _, layout in spans]), taps)
    logits = model.logits(hidden)
    return list(logits.split([layout.num_tokens for _, layout in spans])), tapped


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_transformers(tmp_path: Path, family: str, tied: bool):
    directory = write_tiny_model(tmp_path, family, seed=11, tied=tied)
    model, token_ids = load(directory), prompt(100, seed=1)
    attention = make_attention("grouped", make_pool(model), model)
    (logits,), _ = run(model, attention, [(token_ids, SpanLayout(0, 100, tuple(range(13))))])
    assert_close(logits, expected_logits(reference(directory), token_ids))


@pytest.mark.parametrize("scaling", sorted(SCALINGS))
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rope_scaling_equals_transformers(tmp_path: Path, family: str, scaling: str):
    directory = write_tiny_model(tmp_path, family, seed=12, rope_scaling=SCALINGS[scaling])
    model, token_ids = load(directory), prompt(200, seed=2)
    attention = make_attention("grouped", make_pool(model), model)
    (logits,), _ = run(model, attention, [(token_ids, SpanLayout(0, 200, tuple(range(25))))])
    assert_close(logits, expected_logits(reference(directory), token_ids))
    plain = load(write_tiny_model(tmp_path / "plain", family, seed=12))
    (unscaled,), _ = run(
        plain, make_attention("grouped", make_pool(plain), plain), [(token_ids, SpanLayout(0, 200, tuple(range(25))))]
    )
    assert (unscaled - logits).abs().max() > 0.1, "the scaling changed nothing, so equality would prove nothing"


def test_llama_biases_equal_transformers(tmp_path: Path):
    directory = write_tiny_model(tmp_path, "llama", seed=13, attention_bias=True, mlp_bias=True)
    model, token_ids = load(directory), prompt(50, seed=3)
    attention = make_attention("grouped", make_pool(model), model)
    (logits,), _ = run(model, attention, [(token_ids, SpanLayout(0, 50, tuple(range(7))))])
    assert_close(logits, expected_logits(reference(directory), token_ids))


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path):
    whole = load(write_tiny_model(tmp_path / "whole", "qwen3", seed=14))
    sharded = load(write_tiny_model(tmp_path / "sharded", "qwen3", seed=14, num_shards=3))
    assert torch.equal(whole.weights.embedding, sharded.weights.embedding)
    assert torch.equal(whole.weights.layers[1].qkv, sharded.weights.layers[1].qkv)
    assert torch.equal(whole.weights.output, sharded.weights.output)


@pytest.mark.parametrize("kind", ["reference", "grouped"])
def test_chunked_prefill_and_single_tokens_equal_one_pass(tmp_path: Path, kind: str):
    directory = write_tiny_model(tmp_path, "qwen3", seed=15)
    model, token_ids = load(directory), prompt(90, seed=4)
    attention = make_attention(kind, make_pool(model), model)
    blocks = (7, 3, 5, 30, 31, 32, 2, 9, 11, 12, 13, 14)  # out of order: pages, not a line
    parts, start = [], 0
    for size in (1, 37, 8, 40, 1, 1, 2):
        (logits,), _ = run(model, attention, [(token_ids[start : start + size], SpanLayout(start, size, blocks))])
        parts.append(logits)
        start += size
    assert_close(torch.cat(parts), expected_logits(reference(directory), token_ids))


def test_mixed_batch_equals_each_row_alone(tmp_path: Path):
    """Decodes, verify spans, a chunk and a long context in one step; and no row can see another."""
    directory = write_tiny_model(tmp_path, "llama", seed=16)
    model = load(directory)
    oracle = reference(directory)
    sizes = [(0, 5), (17, 1), (33, 6), (130, 1), (64, 40), (3, 3), (70, 6)]
    for kind in ("reference", "grouped"):
        pool = make_pool(model, num_blocks=96)
        attention = make_attention(kind, pool, model)
        spans, texts, next_block = [], [], 0
        for row, (start, size) in enumerate(sizes):
            token_ids = prompt(start + size, seed=100 + row)
            needed = -(-(start + size) // 8)
            blocks = tuple(reversed(range(next_block, next_block + needed)))
            next_block += needed
            if start:
                run(model, attention, [(token_ids[:start], SpanLayout(0, start, blocks))])
            spans.append((token_ids[start:], SpanLayout(start, size, blocks)))
            texts.append(token_ids)
        outputs, _ = run(model, attention, spans)
        for (start, _), token_ids, logits in zip(sizes, texts, outputs, strict=True):
            assert_close(logits, expected_logits(oracle, token_ids)[start:])


@pytest.mark.parametrize("kind", ["reference", "grouped"])
def test_tree_nodes_see_their_ancestors_only(tmp_path: Path, kind: str):
    """Each node's logits are those of the chain from the root to it."""
    directory = write_tiny_model(tmp_path, "llama", seed=17)
    model, oracle = load(directory), reference(directory)
    context, nodes, parents = prompt(21, seed=5), prompt(6, seed=6), (-1, -1, 0, 0, 1, 4)
    attention = make_attention(kind, make_pool(model), model)
    blocks = (4, 2, 0, 1)
    run(model, attention, [(context[:-1], SpanLayout(0, 20, blocks))])
    depths = [1, 1, 2, 2, 2, 3]
    layout = SpanLayout(20, 7, blocks, parents)
    slots = torch.tensor([attention.pool.slot(blocks, position) for position in range(20, 27)])
    step = ForwardInput(
        torch.tensor([context[-1], *nodes]), torch.tensor([20, *(20 + depth for depth in depths)]), slots
    )
    hidden, _ = model.forward(step, attention, attention.layout([layout]))
    logits = model.logits(hidden)
    for node in range(6):
        path, at = [], node
        while at >= 0:
            path.append(nodes[at])
            at = parents[at]
        assert_close(logits[1 + node], expected_logits(oracle, context + path[::-1])[-1])


@pytest.mark.parametrize("kind", ["reference", "grouped"])
def test_a_tree_grown_level_by_level_is_the_tree_at_once(tmp_path: Path, kind: str):
    """Later levels are queries behind nodes that are in the pool already; rows of other shapes run next to them."""
    directory = write_tiny_model(tmp_path, "llama", seed=19)
    model = load(directory)
    context, nodes, parents = prompt(21, seed=5), prompt(6, seed=6), (-1, -1, 0, 0, 1, 4)
    positions = [20, 21, 21, 22, 22, 22, 23]
    blocks = (4, 2, 0, 1)

    def feed(attention, first, last, with_neighbour):
        tokens = [context[-1], *nodes][first:last]
        slots = [attention.pool.slot(blocks, slot) for slot in range(20 + first, 20 + last)]
        layouts = [SpanLayout(20 + first, last - first, blocks, parents[: last - 1], root=20)]
        place = positions[first:last]
        if with_neighbour:
            tokens, place = [*tokens, 7, 8, 9], [*place, 0, 1, 2]
            slots, layouts = (
                [*slots, *(attention.pool.slot((5,), slot) for slot in range(3))],
                [*layouts, SpanLayout(0, 3, (5,))],
            )
        step = ForwardInput(torch.tensor(tokens), torch.tensor(place), torch.tensor(slots))
        return model.forward(step, attention, attention.layout(layouts))[0][: last - first]

    states = []
    for levels in ([(0, 7)], [(0, 1), (1, 3), (3, 6), (6, 7)], [(0, 3), (3, 7)]):
        attention = make_attention(kind, make_pool(model), model)
        run(model, attention, [(context[:-1], SpanLayout(0, 20, blocks))])
        states.append(torch.cat([feed(attention, *level, with_neighbour=len(levels) > 1) for level in levels]))
    assert_close(states[1], states[0])
    assert_close(states[2], states[0])


def test_ancestor_mask_of_a_small_tree():
    assert ancestor_mask((-1, 0, -1)).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]


def test_taps_are_transformers_hidden_states(tmp_path: Path):
    directory = write_tiny_model(tmp_path, "qwen2", seed=18, num_layers=3)
    model, token_ids = load(directory), prompt(30, seed=7)
    attention = make_attention("grouped", make_pool(model), model)
    _, taps = run(model, attention, [(token_ids, SpanLayout(0, 30, tuple(range(4))))], taps=(2, 0, 1))
    with torch.inference_mode():
        states = reference(directory)(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    assert taps is not None
    for index, layer in enumerate((2, 0, 1)):
        torch.testing.assert_close(taps[:, index], states[layer][0], atol=2e-4, rtol=0)


def test_padding_never_meets_another_rows_numbers(tmp_path: Path):
    """A pool full of NaN outside a row's own slots leaves its logits untouched (0 * NaN would be NaN)."""
    model = load(write_tiny_model(tmp_path, "llama", seed=19))
    clean, dirty = make_pool(model), make_pool(model)
    spans = []
    for row, length in enumerate((40, 9)):
        spans.append((prompt(length, seed=row), SpanLayout(0, length, tuple(range(row * 8, row * 8 + 8)))))
    outputs = []
    for pool in (clean, dirty):
        if pool is dirty:
            pool.keys.fill_(torch.nan)
            pool.values.fill_(torch.nan)
        attention = make_attention("grouped", pool, model)
        pool.clear(torch.tensor([8 * 8 + 8 + slot for slot in range(1, 8)]))  # what a batch clears behind row 1's end
        for token_ids, layout in spans:
            run(model, attention, [(token_ids, layout)])
        decodes = [([5], SpanLayout(40, 1, spans[0][1].block_ids)), ([6], SpanLayout(9, 1, spans[1][1].block_ids))]
        pool.clear(torch.tensor([5 * 8 + slot for slot in range(1, 8)]))
        outputs.append(torch.cat(run(model, attention, decodes)[0]))
    assert torch.equal(outputs[0], outputs[1])


def test_bf16_stays_near_fp32(tmp_path: Path):
    directory = write_tiny_model(tmp_path, "qwen3", seed=20)
    exact, rounded = load(directory), load_model(resolve(str(directory)), torch.bfloat16, CPU)
    token_ids = prompt(40, seed=8)
    arch = rounded.arch
    pool = KVPool(KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, 8, torch.bfloat16), 8, CPU)
    span = [(token_ids, SpanLayout(0, 40, tuple(range(5))))]
    (coarse,), _ = run(rounded, GroupedAttention(pool, arch.num_heads), span)
    (fine,), _ = run(exact, make_attention("grouped", make_pool(exact), exact), span)
    assert coarse.dtype == torch.float32
    assert (coarse - fine).abs().mean() < 0.1  # 8 bits of mantissa on logits of spread 3
