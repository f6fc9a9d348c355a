from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F

from csl_hf.losses import info_nce, neighborhood_loss, nt_xent


def unit_rows(num_rows: int, size: int = 6, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(num_rows, size, generator=generator, dtype=dtype), dim=-1)


def test_nt_xent_by_hand():
    """Two texts on orthogonal axes, both views equal: every anchor has its positive at similarity 1 and two
    negatives at 0, so the loss is ln(1 + 2 e^(-1/tau)); tau = 1/2 gives ln(1 + 2 e^-2) = 0.239545."""
    z = torch.eye(2, dtype=torch.float64)
    loss = nt_xent(z, z, temperature=0.5)
    assert loss.item() == pytest.approx(math.log(1 + 2 * math.exp(-2)), abs=1e-12)
    assert loss.item() == pytest.approx(0.239545, abs=1e-6)


@pytest.mark.parametrize("num_rows", [2, 5])
def test_losses_of_a_collapse_are_logs_of_the_number_of_candidates(num_rows):
    """All similarities equal: NT-Xent sees 2M - 1 candidates, InfoNCE M (2M with hard negatives), Eq. 5 2K + 1."""
    z = torch.ones(num_rows, 3, dtype=torch.float64) / math.sqrt(3)
    assert nt_xent(z, z).item() == pytest.approx(math.log(2 * num_rows - 1))
    assert info_nce(z, z).item() == pytest.approx(math.log(num_rows))
    assert info_nce(z, z, z).item() == pytest.approx(math.log(2 * num_rows))
    neighbors = torch.tensor([[(i + 1) % num_rows] for i in range(num_rows)])
    assert neighborhood_loss(z, z, neighbors).item() == pytest.approx(math.log(3))


def test_info_nce_by_hand():
    """Anchors and positives are the two axes, hard negatives the swapped axes. Anchor 1: positive at 1, other
    positive at 0, own hard negative at 0 (weighted 3), other hard negative at 1:
    -ln(e / (e + 1 + 3 + e)) at tau = 1."""
    axes = torch.eye(2, dtype=torch.float64)
    loss = info_nce(axes, axes, axes.flip(0), temperature=1.0, hard_negative_weight=3.0)
    assert loss.item() == pytest.approx(-math.log(math.e / (2 * math.e + 4)), abs=1e-12)


def test_neighborhood_loss_by_hand():
    """Rows are the two axes, each the other's neighbour, the augmentations equal their rows: positive at 1, the
    two rows of the augmented neighbourhood at 0, in both directions."""
    axes = torch.eye(2, dtype=torch.float64)
    loss = neighborhood_loss(axes, axes, torch.tensor([[1], [0]]), temperature=1.0)
    assert loss.item() == pytest.approx(math.log(1 + 2 / math.e), abs=1e-12)


@pytest.mark.parametrize("temperature", [0.05, 0.7])
def test_losses_match_the_loops(temperature):
    z1, z2, z3 = (unit_rows(7, seed=s) for s in (1, 2, 3))
    n1, n2, n3 = z1.numpy(), z2.numpy(), z3.numpy()
    neighbors = reference.neighborhood(n1, 3)
    assert nt_xent(z1, z2, temperature).item() == pytest.approx(reference.eq1(n1, n2, temperature))
    assert info_nce(z1, z2, None, temperature).item() == pytest.approx(reference.info_nce(n1, n2, None, temperature))
    assert info_nce(z1, z2, z3, temperature, 0.3).item() == pytest.approx(
        reference.info_nce(n1, n2, n3, temperature, 0.3)
    )
    assert neighborhood_loss(z1, z2, torch.tensor(neighbors), temperature).item() == pytest.approx(
        reference.eq5(n1, n2, neighbors, temperature)
    )


def test_equal_texts_are_no_negatives():
    z1, z2 = unit_rows(5, seed=1), unit_rows(5, seed=2)
    equal = torch.zeros(5, 5, dtype=torch.bool)
    equal[1, 3] = equal[3, 1] = True
    masked = nt_xent(z1, z2, 0.5, mask=equal)
    assert masked.item() == pytest.approx(reference.eq1(z1.numpy(), z2.numpy(), 0.5, equal.numpy()))
    assert masked.item() != pytest.approx(nt_xent(z1, z2, 0.5).item(), rel=1e-2)
    # the diagonal of the mask says nothing: the positive stays
    assert nt_xent(z1, z2, 0.5, mask=equal | torch.eye(5, dtype=torch.bool)).item() == masked.item()
    # InfoNCE without row 3 as a candidate of row 1, and the reverse
    expected = []
    for i in range(5):
        candidates = [j for j in range(5) if j == i or not equal[i, j]]
        logits = z1[i] @ z2[candidates].T / 0.05
        expected.append((logits.logsumexp(0) - logits[candidates.index(i)]).item())
    assert info_nce(z1, z2, mask=equal).item() == pytest.approx(np.mean(expected))


def test_gradients_are_right():
    z1, z2, z3 = (unit_rows(4, 3, seed=s).requires_grad_() for s in (1, 2, 3))
    neighbors = torch.tensor([[1, 2], [0, 3], [3, 0], [2, 1]])
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[0, 2] = mask[2, 0] = True
    assert torch.autograd.gradcheck(lambda a, b: nt_xent(a, b, 0.5, mask), (z1, z2))
    assert torch.autograd.gradcheck(lambda a, b, c: info_nce(a, b, c, 0.5, 2.0, mask), (z1, z2, z3))
    assert torch.autograd.gradcheck(lambda a, b: neighborhood_loss(a, b, neighbors, 0.5), (z1, z2))


def test_permuting_the_batch_changes_nothing():
    z1, z2 = unit_rows(8, seed=1), unit_rows(8, seed=2)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    neighbors = torch.tensor(reference.neighborhood(z1.numpy(), 3))
    position = torch.argsort(order)
    permuted = position[neighbors[order]]
    assert not torch.equal(order, torch.arange(8))
    assert nt_xent(z1[order], z2[order]).item() == pytest.approx(nt_xent(z1, z2).item(), rel=1e-12)
    assert neighborhood_loss(z1[order], z2[order], permuted).item() == pytest.approx(
        neighborhood_loss(z1, z2, neighbors).item(), rel=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow(dtype):
    """exp(1 / 0.01) is beyond float16: logits must be float32, also inside an autocast region."""
    z = unit_rows(6, dtype=torch.float32)
    half = z.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = nt_xent(half, half, temperature=0.01)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(nt_xent(half.float(), half.float(), temperature=0.01).item(), abs=1e-6)
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z: nt_xent(z, z[:2]), r"\(4, 6\) and \(2, 6\)"),
        (lambda z: nt_xent(z, z, temperature=0), "temperature=0"),
        (lambda z: nt_xent(z, z, mask=torch.ones(4, 3, dtype=torch.bool)), r"mask has shape \(4, 3\)"),
        (lambda z: info_nce(z, z, z[:3]), r"\(4, 6\) and \(3, 6\)"),
        (lambda z: info_nce(z, z, z, hard_negative_weight=0), "hard_negative_weight=0"),
        (
            lambda z: neighborhood_loss(z, z, torch.zeros(3, 2, dtype=torch.int64)),
            r"\(3, 2\); expected \(4, K\)",
        ),
    ],
)
def test_unusable_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(unit_rows(4))
