"""Tokenizer: equality with transformers, exact streaming, end-of-text ids."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from tee_runner.errors import InvalidRequestError, ModelError, UnsupportedModelError
from tee_runner.models import Tokenizer
from tee_runner.models.gguf_metadata import GgufMetadata
from tee_runner.models.gguf_tokenizer import build_tokenizer

from .conftest import MERGES, SPECIALS, VOCAB, small_tokenizer

FRAGMENTS = [
    "The quick brown fox", "don't can't we'll I'VE it's", "Ünïcödé ñandú façade", "e\u0301 vs \u00e9",
    "日本語のテキスト", "中文字符，标点。", "한국어 문장", "Здравствуй, мир", "مرحبا بالعالم", "नमस्ते दुनिया",
    "😀😃😄", "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈", "def f(x):\n    return x**2  # comment\n", "\tif (a && b) { c[i]++; }\r\n",
    "SELECT * FROM t WHERE id=42;", "<div class='a'>&amp;</div>", '{"k": [1, 2.5e-3, null]}',
    " leading", "trailing ", "  two  spaces  ", "\n\n\n", "\t\t", " \n \t ", "\u00a0\u2003wide\u3000space",
    "0", "12345", "3.14159", "1,000,000", "2024-01-31T12:00:00Z", "0xDEADBEEF", "½ ٣٤ Ⅷ",
    "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<|im_start", "|im_end|>", "<repo_name>x<file_sep>",
    "a" * 100, "!?.,;:-_()[]{}", "C:\\path\\file", "https://example.org/a?b=c&d=%20#e", "\u200b\ufeff\u202e",
    "\u0000\u0001\u007f", "\ufffd", "x\u0301\u0302\u0303", "ℵ₀ ∑∫√ ≤≥≠", "🇩🇪🇫🇷", "ǅ ß İ ı",
]  # fmt: skip


def texts() -> list[str]:
    """Every fragment, and random joins of them."""
    rng = random.Random(5)
    joined = ["".join(rng.choices(FRAGMENTS, k=rng.randint(2, 6))) for _ in range(200)]
    return ["", *FRAGMENTS, *joined]


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    decoder = tokenizer.incremental_decoder(skip_special_tokens=skip)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer(smollm2_dir)


@pytest.mark.model
def test_encode_equals_transformers(smollm2: Tokenizer, smollm2_dir: Path, smollm2_gguf: Path) -> None:
    imported = AutoTokenizer.from_pretrained(smollm2_dir)
    from_gguf = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    # transformers' GGUF reader gives every model GPT-2's splitting; SmolLM2 splits digits off first.
    backend = from_gguf.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    for text in texts():
        ids = smollm2.encode(text)
        assert ids == imported(text)["input_ids"]
        assert ids == from_gguf(text)["input_ids"]
        assert ids == smollm2.encode(text, add_special_tokens=True)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
        assert smollm2.decode(ids) == imported.decode(ids, skip_special_tokens=True)


@pytest.mark.model
@pytest.mark.parametrize("skip", [True, False])
def test_streaming_default_model(smollm2: Tokenizer, skip: bool) -> None:
    for text in texts():
        ids = smollm2.encode(text)
        pieces = stream(smollm2, ids, skip=skip)
        assert "".join(pieces) == smollm2.decode(ids, skip_special_tokens=skip)
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(pieces)


@pytest.mark.model
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=60))
def test_streaming_arbitrary_ids_is_exact(ids: list[int], smollm2: Tokenizer) -> None:
    for skip in (True, False):
        assert "".join(stream(smollm2, ids, skip=skip)) == smollm2.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Nearly every token is one byte: streams break inside characters all the time."""
    directory = tmp_path_factory.mktemp("bytewise")
    small_tokenizer().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


BYTE_ID = {character: i for i, character in enumerate(VOCAB)}


def byte_ids(data: bytes) -> list[int]:
    """Token ids of single bytes, through the printable stand-ins of byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(shifted)}
    return [BYTE_ID[table[b]] for b in data]


PIECES = st.sampled_from(
    ["a", "é", "日", "😀", "\ufffd", b"\xff", b"\x80", b"\xe6\x97", b"\xf0\x9f\x98", b"\xed\xa0\x80"]
)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(PIECES, max_size=40), repeat=st.sampled_from([1, 1, 30]))
def test_streaming_broken_utf8_is_exact(pieces: list[str | bytes], repeat: int, bytewise: Tokenizer) -> None:
    data = b"".join(p.encode() if isinstance(p, str) else p for p in pieces * repeat)[:600]
    ids = byte_ids(data)
    expected = data.decode("utf-8", errors="replace")
    assert bytewise.decode(ids) == expected
    assert "".join(stream(bytewise, ids, skip=True)) == expected


def test_a_character_appears_as_soon_as_it_is_complete(bytewise: Tokenizer) -> None:
    assert stream(bytewise, byte_ids("aé😀".encode()), skip=True) == ["a", "", "é", "", "", "", "😀", ""]
    assert stream(bytewise, byte_ids(b"\xf0\x9f\x98"), skip=True) == ["", "", "", "\ufffd"]


def test_long_broken_runs_do_not_grow_the_window(bytewise: Tokenizer) -> None:
    decoder = bytewise.incremental_decoder()
    for token_id in byte_ids(b"\xff" * 500):
        decoder.push(token_id)
        assert len(decoder._ids) <= 2 * 33


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The decoder of Llama 2 and Mistral: word marks, byte fall-back, a stripped first space."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁a", "b", "▁", "▁▁", "é", "日"]
    tokenizer = HfTokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.normalizer = normalizers.Prepend("▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    directory = tmp_path_factory.mktemp("fallback")
    tokenizer.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(
        st.sampled_from([1, 2, 3 + 0xE6, 3 + 0x97, 3 + 0xA5, 3 + 0x61, 3 + 0xFF, *range(259, 265)]),
        max_size=30,
    )
)
def test_streaming_byte_fallback_is_exact(ids: list[int], byte_fallback: Tokenizer) -> None:
    for skip in (True, False):
        pieces = stream(byte_fallback, ids, skip=skip)
        assert "".join(pieces) == byte_fallback.decode(ids, skip_special_tokens=skip)


def write_tokenizer(directory: Path, **files: Any) -> Path:
    small_tokenizer().save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def test_end_ids_are_collected_from_every_configuration(tmp_path: Path) -> None:
    write_tokenizer(
        tmp_path,
        generation_config={"eos_token_id": [5, 7]},
        config={"eos_token_id": 9},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"},
    )
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.eos_ids == {5, 7, 9, 261}
    assert tokenizer.bos_id == 260
    assert tokenizer.special_ids == {260, 261}


@pytest.mark.parametrize("value", [-1, 262, "2", [True], [1.0], {"a": 1}, [[1]], list(range(100))])
def test_malformed_end_ids(value: object, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ModelError, match="eos_token_id"):
        Tokenizer(tmp_path)


def test_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer(tmp_path)
    with pytest.raises(ModelError, match="bos_token"):
        Tokenizer(write_tokenizer(tmp_path, tokenizer_config={"bos_token": 3}))


def test_stored_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    stored = small_tokenizer()
    stored.enable_truncation(3)
    stored.enable_padding(length=8)
    stored.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("abcdefghijkl")) == 12


def test_bad_requests(bytewise: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError):
        bytewise.encode("\ud800")
    for ids in ([-1], [262], [0, 2**40]):
        with pytest.raises(InvalidRequestError):
            bytewise.decode(ids)
    with pytest.raises(InvalidRequestError, match="chat template"):
        bytewise.apply_chat_template([{"role": "user", "content": "x"}])


def rebuilt(pre: str, **changes: Any) -> HfTokenizer:
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": VOCAB,
        "tokenizer.ggml.token_type": [1] * (len(VOCAB) - 2) + [3, 3],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 261,
    }
    values.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    built = build_tokenizer(GgufMetadata(values), context_length=512)
    tokenizer: HfTokenizer = HfTokenizer.from_str(built.tokenizer_json)
    return tokenizer


def test_pre_tokenizers_split_as_the_models_do() -> None:
    def words(pre: str, text: str) -> list[str]:
        splits = rebuilt(pre).pre_tokenizer.pre_tokenize_str(text)
        return [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in splits]

    text = "I'LL pay 1234\n\n now!!\n"
    assert words("gpt-2", text) == ["I", "'", "LL", " pay", " 1234", "\n\n", " now", "!!", "\n"]
    assert words("smollm", text)[3:9] == [" pay", " ", "1", "2", "3", "4"]
    assert words("qwen2", text) == [
        "I", "'LL", " pay", " ", "1", "2", "3", "4", "\n\n", " now", "!!\n",
    ]  # fmt: skip
    assert words("llama-bpe", text) == ["I", "'LL", " pay", " ", "123", "4", "\n\n", " now", "!!\n"]
    assert words("default", "a+b 12345") == ["a", "+", "b", " ", "123", "45"]


def test_normalisation_and_framing() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    assert rebuilt("qwen2").encode(decomposed).ids == rebuilt("qwen2").encode(composed).ids
    assert rebuilt("smollm").encode(decomposed).ids != rebuilt("smollm").encode(composed).ids
    assert rebuilt("llama-bpe").encode("in").ids == [260, BYTE_ID["in"]]
    assert rebuilt("llama-bpe", add_bos_token=False).encode("in").ids == [BYTE_ID["in"]]
    framed = rebuilt("smollm", add_bos_token=True, add_eos_token=True)
    assert framed.encode("in").ids == [260, BYTE_ID["in"], 261]
    assert framed.encode("in", add_special_tokens=False).ids == [BYTE_ID["in"]]


def test_unused_tokens_cannot_be_typed_and_user_tokens_are_whole() -> None:
    kinds = [1] * (len(VOCAB) - 2) + [4, 5]
    tokenizer = rebuilt("smollm", token_type=kinds)
    assert tokenizer.encode(f"a{SPECIALS[0]}").ids == [BYTE_ID["a"], 260]
    assert tokenizer.token_to_id(SPECIALS[1]) is None
    assert tokenizer.decode([260], skip_special_tokens=True) == SPECIALS[0]


def test_unknown_pre_tokenizer_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'tekken'"):
        rebuilt("tekken")


def test_byte_alphabet_covers_all_bytes() -> None:
    assert sorted(byte_ids(bytes(range(256)))) == sorted(
        BYTE_ID[c] for c in pre_tokenizers.ByteLevel.alphabet()
    )
