"""gRPC settings that both ends of a worker's streams share: size caps, and finding silent peers."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 << 20
"""Of one leg or one batch of tokens; block bytes never travel here."""
INCARNATION_METADATA = "worker-incarnation"
"""Call metadata: which incarnation a router means; answered with the one it reached."""

_KEEPALIVE = [
    # A peer that answers no ping is found within the sum of the first two.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    # Without this a ping may stay unanswered for a minute, whatever the keepalive says.
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
CHANNEL_OPTIONS = (
    *_KEEPALIVE,
    # One connection for each channel: a peer's death must not be hidden by a shared one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
SERVER_OPTIONS = (
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would share its connections in silence.
    ("grpc.so_reuseport", 0),
)
