"""Gemma 3 270M, the real weights: tokenizer, tensors and greedy answers.

The GGUF file is the public Q4_K_M conversion, taken from the Python package index. Its tokenizer is
compared with the SentencePiece library, its tensors with the gguf library, and what the two
processes generate with transformers.

Noise, as derived in ``test_greedy``: rounding operands to f16 moves a logit by at most
sqrt(4·18 + 1)·2.0e-4 = 0.17 % of the logits' standard deviation, about 4.7, so by 0.0081 rms. Two
logits further apart than 2·sqrt(2) times this do not change places. Prompts are chosen by the
reference alone: those on whose greedy path the best token always leads by more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import dequantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tee_runner.models import KNOWN_MODELS, LoadedModel, import_gguf, load_model
from tee_runner.models.gguf_file import GgufFile
from tee_runner.models.presets import check_preset
from tee_runner.models.pull import fetch_gguf
from tests.tee_runner.models import sentencepiece_oracle as oracle

from .processes import start_worker
from .running import running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

LEAD = 2 * 2**0.5 * 0.0081
TOKENS, PROMPT_TOKENS = 32, 10
PROMPTS = (
    "The capital of France is the city of Paris, which",
    "Once upon a time there was a little girl who",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Photosynthesis is the process by which green plants use",
    "In 1969, Neil Armstrong became the first human to",
    "The quick brown fox jumps over the lazy dog. The",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "Die Hauptstadt von Deutschland ist Berlin, und die",
    "To make a good cup of tea, first you",
    "import numpy as np\nimport matplotlib.pyplot as plt\n\n",
)

TEXTS = [
    "",
    " ",
    *(" " * n + "x" for n in (1, 2, 3, 15, 16, 17, 31, 32, 33, 62, 63, 100)),
    *("\n" * n for n in (1, 2, 3, 4, 31, 32, 64)),
    *("\t" * n + "end" for n in (1, 2, 5, 31, 32)),
    "a \n b\r\n\tc  \n\n  d",
    "trailing   ",
    "\u2581already\u2581escaped",
    "0123456789 3.14159 -1e-9 0xDEADBEEF 1,000,000 ½ ⅔ ²³ ١٢٣ 一二三",
    "def f(x: int) -> int:\n    return x ** 2  # squares\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c; }  // loop",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "<html><body><table><tr><td>cell</td></tr></table></body></html>",
    "SELECT * FROM t WHERE a <> 'b' -- comment",
    "https://example.com/path?query=1&other=%20#fragment",
    "日本語の文章、そして한국어 문장 그리고 中文句子。ภาษาไทย हिन्दी தமிழ் עברית العربية",
    "Ελληνικά Русский Українська Հայերեն ქართული አማርኛ ខ្មែរ မြန်မာ ᏣᎳᎩ",
    "naïve café Ångström ǆ ß ſ ﬁ ﬀ Å é",
    "😀😃 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇯🇵 ☕️ 🧑🏿‍🚀",
    "\u200b zero \u200d width \ufeff and \u00a0 no-break \u2003 em space \u3000",
    "\x00\x01\x1f\x7f\x80\x9f control",
    "\U0001f9ff \U000e0041 \U0010ffff \ue000 \ufffd \ufffe unusual",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 𒀀𒁀 𓀀 𐍈",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa hahahahahahahaha ------------======______",
    "<unk> <0x41> <0xFF> [multimodal] <start_of_image> <mask",
    "don't won't I'm they're it’s “quoted” ‘single’ … – —",
    "ALLCAPS camelCase snake_case kebab-case PascalCase mixedUP123abc",
    "x" * 300,
    "word " * 80,
    "The Gemma license: see ai.google.dev/gemma/terms.",
]
CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<unused7>")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_gguf(KNOWN_MODELS["gemma-3-270m"], tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def model(gguf: Path) -> LoadedModel:
    return load_model(import_gguf(gguf, gguf.with_name("imported")), preset="gemma-3-270m")


@pytest.fixture(scope="module")
def sentencepiece(gguf: Path) -> Any:
    return oracle.processor(oracle.proto_of(GgufFile(gguf).metadata))


def texts(pieces: list[str]) -> Iterator[str]:
    """The written texts, then seeded mixtures of pieces, of characters and of runs."""
    rng = random.Random(3)
    planes = [(32, 127), (0xA0, 0x2000), (0x3000, 0xD7FF), (0x1F300, 0x1FAFF), (0xE000, 0x10FFFF)]
    yield from TEXTS
    for _ in range(150):
        yield "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 12)))
        yield "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randrange(1, 40)))
        yield "".join(rng.choice("ab h.-=*#_0 \n\t") * rng.randrange(1, 40) for _ in range(4))


def test_tokenizer_is_sentencepiece(model: LoadedModel, sentencepiece: Any) -> None:
    pieces = [sentencepiece.id_to_piece(i).replace(oracle.SPACE, " ") for i in range(494, 255_968)]
    compared = 0
    for text in texts(pieces):
        for control in CONTROL:  # SentencePiece does not read these in a text; chat templates need them
            text = text.replace(control, control[1:])
        ids = sentencepiece.encode(text)
        assert model.tokenizer.encode(text) == ids, repr(text)
        assert model.tokenizer.decode(ids, skip_special_tokens=False) == sentencepiece.decode(ids), repr(text)
        decoder = model.tokenizer.incremental_decoder(skip_special_tokens=False)
        assert "".join([*map(decoder.push, ids), decoder.finish()]) == sentencepiece.decode(ids), repr(text)
        compared += 1
    assert compared >= 480


def test_control_tokens_are_one_token(model: LoadedModel, sentencepiece: Any) -> None:
    tokenizer = model.tokenizer
    for control in CONTROL:
        (token,) = tokenizer.encode(control)
        assert token == sentencepiece.piece_to_id(control)
        assert tokenizer.decode([token]) == ""
    turn = "<bos><start_of_turn>user\nHi!<end_of_turn>\n<start_of_turn>model\n"
    parts = ["<bos>", "<start_of_turn>", "user\nHi!", "<end_of_turn>", "\n", "<start_of_turn>", "model\n"]
    expected = [[sentencepiece.piece_to_id(p)] if p in CONTROL else sentencepiece.encode(p) for p in parts]
    assert tokenizer.encode(turn) == [token for part in expected for token in part]
    assert tokenizer.encode("Hi!", add_special_tokens=True) == [2, *sentencepiece.encode("Hi!")]
    assert model.eos_ids == {1}
    assert tokenizer.chat_template is None  # a base model: the file has none


def test_tensors_are_those_of_the_gguf_library(gguf: Path, model: LoadedModel) -> None:
    file = GgufFile(gguf)  # compared with gguf.GGUFReader where the default model is imported
    data = np.memmap(gguf, np.uint8, mode="r")

    def values(name: str, rows: int | None = None) -> np.ndarray[Any, Any]:
        tensor = file.tensors[name]
        blocks = data[tensor.offset : tensor.offset + tensor.nbytes].reshape(
            tensor.shape[0] if len(tensor.shape) == 2 else 1, -1
        )
        return dequantize(blocks[:rows], tensor.kind).reshape(-1, *tensor.shape[1:])

    norms = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
    norms |= {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    norms |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    matrices = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    matrices |= {"attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj"}
    matrices |= {"ffn_down": "mlp.down_proj"}
    formats = set()
    with safe_open(model.directory / "model.safetensors", "np") as ours:
        for layer in (0, 7, 17):
            for names, dtype, offset in ((norms, np.float32, 1), (matrices, np.float16, 0)):
                for name, target in names.items():
                    source = f"blk.{layer}.{name}.weight"
                    formats.add(file.tensors[source].kind.name)
                    expected = (values(source) - np.float32(offset)).astype(dtype)
                    found = ours.get_tensor(f"model.layers.{layer}.{target}.weight")
                    np.testing.assert_array_equal(found, expected, err_msg=source)
        rows = ours.get_slice("model.embed_tokens.weight")[:300]
        np.testing.assert_array_equal(rows, values("token_embd.weight", 300).astype(np.float16))
    assert formats == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    check_preset("gemma-3-270m", model.config)


def test_greedy_answers_are_those_of_transformers(model: LoadedModel) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).eval()
    prompts = [[2, *model.tokenizer.encode(prompt)][:PROMPT_TOKENS] for prompt in PROMPTS]
    leads, answers = np.full(len(prompts), np.inf), []
    fed, cache = torch.tensor(prompts), None
    with torch.no_grad():
        for _ in range(TOKENS):
            output = reference(fed, cache=cache, use_cache=True, logits_to_keep=1)
            cache, best = output.cache, output.logits[:, -1].topk(2)
            leads = np.minimum(leads, (best.values[:, 0] - best.values[:, 1]).numpy())
            fed = best.indices[:, :1]
            answers.append(best.indices[:, 0])
    del reference
    expected = torch.stack(answers, dim=1).tolist()
    chosen = [i for i in range(len(prompts)) if leads[i] > LEAD and 1 not in expected[i]]
    assert len(chosen) >= 4, leads
    worker = start_worker("cpu")
    try:
        with running(model, worker.address, "plain", max_len=PROMPT_TOKENS + TOKENS) as served:
            generated = served.generate([prompts[i] for i in chosen], TOKENS)
    finally:
        worker.kill()
    assert [answer.tokens for answer in generated] == [expected[i] for i in chosen]
