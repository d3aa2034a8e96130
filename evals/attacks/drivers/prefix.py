"""Prefix candidates: walk the prompt left to right, one forward per next-token candidate.

Shapes: s operand rows, d width, C candidates, V vocabulary. See :mod:`evals.attacks.walk`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from evals.attacks.beam import HEAD, likely, nearest, walk_alone
from evals.attacks.model import (
    Attack,
    CorpusName,
    Outcome,
    PromptTruth,
    Report,
    Truth,
    View,
)
from evals.attacks.public import PublicModel
from evals.attacks.steps import Place, Prefix, Step
from evals.attacks.walk import (
    Beam,
    Evidence,
    Scores,
    Tally,
    Walk,
    evidence_of,
    fused,
    plausible,
    score_vocabulary,
    scored,
    shared,
)

Int64 = NDArray[np.int64]

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
        evidence = evidence_of(view)[: len(pairs)]
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
                f"vocabulary; ordered by all captured places up to layer {self._joint_layers}, "
                f"among those that attention at layer 0 leaves, at least {_KEPT}. "
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

    def _has_set(self, evidence: Evidence, forward: int = 0) -> bool:
        """Whether layer 0 gives the set, and another place its order."""
        return evidence.basis(forward, (0, "qkv")) is not None and bool(self._ordering(evidence, forward))

    def _joint(
        self, model: PublicModel, evidence: Sequence[Evidence], secrets: Sequence[PromptTruth],
        details: dict[str, float], rng: np.random.Generator, progress: Report,
    ) -> Tally:  # fmt: skip
        total, alone = Tally(), dict[Place, Tally]()
        steps = Tally()
        pairs = list(zip(evidence, secrets, strict=True))
        singles = [pair for pair in pairs if len(pair[1].tokens) == 1 and pair[0].forwards == 1]
        score_vocabulary(evidence, model)
        walks = self._singles(model, [seen for seen, _ in singles], lambda f: progress(0.5 * f))
        for walk, (_, secret) in zip(walks, singles, strict=True):
            true = secret.tokens[0][len(self._known) : secret.prompt_lengths[0]]
            total.add(walk.tokens, true)
            for place, count in walk.agreed.items():
                alone.setdefault(place, Tally()).add(walk.tokens[:count], true)
        for index, (seen, secret) in enumerate(pairs):
            if len(secret.tokens) != 1 or seen.forwards != 1:
                self._batch(model, seen, secret, total, steps)
                progress(0.6 * (index + 1) / len(pairs))
        details |= total.details("layer 0 set")
        for (layer, op), tally in sorted(alone.items()):
            details |= tally.details(f"layer 0 set, ordered by {op} of layer {layer}")
        if steps.prompts:
            details |= steps.details("decode steps")
        control = Tally()
        chosen = [pair for pair in pairs[:_CONTROLS] if len(pair[1].tokens) == 1]
        blind = [seen.randomised(rng) for seen, _ in chosen]
        score_vocabulary(blind, model)
        for walk, (_, secret) in zip(self._singles(model, blind), chosen, strict=True):
            control.add(walk.tokens, secret.tokens[0][len(self._known) : secret.prompt_lengths[0]])
        if control.prompts:
            details |= control.details("random subspace")
        return total

    def _candidates(self, model: PublicModel, seen: Evidence, forward: int) -> Int64:
        """Tokens that may be in a pass: all plausible ones, and as many as it can have rows."""
        scores = seen.vocabulary(forward, model)
        count = max(seen.rows(forward), int(np.count_nonzero(scores <= 1.0)), 1)
        # A row space that says yes to everything says nothing: the nearest ones have to do.
        count = min(count, 4 * max(seen.rows(forward), 1))
        chosen: Int64 = np.sort(np.argpartition(scores, min(count, len(scores) - 1))[:count])
        return chosen

    def _ordering(self, seen: Evidence, forward: int) -> list[Place]:
        """Places that order the set: up to a layer; if there is none, the first one above."""
        near = [p for p in seen.places(forward, self._joint_layers) if p != (0, "qkv")]
        return near or [p for p in seen.places(forward) if p[0] > 0][:1]

    def _singles(
        self, model: PublicModel, evidence: Sequence[Evidence],
        progress: Report = lambda fraction: None,
    ) -> list[Walk]:  # fmt: skip
        """The best hypothesis about each prompt that is alone in its pass: all walk in step."""
        walks = [Walk(Prefix((), (), ())) for _ in evidence]
        able = [i for i, seen in enumerate(evidence) if self._has_set(seen)]
        candidates, places = dict[int, Int64](), dict[int, list[Place]]()
        for i in able:
            candidates[i], places[i] = self._candidates(model, evidence[i], 0), self._ordering(evidence[i], 0)
            walks[i] = Walk(model.prefix(self._known), len(self._known), agreed=dict.fromkeys(places[i], 0))
        longest = max((evidence[i].rows(0) for i in able), default=0) - len(self._known)
        for position in range(longest):
            open_ = [i for i in able if position < evidence[i].rows(0) - len(self._known)]
            asked = [(evidence[i], candidates[i], walks[i], places[i]) for i in open_]
            for i, (step, scores) in zip(open_, self._pruned(model, 0, asked), strict=True):
                index = int(np.argmin(fused(scores)))
                following = walks[i].taken(step, index, 0, plausible(scores, index))
                for place in places[i]:
                    if walks[i].agreed[place] == position and int(np.argmin(scores[place])) == index:
                        following.agreed[place] = position + 1
                walks[i] = following
            progress((position + 1) / longest)
        return walks

    def _batch(
        self, model: PublicModel, seen: Evidence, secret: PromptTruth, total: Tally, steps: Tally
    ) -> None:
        """Several sequences in one capture, and their decode steps."""
        walks = self._tree(model, seen, len(secret.tokens)) if self._has_set(seen) else []
        lengths = [len(walk.tokens) for walk in walks]
        for forward in range(1, seen.forwards):
            if self._has_set(seen, forward):
                candidates = self._candidates(model, seen, forward)
                walks = self._greedy(model, seen, forward, candidates, walks)
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
            asked = [(seen, candidates, walk, places) for walk in open_walks]
            for walk, found in zip(open_walks, self._pruned(model, 0, asked), strict=True):
                grown = list(self._branches(0, walk, *found))
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

    @staticmethod
    def _branches(forward: int, walk: Walk, step: Step, scores: Scores) -> Iterator[tuple[float, Walk]]:
        """Plausible continuations of a hypothesis, with their joint scores."""
        joint = fused(scores)
        for index in np.argsort(joint):
            if not plausible(scores, int(index)):
                break
            yield float(joint[index]), walk.taken(step, int(index), forward, True)

    def _greedy(
        self, model: PublicModel, seen: Evidence, forward: int, candidates: Int64, walks: Sequence[Walk]
    ) -> list[Walk]:
        places = self._ordering(seen, forward)
        found = self._pruned(model, forward, [(seen, candidates, walk, places) for walk in walks])
        best = [int(np.argmin(fused(scores))) for _, scores in found]
        return [
            walk.taken(step, index, forward, plausible(scores, index))
            for walk, index, (step, scores) in zip(walks, best, found, strict=True)
        ]

    @staticmethod
    def _pruned(
        model: PublicModel, forward: int, asked: Sequence[tuple[Evidence, Int64, Walk, Sequence[Place]]]
    ) -> list[tuple[Step, Scores]]:
        """Scores of the candidates that the cheapest place, attention at layer 0, leaves.

        ``asked``: hypotheses, each with its evidence, candidates and places; all forwards are batched.
        """
        left = [candidates for _, candidates, _, _ in asked]
        first: Place = (0, "o")
        many = [i for i, (_, c, _, places) in enumerate(asked) if first in places and len(c) > _KEPT]
        if many:
            steps = model.steps([asked[i][2].prefix for i in many], [left[i] for i in many], {first})
            for i, step in zip(many, steps, strict=True):
                seen, candidates, walk, _ = asked[i]
                near = scored(seen, forward, step, [first], walk)[first]
                kept = max(_KEPT, int(np.count_nonzero(near <= 1.0)))
                left[i] = candidates[np.sort(np.argsort(near)[:kept])]
        wanted = {place for _, _, _, places in asked for place in places}
        steps = model.steps([walk.prefix for _, _, walk, _ in asked], left, wanted) if asked else []
        return [
            (step, scored(seen, forward, step, places, walk))
            for step, (seen, _, walk, places) in zip(steps, asked, strict=True)
        ]

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
            chosen, found, accepted = walk_alone(
                model, beam, seen, place, self._known, self._known or self._opening(model), true
            )
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

    def _opening(self, model: PublicModel) -> list[int]:
        """What a prompt may follow, to order candidates for its first position."""
        return model.tokenizer.encode(self._start) if model.tokenizer else [0]

    def _head(
        self, model: PublicModel, evidence: Sequence[Evidence], secrets: Sequence[PromptTruth],
        details: dict[str, float], notes: list[str],
    ) -> Tally | None:  # fmt: skip
        """The LM head of a prefill has the last position only: its token, the others given."""
        tally = Tally()
        for seen, secret in list(zip(evidence, secrets, strict=True))[: self._head_prompts]:
            prompt = secret.tokens[0][: secret.prompt_lengths[0]]
            if HEAD not in seen.places(0) or len(prompt) < 2:
                continue
            walk = Walk(model.prefix(prompt[:-1]))
            order = likely(model, prompt[:-1])
            token, _ = nearest(model, (32, 256), seen, 0, HEAD, walk, order)
            tally.add([token], prompt[-1:])
        if not tally.prompts:
            return None
        details["lm_head: last token, the others known"] = tally.right / tally.positions
        notes.append(
            f"lm_head: the last token of the first {tally.prompts} prompts among the model's own first 256, "
            "given the tokens before it."
        )
        return tally
