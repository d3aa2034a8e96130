"""Prefix candidates: walk the prompt left to right, one forward per next-token candidate.

Shapes: s operand rows, d width, C candidates, V vocabulary. See :mod:`evals.attacks.walk`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from evals.attacks.model import (
    HEAD_LAYER,
    Attack,
    CorpusName,
    Outcome,
    PromptTruth,
    Report,
    Truth,
    View,
)
from evals.attacks.public import Place, Prefix, PublicModel, Step
from evals.attacks.walk import Beam, Evidence, Scores, Tally, Walk, fused, plausible, scored, shared

Int64 = NDArray[np.int64]

_HEAD: Place = (HEAD_LAYER, "lm_head")
# A beam stops early when its best candidate is this much closer than the second.
_GAP = 0.3
# Prompts in a row, lost at their first position, after which a beam is given up.
_HOPELESS = 2
# Candidates kept after the attention output of layer 0, in batches of several sequences.
_KEPT = 8
# Prompts of the walk against random subspaces.
_CONTROLS = 8


BEAMS = (
    Beam(op="qkv", depth=0.0, widths=(64, 512, 2048, 8192, 24576, 0), prompts=2),
    Beam(op="gate_up", depth=0.8, widths=(32, 256, 1024), prompts=1),
)


class PrefixCandidates(Attack):
    """Recover prompts token by token, in order.

    Args:
        known: public tokens that every prompt starts with (a begin token, a chat template). They are
            given, and do not count as recovered.
        start: public text after which a prompt begins, to order candidates for the first position.
        joint_layers: the walk over the set found at layer 0 uses all places up to this layer.
        beams: walks that do without layer 0.
        prompts: the first so many prompts only; None for all.
    """

    name: ClassVar[str] = "prefix"
    title: ClassVar[str] = "Prefix candidates"
    source: ClassVar[str] = (
        "This project. The row-space test of candidates is a consequence of the GELO mask, A·[H; S]; "
        "walking left to right makes every layer's rows countable."
    )
    assumes: ClassVar[str] = (
        "Public weights; the operand of one offload has fewer rows than columns. No known plaintext "
        "(at the LM head: the tokens before the last)."
    )
    measures: ClassVar[str] = "fraction of token positions recovered, in order"
    corpora: ClassVar[tuple[CorpusName, ...]] = ("short", "decode")

    def __init__(
        self, *, known: Sequence[int] = (), start: str = "<|im_start|>user\n", joint_layers: int = 2,
        beams: Sequence[Beam] = BEAMS, prompts: int | None = None, head_prompts: int = 4,
    ) -> None:  # fmt: skip
        self._known = tuple(known)
        self._start = start
        self._joint_layers = joint_layers
        self._beams = tuple(beams)
        self._prompts = prompts
        self._head_prompts = head_prompts

    def run(
        self, view: View, truth: Truth, rng: np.random.Generator, progress: Report = lambda fraction: None
    ) -> Outcome:
        """See :meth:`Attack.run`."""
        pairs = list(zip(view.captures, truth.prompts, strict=True))[: self._prompts]
        evidence = [Evidence(capture, view.parameters) for capture, _ in pairs]
        secrets = [secret for _, secret in pairs]
        if not any(e.places(0) for e in evidence):
            widest = max((o.operand.shape for c in view.captures for o in c.offloads), default=(0, 0))
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason=f"no captured operand spans less than its width (largest: {widest[0]}×{widest[1]})",
            )  # fmt: skip
        details: dict[str, float] = {}
        notes: list[str] = []
        headline: list[Tally] = []
        if any(self._has_set(e) for e in evidence):
            headline.append(self._joint(view.model, evidence, secrets, details, rng, progress))
            notes.append(
                "Candidates: the tokens whose row at layer 0 (qkv) is in the row space, from the full "
                f"vocabulary; ordered by all captured places up to layer {self._joint_layers}. "
                "A place alone is credited with the positions before its first other choice."
            )
        if view.corpus == "short":
            for beam in self._beams:
                tally = self._beam(view.model, beam, evidence, secrets, details, notes)
                if tally is not None:
                    headline.append(tally)
            head = self._head(view.model, evidence, secrets, details, notes)
            if head is not None:
                headline.append(head)
        progress(1.0)
        if not headline:
            return Outcome(
                attack=self.name, measure=self.measures, applicable=False,
                reason="no captured place is one that this attack walks",
            )  # fmt: skip
        best = headline[0]
        details["prompts exact"] = best.exact / max(best.prompts, 1)
        chance = max(details.get("random subspace: positions", 0.0), 1.0 / view.model.config.vocab_size)
        return Outcome(
            attack=self.name, measure=self.measures, value=best.right / max(best.positions, 1),
            chance=chance, details=details, notes=notes,
        )  # fmt: skip

    # The set of layer 0, put in order.

    @staticmethod
    def _has_set(evidence: Evidence, forward: int = 0) -> bool:
        """Whether layer 0 gives the set, and another place its order."""
        places = evidence.places(forward)
        return (0, "qkv") in places and any(place[0] >= 0 and place != (0, "qkv") for place in places)

    def _joint(
        self, model: PublicModel, evidence: Sequence[Evidence], secrets: Sequence[PromptTruth],
        details: dict[str, float], rng: np.random.Generator, progress: Report,
    ) -> Tally:  # fmt: skip
        total, alone = Tally(), dict[Place, Tally]()
        steps = Tally()
        for index, (seen, secret) in enumerate(zip(evidence, secrets, strict=True)):
            if len(secret.tokens) == 1 and seen.forwards == 1:
                walk = self._single(model, seen)
                true = secret.tokens[0][len(self._known) : secret.prompt_lengths[0]]
                total.add(walk.tokens, true)
                for place, count in walk.agreed.items():
                    alone.setdefault(place, Tally()).add(walk.tokens[:count], true)
            else:
                self._batch(model, seen, secret, total, steps)
            progress(0.7 * (index + 1) / len(evidence))
        details |= total.details("layer 0 set")
        for (layer, op), tally in sorted(alone.items()):
            details |= tally.details(f"layer 0 set, ordered by {op} of layer {layer}")
        if steps.prompts:
            details |= steps.details("decode steps")
        control = Tally()
        for seen, secret in list(zip(evidence, secrets, strict=True))[:_CONTROLS]:
            if len(secret.tokens) == 1:
                true = secret.tokens[0][len(self._known) : secret.prompt_lengths[0]]
                control.add(self._single(model, seen.randomised(rng)).tokens, true)
        if control.prompts:
            details |= control.details("random subspace")
        return total

    def _candidates(self, model: PublicModel, seen: Evidence, forward: int) -> Int64:
        """Tokens that may be in a pass: all plausible ones, and as many as it can have rows."""
        scores = seen.score(forward, (0, "qkv"), model.dictionary, ())
        count = max(seen.rows(forward), int(np.count_nonzero(scores <= 1.0)), 1)
        # A row space that says yes to everything says nothing: the nearest ones have to do.
        count = min(count, 4 * max(seen.rows(forward), 1))
        chosen: Int64 = np.sort(np.argpartition(scores, min(count, len(scores) - 1))[:count])
        return chosen

    def _ordering(self, seen: Evidence, forward: int) -> list[Place]:
        return [p for p in seen.places(forward) if 0 <= p[0] <= self._joint_layers and p != (0, "qkv")] or [
            p for p in seen.places(forward) if p[0] > 0
        ][:1]

    def _single(self, model: PublicModel, seen: Evidence) -> Walk:
        """The best hypothesis about a prompt that is alone in its pass."""
        if not self._has_set(seen):
            return Walk(Prefix((), (), ()))
        places = self._ordering(seen, 0)
        candidates = self._candidates(model, seen, 0)
        walk = Walk(model.prefix(self._known), len(self._known), agreed=dict.fromkeys(places, 0))
        for position in range(seen.rows(0) - len(self._known)):
            step = model.step(walk.prefix, candidates, set(places))
            scores = scored(seen, 0, step, places, walk)
            joint = fused(scores)
            index = int(np.argmin(joint))
            following = walk.taken(step, index, 0, plausible(scores, index))
            for place in places:
                if walk.agreed[place] == position and int(np.argmin(scores[place])) == index:
                    following.agreed[place] = position + 1
            walk = following
        return walk

    def _batch(
        self, model: PublicModel, seen: Evidence, secret: PromptTruth, total: Tally, steps: Tally
    ) -> None:
        """Several sequences in one capture, and their decode steps."""
        walks = self._tree(model, seen, len(secret.tokens)) if self._has_set(seen) else []
        lengths = [len(walk.tokens) for walk in walks]
        for forward in range(1, seen.forwards):
            if self._has_set(seen, forward):
                candidates = self._candidates(model, seen, forward)
                walks = [self._greedy(model, seen, forward, candidates, walk) for walk in walks]
        left = list(zip(walks, lengths, strict=True))
        for true, length in zip(secret.tokens, secret.prompt_lengths, strict=True):
            goal = list(true[len(self._known) : length])
            if not left:
                total.add([], goal)
                continue
            best = max(left, key=lambda pair: shared(pair[0].prefix.tokens[pair[0].known :], goal))
            left.remove(best)
            recovered = list(best[0].prefix.tokens[best[0].known :])
            total.add(recovered[: best[1]], goal)
            if seen.forwards > 1:
                after = [recovered[best[1] + t] if best[1] + t < len(recovered) else -1
                         for t in range(seen.forwards - 1)]  # fmt: skip
                steps.add(after, list(true[length : length + seen.forwards - 1]))

    def _tree(self, model: PublicModel, seen: Evidence, sequences: int) -> list[Walk]:
        """Hypotheses about the prompts of a pass: every plausible branch, the best if too many."""
        candidates = self._candidates(model, seen, 0)
        places = self._ordering(seen, 0)
        open_walks = [Walk(model.prefix(self._known), len(self._known))]
        done: list[tuple[float, Walk]] = []
        for _ in range(seen.rows(0)):
            children: list[tuple[float, Walk]] = []
            for walk in open_walks:
                grown = list(self._branches(model, seen, 0, candidates, walk, places))
                children += grown
                if not grown and walk.accepted:
                    done.append((-float(len(walk.accepted)), walk))
            children.sort(key=lambda pair: pair[0])
            open_walks = [walk for _, walk in children[: 2 * sequences]]
            if not open_walks:
                break
        done += [(-float(len(walk.accepted)), walk) for walk in open_walks if walk.accepted]
        done.sort(key=lambda pair: pair[0])
        return [walk for _, walk in done[:sequences]]

    def _branches(
        self, model: PublicModel, seen: Evidence, forward: int, candidates: Int64, walk: Walk,
        places: Sequence[Place],
    ) -> Iterator[tuple[float, Walk]]:  # fmt: skip
        """Plausible continuations of a hypothesis, with their joint scores."""
        step, scores = self._pruned(model, seen, forward, candidates, walk, places)
        joint = fused(scores)
        for index in np.argsort(joint):
            if not plausible(scores, int(index)):
                break
            yield float(joint[index]), walk.taken(step, int(index), forward, True)

    def _greedy(
        self, model: PublicModel, seen: Evidence, forward: int, candidates: Int64, walk: Walk
    ) -> Walk:
        step, scores = self._pruned(model, seen, forward, candidates, walk, self._ordering(seen, forward))
        index = int(np.argmin(fused(scores)))
        return walk.taken(step, index, forward, plausible(scores, index))

    @staticmethod
    def _pruned(
        model: PublicModel, seen: Evidence, forward: int, candidates: Int64, walk: Walk,
        places: Sequence[Place],
    ) -> tuple[Step, Scores]:  # fmt: skip
        """Scores of the candidates that the cheapest place, attention at layer 0, leaves."""
        if (0, "o") in places and len(candidates) > 2 * _KEPT:
            first = model.step(walk.prefix, candidates, {(0, "o")})
            near = scored(seen, forward, first, [(0, "o")], walk)[0, "o"]
            kept = max(_KEPT, int(np.count_nonzero(near <= 1.0)))
            candidates = candidates[np.argsort(near)[:kept]]
        step = model.step(walk.prefix, candidates, set(places))
        return step, scored(seen, forward, step, places, walk)

    # One place alone, in the order of the model's own distribution.

    def _beam(
        self, model: PublicModel, beam: Beam, evidence: Sequence[Evidence], secrets: Sequence[PromptTruth],
        details: dict[str, float], notes: list[str],
    ) -> Tally | None:  # fmt: skip
        lowest = max(1, round(beam.depth * model.config.num_layers))
        place = next(
            (p for e in evidence[:1] for p in e.places(0) if p[0] >= lowest and p[1] == beam.op), None
        )
        if place is None:
            return None
        tally, forced, ranks, hopeless = Tally(), Tally(), list[int](), 0
        for seen, secret in list(zip(evidence, secrets, strict=True))[: beam.prompts]:
            true = list(secret.tokens[0][len(self._known) : secret.prompt_lengths[0]])
            chosen, found, accepted = self._alone(model, beam, seen, place, true)
            tally.add(chosen[: shared(chosen, true)], true)
            forced.add(chosen, true[: len(chosen)])
            ranks += found
            hopeless = 0 if accepted else hopeless + 1
            if hopeless == _HOPELESS:
                break
        label = f"{place[1]} of layer {place[0]} alone"
        details |= tally.details(label)
        details[f"{label}: next token right, given the true prefix"] = forced.right / max(forced.positions, 1)
        widest = max(w for w in beam.widths if w)
        if ranks:
            details[f"{label}: truth outside the first {widest}"] = float(np.mean(np.array(ranks) >= widest))
            details[f"{label}: median rank of the truth"] = float(np.median(ranks))
        stages = ", ".join(str(w) if w else "the full vocabulary" for w in beam.widths)
        notes.append(
            f"{label}: the first {tally.prompts} prompts; candidates in the order of the model's own "
            f"distribution, in stages of {stages}. A walk counts up to its first error."
        )
        return tally

    def _alone(
        self, model: PublicModel, beam: Beam, seen: Evidence, place: Place, true: Sequence[int]
    ) -> tuple[list[int], list[int], bool]:
        """The choice at each position given the true tokens before it, the truth's rank, and whether
        any choice was plausible. Up to the first error the choices are those of an unaided walk.
        """
        walk = Walk(model.prefix(self._known), len(self._known))
        start = model.tokenizer.encode(self._start) if model.tokenizer else [0]
        order = _likely(model, self._known or start)
        chosen, ranks = list[int](), list[int]()
        for token in true[: seen.rows(0)]:
            ranks.append(int(np.flatnonzero(order == token)[0]))
            widths = beam.widths
            if not walk.prefix.tokens and widths[-1]:
                widths = (*widths, max(beam.opening, widths[-1]))
            choice, accepted = self._nearest(model, widths, seen, 0, place, walk, order)
            chosen.append(choice)
            # Through all layers, for the distribution of the token after.
            step = model.step(walk.prefix, np.array([token]), {place, _HEAD})
            order = _ranked(model, step)
            walk = walk.taken(step, 0, 0, accepted)
            if walk.lost():
                break
        return chosen, ranks, any(walk.accepted)

    @staticmethod
    def _nearest(
        model: PublicModel, widths: Sequence[int], seen: Evidence, forward: int, place: Place, walk: Walk,
        order: Int64,
    ) -> tuple[int, bool]:  # fmt: skip
        """The token of the smallest score, and whether it stands out."""
        scores = np.empty(0, dtype=np.float32)
        for width in widths:
            tokens = order[len(scores) : width or len(order)]
            if not len(tokens):
                continue
            rows = model.next_rows(walk.prefix, tokens, place)
            before = walk.rows.get((forward, place), ())
            scores = np.concatenate([scores, seen.score(forward, place, rows, before)])
            first, second = np.partition(scores, 1)[:2]
            if first < 1.0 and first <= _GAP * second:
                return int(order[np.argmin(scores)]), True
        return int(order[np.argmin(scores)]), bool(scores.min() <= 1.0)

    def _head(
        self, model: PublicModel, evidence: Sequence[Evidence], secrets: Sequence[PromptTruth],
        details: dict[str, float], notes: list[str],
    ) -> Tally | None:  # fmt: skip
        """The LM head of a prefill has the last position only: its token, the others given."""
        tally = Tally()
        for seen, secret in list(zip(evidence, secrets, strict=True))[: self._head_prompts]:
            prompt = secret.tokens[0][: secret.prompt_lengths[0]]
            if _HEAD not in seen.places(0) or len(prompt) < 2:
                continue
            walk = Walk(model.prefix(prompt[:-1]))
            order = _likely(model, prompt[:-1])
            token, _ = self._nearest(model, (32, 256), seen, 0, _HEAD, walk, order)
            tally.add([token], prompt[-1:])
        if not tally.prompts:
            return None
        details["lm_head: last token, the others known"] = tally.right / tally.positions
        notes.append(
            f"lm_head: the last token of the first {tally.prompts} prompts among the model's own first 256, "
            "given the tokens before it."
        )
        return tally


def _likely(model: PublicModel, tokens: Sequence[int]) -> Int64:
    """Tokens ``(V,)`` from the most to the least probable after ``tokens``."""
    return _ranked(model, model.step(model.prefix(tokens[:-1]), np.array(tokens[-1:]), {_HEAD}))


def _ranked(model: PublicModel, step: Step) -> Int64:
    order: Int64 = np.argsort(-model.logits(step.rows[_HEAD])[0], kind="stable")
    return order
