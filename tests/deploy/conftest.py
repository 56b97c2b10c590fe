"""What the tests of whole workers share."""

import pytest

from tests.deploy.world import making_world


@pytest.fixture
async def world():
    async with making_world() as made:
        yield made
