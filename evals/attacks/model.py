"""What an attack gets, and what it gives back.

An attack sees a :class:`View`: captures from the worker's side of the wire, and public facts.
A :class:`Truth` is stored apart and is for scoring only. Shapes: s operand rows, n data rows,
d input width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from evals.attacks.public import PublicModel

Op = Literal["qkv", "o", "gate_up", "down", "lm_head"]
OPS: tuple[Op, ...] = ("qkv", "o", "gate_up", "down", "lm_head")
CorpusName = Literal["short", "long", "decode", "game"]
# The layer of an LM-head offload.
HEAD_LAYER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """One product as the worker saw it, in the order it came.

    ``operand`` ``(s, d_in)`` as on the wire (float16, or uint32 for ring schemes), ``result``
    ``(s, d_out)`` if it was kept: it is a function of the operand and the public weight.
    ``forward`` counts the passes of a capture: 0 is the prefill, then one per decode step.
    """

    forward: int
    layer: int
    op: Op
    operand: NDArray[np.generic]
    result: NDArray[np.generic] | None = None
    # Nanoseconds since the capture's first offload arrived, and what the product took.
    arrived_ns: int = 0
    compute_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What the worker saw of one prompt (or, with B > 1, of one batch of prompts)."""

    prompt: int
    offloads: tuple[Offload, ...]

    def select(self, layer: int, op: Op, forward: int | None = None) -> list[Offload]:
        """The offloads of one layer and op, of one pass or of all."""
        return [
            o for o in self.offloads
            if o.layer == layer and o.op == op and (forward is None or o.forward == forward)
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTruth:
    """The secrets behind one capture.

    ``tokens[b]`` are the ids of sequence b: the prompt, then what was generated. ``prompt_lengths``
    says where the prompts end. ``rows[(forward, layer, op)]`` ``(n, d_in)`` float32 are the
    plaintext rows of an offload, for the same offloads that were captured.
    """

    prompt: int
    text: str
    tokens: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]
    rows: Mapping[tuple[int, int, Op], NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that an attacker has: captures in the order of the prompts, and public facts.

    ``scheme`` and ``parameters`` are public: names, shield rows and energy, cadence. ``corpus``
    names the kind of capture. ``memo`` is for what several attacks compute of it.
    """

    condition: str
    scheme: str
    parameters: Mapping[str, int | float | str]
    corpus: CorpusName
    captures: Sequence[Capture]
    model: PublicModel
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The secrets of a :class:`View`, in the same order."""

    prompts: Sequence[PromptTruth]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a plot of the report."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot of the report."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an attack achieved under one condition.

    ``value`` is the headline (a fraction recovered, a cosine, an advantage), ``chance`` what
    knowing nothing gives for the same measure. ``applicable`` False: the wire does not carry what
    the attack needs; ``reason`` says which check found that. ``interpretable`` False: the attack
    failed its own control, so that its failure elsewhere says nothing.
    """

    attack: str
    measure: str
    value: float = float("nan")
    chance: float = float("nan")
    # 95 % interval of the value, if one was estimated.
    interval: tuple[float, float] | None = None
    details: Mapping[str, float] = field(default_factory=dict)
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    applicable: bool = True
    interpretable: bool = True
    reason: str = ""


Report = Callable[[float], object]


class Attack(ABC):
    """One attack. Stateless: everything random comes from the generator it is given."""

    name: ClassVar[str]
    title: ClassVar[str]
    # Where it was published, what the attacker must have, and what `value` means.
    source: ClassVar[str]
    assumes: ClassVar[str]
    measures: ClassVar[str]
    # Which captures it works on. It is run once per corpus named here that was captured.
    corpora: ClassVar[tuple[CorpusName, ...]] = ("short",)

    @abstractmethod
    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """Attack ``view``; score against ``truth``. ``progress`` takes the fraction done."""
