"""Draws: greedy, seeded, limited to their support, and distributed as asked."""

import itertools

import pytest
import torch

from cluster.errors import EngineFault
from cluster.model.draw import Draw
from cluster.model.sampler import gumbel_noise, sample
from cluster.request import SamplingParams


def make_draw(*, temperature=1.0, top_p=1.0, top_k=0, seed=0, choice=0, output_index=0) -> Draw:
    params = SamplingParams(
        max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    return Draw(params=params, choice=choice, output_index=output_index)


def draw_many(logits: torch.Tensor, count: int, **options) -> torch.Tensor:
    draws = [make_draw(output_index=index, **options) for index in range(count)]
    return torch.tensor(sample(logits.expand(count, -1), draws))


def chi_square(drawn: torch.Tensor, probabilities: torch.Tensor) -> float:
    counts = torch.bincount(drawn, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(drawn)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.fixture
def logits():
    return torch.randn(500, generator=torch.Generator().manual_seed(5)) * 2


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-45, 1e-5])
def test_greedy_and_nearly_greedy_take_the_best(logits, temperature):
    """P-03: a tiny temperature behaves as 0."""
    drawn = draw_many(logits * 100, 20, temperature=temperature, seed=3)
    assert set(drawn.tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-3])
def test_small_temperatures_do_not_overflow(logits, temperature):
    drawn = draw_many(logits * 1e30, 20, temperature=temperature, top_p=0.9, top_k=5)
    assert set(drawn.tolist()) == {int(logits.argmax())}


def test_the_same_draw_gives_the_same_token_and_each_part_of_its_name_matters(logits):
    wide = logits / 100

    def drawn(**name):
        return [sample(wide[None], [make_draw(output_index=i, **name)])[0] for i in range(20)]

    assert drawn(seed=1) == drawn(seed=1)
    names = [{"seed": 1}, {"seed": 2}, {"seed": 1, "choice": 1}, {"seed": 2**63 + 1}]
    outputs = [drawn(**name) for name in names]
    assert all(a != b for a, b in itertools.combinations(outputs, 2))
    assert len(set(outputs[0])) > 15


def test_a_row_does_not_depend_on_its_neighbours(logits):
    """P-04: one row alone, and among others with other limits."""
    draw = make_draw(seed=9, top_p=0.8, top_k=50, temperature=1.3)
    rows = torch.stack([logits.flip(0), logits, logits * 0, logits])
    others = [make_draw(top_k=400), draw, make_draw(temperature=0.0), make_draw(top_p=0.999)]
    assert sample(rows, others)[1] == sample(logits[None], [draw])[0]


def test_noise_is_the_same_bits_whatever_the_batch_and_the_vocabulary():
    draws = [make_draw(seed=seed, output_index=4) for seed in range(6)]
    noise = gumbel_noise(draws, 1000, torch.device("cpu"))
    assert torch.equal(noise[2:3], gumbel_noise(draws[2:3], 1000, torch.device("cpu")))
    assert torch.equal(noise[:, :77], gumbel_noise(draws, 77, torch.device("cpu")))
    assert torch.isfinite(noise).all()


def test_noise_bits_are_pinned():
    """Workers of different versions must go on with each other's choices."""
    [noise] = gumbel_noise([make_draw(seed=42, choice=1, output_index=7)], 4, torch.device("cpu"))
    assert noise.view(torch.int32).tolist() == [1062952648, -1089979411, 1050084332, -1088030900]


def test_noise_has_the_moments_of_gumbel():
    noise = gumbel_noise([make_draw(seed=s) for s in range(20)], 50_000, torch.device("cpu"))
    assert abs(float(noise.mean()) - 0.57722) < 0.005
    assert abs(float(noise.var()) - 1.64493) < 0.02


def test_draws_follow_the_softmax_at_their_temperature():
    logits = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, -1.0])
    drawn = draw_many(logits, 20_000, temperature=0.7, seed=1)
    # 20.5 is the 0.1 % point of chi-square with 5 degrees of freedom.
    assert chi_square(drawn, (logits / 0.7).softmax(0)) < 20.5
    assert chi_square(drawn, (logits / 0.8).softmax(0)) > 20.5


@pytest.mark.parametrize("top_k", [1, 2, 7, 499])
def test_top_k_draws_from_the_k_best_only(logits, top_k):
    drawn = draw_many(logits / 50, 3000, top_k=top_k)
    best = set(logits.topk(top_k).indices.tolist())
    assert set(drawn.tolist()) <= best
    assert len(set(drawn.tolist())) >= min(top_k, 400)


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999])
def test_top_p_draws_from_the_fewest_that_hold_p(logits, top_p):
    ordered = logits.softmax(0).sort(descending=True)
    num_kept = 1 + int((ordered.values.double().cumsum(0) < top_p).sum())
    drawn = draw_many(logits, 4000, top_p=top_p)
    assert set(drawn.tolist()) <= set(ordered.indices[:num_kept].tolist())
    assert len(set(drawn.tolist())) > num_kept * 0.4


def test_top_p_is_of_what_top_k_leaves():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the three best, 0.9 together, two hold 0.7 / 0.9 = 0.78.
    assert set(draw_many(logits, 500, top_k=3, top_p=0.77).tolist()) == {0, 1}
    assert set(draw_many(logits, 500, top_k=3, top_p=0.79).tolist()) == {0, 1, 2}
    assert set(draw_many(logits, 500, top_p=0.69).tolist()) == {0, 1}


def test_top_p_beyond_the_first_candidates_sorts_everything():
    flat = torch.zeros(5000) - torch.arange(5000) * 1e-6
    drawn = draw_many(flat, 3000, top_p=0.5)
    assert int(drawn.max()) < 2520
    assert int(drawn.max()) > 2300
    assert int(drawn.min()) < 200


def test_limits_beyond_the_vocabulary_are_off(logits):
    assert torch.equal(draw_many(logits, 50), draw_many(logits, 50, top_k=10**9))


def test_logits_in_bf16_are_drawn_from(logits):
    drawn = draw_many(logits.to(torch.bfloat16), 50, top_k=3)
    assert set(drawn.tolist()) <= set(logits.topk(4).indices.tolist())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_a_fault(logits, bad, temperature):
    logits[7] = bad
    with pytest.raises(EngineFault, match="not finite"):
        sample(logits[None], [make_draw(temperature=temperature)])
