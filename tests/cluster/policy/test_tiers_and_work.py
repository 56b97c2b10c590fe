"""Named tiers, and guesses at how long an output will be."""

import pytest

from cluster.errors import InvalidRequest
from cluster.policy.tiers import Tiers
from cluster.policy.work import OutputEstimates

TIERS = Tiers(names=("batch", "normal", "urgent"), default="normal")


def test_a_tier_has_a_rank_and_none_is_the_default():
    assert [TIERS.rank(name) for name in ("batch", "", "urgent")] == [0, 1, 2]


def test_an_unknown_tier_is_the_clients_mistake():
    with pytest.raises(InvalidRequest, match="batch, normal, urgent") as caught:
        TIERS.rank("gold")
    assert (caught.value.field, caught.value.http_status) == ("priority", 400)


@pytest.mark.parametrize(
    ("name", "default", "ceiling", "allowed"),
    [
        ("", "", "", "normal"),
        ("urgent", "", "", "urgent"),
        ("", "batch", "", "batch"),
        ("", "urgent", "normal", "normal"),
        ("", "", "batch", "batch"),
        ("normal", "batch", "normal", "normal"),
    ],
)
def test_a_tenant_has_a_default_and_a_ceiling(name, default, ceiling, allowed):
    assert TIERS.allowed(name, default=default, ceiling=ceiling) == allowed


def test_more_than_the_ceiling_is_refused():
    with pytest.raises(InvalidRequest, match="normal is the highest"):
        TIERS.allowed("urgent", ceiling="normal")


def test_the_hint_then_the_tenants_outputs_then_the_most():
    outputs = OutputEstimates()
    assert outputs.expected("a", max_tokens=100) == 100.0
    assert outputs.expected("a", max_tokens=100, hint=7) == 7.0
    assert outputs.expected("a", max_tokens=5, hint=7) == 5.0
    outputs.note("a", 20)
    outputs.note("a", 30)
    assert outputs.expected("a", max_tokens=100) == pytest.approx(21.0)
    assert outputs.expected("b", max_tokens=100) == 100.0
    outputs.note("a", 0)
    assert outputs.expected("a", max_tokens=100) == pytest.approx(21.0)
