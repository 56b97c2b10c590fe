"""What clients write is in no log, whatever becomes of their requests."""

import json
import logging

import httpx
import pytest

from cluster import errors
from cluster.config import Role
from deploy.client import Client
from tests.e2e.plain_cluster import plain_cluster

MARKER = "xylophonist quagmire"
GOOD = {"model": "tiny", "max_tokens": 4, "prompt": MARKER}
CHAT = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": MARKER}]}
CALLS = [
    ("completions", GOOD, 200),
    ("completions", GOOD | {"stream": True, "stop": [MARKER]}, 200),
    ("completions", GOOD | {"max_tokens": -1}, 400),
    ("completions", GOOD | {"prompt": f"{MARKER} " * 500}, 400),
    ("completions", GOOD | {"model": MARKER}, 404),
    ("completions", GOOD | {"temperature": MARKER}, 400),
    ("completions", GOOD | {"timeout_s": 1e-3}, 504),
    ("chat/completions", CHAT, 200),
    ("chat/completions", CHAT | {"messages": [{"role": MARKER, "content": MARKER}]}, 400),
]


def test_no_log_holds_words_of_a_prompt(tiny_llama, tmp_path, caplog):
    """S-06: router and control plane at DEBUG, workers as they are started; good and bad calls."""
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}
    caplog.set_level(logging.DEBUG)
    with plain_cluster(tiny_llama, tmp_path, pools) as cluster:
        for path, body, status in CALLS:
            answer = httpx.post(f"{cluster.http}/v1/{path}", json=body, timeout=30)
            assert answer.status_code == status, (path, body)
        broken = json.dumps(GOOD)[:-1].encode()
        headers = {"content-type": "application/json"}
        url = f"{cluster.http}/v1/completions"
        assert httpx.post(url, content=broken, headers=headers).status_code == 400
        with Client(cluster.grpc) as client:
            assert list(client.generate(prompt=MARKER, max_tokens=4))
            with pytest.raises(errors.InvalidRequest):
                list(client.generate(prompt=MARKER, stop=[MARKER] * 9))
        cluster.wait_quiet()
    ours = ("router", "cluster", "uvicorn", "fastapi")
    texts = [r.getMessage() for r in caplog.records if r.name.startswith(ours)]
    texts += [path.read_text() for path in tmp_path.glob("*.log")]
    assert any("request=" in text for text in texts), "nothing was logged"
    assert any("handoff=" in text for text in texts), "nothing was logged"
    assert not any(word in text for text in texts for word in MARKER.split())
