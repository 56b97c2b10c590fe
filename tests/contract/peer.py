"""One end of a channel in a process of its own: ``python -m tests.contract.peer KIND RANK WHAT``.

Its rendezvous are lines on stdin and stdout, ``KEY VALUE`` in hex. WHAT is ``wait`` (do nothing)
or ``move`` (send or receive 64 MiB).
"""

from __future__ import annotations

import sys

import torch

from cluster.transport.base import SENDER, Rendezvous, TransportError
from tests.contract import ends


class Lines(Rendezvous):
    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        say(f"{key} {value.hex()}")

    def get(self, key: str, timeout_s: float) -> bytes:
        while key not in self.entries:
            name, _, value = sys.stdin.readline().strip().partition(" ")
            self.entries[name] = bytes.fromhex(value)
        return self.entries[key]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(kind: str, rank: int, what: str) -> None:
    torch.set_num_threads(1)
    transport = getattr(ends, kind)()[0]
    channel = transport.open(link_id="p/1", rank=rank, rendezvous=Lines(), timeout_s=ends.LONG_S)
    data_B = torch.ones(64 << 20, dtype=torch.uint8)
    say("open")
    if what == "move":
        try:
            (channel.send if rank == SENDER else channel.recv)(data_B, ends.LONG_S)
        except TransportError as error:
            say(f"failed {type(error).__name__}")
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
