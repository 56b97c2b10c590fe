"""P-18: what one tenant has cached is nothing to another, wherever it would be found."""

from __future__ import annotations

import dataclasses

import httpx
import pytest

from cluster.config import AuthConfig, Role
from tests.e2e.plain_cluster import make_config, running

pytestmark = pytest.mark.slow

KEYS = {"a": "key-of-tenant-a", "b": "key-of-tenant-b"}
TWO_PAIRS = {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)}
X = [11 + 37 * i % 199 for i in range(200)]
CACHED = 192
"""Of these 200 tokens: whole blocks of 16, and never the last token."""


@pytest.fixture(scope="module")
def cluster(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys"
    keys.write_text("".join(f"{tenant}={key}\n" for tenant, key in KEYS.items()))
    config = make_config(tiny_llama, TWO_PAIRS)
    config = dataclasses.replace(config, auth=AuthConfig(keys_file=str(keys)))
    with running(config, tiny_llama, folder) as built:
        yield built


def post(cluster, tenant, **changes):
    given = {"prompt": X, "max_tokens": 8, "temperature": 0, "timeline": True, **changes}
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.post(f"{cluster.http}/v1/completions", json=given, headers=headers, timeout=30)


def ask(cluster, tenant, **changes):
    """Return the answer's text, its cached tokens and its timeline."""
    response = post(cluster, tenant, **changes)
    assert response.status_code == 200, response.text
    body = response.json()
    details = body["usage"]["prompt_tokens_details"]
    return body["choices"][0]["text"], details["cached_tokens"], body["pdserve"]["timeline"]


def test_a_prompt_is_found_by_its_own_tenant_alone_and_placed_where_it_is(cluster):
    """P-18, S-12: over two pairs; no field of a request makes two tenants one, or splits one."""
    text, cached, first = ask(cluster, "a")
    assert cached == 0
    again, cached, second = ask(cluster, "a")
    assert (again, cached) == (text, CACHED)
    assert second["prefill_worker"] in (first["prefill_worker"], first["decode_worker"])
    for salt in ("a", ""):
        salted = post(cluster, "b", cache_salt=salt).json()
        assert salted["error"]["param"] == "cache_salt", "the key alone says who it is"
    assert ask(cluster, "b", user="a")[:2] == (text, 0)
    assert ask(cluster, "b")[:2] == (text, CACHED)
    for changes in ({"cache_salt": None}, {"user": "b"}):
        assert ask(cluster, "a", **changes)[:2] == (text, CACHED), changes
    for changes in ({"temperature": 0.7, "seed": 3}, {"top_k": 5, "seed": 4}, {"max_tokens": 2}):
        assert ask(cluster, "a", **changes)[1] == CACHED, changes


def test_a_guess_at_anothers_prompt_is_placed_like_any_other(cluster):
    """P-18: who guesses right is told of no cache, by neither numbers nor placement."""
    ask(cluster, "a", prompt=[5, *X])
    ask(cluster, "a", prompt=[5, *X])
    for prompt in ([5, *X], [6, *X], [7, *X]):
        _, cached, timeline = ask(cluster, "b", prompt=prompt)
        assert cached == 0
        assert timeline["prefill"]["num_cached_tokens"] == 0
        assert timeline["reason"].startswith("pair: ")
