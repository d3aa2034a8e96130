"""The attacks by name, in the order of the report."""

from __future__ import annotations

from typing import Final

from evals.attacks.drivers.anchor_ica import AnchorIca
from evals.attacks.drivers.bank import Bank
from evals.attacks.drivers.distinguish import Distinguish
from evals.attacks.drivers.gram import GramDistance, GramFingerprint
from evals.attacks.drivers.ima_transformer import TransformerInversion
from evals.attacks.drivers.inversion import EmbeddingInversion, InternalStateInversion
from evals.attacks.drivers.jade import Jade
from evals.attacks.drivers.joint_diagonalisation import JointDiagonalisation
from evals.attacks.drivers.leverage import Leverage
from evals.attacks.drivers.metadata import Metadata
from evals.attacks.drivers.nearest import NearestNeighbour
from evals.attacks.drivers.not_applicable import (
    AttentionScoreInversion,
    InvariantAttack,
    TokenFrequency,
    VocabularyMatching,
)
from evals.attacks.drivers.prefix import PrefixCandidates
from evals.attacks.drivers.row_space import RowSpace
from evals.attacks.model import Attack

ATTACKS: Final[dict[str, Attack]] = {
    attack.name: attack
    for attack in (
        NearestNeighbour(),
        EmbeddingInversion(),
        InternalStateInversion(),
        TransformerInversion(),
        AnchorIca(),
        Jade(),
        JointDiagonalisation(),
        GramDistance(),
        GramFingerprint(),
        RowSpace(),
        PrefixCandidates(),
        Leverage(),
        Bank(),
        InvariantAttack(),
        VocabularyMatching(),
        TokenFrequency(),
        AttentionScoreInversion(),
        Distinguish(),
        Metadata(),
    )
}
