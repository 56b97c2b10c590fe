"""The trial model, SmolLM2-135M-Instruct: exact, as big as promised, and silent about prompts."""

import json
import logging
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from cluster import config as deploy_config
from cluster import errors
from cluster.config import Role
from deploy.cli import TRIAL_CONFIG
from deploy.client import Client
from deploy.model_source import resolve_model
from deploy.run_state import RunState
from deploy.trial_model import TRIAL_NAME
from tests.e2e import reference
from tests.e2e.plain_cluster import free_ports, plain_cluster
from tests.e2e.ray_cluster import ray_cluster

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.smollm, pytest.mark.timeout(400)]
NUM_TOKENS = 32
MAX_PSS_BYTES = 3 << 30
SHAPES = {
    "colocated": {"mixed": (Role.MIXED, 1)},
    "1P1D": {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)},
    "2P2D": {"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 2)},
}
SENTENCES = """
The ferry leaves at seven in the morning and comes back when the market closes.
Her brother repairs clocks, and none of those that hang in his own shop tells the right time.
In 1911 the river rose by four metres; a line on the church wall still shows how far it came.
Add the flour slowly, stir until the dough is smooth, and let it rest for 45 minutes.
Is there a reason why the northern road is closed every winter?
The committee read the report twice and asked for the measurements that it was based on.
Nobody had seen the cat since Tuesday, but the milk was gone each evening.
def area(width, height): return width * height
A train that is late by two minutes is, in the eyes of its driver, a train that is on time.
She wrote three letters: one to her landlord, one to the bank, and one that she never sent.
Copper conducts heat well, which is why the old pans were made of it.
"""


@pytest.fixture(scope="module")
def model():
    return resolve_model("trial").folder


@pytest.fixture(scope="module")
def prompts(model):
    """Sentences in an order of its own for each prompt, cut to the lengths of block borders."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    shuffled = random.Random(0)
    sentences = SENTENCES.strip().splitlines()
    prompts = []
    for prompt in reference.border_prompts(tokenizer.vocab_size):
        ids: list[int] = []
        while len(ids) < len(prompt):
            shuffled.shuffle(sentences)
            ids += tokenizer(" ".join(sentences) + "\n")["input_ids"]
        prompts.append(ids[: len(prompt)])
    return prompts


@pytest.fixture(scope="module")
def expected(model, prompts):
    return reference.greedy(model, prompts, NUM_TOKENS)


def generate(client: Client, prompt: list[int]) -> list[int]:
    pieces = client.generate(
        prompt_ids={"ids": prompt}, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
    )
    return [token for piece in pieces for token in piece.token_ids]


@pytest.mark.parametrize("shape", SHAPES)
def test_trial_tokens_equal_transformers(shape, model, prompts, expected, tmp_path):
    """CASES P-13 with real weights: 50 prompts at concurrency 8, ten of them one by one."""
    assert len(prompts) == 50
    with (
        plain_cluster(model, tmp_path, SHAPES[shape]) as cluster,
        Client(cluster.grpc) as client,
    ):
        with ThreadPoolExecutor(8) as pool:
            outputs = list(pool.map(lambda prompt: generate(client, prompt), prompts))
        alone = [generate(client, prompt) for prompt in prompts[::5]]
    wrong, ties = expected.disagreements(outputs)
    some = reference.Reference(expected.tokens[::5], expected.gaps[::5])
    wrong_alone, ties_alone = some.disagreements(alone)
    num_outputs = len(outputs) + len(alone)
    logger.info("%s: %d of %d outputs differ at a near-tie", shape, ties + ties_alone, num_outputs)
    assert (wrong, wrong_alone) == ([], [])
    assert ties + ties_alone <= num_outputs * 0.01


@pytest.fixture(scope="module")
def trial(model, tmp_path_factory):
    """The trial as ``make run`` starts it, on ports of its own."""
    doors = ("http_port", "grpc_port", "control_port")
    ports = zip(doors, free_ports(3), strict=True)
    config = deploy_config.load(TRIAL_CONFIG, [f"endpoints.{door}={port}" for door, port in ports])
    with ray_cluster(config, tmp_path_factory.mktemp("trial")) as cluster:
        yield cluster


@pytest.mark.ray
def test_trial_knows_paris(trial):
    """The answer that the README promises, over the chat route."""
    with openai.OpenAI(base_url=f"{trial.http}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model=TRIAL_NAME,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=20,
            temperature=0,
        )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.ray
def test_trial_logs_no_prompt(trial):
    """S-06: no file of the run and no line of the launcher holds words of a prompt."""
    marker = "xylophonist quagmire"
    body = {"model": TRIAL_NAME, "max_tokens": 8}
    url = f"{trial.http}/v1"
    messages = [{"role": "user", "content": f"Repeat this: {marker}"}]
    for path, ask, status in (
        ("chat/completions", {"messages": messages}, 200),
        ("chat/completions", {"messages": messages, "max_tokens": -1}, 400),
        ("chat/completions", {"messages": [{"role": marker, "content": marker}]}, 400),
        ("completions", {"prompt": marker, "stop": [marker], "stream": True}, 200),
        ("completions", {"prompt": f"{marker} " * 2000}, 400),
        (f"completions?{marker.replace(' ', '+')}", {"prompt": marker, "model": marker}, 404),
    ):
        answer = httpx.post(f"{url}/{path}", json=body | ask, timeout=60)
        assert answer.status_code == status, (path, ask)
    broken = json.dumps(body | {"prompt": marker})[:-1].encode()
    headers = {"content-type": "application/json"}
    assert httpx.post(f"{url}/completions", content=broken, headers=headers).status_code == 400
    with Client(trial.grpc) as client:
        assert list(client.generate(prompt=marker, max_tokens=8))
        with pytest.raises(errors.InvalidRequest):
            list(client.generate(prompt=marker, stop=[marker] * 9))
    state = RunState(trial.config.endpoints.control_port)
    files = [path for path in state.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    contents = {path: path.read_bytes() for path in files}
    assert any(b"pdserve_router" in content for content in contents.values()), "these are no logs"
    words = [word.encode() for word in marker.split()]
    telling = [p for p, content in contents.items() if any(word in content for word in words)]
    assert telling == []
    assert not any(word in line for word in marker.split() for line in trial.lines)


@pytest.mark.ray
def test_trial_fits_its_memory(trial):
    """All processes of the trial, after some requests, share less than 3 GiB."""
    with Client(trial.grpc) as client, ThreadPoolExecutor(4) as pool:
        asks = [f"Write about the number {number}. " * 20 for number in range(8)]
        list(pool.map(lambda ask: list(client.generate(prompt=ask, max_tokens=32)), asks))
    started = RunState(trial.config.endpoints.control_port).started()
    pids = {trial.process.pid, *(process.pid for process in started)}
    sizes = {}
    for process in map(psutil.Process, pids):
        with process.oneshot():
            sizes[f"{process.name()} {process.pid}"] = process.memory_full_info().pss
    total = sum(sizes.values())
    logger.info("PSS %d MiB: %s", total >> 20, sizes)
    assert len(sizes) > 5, "these are not all"
    assert total <= MAX_PSS_BYTES, sizes
