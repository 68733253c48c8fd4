"""Models are what their specs say, the same on every rank, and they learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import labkit as lk

SPEC = lk.GPT(layers=2, width=32, heads=4, context=16, vocab=50)


def test_a_gpt_has_the_parameters_of_the_formula():
    width, vocab, context = SPEC.width, SPEC.vocab, SPEC.context
    block = 12 * width**2 + 13 * width  # weights, biases and two norms
    expected = 2 * vocab * width + context * width + SPEC.layers * block + 2 * width
    assert sum(p.numel() for p in lk.build(SPEC).parameters()) == expected


def test_a_gpt_does_not_look_ahead():
    model = lk.build(SPEC).eval()
    tokens = torch.randint(0, 50, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_attention_is_what_its_formula_says():
    attention = lk.build(SPEC).blocks[0].attention
    x = torch.randn(2, 5, 32)
    query, key, value = attention.qkv(x).chunk(3, dim=-1)
    heads = []
    for head in range(4):
        part = slice(8 * head, 8 * (head + 1))
        scores = query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(8)
        scores += torch.full((5, 5), -math.inf).triu(1)
        heads.append(scores.softmax(-1) @ value[..., part])
    expected = attention.out(torch.cat(heads, dim=-1))
    assert (attention(x) - expected).abs().max() < 1e-6


def test_before_training_all_tokens_are_equally_likely():
    logits = lk.build(SPEC)(torch.randint(0, 50, (8, 16)))
    loss = cross_entropy(logits.flatten(0, 1), torch.randint(0, 50, (8 * 16,)))
    assert abs(loss.item() - math.log(50)) < 0.05


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match=r"17 tokens is longer than .* context, 16"):
        lk.build(SPEC)(torch.zeros(1, 17, dtype=torch.int64))


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = lk.build(SPEC, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second = lk.build(SPEC, seed=3)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    other = lk.build(SPEC, seed=4)
    assert not torch.equal(first.tokens.weight, other.tokens.weight)


def test_an_mlp_learns_digits():
    digits = lk.Digits()
    model = lk.build(lk.MLP(inputs=64, width=64, layers=3, outputs=10))
    assert [tuple(layer.weight.shape) for layer in model.layers] == [
        (64, 64), (64, 64), (10, 64),
    ]  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        loss = cross_entropy(model(digits.pixels), digits.digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = (model(digits.pixels).argmax(1) == digits.digits).float().mean()
    assert accuracy > 0.95


def test_only_specs_can_be_built():
    with pytest.raises(TypeError, match=r"build takes lk.GPT\(...\) .* not a dict"):
        lk.build({"layers": 2})
