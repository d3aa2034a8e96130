"""Greedy answers of the two real processes against Hugging Face transformers on the same model.

The reference judges every token in its place: given the prompt and the answer so far, transformers' float32
logits must be largest for the token that was chosen. By induction that is equality of the greedy answers up
to a first difference, and it keeps checking after one.

Noise. The only systematic difference is the operands' rounding to f16: 11 significant bits give an rms
relative error of about 2^-10.5 / sqrt(12) = 2.0e-4 per element. A mask rounds rows of A·[H; S], whose mean
energy is (n + 16·k) / (n + k) times that of H (k shields of 4 times its norm): worst for one row among 8
shields, in amplitude sqrt(129 / 9) = 3.8 (16 rows of hd3: 3.9). If each of the 4·30 + 1 products contributed
its whole error to the last hidden state, independently, that would be off by sqrt(121)·2.0e-4 = 0.22 %, times
3.9 under a mask; and the logits, whose standard deviation over the vocabulary is about 4, by

    0.0088 (plain)    0.034 (masks)    rms, without the offset common to all logits of a row.

Both are over-estimates: norms and the residual stream dampen most of it (seen: 0.003 and 0.013). Two logits
whose gap is above 2·sqrt(2) of this, i.e. 0.025 and 0.097, thus do not change places (6 standard deviations
as seen), and those with a smaller gap may.

The questions are chosen by the reference alone, of 32: those whose answers run to 64 tokens and whose best
token leads by more than 0.055 everywhere. Four places have a lead below 0.07: with the noise seen a mask
exchanges one of the 512 tokens in one run of 700, two in one of a million.

`lpn` and its control `plain-int8` compute the same integers, so of their logits every bit is the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tee_runner.decoder.forward import Decoder, RaggedBatch
from tee_runner.models import LoadedModel
from tee_runner.models.pull import fetch_gguf
from tee_runner.models.registry import DEFAULT_MODEL, KNOWN_MODELS
from tee_runner.protection.base import Float32, ForwardSession

from .conftest import chat
from .processes import WorkerProcess, start_worker
from .running import Answer, running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

QUESTIONS = (
    "Write a thank-you note to a teacher.",
    "What causes the seasons on Earth?",
    "Write a short poem about the sea in autumn.",
    "How do I boil an egg?",
    "Write a haiku about rain.",
    "Describe the water cycle.",
    "What should I pack for a week of hiking?",
    "Who was Marie Curie?",
)
LEAD = 0.055
TOKENS = 64
PLAIN_NOISE, MASK_NOISE = 0.0088, 0.034
# Weights in f16 instead of float32 add a rounding error as large as that of plain operands.
GGUF_NOISE = PLAIN_NOISE * 2**0.5


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Iterator[Any]:
    """The imported model in transformers, float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    torch.set_num_threads(threads)
    gc.collect()


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> list[list[int]]:
    return [chat(model, question) for question in QUESTIONS]


@dataclass(slots=True)
class Generated:
    """Answers with the end token where there was one, and the logits behind each token."""

    answers: list[list[int]]
    logits: list[Float32]


Generate = Callable[..., Generated]


@contextmanager
def noting(model: LoadedModel, pools: Path) -> Iterator[Generate]:
    """Gives what runs prompts through a worker at once and notes the logits on their way to the sampler.

    Pools are made once, by the first worker: a software GPU would take minutes.
    """
    seen: dict[int, list[Float32]] = {}
    original = Decoder.forward

    def forward(self: Decoder, batch: RaggedBatch, cache: Any, session: ForwardSession) -> Float32:
        logits = original(self, batch, cache, session)
        sampled = [slot for slot, wanted in zip(batch.slots, batch.sampled, strict=True) if wanted]
        for slot, row in zip(sampled, logits, strict=True):
            seen.setdefault(slot, []).append(row.copy())
        return logits

    def run(address: str, protection: str, prompts: Sequence[Sequence[int]], tokens: int) -> Generated:
        seen.clear()
        with running(model, address, protection, pools=pools) as served:
            answers = served.generate(prompts, tokens)
        # Slots are taken in the order of the prompts.
        return Generated(
            [_ended(model, answer) for answer in answers], [np.stack(seen[i]) for i in range(len(prompts))]
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "forward", forward)
        yield run


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pools of `lpn` are kept."""
    return tmp_path_factory.mktemp("pools")


@pytest.fixture
def generate(model: LoadedModel, pools: Path) -> Iterator[Generate]:
    """See :func:`noting`."""
    with noting(model, pools) as run:
        yield run


def _ended(model: LoadedModel, answer: Answer) -> list[int]:
    assert answer.finish is not None
    assert answer.finish.error is None
    (eos,) = model.eos_ids
    return answer.tokens + ([eos] if answer.finish.reason == "stop" else [])


@dataclass(slots=True)
class Verdict:
    """``noise`` is the rms difference of logits; ``gaps`` those by which chosen tokens fell short.

    ``lead``: the reference's smallest of its best token before the next.
    """

    noise: float
    gaps: list[float] = field(default_factory=list)
    lead: float = np.inf


def judge(reference: Any, prompts: Sequence[Sequence[int]], generated: Generated) -> Verdict:
    """Compare each token and its logits with the reference's, given the same text before it."""
    gaps, squares, lead = [], [], np.inf
    for prompt, answer, mine in zip(prompts, generated.answers, generated.logits, strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *answer[:-1]]])
            logits = reference(ids).logits[0, len(prompt) - 1 :].numpy()
        assert logits.shape == mine.shape == (len(answer), logits.shape[1])
        difference = mine - logits
        squares.append(np.square(difference - difference.mean(axis=1, keepdims=True)).mean(axis=1))
        short = logits.max(axis=1) - logits[np.arange(len(answer)), answer]
        gaps += short[short > 0].tolist()
        second, best = np.partition(logits, -2, axis=1)[:, -2:].T
        lead = min(lead, float((best - second).min()))
    return Verdict(float(np.sqrt(np.concatenate(squares).mean())), gaps, lead)


def test_prompts_are_those_of_transformers(smollm2_dir: Path, prompts: list[list[int]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    for question, prompt in zip(QUESTIONS, prompts, strict=True):
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == prompt


def test_plain_is_exact(
    cpu_worker: WorkerProcess,
    generate: Generate,
    reference: Any,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    generated = generate(cpu_worker.address, "plain", prompts, TOKENS)
    assert [len(answer) for answer in generated.answers] == [TOKENS] * len(prompts)
    verdict = judge(reference, prompts, generated)
    assert verdict.lead > LEAD
    assert verdict.gaps == []
    assert verdict.noise < PLAIN_NOISE

    # The judge's induction, checked once in full: transformers' own greedy loop.
    for prompt, answer in list(zip(prompts, generated.answers, strict=True))[:2]:
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        assert output[0, len(prompt) :].tolist() == answer

    # And against transformers' own reading of the GGUF file, whose weights are not rounded to f16.
    path = fetch_gguf(KNOWN_MODELS[DEFAULT_MODEL], tmp_path)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    path.unlink()
    independent = type(reference)(reference.config).to(torch.float32).eval()
    missing, unexpected = independent.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    independent.tie_weights()
    verdict = judge(independent, prompts, generated)
    assert verdict.noise < GGUF_NOISE < LEAD / (2 * 2**0.5)
    assert verdict.gaps == []


@pytest.mark.parametrize("protection", ["gelo-haar", "gelo-hd3"])
def test_masks_differ_only_at_near_ties(
    cpu_worker: WorkerProcess,
    generate: Generate,
    reference: Any,
    prompts: list[list[int]],
    protection: str,
) -> None:
    generated = generate(cpu_worker.address, protection, prompts, TOKENS)
    verdict = judge(reference, prompts, generated)
    assert verdict.noise < MASK_NOISE
    assert all(gap < 2 * 2**0.5 * MASK_NOISE for gap in verdict.gaps)
    assert len(verdict.gaps) <= 1


@pytest.fixture(scope="module")
def quantised(
    cpu_worker: WorkerProcess, model: LoadedModel, prompts: list[list[int]], pools: Path
) -> Iterator[Generated]:
    """What `plain-int8` answers on the CPU engine."""
    with noting(model, pools) as generate:
        yield generate(cpu_worker.address, "plain-int8", prompts, TOKENS)


def test_lpn_is_plain_int8_bit_for_bit(
    cpu_worker: WorkerProcess, generate: Generate, quantised: Generated, prompts: list[list[int]]
) -> None:
    blinded = generate(cpu_worker.address, "lpn", prompts, TOKENS)
    assert blinded.answers == quantised.answers
    for mine, theirs in zip(blinded.logits, quantised.logits, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))


def test_lpn_is_the_same_on_a_gpu(
    wgpu_worker: WorkerProcess, generate: Generate, quantised: Generated, prompts: list[list[int]]
) -> None:
    blinded = generate(wgpu_worker.address, "lpn", prompts, TOKENS)
    assert blinded.answers == quantised.answers
    for mine, theirs in zip(blinded.logits, quantised.logits, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))


@pytest.fixture(scope="module")
def wgpu_worker() -> Iterator[WorkerProcess]:
    """On whatever adapter there is: lavapipe on a machine without a GPU."""
    worker = start_worker("wgpu")
    yield worker
    worker.kill()


def test_wgpu(
    wgpu_worker: WorkerProcess, generate: Generate, reference: Any, prompts: list[list[int]]
) -> None:
    generated = generate(wgpu_worker.address, "gelo-hd3", prompts[:2], 16)
    verdict = judge(reference, prompts[:2], generated)
    assert verdict.noise < MASK_NOISE
    # Out of reach of f16 noise.
    assert verdict.lead > 0.3
    assert verdict.gaps == []
