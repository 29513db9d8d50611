"""The GGUF header reader believes nothing it has not checked."""

import random
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from protocol.gguf import GGMLType, ModelFilesError, TensorInfo, read_header
from protocol.model_files import resolve
from tests.protocol import gguf_bytes as build
from tests.timing import at_most_s

NESTED = build.text("k") + struct.pack("<IIQ", build.ARRAY, build.ARRAY, 1) + struct.pack("<IQ", build.UINT8, 0)
HUGE_ARRAY = build.text("k") + struct.pack("<IIQ", build.ARRAY, build.UINT8, 2**62)
HUGE_STRING = build.text("k") + struct.pack("<IQ", build.STRING, 2**63)
UNKNOWN_VALUE = build.text("k") + struct.pack("<IQ", 13, 0)

BROKEN = {
    "zero dimension (A-FILES-1)": (
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 4, 0, 0, 0),
        "dimension of zero",
    ),
    "empty key (A-FILES-1)": (build.head(0, 1) + build.text("") + struct.pack("<IB", build.BOOL, 1), "is empty"),
    "nothing after an empty key": (build.head(0, 1) + build.text(""), "is empty"),
    "no tensors": (build.head(0, 1) + build.boolean("k", 1), "holds no tensors"),
    "wrong magic": (build.head(1, 0, magic=b"GGML"), "magic"),
    "version 99": (build.head(1, 0, version=99), "version 99"),
    "version 1": (build.head(1, 0, version=1), "version 1 "),
    "big-endian": (b"GGUF" + struct.pack(">I", 3), "big-endian"),
    "empty file": (b"", "is empty"),
    "magic alone": (b"GGUF", "ends before the version"),
    "too many tensors": (build.head(2**60, 0), "tensors"),
    "more tensors than bytes": (build.head(1000, 0), "more than fit"),
    "too many pairs": (build.head(0, 2**60), "metadata pairs"),
    "nested arrays": (build.one_tensor_file(NESTED), "array of arrays"),
    "huge array": (build.one_tensor_file(HUGE_ARRAY), "items of 'k'"),
    "huge string": (build.one_tensor_file(HUGE_STRING), "more than fit"),
    "unknown value type": (build.one_tensor_file(UNKNOWN_VALUE), "unknown value type 13"),
    "boolean of 2": (build.one_tensor_file(build.boolean("k", 2)), "neither 0 nor 1"),
    "duplicate key": (build.one_tensor_file(build.u32("k", 1), build.u32("k", 1)), "twice"),
    "key not UTF-8": (build.head(1, 1) + build.text(b"\xff") + b"\0" * 40, "UTF-8"),
    "string not UTF-8": (build.one_tensor_file(build.string("k", b"\xff")), "UTF-8"),
    "item not UTF-8": (build.one_tensor_file(build.strings("k", [b"a", b"\xff"])), "UTF-8"),
    "alignment of 3": (build.one_tensor_file(build.u32("general.alignment", 3)), "power of two"),
    "alignment of 0": (build.one_tensor_file(build.u32("general.alignment", 0)), "power of two"),
    "alignment a string": (build.one_tensor_file(build.string("general.alignment", "x")), "power of two"),
    "no dimensions": (build.file([], [build.tensor("t", [])], b"\0" * 16), "0 dimensions"),
    "five dimensions": (build.file([], [build.tensor("t", [1] * 5)], b"\0" * 16), "5 dimensions"),
    "unknown tensor type": (build.file([], [build.tensor("t", [4], 77)], b"\0" * 16), "unknown type 77"),
    "rows not whole blocks": (build.file([], [build.tensor("t", [33], build.Q4_1)], b"\0" * 99), "block of 32"),
    "truncated data": (build.file([], [build.tensor("t", [5])], b"\0" * 16), "truncated"),
    "dimensions that overflow": (build.file([], [build.tensor("t", [2**63, 2**63])], b"\0" * 16), "truncated"),
    "offset outside": (build.file([], [build.tensor("t", [4], offset=2**40)], b"\0" * 16), "truncated"),
    "offset not aligned": (build.file([], [build.tensor("t", [1], offset=4)], b"\0" * 16), "not aligned"),
    "same tensor name": (build.file([], [build.tensor("t", [4]), build.tensor("t", [4])], b"\0" * 16), "same name"),
    "overlap": (build.file([], [build.tensor("t", [4]), build.tensor("u", [4])], b"\0" * 16), "overlap"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_in_milliseconds_naming_file_and_reason(case: str, tmp_path: Path) -> None:
    content, reason = BROKEN[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(ModelFilesError) as caught:
        read_header(path)
    elapsed = time.perf_counter() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert str(path) in message
    assert reason in message
    assert "\n" not in message
    at_most_s(elapsed, 0.5, "the refusal")
    assert peak < 1_000_000


def test_a_directory_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="is a directory"):
        read_header(tmp_path)
    with pytest.raises(ModelFilesError, match="does not exist"):
        read_header(tmp_path / "absent.gguf")


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    content = build.tokenizer_file(["a", "b", "ab"], [1, 1, 1], ["a b"])
    path = tmp_path / "model.gguf"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFilesError):
            read_header(path)


def test_mutated_bytes_give_a_header_or_a_sentence_and_nothing_else(tmp_path: Path) -> None:
    seed = 20_261_130
    print(f"seed={seed}")
    randomness = random.Random(seed)
    content = build.tokenizer_file(["a", "b", "ab"], [1, 1, 1], ["a b"], build.boolean("flag", 1))
    path = tmp_path / "model.gguf"
    refused = 0
    for _ in range(3000):
        mutated = bytearray(content)
        for _ in range(randomness.choice((1, 1, 2, 8))):
            mutated[randomness.randrange(len(mutated))] = randomness.choice(
                (0, 1, 0x7F, 0x80, 0xFF, randomness.getrandbits(8))
            )
        path.write_bytes(mutated)
        try:
            header = read_header(path)
        except ModelFilesError:
            refused += 1
        else:
            assert all(0 < tensor.offset <= len(content) - tensor.num_bytes for tensor in header.tensors)
    assert 500 < refused < 3000  # both outcomes were exercised


def test_values_of_every_type_and_tensor_places_agree_with_ggufs_own_writer(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "żółw 🐢")
    writer.add_array("strings", ["a", "", "ü"])
    writer.add_array("floats", [0.5, -1.0])
    writer.add_array("flags", [True, False])
    first = np.arange(12, dtype=np.float32).reshape(3, 4)
    second = np.ones((2, 5), dtype=np.float16)
    writer.add_tensor("first", first)
    writer.add_tensor("second", second)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(path)

    expected = {
        "general.architecture": "llama", "u8": 200, "i8": -5, "u16": 60_000, "i16": -30_000, "i32": -(2**31),
        "u64": 2**64 - 1, "i64": -(2**63), "f32": 0.5, "f64": 0.1, "yes": True, "text": "żółw 🐢",
        "strings": ("a", "", "ü"), "floats": (0.5, -1.0), "flags": (True, False),
    }  # fmt: skip
    assert header.metadata == expected
    assert header.metadata["yes"] is True
    content = path.read_bytes()
    for tensor, array in zip(header.tensors, (first, second), strict=True):
        assert tensor.shape == array.shape
        assert content[tensor.offset : tensor.offset + tensor.num_bytes] == array.tobytes()


def test_block_sizes_are_ggmls() -> None:
    for ggml_type in GGMLType:
        theirs = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type.value)]
        assert (ggml_type.name, ggml_type.block_size, ggml_type.block_bytes) == (
            gguf.GGMLQuantizationType(ggml_type.value).name,
            *theirs,
        )


def test_the_embedded_models_header_is_read_whole() -> None:
    header = resolve("embedded").header
    assert (header.version, header.alignment, len(header.tensors)) == (3, 32, 272)
    assert len(header.metadata) == 33
    embedding = header.tensors_by_name["token_embd.weight"]
    assert embedding == TensorInfo("token_embd.weight", (49152, 576), GGMLType.Q8_0, 1_785_664, 30_081_024)
    down = header.tensors_by_name["blk.0.ffn_down.weight"]
    assert (down.shape, down.type) == ((576, 1536), GGMLType.Q4_1)
