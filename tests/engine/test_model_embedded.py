"""The embedded model answers as an independent implementation does: transformers, with weights from the gguf package."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.kv.pool import KVPool, KVShape
from engine.model.attention import SpanLayout
from engine.model.decoder import DecoderModel, ForwardInput
from engine.model.grouped import GroupedAttention
from engine.model.weights import load_model
from frontend.tokenizer import load_tokenizer
from protocol.model_files import resolve

CPU = torch.device("cpu")
NUM_TOKENS = 24
LOGIT_TOLERANCE = 1e-3  # absolute, on logits from about -10 to 30: float32 rounding over 30 layers; seen: 1e-4
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three primary colours are",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,",
    "SELECT name FROM users WHERE",
    "In 1969, the first man",
    "La vie est",
    "Photosynthesis is the process by which",
    "To be, or not to be,",
    "The quick brown fox",
    "import numpy as np\n\n",
    "The opposite of hot is",
    "A haiku about the sea:\n",
    "E = mc^2 means that",
    "The largest planet in the solar system",
    "<p>Hello, <b>world",
    "My favourite recipe for bread needs",
)


def reference_model(path: Path) -> LlamaForCausalLM:
    """Nothing of ours: the gguf package reads and dequantises; the row order is undone as transformers does it."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    state: dict[str, torch.Tensor] = {}
    theirs = {names.get_name(name.removesuffix(".weight")): name for name, _ in model.named_parameters()}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, heads in (("attn_q.", 9), ("attn_k.", 3)):
            if part in tensor.name:
                values = values.reshape(heads, values.shape[0] // heads // 2, 2, -1).swapaxes(2, 1)
                values = values.reshape(heads * 64, 576)
        state[theirs[tensor.name.removesuffix(".weight")]] = torch.from_numpy(np.array(values))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on the meta device
    return model.eval()


@pytest.fixture(scope="module")
def ours() -> DecoderModel:
    return load_model(resolve("embedded"), torch.float32, CPU)


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    return reference_model(resolve("embedded").path)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(resolve("embedded"))
    return [tokenizer.encode_plain(text) for text in PROMPTS]


def step(
    model: DecoderModel, attention: GroupedAttention, rows: list[tuple[list[int], int, tuple[int, ...]]]
) -> list[torch.Tensor]:
    """Logits of every token of (token_ids, start, blocks) rows in one step."""
    layouts = [SpanLayout(start, len(token_ids), blocks) for token_ids, start, blocks in rows]
    positions = [position for layout in layouts for position in range(layout.start, layout.end)]
    slots = [
        attention.pool.slot(layout.block_ids, position)
        for layout in layouts
        for position in range(layout.start, layout.end)
    ]
    tokens = [token for token_ids, _, _ in rows for token in token_ids]
    flat = ForwardInput(torch.tensor(tokens), torch.tensor(positions), torch.tensor(slots))
    hidden, _ = model.forward(flat, attention, attention.layout(layouts))
    return list(model.logits(hidden).split([len(token_ids) for token_ids, _, _ in rows]))


@pytest.mark.timeout(300)  # half a minute on two free cores
def test_greedy_continuations_and_logits_equal_transformers(
    ours: DecoderModel, theirs: LlamaForCausalLM, prompts: list[list[int]]
):
    """One token per row and step here, whole texts there; a token differs nowhere, so each continuation is greedy there too."""
    blocks_per_row = 4
    shape = KVShape(30, 3, 64, 16, torch.float32)
    attention = GroupedAttention(KVPool(shape, blocks_per_row * len(prompts), CPU), ours.arch.num_heads)
    blocks = [tuple(range(row * blocks_per_row, (row + 1) * blocks_per_row)) for row in range(len(prompts))]
    texts = [list(token_ids) for token_ids in prompts]
    seen = step(ours, attention, [(text, 0, ids) for text, ids in zip(texts, blocks, strict=True)])
    for count in range(NUM_TOKENS):
        for row, text in enumerate(texts):
            text.append(int(seen[row][-1].argmax()))
        if count + 1 < NUM_TOKENS:
            rows = [([text[-1]], len(text) - 1, ids) for text, ids in zip(texts, blocks, strict=True)]
            seen = [torch.cat((old, new)) for old, new in zip(seen, step(ours, attention, rows), strict=True)]
    longest = max(len(text) for text in texts)
    padded = [text[:-1] + [0] * (longest - len(text)) for text in texts]  # behind the end: causality hides it
    with torch.inference_mode():
        expected = theirs(torch.tensor(padded)).logits
    for text, token_ids, logits, reference in zip(texts, prompts, seen, expected, strict=True):
        continuation = reference[len(token_ids) - 1 : len(text) - 1].argmax(dim=1).tolist()
        assert continuation == text[len(token_ids) :]
        torch.testing.assert_close(logits, reference[: len(text) - 1], atol=LOGIT_TOLERANCE, rtol=0)


def test_the_embedded_model_is_smollm2(ours: DecoderModel):
    arch = ours.arch
    assert (arch.family, arch.num_layers, arch.hidden_size, arch.vocab_size) == ("llama", 30, 576, 49152)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.context_length) == (9, 3, 64, 8192)
    assert arch.tied and arch.rope.base == 100000.0 and arch.rope.scaling is None
    assert ours.weights.num_bytes == 538_060_160
