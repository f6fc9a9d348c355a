"""VaSCL Eq. 1-6 written as loops over scalars in NumPy, straight from the paper, to compare the fast code with."""

from __future__ import annotations

import math

import numpy as np


def sim(a, b) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def softmax_loss(positive: float, negatives: list[float], tau: float) -> float:
    """-log of the positive's share among itself and the negatives."""
    total = math.exp(positive / tau) + sum(math.exp(n / tau) for n in negatives)
    return -math.log(math.exp(positive / tau) / total)


def eq1(z1, z2, tau, equal=None) -> float:
    """Mean over the 2M anchors of Eq. 1; equal[i][j]: same text, never a negative."""
    num_rows = len(z1)
    rows = [(z1[i], z2[i], i) for i in range(num_rows)] + [(z2[i], z1[i], i) for i in range(num_rows)]
    total = 0.0
    for anchor, positive, i in rows:
        negatives = []
        for j in range(num_rows):
            if j == i or (equal is not None and equal[i][j]):
                continue
            negatives += [sim(anchor, z1[j]), sim(anchor, z2[j])]
        total += softmax_loss(sim(anchor, positive), negatives, tau)
    return total / (2 * num_rows)


def info_nce(anchors, positives, negatives, tau, alpha=1.0) -> float:
    """Mean over the anchors; the own hard negative counts alpha times."""
    total = 0.0
    for i, anchor in enumerate(anchors):
        terms = [math.exp(sim(anchor, p) / tau) for p in positives]
        hard = [] if negatives is None else [math.exp(sim(anchor, n) / tau) for n in negatives]
        if hard:
            hard[i] *= alpha
        total += -math.log(terms[i] / (sum(terms) + sum(hard)))
    return total / len(anchors)


def neighborhood(e, k, similarity="dot", equal=None) -> list[list[int]]:
    """N(i): the k most similar other rows of a different text."""
    score = (lambda a, b: float(a @ b)) if similarity == "dot" else sim
    result = []
    for i in range(len(e)):
        others = [j for j in range(len(e)) if j != i and not (equal is not None and equal[i][j])]
        result.append(sorted(others, key=lambda j: -score(e[i], e[j]))[:k])
    return result


def eq2(e_i, delta, head, z, i, neighbors, tau) -> float:
    """Identify row i, perturbed, among its neighbours."""
    z_delta = head(e_i + delta)
    return softmax_loss(sim(z_delta, z[i]), [sim(z_delta, z[k]) for k in neighbors], tau)


def eq3(e, head, neighbors, radius, tau, directions, step=1e-6) -> np.ndarray:
    """One step on the sphere from radius x direction, with a numerical gradient of Eq. 2."""
    z = np.stack([head(row) for row in e])
    deltas = np.zeros_like(e)
    for i in range(len(e)):
        start = radius * directions[i] / np.linalg.norm(directions[i])
        gradient = np.zeros(e.shape[1])
        for c in range(e.shape[1]):
            shift = np.zeros(e.shape[1])
            shift[c] = step
            up = eq2(e[i], start + shift, head, z, i, neighbors[i], tau)
            down = eq2(e[i], start - shift, head, z, i, neighbors[i], tau)
            gradient[c] = (up - down) / (2 * step)
        deltas[i] = radius * gradient / np.linalg.norm(gradient)
    return deltas


def eq5(z, z_star, neighbors, tau) -> float:
    """Mean of the 2M terms over the augmented neighbourhoods."""
    total = 0.0
    for i in range(len(z)):
        for anchor, positive in ((z_star[i], z[i]), (z[i], z_star[i])):
            negatives = [sim(anchor, z[k]) for k in neighbors[i]] + [sim(anchor, z_star[k]) for k in neighbors[i]]
            total += softmax_loss(sim(anchor, positive), negatives, tau)
    return total / (2 * len(z))


def eq6(e1, e2, head, k, radius, tau, directions) -> float:
    """Eq. 1 on both views plus Eq. 5 on the first, unweighted."""
    z1, z2 = np.stack([head(r) for r in e1]), np.stack([head(r) for r in e2])
    neighbors = neighborhood(e1, k)
    deltas = eq3(e1, head, neighbors, radius, tau, directions)
    z_star = np.stack([head(e1[i] + deltas[i]) for i in range(len(e1))])
    return eq1(z1, z2, tau) + eq5(z1, z_star, neighbors, tau)
