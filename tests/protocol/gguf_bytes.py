"""Bytes of small GGUF files, well formed or not, written independently of the reader under test."""

import struct
from collections.abc import Sequence

UINT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 5, 6, 7, 8, 9, 10
F32, Q4_1 = 0, 3


def text(value: str | bytes) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(encoded)) + encoded


def u32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", UINT32, value)


def boolean(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<IB", BOOL, value)


def string(key: str, value: str | bytes) -> bytes:
    return text(key) + struct.pack("<I", STRING) + text(value)


def strings(key: str, values: Sequence[str | bytes]) -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(text, values))


def int32s(key: str, values: Sequence[int]) -> bytes:
    return text(key) + struct.pack(f"<IIQ{len(values)}i", ARRAY, INT32, len(values), *values)


def tensor(name: str, dimensions: Sequence[int], ggml_type: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, ggml_type, offset)


def head(num_tensors: int, num_pairs: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs)


def file(pairs: Sequence[bytes], tensors: Sequence[bytes], data: bytes, alignment: int = 32) -> bytes:
    header = head(len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data


def one_tensor_file(*pairs: bytes) -> bytes:
    """A valid file: `pairs`, and one F32 tensor `t` of four zeros."""
    return file(pairs, [tensor("t", [4])], b"\0" * 16)


def tokenizer_file(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], *pairs: bytes) -> bytes:
    """A valid file with a gpt2 tokenizer and a `llama` model of 64 tokens of context; `pairs` come on top."""
    return one_tensor_file(
        string("general.architecture", "llama"),
        u32("llama.context_length", 64),
        string("tokenizer.ggml.model", "gpt2"),
        strings("tokenizer.ggml.tokens", tokens),
        int32s("tokenizer.ggml.token_type", types),
        strings("tokenizer.ggml.merges", merges),
        *pairs,
    )
