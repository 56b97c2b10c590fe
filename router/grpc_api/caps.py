"""Bounds of the gRPC door."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcCaps:
    """What one connection may take, and how often things are looked at."""

    health_beat_s: float = 1.0
    """Between two looks at the cluster's readiness."""
    watch_beat_s: float = 0.5
    """Between two looks at the cluster for those who watch it."""
    keepalive_s: float = 10.0
    """Between two pings to a silent client."""
    ping_timeout_s: float = 5.0
    """For its answer: a client that is stopped is found after both."""
    write_grace_s: float = 5.0
    """A client may read so long after its request's deadline."""
    connection_age_s: float = 60.0
    """Then, or after half of ``limits.drain_s``, a client is asked to connect again, and cut off
    when the longest deadline is over: grpc.aio can't reset one stream that its client doesn't read.
    A router that leaves waits so long for its clients to go."""
    max_streams: int = 1024
    """Of one connection."""
    max_connections: int = 2048
    max_per_address: int = 512
    """Connections of one client's address."""
    look_beat_s: float = 1.0
    """Between two looks at how many an address has."""
    handshake_timeout_s: float = 10.0
    """From a connection to the end of its HTTP/2 preface."""
