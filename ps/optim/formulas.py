"""Update rules as scalar formulas, one element in, one element out; row-wise rules of tables.

Covers: the formula of each rule per element, and the part of row-wise rules per row and push.
Does not: loop over arrays (ps.optim.codegen writes the loops around these functions,
ps.optim.kernels compiles them), know settings (ps.optim.rules derives scalars). Pure; no numba
here, so that clients may import it.

Every formula repeats the order of float operations of keras.optimizers 3.15 on the TensorFlow
backend, each operation rounded by itself, because that makes one worker equal to Keras bit for bit.
A formula takes the pushed element g, the value v, its slots, then the step's scalars, all of the
group's dtype, and returns the new value and slots. Slots have the shape and dtype of v and start at
0 unless their docstring says otherwise. A number of a row has the table's dtype; where a row-wise
function takes g, it is the row's whole gradient, 1-d.

Departure of all rules that divide by a root alone (Adagrad, RMSprop, Adadelta): compiled TensorFlow
computes x / sqrt(y) as x * rsqrt(y) by an approximation that depends on the CPU. Here the root is
exact, so parity is 2 ulp of the update; eager Keras is equal bit for bit.
"""

# ruff: noqa: PLR0913 - the operands of a formula are its arguments

from __future__ import annotations

from typing import Any

import numpy as np

Scalar = Any
"""One element: a numpy scalar when called from Python, a machine float inside a kernel."""
Two = tuple[Scalar, Scalar]
Three = tuple[Scalar, Scalar, Scalar]
Four = tuple[Scalar, Scalar, Scalar, Scalar]


def sgd(g: Scalar, v: Scalar, learning_rate: Scalar) -> Scalar:
    """`v -= g * learning_rate`.

    Slots: none.
    Source: Robbins and Monro, A Stochastic Approximation Method, 1951. No departures.
    """
    return v - g * learning_rate


def momentum(g: Scalar, v: Scalar, m: Scalar, learning_rate: Scalar, beta: Scalar) -> Two:
    """`m = m * beta - g * learning_rate; v += m`.

    Slots: m.
    Source: Polyak, Some methods of speeding up the convergence of iteration methods, 1964.
    Departure, as in Keras: the learning rate is inside m, so a change of it acts with delay.
    """
    m = m * beta - g * learning_rate
    return v + m, m


def nesterov(g: Scalar, v: Scalar, m: Scalar, learning_rate: Scalar, beta: Scalar) -> Two:
    """`m = m * beta - g * learning_rate; v += m * beta - g * learning_rate`.

    Slots: m.
    Source: Sutskever et al., On the importance of initialization and momentum, ICML 2013. As in
    Keras the gradient is the one at v, and the look-ahead is in the update.
    """
    step = g * learning_rate
    m = m * beta - step
    return v + (m * beta - step), m


def adagrad(g: Scalar, v: Scalar, a: Scalar, learning_rate: Scalar, epsilon: Scalar) -> Two:
    """`a += g * g; v -= learning_rate * g / sqrt(a + epsilon)`.

    Slots: a, starts at `initial_accumulator_value`.
    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods, JMLR 2011.
    Departure: as in Keras epsilon stands inside the root.
    """
    a = a + g * g
    return v - (learning_rate * g) / np.sqrt(a + epsilon), a


def rmsprop(
    g: Scalar,
    v: Scalar,
    u: Scalar,
    learning_rate: Scalar,
    rho: Scalar,
    rate: Scalar,
    epsilon: Scalar,
) -> Two:
    """`u = rho * u + rate * g * g; v -= learning_rate * g / sqrt(u + epsilon)`, rate = 1 - rho.

    Slots: u, the mean of squares.
    Source: Hinton, Neural Networks for Machine Learning, lecture 6e, 2012.
    Departure: as in Keras epsilon stands inside the root.
    """
    u = rho * u + rate * (g * g)
    return v - (learning_rate * g) / np.sqrt(u + epsilon), u


def rmsprop_momentum(
    g: Scalar,
    v: Scalar,
    u: Scalar,
    m: Scalar,
    learning_rate: Scalar,
    rho: Scalar,
    rate: Scalar,
    epsilon: Scalar,
    beta: Scalar,
) -> Three:
    """Like rmsprop, with `m = beta * m + learning_rate * g / sqrt(u + epsilon); v -= m`.

    Slots: u, the mean of squares; m.
    Source and departure: see rmsprop.
    """
    u = rho * u + rate * (g * g)
    m = beta * m + (learning_rate * g) / np.sqrt(u + epsilon)
    return v - m, u, m


def rmsprop_centered(
    g: Scalar,
    v: Scalar,
    u: Scalar,
    c: Scalar,
    learning_rate: Scalar,
    rho: Scalar,
    rate: Scalar,
    epsilon: Scalar,
) -> Three:
    """Like rmsprop, with `c = rho * c + rate * g` and the root of `u - c * c + epsilon`.

    Slots: u, the mean of squares; c, the mean.
    Source: Graves, Generating Sequences With Recurrent Neural Networks, 2013, equations 38-45.
    Departure, as in Keras: where rounding makes u - c * c + epsilon negative the result is NaN,
    which kernels leave out (ps.optim.codegen); a larger epsilon prevents it.
    """
    u = rho * u + rate * (g * g)
    c = rho * c + rate * g
    return v - (learning_rate * g) / np.sqrt((u - c * c) + epsilon), u, c


def rmsprop_centered_momentum(
    g: Scalar,
    v: Scalar,
    u: Scalar,
    m: Scalar,
    c: Scalar,
    learning_rate: Scalar,
    rho: Scalar,
    rate: Scalar,
    epsilon: Scalar,
    beta: Scalar,
) -> Four:
    """Both of rmsprop_momentum and rmsprop_centered.

    Slots: u, the mean of squares; m; c, the mean.
    Source and departures: see rmsprop_centered.
    """
    u = rho * u + rate * (g * g)
    c = rho * c + rate * g
    m = beta * m + (learning_rate * g) / np.sqrt((u - c * c) + epsilon)
    return v - m, u, m, c


def adadelta(
    g: Scalar,
    v: Scalar,
    a: Scalar,
    d: Scalar,
    learning_rate: Scalar,
    rho: Scalar,
    rate: Scalar,
    epsilon: Scalar,
) -> Three:
    """`a = rho * a + rate * g * g; x = sqrt(d + epsilon) * g / sqrt(a + epsilon)`.

    Then `d = rho * d + rate * x * x; v -= learning_rate * x`, with rate = 1 - rho.

    Slots: a, the mean of squared gradients; d, the mean of squared changes.
    Source: Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012. Departure: as in Keras there
    is a learning rate; the paper's is 1.
    """
    a = rho * a + rate * (g * g)
    change = -((np.sqrt(d + epsilon) * g) / np.sqrt(a + epsilon))
    d = rho * d + rate * (change * change)
    return v + learning_rate * change, a, d


def adam(
    g: Scalar,
    v: Scalar,
    m: Scalar,
    u: Scalar,
    alpha: Scalar,
    rate_1: Scalar,
    rate_2: Scalar,
    epsilon: Scalar,
) -> Three:
    """`m += (g - m) * rate_1; u += (g*g - u) * rate_2; v -= m * alpha / (sqrt(u) + epsilon)`.

    With rate_i = 1 - beta_i and alpha = learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t), where
    t counts steps from 1.

    Slots: m and u.
    Source: Kingma and Ba, Adam, ICLR 2015; epsilon is the "epsilon hat" of its section 2, as in
    Keras. Departure: t counts the updates of a bucket, which are the steps unless pushes of it
    were refused.
    """
    m = m + (g - m) * rate_1
    u = u + (g * g - u) * rate_2
    return v - (m * alpha) / (np.sqrt(u) + epsilon), m, u


def amsgrad(
    g: Scalar,
    v: Scalar,
    m: Scalar,
    u: Scalar,
    h: Scalar,
    alpha: Scalar,
    rate_1: Scalar,
    rate_2: Scalar,
    epsilon: Scalar,
) -> Four:
    """Like adam, with `h = max(h, u)` in place of u in the root.

    Slots: m, u and h.
    Source: Reddi, Kale and Kumar, On the Convergence of Adam and Beyond, ICLR 2018. Departure: as
    in Keras the bias correction of Adam stays; the paper's algorithm 2 omits it.
    """
    m = m + (g - m) * rate_1
    u = u + (g * g - u) * rate_2
    h = np.maximum(h, u)
    return v - (m * alpha) / (np.sqrt(h) + epsilon), m, u, h


def adamax(
    g: Scalar,
    v: Scalar,
    m: Scalar,
    u: Scalar,
    learning_rate: Scalar,
    correction: Scalar,
    rate_1: Scalar,
    beta_2: Scalar,
    epsilon: Scalar,
) -> Three:
    """`m += (g - m) * rate_1; u = max(beta_2 * u, |g|)`.

    Then `v -= learning_rate * m / (correction * (u + epsilon))`, with rate_1 = 1 - beta_1 and
    correction = 1 - beta_1^t, where t counts steps from 1.

    Slots: m; u, the infinity norm.
    Source: Kingma and Ba, Adam, ICLR 2015, section 7.1. Departures: epsilon, as in Keras; t as in
    adam.
    """
    m = m + (g - m) * rate_1
    u = np.maximum(beta_2 * u, np.abs(g))
    return v - (learning_rate * m) / (correction * (u + epsilon)), m, u


def nadam(
    g: Scalar,
    v: Scalar,
    m: Scalar,
    u: Scalar,
    learning_rate: Scalar,
    ahead: Scalar,
    rest_ahead: Scalar,
    now: Scalar,
    rest_now: Scalar,
    correction: Scalar,
    rate_1: Scalar,
    rate_2: Scalar,
    epsilon: Scalar,
) -> Three:
    """Adam with Nesterov's look-ahead and a schedule of beta_1.

    `m += (g - m) * rate_1; u += (g*g - u) * rate_2`, then
    `v -= (ahead * m / rest_ahead + now * g / rest_now) * learning_rate
    / (sqrt(u / correction) + epsilon)`. With mu_t = beta_1 * (1 - 0.96^t / 2) and P_t the product
    of mu_1 to mu_t: ahead = mu_{t+1}, rest_ahead = 1 - P_{t+1}, now = 1 - mu_t, rest_now = 1 - P_t,
    correction = 1 - beta_2^t.

    Slots: m and u.
    Source: Dozat, Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop. Departures: t as
    in adam; P_t is rounded once, Keras rounds after each of its t products.
    """
    m = m + (g - m) * rate_1
    u = u + (g * g - u) * rate_2
    mean = (ahead * m) / rest_ahead + (now * g) / rest_now
    return v - (mean * learning_rate) / (np.sqrt(u / correction) + epsilon), m, u


def ftrl(
    g: Scalar,
    v: Scalar,
    a: Scalar,
    w: Scalar,
    learning_rate: Scalar,
    l2: Scalar,
    l1: Scalar,
    shrinkage: Scalar,
) -> Three:
    """Follow the regularized leader, with `learning_rate_power` -0.5.

    `b = a + g * g; w += g + shrinkage * v - (sqrt(b) - sqrt(a)) / learning_rate * v; a = b`, then
    `v = (clip(w, -l1, l1) - w) / (sqrt(a) / learning_rate + l2)`. Here l1 is the strength of
    setting, l2 is 2 * (its strength + beta / (2 * learning_rate)), shrinkage 2 * its strength.

    Slots: a, starts at `initial_accumulator_value`; w, the linear term.
    Source: McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013. Departure, as
    in Keras: v follows from the slots alone, so the first update discards the initial value, also
    where g is 0. At a learning rate of 0 nothing changes (ps.optim.rules.stands_still).
    """
    b = a + g * g
    root = np.sqrt(b)
    w = w + ((g + shrinkage * v) - (root - np.sqrt(a)) / learning_rate * v)
    clipped = np.minimum(np.maximum(w, -l1), l1)
    return (clipped - w) / (root / learning_rate + l2), b, w


def ftrl_power(
    g: Scalar,
    v: Scalar,
    a: Scalar,
    w: Scalar,
    learning_rate: Scalar,
    l2: Scalar,
    l1: Scalar,
    shrinkage: Scalar,
    power: Scalar,
) -> Three:
    """Like ftrl, with `x^power` in place of `sqrt(x)`, power = -learning_rate_power.

    Slots: those of ftrl.
    Source and departure: see ftrl. Also, the C library's powers may differ from TensorFlow's in
    the last bit, and are not vectorized: some 20 times slower than ftrl.
    """
    b = a + g * g
    raised = b**power
    w = w + ((g + shrinkage * v) - (raised - a**power) / learning_rate * v)
    clipped = np.minimum(np.maximum(w, -l1), l1)
    return (clipped - w) / (raised / learning_rate + l2), b, w


def lion(
    g: Scalar,
    v: Scalar,
    m: Scalar,
    learning_rate: Scalar,
    beta_1: Scalar,
    rate_1: Scalar,
    beta_2: Scalar,
    rate_2: Scalar,
) -> Two:
    """`v -= learning_rate * sign(m * beta_1 + g * rate_1); m = m * beta_2 + g * rate_2`.

    With rate_i = 1 - beta_i.

    Slots: m.
    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023. Departure: the
    paper's algorithm decays inside the update, Keras and this before it.
    """
    direction = np.sign(m * beta_1 + g * rate_1)
    return v - learning_rate * direction, m * beta_2 + g * rate_2


def decay(v: Scalar, weight_decay: Scalar, learning_rate: Scalar) -> Scalar:
    """`v -= v * (weight_decay * learning_rate)`, before the rule's own update.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019. As in Keras
    every optimizer takes it, and AdamW is Adam with it. Departure: Keras writes
    (v * weight_decay) * learning_rate, which TensorFlow's graph optimizer turns into this, except
    for parameters of shape (), where the last bit may differ.
    """
    return v - v * (weight_decay * learning_rate)


def average(p: Scalar, v: Scalar, num_pushers: Scalar) -> Scalar:
    """`v += (p - v) / num_pushers`, a running mean over the statistics p that workers push.

    With one pusher, and in sync mode where p already is the mean, ps.dense.shard copies: v = p
    exactly.
    Slots: none.  Source: exponential moving average; Keras has no counterpart.
    """
    return v + (p - v) / num_pushers


def add(p: Scalar, v: Scalar) -> Scalar:
    """`v += p`.

    Slots: none.  Source: Smola and Narayanamurthy, An Architecture for Parallel Topic Models, 2010.
    """
    return v + p


def rowwise_adagrad(g: Scalar, v: Scalar, learning_rate: Scalar, root: Scalar) -> Scalar:
    """`a += mean(g * g); v -= learning_rate * g / sqrt(a + epsilon)`, the mean over the row.

    Slots: none of the elements; a, one number per row, starts at `initial_accumulator_value`. The
    root comes from `mean_square_root`.
    Source: Naumov et al., Deep Learning Recommendation Model, 2019; exact row-wise Adagrad of
    FBGEMM's table batched embeddings. Departures: epsilon stands inside the root and a starts above
    0, as in Keras's Adagrad: a table with dim 1 is Adagrad bit for bit.
    """
    return v - (learning_rate * g) / root


def mean_square_root(g: Scalar, a: Scalar, num_elements: Scalar, epsilon: Scalar) -> Two:
    """`a += mean(g * g)`; returns a and the root of `a + epsilon`.

    The sum runs through the row in order, so its bits depend on the row alone.

    Args:
        g: [dim], the row's gradient.
        a: the row's accumulator.
        num_elements: dim, in the table's dtype.
        epsilon: added below the root.
    """
    total = g[0] * g[0]
    for i in range(1, g.size):
        total = total + g[i] * g[i]
    a = a + total / num_elements
    return a, np.sqrt(a + epsilon)


def adam_step(t: Scalar, one: Scalar, learning_rate: Scalar, beta_1: Scalar, beta_2: Scalar) -> Two:
    """`t += 1`; returns t and Adam's `learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t)`.

    Args:
        t: updates of the row so far.
        one: 1 in the table's dtype.
        learning_rate: learning rate of this step.
        beta_1: decay of the mean.
        beta_2: decay of the mean of squares.
    """
    t = t + one
    return t, learning_rate * np.sqrt(one - beta_2**t) / (one - beta_1**t)


def adamax_step(t: Scalar, one: Scalar, beta_1: Scalar) -> Two:
    """`t += 1`; returns t and Adamax's `1 - beta_1^t`.

    Args:
        t: updates of the row so far.
        one: 1 in the table's dtype.
        beta_1: decay of the mean.
    """
    t = t + one
    return t, one - beta_1**t
