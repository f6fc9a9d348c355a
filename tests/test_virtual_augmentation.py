from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from torch import nn

from csl_hf.configuration import ContrastiveConfig
from csl_hf.objectives import contrastive_losses, virtual_neighborhood_loss
from csl_hf.virtual_augmentation import nearest_neighbors, perturb


class Head(nn.Module):
    """A small smooth head in float64, and the same function for NumPy rows."""

    def __init__(self, size: int = 5, out: int = 4):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(size, size, generator=generator, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(size, out, generator=generator, dtype=torch.float64))

    def forward(self, e):
        return F.normalize(torch.tanh(e @ self.a) @ self.b, dim=-1)

    def numpy(self, row):
        z = np.tanh(row @ self.a.detach().numpy()) @ self.b.detach().numpy()
        return z / np.linalg.norm(z)


def embeddings(num_rows: int = 9, size: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_neighbors_match_the_loops(similarity):
    e = embeddings()
    found = nearest_neighbors(e, 3, similarity)
    assert found.tolist() == reference.neighborhood(e.numpy(), 3, similarity)
    # the two similarities are really different on these rows
    assert nearest_neighbors(e, 3, "dot").tolist() != nearest_neighbors(e, 3, "cosine").tolist()


def test_equal_texts_and_oneself_are_no_neighbors():
    e = embeddings(6)
    e[4] = e[1]
    equal = torch.zeros(6, 6, dtype=torch.bool)
    equal[1, 4] = equal[4, 1] = True
    assert 4 in nearest_neighbors(e, 2, "cosine")[1]
    found = nearest_neighbors(e, 10, "cosine", exclude=equal)
    assert found.shape == (6, 4)  # rows 1 and 4 have four candidates left, so K = 4 for all
    for i, row in enumerate(found.tolist()):
        assert i not in row and len(set(row)) == 4
    assert 4 not in found[1] and 1 not in found[4]


def test_few_rows_have_few_neighbors():
    assert nearest_neighbors(embeddings(3), 16).shape == (3, 2)
    alike = torch.ones(3, 3, dtype=torch.bool)
    assert nearest_neighbors(embeddings(3), 16, exclude=alike).shape == (3, 0)


def test_perturbation_matches_a_numerical_gradient():
    head, e, radius = Head(), embeddings(6), 0.7
    neighbors = nearest_neighbors(e, 3)
    delta = perturb(e, head, neighbors, radius, 0.1, generator=torch.Generator().manual_seed(5))
    directions = torch.randn(e.shape, generator=torch.Generator().manual_seed(5), dtype=e.dtype).numpy()
    expected = reference.eq3(e.numpy(), head.numpy, neighbors.tolist(), radius, 0.1, directions)
    np.testing.assert_allclose(delta.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_norm_is_the_radius_on_the_sphere_and_at_most_in_the_ball(steps):
    head, e = Head(), embeddings()
    neighbors = nearest_neighbors(e, 3)
    generator = torch.Generator().manual_seed(0)
    on_sphere = perturb(e, head, neighbors, 0.4, steps=steps, generator=generator)
    torch.testing.assert_close(on_sphere.norm(dim=-1), torch.full((9,), 0.4, dtype=e.dtype))
    in_ball = perturb(e, head, neighbors, 0.4, steps=steps, constraint="ball", generator=generator)
    assert (in_ball.norm(dim=-1) <= 0.4 + 1e-12).all()
    assert not torch.allclose(on_sphere, in_ball, atol=1e-3)


def test_gradient_steps_raise_the_loss_of_the_random_start():
    head, e, radius = Head(), embeddings(), 0.3
    neighbors = nearest_neighbors(e, 4)

    def mean_loss(delta):
        z = np.stack([head.numpy(row) for row in e.numpy()])
        return np.mean(
            [reference.eq2(e[i].numpy(), delta[i], head.numpy, z, i, neighbors[i].tolist(), 0.1) for i in range(9)]
        )

    noise = torch.randn(e.shape, generator=torch.Generator().manual_seed(1), dtype=e.dtype)
    start = mean_loss((radius * F.normalize(noise, dim=-1)).numpy())
    one = mean_loss(perturb(e, head, neighbors, radius, 0.1, generator=torch.Generator().manual_seed(1)).numpy())
    assert one > start + 0.01


def test_perturb_leaves_every_gradient_alone():
    head, e = Head(), embeddings().requires_grad_()
    head.a.grad, head.b.grad = torch.full_like(head.a, 7.0), None
    delta = perturb(e, head, nearest_neighbors(e, 3), 0.5)
    assert torch.equal(head.a.grad, torch.full_like(head.a, 7.0)) and head.b.grad is None and e.grad is None
    assert not delta.requires_grad
    with torch.no_grad():  # works where the caller has switched gradients off
        assert perturb(e, head, nearest_neighbors(e, 3), 0.5).norm() > 0


def test_a_zero_gradient_keeps_the_random_start():
    """No neighbours: the loss is 0 for every perturbation, and so is its gradient."""
    head, e = Head(), embeddings(4)
    nobody = torch.zeros(4, 0, dtype=torch.int64)
    delta = perturb(e, head, nobody, 0.5, generator=torch.Generator().manual_seed(2))
    noise = torch.randn(e.shape, generator=torch.Generator().manual_seed(2), dtype=e.dtype)
    torch.testing.assert_close(delta, 0.5 * F.normalize(noise, dim=-1))


def test_tiny_gradients_keep_the_radius():
    """Rows far apart at a low temperature: the softmax is saturated and float32 gradients are about 1e-30."""
    e = torch.eye(4) * 10
    head = nn.Sequential()
    delta = perturb(e, lambda x: F.normalize(head(x), dim=-1), nearest_neighbors(e, 2), 0.1, temperature=0.014)
    torch.testing.assert_close(delta.norm(dim=-1), torch.full((4,), 0.1))


def config(**options) -> ContrastiveConfig:
    return ContrastiveConfig(**{"num_neighbors": 3, "radius": 0.5, "radius_is_absolute": True, **options})


def test_whole_objective_matches_the_loops():
    head = Head()
    e = torch.stack([embeddings(7, seed=0), embeddings(7, seed=0) + 0.1 * embeddings(7, seed=1)], dim=1)
    settings = config(temperature=0.1)
    losses = contrastive_losses(e, head, settings, generator=torch.Generator().manual_seed(4))
    directions = torch.randn(7, 5, generator=torch.Generator().manual_seed(4), dtype=e.dtype).numpy()
    expected = reference.eq6(e[:, 0].numpy(), e[:, 1].numpy(), head.numpy, 3, 0.5, 0.1, directions)
    assert set(losses) == {"nt_xent", "neighborhood"}
    assert sum(losses.values()).item() == pytest.approx(expected, abs=1e-6)


def test_reference_gradient_reaches_the_head_only_and_paper_gradient_both():
    gradients = {}
    for gradient in ("reference", "paper"):
        head, e = Head(), embeddings().requires_grad_()
        loss = virtual_neighborhood_loss(
            e, head, config(neighborhood_gradient=gradient), generator=torch.Generator().manual_seed(0)
        )
        loss.backward()
        gradients[gradient] = (loss.item(), e.grad, head.a.grad)
    assert gradients["reference"][0] == gradients["paper"][0]
    assert gradients["reference"][1] is None
    assert gradients["paper"][1].abs().max() > 1e-3
    assert gradients["reference"][2].abs().max() > 1e-3


def test_relative_radius_is_a_multiple_of_the_mean_norm():
    head, e = Head(), embeddings()
    mean_norm = e.norm(dim=-1).mean().item()
    relative = virtual_neighborhood_loss(
        e, head, config(radius=0.2, radius_is_absolute=False), generator=torch.Generator().manual_seed(0)
    )
    absolute = virtual_neighborhood_loss(
        e, head, config(radius=0.2 * mean_norm), generator=torch.Generator().manual_seed(0)
    )
    other = virtual_neighborhood_loss(e, head, config(radius=0.2), generator=torch.Generator().manual_seed(0))
    assert relative.item() == pytest.approx(absolute.item())
    assert relative.item() != pytest.approx(other.item(), rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"neighbor_similarity": "cosine"},
        {"perturbation_steps": 3},
        {"perturbation_steps": 3, "perturbation_constraint": "ball"},
        {"num_neighbors": 6},
        {"radius": 1.5},
        {"temperature": 0.2},
    ],
)
def test_every_option_changes_the_loss(options):
    def loss(settings):
        return virtual_neighborhood_loss(
            embeddings(), Head(), settings, generator=torch.Generator().manual_seed(0)
        ).item()

    assert loss(config(**options)) != pytest.approx(loss(config()), rel=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e, n, h: perturb(e, h, n, 0.0), "radius=0.0"),
        (lambda e, n, h: perturb(e, h, n, 1.0, steps=0), "steps=0"),
        (lambda e, n, h: perturb(e, h, n, 1.0, constraint="cube"), "cube"),
        (lambda e, n, h: perturb(e, h, n[:2], 1.0), r"\(2, 3\)"),
        (lambda e, n, h: nearest_neighbors(e, 0), "k=0"),
        (lambda e, n, h: nearest_neighbors(e, 2, "euclid"), "euclid"),
        (lambda e, n, h: nearest_neighbors(e, 2, exclude=torch.zeros(2, 2, dtype=torch.bool)), r"\(2, 2\)"),
    ],
)
def test_unusable_input_is_named(call, message):
    e = embeddings()
    with pytest.raises(ValueError, match=message):
        call(e, nearest_neighbors(e, 3), Head())


def test_objective_refuses_views_that_it_cannot_use():
    three = torch.randn(4, 3, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="3 views"):
        contrastive_losses(three, Head(), config())
    losses = contrastive_losses(three, Head(), config(loss="info_nce", neighborhood_weight=0))
    assert set(losses) == {"info_nce"}
