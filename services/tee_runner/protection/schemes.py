"""The schemes by name."""

from __future__ import annotations

from tee_runner.errors import InvalidRequestError
from tee_runner.protection.base import Protection
from tee_runner.protection.gelo.auto import Auto
from tee_runner.protection.gelo.dct4 import Dct4
from tee_runner.protection.gelo.haar import Haar
from tee_runner.protection.gelo.hd3 import Hd3
from tee_runner.protection.lpn.ring import PlainInt8
from tee_runner.protection.lpn.scheme import Lpn
from tee_runner.protection.plain import Plain

SCHEMES: dict[str, type[Protection]] = {
    scheme.name: scheme for scheme in (Plain, PlainInt8, Haar, Hd3, Dct4, Auto, Lpn)
}
DEFAULT_SCHEME = Lpn.name


def scheme(name: str) -> type[Protection]:
    """The scheme called ``name``.

    Raises:
        InvalidRequestError: there is none.
    """
    try:
        return SCHEMES[name]
    except KeyError:
        raise InvalidRequestError(
            f"There is no protection scheme {name!r}.", remedy=f"Choose one of: {', '.join(SCHEMES)}."
        ) from None
