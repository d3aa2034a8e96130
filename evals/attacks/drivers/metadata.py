"""What sizes, counts and times reveal, whatever the operands hide."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from evals.attacks.classifiers import Float64, play
from evals.attacks.drivers.distinguish import chosen_prompts
from evals.attacks.model import Attack, Capture, CorpusName, Outcome, Report, Truth, View


@dataclass(frozen=True, slots=True)
class Leak:
    """What an observation y says of a secret x, both as they are distributed in the captures.

    ``recovered`` is the chance that the best guess after seeing y is right, ``guessed`` the same
    without y (Smith, 2009: posterior and prior vulnerability). Bits are of H(x) and I(x; y).
    """

    recovered: float
    guessed: float
    entropy_bits: float
    mutual_bits: float


def leak(secrets: Sequence[Hashable], seen: Sequence[Hashable]) -> Leak:
    """Measured from pairs.

    An attacker can calibrate y against x on prompts of his own, since the code is public, so
    that no part of the pairs is set aside for learning.
    """
    total = len(secrets)
    by_seen: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
    for x, y in zip(secrets, seen, strict=True):
        by_seen[y][x] += 1
    prior = Counter(secrets)
    entropy = _entropy(list(prior.values()))
    remaining = sum(sum(c.values()) / total * _entropy(list(c.values())) for c in by_seen.values())
    return Leak(
        recovered=sum(max(c.values()) for c in by_seen.values()) / total,
        guessed=max(prior.values()) / total,
        entropy_bits=entropy,
        mutual_bits=entropy - remaining,
    )


class Metadata(Attack):
    """Prompt lengths from operand rows, answer lengths from pass counts, prompts from timing."""

    name = "metadata"
    title = "Sizes, counts and times"
    source = "posterior vulnerability: Smith, 2009"
    assumes = "sees shapes, order and times only; has calibrated them on prompts of his own"
    measures = "secret lengths recovered exactly; for the game's prompts, advantage from timing alone"
    corpora: ClassVar[tuple[CorpusName, ...]] = ("short", "long", "decode", "game")

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        if view.corpus == "game":
            return self._timing(view, truth, rng, progress)
        lengths = [p.prompt_lengths for p in truth.prompts]
        prompt = leak(lengths, [_sizes(c, first=True) for c in view.captures])
        details = {
            "prompt lengths: entropy, bits": prompt.entropy_bits,
            "prompt lengths: revealed, bits": prompt.mutual_bits,
        }
        notes = [
            f"operand rows reveal {prompt.mutual_bits:.2f} of the {prompt.entropy_bits:.2f} bits of the "
            f"prompt lengths; best guess right in {prompt.recovered:.0%} (blind: {prompt.guessed:.0%})"
        ]
        generated = [
            max(len(t) - n for t, n in zip(p.tokens, p.prompt_lengths, strict=True)) for p in truth.prompts
        ]
        passes = [1 + max(o.forward for o in c.offloads) for c in view.captures]
        if max(passes) > 1:
            exact = float(np.mean([p == g for p, g in zip(passes, generated, strict=True)]))
            batch = leak([len(n) for n in lengths], [_sizes(c, first=False) for c in view.captures])
            details |= {"answer length equals passes": exact, "batch size recovered": batch.recovered}
            notes.append(
                f"the number of passes is the longest answer's length in {exact:.0%} of the captures; "
                f"the rows of a decode step tell the batch size in {batch.recovered:.0%} "
                f"(blind: {batch.guessed:.0%})"
            )
        return Outcome(
            attack=self.name,
            measure="prompt lengths recovered exactly",
            value=prompt.recovered,
            chance=prompt.guessed,
            details=details,
            notes=notes,
        )

    def _timing(self, view: View, truth: Truth, rng: np.random.Generator, progress: Report) -> Outcome:
        measure = "advantage from arrival and compute times alone"
        _, labels = chosen_prompts(truth)
        times = [_times(c) for c in view.captures]
        shortest = min(map(len, times))
        features = np.stack([t[:shortest] for t in times])
        reason = ""
        if len(np.unique(labels)) != 2 or min(np.bincount(labels)) < 4:
            reason = f"{np.bincount(labels).tolist()} captures of the prompts are too few"
        elif not features.any():
            reason = "the captures carry no times"
        if reason:
            return Outcome(attack=self.name, measure=measure, applicable=False, reason=reason)
        game = play({"times": features, "log times": np.log1p(features)}, labels, rng, progress)
        low, high = game.interval
        verdict = "tells" if low > 0 else "does not tell"
        return Outcome(
            attack=self.name,
            measure=measure,
            value=game.value,
            chance=0.0,
            interval=game.interval,
            details={f"advantage: {pair}": value for pair, value in game.advantages.items()},
            notes=(
                f"timing {verdict} two prompts of equal length apart "
                f"({game.chosen}: {game.value:.2f}, 95 % interval {low:.2f} to {high:.2f}, "
                f"{game.held_out} held-out captures)",
            ),
        )


def _sizes(capture: Capture, *, first: bool) -> tuple[int, ...]:
    """Operand rows by place, of the first pass or of the second: the batch's first decode step."""
    forward = 0 if first else 1
    return tuple(
        len(o.operand) for o in capture.offloads if o.forward == forward and (first or o.op != "lm_head")
    )


def _times(capture: Capture) -> Float64:
    """Gaps between arrivals and compute times, in microseconds."""
    arrived = np.array([o.arrived_ns for o in capture.offloads], dtype=np.float64)
    compute = np.array([o.compute_ns for o in capture.offloads], dtype=np.float64)
    return np.concatenate([np.diff(arrived), compute, [arrived[-1] - arrived[0]]]) / 1e3


def _entropy(counts: Sequence[int]) -> float:
    p = np.asarray(counts, dtype=np.float64)
    p /= p.sum()
    return float(-np.sum(p * np.log2(p)))
