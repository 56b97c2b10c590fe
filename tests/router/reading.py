"""One request to a router of fakes, from the call to its end."""

from __future__ import annotations

from cluster.errors import PdserveError
from router.events import Finish
from router.given import GenerateInput
from tests.router.fakes import assert_conserved, metric, until


async def start(cluster, service, **given):
    generation = await service.generate(GenerateInput(prompt="hello", **given))
    return generation


async def read(generation):
    """Return the text, the ids and the end of a generation."""
    text, ids = "", []
    while True:
        try:
            event = await generation.next()
        except PdserveError as error:
            return text, ids, error
        text += event.text
        if isinstance(event, Finish):
            return text, ids, event
        ids += event.token_ids


def assert_given_back(cluster):
    """Each grant is done exactly once."""
    assert sorted(grant_id for grant_id, _ in cluster.route.dones) == sorted(cluster.route.grants)


async def finished(service, cluster):
    await until(lambda: metric(service, "pdserve_requests_in_flight") == 0)
    assert_conserved(service)
    assert_given_back(cluster)
