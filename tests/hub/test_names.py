"""What a name means, which files are one model, and which of them is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import HubError
from engine.hub.names import HubName, parse_name, required_name, short_name
from engine.hub.variants import FOLDER, RepoFile, choose, named, size, variants

GB = 10**9


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("anna/tiny", HubName("anna/tiny")),
        ("anna/tiny-1.5B:Q4_K_M", HubName("anna/tiny-1.5B", "Q4_K_M")),
        ("hf.co/anna/tiny:Q8_0", HubName("anna/tiny", "Q8_0")),
        ("https://huggingface.co/anna/tiny", HubName("anna/tiny")),
        ("https://huggingface.co/anna/tiny/tree/v2", HubName("anna/tiny", None, None, "v2")),
        (
            "https://huggingface.co/anna/tiny/resolve/main/sub%20folder/a.gguf?download=true",
            HubName("anna/tiny", None, "sub folder/a.gguf", "main"),
        ),
        ("https://huggingface.co/anna/tiny/blob/main/a.gguf", HubName("anna/tiny", None, "a.gguf", "main")),
    ],
)
def test_names_and_addresses(text, name):
    assert parse_name(text) == required_name(text) == name


@pytest.mark.parametrize(
    "text", ["tiny", "models/tiny.gguf", "./anna/tiny", "/anna/tiny", "a/b/c", "C:\\a", "", "~/a", "a/b:"]
)
def test_what_can_only_be_a_path(text):
    assert parse_name(text) is None
    with pytest.raises(HubError, match="no name of a model"):
        required_name(text)


@pytest.mark.parametrize(
    "text",
    ["https://example.org/a/b", "ftp://huggingface.co/a/b", "https://huggingface.co/a", "hf.co/a/../b/resolve/m/f"],
)
def test_addresses_of_something_else(text):
    with pytest.raises(HubError, match="address"):
        parse_name(text)


@given(st.text(max_size=60))
def test_any_text_is_a_name_a_path_or_a_sentence(text):
    try:
        name = parse_name(text)
    except HubError as error:
        assert str(error).endswith(".")
    else:
        assert name is None or (name.repo.count("/") == 1 and ".." not in (name.file or "").split("/"))


def test_short_names():
    assert short_name(Path("/m/tiny-Q8_0.gguf")) == "tiny-Q8_0" and short_name(Path("/m/tiny")) == "tiny"
    assert short_name(Path("/c/models--anna--tiny--2/snapshots/c0ffee")) == "anna/tiny--2"


def test_files_of_one_model():
    files = [
        RepoFile("config.json", 1), RepoFile("model-00001-of-00002.safetensors", 8), RepoFile("tokenizer.json", 2),
        RepoFile("model-00002-of-00002.safetensors", 8), RepoFile("consolidated.safetensors", 16), RepoFile("x.bin", 9),
        RepoFile("a-Q4_K_M.gguf", 4), RepoFile("a.q8_0.gguf", 7), RepoFile("mmproj-a-F16.gguf", 1),
        RepoFile("big/a-BF16-00001-of-00002.gguf", 10), RepoFile("big/a-BF16-00002-of-00002.gguf", 11),
        RepoFile("a-IQ2_XS-00001-of-00003.gguf", 3),
    ]  # fmt: skip
    found = {variant.label: [file.path for file in variant.files] for variant in variants(files)}
    assert found == {
        "Q4_K_M": ["a-Q4_K_M.gguf"],
        "Q8_0": ["a.q8_0.gguf"],
        FOLDER: [
            "config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        ],
        "BF16": ["big/a-BF16-00001-of-00002.gguf", "big/a-BF16-00002-of-00002.gguf"],
    }  # fmt: skip


def test_projectors_and_importance_matrices_are_no_models():
    names = (
        "mmproj-a-F16",
        "a.mmproj-Q8_0",
        "a-mmproj-model-f16",
        "imatrix",
        "a.imatrix",
        "a_b-imatrix",
        "imatrix_unsloth",
    )
    files = [RepoFile(f"{name}.gguf", 1) for name in names]
    kept = [RepoFile("a.Q8_0.gguf", 8), RepoFile("a-Q4_K_M-imatrix.gguf", 4), RepoFile("minimatrix-Q6_K.gguf", 6)]
    assert [variant.label for variant in variants([*files, *kept])] == ["Q4_K_M", "Q6_K", "Q8_0"]


def test_two_models_of_one_type_are_told_apart_by_their_files():
    found = variants([RepoFile("a-Q8_0.gguf", 1), RepoFile("b-Q8_0.gguf", 2)])
    assert [variant.label for variant in found] == ["a-Q8_0", "b-Q8_0"]
    assert named(found, "B-q8_0.gguf", "x/y").label == "b-Q8_0"
    with pytest.raises(HubError, match="it has a-Q8_0, b-Q8_0"):
        named(found, "Q8_0", "x/y")


@pytest.mark.parametrize(("free", "label"), [(64, "Q8_0"), (9, "Q6_K"), (6, "Q4_K_M"), (4, "Q2_K")])
def test_the_best_that_fits(free, label):
    sizes = {"Q2_K": 2.6, "Q4_K_M": 4.2, "Q6_K": 6.0, "Q8_0": 8.1, "BF16": 16.0}
    files = [RepoFile(f"a-{kind}.gguf", int(size * GB)) for kind, size in sizes.items()]
    assert choose(variants(files), "x/y", free * GB).variant.label == label


def test_nothing_fits():
    with pytest.raises(HubError, match="x/y:Q8_0 takes it all the same"):
        choose(variants([RepoFile("a-Q8_0.gguf", 8 * GB)]), "x/y", 4 * GB)


def test_sixteen_bits_where_there_is_nothing_else():
    files = [RepoFile("config.json", 1), RepoFile("model.safetensors", 2 * GB), RepoFile("a-F16.gguf", 2 * GB)]
    assert choose(variants(files), "x/y", 64 * GB).variant.label == "F16"
    assert choose(variants(files[:2]), "x/y", 64 * GB).variant.label == FOLDER


def test_sizes_for_reading() -> None:
    """Three digits, and what they round to a thousand of a unit is one of the next."""
    told = {0: "0 B", 999: "999 B", 1000: "1 KB", 999_499: "999 KB", 999_500: "1 MB", 999_600_000: "1 GB"}
    told |= {4_920_000_000: "4.92 GB", 999_600_000_000: "1000 GB", 1_234_000_000_000: "1234 GB"}
    assert {count: size(count) for count in told} == told
