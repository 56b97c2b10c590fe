"""An independent benchmark client finds what it needs: models, streams, usage, ignore_eos."""

import pytest

from tests.e2e.clients.aiperf import run_aiperf

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("program", ["aiperf"], indirect=True)
def test_aiperf_measures_without_special_flags(program, endpoint, cluster, tiny_llama, tmp_path):
    """Each request is answered with the tokens that were asked for."""
    run_aiperf(
        program, cluster, tmp_path, model="tiny", tokenizer=tiny_llama, endpoint=endpoint
    )  # fmt: skip
    cluster.wait_quiet()
