"""The one tree of errors that cross a room or a wire.

    PdserveError
    ├── InvalidRequest     400  INVALID_ARGUMENT     the client's mistake; names the field
    ├── Unauthenticated    401  UNAUTHENTICATED      no API key, or none that is known
    ├── ModelNotFound      404  NOT_FOUND            no such model, request or route
    ├── RequestTooLarge    413  OUT_OF_RANGE         a size above a stated cap
    ├── QueueFull          429  RESOURCE_EXHAUSTED   the caller has its share already; retryable
    │   └── ClusterFull    503  UNAVAILABLE          too many wait, whoever comes; retryable
    ├── Cancelled          499  CANCELLED            the client left or asked to stop
    ├── EngineFault        500  INTERNAL             a bug of ours or of a library
    ├── WorkerLost         502  ABORTED              a worker died or was cut off; retryable
    ├── HandoffFailed      502  DATA_LOSS            the KV did not arrive whole; retryable
    ├── NoWorker           503  UNAVAILABLE          no worker of a needed role; retryable
    ├── DeadlineExceeded   504  DEADLINE_EXCEEDED    the request's one deadline passed
    └── StartupError            (never on a wire)    the product cannot start as asked
        ├── ConfigError                              a key or value of the deploy file
        └── UnsupportedModel                         a checkpoint that the engine refuses

``stage`` is where in a request's life it happened, ``worker_id`` who; the message says why, since
``__cause__`` crosses no wire.
Workers' ids go into logs and the control plane's view, never into a client's error body.
"""

from __future__ import annotations

from typing import ClassVar


class PdserveError(Exception):
    """Base of all errors that this product raises on purpose."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    is_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        stage: str = "",
        worker_id: str = "",
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.worker_id = worker_id
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequest(PdserveError):
    """The client sent something that can never be served; ``field`` names what."""

    code = "invalid_request"
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"


class Unauthenticated(PdserveError):
    """The call brought no API key, or one that nobody has."""

    code = "unauthenticated"
    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class ModelNotFound(PdserveError):
    """The named model, request or route does not exist here."""

    code = "model_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class RequestTooLarge(PdserveError):
    """A size is above a stated cap; refused before work in proportion to it."""

    code = "request_too_large"
    http_status = 413
    grpc_code = "OUT_OF_RANGE"


class QueueFull(PdserveError):
    """The caller has its share already; ``retry_after_s`` says when to come back."""

    code = "queue_full"
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    is_retryable = True


class ClusterFull(QueueFull):
    """So many wait that nobody else may, or would be served within its deadline."""

    code = "cluster_full"
    http_status = 503
    grpc_code = "UNAVAILABLE"


class Cancelled(PdserveError):
    """The client left, or asked for the request to stop."""

    code = "cancelled"
    http_status = 499
    grpc_code = "CANCELLED"


class EngineFault(PdserveError):
    """What cannot be, is: a bug of ours or of a library."""

    code = "engine_fault"


class WorkerLost(PdserveError):
    """A worker died, was declared dead, or its leg was cut."""

    code = "worker_lost"
    http_status = 502
    grpc_code = "ABORTED"
    is_retryable = True


class HandoffFailed(PdserveError):
    """The KV of a request did not arrive whole at its decode worker."""

    code = "handoff_failed"
    http_status = 502
    grpc_code = "DATA_LOSS"
    is_retryable = True


class NoWorker(PdserveError):
    """No worker of a needed role is ready."""

    code = "no_worker"
    http_status = 503
    grpc_code = "UNAVAILABLE"
    is_retryable = True


class DeadlineExceeded(PdserveError):
    """The request's one deadline passed."""

    code = "deadline_exceeded"
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"


class StartupError(PdserveError):
    """The product cannot start as asked; the message carries reason and remedy."""

    code = "startup_error"


class ConfigError(StartupError):
    """A key or value of the deploy file is wrong; ``field`` is its dotted path."""

    code = "config_error"


class UnsupportedModel(StartupError):
    """The engine refuses this checkpoint; the message names the reason."""

    code = "unsupported_model"


_WIRE_ERRORS: tuple[type[PdserveError], ...] = (
    InvalidRequest,
    Unauthenticated,
    ModelNotFound,
    RequestTooLarge,
    QueueFull,
    ClusterFull,
    Cancelled,
    EngineFault,
    WorkerLost,
    HandoffFailed,
    NoWorker,
    DeadlineExceeded,
)
IN_STEP = "step"
"""Stage of the ``WorkerLost`` that ends those whose step failed: they may be what it died of."""
BY_CODE: dict[str, type[PdserveError]] = {error.code: error for error in _WIRE_ERRORS}
"""Error types by the ``code`` they carry on a wire."""
