"""What an engine may be told, and what it refuses."""

import pytest

from deploy.serve import options as serve_options
from engine.config import EngineConfig
from frontend.config import FrontendConfig
from protocol.options import OptionsError, parse, table

CURVE = ("--curve-key-file", "k", "--curve-client-keys", "c")


def config(*arguments: str) -> EngineConfig:
    return parse(EngineConfig, arguments, {}, program="engine")


def test_the_promised_defaults():
    got = config()
    assert (got.model, got.speculator, got.num_draft_tokens, got.lookup_min, got.lookup_max) == (
        "embedded", "ngram", None, 2, 4,
    )  # fmt: skip
    assert (got.max_num_seqs, got.max_num_batched_tokens, got.block_size, got.prefix_caching) == (64, 512, 16, True)
    assert (got.executor, got.engine_id, got.sim_draft_len) == ("model", "0", 5)
    assert config("--speculator", "none").sim_draft_len == 0
    assert config("--num-draft-tokens", "7").sim_draft_len == 7


def test_draft_lengths_are_fixed_unless_said_otherwise():
    assert (config().draft_len_by_batch, config().adaptive_draft) == (None, False)
    got = config("--executor", "sim", "--draft-len-by-batch", "1:5,8:0", "--adaptive-draft", "true")
    assert (got.draft_len_by_batch, got.adaptive_draft) == ("1:5,8:0", True)


def test_options_of_a_drafter_are_taken_when_it_is_one_of_several():
    got = config("--speculator", "first_of:prediction,ngram", "--lookup-max", "6")
    assert (got.speculator, got.lookup_max) == ("first_of:prediction,ngram", 6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sim-step-ms", "5"), "--sim-step-ms works only with --executor sim"),
        (("--sim-prefill-ms", "5"), "--sim-prefill-ms works only with --executor sim"),
        (("--sim-acceptance", "1"), "--sim-acceptance works only with --executor sim"),
        (("--executor", "sim", "--dtype", "bf16"), "--dtype says nothing with --executor sim"),
        (("--executor", "sim", "--device", "cuda"), "--device says nothing with --executor sim"),
        (("--executor", "sim", "--memory-share", "0.5"), "--memory-share says nothing with --executor sim"),
        (("--kv-cache-tokens", "64", "--memory-share", "0.5"), "--memory-share says nothing with --kv-cache-tokens"),
        (("--memory-share", "0"), "--memory-share"),
        (("--speculator", "eagle9"), "--speculator 'eagle9' is not known; known speculators are none, ngram"),
        (("--speculator", ""), "--speculator '' is not known"),
        (("--speculator", "first_of:ngram,ngram"), "--speculator first_of:ngram,ngram names ngram twice"),
        (("--speculator", "first_of:draft_model,eagle"), "draft_model and eagle need a --draft-model each"),
        (("--speculator", "first_of:ngram,none"), "--speculator first_of:ngram,none cannot ask 'none'"),
        (("--speculator", "none", "--lookup-min", "2"), "--lookup-min works only with --speculator ngram or"),
        (
            ("--speculator", "eagle", "--mtp-zero-centred", "true"),
            "--mtp-zero-centred works only with --speculator mtp",
        ),
        (("--speculator", "mtp", "--tree-top-k", "2"), "--tree-top-k works only with --speculator eagle or"),
        (("--speculator", "none", "--lookup-max", "2"), "--lookup-max works only with --speculator ngram or"),
        (("--speculator", "none", "--num-draft-tokens", "2"), "--num-draft-tokens says nothing"),
        (("--draft-len-by-batch", "5"), "'5' is not BATCH_SIZE:DRAFT_TOKENS"),
        (("--draft-len-by-batch", "1:5,1:3"), "batch sizes rise"),
        (("--num-draft-tokens", "3", "--draft-len-by-batch", "1:4"), "--draft-len-by-batch 1:4 allows more"),
        (("--speculator", "none", "--draft-len-by-batch", "1:4"), "--draft-len-by-batch says nothing"),
        (("--speculator", "none", "--adaptive-draft", "true"), "--adaptive-draft says nothing"),
        (("--draft-model", "embedded"), "--draft-model works only with --speculator draft_model"),
        (("--draft-sampling", "greedy"), "--draft-sampling works only with --speculator draft_model"),
        (("--lookup-min", "5"), "--lookup-min 5 is greater than --lookup-max 4"),
        (("--kv-cache-tokens", "8"), "--kv-cache-tokens 8 is less than one --block-size 16"),
        (("--kv-cache-tokens", "99999999999"), "--kv-cache-tokens: expected int <="),
        (("--listen", "http://x"), "no engine address"),
        (("--listen", "tcp://0.0.0.0:5570"), "without keys"),
        (("--listen", "tcp://10.1.2.3:5570"), "--allow-plaintext-tcp"),
        (("--curve-key-file", "k"), "--curve-key-file works only together with --curve-client-keys"),
        (("--listen", "ipc:///run/x", *CURVE), "--curve-key-file says nothing about ipc:///run/x"),
        (("--listen", "tcp://0.0.0.0:5570", "--allow-plaintext-tcp", *CURVE), "contradict"),
        (("--engine-id", "a b"), "--engine-id"),
        (("--engine-id", ""), "--engine-id"),
        (("--served-model-name", "my model"), "would read 0"),
        (("--served-model-name", 'a"b'), "would read 0"),
        (("--served-model-name", "a\nb"), "would read 0"),
        (("--served-model-name", ""), "is empty"),
        (("--sim-acceptance", "1.5", "--executor", "sim"), "--sim-acceptance"),
    ],
)
def test_contradictions_and_bad_values_are_refused_by_name(arguments: tuple[str, ...], words: str):
    with pytest.raises(OptionsError) as caught:
        config(*arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///run/x"])
def test_private_addresses_need_no_permission(address: str):
    assert config("--listen", address).listen == address


def test_a_socket_path_that_no_system_can_bind_is_refused():
    with pytest.raises(OptionsError, match="is longer than 100 bytes"):
        config("--listen", f"ipc:///run/{'x' * 120}")


def test_with_keys_an_engine_may_listen_where_others_can_reach_it():
    assert config("--listen", "tcp://0.0.0.0:5570", *CURVE).curve_key_file == "k"


def test_plaintext_beyond_this_machine_is_possible_when_said():
    assert config("--listen", "tcp://0.0.0.0:5570", "--allow-plaintext-tcp").allow_plaintext_tcp


def test_serve_takes_every_option_of_both_roles_but_what_it_decides_itself():
    both = set(table(EngineConfig)) | set(table(FrontendConfig)) | {"frontends", "engines"}
    assert set(serve_options()) == both - {
        "listen", "allow_plaintext_tcp", "engine", "reuse_port", "curve_key_file", "curve_client_keys",
        "curve_server_key_file", "alive_file",
    }  # fmt: skip


def test_options_that_two_roles_share_have_one_type_and_default():
    engine, frontend = table(EngineConfig), table(FrontendConfig)
    shared = set(engine) & set(frontend)
    assert shared == {
        "model", "served_model_name", "log_level", "log_format", "drain_timeout_s", "curve_key_file", "allow_plaintext_tcp",
    }  # fmt: skip
    for name in shared:
        assert engine[name].default == frontend[name].default
