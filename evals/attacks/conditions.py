"""What is attacked: a scheme with its options, and what of it is captured.

:data:`CONDITIONS` holds all by name; :func:`register` adds one. A further scheme needs no more than a
:class:`Condition` that names it: captures store whatever element type its operands have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from evals.attacks.model import HEAD_LAYER, OPS, CorpusName, Op
from evals.attacks.schemes import MixOptions, left_in_runner, mixed
from tee_runner.protection.base import MaskOptions, Protection
from tee_runner.protection.schemes import scheme as service_scheme

Place = tuple[int, Op]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One protection under attack.

    ``scheme`` is a scheme of the service by name, or any other :class:`Protection`. ``ops`` limits what
    is captured; ``batches`` the numbers of sequences that decode together. The first
    ``skip_first_layers`` layers and, with ``skip_last``, the last layer and the LM head stay in the
    runner. ``parameters`` are public beyond those that the scheme itself publishes.
    """

    name: str
    title: str
    scheme: str | type[Protection]
    masks: MaskOptions = field(default_factory=MaskOptions)
    skip_first_layers: int = 0
    skip_last: bool = False
    corpora: tuple[CorpusName, ...] = ("short", "decode")
    ops: tuple[Op, ...] = OPS
    batches: tuple[int, ...] | None = None
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)
    is_control: bool = False

    @property
    def base(self) -> type[Protection]:
        """The scheme itself.

        Raises:
            InvalidRequestError: the service has none of that name.
        """
        return service_scheme(self.scheme) if isinstance(self.scheme, str) else self.scheme

    def protection(self, observed: Callable[[type[Protection]], type[Protection]]) -> type[Protection]:
        """The scheme as it runs: ``observed`` wraps the part that sends operands to the worker."""
        sending = observed(self.base)
        if not self.skip_first_layers and not self.skip_last:
            return sending
        return left_in_runner(sending, first_layers=self.skip_first_layers, last=self.skip_last)

    def public_parameters(self) -> dict[str, int | float | str]:
        """All that an attacker knows of it."""
        return {
            **self.base.parameters(),
            "shared_decode": int(self.masks.shared_decode),
            "per_offload": int(self.masks.per_offload),
            "skip_first_layers": self.skip_first_layers,
            "skip_last": int(self.skip_last),
            **self.parameters,
        }

    def places(self, num_layers: int, corpus: CorpusName) -> tuple[Place, ...]:
        """The offloads to capture, in the order of a pass.

        Layers 0, 1, 2, ⌊0.8·L⌋ and L - 1 and the LM head; of long prompts 0 to 2. Layers that stay in
        the runner give way to the first ones that do not.
        """
        first = self.skip_first_layers
        end = num_layers - 1 if self.skip_last else num_layers
        layers = {first, first + 1, first + 2}
        if corpus != "long":
            layers |= {num_layers * 4 // 5, num_layers - 1}
        places: list[Place] = [
            (layer, op)
            for layer in sorted(layers)
            for op in OPS
            if first <= layer < end and op != "lm_head" and op in self.ops
        ]
        if "lm_head" in self.ops and not self.skip_last and corpus != "long":
            places.append((HEAD_LAYER, "lm_head"))
        return tuple(places)


CONDITIONS: Final[dict[str, Condition]] = {}


def register(condition: Condition) -> Condition:
    """Add ``condition`` to :data:`CONDITIONS`.

    Raises:
        ValueError: there is one of that name.
    """
    if condition.name in CONDITIONS:
        raise ValueError(f"there is a condition {condition.name!r} already")
    CONDITIONS[condition.name] = condition
    return condition


_ALL: Final[tuple[CorpusName, ...]] = ("short", "long", "decode")
_PER_OFFLOAD: Final = MaskOptions(per_offload=True)


def _paper(name: str, title: str, options: MixOptions, *, skip: bool = False) -> Condition:
    """A variant of GELO as its paper has it, with a fresh mask per projection."""
    return Condition(
        name=name,
        title=title,
        scheme=mixed(name, options),
        masks=_PER_OFFLOAD,
        skip_first_layers=2 if skip else 0,
        skip_last=skip,
        corpora=("short",),
    )


for _condition in (
    Condition(name="c0", title="Plain", scheme="plain", corpora=_ALL, is_control=True),
    Condition(name="c0-int8", title="Plain, quantised", scheme="plain-int8", corpora=_ALL, is_control=True),
    Condition(
        name="c1", title="Haar mask, no shield", scheme=mixed("haar, no shield", MixOptions()), corpora=_ALL
    ),
    Condition(name="c2", title="GELO, Haar", scheme="gelo-haar", corpora=_ALL),
    Condition(name="c3", title="GELO, HD3", scheme="gelo-hd3", corpora=_ALL),
    Condition(name="c4", title="GELO, DCT-IV", scheme="gelo-dct4", corpora=_ALL),
    Condition(
        name="c5",
        title="GELO, HD3, eight sequences decode under one mask",
        scheme="gelo-hd3",
        masks=MaskOptions(shared_decode=True),
        corpora=("decode",),
        batches=(8,),
    ),
    Condition(name="c6", title="GELO, Haar, LM head only", scheme="gelo-haar", ops=("lm_head",)),
    Condition(name="c7", title="LPN-blinded", scheme="lpn", corpora=_ALL),
    Condition(
        name="c2-offload", title="GELO, Haar, a mask per offload", scheme="gelo-haar", masks=_PER_OFFLOAD
    ),
    _paper(
        "paper-5",
        "Paper: shield of 5 % of the rows at 10 times their norm",
        MixOptions(shield_fraction=0.05, shield_energy=10.0),
    ),
    _paper(
        "paper-12",
        "Paper: shield of 12 % of the rows at 25 times their norm",
        MixOptions(shield_fraction=0.12, shield_energy=25.0),
    ),
    _paper(
        "paper-14",
        "Paper: shield of 14 % at 30 times, first two layers and the last in the runner",
        MixOptions(shield_fraction=0.14, shield_energy=30.0),
        skip=True,
    ),
    _paper(
        "paper-kappa-6",
        "Paper: shield of 12 % at 25 times, mask of condition number 6",
        MixOptions(shield_fraction=0.12, shield_energy=25.0, condition_number=6.0),
    ),
    _paper(
        "paper-kappa-50",
        "Paper: shield of 14 % at 30 times, mask of condition number 50",
        MixOptions(shield_fraction=0.14, shield_energy=30.0, condition_number=50.0),
    ),
    _paper(
        "paper-strongest",
        "Paper: 14 % at 30 times, condition number 50, first two layers and the last in the runner",
        MixOptions(shield_fraction=0.14, shield_energy=30.0, condition_number=50.0),
        skip=True,
    ),
):
    register(_condition)
