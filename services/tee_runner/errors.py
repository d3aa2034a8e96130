"""Typed errors of the runner: what happened, whose fault it is, what to do."""

from __future__ import annotations

from typing import ClassVar, Literal

Fault = Literal["client", "operator", "worker", "model", "internal"]


class GeloError(Exception):
    """Base of every error the runner raises on purpose.

    ``fault`` names the party whose input or behaviour caused it, ``code`` is a stable
    machine-readable name, ``remedy`` tells a person what to do next. No message carries a
    prompt, a token, an activation or a key.
    """

    code: ClassVar[str] = "internal_error"
    fault: ClassVar[Fault] = "internal"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class InvalidRequestError(GeloError):
    """The request cannot be served as it stands."""

    code = "invalid_request"
    fault = "client"


class CapacityError(GeloError):
    """The service is out of a bounded resource (sequence slots, queue places)."""

    code = "over_capacity"
    fault = "operator"


class ModelError(GeloError):
    """A model file is missing, malformed or of a kind that is not supported."""

    code = "invalid_model"
    fault = "model"


class UnsupportedModelError(ModelError):
    """The model asks for something this decoder does not implement. Named, never guessed."""

    code = "unsupported_model"


class WorkerError(GeloError):
    """The untrusted worker failed to give a usable answer."""

    code = "worker_error"
    fault = "worker"


class WorkerUnavailableError(WorkerError):
    """The worker cannot be reached, died, or did not answer within its deadline."""

    code = "worker_unavailable"


class WorkerProtocolError(WorkerError):
    """The worker answered with bytes that are not what the protocol allows."""

    code = "worker_protocol"


class IntegrityError(WorkerError):
    """A result is not the product it was asked for. Nothing of it was used."""

    code = "integrity_failed"
