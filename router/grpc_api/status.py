"""Errors as gRPC tells them: code, text, and in the trailing metadata what HTTP bodies have."""

from __future__ import annotations

import logging
import math
from typing import Any

import grpc

from cluster.errors import EngineFault, PdserveError
from router.public_errors import public_message

logger = logging.getLogger(__name__)


def fail(context: Any, error: Exception) -> None:
    """Set the call's status; what is no error of ours is a fault of ours, told in the log."""
    if not isinstance(error, PdserveError):
        logger.error("a call failed", exc_info=error)
        error = EngineFault("a call failed", stage="edge")
    context.set_code(grpc.StatusCode[error.grpc_code])
    context.set_details(public_message(error))
    context.set_trailing_metadata(metadata_of(error))


def metadata_of(error: PdserveError) -> tuple[tuple[str, str], ...]:
    """Return an error's code, field and time to come back."""
    metadata = [("pdserve-code", error.code)]
    if error.field is not None:
        metadata.append(("pdserve-param", error.field))
    if error.retry_after_s is not None:
        metadata.append(("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
    return tuple(metadata)
