"""How a worker's pool and the cluster's other pools decide what it moves KV through."""

import pytest

from cluster import config as deploy_config
from cluster.config import TransportKind
from cluster.transport.auto import AutoTransport
from cluster.transport.shm import ShmTransport
from cluster.transport.torch_dist import TorchDistTransport
from deploy.worker_parts import _make_transport

POOLS = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]


@pytest.mark.parametrize(
    ("own", "other", "kind"),
    [
        ("torch_dist", "torch_dist", TorchDistTransport),
        ("shm", "shm", ShmTransport),
        ("auto", "auto", AutoTransport),
        ("torch_dist", "auto", AutoTransport),
        ("shm", "auto", AutoTransport),
        ("auto", "shm", AutoTransport),
    ],
)
def test_ends_that_may_differ_look_for_what_they_have_in_common(own, other, kind):
    pools = [dict(POOLS[0], transport=own), dict(POOLS[1], transport=other)]
    config = deploy_config.from_tree({"pools": pools})
    transport = _make_transport(config, config.pool("p"), "cpu")
    assert type(transport) is kind
    assert transport.kind is TransportKind(own)
