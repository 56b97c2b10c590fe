"""One flipped byte of KV: found with a digest; without one it changes what is said."""

import dataclasses

import pytest

from cluster.config import Role
from tests.e2e.plain_cluster import make_config
from tests.e2e.process_cluster import fault, process_cluster
from tests.e2e.streams import Prompts

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
NUM_PROMPTS = 4
HIGH_BYTE = 3
"""Of the first float: its sign and most of its exponent."""


def say(tiny_llama, folder, *, digest: bool):
    """Send prompts whose KV is corrupted each time; returns them and their streams."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    config = make_config(tiny_llama, pools)
    limits = dataclasses.replace(config.limits, kv_digest=digest)
    prompts = Prompts(tiny_llama, NUM_PROMPTS, num_prompt=40, num_tokens=16)
    config = dataclasses.replace(config, limits=limits)
    with process_cluster(config, tiny_llama, folder) as cluster:
        streams = []
        for number in range(NUM_PROMPTS):
            cluster.faults("decode-0").set(fault("corrupt", "data.recv", offset=HIGH_BYTE))
            streams.append(prompts.stream(cluster.grpc, number))
            streams[-1].wait_end()
            assert cluster.faults("decode-0").clear() == [1]
        cluster.wait_quiet()
    return prompts, streams


def test_with_a_digest_corrupted_kv_is_computed_again(tiny_llama, tmp_path):
    """CASES §0 W: refused, recomputed, and right to the token."""
    prompts, streams = say(tiny_llama, tmp_path, digest=True)
    for number, stream in enumerate(streams):
        prompts.check(number, stream)


def test_without_a_digest_the_same_byte_is_heard(tiny_llama, tmp_path):
    """CASES §2, copy list 2: the detector detects: this fault does change tokens."""
    prompts, streams = say(tiny_llama, tmp_path, digest=False)
    assert all(stream.error == "" for stream in streams)
    assert any(
        stream.tokens != expected
        for stream, expected in zip(streams, prompts.reference.tokens, strict=True)
    )
