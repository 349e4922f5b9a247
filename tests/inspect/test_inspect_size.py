"""`size`: what a model's KV takes, from its config alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import profiles
from kvtier_inspect import cli, modelconfig, planning, published
from kvtier_inspect.size import budget, link_loads, named_link, size

if TYPE_CHECKING:
    from pathlib import Path


def sized(model: str, tokens: int, **options: int) -> Any:
    """Return the size of a published model."""
    return size(modelconfig.named(model), tokens, **options)


def config(**fields: Any) -> modelconfig.ModelKV:
    """Return the KV of a small model with these fields in its config."""
    usual = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8}
    return modelconfig.from_config("made up", {**usual, **fields})


def test_the_literatures_numbers() -> None:
    """7B with multi-head attention at 4K is 2.0 GiB; 405B at 8K times 100 is 423 GB."""
    assert sized("Llama-2-7B", 4096).request_bytes == 2 << 30
    assert round(sized("Llama-3.1-405B", 8192, concurrency=100).total_bytes / 1e9) == 423


def test_the_literatures_link() -> None:
    """OPT-66B, 512 tokens, 10 requests/s: 96.6 Gbit/s, which is the literature's 90 Gibit/s."""
    bits_per_s = sized("facebook/opt-66b", 512).request_bytes * 10 * 8
    assert round(bits_per_s / 1e9, 1) == 96.6
    assert round(bits_per_s / 2**30, 1) == 90.0


@pytest.mark.parametrize("name", sorted(set(profiles.MODELS) & set(published.PUBLISHED)))
def test_names_agree_with_the_profiles(name: str) -> None:
    """A model that kvtier.profiles knows too has the same bytes per token there, in 16 bits."""
    model = modelconfig.named(name)
    assert model.token_bytes == profiles.MODELS[name].kv_token_bytes
    assert model.layers == profiles.MODELS[name].layers


def test_every_profile_is_known_by_name() -> None:
    """What can be planned for can be sized."""
    assert set(profiles.MODELS) <= set(published.PUBLISHED)


@pytest.mark.parametrize(
    ("fields", "values", "words"),
    [
        ({}, 1024, "multi-head"),
        ({"num_key_value_heads": 2}, 256, "grouped-query"),
        ({"num_key_value_heads": None}, 1024, "multi-head"),
        ({"multi_query": True}, 128, "multi-query"),
        ({"num_key_value_heads": 2, "head_dim": 128}, 512, "grouped-query"),
        ({"num_key_value_heads": 2, "v_head_dim": 32}, 192, "grouped-query"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 576, "latent"),
        ({"attn_config": {"kv_n_heads": 4}}, 512, "grouped-query"),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.25}, 1024, "multi-head"),
    ],
)
def test_what_a_layer_keeps(fields: dict[str, Any], values: int, words: str) -> None:
    """Heads, widths and latents decide; rotary settings do not."""
    model = config(**fields)
    assert [group.values for group in model.groups] == [values]
    assert model.attention.startswith(words)


def test_layers_may_differ() -> None:
    """A list of KV heads is one number per layer."""
    model = config(num_key_value_heads=[1, 1, 2, 2, 2, 2, 4, 8])
    assert model.token_bytes == (2 * 1 + 4 * 2 + 4 + 8) * 128 * 2


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({"model_type": "mistral", "sliding_window": 100}, 8),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "gemma2", "sliding_window": 100}, 4),
        ({"sliding_window": 100, "sliding_window_pattern": 4}, 6),
        ({"sliding_window": 100, "use_sliding_window": False}, 0),
        ({"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 5}, 3),
        ({"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"] * 4}, 4),
    ],
)
def test_windows_keep_the_last_tokens(fields: dict[str, Any], windowed: int) -> None:
    """A sliding layer keeps no more than its window; how many slide is the config's to say."""
    model = config(**fields)
    layer = 1024 * 2
    assert model.kept_bytes(50) == 8 * layer * 50
    assert model.kept_bytes(1000) == layer * (windowed * 100 + (8 - windowed) * 1000)
    assert bool(windowed) == any("does not restore" in note for note in model.notes)
    assert model.block_bytes(256) == 8 * layer * 256


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": ["linear_attention"] * 6 + ["full_attention"] * 2},
        {"layers_block_type": ["mamba"] * 6 + ["attention"] * 2},
        {"attn_layer_period": 4, "attn_layer_offset": 1},
        {"full_attention_interval": 4},
        {"hybrid_override_pattern": "M-M*M-M*".replace("-", "M")},
    ],
)
def test_recurrent_layers_are_said_and_not_counted(fields: dict[str, Any]) -> None:
    """Of a hybrid model the layers that attend are counted, and it says that the others are not."""
    model = config(**fields)
    assert model.kept_bytes(10) == 2 * 1024 * 2 * 10
    assert any("recurrent" in note for note in model.notes)
    assert model.layers == 8


def test_a_model_without_attention_has_no_size() -> None:
    """It is an answer in words, not a zero."""
    with pytest.raises(ValueError, match="does not grow"):
        size(config(model_type="mamba"), 100)


@pytest.mark.parametrize(
    ("fields", "asked", "dtype"),
    [
        ({"torch_dtype": "float16"}, "", "float16"),
        ({"dtype": "float32"}, "", "float32"),
        ({"torch_dtype": "float16"}, "fp8", "float8_e4m3fn"),
        ({}, "", "bfloat16"),
        (
            {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
            "",
            "float8_e4m3fn",
        ),
    ],
)
def test_the_dtype_is_the_configs(fields: dict[str, Any], asked: str, dtype: str) -> None:
    """What is asked for comes first, then what the config says, then an assumption it says."""
    base = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8}
    model = modelconfig.from_config("made up", {**base, **fields}, asked)
    assert model.dtype == dtype
    assert bool(model.notes) == (not asked and not {"torch_dtype", "dtype"} & set(fields))


def test_a_text_model_within_another() -> None:
    """A multimodal config's text model is what counts, and its dtype may be the outer one's."""
    inner = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    model = modelconfig.from_config("outer", {"torch_dtype": "float32", "text_config": inner})
    assert model.token_bytes == 4 * 2 * 64 * 4


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=9,
)
config_names = st.sampled_from(
    [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "kv_lora_rank",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "torch_dtype",
        "model_type",
        "text_config",
        "quantization_config",
        "attn_config",
        "block_types",
        "hybrid_override_pattern",
        "attn_layer_period",
        "attn_layer_offset",
        "num_kv_shared_layers",
        "cross_attention_layers",
    ]
)


@given(st.dictionaries(config_names, json_values, max_size=6))
def test_any_config_is_sized_or_refused_in_words(fields: dict[str, Any]) -> None:
    """A hostile or odd config gives a size or a ``ValueError``, nothing else."""
    base = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8}
    try:
        model = modelconfig.from_config("made up", {**base, **fields})
        made = size(model, 1000)
    except ValueError:
        return
    assert 0 < made.request_bytes <= model.token_bytes * 1000


def test_budgets_count_whole_blocks() -> None:
    """A budget holds whole blocks and whole requests; on an SSD a slot has its header too."""
    made = sized("Llama-3-8B", 1000)
    assert (made.blocks, made.block_bytes, made.slot_bytes) == (3, 32 << 20, (32 << 20) + 4096)
    host = budget(made, "host", 10 * (32 << 20))
    assert (host.blocks, host.tokens, host.requests) == (10, 2560, 3)
    ssd = budget(made, "ssd", 10 * (32 << 20))
    assert (ssd.blocks, ssd.requests) == (9, 3)


def test_the_slowest_link_fills_first() -> None:
    """Links are in the order in which they saturate."""
    loads = link_loads(10**9, 5.0)
    assert [each.share for each in loads] == sorted((each.share for each in loads), reverse=True)
    assert loads[0].name == "NIC 10G"
    assert loads[0].requests_per_s_max == pytest.approx(1.15)
    assert named_link("nic 10g").name == "NIC 10G"
    assert named_link("25Gbit/s").bytes_per_s == 25e9 / 8


@pytest.mark.parametrize(
    ("text", "rate"),
    [("7GB/s", 7e9), ("8 Gbit/s", 1e9), ("8Gb/s", 1e9), ("1GiB", 2.0**30), ("5e9", 5e9)],
)
def test_rates_in_bits_and_bytes(text: str, rate: float) -> None:
    """B is bytes, b and bit are bits."""
    assert planning.link_cost("--link", text).bytes_per_s == rate


@pytest.mark.parametrize("text", ["", "fast", "7 parsecs", "-1GB/s", "7G B"])
def test_what_is_no_rate(text: str) -> None:
    """The error names the option and what is known."""
    with pytest.raises(ValueError, match=r"--link.*SSD 7 GB/s"):
        planning.link_cost("--link", text)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It takes a config.json or its folder, and prints raw numbers as JSON."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(published.PUBLISHED["OPT-66B"])))
    for where in (str(path), str(tmp_path), "OPT-66B"):
        asked = ["size", where, "--tokens", "512", "--rate", "10", "--ssd", "2TB", "--json"]
        assert cli.run(asked) == 0
        value = json.loads(capsys.readouterr().out)
        assert value["request_bytes"] == 512 * 2359296
        assert value["bytes_per_s"] == 10 * 512 * 2359296
        assert value["links"][0]["name"] == "NIC 10G"
        assert value["budgets"][0]["requests"] == 1655
    assert cli.run(["size", "Llama-2-7B", "--tokens", "4096"]) == 0
    assert "2.0 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object"),
        ("{}", "num_hidden_layers"),
        ('{"num_hidden_layers": 1e9, "num_attention_heads": 1}', "not an integer"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_config_is_wrong_usage(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, content: str, words: str
) -> None:
    """A file that is no config gives a message that names it, and exit code 2."""
    path = tmp_path / "config.json"
    path.write_text(content)
    assert cli.run(["size", str(path), "--tokens", "1"]) == 2
    said = capfd.readouterr().err
    assert words in said
    assert "config.json" in said


def test_an_unknown_model(capfd: pytest.CaptureFixture[str]) -> None:
    """A name nobody knows lists those that are known."""
    assert cli.run(["size", "no-such-model", "--tokens", "1"]) == 2
    assert "Llama-3.1-405B" in capfd.readouterr().err
