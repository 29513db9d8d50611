"""FILES: broken model files and settings that cannot work end at start, with one sentence, not at the first request."""

import json
import struct
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protocol.model_files import resolve
from tests.cases.processes import DRAFTHOUSE, Ended, free_port, listeners, run_to_end, warm_starts
from tests.tiny import write_tiny_model

MAX_WARM_S = 3.0  # of a start behind its imports, which are the same for every file
MAX_START_S = 20.0  # of a whole process; 5 on an idle machine, and tests share theirs
ROLES = ["serve", "engine"]


def start(role: str, *options: str) -> tuple[Ended, int]:
    """Run one role until it ends by itself; the port is where it would have listened."""
    port = free_port()
    where = ("--port", str(port)) if role == "serve" else ("--listen", f"tcp://127.0.0.1:{port}")
    return run_to_end(DRAFTHOUSE, role, *options, *where, within_s=30), port


def assert_refused(ended: Ended, port: int, *names: str, within_s: float = MAX_START_S) -> str:
    """Non-zero, in time, one sentence that names the cause, no trace-back, nothing left listening."""
    assert ended.code not in (0, 99), ended
    assert ended.wall_s < within_s, ended
    assert "Traceback" not in ended.output, ended.output
    lines = [line for line in ended.output.splitlines() if all(name in line for name in names)]
    assert lines, ended.output
    assert listeners(port) == []
    return lines[-1]


Start = Callable[..., Ended]


@pytest.fixture(scope="module")
def engine() -> Iterator[Start]:
    """Starts an engine with options and gives its end."""
    with warm_starts("engine") as start_engine:
        yield start_engine


def engine_refuses(engine: Start, name: str, *options: str) -> tuple[str, Ended]:
    """The sentence, which names `name`, and how the engine ended."""
    port = free_port()
    ended = engine(*options, "--listen", f"tcp://127.0.0.1:{port}")
    return assert_refused(ended, port, name, within_s=MAX_WARM_S), ended


# ---- FILES-1: ggml-org/llama.cpp#24263 ----


def key(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor(name: str, *dims: int, kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return (
        key(name) + struct.pack("<I", count) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
    )


def header(num_tensors: int, num_pairs: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs)


def text_pair(name: str, value: str) -> bytes:
    return key(name) + struct.pack("<I", 8) + key(value)


BROKEN_GGUF: dict[str, bytes] = {
    "zero_dimension": header(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 4, 0, 0, 0),
    "empty_key": header(0, 1) + struct.pack("<Q", 0) + struct.pack("<II", 4, 1),
    "wrong_magic": header(0, 0, magic=b"GGML"),
    "version_99": header(0, 0, version=99),
    "big_endian_version": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "empty": b"",
    "magic_only": b"GGUF",
    "no_tensors": header(0, 1) + text_pair("general.architecture", "llama"),
    "nothing_at_all": header(0, 0),
    "unknown_architecture": header(1, 1) + text_pair("general.architecture", "zebra") + tensor("t", 4),
    "giant_tensor_count": header(2**63, 0),
    "giant_pair_count": header(0, 2**40),
    "giant_key": header(0, 1) + struct.pack("<Q", 2**60),
    "giant_string": header(0, 1) + key("k") + struct.pack("<IQ", 8, 2**62),
    "giant_array": header(0, 1) + key("k") + struct.pack("<IIQ", 9, 4, 2**61),
    "unknown_value_type": header(0, 1) + key("k") + struct.pack("<II", 99, 0),
    "too_many_dimensions": header(1, 0) + tensor("t", 4, num_dims=1000),
    "overflowing_dimensions": header(1, 0) + tensor("t", 2**33, 2**33),
    "unknown_tensor_type": header(1, 0) + tensor("t", 4, kind=9999),
    "offset_past_the_end": header(1, 0) + tensor("t", 4, offset=2**50) + bytes(64),
    "same_name_twice": header(2, 0) + tensor("t", 4) * 2 + bytes(64),
    "nested_arrays": header(0, 1) + key("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
    "key_not_utf8": header(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1),
}


@pytest.mark.parametrize("name", list(BROKEN_GGUF))
def test_files_1_a_broken_gguf_file_ends_the_engine_with_its_name_and_the_reason(
    engine: Start, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(BROKEN_GGUF[name])
    sentence, _ = engine_refuses(engine, str(path), "--model", str(path))
    reason = sentence.split("broken.gguf", 1)[1]
    assert len(reason.strip(" :'\".")) > 5, sentence


@pytest.mark.parametrize("name", ["zero_dimension"])
def test_files_1_a_broken_gguf_file_ends_serve_the_same_way(tmp_path: Path, name: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(BROKEN_GGUF[name])
    assert_refused(*start("serve", "--model", str(path)), str(path))


@pytest.mark.parametrize("role", ROLES)
def test_files_1_a_directory_that_holds_no_model_is_refused(tmp_path: Path, role: str) -> None:
    assert_refused(*start(role, "--model", str(tmp_path)), str(tmp_path))


def test_files_1_a_good_file_cut_anywhere_is_refused(engine: Start, tmp_path: Path) -> None:
    whole = resolve("embedded").path.read_bytes()
    for length in (10, 1000, 1_000_000, len(whole) // 2, len(whole) - 1):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        engine_refuses(engine, str(path), "--model", str(path))


# ---- FILES-2: lyogavin/airllm#137 ----

MAX_EXTRA_BYTES = 200_000_000


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def write_with_header(path: Path, header_text: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header_text)) + header_text + data)


def change_header(path: Path, change: Callable[[dict[str, Any], list[str]], None]) -> None:
    tensors, data = read_header(path)
    change(tensors, sorted(name for name in tensors if name != "__metadata__"))
    write_with_header(path, json.dumps(tensors).encode(), data)


def overlap(tensors: dict[str, Any], names: list[str]) -> None:
    tensors[names[1]]["data_offsets"] = list(tensors[names[0]]["data_offsets"])


def backwards(tensors: dict[str, Any], names: list[str]) -> None:
    tensors[names[0]]["data_offsets"].reverse()


def past_the_end(tensors: dict[str, Any], names: list[str]) -> None:
    begin, end = tensors[names[0]]["data_offsets"]
    tensors[names[0]]["data_offsets"] = [begin + 2**40, end + 2**40]


def bad_dtype(tensors: dict[str, Any], names: list[str]) -> None:
    tensors[names[0]]["dtype"] = "F99"


def giant_shape(tensors: dict[str, Any], names: list[str]) -> None:
    tensors[names[0]]["shape"] = [2**40, 2**20]


def negative_shape(tensors: dict[str, Any], names: list[str]) -> None:
    tensors[names[0]]["shape"] = [-1, 64]


def missing_tensor(tensors: dict[str, Any], names: list[str]) -> None:
    tensors["model.surprise.weight"] = tensors.pop(names[0])


def cut_to(length: Callable[[Path], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        size = length(path)
        path.write_bytes(path.read_bytes()[:size])

    return damage


def half_of_the_header(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0] // 2


def half_of_the_data(path: Path) -> int:
    tensors_end = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    return int(tensors_end + (path.stat().st_size - tensors_end) // 2)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "four_bytes": cut_to(lambda _: 4),
    "empty": cut_to(lambda _: 0),
    "half_of_the_header": cut_to(half_of_the_header),
    "half_of_the_data": cut_to(half_of_the_data),
    "one_byte_short": cut_to(lambda path: path.stat().st_size - 1),
    "header_of_2_to_the_63": lambda path: path.write_bytes(struct.pack("<Q", 2**63) + path.read_bytes()[8:]),
    "header_is_a_list": lambda path: write_with_header(path, b"[]", b""),
    "header_is_no_json": lambda path: write_with_header(path, b"{{{{", b""),
    "header_is_empty": lambda path: write_with_header(path, b"{}", b""),
    "offsets_overlap": partial(change_header, change=overlap),
    "offsets_backwards": partial(change_header, change=backwards),
    "offsets_past_the_end": partial(change_header, change=past_the_end),
    "dtype_f99": partial(change_header, change=bad_dtype),
    "giant_shape": partial(change_header, change=giant_shape),
    "negative_shape": partial(change_header, change=negative_shape),
    "missing_tensor": partial(change_header, change=missing_tensor),
}


@pytest.fixture(scope="module")
def base_bytes(engine: Start, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Memory of an engine that was refused before it read anything."""
    empty = str(tmp_path_factory.mktemp("empty"))
    return engine_refuses(engine, empty, "--model", empty)[1].peak_bytes


@pytest.mark.parametrize("name", list(DAMAGE))
def test_files_2_a_damaged_safetensors_file_is_refused_without_a_huge_allocation(
    engine: Start, tmp_path: Path, name: str, base_bytes: int
) -> None:
    path = write_tiny_model(tmp_path / "tiny") / "model.safetensors"
    DAMAGE[name](path)
    _, ended = engine_refuses(engine, str(path.parent), "--model", str(path.parent))
    assert ended.peak_bytes < base_bytes + MAX_EXTRA_BYTES


CONFIGS: dict[str, Any] = {
    "no_json": b"{",
    "list": b"[]",
    "empty": b"",
    "unknown_architecture": {"architectures": ["ZebraForCausalLM"], "model_type": "zebra"},
    "heads_do_not_divide": {"num_attention_heads": 3},
    "negative_layers": {"num_hidden_layers": -1},
    "zero_heads": {"num_attention_heads": 0},
    "giant_layers": {"num_hidden_layers": 10**9},
    "hidden_as_text": {"hidden_size": "64"},
    "unknown_rope": {"rope_scaling": {"rope_type": "zebra", "factor": 2.0}},
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_files_2_a_damaged_config_is_refused(engine: Start, tmp_path: Path, name: str) -> None:
    model, change = write_tiny_model(tmp_path / "tiny"), CONFIGS[name]
    config = model / "config.json"
    if isinstance(change, bytes):
        config.write_bytes(change)
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    engine_refuses(engine, str(model), "--model", str(model))


def test_files_2_serve_refuses_a_damaged_model_before_it_listens(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny") / "model.safetensors"
    DAMAGE["half_of_the_data"](path)
    assert_refused(*start("serve", "--model", str(path.parent)), str(path.parent))


@pytest.mark.parametrize("damaged", ["tokenizer.json", "tokenizer_config.json"])
def test_files_2_a_damaged_tokenizer_is_refused_at_start(tmp_path: Path, damaged: str) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    (model / damaged).write_bytes((model / damaged).read_bytes()[:50])
    assert_refused(*start("serve", "--model", str(model)), damaged)


# ---- FILES-3: ml-explore/mlx-lm#1455 ----

BAD_SETTINGS: list[tuple[tuple[str, ...], str]] = [
    (("--num-draft-tokens", "0"), "--num-draft-tokens"),
    (("--num-draft-tokens", "-1"), "--num-draft-tokens"),
    (("--num-draft-tokens", "10000"), "--num-draft-tokens"),
    (("--num-draft-tokens", "five"), "--num-draft-tokens"),
    (("--num-draft-tokens", "1.5"), "--num-draft-tokens"),
    (("--lookup-min", "5", "--lookup-max", "4"), "--lookup-min"),
    (("--lookup-min", "0"), "--lookup-min"),
    (("--lookup-max", "-1"), "--lookup-max"),
    (("--speculator", "eagle"), "--speculator"),
    (("--speculator", ""), "--speculator"),
    (("--speculator", "none", "--lookup-min", "2"), "--lookup-min"),
    (("--speculator", "none", "--num-draft-tokens", "5"), "--num-draft-tokens"),
    (("--sim-step-ms", "5"), "--sim-step-ms"),
    (("--executor", "sim", "--sim-acceptance", "1.5"), "--sim-acceptance"),
    (("--dtype", "fp8"), "--dtype"),
    (("--device", "tpu"), "--device"),
    (("--max-num-seqs", "0"), "--max-num-seqs"),
    (("--kv-cache-tokens", "5"), "--kv-cache-tokens"),
    (("--max-model-len", "1"), "--max-model-len"),
    (("--max-model-len", "100000000"), "--max-model-len"),
    (("--served-model-name", "My Model"), "--served-model-name"),
    (("--no-such-option", "5"), "--no-such-option"),
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("good") / "tiny"))


@pytest.mark.parametrize(("options", "name"), BAD_SETTINGS, ids=str)
def test_files_3_settings_that_cannot_work_are_refused_at_start_by_name(
    engine: Start, tiny_model: str, options: tuple[str, ...], name: str
) -> None:
    engine_refuses(engine, name, "--model", tiny_model, *options)


@pytest.mark.parametrize(("options", "name"), [BAD_SETTINGS[2], BAD_SETTINGS[5], BAD_SETTINGS[-1]])
def test_files_3_serve_refuses_the_same_settings(options: tuple[str, ...], name: str) -> None:
    assert_refused(*start("serve", *options), name)


@pytest.mark.parametrize("name", ["DRAFTHOUSE_NUM_DRAFT_TOKENS", "DRAFTHOUSE_NO_SUCH_OPTION"])
def test_files_3_the_environment_is_judged_like_the_flags(name: str) -> None:
    ended = run_to_end(DRAFTHOUSE, "engine", within_s=30, environment={name: "0"})
    assert ended.code != 0
    assert name in ended.output or "--num-draft-tokens" in ended.output, ended.output
    assert "Traceback" not in ended.output


def test_files_3_the_config_file_is_judged_like_the_flags(tmp_path: Path) -> None:
    for text, name in (
        ("num_draft_tokens = 0", "num_draft_tokens"),
        ("surprise = 1", "surprise"),
        ("= 5", "config.toml"),
    ):
        path = tmp_path / "config.toml"
        path.write_text(text)
        ended = run_to_end(DRAFTHOUSE, "engine", "--config", str(path), within_s=30)
        assert ended.code != 0
        assert name in ended.output.replace("-", "_") or name in ended.output, ended.output
        assert "Traceback" not in ended.output


def test_files_3_a_frontend_with_another_vocabulary_than_the_engine_is_refused(tmp_path: Path) -> None:
    """Drafters with weights of their own come later; the pair that can disagree today is engine and frontend."""
    model, address = write_tiny_model(tmp_path / "tiny"), f"ipc://{tmp_path}/engine.sock"
    command = [DRAFTHOUSE, "engine", "--model", str(model), "--executor", "sim", "--listen", address]
    command += ["--served-model-name", "one"]
    engine = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = free_port()
        options = ("--engine", address, "--model", "embedded", "--served-model-name", "one", "--port", str(port))
        ended = run_to_end(DRAFTHOUSE, "frontend", *options, within_s=30)
        assert ended.code != 0
        assert "vocabulary" in ended.output
        assert "Traceback" not in ended.output
    finally:
        engine.kill()
        engine.wait()
