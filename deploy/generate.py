"""``pdserve generate``: one streamed answer over gRPC, and where its time went."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict

from cluster.errors import NoWorker, StartupError
from deploy import commands
from deploy.doors import grpc_client
from deploy.proof import timeline_text

if TYPE_CHECKING:
    import argparse

    from cluster.config import DeployConfig

_CONNECT_S = 3.0


def stream(config: DeployConfig, arguments: argparse.Namespace) -> int:
    """Print the answer as it comes, then its timeline; returns the exit code.

    Raises StartupError where there is no cluster, or the request's own error.
    """
    options = {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "timeline": True,
    }
    if arguments.seed is not None:
        options["seed"] = arguments.seed
    source = (
        {"prompt": arguments.prompt}
        if arguments.raw
        else {"messages": [("user", arguments.prompt)]}
    )
    with grpc_client(config) as client:
        try:
            client.connect(timeout_s=_CONNECT_S)
        except NoWorker as error:
            raise StartupError(f"{error.message}; {commands.START_REMEDY}") from error
        for piece in client.generate(**source, **options):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
            if piece.finish_reason:
                usage = (
                    f"{piece.usage.prompt_tokens} tokens in, {piece.usage.completion_tokens} out"
                )
                timeline = MessageToDict(
                    piece.timeline,
                    preserving_proto_field_name=True,
                    always_print_fields_with_no_presence=True,
                )
                timeline["prefill"]["transfer_bytes"] = piece.timeline.prefill.transfer_bytes
                sys.stdout.write(f"\n\n  {usage}\n{timeline_text(timeline)}\n")
    return 0
