"""The router's own cost, measured at its real HTTP door before a stand-in of a cluster."""

import pytest

from deploy.bench import frontend, stand_in
from deploy.bench.frontend import FrontendSize
from tests.deploy.bench_doors import make_site
from tests.factories_model import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_a_request_costs_more_than_its_tokenising_and_a_token_something(folder):
    size = FrontendSize(num_prompt_tokens=100, num_requests=5, num_streams=3, num_tokens=20)

    request, token = frontend.measure(make_site(folder), size)

    assert request.value > request.reference > 0
    assert token.value > 0
    assert (str(request.bar), str(token.bar)) == ("value <= 3", "value <= 0.2")


def test_chats_have_the_wanted_number_of_tokens_and_differ(folder):
    size = FrontendSize(num_prompt_tokens=200, num_requests=12)

    with stand_in.serving(folder, "words") as router:
        texts = frontend._texts(router.codec, size)
        counts = [len(frontend._encode(router.codec, text)) for text in texts]

    assert len(set(texts)) == 12
    assert all(190 <= count <= 200 for count in counts)
