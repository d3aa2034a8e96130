"""Two-class classifiers with held-out scores: logistic regression and a small perceptron.

Features ``(N, D)`` float64, labels ``(N,)`` 0 or 1. Wide features (D > N) are first turned into
coordinates in the span of the training samples, which loses nothing for these classifiers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

Float64 = NDArray[np.float64]
Labels = NDArray[np.int64]
# Takes training samples and labels, and samples to score; gives scores, positive for label 1.
Classifier = Callable[[Float64, Labels, Float64, np.random.Generator], Float64]

_FOLDS = 5
_PENALTY = 1e-2
_NEWTON_STEPS = 30
_HIDDEN = 32
_EPOCHS = 100
_LEARNING_RATE = 1e-2
_WEIGHT_DECAY = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """A distinguishing game's result: advantages are 2·accuracy - 1 on held-out samples.

    ``chosen`` names the pair of features and classifier that cross-validation on the training half
    preferred; ``value`` and ``interval`` (Clopper-Pearson, 95 %) are its. ``advantages`` has
    every pair's, for which no such choice was made. ``scores`` and ``labels`` are the held-out
    samples' under the chosen pair.
    """

    chosen: str
    value: float
    interval: tuple[float, float]
    held_out: int
    advantages: Mapping[str, float]
    scores: Float64
    labels: Labels


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a proportion (Clopper and Pearson, 1934)."""
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(beta.ppf(tail, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(beta.ppf(1 - tail, successes + 1, trials - successes))
    return low, high


def logistic(train: Float64, labels: Labels, test: Float64, rng: np.random.Generator) -> Float64:
    """L2-penalised logistic regression by Newton's method."""
    ones = np.ones((len(train), 1))
    X = np.hstack([train, ones])
    penalty = np.full(X.shape[1], _PENALTY)
    penalty[-1] = 1e-6
    w = np.zeros(X.shape[1])
    for _ in range(_NEWTON_STEPS):
        p = _sigmoid(X @ w)
        gradient = X.T @ (p - labels) + penalty * w
        curvature = (X.T * (p * (1 - p))) @ X + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        # A bounded step keeps Newton from diverging on separable samples.
        w -= step * min(1.0, 20.0 / max(float(np.linalg.norm(step)), 1e-12))
        if np.abs(step).max() < 1e-6:
            break
    scores: Float64 = np.hstack([test, np.ones((len(test), 1))]) @ w
    return scores


def perceptron(train: Float64, labels: Labels, test: Float64, rng: np.random.Generator) -> Float64:
    """One hidden layer of 32 tanh units, cross-entropy, full-batch Adam with weight decay."""
    d = train.shape[1]
    parameters = [
        rng.standard_normal((d, _HIDDEN)) / np.sqrt(d), np.zeros(_HIDDEN),
        rng.standard_normal(_HIDDEN) / np.sqrt(_HIDDEN), np.zeros(1),
    ]  # fmt: skip
    scale = float(np.sqrt(np.mean(train**2))) or 1.0
    x = train / scale
    first = [np.zeros_like(p) for p in parameters]
    second = [np.zeros_like(p) for p in parameters]
    for epoch in range(1, _EPOCHS + 1):
        W, b, v, c = parameters
        hidden = np.tanh(x @ W + b)
        error = (_sigmoid(hidden @ v + c) - labels) / len(x)
        back = np.outer(error, v) * (1 - hidden**2)
        gradients = [x.T @ back, back.sum(0), hidden.T @ error, error.sum(keepdims=True)]
        for p, g, m, s in zip(parameters, gradients, first, second, strict=True):
            m += 0.1 * (g - m)
            s += 0.001 * (g * g - s)
            rate = _LEARNING_RATE * np.sqrt(1 - 0.999**epoch) / (1 - 0.9**epoch)
            p -= rate * m / (np.sqrt(s) + 1e-10) + _LEARNING_RATE * _WEIGHT_DECAY * p
    W, b, v, c = parameters
    scores: Float64 = np.tanh(test / scale @ W + b) @ v + c
    return scores


CLASSIFIERS: Mapping[str, Classifier] = {"logistic": logistic, "mlp": perceptron}


def play(
    features: Mapping[str, Float64],
    labels: Labels,
    rng: np.random.Generator,
    progress: Callable[[float], object] = lambda fraction: None,
) -> Game:
    """Train on half of the samples, score on the other half.

    ``features``: sets of features by name, each ``(N, D)``. Which set and classifier count is
    decided by cross-validation within the training half, so that the headline's interval holds.

    Raises:
        ValueError: fewer than four samples of a class.
    """
    if min(np.bincount(labels, minlength=2)) < 4:
        raise ValueError("the game needs at least four samples of each class")
    train, test = _split(labels, rng)
    folds = _folds(labels[train], rng)
    validated: dict[str, float] = {}
    advantages: dict[str, float] = {}
    held_out: dict[str, Float64] = {}
    for done, (kind, X) in enumerate(features.items()):
        x, y = _coordinates(X[train], X[test])
        for name, classifier in CLASSIFIERS.items():
            pair = f"{kind}, {name}"
            right = 0
            for fold in range(_FOLDS):
                inside, outside = folds != fold, folds == fold
                scores = classifier(x[inside], labels[train][inside], x[outside], rng)
                right += int(np.sum((scores > 0) == labels[train][outside]))
            validated[pair] = right / len(train)
            held_out[pair] = classifier(x, labels[train], y, rng)
            advantages[pair] = 2 * float(np.mean((held_out[pair] > 0) == labels[test])) - 1
        progress((done + 1) / len(features))
    chosen = max(validated, key=lambda pair: validated[pair])
    right = round((advantages[chosen] + 1) / 2 * len(test))
    low, high = clopper_pearson(right, len(test))
    return Game(
        chosen=chosen,
        value=advantages[chosen],
        interval=(2 * low - 1, 2 * high - 1),
        held_out=len(test),
        advantages=advantages,
        scores=held_out[chosen],
        labels=labels[test],
    )


def roc(scores: Float64, labels: Labels) -> tuple[Float64, Float64]:
    """False and true positive rates as the threshold falls, both from 0 to 1."""
    order = np.argsort(-scores, kind="stable")
    hits = labels[order] == 1
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    true = np.cumsum(hits)[ends] / max(1, int(hits.sum()))
    false = np.cumsum(~hits)[ends] / max(1, int((~hits).sum()))
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def _sigmoid(x: Float64) -> Float64:
    result: Float64 = 0.5 * (1 + np.tanh(x / 2))
    return result


def _split(labels: Labels, rng: np.random.Generator) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    train, test = [], []
    for label in (0, 1):
        members = rng.permutation(np.flatnonzero(labels == label))
        train.append(members[: len(members) // 2])
        test.append(members[len(members) // 2 :])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def _folds(labels: Labels, rng: np.random.Generator) -> NDArray[np.int64]:
    folds = np.empty(len(labels), dtype=np.int64)
    for label in (0, 1):
        members = rng.permutation(np.flatnonzero(labels == label))
        folds[members] = np.arange(len(members)) % _FOLDS
    return folds


def _coordinates(train: Float64, test: Float64) -> tuple[Float64, Float64]:
    """Standardised by the training samples; in their span if that is smaller."""
    mean, spread = train.mean(0), train.std(0)
    used = spread > 1e-12 * np.maximum(1.0, np.abs(mean))
    if not used.any():
        return np.zeros((len(train), 1)), np.zeros((len(test), 1))
    divisor = spread[used] * np.sqrt(used.sum())
    x, y = (train[:, used] - mean[used]) / divisor, (test[:, used] - mean[used]) / divisor
    if x.shape[1] <= len(x):
        return x, y
    _, sizes, basis = np.linalg.svd(x, full_matrices=False)
    basis = basis[sizes > 1e-9 * sizes[0]]
    return x @ basis.T, y @ basis.T
