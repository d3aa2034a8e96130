"""SentencePiece vocabularies from GGUF metadata encode as the SentencePiece library does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tee_runner.errors import ModelError, UnsupportedModelError
from tee_runner.models import Tokenizer
from tee_runner.models.gguf_metadata import GgufMetadata
from tee_runner.models.gguf_tokenizer import build_tokenizer

from . import sentencepiece_oracle as oracle

CORPUS = [
    "The quick brown fox jumps over the lazy dog; then the other dogs bark, and the fox is gone.",
    "def area(width: float, height: float) -> float:  return width * height  # 12 × 34 = 408",
    "Il était une fois, dans une forêt, un renard très rusé qui mangeait trois pommes par jour.",
    "日本語の文章です。今日は天気がいいですね。東京は日本の首都です。",
    "hahahaha aaaaaaaa bbbb abababab ------ ===== ...... 1234567890 2024-11-30",
    "Привет, мир! Это простой текст для проверки токенизатора, и ещё немного текста.",
] * 4
SPACE = oracle.SPACE
USER_DEFINED = [
    "\n",
    "\n\n",
    "\n\n\n",
    *(SPACE * n for n in (2, 3, 4)),
    "\t",
    "\t\t",
    "<table>",
    "</li>",
    "[image]",
]
PARTS = [
    *("the", " the", " ", "  ", "\n", "\t", "\r", "\x00", SPACE, "ha", "a", "ab", "b", "-", "=", "12", "é"),
    *(
        "<table>",
        "<table",
        "</li>",
        "[image]",
        "<s>",
        "<0x0A>",
        "日本",
        "です",
        "été",
        "Пр",
        "🙂",
        "👩\u200d👧",
    ),
]
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(PARTS), max_size=25).map("".join),
    st.builds(lambda part, count: part * count, st.sampled_from(PARTS), st.integers(1, 40)),
)


@pytest.fixture(scope="module")
def proto() -> Any:
    return oracle.train(CORPUS, vocab_size=640, user_defined=USER_DEFINED)


def build(metadata: dict[str, Any], directory: Path) -> Tokenizer:
    built = build_tokenizer(GgufMetadata(metadata), context_length=512)
    (directory / "tokenizer.json").write_text(built.tokenizer_json, encoding="utf-8")
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def tokenizer(proto: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build(oracle.metadata_of(proto), tmp_path_factory.mktemp("spm"))


@pytest.fixture(scope="module")
def reference(proto: Any) -> Any:
    return oracle.processor(proto)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
def test_any_text(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    specials = ("<pad>", "<s>", "</s>", "<unk>")
    plain = text
    for special in specials:  # SentencePiece does not read these in a text; we do, for chat templates
        plain = plain.replace(special, "")
    ids = reference.encode(plain)
    assert tokenizer.encode(plain) == ids
    assert (
        tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids) == plain.replace(SPACE, " ")
    )


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_streaming_gives_the_same_text(tokenizer: Tokenizer, text: str) -> None:
    decoder = tokenizer.incremental_decoder()
    ids = tokenizer.encode(text)
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == tokenizer.decode(ids)


def test_the_metadata_come_back(proto: Any) -> None:
    metadata = oracle.metadata_of(proto)
    again = oracle.proto_of(metadata)
    assert [(p.piece, p.type, p.score) for p in again.pieces] == [
        (p.piece, p.type, p.score) for p in proto.pieces
    ]


def test_control_tokens_and_the_begin_token(tokenizer: Tokenizer, reference: Any) -> None:
    assert tokenizer.encode("a</s>b") == [*reference.encode("a"), 1, *reference.encode("b")]
    assert tokenizer.encode("a", add_special_tokens=True) == [2, *reference.encode("a")]
    assert tokenizer.decode([2, *reference.encode("a"), 1]) == "a"
    # A byte piece spelled out in a text is text.
    assert tokenizer.encode("<0x0A>") == reference.encode("<0x0A>") != [reference.piece_to_id("<0x0A>")]


@pytest.mark.parametrize(
    ("changes", "named", "error"),
    [
        ({"add_space_prefix": None}, "add_space_prefix", UnsupportedModelError),
        ({"add_space_prefix": True}, "add_space_prefix", UnsupportedModelError),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces", UnsupportedModelError),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap", UnsupportedModelError),
        ({"scores": None}, "scores", ModelError),
        ({"scores": [1.0]}, "scores", ModelError),
        ({"scores": [float("nan")] * 640}, "scores", ModelError),
        ({"token_type": [7] * 640}, "token type 7", UnsupportedModelError),
        ({"token_type": [1] * 640}, "byte tokens", ModelError),
    ],
)
def test_what_cannot_be_rebuilt_is_named(
    changes: dict[str, Any], named: str, error: type[ModelError], proto: Any
) -> None:
    metadata = oracle.metadata_of(proto) | {f"tokenizer.ggml.{key}": v for key, v in changes.items()}
    present = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(error, match=named):
        build_tokenizer(GgufMetadata(present), context_length=512)


def test_hostile_pieces_are_refused(proto: Any) -> None:
    metadata = oracle.metadata_of(proto)
    tokens = metadata["tokenizer.ggml.tokens"]
    long = {**metadata, "tokenizer.ggml.tokens": [*tokens[:-1], "x" * 257]}
    with pytest.raises(ModelError, match="257 characters"):
        build_tokenizer(GgufMetadata(long), context_length=512)
    twice = {**metadata, "tokenizer.ggml.tokens": [*tokens[:-1], SPACE * 2]}
    with pytest.raises(ModelError, match="with and once without spaces"):
        build_tokenizer(GgufMetadata(twice), context_length=512)
