"""A small stand-in for the embedded model: its vocabulary, tokenizer and chat template over tiny random weights.

For cases about the server rather than the model: every token id of the case book is valid, a forward takes a millisecond
instead of a hundred, and because a few common words have by far the largest weights, greedy text soon repeats itself,
so that lookup drafts are found and accepted.
"""

import json
from pathlib import Path

from safetensors.torch import save_file

from frontend.gguf_tokenizer import build_from_gguf
from protocol.model_files import read_chat_template, resolve
from tests.tiny import tiny_config, tiny_weights

NAME = "SmolLM2-stand-in"
VOCAB_SIZE = 49152
CONTEXT = 8192
# " one" to " six", " END", " ha", " said", words of the case book's prompts, and some more common ones.
FREQUENT = (582, 827, 1296, 1876, 2531, 2976, 36588, 421, 1137, 198, *range(253, 293))


def write_stand_in(directory: Path) -> Path:
    """Write the model as a Hugging Face directory below `directory` and return its path. Takes about a second."""
    embedded = resolve("embedded")
    path = directory / NAME
    path.mkdir(parents=True)
    config = tiny_config("llama", VOCAB_SIZE, num_layers=2, context_length=CONTEXT, tied=False)
    weights = tiny_weights(config, seed=7)
    rare = [True] * VOCAB_SIZE
    for token_id in FREQUENT:
        rare[token_id] = False
    weights["lm_head.weight"][rare] *= 0.2
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    build_from_gguf(embedded).save(str(path / "tokenizer.json"))
    chat = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": read_chat_template(embedded)}
    (path / "tokenizer_config.json").write_text(json.dumps(chat))
    return path
