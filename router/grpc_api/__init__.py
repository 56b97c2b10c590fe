"""The gRPC door: pdserve.v1.Inference over a ``Service``, with keys, health and reflection.

    metadata ──``keys``──▶ ``inference`` ──``requests``──▶ service ──``replies``──▶ messages

Codes and details are set and the handler returns. An error's ``code`` and field travel in the
trailing metadata, as the HTTP body has them.
"""

from router.grpc_api.caps import GrpcCaps
from router.grpc_api.door import GrpcDoor

__all__ = ["GrpcCaps", "GrpcDoor"]
