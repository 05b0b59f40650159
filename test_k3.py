"""Tests in the report's order: definition against fast form, and numbers from the release, the golden data and the field.

Numbers that another program produced are written out with their origin; none was printed by this code and pasted.
Run: python -m pytest -q
"""
import argparse
import base64
import functools
import inspect
import shlex
import http.server
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import k3
import kernels
import train_tiny as tt
from k3 import K3, K3Config

torch.set_num_threads(1)                           # tiny tensors: threads would only wait for each other


def rel(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)).item()


def close(a, b, accept):
    error = rel(a, b)
    assert error <= accept, f"relative error {error:.2e}, accepted {accept:.0e}"


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def kda_inputs(B=2, T=37, H=3, dk=16, dv=24, seed=0, dtype=torch.float64):
    q, k = (k3.l2_norm(draw(B, T, H, dk, seed=seed + i)) for i in (0, 1))
    v, z, w = draw(B, T, H, dv, seed=seed + 2), draw(B, T, H, dk, seed=seed + 3) * 3, draw(B, T, H, seed=seed + 4) * 2
    return [x.to(dtype) for x in (q, k, v, -5 * z.sigmoid(), w.sigmoid())]


def tiny(dtype=torch.float32, seed=0, **over):
    """A small model whose weights are random enough to make mistakes visible: no zero query, no zero bias."""
    model = K3(K3Config.tiny(**over), seed=seed).to(dtype).eval()
    noise = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn(p.shape, generator=noise).to(p.dtype) * (0.3 if p.dim() == 1 or "res_proj" in name else 0.1))
        for moe in model.moe_layers():
            moe.gate.e_score_correction_bias.add_(torch.randn(16, generator=noise) * 0.1)
    return model


def some_ids(B=2, T=23, seed=0):
    return torch.randint(0, 256, (B, T), generator=torch.Generator().manual_seed(seed))


# ---- config

def test_config_is_the_released_one():
    """Table 1 and config.json; 1-based lists in the file, 0-based layers in tensor names."""
    c = K3Config()
    mla = [i for i in range(c.num_hidden_layers) if c.is_mla(i)]
    assert mla == [*range(3, 92, 4), 92] and len(mla) == 24 and len(c.kda_layers) == 69
    assert [i for i in range(93) if not c.is_moe(i)] == [0]
    assert K3Config.from_json(c.to_json()) == c and K3Config.from_json(json.loads(json.dumps(c.to_json()))) == c


SWITCHES = [dict(gate_lower_bound=None), dict(use_full_rank_gate=False), dict(q_lora_rank=None),
            dict(routed_expert_hidden_size=None), dict(latent_moe_use_norm=False), dict(attn_res_block_size=None),
            dict(hidden_act="silu"), dict(num_shared_experts=0), dict(num_experts=None), dict(num_nextn_predict_layers=1),
            dict(attn_res_block_size=1), dict(vt_num_hidden_layers=2)]


@pytest.mark.parametrize("over", SWITCHES, ids=str)
def test_switches_of_the_schema_work(over):
    """Each ablation builds, trains one step with finite gradients, decodes as it prefills, and survives its own JSON."""
    config = K3Config.tiny(**over)
    assert K3Config.from_json(config.to_json()) == config
    model, ids = K3(config), some_ids()
    loss, _ = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()) and abs(loss.item()) < 9
    with torch.no_grad():
        state = model.init_state(2)
        pieces = [model(ids[:, a:b], state=state) for a, b in ((0, 9), (9, 10), (10, 23))]
        close(torch.cat(pieces, 1), model(ids), 1e-5)


def test_config_reads_a_bare_text_config():
    text = K3Config(vt_num_hidden_layers=0).to_json()
    bare = {**text["text_config"], "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
    assert K3Config.from_json(bare) == K3Config.from_json(text) == K3Config(vt_num_hidden_layers=0)


@pytest.mark.parametrize("change, key", [
    (dict(hidden_act="gelu"), "hidden_act"), (dict(num_experts_per_token=0), "num_experts_per_token"),
    (dict(num_experts_per_token=16), "num_experts_per_token"), (dict(kda_layers=[1, 2, 9]), "kda_layers"),
    (dict(hidden_size="64"), "hidden_size"), (dict(gate_lower_bound=5.0), "gate_lower_bound"),
    (dict(latent_moe_use_norm=1), "latent_moe_use_norm"),
    (dict(initializer_range=-1.0), "initializer_range"), (dict(activation_situ_beta=9e37), "activation_situ_beta"), (dict(num_nextn_predict_layers=2), "num_nextn")])
def test_config_refuses_values(change, key):
    with pytest.raises(ValueError, match=key):
        K3Config.tiny(**change)


@pytest.mark.parametrize("key", ["activation_situ_beta", "activation_situ_linear_beta", "attn_res_block_size",
                                 "routed_expert_hidden_size", "num_experts_per_token", "hidden_size", "kv_lora_rank"])
def test_config_refuses_missing_keys(key):
    """A missing constant is an error, never a default."""
    file = K3Config().to_json()
    del file["text_config"][key]
    with pytest.raises(ValueError, match=key):
        K3Config.from_json(file)


def test_config_refuses_unknown_and_unbuilt_keys():
    for change, key in ((dict(rope_type="yarn"), "rope_type"), (dict(moe_router_activation_func="softmax"), "softmax"),
                        (dict(num_key_value_heads=8), "num_key_value_heads"), (dict(topk_method="greedy"), "greedy")):
        file = K3Config().to_json()
        file["text_config"].update(change)
        with pytest.raises(ValueError, match=key):
            K3Config.from_json(file)
    with pytest.raises(ValueError, match="num_key_value_heads is 8"):      # each of two, not the later alone
        K3Config.from_json({"num_key_value_heads": 8, **K3Config().to_json()})


# ---- primitives

def test_rms_norm_eps_and_l2_norm():
    """1e-6 in the two latent norms; the L2 norm's eps stands inside the root, under a sum."""
    x, one = torch.tensor([0.003, -0.004]), torch.ones(2)
    assert torch.allclose(k3.rms_norm(x, one, 1e-6), torch.tensor([0.816497, -1.088662]), atol=1e-6)
    assert torch.allclose(k3.rms_norm(x, one, 1e-5), torch.tensor([0.632456, -0.843274]), atol=1e-6)
    assert torch.allclose(k3.l2_norm(torch.full((4,), 1e-4)), torch.full((4,), 0.098058), atol=1e-6)
    assert (k3.l2_norm(torch.zeros(4)) == 0).all()
    mla = k3.MLA(K3Config.tiny())
    assert mla.q_a_layernorm.eps == mla.kv_a_layernorm.eps == 1e-6


def test_situ_glu():
    """§2.3.2: values, the bound 100, SwiGLU near the origin."""
    gate, up = torch.tensor([1., 4, -2, 8]), torch.tensor([1., 25, 3, 1])
    assert torch.allclose(k3.situ_glu(gate, up), torch.tensor([0.715818, 56.9593, -0.657874, 3.852762]), rtol=1e-5)
    assert torch.allclose(k3.swiglu(gate, up), torch.tensor([0.731059, 98.2014, -0.715218, 7.997317]), rtol=1e-5)
    big = draw(1000) * 1e4
    assert k3.situ_glu(big, -big).abs().max() <= 100
    small = draw(100) * 1e-2
    assert (k3.situ_glu(small, small) - k3.swiglu(small, small)).abs().max() < 1e-7


def test_fp32_tensors_survive_a_cast():
    """A_log, dt_bias, convolutions, o_norm, router weight and bias stay fp32 in a bf16 model."""
    model = K3(K3Config.tiny()).to(torch.bfloat16)
    wide = {n.split(".layers.")[1].split(".", 1)[1] for n, t in model.state_dict().items() if t.dtype == torch.float32}
    assert wide == {*(f"self_attn.{x}" for x in k3.KDA.fp32), "block_sparse_moe.gate.weight",
                    "block_sparse_moe.gate.e_score_correction_bias"}
    assert model(some_ids()).isfinite().all()
    assert all(t.dtype == torch.float64 for t in model.double().state_dict().values())


# ---- §2.1.1 KDA

def test_kda_recurrent_by_hand():
    """Decay, then the error against the decayed state, then the write, then the read."""
    t = lambda *x: torch.tensor(x, dtype=torch.float64)
    S0 = t([1., 2.], [3., 4.])[None, None]
    args = [t(1, 0).view(1, 1, 1, 2), t(.6, .8).view(1, 1, 1, 2), t(1, 2).view(1, 1, 1, 2),
            t(.5, .25).log().view(1, 1, 1, 2), t(.5).view(1, 1, 1)]
    before = S0.clone()
    assert torch.allclose(k3.kda_recurrent(*args, S0, scale=1)[0].flatten(), t(0.53, 1.18))
    assert torch.allclose(k3.kda_recurrent(*args, S0)[0].flatten(), t(0.3748, 0.8344), atol=5e-5)
    assert torch.equal(S0, before)
    o, S = k3.kda_recurrent(t([1, 0], [1, 0], [.6, .8])[None, :, None], t([1, 0], [.6, .8], [0, 1])[None, :, None],
                            t([1], [2], [3])[None, :, None], t([.5, .9], [.5, .9], [.8, .2]).log()[None, :, None],
                            t(.5, .5, 1)[None, :, None], scale=1)
    assert torch.allclose(o.flatten(), t(0.5, 0.805, 2.7864)) and torch.allclose(S.flatten(), t(0.644, 3.0))


def test_kda_identical_keys():
    """With one key, beta 1 and no decay, each token overwrites the last: o = v / 2 at dk = 4."""
    k, v = k3.l2_norm(torch.ones(1, 64, 1, 4, dtype=torch.float64), eps=0), draw(1, 64, 1, 3)
    o, S = k3.kda_recurrent(k, k, v, torch.zeros_like(k), torch.ones(1, 64, 1))
    close(o, v / 2, 1e-12)
    close(S[0, 0], k[0, 0, 0, :, None] * v[0, -1, 0], 1e-12)


def test_kda_splits_and_batches():
    """Any split of a sequence, and each sample alone, give what one call gives."""
    args = kda_inputs()
    o, S = k3.kda_recurrent(*args)
    state, pieces = None, []
    for a, b in ((0, 1), (1, 1), (1, 18), (18, 37)):
        piece, state = k3.kda_recurrent(*(x[:, a:b] for x in args), S=state)
        pieces.append(piece)
    close(torch.cat(pieces, 1), o, 1e-13)
    close(state, S, 1e-13)
    close(k3.kda_recurrent(*(x[1:] for x in args))[0], o[1:], 1e-13)


def test_kda_state_keeps_fp32_for_bf16():
    """0.999 rounds to 1 in bf16; after 1000 steps 0.3677 must be left of a state of ones."""
    zero = torch.zeros(1, 1000, 1, 1, dtype=torch.bfloat16)
    g = torch.full((1, 1000, 1, 1), math.log(0.999))
    _, S = k3.kda_recurrent(zero, zero, zero, g, zero[..., 0], torch.ones(1, 1, 1, 1))
    assert abs(S.item() - 0.3677) < 1e-4


def test_kda_gradients_reach_every_input():
    """Both results' gradients, of all six inputs, against finite differences."""
    args = [x.requires_grad_() for x in [*kda_inputs(1, 5, 1, 3, 2), draw(1, 1, 3, 2, seed=9)]]
    assert torch.autograd.gradcheck(lambda *a: k3.kda_recurrent(*a), args, atol=1e-6)


def test_log_decay():
    """Eq. 5: the bias before the scale; bounds reached without NaN in value or gradient."""
    decay = lambda z, A, b, g_min=-5.0: k3.kda_log_decay(torch.tensor([[[[z]]]]), torch.tensor([A]), torch.tensor([b]), g_min)
    assert abs(decay(0.5, math.log(2), 0.5).item() + 4.403985) < 1e-6
    assert abs(decay(0.25, 0.3, -0.25).item() + 2.5) < 1e-6
    assert abs(decay(0.5, math.log(2), 0.5, None).item() + 2 * math.log1p(math.e)) < 1e-6
    for z, want in ((1.0, -5.0), (0.0, -2.5), (-1.0, 0.0)):
        inputs = [torch.tensor([[[[z]]]]), torch.tensor([90.0]), torch.tensor([0.0])]
        g = k3.kda_log_decay(*(x.requires_grad_() for x in inputs), -5.0)
        g.sum().backward()
        assert g.item() == want and all(x.grad.isfinite().all() for x in inputs)
    z = draw(2, 50, 3, 8) * 100
    assert ((g := k3.kda_log_decay(z, torch.zeros(3), torch.zeros(24), -5.0)) >= -5).all() and (g <= 0).all()


def test_short_conv():
    """The last tap is the current token's; the cache holds projections; any split is the same."""
    x, taps = torch.arange(1., 7).view(1, 6, 1), torch.tensor([[[1., 2, 3, 4]]])
    whole = torch.tensor([4., 11, 20, 30, 40, 50])
    assert torch.allclose(k3.short_conv(x, taps)[0].flatten(), F.silu(whole))
    for weight in (taps, taps[:, 0]):
        tail, out = None, []
        for piece in x.split([1, 2, 3], 1):
            y, tail = k3.short_conv(piece, weight, tail)
            out.append(y)
        assert torch.allclose(torch.cat(out, 1).flatten(), F.silu(whole)) and tail.flatten().tolist() == [4, 5, 6]
    y, _ = k3.short_conv(torch.tensor([4., 5, 6]).view(1, 3, 1), taps / 10, x[:, :3])
    assert torch.allclose(y.flatten(), torch.tensor([2.85772, 3.92806, 4.96654]), atol=1e-5)
    with pytest.raises(ValueError, match="convolution"):
        k3.short_conv(x, taps[None])
    for form in (k3.short_conv, kernels.short_conv):   # a short tail would shorten the output
        with pytest.raises(AssertionError, match="tail"):
            form(x, taps, x[:, :2])


# ---- §2.1.2 gated MLA

def test_mla_forms_agree():
    """Full heads, absorbed weights and the fused call are one function, with and without a past."""
    H, nope, rope, C, dv = 3, 16, 8, 12, 10
    q, latent, W = draw(2, 7, H, nope + rope), draw(2, 11, C + rope, seed=1), draw(H * (nope + dv), C, seed=2)
    full = k3.mla_full(q, latent, W, dv)
    close(k3.mla_absorbed(q, latent, W, dv), full, 1e-12)
    close(k3.mla_fused(q, latent, W, dv), full, 1e-12)
    longer, past = torch.cat([latent, draw(2, 5, C + rope, seed=3)], 1), torch.tensor(4)     # a cache with room left
    for form in (k3.mla_full, k3.mla_absorbed, k3.mla_fused):
        close(form(q, longer, W, dv, past), full, 1e-12)
    close(k3.mla_fused(q, latent[:, -7:], W, dv), k3.mla_full(q, latent[:, -7:], W, dv), 1e-12)


def test_causal_mask_is_aligned_to_the_end():
    """2 queries on 3 cached keys with equal scores average 4 and 5 values."""
    p = k3.causal_softmax(torch.zeros(2, 5))
    assert torch.allclose(p @ torch.arange(5.), torch.tensor([1.5, 2.0]))


def test_mla_has_no_positions_and_the_released_scale():
    """Permuting earlier tokens leaves the last output; the scale is (nope + rope)^-0.5."""
    mla, x = tiny(torch.float64).language_model.model.layers[3].self_attn, draw(1, 9, 64)
    order = torch.tensor([5, 2, 7, 0, 1, 4, 6, 3, 8])
    close(mla(x[:, order])[:, -1], mla(x)[:, -1], 1e-12)
    q, latent = torch.zeros(1, 1, 1, 192), torch.zeros(1, 2, 576)
    q[..., 191], latent[0, 1, 575], latent[0, 1, 0] = 1, 100, 1
    p = k3.mla_full(q, latent, torch.eye(512)[:256], 128)
    W = torch.zeros(256, 512)
    W[128, 0] = 1                                     # value channel 0 reads latent channel 0
    o = k3.mla_full(q, latent, W, 128)[0, 0, 0, 0]
    assert abs(o.item() - 1 / (1 + math.exp(-100 * 0.0721688))) < 1e-6 and p.isfinite().all()


# ---- §2.2 attention residuals

def test_attn_res_by_hand():
    """Keys normalised, values raw, no 1/sqrt(d); zero queries give the mean."""
    sources, one = torch.tensor([[3., 4], [1, -1], [0, 2]]), torch.ones(2)
    mix = lambda w, n: k3.attn_res(sources, torch.tensor(w), n, 1e-5)
    assert torch.allclose(mix([1., .5], one), torch.tensor([1.795677, 2.421093]), atol=1e-5)
    assert torch.allclose(mix([1., .5], torch.tensor([2., 1])), torch.tensor([2.066474, 2.358196]), atol=1e-5)
    assert torch.allclose(mix([0., 0], one), torch.tensor([4 / 3, 5 / 3]))


def test_attn_res_two_phases_equal_one():
    """§2.2: blocks scored once for many mixes, the running sum merged by online softmax, also at large scores."""
    blocks, running, w, n = draw(2, 5, 4, 32), draw(2, 5, 32, seed=1) * 3, draw(6, 32, seed=2) * 30, draw(6, 32, seed=3)
    part = k3.attn_res_blocks(blocks, w, n, 1e-5)
    for i in range(6):
        plain = k3.attn_res(torch.cat([blocks, running.unsqueeze(-2)], -2), w[i], n[i], 1e-5)
        close(k3.attn_res_merge(part, i, running, w[i], n[i], 1e-5), plain, 1e-12)


def test_block_attn_res_sources():
    """(attention, feed-forward) sources by layer at depth 93, block 12; stored blocks never change."""
    config = K3Config.tiny(num_hidden_layers=93, attn_res_block_size=12, hidden_size=8, linear_num_heads=1,
                           linear_head_dim=4, num_attention_heads=1, num_experts=None, intermediate_size=8)
    model, seen, kept = K3(config), [], {}
    original = k3.mix_depth

    def spy(blocks, s, proj, norm):
        seen.append(len(blocks) + 1)
        for i, b in enumerate(blocks):
            assert torch.equal(kept.setdefault(i, b.clone()), b)
        return original(blocks, s, proj, norm)
    k3.mix_depth = spy
    try:
        with torch.no_grad():
            model(some_ids(1, 3))
    finally:
        k3.mix_depth = original
    counts = [1, *seen]                               # layer 0's attention has one source and is not mixed
    pairs = list(zip(counts[::2], counts[1::2]))
    assert len(pairs) == 93 and counts[-1] == 9
    assert pairs[0] == (1, 2) and set(pairs[1:12]) == {(2, 2)} and pairs[12] == (2, 3)
    assert pairs[84] == (8, 9) and pairs[92] == (9, 9)


def test_block_size_one_is_the_full_form():
    """Eqs. 8-9 written over all layer outputs equal the model's blocks of one layer."""
    model, ids, record = tiny(torch.float64, attn_res_block_size=1), some_ids(1, 6), {}
    text = model.language_model.model
    model(ids, record=record)
    outputs, mix = [record["embed"]], lambda src, p, n: k3.attn_res(torch.stack(src, -2), p.weight[0], n.weight, n.eps)
    for i, layer in enumerate(text.layers):
        h = mix(outputs, layer.self_attention_res_proj, layer.self_attention_res_norm) if i else outputs[0]
        a = layer.self_attn(layer.input_layernorm(h))
        h = mix([*outputs, a], layer.mlp_res_proj, layer.mlp_res_norm)
        h = layer.post_attention_layernorm(h)
        outputs.append(a + (layer.block_sparse_moe(h) if hasattr(layer, "block_sparse_moe") else layer.mlp(h)))
        close(record[f"layers.{i}.prefix_sum"], outputs[-1], 1e-12)
    close(record["final_mixed"], mix(outputs, text.output_attn_res_proj, text.output_attn_res_norm), 1e-12)


# ---- §2.3 LatentMoE

def test_route_bias_chooses_but_does_not_weigh():
    """Eq. 13."""
    experts, weights, cutoff = k3.route(torch.tensor([[.9, .8, .7, .1]]), torch.tensor([-.5, 0, 0, .75]), 2)
    assert experts.tolist() == [[3, 1]] and torch.allclose(weights, torch.tensor([[0.111111, 0.888889]]), atol=1e-6)
    assert abs(cutoff.item() - 0.7) < 1e-6
    experts, _, _ = k3.route(torch.tensor([[.982, .983]]), torch.tensor([.002, 0]), 1)
    assert experts.item() == 0
    _, weights, _ = k3.route(torch.sigmoid(torch.full((1, 4), -110.)), torch.zeros(4), 2)
    assert (weights == 0).all()
    with pytest.raises(ValueError):
        k3.route(torch.rand(3, 4), torch.zeros(4), 4)


def test_latent_moe_normalises_the_sum():
    """Eq. 11: weighted sum, then norm, then up-projection; router and shared experts read x."""
    assert torch.allclose(k3.rms_norm(.75 * torch.tensor([3., 1]) + .25 * torch.tensor([-1., 1]), torch.ones(2), 1e-5),
                          torch.tensor([1.264909, 0.632454]), atol=1e-5)
    moe, x = tiny(torch.float64).moe_layers()[0], draw(2, 5, 64)
    flat = x.flatten(0, 1)
    experts, weights, _ = k3.route(torch.sigmoid(flat @ moe.gate.weight.T), moe.gate.e_score_correction_bias, 4)
    latent, u = moe.routed_expert_down_proj(flat), torch.zeros(10, 32, dtype=torch.float64)
    for t in range(10):
        for e, p in zip(experts[t], weights[t]):
            h = k3.situ_glu(moe.experts.w1[e] @ latent[t], moe.experts.w3[e] @ latent[t])
            u[t] += p * (moe.experts.w2[e] @ h)
    want = moe.routed_expert_up_proj(moe.routed_expert_norm(u)).view_as(x) + moe.shared_experts(x)
    close(moe(x), want, 1e-12)


def test_moe_gradients():
    """Every trainable part gets a finite gradient, the bias none; one token and no token work."""
    model = K3(K3Config.tiny())
    loss, _ = model.loss(some_ids()[:, :-1], some_ids()[:, 1:])
    loss.backward()
    moe = model.moe_layers()[0]
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for n, p in moe.named_parameters())
    assert not moe.gate.e_score_correction_bias.requires_grad
    assert moe(torch.zeros(1, 0, 64)).shape == (1, 0, 64) and moe(torch.zeros(1, 1, 64)).isfinite().all()


# ---- §2.3.3 Quantile Balancing

A = torch.tensor([[22, 56, 52, 38], [61, 27, 7, 44], [59, 46, 29, 11], [49, 40, 27, 26], [60, 43, 32, 13],
                  [46, 51, 20, 25], [9, 48, 54, 10], [20, 48, 3, 7]]) / 64       # the worked example, k = 1


def loads(scores, bias, k=1):
    return torch.bincount(k3.route(scores, bias, k)[0].flatten(), minlength=scores.shape[1]).tolist()


def test_quantile_bias_worked_example():
    """Eq. 14: cutoffs, one exact step from loads 4,3,1,0 to 2,2,2,2, then a fixed point."""
    _, _, cutoff = k3.route(A, torch.zeros(4), 1)
    assert (cutoff * 64).tolist() == [52, 44, 46, 40, 43, 46, 48, 20] and loads(A, torch.zeros(4)) == [4, 3, 1, 0]
    b = k3.quantile_bias(A, cutoff, 1)
    assert (b * 64).tolist() == [-15, -6, 9, 12] and loads(A, b) == [2, 2, 2, 2]
    uncentred = torch.tensor([-13, -4, 11, 14]) / 64
    assert (((A - cutoff[:, None]) > -uncentred).sum(0) == 2).all()
    assert torch.equal(k3.quantile_bias(A, k3.route(A, b, 1)[2], 1), b)
    assert loads(A, b + 7) == [2, 2, 2, 2] and abs(b.mean()) < 1e-6


def test_balancing_leaves_padding_out():
    """Rows that do not count change nothing, in the exact form and in the histogram."""
    padded, valid = torch.cat([A, torch.tensor([[58, 6, 5, 4]] * 4) / 64]), torch.tensor([1.] * 8 + [0.] * 4)
    cutoff = k3.route(padded, torch.zeros(4), 1)[2]
    assert (k3.quantile_bias(padded, cutoff, 1, valid) * 64).tolist() == [-15, -6, 9, 12]
    pooled, clean = k3.QuantileHistogram(4, 1), k3.QuantileHistogram(4, 1)
    pooled.start(torch.zeros(4)), clean.start(torch.zeros(4))
    pooled.add(padded, cutoff, valid), clean.add(A, cutoff[:8])
    assert torch.equal(pooled.finish(), clean.finish())


def test_histogram_values_and_pooling():
    """App. D: the published values of Example A, any micro-batching alike, edges and no tokens safe."""
    cutoff, zero = k3.route(A, torch.zeros(4), 1)[2], torch.zeros(4)
    results = []
    for sizes in ([8], [3, 5], [1] * 8):
        h = k3.QuantileHistogram(4, 1)
        h.start(zero)
        for s, c in zip(A.split(sizes), cutoff.split(sizes)):
            h.add(s, c)
        results.append(h.finish())
    want = torch.tensor([-0.264, -0.078, 0.002, 0.204])
    assert torch.allclose(results[0], want - want.mean(), atol=1e-6) and loads(A, results[0]) == [2, 2, 2, 2]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    h.start(b := torch.tensor([1.5, -.5, -.5, -.5]))
    assert torch.equal(h.finish(), b) and abs(h.low + 1.5) < 1e-6 and abs(h.low + h.span - 2.5) < 1e-5
    h.add(torch.zeros(1, 4), torch.tensor([2.5]))                              # r at the upper edge: the last bin
    assert h.counts[:, -1].tolist() == [1] * 4


def test_histogram_meets_the_exact_quantile_in_large_batches():
    """Within about a bin of the target-th smallest r; both balance 64 experts from a bad start within eight steps."""
    scores, k = torch.sigmoid(draw(4096, 64, dtype=torch.float32) + draw(64, seed=1, dtype=torch.float32)), 4
    for rule in ("exact", "histogram"):
        b, h = torch.zeros(64), k3.QuantileHistogram(64, k)
        worst = lambda: max(loads(scores, b, k)) / (4096 * k / 64)
        assert worst() > 5
        for _ in range(8):
            cutoff = k3.route(scores, b, k)[2]
            h.start(b), h.add(scores, cutoff)
            exact, binned = k3.quantile_bias(scores, cutoff, k), h.finish()
            assert (exact - binned).abs().max() < 2 * h.span / 1000
            b = exact if rule == "exact" else binned
        assert worst() < 1.2, f"{rule}: largest load {worst():.3f} times the mean"


POOLED = """
import sys, torch, torch.distributed as dist, k3
from test_k3 import A
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2)
cutoff, part = k3.route(A, torch.zeros(4), 1)[2], slice(4 * rank, 4 * rank + 4)
for rule in (k3.QuantileHistogram(4, 1), k3.ExactQuantile(4, 1)):
    rule.start(torch.zeros(4))
    rule.add(A[part], cutoff[part])
    print([round(x, 6) for x in (rule.finish() * 64).tolist()])
"""


def test_counts_are_pooled_over_ranks(tmp_path):
    """Two ranks with half of Example A each reach the biases of the whole, not the mean of their own."""
    ranks = [subprocess.Popen([sys.executable, "-c", POOLED, str(r), str(tmp_path / "meeting")], stdout=subprocess.PIPE,
                              text=True, cwd=os.path.dirname(k3.__file__)) for r in range(2)]
    said = [p.communicate(timeout=60)[0] for p in ranks]
    h = k3.QuantileHistogram(4, 1)
    h.start(torch.zeros(4)), h.add(A, k3.route(A, torch.zeros(4), 1)[2])
    want = [[round(x, 6) for x in (h.finish() * 64).tolist()], [-15.0, -6.0, 9.0, 12.0]]
    assert said[0] == said[1] == "".join(f"{line}\n" for line in want)


def test_histogram_average_over_steps():
    """ema = 0.5: after estimates a, then b, the bias is their mean, centred; a step without tokens counts for nothing."""
    plain, mean, cutoff = k3.QuantileHistogram(4, 1), k3.QuantileHistogram(4, 1, ema=0.5), k3.route(A, torch.zeros(4), 1)[2]
    found = []
    for scores in (A, A.flip(1)):
        for h in (plain, mean):
            h.start(torch.zeros(4)), h.add(scores, cutoff)
        found.append(plain.finish())
        last = mean.finish()
        mean.start(last)
        assert torch.equal(mean.finish(), last)        # no token: the bias stays, and so does the average
    assert torch.allclose(last, (found[0] + found[1]) / 2, atol=1e-6) and not torch.allclose(last, found[1])


def test_sign_rule_and_alternating_solver():
    """The rule that QB replaces moves by gamma; Algorithm 1 balances Example A and beats an arbitrary balanced choice."""
    b = k3.sign_bias(torch.zeros(4), torch.tensor([4., 3, 1, 0]), 0.01)
    assert torch.allclose(b, torch.tensor([-.01, -.01, .01, .01]))
    experts, beta = k3.balanced_assignment(A, 1, steps=20)
    assert torch.bincount(experts.flatten(), minlength=4).tolist() == [2, 2, 2, 2] and beta.shape == (4,)
    total, best = A.gather(1, experts).sum().item(), 0
    import itertools
    for chosen in set(itertools.permutations([0, 0, 1, 1, 2, 2, 3, 3])):
        best = max(best, A[torch.arange(8), torch.tensor(chosen)].sum().item())
    assert abs(total - best) < 1e-6


@pytest.mark.parametrize("method", ["qb", "qb-exact", "sign", "none"])
def test_balancer_counts_training_only(method):
    """A step routes with one bias, evaluation between leaves no trace, inference is frozen."""
    ids = some_ids(4, 33)
    after = []
    for evaluate in (False, True):
        model = K3(K3Config.tiny(), seed=3)
        balancer = k3.Balancer(model, method)
        before = [moe.gate.e_score_correction_bias.clone() for moe in model.moe_layers()]
        balancer.start()
        model.loss(ids[:2, :-1], ids[:2, 1:])[0].backward()
        if evaluate:
            model.eval()(ids)
            with torch.no_grad():
                model.train()(ids)
        model.loss(ids[2:, :-1], ids[2:, 1:])
        assert all(torch.equal(m.gate.e_score_correction_bias, b) for m, b in zip(model.moe_layers(), before))
        assert [int(m.load.sum()) for m in model.moe_layers()] == [4 * 32 * 4] * 4
        balancer.finish()
        after.append(torch.stack([m.gate.e_score_correction_bias for m in model.moe_layers()]))
        assert (balancer.imbalance() >= 1).all()
    assert torch.equal(*after) and (method == "sign" or after[0].mean(-1).abs().max() < 1e-6)
    assert (after[0].abs().sum() > 0) == (method != "none")


# ---- model

def test_fresh_model_is_finite_and_reproducible():
    """Every value drawn or set; same seed, same model; A_log, queries and router bias start at 0."""
    a, b, c = (K3(K3Config.tiny(num_nextn_predict_layers=1), seed=s).state_dict() for s in (1, 1, 2))
    assert all(x.isfinite().all() for x in a.values()) and all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["language_model.lm_head.weight"], c["language_model.lm_head.weight"])
    assert all((x == 0).all() for n, x in a.items() if n.endswith(("A_log", "res_proj.weight", "correction_bias")))
    step = F.softplus(torch.cat([x for n, x in a.items() if n.endswith("dt_bias")]))
    assert 0.999e-3 < step.min() and step.max() < 0.101


def test_model_is_causal():
    model, ids = tiny(torch.float64), some_ids(1, 20)
    changed = ids.clone()
    changed[0, 12] = (ids[0, 12] + 1) % 256
    with torch.no_grad():
        a, b = model(ids), model(changed)
    close(a[:, :12], b[:, :12], 1e-13)
    assert all(rel(a[:, t], b[:, t]) > 1e-6 for t in range(12, 20))


@pytest.mark.parametrize("kernel", ["plain", "fast"])
@pytest.mark.parametrize("pieces", [[23], [1] * 23, [2, 3, 6, 12], [10, 1, 12], [0, 22, 1]], ids=str)
def test_state_continues_a_pass(pieces, kernel):
    """Any prefill gives the logits of one pass; KDA's state keeps its size, MLA's grows by 48 a token."""
    model, ids, out = tiny(), some_ids(), []
    model.kernel = kernel
    with torch.no_grad():
        state = model.init_state(2)
        for part in ids.split(pieces, 1):
            kept = state.copy()
            out.append(model(part, state=state))
        close(torch.cat(out, 1), model(ids), 1e-5)
        if pieces[-1]:                                # a copy can be continued again from where it was taken
            assert torch.equal(model(ids[:, 23 - pieces[-1]:], state=kept), out[-1])
    assert state.length == 23 and state.layers[3]["latent"].shape == (2, 23, 32 + 16)
    assert state.layers[0]["S"].shape == (2, 2, 32, 32) and state.layers[0]["conv_q"].shape == (2, 3, 64)
    assert state.layers[0]["conv_q"].untyped_storage().nbytes() == 2 * 3 * 64 * 4       # no view of the whole prompt's


def test_state_of_fixed_capacity():
    """Caches written in place give the growing caches' logits; one token too many is refused."""
    model, ids = tiny(torch.float64), some_ids()
    with torch.no_grad():
        state = model.init_state(2, capacity=23)
        pieces = [model(part, state=state) for part in ids.split([11, 1, 1, 10], 1)]
        close(torch.cat(pieces, 1), model(ids), 1e-12)
    with pytest.raises(ValueError, match="23 of at most 23"):
        model(ids[:, :1], state=state)


def test_empty_and_single_inputs():
    model = tiny()
    assert model(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 320)
    assert model(some_ids(1, 1)).shape == (1, 1, 320) and model(some_ids(2, 9), last=True).shape == (2, 1, 320)


def test_record_has_the_golden_names():
    model, record = tiny(), {}
    model(some_ids(), record=record)
    layer = ["attn_in", "attn_out", "ffn_in", "ffn_out", "prefix_sum"]
    moe = ["topk_idx", "topk_weight"]
    assert set(record) == {"embed", "final_mixed", "final_normed", "logits"} | {
        f"layers.{i}.{x}" for i in range(5) for x in layer + moe * (i > 0)}
    idx = record["layers.1.topk_idx"]
    assert idx.shape == (2, 23, 4) and idx.dtype == torch.int64 and (idx.diff(dim=-1) > 0).all()
    assert torch.allclose(record["layers.1.topk_weight"].sum(-1), torch.ones(2, 23))


def test_model_refuses_bad_input():
    model = tiny()
    for ids, message in ((torch.tensor([[320]]), "320 is outside"), (torch.tensor([[-1]]), "-1 is outside"),
                         (torch.tensor([1, 2]), "expected"), (torch.zeros(1, 2), "whole numbers"),
                         (torch.tensor([[266, 266, 5], [1, 2, 3]]), "padding"), (torch.tensor([[266, 5]]), "padding")):
        with pytest.raises(ValueError, match=message):
            model(ids)
    with pytest.raises(ValueError, match="3 sequences"):
        model(some_ids(2, 4), state=model.init_state(3))
    with pytest.raises(ValueError, match="kernel"):
        model.kernel = "fastest"


def test_loss_shift_and_ignored_labels():
    """Cross-entropy 0.289909 on the published probabilities; no label at all gives 0."""
    logits = torch.tensor([[[.7, .3], [.2, .8], [.5, .5]]]).log()
    assert abs(k3.cross_entropy(logits[:, :2], torch.tensor([[0, 1]])).item() - 0.289909) < 1e-6
    assert k3.cross_entropy(logits, torch.full((1, 3), -100)).item() == 0


def test_mtp_reads_one_token_further():
    """The MTP loss at t depends on token t + 1 as input and t + 2 as label, and trains its own layer."""
    model, ids = K3(K3Config.tiny(num_nextn_predict_layers=1)), some_ids()
    loss, parts = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    close(loss.detach(), parts["main"] + 0.3 * parts["mtp"], 1e-6)
    mtp = model.language_model.model.mtp
    unused = "layer.self_attention_res"                # nothing is stored before its only layer, as in layer 0
    assert all(p.grad.isfinite().all() for n, p in mtp.named_parameters() if not n.startswith(unused))
    assert len(model.moe_layers()) == 5


# ---- kernels.py

def kda_case(kind, T, H=2, dk=16, dv=24, dtype=torch.float64, B=1, seed=0):
    """q, k, v, g, beta, S for one kind of decay; identical keys come with beta near 1."""
    rand = lambda *s: torch.randn(*s, generator=torch.Generator().manual_seed(seed + math.prod(s)), dtype=torch.float64)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    q, k, v, S = unit(rand(B, T, H, dk)), unit(rand(B, T, H, dk)).roll(1, 0), rand(B, T, H, dv), rand(B, H, dk, dv)
    k = unit(k + 0.5 * q.flip(1))
    g, beta = -5 * torch.sigmoid(rand(B, T, H, dk + 1)[..., :dk] * 2 - 1), torch.sigmoid(rand(B, T, H))
    if kind == "identical keys":
        k, beta = k[:, :1].expand_as(k), 1 - 0.02 * beta
    if kind != "random":
        g = {"bound": -5.0, "none": 0.0, "identical keys": 0.0}.get(kind, (torch.arange(dk) % 2) * -5.0) + 0 * g
    acc = torch.promote_types(dtype, torch.float32)
    return [x.to(dtype) for x in (q, k, v)] + [x.to(acc) for x in (g, beta, S)]


def outputs_and_grads(fn, inputs, do, dS):
    inputs = [x.clone().requires_grad_() for x in inputs]
    o, S = fn(*inputs)
    return [o, S, *torch.autograd.grad([o, S], inputs, [do.to(o.dtype), dS.to(S.dtype)])]


def compare(inputs):
    """Errors of o, S and the gradients of q, k, v, g, beta, S, against the recurrence in float64."""
    torch.manual_seed(0)
    do, dS = (torch.randn(x.shape).bfloat16().double().to(x.device) for x in (inputs[2], inputs[5]))
    want = outputs_and_grads(k3.kda_recurrent, [x.double() for x in inputs], do, dS)
    return [rel(a, b) for a, b in zip(outputs_and_grads(kernels.kda_chunk, inputs, do, dS), want)]


@pytest.mark.parametrize("kind", ["random", "bound", "none", "mixed", "identical keys"])
@pytest.mark.parametrize("dtype, accept", [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_chunk_is_the_recurrence(kind, dtype, accept):
    """Outputs, state and the gradients of all six inputs, in every kind of decay.  Eqs. 1-4"""
    assert max(e := compare(kda_case(kind, 150, dtype=dtype))) < accept, e


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 66, 71, 79, 80, 127, 129])
def test_chunk_of_any_length(T):
    assert max(e := compare(kda_case("random", T, H=1, dk=5, dv=3, B=2, seed=T))) < 1e-10, e


def test_chunk_in_pieces_leaves_the_state_alone():
    """Any split gives the outputs and the state of one call; the S handed in is not written; T = 0 is the identity."""
    *x, S = kda_case("random", 100)
    kept, want, pieces, at = S.clone(), kernels.kda_chunk(*x, S), [], S
    for a, b in ((0, 37), (37, 37), (37, 38), (38, 100)):
        o, at = kernels.kda_chunk(*(y[:, a:b] for y in x), at)
        pieces.append(o)
    assert torch.equal(S, kept) and rel(torch.cat(pieces, 1), want[0]) < 1e-12 and rel(at, want[1]) < 1e-12
    assert [y.shape[0] for y in kernels.kda_chunk(*(y[:0] for y in x))] == [0, 0]


def test_identical_keys_copy_the_last_value():
    """beta = 1, no decay: o_t = scale (q_t . k) v_t, final S = k v_T'; repeated squaring would be off by 1e9."""
    q, k, v, g, beta, S = kda_case("identical keys", 64, dtype=torch.float32)
    o, S = kernels.kda_chunk(q, k, v, g, torch.ones_like(beta))
    assert rel(o, (q * k).sum(-1, keepdim=True) * v * 16**-0.5) < 1e-5
    assert rel(S, k[:, 0].unsqueeze(-1) * v[:, -1].unsqueeze(-2)) < 1e-5


def expert_case(dtype, m=10, l=32, E=6, i=48, k=3):
    g = torch.Generator().manual_seed(0)
    rand = lambda *s: torch.randn(*s, generator=g).to(dtype)
    experts = torch.stack([torch.randperm(E - 1, generator=g)[:k] for _ in range(m)])      # none chooses the last
    weights = torch.rand(m, k, generator=g).to(torch.promote_types(dtype, torch.float32))
    return rand(m, l), experts, weights, rand(E, i, l) / 6, rand(E, i, l) / 6, rand(E, l, i) / 6


@pytest.mark.parametrize("dtype, accept", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_experts_are_the_loop(dtype, accept):
    """Sum over the chosen experts of weight * w2 (SiTU(w1 x) * cap(w3 x)), and its gradients; an idle expert gets 0."""
    x, experts, weights, *w = expert_case(dtype)

    def loop(x, weights, w1, w3, w2):
        act = lambda a, b: 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)
        one = lambda t, e: w2[e] @ act(w1[e] @ x[t], w3[e] @ x[t])
        return torch.stack([sum(p * one(t, e) for p, e in zip(weights[t], experts[t])) for t in range(len(x))])

    fast = lambda x, weights, *w: kernels.experts_grouped(x, experts, weights, *w)
    do = torch.randn(x.shape, dtype=torch.float64)
    results = []
    for fn, cast in ((fast, lambda y: y), (loop, lambda y: y.double())):
        leaves = [cast(y).clone().requires_grad_() for y in (x, weights, *w)]
        y = fn(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, do.to(y.dtype))])
    assert max(rel(a, b) for a, b in zip(*results)) < accept
    assert results[0][3][-1].abs().max() == 0


def test_experts_without_tokens():
    x, experts, weights, *w = expert_case(torch.float32)
    assert kernels.experts_grouped(x[:0], experts[:0], weights[:0], *w).shape == (0, 32)


def test_experts_from_mxfp4():
    """Packed experts give the bits of the decoded ones."""
    g = torch.Generator().manual_seed(0)
    draw = lambda low, high, *s: torch.randint(low, high, s, generator=g, dtype=torch.uint8)
    packed = [(draw(0, 256, 6, o, i // 2), draw(118, 124, 6, o, i // 32)) for o, i in ((64, 32), (64, 32), (32, 64))]
    x, experts, weights, *_ = expert_case(torch.bfloat16)
    decoded = [k3.mxfp4_decode(*w, torch.bfloat16) for w in packed]
    assert torch.equal(kernels.experts_grouped(x, experts, weights, *packed),
                       kernels.experts_grouped(x, experts, weights, *decoded))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graph_holds_forward_and_backward():
    """Captured and replayed: the same bits as without the graph, for the chunk path and for the experts."""
    kda = [x.cuda().requires_grad_() for x in kda_case("random", 200, dtype=torch.bfloat16)]
    x, experts, weights, *w = (y.cuda() for y in expert_case(torch.bfloat16))
    moe = [y.requires_grad_() for y in (x, weights, *w)]

    def step():
        o, y = kernels.kda_chunk(*kda)[0], kernels.experts_grouped(moe[0], experts, *moe[1:])
        return torch.autograd.grad(o.float().square().sum() + y.float().square().sum(), kda + moe)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["random", "bound", "none", "mixed"])
def test_chunk_on_a_gpu(kind):
    """Products of bf16: outputs, state and all gradients within 8e-3."""
    inputs = [x.cuda() for x in kda_case(kind, 1000, dk=128, dv=128, dtype=torch.bfloat16)]
    assert max(e := compare(inputs)) < 8e-3, e
    assert max(e := compare([x.float() for x in inputs])) < 1e-5, e


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("ends", [[0, 33, 33, 49, 70], [14, 28, 41, 56, 70]])
def test_product_by_blocks(static, ends):
    """Rows cut into blocks of one expert each, idle and full experts included; static: as a GPU does in fp32."""
    rows, w = torch.randn(70, 12, dtype=torch.float64), torch.randn(5, 9, 12, dtype=torch.float64)
    ends = torch.tensor(ends, dtype=torch.int32)
    e, row, there = kernels._blocks(ends, 70, static)
    blocked = lambda rows, w: kernels._product(rows[row], w, ends, e)[there]
    loop = lambda rows, w: torch.cat([r @ m.mT for r, m in zip(rows.tensor_split(ends[:-1].long()), w)])
    same_map(blocked, loop, rows, w)
    assert static or row.numel() < 1.5 * 70 + 16
    own = torch.arange(5) if e is None else e          # in spare places too: a peak is no other expert's row
    assert (torch.searchsorted(ends.long(), row, right=True) == own.unsqueeze(1)).all()


def same_map(fast, plain, *inputs, accept=1e-13):
    """Values and the gradients of all inputs agree in float64, and up to rounding, dtypes too, in bfloat16."""
    for dtype, accept in ((torch.float64, accept), (torch.bfloat16, 1e-2)):
        results = []
        for fn in (fast, plain):
            leaves = [x.to(dtype).clone().requires_grad_() for x in inputs]
            y = fn(*leaves)
            dy = torch.sin(torch.arange(y.numel())).view_as(y).to(y.dtype)
            results.append([y, *torch.autograd.grad(y, leaves, dy)])
        assert max(e := [rel(a, b) for a, b in zip(*results)]) < accept, (dtype, e)
        assert [a.dtype for a in results[0]] == [b.dtype for b in results[1]]


def test_norms_convolution_and_situ_are_their_definitions():
    """Values and gradients: vectors so short that eps decides, a convolution that continues, pre-activations far out."""
    x, w = draw(2, 9, 3, 24) * torch.logspace(-4, 2, 9, dtype=torch.float64).view(9, 1, 1), draw(24)
    for x in (x, x[1, 8, 2]):
        same_map(lambda x, w: kernels.rms_norm(x, w, 1e-5), lambda x, w: k3.rms_norm(x, w, 1e-5), x, w)
        same_map(kernels.l2_norm, k3.l2_norm, x)
    for start in ([], [draw(2, 3, 24, seed=1)]):
        same_map(*(lambda x, w, *tail, f=f: torch.cat(f(x, w, *tail), 1) for f in (kernels.short_conv, k3.short_conv)),
                 draw(2, 9, 24), draw(24, 1, 4), *start)
    gate, up = torch.meshgrid(*2 * [torch.tensor([0, 1e-9, 0.1, -1, 4, -30, 300]).double()], indexing="ij")
    for caps in ((4.0, 25.0), (1.0, 0.5)):
        same_map(lambda a, b: kernels.situ_glu(a, b, *caps), lambda a, b: k3.situ_glu(a, b, *caps), gate, up)
        same_map(lambda a, b: kernels.situ_glu(a, b, *caps), lambda a, b: k3.situ_glu(a, b, *caps), gate * 1e-6, up * 1e-6)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_attn_res_of_a_list(n):
    """Sources of unlike sizes, one so small that eps decides."""
    sources = [draw(2, 7, 24) * size for size in (1e-3, 1, 30, 0.3, 3)[:n]]
    listed = lambda query, norm, *s: kernels.attn_res(s, query, norm, 1e-5)
    stacked = lambda query, norm, *s: k3.attn_res(torch.stack(s, -2), query, norm, 1e-5)
    same_map(listed, stacked, draw(24), draw(24), *sources)


def test_fast_forms_under_fp32_masters():
    """bf16 activations meet fp32 weights, as in training on a GPU: plain's values, and gradients in each one's own dtype."""
    x, y, w, taps = draw(2, 9, 24), draw(2, 9, 24, seed=1), draw(24), draw(24, 1, 4)
    for form in (lambda k, x, y, w, taps: k.rms_norm(x, w, 1e-5), lambda k, x, y, w, taps: k.short_conv(x, taps)[0],
                 lambda k, x, y, w, taps: k.situ_glu(x, y), lambda k, x, y, w, taps: k.attn_res(
                     torch.stack([x, y], -2) if k is k3 else [x, y], w, w, 1e-5)):
        results = []
        for module in (kernels, k3):
            leaves = [t.to(dtype).requires_grad_() for t, dtype in zip((x, y, w, taps), 2 * [torch.bfloat16] + 2 * [torch.float32])]
            out = form(module, *leaves)
            out.float().square().sum().backward()
            results.append([out, *(t.grad for t in leaves if t.grad is not None)])
        assert [a.dtype for a in results[0]] == [b.dtype for b in results[1]]
        assert max(e := [rel(a, b) for a, b in zip(*results)]) < 1e-2, e


# ---- §2.4 vision

def seeing(**over):
    return K3(K3Config.tiny(**{"vt_num_hidden_layers": 3, **over}))


def patches(grids):
    return draw(sum(t * h * w for t, h, w in grids), 3, 14, 14, dtype=torch.float32).clamp(-1, 1)


def png(path, w, h, rows, colour=2, depth=8, **extra):
    """A PNG by hand: what a header says need not be true."""
    chunks = {"IHDR": struct.pack(">IIBBBBB", w, h, depth, colour, 0, 0, 0), **extra,
              "IDAT": zlib.compress(rows), "IEND": b""}
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind.encode() + data
        + struct.pack(">I", zlib.crc32(kind.encode() + data)) for kind, data in chunks.items()))
    return path


def test_vision_has_the_released_parameters():
    """401,214,464 in the tower and 46,144,512 in the projector, under the released names."""
    with torch.device("meta"):
        tower, projector = k3.MoonViT(K3Config()), k3.Projector(K3Config())
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert (count(tower), count(projector)) == (401_214_464, 46_144_512)
    shapes = {k: list(p.shape) for k, p in tower.state_dict().items()}
    assert shapes["patch_embed.pos_emb.weight"] == [64, 64, 1024]
    assert shapes["encoder.blocks.26.wqkv.weight"] == [4608, 1024]    # 12 heads x 128, not 1024
    assert {k for k in shapes if "blocks" not in k} == {
        "patch_embed.proj.weight", "patch_embed.pos_emb.weight", "encoder.final_layernorm.weight"}


def test_positions():
    """Half-pixel bilinear; x first, on neighbouring pairs; the tower's eps."""
    grid = torch.arange(16.0).view(4, 4, 1)
    assert k3.resize_grid(grid, 2, 2).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert k3.resize_grid(grid, 4, 4) is grid
    angle = k3.rotary_angles(1, 2, 3, 8)[5]                               # (y, x) = (1, 2)
    torch.testing.assert_close(angle, torch.tensor([2, 1, 0.02, 0.01]))
    turned = k3.rotate(torch.eye(8)[:1, None], angle[None])[0, 0]
    torch.testing.assert_close(turned[:2], torch.tensor([-0.416147, 0.909297]))
    want = torch.tensor([[0, 0, 1, 1], [0.841471, 0.0099998, 0.540302, 0.99995]])
    torch.testing.assert_close(k3.time_code(2, 4), want)
    norm = seeing().vision_tower.encoder.blocks[0].norm0
    assert norm.eps == k3.VISION_EPS
    x = torch.tensor([0.03, -0.04]).repeat(32)
    torch.testing.assert_close(norm(x)[:2], torch.tensor([0.848, -1.131]), atol=1e-3, rtol=0)


def test_time_code_only_in_videos():
    """An image's patches get the place alone; a video's first frame differs from it by (0, 1)."""
    embed = seeing().vision_tower.patch_embed
    image, film = embed.position(1, 4, 6), embed.position(3, 4, 6)
    code = torch.cat([torch.zeros(32), torch.ones(32)])
    torch.testing.assert_close(film[:24] - image, code.expand(24, 64))
    assert film.shape == (72, 64) and not torch.equal(film[:24], film[24:48])


def test_attention_stays_inside_an_item():
    """attend_items against one softmax under a block mask over everything."""
    torch.manual_seed(0)
    lengths = [4, 4, 8, 4]
    q, k, v = torch.randn(3, sum(lengths), 2, 8)
    item = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    scores = torch.einsum("ihd,jhd->hij", q, k) * 8 ** -0.5
    scores = scores.masked_fill(item[:, None] != item, -torch.inf)
    want = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    torch.testing.assert_close(k3.attend_items(q, k, v, lengths), want)


def test_items_together_are_items_alone():
    """Images of several sizes and a video, in one call and each by itself; mean over frames."""
    model = seeing()
    grids = [(1, 2, 2), (2, 2, 2), (1, 6, 8), (1, 6, 8), (4, 4, 6), (1, 8, 8)]
    pixels, record = patches(grids), {}
    with torch.no_grad():
        together = model.encode_media(pixels, torch.tensor(grids), record)
        alone = [model.encode_media(x, [grid])[0] for grid, x in
                 zip(grids, pixels.split([t * h * w for t, h, w in grids]))]
    assert [len(x) for x in together] == [1, 1, 12, 12, 6, 16]
    for a, b in zip(together, alone):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert record["patch_embed"].shape == record["encoder"].shape == (len(pixels), 64)
    assert record["item4.merged"].shape == (6, 4, 64) and record["item4.projected"] is together[4]


def test_merge_patches_goes_row_by_row():
    """Frames are averaged; groups go row by row and so do the four of a group."""
    x = torch.arange(8.0) + torch.tensor([[0.0], [1], [5]])
    merged = k3.merge_patches(x.view(24, 1), (3, 2, 4), (2, 2))
    assert merged.squeeze(-1).tolist() == [[2, 3, 6, 7], [4, 5, 8, 9]]


@pytest.mark.parametrize("grids", [
    [(4, 4)], (1, 4, 4), [(1, 4, 5)], [(1, 3, 4)], [(0, 4, 4)], [(1, 0, 4)], [(5, 4, 4)], [],
    [(1, 2, 2)], [(1, 514, 2)], [(1, -4, -4)], [(1.0, 4.0, 4.0)], [(1, 4, 4), (1, 2, 2)]])
def test_bad_grids_are_refused(grids):
    """Rows that are not (t, h, w), odd or empty or huge sides, too many frames, other counts."""
    with pytest.raises(ValueError, match="grid"):
        seeing().encode_media(torch.zeros(16, 3, 14, 14), torch.tensor(grids))


def test_media_replace_their_placeholders():
    """One placeholder becomes the item's whole block; counts and row lengths must agree; causal as text is."""
    ids = torch.tensor([[7, 265, 1], [265, 2, 3]])
    assert k3.expand_placeholders(ids, [2, 2], 265).tolist() == [[7, 265, 265, 1], [265, 265, 2, 3]]
    with pytest.raises(ValueError, match="2 media placeholders in the text, but 1 media items"):
        k3.expand_placeholders(ids, [2], 265)
    with pytest.raises(ValueError, match="equal"):
        k3.expand_placeholders(ids, [2, 3], 265)
    model, grids, record = seeing(), torch.tensor([[1, 4, 4], [2, 4, 4]]), {}
    pixels = patches(grids.tolist())
    with torch.no_grad():
        logits, media = model(ids, pixel_values=pixels, grid_thws=grids, record=record), model.encode_media(pixels, grids)
    assert logits.shape == (2, 6, 320) and torch.equal(record["embed"][0, 1:5], media[0])
    assert torch.equal(record["embed"][1, :4], media[1])
    with pytest.raises(ValueError, match="no vision tower"):
        K3(K3Config.tiny())(ids, pixel_values=pixels, grid_thws=grids)


def test_vision_memory_is_a_sum_of_squares():
    """8 images of 32 x 32 patches, forward and backward: one mask over all would take 0.8 GB."""
    model = seeing()
    pixels, grids = patches([(8, 32, 32)]), [(1, 32, 32)] * 8
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sum(x.sum() for x in model.encode_media(pixels, grids)).backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2 ** 20
    assert grown < 0.7, f"{grown:.2f} GB"
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.vision_tower.parameters())


def test_image_sizes():
    """The released formula: 65,536 patches, 512 a side."""
    for size, want in {(1, 1): (1, 1), (13, 4099): (13, 4099), (3584, 3584): (3584, 3584),
                       (4096, 4096): (3591, 3591), (28672, 224): (7168, 56),
                       (7919, 7907): (3591, 3585), (10 ** 6, 3): (7168, 1)}.items():
        assert k3.image_size(*size) == want
    assert k3.image_prompt(640, 481) == (
        "<|media_begin|>image 640x481<|media_content|><|media_pad|><|media_end|>")


def test_preprocess_pads_with_black_and_cuts_row_by_row():
    """A 30 x 15 picture is not scaled; it gets 56 x 28 pixels, so a grid of 2 x 4."""
    picture = np.random.default_rng(0).integers(0, 256, (15, 30, 3), dtype=np.uint8)
    x, grid = k3.preprocess_image(picture)
    assert x.shape == (8, 3, 14, 14) and x.dtype == torch.float32 and grid.tolist() == [1, 2, 4]
    whole = x.view(2, 4, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(28, 56, 3)
    np.testing.assert_allclose(whole[:15, :30], picture / 127.5 - 1, atol=1e-6)
    assert (whole[15:] == -1).all() and (whole[:, 30:] == -1).all()
    assert k3.preprocess_image(np.zeros((2800, 2800), np.uint8))[1].tolist() == [1, 200, 200]


def test_preprocess_reads_what_people_have(tmp_path):
    """Grey, palette, 16-bit, one pixel, alpha on white (also a colour key), floats, JPEG, wide."""
    import matplotlib.image as mpl
    first = lambda x: ((k3.preprocess_image(x)[0][0, :, 0, 0] + 1) * 127.5).round().tolist()
    clear = np.full((4, 4, 4), (200, 100, 50, 0), np.uint8)
    assert first(clear) == [255, 255, 255]
    clear[..., 3] = 51
    assert first(clear) == [244, 224, 214]
    assert first(np.full((4, 4), 0.2)) == first(np.full((4, 4, 3), 51 * 257, np.uint16)) == [51] * 3
    assert first(png(tmp_path / "one.png", 1, 1, b"\0\1\2\3")) == [1, 2, 3]
    assert first(png(tmp_path / "deep.png", 1, 1, b"\0\x80\x80", colour=0, depth=16)) == [128] * 3
    assert first(png(tmp_path / "map.png", 1, 1, b"\0\0", colour=3, PLTE=b"\4\5\6")) == [4, 5, 6]
    key = png(tmp_path / "key.png", 1, 1, b"\0\1\2\3", tRNS=b"\0\1\0\2\0\3")
    assert first(key) == [255] * 3
    mpl.imsave(tmp_path / "a.jpg", np.full((20, 9000, 3), 90, np.uint8))
    (tmp_path / "a.jpg").rename(tmp_path / "a.png")                    # the content decides
    assert first(str(tmp_path / "a.png")) == [90] * 3
    assert k3.preprocess_image(tmp_path / "a.png")[1].tolist() == [1, 2, 512]


def test_preprocess_refuses(tmp_path):
    """No picture, half of one, a bomb, an absent file: the name is said. Arrays of other kinds."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 193), dtype=np.uint8)
    noise[:, 0] = 0                                                    # the rows' filter
    good = png(tmp_path / "good.png", 64, 64, noise.tobytes())
    assert k3.preprocess_image(good)[1].tolist() == [1, 6, 6]
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:4000])
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.jpg").write_bytes(b"")
    png(tmp_path / "bomb.png", 10_000, 10_000, bytes(1000))
    png(tmp_path / "large.png", 60_000, 60_000, bytes(1000))
    for name in ("cut.png", "text.png", "empty.jpg", "bomb.png", "large.png", "absent.png", "."):
        with pytest.raises(ValueError, match=f"cannot read .*{name} as an image"):
            k3.preprocess_image(tmp_path / name)
    for array in (np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4)), np.full((4, 4), 2.0), None,
                  np.full((4, 4), np.nan), np.zeros((4, 4), int), np.zeros(4), -np.ones((4, 4))):
        with pytest.raises(ValueError, match="image array"):
            k3.preprocess_image(array)


# ---- text

MERGES = ["th", "the", " the", "on't", "don't", "世界", "世", "界", "abc", "us", "er", "user",
          "  ", "    ", " ro", "le", " role", '="']
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
         18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>",
         254: "[UNK]", 255: "[PAD]"}


def released_layout(vocab, tokens, named=NAMED):
    """A rank file and a config as the release lays them out."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (vocab / "tiktoken.model").write_bytes(b"".join(lines))
    table = {len(tokens) + i: {"content": name, "special": True} for i, name in named.items()}
    (vocab / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table}))
    return vocab


@pytest.fixture
def vocab(tmp_path):
    tokens = [bytes([b]) for b in reversed(range(256))]
    return released_layout(tmp_path, tokens + [m.encode() for m in MERGES])


@pytest.fixture
def tok(vocab):
    return k3.load_tokenizer(vocab)


def test_text_never_becomes_control_tokens(tok):
    """Written-out control names are ordinary ids and come back as text; ours map to one id."""
    for name in tok.special:
        ids = tok.encode(name)
        assert len(ids) > 1 and max(ids) < 256 + len(MERGES) and tok.decode(ids) == name
        assert tok.encode(name, control=True) == [tok.special[name]]


@pytest.mark.parametrize("text", [" " * 50_001, "a" * 50_001, " " * 10 ** 6, "", "ab " * 140_000,
                                  "x" * 25_000 + "\n" * 25_000, "\u3000" * 60_000 + "b"])
def test_long_texts_are_cut(tok, text):
    """At 400,000 characters and inside runs over 25,000, losing nothing."""
    pieces = list(k3.cut_text(text))
    assert "".join(pieces) == text == tok.decode(tok.encode(text))
    assert all(len(piece) <= 400_000 for piece in pieces)
    if text == " " * 50_001:
        assert [len(piece) for piece in pieces] == [25_000, 25_000, 1]


@pytest.mark.parametrize("text, pieces", [
    ("abc世界", ["abc", "世界"]), ("世界abc", ["世界", "abc"]), ("don't世", ["don't", "世"]),
    ("the  the1234", ["the", " ", " the", "1", "2", "3", "4"])])
def test_split_keeps_han_apart(tok, text, pieces):
    """The pattern's set intersections: Han runs are pieces of their own and no letter is lost."""
    assert [tok.decode([i]) for i in tok.encode(text)] == pieces


def test_stream_yields_whole_characters(tok):
    """Bytes of an unfinished character wait; the end gives what is left; unknown ids are errors."""
    ids = tok.encode("a😀é世界")
    assert list(tok.stream(ids)) == ["a", "😀", "é", "世界"]
    assert list(tok.stream(ids[:3])) == ["a", "\ufffd"] and tok.decode(ids[:3]) == "a\ufffd"
    for i in (-1, 256 + len(MERGES) + 256, 2 ** 70):
        with pytest.raises(ValueError, match=f"token id {i} "):
            tok.decode([i])


def test_released_ids(tmp_path):
    """163,584 ranks and 256 control ids make 163,840; the unnamed are reserved."""
    tokens = [bytes([b]) for b in range(256)] + [n.to_bytes(3, "big") for n in range(163_584 - 256)]
    tok = k3.load_tokenizer(released_layout(tmp_path, tokens))
    assert [tok.special[name] for name in (*k3.CONTROL[:3], "<|media_pad|>", "[PAD]")] == [
        163584, 163585, 163586, 163605, 163839]
    assert tok.bpe.n_vocab == 163_840 and tok.decode([163_700]) == "<|reserved_token_163700|>"
    assert tok.stop == {163585, 163586}


@pytest.mark.parametrize("damage", ["gap", "rank twice", "token twice", "short", "long", "no byte",
                                    "junk", "empty"])
def test_damaged_ranks_are_refused(vocab, damage):
    """Gaps, repeats, another count, a byte without rank: an error naming the file."""
    path = vocab / "tiktoken.model"
    lines = path.read_bytes().splitlines(keepends=True)
    merge = lambda rank: base64.b64encode(b"zz") + b" %d\n" % rank
    damaged = {"gap": lines[:-1] + [merge(len(lines))], "rank twice": lines[:-1] + [merge(3)],
               "token twice": lines[:-1] + [lines[0].split()[0] + b" %d\n" % (len(lines) - 1)],
               "short": lines[:-1], "long": lines + [merge(len(lines))], "empty": [],
               "no byte": [merge(0)] + lines[1:], "junk": lines[:-1] + [b"%%% 1\n"]}
    path.write_bytes(b"".join(damaged[damage]))
    with pytest.raises(k3.CheckpointError, match="tiktoken.model"):
        k3.load_tokenizer(vocab)


@pytest.mark.parametrize("config", [
    "", "[]", "{}", '{"added_tokens_decoder": {}}', '{"added_tokens_decoder": []}',
    *('{"added_tokens_decoder": %s}' % json.dumps(table) for table in (
        {"x": {"content": "a"}}, {"300": "a"}, {"300": {}}, {"300": {"content": 1}},
        {"-1": {"content": "a"}}, {"300": {"content": "a"}, "301": {"content": "a"}},
        {"300": {"content": ""}}, {"300": {"content": ["a"]}},
        {"300": {"content": "a"}, str(10 ** 12): {"content": "b"}}))])
def test_damaged_tokenizer_config_is_refused(vocab, config):
    """An error naming the file, and no table as large as an id in it."""
    (vocab / "tokenizer_config.json").write_text(config)
    with pytest.raises(k3.CheckpointError, match="tokenizer_config.json"):
        k3.load_tokenizer(vocab)


def test_byte_tokenizer(tmp_path):
    """The toy's tokenizer: bytes are ids, control ids follow, and the same loader opens it."""
    for name, raw in k3.byte_tokenizer().items():
        (tmp_path / name).write_bytes(raw)
    tok = k3.load_tokenizer(tmp_path)
    assert tok.encode("é<|open|>") == list("é<|open|>".encode())
    assert [tok.special[name] for name in k3.CONTROL] == list(range(256, 256 + len(k3.CONTROL)))


def pieces(tok, *parts):
    """Parts encoded one by one; those marked with a star are control ids."""
    return [i for part in parts for i in tok.encode(part.rstrip("*"), control=part.endswith("*"))]


def test_chat_framing(tok):
    """Every piece by itself, text as text, attributes escaped, the answer's channel left open."""
    message = lambda role: ["<|open|>*", "message", " role", '="', role, '"', "<|sep|>*"]
    think, response = (["<|open|>*", name, "<|sep|>*"] for name in ("think", "response"))
    shut = lambda name: ["<|close|>*", name, "<|sep|>*"]
    end = [*shut("message"), "<|end_of_msg|>*"]
    talk = [{"role": "user", "content": "Hello <|sep|>"},
            {"role": "assistant", "content": "Hi", "reasoning_content": "Hm"},
            {"role": 'a"&', "content": ""}]
    user, odd = [*message("user"), "Hello <|sep|>", *end], [*message("a&quot;&amp;"), *end]
    hi, ask = [*response, "Hi", *shut("response"), *end], message("assistant")
    assert k3.chat_prompt(tok, talk) == pieces(
        tok, *user, *ask, *think, "Hm", *shut("think"), *hi, *odd, *ask, *think)
    assert k3.chat_prompt(tok, talk, thinking=False) == pieces(
        tok, *user, *ask, *hi, *odd, *ask, *response)
    picture = k3.chat_prompt(tok, [{"role": "user", "content": [(640, 481), "What?"]}])
    assert picture == pieces(tok, *message("user"), "<|media_begin|>*", "image 640x481",
                             "<|media_content|>*", "<|media_pad|>*", "<|media_end|>*", "What?",
                             *end, *ask, *think)


def test_reply_starts_inside_the_open_channel(tok):
    """The prompt opened it; tags are not text; written-out tags are; the end token stops."""
    ids = pieces(tok, "Hm <|close|>", "<|close|>*", "think", "<|sep|>*", "<|open|>*", "response",
                 "<|sep|>*", "Hi", "<|close|>*", "response", "<|sep|>*", "<|close|>*", "message",
                 "<|sep|>*", "<|end_of_msg|>*", "more")
    def texts(ids, thinking):
        parts = {"think": [], "response": []}
        for channel, i in k3.chat_reply(tok, ids, thinking):
            parts[channel].append(i)
        return tuple(map(tok.decode, parts.values()))
    assert texts(ids, True) == ("Hm <|close|>", "Hi")
    assert texts(pieces(tok, "Hi", "<|close|>*", "response", "<|sep|>*"), False) == ("", "Hi")
    assert texts(pieces(tok, "Hm"), True) == ("Hm", "")
    assert "".join(k3.chat_text(tok, ids)) == "[think]\nHm <|close|>\n\n[response]\nHi"
    assert "".join(k3.chat_text(tok, pieces(tok, "Hi", "<|close|>*", "response", "<|sep|>*"), False)) == "Hi"


# ---- checkpoint files

U8 = torch.uint8


# ---- MXFP4

def test_mxfp4_values_and_nibble_order():
    """0x21 is 0.5, 1.0: the low nibble is the even input; byte 120 is 2^-7, 129 is 4."""
    packed = torch.zeros(1, 16, dtype=U8)
    packed[0, :3] = torch.tensor([0x21, 0x72, 0xF7])
    for byte, unit in ((127, 1.0), (120, 0.0078125), (129, 4.0)):
        got = k3.mxfp4_decode(packed, torch.tensor([[byte]], dtype=U8))
        assert got[0, :6].tolist() == [unit * v for v in (0.5, 1.0, 1.0, 6.0, 6.0, -6.0)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mxfp4_is_exact_for_every_code_and_scale(dtype):
    """Each of 16 x 255 values is the true one rounded once; scale 255 is NaN, code 0 included."""
    codes = torch.arange(16, dtype=U8)
    packed = (codes | codes << 4).expand(256, 16)                  # every code twice
    got = k3.mxfp4_decode(packed, torch.arange(256, dtype=U8)[:, None], dtype)
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    want = torch.tensor([[s * v * 2.0 ** (e - 127) for s in (1, -1) for v in grid for _ in "ab"]
                         for e in range(255)], dtype=torch.float64).to(dtype)
    assert torch.equal(got[:255], want) and got[255].isnan().all() and got.dtype == dtype
    assert dtype != torch.float32 or got[0, 4].item() == 2.0 ** -127 == 5.877471754111438e-39


def test_mxfp4_golden_row():
    """One row of the golden cases, in halves of its three groups' units 2^5, 2^-1, 2^-14."""
    packed = bytes.fromhex(
        "033749ddde6328b6d85e67d6f591f5f7449192bc53528743"
        "fca2fb4c7f5ef97714c5f5493b22f6c57bf57819cedc4a4b")
    halves = [
        3, 0, 12, 3, -1, 4, -6, -6, -8, -6, 3, 8, 0, 2, 8, -3, 0, -6, -8, 6, 12, 8, 8, -6, 6, -12,
        1, -1, 6, -12, 12, -12, 4, 4, 1, -1, 2, -1, -4, -3, 3, 6, 2, 6, 12, 0, 3, 4, -4, -12, 2,
        -2, -3, -12, -4, 4, -12, 12, -8, 6, -1, -12, 12, 12, 4, 1, 6, -4, 6, -12, -1, 4, -3, 3, 2,
        2, 8, -12, 6, -4, -3, 12, 6, -12, 0, 12, -1, 1, -8, -4, -4, -6, -2, 4, -3, 4]
    got = k3.mxfp4_decode(torch.tensor([*packed], dtype=U8), torch.tensor([132, 126, 113], dtype=U8))
    unit = torch.tensor([2.0 ** 5, 2.0 ** -1, 2.0 ** -14]).repeat_interleave(32)
    assert torch.equal(got, torch.tensor(halves) / 2 * unit)


def test_mxfp4_encode_keeps_decoded_values():
    """decode, encode, decode is the identity for all codes, alone and mixed, under all scales."""
    packed = torch.randint(0, 256, (255, 40, 16), dtype=U8, generator=torch.manual_seed(0))
    same = torch.arange(16, dtype=U8)
    packed[:, :16] = (same | same << 4)[:, None]                   # blocks of a single code
    scale = torch.arange(255, dtype=U8).view(255, 1, 1).expand(255, 40, 1)
    for dtype, last in ((torch.float64, 255), (torch.float32, 253)):
        want = k3.mxfp4_decode(packed[:last], scale[:last], dtype)
        got = k3.mxfp4_decode(*k3.mxfp4_encode(want), dtype)
        assert torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())


def test_mxfp4_encode_rounds_to_the_nearest_code():
    """Ties go to the even code, nothing is clipped, the scale rule is the documented one."""
    x = torch.zeros(2, 32)
    x[0, :9] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5, 2.49])
    x[1, :2] = torch.tensor([7.9, 1.0])
    packed, scale = k3.mxfp4_encode(x)
    assert scale.tolist() == [[127], [128]]
    got = k3.mxfp4_decode(packed, scale)
    assert got[0, :9].tolist() == [6, 0, 1, 1, 2, 2, 4, -4, 2] and got[1, :2].tolist() == [8, 1]
    x = torch.randn(64, 256, generator=torch.manual_seed(1)).to(torch.bfloat16)
    packed, scale = k3.mxfp4_encode(x)
    unit = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
    grid = k3.mxfp4_decode(torch.arange(16, dtype=U8)[None] * 17, torch.tensor([[127]], dtype=U8))
    error = (k3.mxfp4_decode(packed, scale, torch.float64) - x.double()).abs()
    nearest = (x.double()[..., None] / unit[..., None] - grid.double()).abs().amin(-1) * unit
    assert torch.equal(error, nearest)


def test_mxfp4_round_is_what_the_codes_hold():
    """Blocks of every scale, ties, zeros and subnormals: the values of decode(encode), bit for bit; the gradient passes as it is."""
    power = torch.exp2(torch.arange(-140.0, 120).repeat(2, 1)).view(2, -1, 1)
    x = torch.cat([power * draw(2, 260, 32, dtype=torch.float32), power * torch.arange(-16, 16) / 4, torch.zeros(2, 1, 32)], 1)
    x = x.flatten(1).requires_grad_()
    got = k3.mxfp4_round(x)
    assert torch.equal(got, k3.mxfp4_decode(*k3.mxfp4_encode(x)))
    grad = draw(*x.shape, dtype=torch.float32)
    assert torch.equal(torch.autograd.grad(got, x, grad)[0], grad)
    assert k3.mxfp4_round(torch.tensor([math.inf] + [0.0] * 31)).isnan().all()


@pytest.mark.parametrize("kernel", ["plain", "fast"])
def test_rounded_experts_are_the_decoded_codes(kernel):
    """Quantisation-aware training: loss and gradients are those of a model whose experts are decoded codes."""
    models, ids = [tiny(), tiny()], some_ids()
    names = [name for name in models[0].state_dict() if ".experts." in name]
    losses, grads = [], []
    with torch.no_grad():
        for name in names:
            w = models[1].get_parameter(name)
            w.copy_(k3.mxfp4_decode(*k3.mxfp4_encode(w)))
    for model, rounded in zip(models, (True, False)):
        model.kernel = kernel
        for moe in model.moe_layers():
            moe.experts.rounded = rounded
        losses.append(model.loss(ids[:, :-1], ids[:, 1:])[0])
        losses[-1].backward()
        grads.append([model.get_parameter(name).grad for name in names])
    assert torch.equal(*losses) and all(torch.equal(a, b) and a.any() for a, b in zip(*grads))
    assert not torch.equal(*(model.get_parameter(names[0]) for model in models))


def test_mxfp4_refuses_what_it_cannot_hold():
    assert not k3.mxfp4_decode(*k3.mxfp4_encode(torch.zeros(3, 64))).any()
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="NaN"):
            k3.mxfp4_encode(torch.tensor([0.0] * 31 + [bad]))
    with pytest.raises(ValueError, match="multiple of 32"):
        k3.mxfp4_encode(torch.zeros(4, 48))
    for p, s in (((4, 24), (4, 2)), ((4, 32), (3, 2)), ((4, 32), (4, 1))):
        with pytest.raises(ValueError, match="do not fit"):
            k3.mxfp4_decode(torch.zeros(p, dtype=U8), torch.zeros(s, dtype=U8))


# ---- safetensors files

def packed_file(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype="U8", shape=(4,), span=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


def open_single(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    return k3.Checkpoint(tmp_path)


def test_values_of_every_dtype(tmp_path):
    """Bit patterns survive, at odd offsets and for shape [] and size 0 too."""
    words = struct.pack("<5H", 0x3F80, 0xC000, 0x8000, 0x7FC0, 0x0001)
    cases = {"bf16": ("BF16", [5], words), "f32": ("F32", [], struct.pack("<f", 1.5)),
             "none": ("F64", [0, 3], b""), "f16": ("F16", [1], struct.pack("<e", -2)),
             "f64": ("F64", [1], struct.pack("<d", 1e300)), "u8": ("U8", [1], b"\xff"),
             "i8": ("I8", [1], b"\xff"), "i16": ("I16", [1], b"\xfe\xff"),
             "i32": ("I32", [1], b"\xfd\xff\xff\xff"), "i64": ("I64", [1], b"\xfc" + b"\xff" * 7),
             "bool": ("BOOL", [2], b"\x00\x01"), "e4m3": ("F8_E4M3", [1], b"\x38"),
             "e5m2": ("F8_E5M2", [1], b"\x3c"), "e8m0": ("F8_E8M0", [1], b"\x80")}
    header, data = {"__metadata__": {"note": "odd"}, "pad": entry("U8", [1], [0, 1])}, b"\0"
    for name, (dtype, shape, raw) in cases.items():
        header[name] = {"data_offsets": [len(data), len(data) + len(raw)], "shape": shape,
                        "dtype": dtype}
        data += raw
    ck = open_single(tmp_path, packed_file(b" " + json.dumps(header).encode() + b" \n ", data))
    x = ck.tensor("bf16")
    assert x[:3].tolist() == [1, -2, 0] and x[2].signbit() and x[3].isnan()
    assert abs(x[4].item() - 9.18e-41) < 1e-43
    assert ck.tensor("f32").shape == () and ck.tensor("f32") == 1.5
    assert ck.tensor("none").shape == (0, 3)
    want = {"f16": -2, "f64": 1e300, "u8": 255, "i8": -1, "i16": -2, "i32": -3, "i64": -4}
    assert {name: ck.tensor(name).item() for name in want} == want
    assert ck.tensor("bool").tolist() == [False, True]
    assert [ck.tensor(n, torch.float32).item() for n in ("e4m3", "e5m2", "e8m0")] == [1, 1, 2]


def test_local_tensors_are_views(tmp_path):
    """Unconverted tensors of a file share its map; writing to one never reaches the file."""
    k3.write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(4), "b": torch.zeros(4)})
    raw = (tmp_path / "model.safetensors").read_bytes()
    both = k3.Checkpoint(tmp_path).fetch(["a", "b"])
    assert abs(both["a"].data_ptr() - both["b"].data_ptr()) == 16
    both["a"] += 1
    assert (tmp_path / "model.safetensors").read_bytes() == raw


BAD_ENTRIES = [
    entry("U8", [5]), entry("BF16", [5], [0, 16]), entry(span=[0, 5]), entry(span=[4, 0]),
    entry(span=[-4, 0]), entry(shape=[-4]), entry(shape=[-2, -2]), entry("U7"), entry(["U8"]),
    entry(shape=[True, 4]), entry(shape=[4.0]), entry(span=[0, 4, 4]), entry(shape=[2 ** 62, 4]),
    entry(shape=[0, 2 ** 63], span=[0, 0]), entry(shape=[1] * 40), entry(span=[0, 2 ** 63]),
    {"dtype": "U8", "shape": [4]}, [1], None, {**entry(), "extra": 1}, {**entry(), "shape": "4"},
    entry(shape=[10 ** 4000] * 30), entry(span=[1, 5])]


@pytest.mark.parametrize("bad", BAD_ENTRIES, ids=range(len(BAD_ENTRIES)))
def test_bad_header_entries_name_file_and_tensor(tmp_path, bad):
    with pytest.raises(k3.CheckpointError) as error:
        open_single(tmp_path, packed_file({"the.tensor": bad}, b"1234"))
    text = str(error.value)
    assert "model.safetensors" in text and "the.tensor" in text
    assert "\n" not in text and len(text) < 600


BAD_FILES = [
    b"", b"1234567", packed_file(b"{}", length=0), packed_file(b"{}", length=3),
    packed_file(b"{}", length=2 ** 63), packed_file(b"{}", length=100_000_001),
    packed_file(b"[]"), packed_file(b"3"), packed_file(b"{"), packed_file(b'{"\xff": 1}'),
    packed_file(b"[" * 100_000), packed_file(b"9" * 5000), packed_file({}, b"stray"),
    packed_file(b'{"a": %s, "a": %s}' % (2 * (json.dumps(entry()).encode(),)), b"1234"),
    packed_file({"a": entry(), "b": entry()}, b"1234"),                       # overlap
    packed_file({"a": entry(), "b": entry(span=[2, 6])}, b"123456"),          # partial overlap
    packed_file({"a": entry(), "b": entry(span=[5, 9])}, b"123456789"),       # gap
    packed_file({"__metadata__": {"n": 1}}), packed_file({"__metadata__": "x"}),
    packed_file({"model.a": entry(), "language_model.b": entry(span=[4, 8])}, b"12345678"),
    packed_file({"w.weight_packed": entry()}, b"1234"),
    packed_file({"w.weight": entry(), "w.weight_packed": entry(span=[4, 8]),
                 "w.weight_scale": entry(span=[8, 12])}, b"123456789012")]


@pytest.mark.parametrize("content", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files_are_refused_in_one_sentence(tmp_path, content):
    with pytest.raises(k3.CheckpointError, match="model.safetensors") as error:
        open_single(tmp_path, content)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_huge_header_length_allocates_nothing():
    """A sparse file of 1 TB is not needed: the length is held against the file first."""
    with pytest.raises(k3.CheckpointError):
        k3.parse_header(b'{"a": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}}'
                     % (2 ** 50, 2 ** 50), 2 ** 40, "f")


EXPERT = "layers.1.block_sparse_moe.experts.3.w1.weight"


def small_shards(prefix="language_model."):
    g = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (8, 32), dtype=U8, generator=g)
    scale = torch.randint(110, 130, (8, 2), dtype=U8, generator=g)
    return [{prefix + "model.layers.0.norm.weight": torch.randn(16, generator=g).bfloat16(),
             prefix + "model.layers.0.A_log": torch.randn(6, generator=g)},
            {prefix + f"model.{EXPERT}_packed": packed, prefix + f"model.{EXPERT}_scale": scale},
            {prefix + "lm_head.weight": torch.randn(4, 6, generator=g),
             "mm_projector.proj.0.weight": torch.randn(2, 3, generator=g).bfloat16()}]


@pytest.fixture
def folder(tmp_path):
    k3.write_checkpoint(tmp_path / "ck", small_shards(), {"hidden_size": 16})
    return tmp_path / "ck"


def same_tensors(ck, shards):
    for name, tensor in {k: v for shard in shards for k, v in shard.items()}.items():
        assert torch.equal(ck.tensor(name).view(-1).view(U8), tensor.view(-1).view(U8)), name


def inventory():
    names = k3.SHARD.format
    return {name: (tuple(t.shape), k3.DTYPE_NAMES[t.dtype], names(i, 3))
            for i, shard in enumerate(small_shards(), 1) for name, t in shard.items()}


def test_sharded_checkpoint_round_trip(folder, monkeypatch):
    """Both prefixes give the same names; experts decode on demand; config and index agree."""
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json", "model-00001-of-000003.safetensors", "model-00002-of-000003.safetensors",
        "model-00003-of-000003.safetensors", "model.safetensors.index.json"]
    ck = k3.Checkpoint(folder)
    same_tensors(ck, small_shards())
    k3.write_checkpoint(folder, small_shards(prefix=""), {})
    bare = k3.Checkpoint(folder)
    assert bare.shard_of == ck.shard_of and bare.tensors.keys() == ck.tensors.keys()
    raw = bare.fetch(bare.stored("language_model.model." + EXPERT))
    want = k3.mxfp4_decode(*raw.values(), torch.bfloat16)
    assert torch.equal(bare.tensor("language_model.model." + EXPERT, torch.bfloat16), want)
    assert want.shape == (8, 64) and bare.bytes_read == 2 * (8 * 32 + 8 * 2)
    monkeypatch.setattr(k3, "K3Config", type("C", (), {"from_json": staticmethod(dict)}),
                        raising=False)
    assert bare.config == {} and k3.compare_inventory(inventory(), bare) == []


def test_missing_tensors_and_odd_packing_are_named(folder):
    with pytest.raises(k3.CheckpointError, match="no tensor 'model.nothing'"):
        k3.Checkpoint(folder).tensor("model.nothing")
    shards = small_shards()
    shards[1][f"language_model.model.{EXPERT}_scale"] = torch.zeros(8, 3, dtype=U8)
    k3.write_checkpoint(folder, shards, {})
    with pytest.raises(k3.CheckpointError, match="model-00002.*weight_packed.*do not fit"):
        k3.Checkpoint(folder).tensor("language_model.model." + EXPERT)


def edit_index(folder, change):
    index = json.loads((folder / k3.INDEX).read_text())
    change(index)
    (folder / k3.INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..",
                                   "x\0.safetensors", "a%2f.safetensors", "x.safetensors?", 3, None,
                                   ".x.safetensors", "x.safetensors\n", "a\\b.safetensors", ["x"]])
def test_shard_names_stay_in_the_folder(folder, shard):
    edit_index(folder, lambda index: index["weight_map"].update({"mm.extra": shard}))
    with pytest.raises(k3.CheckpointError, match="index.json: tensor 'mm.extra'"):
        k3.Checkpoint(folder)


def test_index_and_files_must_agree(folder):
    """Absent shards are listed before anything is read; names must be those of the headers."""
    edit_index(folder, lambda index: index["weight_map"].update(a="gone-2.safetensors",
                                                                b="gone-1.safetensors"))
    with pytest.raises(k3.CheckpointError, match="2 of 5.*gone-1.safetensors, gone-2.safetensors"):
        k3.Checkpoint(folder)
    assert "a" in k3.Checkpoint(folder, index_only=True).shard_of
    k3.write_checkpoint(folder, small_shards(), {})
    edit_index(folder, lambda index: index["weight_map"].update(b=k3.SHARD.format(1, 3)))
    with pytest.raises(k3.CheckpointError, match="00001-of.*: tensor 'b' is only in the index"):
        k3.Checkpoint(folder).tensor("language_model.model.layers.0.A_log")
    edit_index(folder, lambda index: index["weight_map"].pop("b"))
    edit_index(folder, lambda index: index["weight_map"].pop("mm_projector.proj.0.weight"))
    with pytest.raises(k3.CheckpointError, match="00003.*'mm_proj.*' is only in the header"):
        k3.Checkpoint(folder).tensors
    edit_index(folder, lambda index: index["weight_map"].update({"model.x": k3.SHARD.format(1, 3)}))
    with pytest.raises(k3.CheckpointError, match="mix two prefixes"):
        k3.Checkpoint(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "{",
                                  '{"weight_map": {"a": "x.safetensors"}, "metadata": 3}',
                                  '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
                                  '{"weight_map": {"a": "x.safetensors"}, "metadata": {"total_size":'
                                  '"9"}}'])
def test_bad_index(folder, text):
    (folder / k3.INDEX).write_text(text)
    with pytest.raises(k3.CheckpointError, match="model.safetensors.index.json"):
        k3.Checkpoint(folder)


def test_compare_inventory_finds_each_kind(folder):
    ck, want = k3.Checkpoint(folder), inventory()
    names = list(want)
    want[names[0]] = ((17,), "BF16", None)
    want[names[1]] = ((6,), "F16", k3.SHARD.format(2, 3))
    want["new.1.x"] = want["new.2.x"] = ((1,), "U8", None)
    del want[names[5]]
    ck.total_size += 1
    lines = k3.compare_inventory(want, ck)
    assert [line.split(":")[0] for line in lines] == [
        "shape", "dtype", "shard", "missing", "missing", "extra", "total size"]
    assert k3.group_findings(lines)[3] == "missing: new.1.x (and 1 alike)"
    bare = k3.Checkpoint(folder, index_only=True)
    assert k3.compare_inventory(inventory(), bare) == []
    del want["new.1.x"]
    assert [line.split(":")[0] for line in k3.compare_inventory(want, bare)] == [
        "shard", "missing", "extra", "total size"]


# ---- fuzz

def mutate(data, head, rng):
    """One to five random edits of bytes, most of them in the first `head` bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(min(len(data), rng.choice((8, head, head, len(data)))))
        other, kind = rng.randrange(len(data)), rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice(b'0123456789-.,:"[]{} \\x\0\xff')
        elif kind == 2:
            del data[at:at + rng.choice((1, 1, 8, 100))]
        elif kind == 3:
            data[at:at] = rng.choice((b"0", b" ", b'"', b"9" * 30, b"[" * 50, b"null", b"\0"))
        elif kind == 4:
            data[at], data[other] = data[other], data[at]
        elif numbers := list(re.finditer(rb"\d+", bytes(data[:head]))):
            data[slice(*rng.choice(numbers).span())] = str(rng.choice(
                (0, 1, 2, 3, 2 ** 31, 2 ** 63, 10 ** 30, rng.randrange(500)))).encode()
        data = data or bytearray(b"\0")
    return data


def test_two_thousand_mutations_never_load_silently_wrong(folder):
    """Each is refused, or found by k3.compare_inventory, or leaves every tensor where it was."""
    rng, outcomes = random.Random(7), {"refused": 0, "found": 0, "harmless": 0}
    clean, infos = {p.name: p.read_bytes() for p in folder.iterdir()}, k3.Checkpoint(folder).tensors
    for _ in range(2000):
        name = rng.choice([k3.INDEX] + [k3.SHARD.format(i, 3) for i in (1, 2, 3)])
        head = clean[name].rfind(b"}") + 1 if name == k3.INDEX else clean[name].index(b"}}") + 2
        data = mutate(bytearray(clean[name]), head, rng)
        (folder / name).write_bytes(data)
        try:
            ck = k3.Checkpoint(folder)
            found = k3.compare_inventory(inventory(), ck)
            got = {n: ck.tensor(n) for n in ck.tensors}
            outcomes["found" if found else "harmless"] += 1
        except k3.CheckpointError as error:
            outcomes["refused"] += 1
            assert "\n" not in str(error) and len(str(error)) < 2000
        else:
            for n in [] if found else got:
                start = ck.info(n).span[0]
                moved = len(data) - len(clean[name]) if ck.shard_of[n] == name else 0
                assert start - moved == infos[n].span[0]
                raw = (folder / ck.shard_of[n]).read_bytes()[start:ck.info(n).span[1]]
                assert got[n].reshape(-1).view(U8).numpy().tobytes() == raw
        (folder / name).write_bytes(clean[name])
    assert outcomes["refused"] > 1000 and outcomes["harmless"] > 20, outcomes


# ---- writing

def test_a_save_leaves_folders_of_similar_names_alone(folder):
    for name in ("ck.old", "ck.partial", "ck.new"):
        shutil.copytree(folder, folder.parent / name)
    k3.write_checkpoint(folder, small_shards(), {})
    assert sorted(os.listdir(folder.parent)) == ["ck", "ck.new", "ck.old", "ck.partial"]
    file = folder.parent / "file"
    file.write_text("")
    for place in (file, file / "x"):
        with pytest.raises(k3.CheckpointError, match="cannot be written"):
            k3.write_checkpoint(place, small_shards(), {})


def test_an_interrupted_or_failed_save_leaves_the_old_checkpoint(folder):
    def breaking():
        yield small_shards()[0]
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        k3.write_checkpoint(folder, breaking(), {})
    same_tensors(k3.Checkpoint(folder), small_shards())
    assert os.listdir(folder.parent) == ["ck"]
    os.rename(folder, folder.parent / ".ck.old")                     # killed between the two renames
    with pytest.raises(k3.CheckpointError, match="interrupted save"):
        k3.Checkpoint(folder)
    with pytest.raises(KeyboardInterrupt):
        k3.write_checkpoint(folder, breaking(), {})
    same_tensors(k3.Checkpoint(folder), small_shards())
    (folder / "diary.txt").write_text("mine")
    with pytest.raises(k3.CheckpointError, match="diary.txt"):
        k3.write_checkpoint(folder, small_shards(), {})
    assert (folder / "diary.txt").read_text() == "mine"
    with pytest.raises(k3.CheckpointError, match="two shards"):
        k3.write_checkpoint(folder.parent / "two", [{"a": torch.ones(1)}] * 2, {})
    with pytest.raises(k3.CheckpointError, match="complex64 cannot be stored"):
        k3.write_safetensors(folder / "c", {"c": torch.ones(2, dtype=torch.complex64)})


def test_only_files_are_replaced(tmp_path):
    """A link is followed; a pipe, a device or a folder stays what it is."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("pipe", "."):
        with pytest.raises(k3.CheckpointError, match="no regular file"):
            k3.write_safetensors(tmp_path / name, {"x": torch.ones(2)})
    k3.write_safetensors(tmp_path / "link", {"x": torch.ones(2)})
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink() and (tmp_path / "file").is_file()


def test_a_full_disk_is_one_sentence_and_leaves_the_old_file(folder):
    """A limit on the size of files makes the operating system refuse in the middle of a write."""
    code = f"""if True:
        import resource, torch, k3
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            k3.write_checkpoint({str(folder)!r}, [{{"a": torch.zeros(100_000)}}], {{}})
        except k3.CheckpointError as error:
            print(error)"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                         cwd=os.path.dirname(k3.__file__))
    assert "cannot be written" in ran.stdout and ran.stdout.count("\n") == 1, ran
    assert os.listdir(folder.parent) == ["ck"]
    same_tensors(k3.Checkpoint(folder), small_shards())


# ---- byte ranges over http

class Server(http.server.ThreadingHTTPServer):
    """Serves a folder by ranges; `answer(handler, data, start, end)` may misbehave first."""
    daemon_threads = True

    def __init__(self, folder, answer=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.answer, self.log = folder, answer, []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def send(self, status, data, **headers):
        self.send_response(status)
        for key, value in {"Content_Length": len(data), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        path = self.server.folder / self.path.rsplit("/", 1)[1]
        span = self.headers.get("Range")
        start, end = map(int, span[6:].split("-")) if span else (0, None)
        self.server.log.append((path.name, start, end, self.headers.get("Authorization")))
        if not path.is_file():
            return self.send(404, b"")
        data = path.read_bytes()
        if self.server.answer and self.server.answer(self, data, start, end):
            return None
        if not span:
            return self.send(200, data)
        return self.send(206, data[start:end + 1], ETag='"1"',
                         Content_Range=f"bytes {start}-{end}/{len(data)}")


@pytest.fixture
def serve(folder, monkeypatch):
    servers = []

    def start(answer=None):
        servers.append(Server(folder, answer))
        return servers[-1]
    monkeypatch.setattr(k3.Web, "PAUSE", 0.001)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_remote_reads_only_what_is_asked_for(serve):
    """The index, 8 bytes a shard, one header, then one request for two neighbouring tensors."""
    server = serve()
    ck = k3.Checkpoint(server.url + "/")
    assert len(server.log) == 4
    del server.log[:]
    name = "language_model.model." + EXPERT
    got = ck.tensor(name)
    want = small_shards()[1]
    assert torch.equal(got, k3.mxfp4_decode(*want.values()))
    ranges = [(start, end + 1) for _, start, end, _ in server.log]
    data = sorted(ck.info(n).span for n in ck.stored(name))
    assert ranges == [(8, data[0][0]), (data[0][0], data[1][1])]
    same_tensors(ck, small_shards())
    assert k3.compare_inventory(inventory(), ck) == []


def test_remote_cuts_large_tensors_and_joins_small_ones(serve, monkeypatch, capsys):
    monkeypatch.setattr(k3.Web, "PIECE", 10)
    same_tensors(k3.Checkpoint(serve().url), small_shards())
    assert capsys.readouterr().err == ""                   # no progress line for a quick read


def ignores_ranges(handler, data, start, end):
    if end is not None:
        handler.send(200, data)
        return True


def wrong_range(handler, data, start, end):
    if end is not None and start:
        end -= start
        handler.send(206, data[:end + 1], Content_Range=f"bytes 0-{end}/{len(data)}")
        return True


def other_length(handler, data, start, end):
    if end is not None and start:
        handler.send(206, data[start:end + 1], Content_Range=f"bytes {start}-{end}/{len(data) + 1}")
        return True


def other_version(handler, data, start, end):
    if end is not None and start:
        handler.send(206, data[start:end + 1], ETag='"2"',
                     Content_Range=f"bytes {start}-{end}/{len(data)}")
        return True


def short(handler, data, start, end):
    if end is not None:
        handler.send(206, data[start:end], Content_Range=f"bytes {start}-{end}/{len(data)}")
        return True


def long(handler, data, start, end):
    if end is not None:
        handler.send(206, data[start:end + 1] + b"more",
                     Content_Range=f"bytes {start}-{end}/{len(data)}")
        return True


def forbidden(handler, data, start, end):
    handler.send(403, b"no")
    return True


@pytest.mark.parametrize("answer, words", [
    (ignores_ranges, "ignores byte ranges"), (wrong_range, "got 'bytes 0-"), (short, "broke off"),
    (long, "longer than"), (other_length, "changed while"), (other_version, "changed while"),
    (forbidden, "403")])
def test_remote_refuses_wrong_answers(serve, answer, words):
    with pytest.raises(k3.CheckpointError, match=words) as error:
        k3.Checkpoint(serve(answer).url).tensors
    assert "http://127.0.0.1" in str(error.value)


def test_remote_says_what_is_wrong_with_the_url_or_token(monkeypatch):
    for url in ("http://[::1", f"http://{'a' * 70}.example"):
        with pytest.raises(k3.CheckpointError):
            k3.Checkpoint(url)
    monkeypatch.setenv("HF_TOKEN", "secret\nx")
    with pytest.raises(k3.CheckpointError, match="HF_TOKEN") as error:
        k3.Checkpoint("http://127.0.0.1:1")
    assert "secret" not in str(error.value)


def test_ctrl_c_does_not_wait_for_a_server(serve):
    """A server that never answers: interrupted at once, with status 130."""
    asked, done = threading.Event(), threading.Event()

    def silent(handler, data, start, end):
        if end is not None:
            asked.set()
            done.wait(60)
            return True
    command = [sys.executable, k3.__file__, "verify", serve(silent).url]
    shell = subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    try:
        assert asked.wait(60)
        shell.send_signal(signal.SIGINT)
        assert shell.communicate(timeout=20)[1].strip() == "k3.py: interrupted" and shell.returncode == 130
    finally:
        shell.kill()
        done.set()


@pytest.mark.parametrize("kind", ["cut", "500"])
def test_remote_tries_again(serve, kind):
    """Every request fails twice, by a broken connection or a 500, before it is answered."""
    tries = {}

    def answer(handler, data, start, end):
        key = handler.path, start, end
        tries[key] = tries.get(key, 0) + 1
        if tries[key] > 2:
            return False
        if kind == "500":
            handler.send(500, b"")
        else:
            handler.send(206 if end else 200, data[:3], Content_Length=1000, ETag="\"1\"",
                         Content_Range=f"bytes {start}-{end}/{len(data)}")
            handler.close_connection = True
        return True
    same_tensors(k3.Checkpoint(serve(answer).url), small_shards())
    assert set(tries.values()) == {3}


def test_remote_gives_up(serve):
    server = serve(lambda handler, *_: handler.send(500, b"") or True)
    with pytest.raises(k3.CheckpointError, match="500"):
        k3.Checkpoint(server.url)
    assert len(server.log) == k3.Web.TRIES


def test_token_goes_to_the_first_host_only(serve, monkeypatch):
    """Redirects within the host keep it; another port never sees it."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    storage = serve()

    def answer(handler, data, start, end):
        inside = handler.path.startswith("/in/")
        to = storage.url + handler.path if inside else f"/in{handler.path}"
        handler.send(302, b"", Location=to)
        return True
    first = serve(answer)
    same_tensors(k3.Checkpoint(first.url), small_shards())
    assert {token for *_, token in first.log} == {"Bearer secret"}
    assert {token for *_, token in storage.log} == {None} and len(storage.log) > 4

    def away(handler, data, start, end):
        handler.send(302, b"", Location="file:///etc/hostname")
        return True
    with pytest.raises(k3.CheckpointError, match="not allowed"):
        k3.Checkpoint(serve(away).url)


def test_remote_absent_shards_are_listed(serve, folder):
    (folder / k3.SHARD.format(2, 3)).unlink()
    with pytest.raises(k3.CheckpointError, match="1 of 3.*absent: model-00002-of-000003.safetensors"):
        k3.Checkpoint(serve().url)


def test_cache_is_used_and_survives_a_kill(serve, folder, tmp_path):
    """Half-written pieces and leftovers are fetched again; whole ones are not."""
    cache, server = tmp_path / "cache", serve()

    def read():
        del server.log[:]
        same_tensors(k3.Checkpoint(server.url, cache=cache), small_shards())
        return [entry for entry in server.log if entry[1]]
    first = read()
    assert len(first) == 3 + 6 and read() == []              # headers, tensors; then none
    pieces = sorted(p for p in cache.rglob("*") if p.is_file())
    assert not [p for p in pieces if p.suffix == ".tmp"]
    whole = pieces[0].read_bytes()
    pieces[0].write_bytes(whole[:-1])
    (pieces[1].parent / (pieces[1].name + ".1-2.tmp")).write_bytes(b"left by a kill")
    pieces[1].unlink()
    assert len(read()) == 2 and read() == [] and pieces[0].read_bytes() == whole
    shutil.copy(folder / k3.SHARD.format(1, 3), folder / "x.safetensors")
    k3.write_safetensors(folder / k3.SHARD.format(1, 3),
                      {**small_shards()[0], "language_model.z": torch.zeros(5)})
    with pytest.raises(k3.CheckpointError, match="'language_model.z' is only in the header"):
        k3.Checkpoint(server.url, cache=cache).tensors          # a changed file is not mixed in


# ---- the released layout and the commands

@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A tiny vision-language model in the released layout, with the byte tokenizer beside it."""
    folder, model = tmp_path_factory.mktemp("k3") / "tiny", tiny(vt_num_hidden_layers=1, vocab_size=512)
    k3.save_checkpoint(model, folder, files=k3.byte_tokenizer())
    return folder, k3.load_model(folder)


def run(capsys, *words):
    """The command line's exit status, stdout and stderr."""
    try:
        status = k3.main([str(w) for w in words])
    except SystemExit as e:                           # argparse's way out
        status = e.code
    out, err = capsys.readouterr()
    assert status != 2 or (err.count("\n") == 1 and "Traceback" not in err), err
    return status, out, err


def test_params_are_the_released_counts(capsys):
    """Every count that the release fixes, to the last digit."""
    table = json.loads(run(capsys, "params", "--json")[1])
    assert table == {**table, "gated_MLA": 232196096, "KDA": 443740416, "latent_MoE": 29784936832, "each_AttnRes_mix": 14336,
                     "each_layer_RMSNorm": 7168, "MLA_MoE_layer": 30017175936, "MLA_MoE_layers_24": 720412222464,
                     "KDA_MoE_layers_68": 2055552977408, "KDA_dense_layer": 1170446592, "text_model": 2779484478208,
                     "vision_tower": 401214464, "mm_projector": 46144512, "everything": 2779931837184,
                     "active_per_token": 104189614848, "bytes_on_disk": 1560860324864,
                     "cache_bytes_per_token": 24 * 576 * 2}
    assert len(list(k3.inventory(K3Config()))) == 497220


def test_inventory_shapes_of_the_release():
    """The release's shapes where a wrong axis would hide: packed widths, padded A_log, shards."""
    found = {name: rest for name, *rest in k3.inventory(K3Config())}
    prefix = "language_model.model.layers.12."
    assert found[prefix + "self_attn.A_log"][:3] == [(128,), "F32", 13]
    assert found[prefix + "self_attn.q_conv1d.weight"][:2] == [(12288, 1, 4), "F32"]
    assert found[prefix + "block_sparse_moe.experts.895.w2.weight_packed"][:2] == [(3584, 1536), "U8"]
    assert found[prefix + "block_sparse_moe.experts.7.w1.weight_scale"][:2] == [(3072, 112), "U8"]
    assert found["language_model.model.layers.3.self_attn.kv_b_proj.weight"][:2] == [(96 * 256, 512), "BF16"]
    assert [found[n][2] for n in ("language_model.lm_head.weight", "mm_projector.post_norm.weight",
                                  "vision_tower.patch_embed.pos_emb.weight")] == [94, 95, 96]


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
def test_saved_is_loaded(tmp_path, experts):
    """Stored dtypes are the release's; what was loaded and saved again is equal; verify agrees."""
    model = tiny(vt_num_hidden_layers=1, num_nextn_predict_layers=1)
    k3.save_checkpoint(model, tmp_path / "a", experts=experts)
    once = k3.load_model(tmp_path / "a")
    k3.save_checkpoint(once, tmp_path / "b", experts=experts)
    twice = k3.load_model(tmp_path / "b")
    a, b, c = once.state_dict(), twice.state_dict(), model.state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a) and once.config == model.config
    assert all(rel(a[n], c[n]) < (0.13 if ".experts." in n and experts == "mxfp4" else 3e-3) for n in a if c[n].any())
    checkpoint = k3.Checkpoint(tmp_path / "a")
    assert checkpoint.verify() == []
    A_log = checkpoint.tensor("language_model.model.layers.0.self_attn.A_log")
    assert A_log.shape == (128,) and A_log.dtype == torch.float32 and not A_log[2:].any()
    with pytest.raises(ValueError, match="experts"):
        k3.save_checkpoint(model, tmp_path / "a", experts="int8")


def change(folder, target, edit, shard=None):
    """A copy of a checkpoint in which `edit` changes the tensors of one shard, and the index with it."""
    shutil.copytree(folder, target)
    index = json.loads((target / k3.INDEX).read_text())
    for path in sorted(target.glob("model-*.safetensors")):
        tensors = {n: t.clone() for n, t in k3.read_safetensors(path).items()}
        edited = edit(dict(tensors))
        if edited is not None:
            k3.write_safetensors(path, edited)
            index["weight_map"] = {n: s for n, s in index["weight_map"].items() if s != path.name}
            index["weight_map"].update(dict.fromkeys(edited, path.name))
    (target / k3.INDEX).write_text(json.dumps(index))
    return target


def test_verify_and_load_name_the_tensor(saved, tmp_path, capsys):
    """A missing, an extra, a misshapen tensor, one of another dtype, padding that is not zero."""
    name = "language_model.model.layers.2.self_attn."
    def edit(which):
        def apply(t):
            if name + "A_log" not in t:
                return None
            if which == "missing":
                del t[name + "b_proj.weight"]
            elif which == "extra":
                t[name + "more.weight"] = torch.zeros(2)
            elif which == "shape":
                t[name + "b_proj.weight"] = t[name + "b_proj.weight"].T.contiguous()
            elif which == "dtype":
                t[name + "b_proj.weight"] = t[name + "b_proj.weight"].to(torch.float16)
            elif which == "scalar":
                t[name + "A_log"] = t[name + "A_log"][0].clone()
            else:
                t[name + "A_log"][2] = 1
            return t
        return apply
    for which, word in (("missing", "b_proj"), ("extra", "more"), ("shape", "b_proj"), ("dtype", "b_proj"),
                        ("scalar", "A_log"), ("padding", "A_log")):
        folder = change(saved[0], tmp_path / which, edit(which))
        status, out, _ = run(capsys, "verify", folder)
        assert status == (which != "padding") and (word in out or not status)      # it reads no weights
        if which != "dtype":                          # another float dtype holds the same weights
            with pytest.raises(k3.CheckpointError, match=word):
                k3.load_model(folder)
    assert run(capsys, "verify", saved[0])[0] == 0 and run(capsys, "verify", saved[0], "--index-only")[0] == 0


def test_trace_equals_the_model(saved, tmp_path, capsys):
    """Layer by layer from disk, then layers 2 and 3 alone from a dump: the tensors of the whole model."""
    folder, model = saved
    ids, whole, alone = some_ids(2, 9), {}, {}
    with torch.no_grad():
        model(ids, record=whole)
    traced = {}
    k3.trace(folder, ids, record=traced)
    assert whole.keys() == traced.keys() and all(rel(traced[n], whole[n]) < 1e-6 for n in whole)
    s = k3.trace(folder, ids, layers=(2, 4), record=alone, start=whole)
    close(s, whole["layers.3.prefix_sum"], 1e-6)
    assert {n.split(".")[1] for n in alone if "attn_in" in n} == {"2", "3"}
    assert "layers.1.prefix_sum" in alone             # what it started from: pieces chain
    del alone["layers.3.ffn_in"]
    with pytest.raises(ValueError, match="expected floats"):
        k3.trace(folder, ids, layers=(2, 4), start={**whole, "layers.1.prefix_sum": whole["layers.1.prefix_sum"][:, :3]})
    for bad in (torch.zeros(2, 9, 3), torch.zeros(2, 9, 4, dtype=torch.int64), torch.arange(72).view(2, 9, 4)):
        with pytest.raises(ValueError, match="topk_idx"):
            k3.trace(folder, ids, layers=(0, 2), forced={"layers.1.topk_idx": bad})
    with pytest.raises(ValueError, match="layers.1.prefix_sum"):
        k3.trace(folder, ids, layers=(2, 4), start={"embed": whole["embed"]})


def test_trace_command(saved, tmp_path, capsys):
    """--dump, --against, --from; a changed weight is found in its layer and half; a flipped route is said apart."""
    folder, dump, ids = saved[0], tmp_path / "d.safetensors", ("--ids", "5,6,7,8,9,200,31")
    assert run(capsys, "trace", folder, *ids, "--dump", dump)[0] == 0
    status, out, _ = run(capsys, "trace", folder, "--against", dump)
    assert status == 0 and "all 37 tensors agree" in out
    assert run(capsys, "trace", folder, "--layers", "3:5", "--from", dump, "--against", dump)[0] == 0
    broken = k3.read_safetensors(dump)
    broken["layers.2.prefix_sum"][0, 0, 0] = math.nan
    k3.write_safetensors(tmp_path / "nan.safetensors", broken)
    status, out, _ = run(capsys, "trace", folder, "--layers", "3:5", "--from", tmp_path / "nan.safetensors")
    assert status == 1 and out.endswith("layers.3.prefix_sum is not finite\n")
    name = "language_model.model.layers.2.block_sparse_moe.shared_experts.up_proj.weight"
    wrong = change(folder, tmp_path / "wrong", lambda t: {**t, name: t[name] * 1.5} if name in t else None)
    status, out, _ = run(capsys, "trace", wrong, "--against", dump)
    assert status == 1 and "the first is layers.2.ffn_out" in out
    status, out, _ = run(capsys, "trace", wrong, "--each", "--against", dump)          # the error is not handed on
    assert status == 1 and {line.split()[1] for line in out.splitlines() if "DIFF" in line} == {"layers.2.ffn_out"}
    assert run(capsys, "trace", folder, "--each", "--against", dump, "--layers", "3:5")[0] == 0
    assert run(capsys, "trace", folder, "--each", "--against", dump, "--from", dump)[0] == 2
    cut = {n: x if "prefix" in n else x[:, :3].contiguous() for n, x in k3.read_safetensors(dump).items() if n != "input_ids"}
    k3.write_safetensors(tmp_path / "cut.safetensors", cut)
    status, _, err = run(capsys, "trace", folder, *ids, "--each", "--against", tmp_path / "cut.safetensors")
    assert status == 2 and "embed is [1, 3, 64]" in err
    sums = k3.read_safetensors(dump)
    sums["layers.1.prefix_sum"] = sums["layers.1.prefix_sum"] + sums["layers.1.attn_out"]        # added twice: only the sum is wrong
    k3.write_safetensors(tmp_path / "sums.safetensors", sums)
    status, out, _ = run(capsys, "trace", folder, "--each", "--against", tmp_path / "sums.safetensors")
    assert [line.split()[1] for line in out.splitlines() if "DIFF" in line][0] == "layers.1.prefix_sum"
    tensors = {n: t.clone() for n, t in k3.read_safetensors(dump).items()}
    idx = tensors["layers.1.topk_idx"]
    idx[0, 3] = torch.tensor([e for e in range(16) if e not in idx[0, 3]][:4])
    k3.write_safetensors(tmp_path / "flipped.safetensors", tensors)
    status, out, _ = run(capsys, "trace", folder, "--against", tmp_path / "flipped.safetensors", "--layers", "0:2")
    assert status == 1 and "1 of 7 tokens route differently" in out
    tensors["layers.1.topk_weight"] = tensors["layers.1.topk_weight"] * 1.5        # noted before attn_out is
    tensors["layers.1.attn_out"] = tensors["layers.1.attn_out"] * 1.5
    k3.write_safetensors(tmp_path / "both.safetensors", tensors)
    assert "the first is layers.1.attn_out" in run(
        capsys, "trace", folder, "--against", tmp_path / "both.safetensors", "--layers", "0:2")[1]
    k3.write_safetensors(tmp_path / "short.safetensors", {"layers.0.attn_in": tensors["layers.0.attn_in"][:, :2]})
    status, out, _ = run(capsys, "trace", folder, *ids, "--against", tmp_path / "short.safetensors", "--layers", "0")
    assert status == 0 and "of its first 2 positions: relative error 0" in out
    status, _, err = run(capsys, "trace", folder, "--ids", "5,6", "--against", dump, "--layers", "0")
    assert status == 2 and "was recorded with other input_ids" in err
    forced = {}
    k3.trace(folder, [5, 6, 7, 8, 9, 200, 31], layers=(0, 2), record=forced, forced=tensors)
    assert torch.equal(forced["layers.1.topk_idx"], idx)


def test_trace_over_the_network(saved, monkeypatch, capsys):
    """The same layers from a server of byte ranges, with a token id that repeats; only what is needed is read."""
    server, ids, here, there = Server(saved[0], None), [[7, 7, 9, 7]], {}, {}
    try:
        k3.trace(saved[0], ids, record=here)
        k3.trace(server.url, ids, record=there)
        assert here.keys() == there.keys() and all(torch.equal(here[n], there[n]) for n in here)
        words = ("--prompt", "aa", "--max-new-tokens", "3", "--temperature", "0", "--layers-on-demand")
        assert run(capsys, "generate", server.url, *words)[1] == run(capsys, "generate", saved[0], *words)[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kernel", ["plain", "fast"])
def test_trace_in_float64(saved, kernel):
    """From the stored BF16 up: float64 stays float64 in every island, on both paths."""
    folder, model = saved
    double = k3.load_model(folder, torch.float64)
    double.kernel, ids = kernel, some_ids(1, 5)
    with torch.no_grad():
        close(k3.trace(folder, ids, dtype=torch.float64, kernel=kernel), double(ids), 1e-12)
        close(double(ids), model(ids), 1e-5)
        state = double.init_state(1)
        close(torch.cat([double(ids[:, :4], state=state), double(ids[:, 4:], state=state)], 1), double(ids), 1e-12)


def test_streamed_model_is_as_strict_as_the_loaded_one(saved, tmp_path):
    """A config that asks for less, or more, than is stored: no layer runs."""
    for key, value in (("attn_res_block_size", None), ("latent_moe_use_norm", False), ("num_shared_experts", 0), ("vocab_size", 511),
                       ("num_nextn_predict_layers", 1), ("routed_expert_hidden_size", None)):
        folder = shutil.copytree(saved[0], tmp_path / key)
        file = json.loads((folder / "config.json").read_text())
        file["text_config"][key] = value
        (folder / "config.json").write_text(json.dumps(file))
        for run_it in (lambda: k3.trace(folder, [[1, 2]]), lambda: k3.load_model(folder)):
            with pytest.raises(k3.CheckpointError, match="tensor"):
                run_it()


def test_integers_are_not_weights(saved, tmp_path):
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    folder = change(saved[0], tmp_path / "int", lambda t: {**t, name: t[name].to(torch.int8)} if name in t else None)
    for run_it in (lambda: k3.trace(folder, [[1, 2]]), lambda: k3.load_model(folder)):
        with pytest.raises(k3.CheckpointError, match="q_proj.weight"):
            run_it()


def test_damaged_weights_do_not_become_text(saved):
    model = k3.load_model(saved[0])
    model.language_model.model.norm.weight.data[0] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        list(k3.generate_ids(model, [1, 2], 3))


@pytest.mark.parametrize("key, value", [
    ("num_hidden_layers", 10 ** 9), ("num_experts", 10 ** 9), ("hidden_size", 10 ** 18), ("vocab_size", 10 ** 400),
    ("vt_num_hidden_layers", 10 ** 9), ("rms_norm_eps", math.nan), ("activation_situ_beta", math.inf), ("kda_layers", "abc"),
    ("kda_layers", [None]), ("merge_kernel_size", 2), ("merge_kernel_size", [2, None]), ("num_experts", True)])
def test_config_numbers_cannot_hang(key, value):
    """Untrusted sizes are refused by name before anything as large is made."""
    with pytest.raises(ValueError, match=key) as caught:
        K3Config(**{key: value})
    assert len(str(caught.value)) < 400


def test_trace_reads_only_chosen_experts(saved):
    """At most 2 x 4 of 16 experts a layer for two tokens, and one row of the embedding a token."""
    checkpoint, lines = k3.Checkpoint(saved[0]), []
    k3.trace(checkpoint, [[1, 2]], layers=(0, 2), watch=lambda i, note, line: lines.append(line))
    expert = 3 * (32 * 16 + 32)
    layer = sum(i.span[1] - i.span[0] for n, i in checkpoint.tensors.items() if ".layers.1." in n and ".experts." not in n)
    touched = int(lines[2].split("experts ")[1].split("/")[0])
    assert 4 <= touched <= 8 and f"{(layer + touched * expert) / 1e6:.1f} MB" in lines[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kernel", ["plain", "fast"])
def test_decoding_by_graph_replays(kernel):
    """What a CUDA graph a token says is what the CPU says, for any number of tokens."""
    model = tiny().double()
    for n in (0, 1, 12):
        model.cpu().kernel = "plain"
        want = list(k3.generate_ids(model, [1, 2, 3], n))
        model.cuda().kernel = kernel
        assert list(k3.generate_ids(model, [1, 2, 3], n, pixel_values=None, grid_thws=None)) == want


def test_generate_drafted_is_greedy():
    """The MTP layer's drafts change the number of calls, not the text, whether few or most of them are right."""
    text = b"the cat sat on the mat, the dog sat on the log"
    model, ids, sizes = K3(K3Config.tiny(num_nextn_predict_layers=1)), torch.tensor([[*text]]), []
    optimizer = tt.PerHeadMuon(tt.param_table(model), lr=2e-2)
    for kernel, steps in (("plain", 0), ("fast", 2), ("fast", 2)):
        model.kernel = kernel
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss(ids[:, :-1], ids[:, 1:])[0].backward()
            optimizer.step()
        read, model.hidden = [], lambda ids, *rest: (read.append(ids.shape[1]), K3.hidden(model, ids, *rest))[1]
        parts = list(tt.generate_drafted(model, [*text[:9]], 20))
        del model.hidden
        assert read[0] == 9 and max(read[1:]) <= 7, read       # wrong guesses do not add up
        assert sum(parts, []) == list(k3.generate_ids(model, [*text[:9]], 20))
        sizes.append([len(part) for part in parts])
    assert all({*of} <= {1, 2} and of[0] == 1 for of in sizes)
    assert len(sizes[1]) > len(sizes[2]) and all({*of[1:-1]} == {1, 2} for of in sizes[1:]), sizes
    for model, prompt in ((tiny(), [1]), (model, [])):
        with pytest.raises(ValueError, match="drafting needs"):
            next(tt.generate_drafted(model, prompt, 3))


def test_generate(saved, capsys):
    """Greedy text is the same from memory and layer by layer; seeds repeat; chat opens a channel; the end token ends."""
    folder, model = saved
    words = ("generate", folder, "--prompt", "hello", "--max-new-tokens", "8", "--temperature", "0")
    _, out, _ = run(capsys, *words)
    assert run(capsys, *words, "--layers-on-demand")[1] == out and len(out) > 1
    warm = (*words[:-1], "1.0", "--top-p", "0.9", "--seed", "3")
    assert run(capsys, *warm)[1] == run(capsys, *warm)[1]
    status, out, _ = run(capsys, *words, "--chat", "--system", "be brief")
    assert status == 0 and out.startswith("[think]\n")
    assert "[" not in run(capsys, *words, "--chat", "--no-think")[1][:1]
    ids = list(k3.generate_ids(model, [1, 2, 3], 12))
    with torch.no_grad():
        whole = model(torch.tensor([[1, 2, 3, *ids]]))[0, 2:-1].argmax(-1).tolist()
    assert ids == whole and len(ids) == 12
    assert list(k3.generate_ids(model, [1, 2, 3], 12, stop={ids[4]})) == ids[:ids.index(ids[4])]


def test_sampling():
    """Temperature 0 is the largest; top-p keeps the fewest tokens that reach it."""
    logits, g = torch.tensor([.5, .3, .15, .05]).log(), torch.Generator().manual_seed(0)
    drawn = lambda t, p: {k3.sample(logits, t, p, g) for _ in range(200)}
    assert drawn(0, 1.0) == {0} and drawn(1.0, 0.5) == {0} and drawn(1.0, 0.51) == {0, 1} and drawn(1.0, 1.0) == {0, 1, 2, 3}


def test_pictures_in_the_commands(saved, tmp_path, capsys):
    """--image puts the placeholder's block before the text, in trace and in generate, streamed or not."""
    picture = png(tmp_path / "p.png", 1, 1, b"\0\1\2\3")
    record = tmp_path / "d.safetensors"
    assert run(capsys, "trace", saved[0], "--text", "hi", "--image", picture, "--dump", record)[0] == 0
    embed = k3.read_safetensors(record)["embed"]
    prompt = len("image 1x1") + 3 + 1 + 2             # three control tokens, one 2 x 2 group of patches, "hi"
    assert embed.shape == (1, prompt, 64)
    words = ("generate", saved[0], "--prompt", "hi", "--image", picture, "--max-new-tokens", "3", "--temperature", "0")
    assert run(capsys, *words)[1] == run(capsys, *words, "--layers-on-demand")[1]
    status, _, err = run(capsys, "trace", saved[0], "--ids", "1,2", "--image", picture)
    assert status == 2 and "0 media placeholders" in err


def test_full_and_closed_stdout():
    """One sentence and status 2; Python's own complaint at exit does not follow."""
    for ends in ("> /dev/full", "| true"):
        # what is written is small: it waits in a buffer until the end
        done = subprocess.run(["bash", "-c", f"set -o pipefail; '{sys.executable}' k3.py params {ends}"], text=True,
                              capture_output=True, cwd=Path(k3.__file__).parent,
                              env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"})
        assert done.returncode == 2 and done.stderr.startswith("k3.py: ") and done.stderr.count("\n") == 1, done


def test_trace_refuses_odd_tensors(saved, tmp_path, capsys):
    """Ids of another dtype, none at all, sums of no token, expert ids that --force-routing lacks, [T, B, D]."""
    dump, ids = tmp_path / "d.safetensors", ("--ids", "5,6,7")
    run(capsys, "trace", saved[0], *ids, "--dump", dump)
    whole = k3.read_safetensors(dump)
    save = lambda name, tensors: (k3.write_safetensors(tmp_path / name, tensors), tmp_path / name)[1]
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.float32):
        odd = save("ids", {**whole, "input_ids": whole["input_ids"].to(dtype)})
        assert run(capsys, "trace", saved[0], "--against", odd)[0] == 2
    none = save("none", {"input_ids": torch.zeros(1, 0, dtype=torch.int64)})
    assert run(capsys, "trace", saved[0], "--from", none)[0] == 2
    sums = {name: t[:, :0] for name, t in whole.items() if name == "embed" or name.endswith("prefix_sum")}
    assert run(capsys, "trace", saved[0], "--layers", "3:5", "--from", save("sums", sums))[0] == 2
    fewer = save("fewer", {n: t for n, t in whole.items() if n != "layers.2.topk_idx"})
    status, _, err = run(capsys, "trace", saved[0], "--against", fewer, "--force-routing")
    assert status == 2 and "layers.2.topk_idx" in err
    turned = save("turned", {"input_ids": whole["input_ids"], "embed": whole["embed"].transpose(0, 1).contiguous()})
    assert run(capsys, "trace", saved[0], "--against", turned, "--layers", "0")[0] == 1
    part = save("part", {"input_ids": whole["input_ids"], "embed": whole["embed"][:, :1].contiguous()})
    assert "1 of them over part of the positions" in run(capsys, "trace", saved[0], "--against", part, "--layers", "0")[1]
    assert run(capsys, "trace", saved[0], *ids, "--from", dump)[0] == 2


@pytest.mark.parametrize("words, said", [
    (("trace", "{}", "--ids", "1,x"), "1,x"), (("trace", "{}", "--ids", ""), "expected whole numbers"),
    (("trace", "{}", "--text", ""), "empty"), (("trace", "{}"), "--text or --ids"), (("trace", "{}", "--ids", "9999"), "9999"),
    (("trace", "{}", "--layers", "3:9"), "layers 3:9"), (("trace", "{}", "--ids", "1", "--layers", "a"), "A:B"),
    (("trace", "{}", "--layers", "2:3"), "need embed"), (("trace", "{}", "--ids", "1", "--layers", "2:3"), "--from"),
    (("trace", "{}", "--ids", "1,265"), "picture"), (("trace", "{}", "--ids", "1", "--rtol", "nan"), "rtol"),
    (("generate", "{}", "--prompt", "a", "--temperature", "nan"), "temperature"), (("verify", ""), "empty"),
    (("generate", "{}", "--prompt", "a", "--max-new-tokens", "-1"), "max-new-tokens"), (("params", "--config", ""), "No such file"),
    (("trace", "{}", "--ids", "1", "--against", "/no"), "/no"),
    (("trace", "{}", "--ids", "1", "--force-routing"), "--against"), (("trace", "{}", "--ids", "1", "--image", "/no"), "/no"),
    (("trace", "{}", "--ids", "1", "--dump", "/no/where"), "/no/where"), (("generate", "{}", "--prompt", ""), "empty"),
    (("generate", "{}", "--prompt", "a", "--top-p", "0"), "top-p"), (("generate", "{}", "--prompt", "a", "--temperature", "-1"), "temperature"),
    (("trace", "/no/folder", "--ids", "1"), "/no/folder"), (("verify", "/no/folder"), "/no/folder"), (("params", "--config", "/no"), "/no"),
    (("trace", "{}", "--ids", "1", "--text", "a"), "give one"), (("generate", "{}", "--prompt", "caf\udce9"), "surrogates not allowed"), (("generate", "{}", "--prompt", "a", "--system", "b"), "--chat"),
    (("generate", "{}", "--prompt", "a", "--no-think"), "--chat"), (("generate", "{}"), "--prompt"), (("dance",), "dance"), ((), "command"), (("trace", "{}", "--ids", "1", "--device", "tpu9"), "tpu9")],
    ids=str)
def test_commands_refuse_in_one_sentence(saved, capsys, words, said):
    """Bad input of any kind: exit status 2, one line, no traceback."""
    status, _, err = run(capsys, *(w.format(saved[0]) for w in words))
    assert status == 2 and said in err


def test_development_checkpoint(tmp_path, capsys):
    """Kimi-K3-0.40B's layout: one file, F32, `model.` names, softplus decay, few config keys; and its MXFP4 twin."""
    text = {"attn_res_block_size": 4, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 1, "head_dim": 74,
            "hidden_act": "situ", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 128, "kv_lora_rank": 32,
            "latent_moe_use_norm": True, "linear_attn_config": {"full_attn_layers": [4, 8], "head_dim": 32,
            "kda_layers": [1, 2, 3, 5, 6, 7], "num_heads": 2, "short_conv_kernel_size": 4, "use_full_rank_gate": True},
            "max_position_embeddings": 4096, "mla_use_nope": True, "mla_use_output_gate": True, "model_type": "kimi_linear",
            "moe_intermediate_size": 32, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
            "num_attention_heads": 2, "num_expert_group": 1, "num_experts": 8, "num_experts_per_token": 2, "num_hidden_layers": 8,
            "num_key_value_heads": 2, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 0,
            "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "rms_norm_eps": 1e-05,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rope_theta": 10000.0,
            "routed_expert_hidden_size": 32, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
            "topk_method": "noaux_tc", "use_cache": True, "use_grouped_topk": True, "v_head_dim": 32, "vocab_size": 512}
    file = {"architectures": ["KimiK3ForConditionalGeneration"], "dtype": "float32", "model_type": "kimi_k3",
            "pad_token_id": 0, "text_config": text}
    config = K3Config.from_json(file)
    assert config.gate_lower_bound is None and config.activation_situ_beta == 4.0 and config.vt_num_hidden_layers == 0
    model, prints = K3(config).eval(), []
    for experts in ("bf16", "mxfp4"):                 # "bf16": plain experts, in the config's own dtype
        folder = tmp_path / experts
        folder.mkdir()
        tensors, entries = {}, model.state_dict()
        for name, shape, dtype, _, source, e in k3.inventory(config, experts):
            t = entries[source] if e is None else entries[source][e]
            if name.endswith("_packed"):
                tensors[name], tensors[name[:-6] + "scale"] = k3.mxfp4_encode(t)
            elif not name.endswith("_scale"):
                pad = name.endswith("A_log") and experts == "bf16"      # with and without padding
                tensors[name] = F.pad(t, (0, 126)) if pad else t
        tensors = {n.removeprefix("language_model."): t for n, t in tensors.items()}
        k3.write_safetensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(file))
        for name, raw in k3.byte_tokenizer().items():
            (folder / name).write_bytes(raw)
        assert run(capsys, "verify", folder)[0] == 0
        assert run(capsys, "trace", folder, "--text", "ab")[0] == 0
        prints.append(run(capsys, "generate", folder, "--prompt", "ab", "--max-new-tokens", "4", "--temperature", "0")[1])
        loaded = k3.load_model(folder).state_dict()
        assert experts == "mxfp4" or all(torch.equal(loaded[n], entries[n]) for n in entries)
    assert all(prints)


# ---- figures

def drawn(draw):
    """The panels that a figure's function draws."""
    from matplotlib.figure import Figure

    fig = Figure()
    list(draw(fig, k3.K3Config()))
    return fig.axes


def test_figures_command(tmp_path, capsys):
    """Four pictures that show something, and the worked example's known numbers beside their paths."""
    from matplotlib.image import imread

    assert k3.main(["figures", "--out", str(tmp_path / "new" / "folder")]) == 0
    said = capsys.readouterr().out
    for name in ("fig3", "fig4", "fig5", "cost"):
        path = tmp_path / "new" / "folder" / f"{name}.png"
        pixels = imread(path)
        assert str(path) in said and pixels.shape[1] >= 1200 and 0.01 < (pixels[..., :3] < 0.9).mean() < 0.5
    assert sorted(p.suffix for p in (tmp_path / "new" / "folder").iterdir()) == [".png"] * 4
    assert "loads 4 3 1 0, cutoffs 52 44 46 40 43 46 48 20" in said
    assert "b -13 -4 11 14, centred -15 -6 9 12 (/64), loads 2 2 2 2" in said
    assert "gate 4, up 25: SwiGLU 98.2014, SiTU-GLU 56.9593" in said and "K3, z = 20: 1/decay is e^80 " in said


def test_figures_that_cannot_be_written_are_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "out" / "fig3.png").mkdir(parents=True)
    for out in ("file", "file/below", "out"):
        assert k3.main(["figures", "--out", str(tmp_path / out)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_drawn_curves_keep_their_bounds():
    """Eq. 5: g in [-5, 0], so a tile of 16 stays within e^80. Eq. 12: at most 4 x 25, and SwiGLU near 0."""
    decay, reach = drawn(k3.draw_decay)
    kimi_linear, bounded = (torch.as_tensor(decay.lines[i].get_ydata()) for i in (0, 1))
    assert -5 <= bounded.min() < -4.999 and bounded.max() <= 0 and kimi_linear.min() < -19
    tokens, exponent = next(line for line in reach.lines if line.get_label() == "K3, z = 20").get_data()
    assert exponent[list(tokens).index(16)] == pytest.approx(80)
    near, far = drawn(k3.draw_glu)
    x, (glu, swiglu, situ) = (torch.as_tensor(near.lines[0].get_xdata()),
                              (torch.as_tensor(line.get_ydata()) for line in near.lines))
    assert (situ - swiglu)[x.abs() < 0.1].abs().max() < 1e-4 and glu.max() <= 1
    _, swiglu, situ = (torch.as_tensor(line.get_ydata()) for line in far.lines[:3])
    assert 98 < situ.abs().max() <= 100 < swiglu.max()


def test_balancing_figure_holds_the_worked_example():
    before, step, after = ([t.get_text() for t in ax.texts] for ax in drawn(k3.draw_balancing))
    assert before[-4:] == ["4", "3", "1", "0"] and after[-4:] == ["2", "2", "2", "2"]
    assert before[4:40:5] == ["52", "44", "46", "40", "43", "46", "48", "20"]
    assert step[32:36] == ["2"] * 4 and step[40:] == ["-15", "-6", "9", "12"]

# ---- typical mistakes, as `trace --against` would show them

def wrong(name, new):
    """A change of one k3 function: new(original, *arguments) in its place."""
    def patch(monkeypatch, model):
        old = getattr(k3, name)
        monkeypatch.setattr(k3, name, lambda *a, **k: new(old, *a, **k))
    return patch


def edited(path, edit):
    """A change of every module whose name ends with path."""
    def patch(monkeypatch, model):
        for name, module in model.named_modules():
            if name.endswith(path):
                edit(module)
    return patch


def swap_gate_and_up(experts):
    experts.w1, experts.w3 = experts.w3, experts.w1


def raw_keys(old, sources, query, weight, eps):
    return sources @ (query * weight).transpose(0, -1)


MISTAKES = [
    ("KDA: query scale left out", "0.attn_out", wrong("kda_recurrent", lambda f, *a: f(*a, scale=1.0))),
    ("KDA: A_log ignored", "0.attn_out", wrong("kda_log_decay", lambda f, z, A, b, m: f(z, A * 0, b, m))),
    ("KDA: dt_bias added after the scale", "0.attn_out", wrong("kda_log_decay", lambda f, z, A, b, m: f(
        z * A.exp()[:, None] + b.view(z.shape[-2:]), A * 0, b * 0, m))),
    ("KDA: softplus decay", "0.attn_out", wrong("kda_log_decay", lambda f, z, A, b, m: f(z, A, b, None))),
    ("KDA: lower bound -4", "0.attn_out", wrong("kda_log_decay", lambda f, z, A, b, m: f(z, A, b, -4.0))),
    ("KDA: q and k not normalised", "0.attn_out", wrong("l2_norm", lambda f, x: x)),
    ("KDA: convolution taps reversed", "0.attn_out", wrong("short_conv", lambda f, x, w, t: f(x, w.flip(-1), t))),
    ("KDA: output norm's weight left out", "0.attn_out", edited("o_norm", lambda m: m.weight.data.fill_(1))),
    ("MLA: eps 1e-5 in the latent norms", "3.attn_out", edited("a_layernorm", lambda m: setattr(m, "eps", 1e-5))),
    ("MLA: scale from the nope part only", "3.attn_out", wrong("mla_full", lambda f, q, *a: f(q * (48 / 32) ** 0.5, *a))),
    ("MLA: rope channels dropped", "3.attn_out", wrong("mla_full", lambda f, q, *a: f(
        torch.cat([q[..., :32], 0 * q[..., 32:]], -1), *a))),
    ("SiTU: no caps (SwiGLU)", "0.ffn_out", wrong("situ_glu", lambda f, gate, up, *caps: k3.swiglu(gate, up))),
    ("SiTU: caps exchanged", "0.ffn_out", wrong("situ_glu", lambda f, gate, up, a, b: f(gate, up, b, a))),
    ("MoE: bias in the mixture weights", "1.topk_weight", wrong("route", lambda f, s, b, k: (
        *f(s, b, k)[:1], k3.mixture_weights(s + b, f(s, b, k)[0]), f(s, b, k)[2]))),
    ("MoE: bias ignored in the choice", "1.topk_idx", wrong("route", lambda f, s, b, k: f(s, 0 * b, k))),
    ("MoE: weights not renormalised", "1.topk_weight", wrong("mixture_weights", lambda f, s, e: s.gather(-1, e))),
    ("MoE: latent norm left out", "1.ffn_out", edited("block_sparse_moe", lambda m: delattr(m, "routed_expert_norm"))),
    ("MoE: shared experts left out", "1.ffn_out", edited("block_sparse_moe", lambda m: delattr(m, "shared_experts"))),
    ("MoE: w1 and w3 exchanged", "1.ffn_out", edited(".experts", swap_gate_and_up)),
    ("AttnRes: keys not normalised", "0.ffn_in", wrong("attn_res_scores", raw_keys)),
    ("AttnRes: uniform weights", "0.ffn_in", wrong("attn_res_scores", lambda f, *a: 0 * f(*a))),
    ("AttnRes: scores divided by sqrt(D)", "0.ffn_in", wrong("attn_res_scores", lambda f, *a: f(*a) / 8)),
    ("AttnRes: blocks start a layer late", "1.ffn_in", lambda monkeypatch, model: [
        setattr(layer, "starts_block", i % 2 == 1 or i == 0) for i, layer in enumerate(model.language_model.model.layers)]),
    ("AttnRes: output mix left out", "final_mixed", lambda monkeypatch, model: monkeypatch.setattr(
        k3.TextModel, "output_mix", lambda self, blocks, s: s))]


@pytest.mark.parametrize("mistake, place, patch", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_typical_mistakes_show_where_they_are(monkeypatch, mistake, place, patch):
    """Each mistake of the field moves first the half layer it is in. `-s` prints how far, for the README's table."""
    right, model, ids = {}, tiny(torch.float64), some_ids()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(0.02 if "q_a_proj" in name or "kv_a_proj" in name else 1)      # small, so that an eps matters
        model(ids, record=right)
        patch(monkeypatch, model)
        if place.startswith("0.attn") or "SiTU" in mistake:
            for m in model.modules():                  # an activation or kernel held since construction
                if hasattr(m, "act"):
                    m.act = k3.activation(model.config)
        seen = {}
        model(ids, record=seen)
    order = ["embed", *(f"layers.{i}.{n}" for i in range(5) for n in k3.RECORDED), "final_mixed", "final_normed", "logits"]
    differs = lambda n: (right[n] != seen[n]).any() if n.endswith("idx") else rel(seen[n], right[n]) > 1e-4
    first = next(n for n in order if n in right and differs(n))
    moved = rel(seen[first], right[first])
    print(f"\n| {mistake} | `{first}` | {moved:.1e} | {rel(seen['logits'], right['logits']):.2f} |", end="")
    assert first.removeprefix("layers.") == place


# ---- train_tiny.py

ALL_KINDS = dict(num_hidden_layers=5, num_nextn_predict_layers=1)


def tiny_model(**over):
    return K3(K3Config.tiny(**{**ALL_KINDS, **over}))


def one_row(p, group="muon", heads=1, rows=None):
    return tt.Row("w", torch.nn.Parameter(p), group, heads, rows or (p.shape[0],))


# ---- Newton-Schulz


def test_newton_schulz_values():
    """Five quintic steps: I -> 1.10811 I, diag(3, 1) -> diag(0.753034, 1.133706); tall is the transpose of wide."""
    assert torch.allclose(tt.newton_schulz(torch.eye(2)), 1.10811 * torch.eye(2), atol=2e-5)
    got = tt.newton_schulz(torch.diag(torch.tensor([3.0, 1.0])))
    assert torch.allclose(got, torch.diag(torch.tensor([0.753034, 1.133706])), atol=2e-6)
    G = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(tt.newton_schulz(G.mT), tt.newton_schulz(G).mT, atol=1e-5)
    s = torch.linalg.svdvals(tt.newton_schulz(G.double()))
    assert 0.65 < s.min() and s.max() < 1.15, s
    assert tt.newton_schulz(G).dtype == torch.float32


def test_newton_schulz_is_free_of_scale():
    """1e-20 times a gradient gives the same update, zero gives zero, and a block never sees another's norm."""
    G = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    same = tt.newton_schulz(G)
    assert torch.allclose(tt.newton_schulz(G * 1e-20), same, atol=1e-5) and 3.3 < same.norm() < 3.9
    assert torch.equal(tt.newton_schulz(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))
    heads = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(1))
    scaled = heads * torch.tensor([1, 0.1, 0.01, 0.001]).view(4, 1, 1)
    assert torch.allclose(tt.newton_schulz(scaled), tt.newton_schulz(heads), atol=1e-5)
    whole = tt.newton_schulz(scaled.reshape(32, 64)).view(4, 8, 64).norm(dim=(1, 2))
    assert whole[3] < 0.25 * whole[0]      # what per-head orthogonalisation removes


# ---- the table


def test_table_splits_by_exact_name():
    """KDA q, k, v by head; MLA queries by head, keys and values apart; nothing else in attention."""
    c = K3Config.tiny(num_hidden_layers=5)
    table = {row.name: row for row in tt.param_table(K3(c))}
    at = lambda name: table[f"language_model.model.layers.{name}.weight"][2:]
    for leaf in ("q_proj", "k_proj", "v_proj"):
        assert at(f"0.self_attn.{leaf}") == ("muon", c.linear_num_heads, (c.linear_head_dim,))
    assert at("3.self_attn.q_b_proj") == ("muon", c.num_attention_heads, (c.qk_nope_head_dim + c.qk_rope_head_dim,))
    assert at("3.self_attn.kv_b_proj") == ("muon", c.num_attention_heads, (c.qk_nope_head_dim, c.v_head_dim))
    for leaf in ("0.self_attn.o_proj", "0.self_attn.g_proj", "0.self_attn.f_a_proj", "0.self_attn.f_b_proj",
                 "0.self_attn.b_proj", "3.self_attn.q_a_proj", "3.self_attn.kv_a_proj_with_mqa", "3.self_attn.o_proj",
                 "3.self_attn.g_proj", "0.mlp.gate_proj", "1.block_sparse_moe.routed_expert_down_proj",
                 "1.block_sparse_moe.shared_experts.up_proj", "1.block_sparse_moe.gate"):
        assert at(leaf)[:2] == ("muon", 1), leaf
    experts = table["language_model.model.layers.1.block_sparse_moe.experts.w2"]
    assert experts[2:] == ("muon", c.num_experts, (c.routed_expert_hidden_size,))
    full = {row.name: row for row in tt.param_table(K3(K3Config.tiny(q_lora_rank=None)))}
    assert full["language_model.model.layers.3.self_attn.q_proj.weight"].rows == (48,)


def test_released_table_on_meta():
    """The released model: 69 x 3 + 24 x 2 split projections of 96 heads."""
    with torch.device("meta"):
        model = K3(K3Config(vt_num_hidden_layers=0))
    split = [row for row in tt.param_table(model) if row.heads > 1 and ".self_attn." in row.name]
    assert len(split) == 69 * 3 + 24 * 2 and {row.heads for row in split} == {96}
    assert {(row.name.split(".")[-2], row.rows) for row in split} == {
        ("q_proj", (128,)), ("k_proj", (128,)), ("v_proj", (128,)), ("q_b_proj", (192,)), ("kv_b_proj", (128, 128))}


@pytest.mark.parametrize("optimizer", ["per-head-muon", "muon", "adamw"])
def test_every_tensor_in_one_group(optimizer):
    """Muon has matrices only; lookup tables, vectors, convolutions, pseudo-queries are AdamW's; the router bias nobody's."""
    model = tiny_model()
    table = tt.param_table(model, optimizer)
    assert [row.name for row in table] == [name for name, _ in model.named_parameters()]
    assert not any("e_score_correction_bias" in row.name for row in table)
    for row in table:
        if row.group == "muon":
            assert row.param.ndim >= 2 and "conv1d" not in row.name and "res_proj" not in row.name
            assert "embed_tokens" not in row.name and "lm_head" not in row.name
    if optimizer == "adamw":
        assert {row.group for row in table} == {"adamw"}


def test_kv_blocks_are_key_then_value():
    """Rows of kv_b_proj per head: key rows, then value rows."""
    row = one_row(torch.arange(12.0).view(12, 1).expand(12, 3).contiguous(), heads=2, rows=(4, 2))
    key, value = tt.head_blocks(row.param, row)
    assert key[1, :, 0].tolist() == [6, 7, 8, 9] and value[0, :, 0].tolist() == [4, 5]


# ---- the optimizer


def test_heads_get_equal_updates():
    """Gradients of scale 1, .1, .01, .001 move the four heads alike, by RMS near 0.2 lr."""
    row = one_row(torch.zeros(32, 64), heads=4, rows=(8,))
    scale = torch.tensor([1, 0.1, 0.01, 0.001]).repeat_interleave(8).unsqueeze(1)
    row.param.grad = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * scale
    tt.PerHeadMuon([row], lr=1.0).step()
    rms = row.param.detach().view(4, -1).square().mean(1).sqrt()
    assert (rms - 0.2).abs().max() < 0.04, rms


def test_bad_gradient_skips_the_step():
    """Infinite or NaN anywhere: weights, momenta and the step count stay, and the next step is as if it had not been."""
    for bad in (float("inf"), float("nan")):
        results = []
        for stumble in (False, True):
            model = tiny_model()
            opt = tt.PerHeadMuon(tt.param_table(model), lr=0.01)
            fill = lambda: [setattr(row.param, "grad", torch.ones_like(row.param)) for row in opt.table]
            fill()
            opt.step()
            if stumble:
                fill()
                opt.table[0].param.grad[0, 0] = bad
                assert not opt.step().isfinite()
            fill()
            opt.step()
            results.append([*model.state_dict().values(), *opt.state.values()])
        assert all(torch.equal(a, b) for a, b in zip(*results)) and results[0][-1].isfinite().all()


def test_step_only_reads_gradients():
    """Gradient of ones: p.grad is ones after the step, clipped or not; a missing one counts as zero."""
    rows = [one_row(torch.ones(4, 4)), one_row(torch.ones(3), "adamw"), one_row(torch.ones(5, 2))._replace(name="v")]
    rows[0].param.grad, rows[1].param.grad = torch.ones(4, 4), torch.ones(3)
    rows[1] = rows[1]._replace(name="u")
    tt.PerHeadMuon(rows, lr=0.1).step()
    assert torch.equal(rows[0].param.grad, torch.ones(4, 4)) and torch.equal(rows[1].param.grad, torch.ones(3))
    assert torch.allclose(rows[2].param, torch.full((5, 2), 0.99))    # decay alone: 1 - lr * 0.1


def test_adamw_part_is_torchs():
    """Five steps of AdamW on a matrix and a vector equal torch.optim.AdamW's (which does not decay the vector here)."""
    gen = torch.Generator().manual_seed(0)
    mine = [one_row(torch.randn(6, 4, generator=gen), "adamw"), one_row(torch.randn(5, generator=gen), "adamw")._replace(name="b")]
    theirs = [torch.nn.Parameter(row.param.detach().clone()) for row in mine]
    peer = torch.optim.AdamW([dict(params=theirs[:1], weight_decay=0.1), dict(params=theirs[1:], weight_decay=0.0)],
                             lr=0.01, betas=(0.9, 0.95))
    opt = tt.PerHeadMuon(mine, lr=0.01, clip=1e9)
    for _ in range(5):
        for row, q in zip(mine, theirs):
            row.param.grad = q.grad = torch.randn(q.shape, generator=gen)
        opt.step(), peer.step()
    assert all(torch.allclose(row.param, q, atol=1e-6) for row, q in zip(mine, theirs))


def test_clipping_is_global():
    """Gradients of norm 10 act as if divided by 10; those below the limit are untouched."""
    row = one_row(torch.zeros(2), "adamw")
    opt = tt.PerHeadMuon([row], lr=0.1)
    row.param.grad = torch.tensor([6.0, 8.0])
    assert opt.step() == 10
    assert torch.allclose(opt.state["mean"], 0.1 * torch.tensor([0.6, 0.8]))


def test_schedule():
    """200 steps, peak 1, floor 0.1: 0.5, 1.0, ..., 0.55 at step 101, 0.1 at the end; 50 steps warm up for one."""
    assert [tt.schedule(s, 200) for s in (1, 2)] == [0.5, 1.0]
    assert abs(tt.schedule(101, 200) - 0.55) < 1e-12 and abs(tt.schedule(200, 200) - 0.1) < 1e-12
    assert tt.schedule(1, 50) == 1.0 and tt.schedule(1, 1) == 1.0 and tt.schedule(2, 2) == tt.FLOOR


# ---- data


def test_read_text(tmp_path):
    """Whole files are held out where there are 20, else the end of the text; what is not UTF-8 stays out."""
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_text(chr(65 + i % 26) * 10)
    (tmp_path / "10a.bin").write_bytes(b"\xff\xfe\x00")
    text, held = tt.read_text(tmp_path)
    assert bytes(held) == b"T" * 10 + b"N" * 10 and len(text) == 380
    one = tmp_path / "00.txt"
    one.write_text("x" * 95 + "y" * 5)
    assert [bytes(part) for part in tt.read_text(one)] == [b"x" * 95, b"y" * 5]
    with pytest.raises(OSError):
        tt.read_text(tmp_path / "missing")


def test_batches_depend_on_seed_and_step_alone():
    text = np.arange(256, dtype=np.uint8)
    a, b, c = (tt.batch(text, 0, s, 4, 16) for s in (5, 5, 6))
    assert torch.equal(a[0], b[0]) and not torch.equal(a[0], c[0])
    assert torch.equal(a[0][:, 1:], a[1][:, :-1])
    assert abs(tt.unigram_bits(text) - 8) < 1e-9


# ---- the loop


def tiny_run(monkeypatch, out, *args, steps=6):
    monkeypatch.setitem(tt.PRESETS, "cpu", dict(
        steps=steps, batch=2, length=24, lr=5e-3, log_every=2, val_every=3, save_every=2, val_windows=2, sample=8,
        model=dict(num_hidden_layers=4)))
    return tt.main(["--preset", "cpu", "--out", str(out), *map(str, args)])


def log(out):
    return [{k: v for k, v in row.items() if not k.endswith("_per_s")} for row in tt.read_log(out)[1:]]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 60)
    return path


def test_run_and_resume(monkeypatch, tmp_path, text):
    """Killed after step 4 and resumed: the log is the uninterrupted one's, bit for bit."""
    assert tiny_run(monkeypatch, tmp_path / "a", "--data", text) == 0
    steps = [row for row in log(tmp_path / "a") if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6] and len(steps[0]["imbalance"]) == 3
    save = tt.save_state

    def die(path, **state):
        save(path, **state)
        if state["step"] == 4:
            raise KeyboardInterrupt
    monkeypatch.setattr(tt, "save_state", die)
    assert tiny_run(monkeypatch, tmp_path / "b", "--data", text) == 130
    with open(tmp_path / "b" / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "loss": 1.0, "a": {"b": 1}')         # torn by the kill
    monkeypatch.setattr(tt, "save_state", save)
    assert tiny_run(monkeypatch, tmp_path / "b", "--data", text, "--resume") == 0
    assert log(tmp_path / "a") == log(tmp_path / "b")
    model, tokenizer = k3.load_model(tmp_path / "b" / "checkpoint"), k3.load_tokenizer(tmp_path / "b" / "checkpoint")
    run, (_, held) = tt.read_log(tmp_path / "b")[0]["header"], tt.read_text(text)
    bits = [row["val_bpb"] for row in log(tmp_path / "b") if "val_bpb" in row][-1]
    assert abs(tt.bits_per_byte(model, held, run) / bits - 1) < 0.01      # weights are stored in BF16
    assert tokenizer.encode("az") == [97, 122]


RANK = """
import sys, pytest, torch, train_tiny as tt
tt.plot = lambda out: []
from test_k3 import tiny_run
finish, tensors = tt.PerHeadMuon.step, {}
def step(self):
    tensors.update({row.name: row.param for row in self.table})
    return finish(self)
tt.PerHeadMuon.step = step
start = tt.Balancer.start
def started(self):
    tensors.update({f"bias {i}": moe.gate.e_score_correction_bias for i, moe in enumerate(self.layers)})
    return start(self)
tt.Balancer.start = started
with pytest.MonkeyPatch.context() as patch:
    status = tiny_run(patch, sys.argv[1], *sys.argv[3:], steps=3)
torch.save({name: t.detach() for name, t in tensors.items()}, sys.argv[2])
sys.exit(status)
"""


def two_ranks(out, folder, *args):
    """What torchrun does: two processes that meet over a port; stdout and exit status of each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", OMP_NUM_THREADS="1")
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(out), f"{folder}/{r}.pt", *map(str, args)], text=True,
                              env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, cwd=os.path.dirname(k3.__file__))
             for r in range(2)]
    return [(p.communicate(timeout=60)[0], p.returncode) for p in ranks]


def test_data_parallel_is_one_process(monkeypatch, tmp_path, text):
    """Two processes share out one process's batches: its losses to rounding, one log; their weights and biases are the same bits."""
    tiny_run(monkeypatch, tmp_path / "one", "--data", text, steps=3)
    (said, status), (silent, other) = two_ranks(tmp_path / "two", tmp_path, "--data", text)
    assert (status, other, silent) == (0, 0, "") and "2 x CPU" in said
    alone, shared = ([row for row in log(tmp_path / out) if "loss" in row] for out in ("one", "two"))
    assert len(alone) == len(shared) == 3
    for a, b in zip(alone, shared):
        assert abs(a["loss"] / b["loss"] - 1) < 1e-5 and abs(a["grad_norm"] / b["grad_norm"] - 1) < 1e-3, (a, b)
        assert a["imbalance"] == b["imbalance"]        # of all tokens, not of a rank's share
    first, second = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    assert first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())
    assert all(first[f"bias {i}"].any() for i in range(3))


@pytest.mark.parametrize("rank", [None, 32])
def test_qk_clip_acts_on_hot_heads_alone(rank):
    """The head whose logit passed tau comes down to tau by sqrt(tau / max) a side; the others keep their bits, and so do values."""
    model = K3(K3Config.tiny(num_attention_heads=3, q_lora_rank=rank, initializer_range=0.2), seed=1).double()
    mla, x = model.layer(3).self_attn, draw(2, 9, 64, seed=2)
    with torch.no_grad():
        before = {name: p.clone().unflatten(0, (3, -1)) for name, p in mla.named_parameters() if p.shape[0] % 3 == 0}
        latent = torch.cat([mla.kv_a_layernorm(mla.kv_a_proj_with_mqa(x)[..., :32]), mla.kv_a_proj_with_mqa(x)[..., 32:]], -1)
        k = k3.keys_values(latent, mla.kv_b_proj.weight, 3, 32)[0]
        q = (mla.q_b_proj(mla.q_a_layernorm(mla.q_a_proj(x))) if rank else mla.q_proj(x)).unflatten(-1, (3, -1))
        logits = [max(float(q[b, t, h] @ k[b, s, h]) for b in range(2) for t in range(9) for s in range(t + 1)) / 48 ** 0.5 for h in range(3)]
        most = tt.largest_logits(mla, x)
        assert np.allclose(most.tolist(), logits, rtol=1e-6), (most, logits)
        tau = float(most.sort().values[1:].mean())         # between the second and the largest
        hot = int(most.argmax())
        tt.qk_clip(mla, most, tau)
        after = tt.largest_logits(mla, x)
    assert abs(after[hot] / tau - 1) < 1e-5
    query, share = "q_b_proj.weight" if rank else "q_proj.weight", tau / most[hot].item()
    for name, old in before.items():
        new = dict(mla.named_parameters())[name].detach().unflatten(0, (3, -1))
        for h in range(3):
            split = h == hot and name in (query, "kv_b_proj.weight")
            assert torch.equal(new[h], old[h]) != split
    new_q, new_kv = (dict(mla.named_parameters())[n].detach().unflatten(0, (3, -1))[hot] for n in (query, "kv_b_proj.weight"))
    assert torch.allclose(new_q[:32], before[query][hot, :32] * share ** 0.5) and torch.allclose(new_q[32:], before[query][hot, 32:] * share)
    assert torch.allclose(new_kv[:32], before["kv_b_proj.weight"][hot, :32] * share ** 0.5)
    assert torch.equal(new_kv[32:], before["kv_b_proj.weight"][hot, 32:])


def test_qk_clip_in_training(monkeypatch, tmp_path, text):
    """A tau never reached only records: the losses are those without it, bit for bit; one below all logits changes them."""
    losses = {}
    for tau in (None, 1e6, 1e-4):
        args = [] if tau is None else ["--qk-clip", tau]
        assert tiny_run(monkeypatch, tmp_path / str(tau), "--data", text, *args, steps=3) == 0
        rows = [row for row in log(tmp_path / str(tau)) if "loss" in row]
        losses[tau] = [row["loss"] for row in rows]
        assert all(row.get("largest_logit", 0) > 0 for row in rows) == (tau is not None)
        assert (tmp_path / str(tau) / "largest_logit.png").exists() == (tau is not None)
    assert losses[None] == losses[1e6] and losses[1e-4][0] == losses[None][0] and losses[1e-4][1:] != losses[None][1:]


def comparison(out):
    result = json.loads((out / "compare.json").read_text())
    return result, {name: [row for row in log(out / name) if "loss" in row] for name in result["runs"]}


def test_fixed_scores():
    """896 experts, top 16: both quantiles under 1.4 within ten updates, a sign step slow or oscillating, counts pooled."""
    found = tt.fixed_scores()
    exact, histogram, coarse, fine = found["curves"].values()
    assert 50 < exact[0] == histogram[0] == coarse[0] == fine[0] <= 56
    assert max(exact[-1], histogram[-1]) < 1.4 and len(exact) == 11
    first = next(i for i, x in enumerate(fine) if x < 1.4)
    assert 150 < first < 200 and min(coarse[-20:]) > 2 and np.ptp(coarse[-20:]) > 0.1, first
    assert found["shards"]["pooled"][-1] < 1.4 and found["shards"]["averaged"][-1] > 5
    assert all(error < width for _, width, error in found["bins"]) and [b[0] for b in found["bins"]] == [100, 300, 1000, 3000]


def test_compare_balance(monkeypatch, capsys, tmp_path, text):
    """Every choice starts from the same weights and batches; table, JSON and figures, which --plot makes again."""
    few = tt.fixed_scores(m=32, n=8, k=2, shards=2, bins=(10, 20))
    monkeypatch.setattr(tt, "fixed_scores", lambda: few)
    assert tiny_run(monkeypatch, tmp_path, "--data", text, "--compare", "balance", "--steps", 3) == 0
    table = capsys.readouterr().out
    result, rows = comparison(tmp_path)
    assert list(rows) == ["qb", "qb-exact", "none", "sign-0.01", "sign-0.001", "sign-0.0001"] == result["drawn"]
    assert all(f"\n{name} " in table for name in rows) and "below_1.5_from" in table
    assert len({row[0]["loss"] for row in rows.values()}) == 1 and len({str(row[2]["imbalance"]) for row in rows.values()}) > 2
    made = [tmp_path / "compare.png", tmp_path / "fixed_scores.png"]
    for path in made:
        path.unlink()
    assert tt.main(["--plot", str(tmp_path)]) == 0 and all(path.stat().st_size > 10000 for path in made)
    (tmp_path / "compare.json").write_text("{}")
    assert tt.main(["--plot", str(tmp_path)]) == 2 and "not a comparison" in capsys.readouterr().err


def test_compare_optimizer(monkeypatch, tmp_path, text):
    """Each optimizer at every rate of the sweep, the best one drawn; whole-matrix Muon has the wider spread of heads."""
    monkeypatch.setattr(tt, "SWEEP_MOST", 2)
    assert tiny_run(monkeypatch, tmp_path, "--data", text, "--compare", "optimizer", "--steps", 2) == 0
    result, rows = comparison(tmp_path)
    assert [name.split("@")[0] for name in rows] == ["per-head-muon"] * 2 + ["muon"] * 2 + ["adamw"] * 2
    assert [name.split("@")[0] for name in result["drawn"]] == ["per-head-muon", "muon", "adamw"]
    for name in result["drawn"]:
        others = [run["val_bpb"] for other, run in result["runs"].items() if other.startswith(name.split("@")[0] + "@")]
        assert result["runs"][name]["val_bpb"] == min(others)
    spread = {name.split("@")[0]: result["runs"][name]["head_spread"] for name in result["drawn"]}
    assert spread["per-head-muon"] < 1.2 < spread["muon"], spread
    assert all(run["optimizer_ms"] > 0 for run in result["runs"].values())


def test_sweep_goes_on_until_the_best_is_inside(monkeypatch):
    """Outward in either direction by the same factor, also from a rate that diverged, up to the most rates; then nothing more."""
    def sweep(loss, most=7):
        monkeypatch.setattr(tt, "SWEEP_MOST", most)
        runs, more = {}, dict(tt.at_rate("muon", lr) for lr in (1, tt.SWEEP))
        while more:
            runs.update({name: argparse.Namespace(**change) for name, change in more.items()})
            more = tt.beyond(runs, {name: loss(one.lr) for name, one in runs.items()})
        return sorted(one.lr for one in runs.values())
    assert np.allclose(sweep(lambda lr: abs(math.log(lr / 10))), [1, 3, 9, 27])
    assert np.allclose(sweep(lambda lr: abs(math.log(lr / 0.1)) if lr < 2 else math.nan), [1 / 27, 1 / 9, 1 / 3, 1, 3])
    assert np.allclose(sweep(lambda lr: -lr, most=4), [1, 3, 9, 27])


@pytest.mark.parametrize("what, names", [
    ("attn-res", ["attn_res_block_size=2", "attn_res_block_size=4", "attn_res_block_size=null"]), ("situ", ["hidden_act=situ", "hidden_act=silu"]),
    ("latent-norm", ["latent_moe_use_norm=true", "latent_moe_use_norm=false"]),
    ("decay", ["gate_lower_bound=-5", "gate_lower_bound=null"]), ("kda_layers=[1,2,3],[2]", ["kda_layers=[1,2,3]", "kda_layers=[2]"])])
def test_compare_switch(monkeypatch, tmp_path, text, what, names):
    """The report's switches by name, and any other key; the largest activations are in every log."""
    assert tiny_run(monkeypatch, tmp_path, "--data", text, "--compare", what, "--steps", 1) == 0
    result, rows = comparison(tmp_path)
    assert list(rows) == names and (tmp_path / "compare.png").exists()
    assert all(row[0]["largest_activation"] > 0 and row[0]["largest_routed"] > 0 for row in rows.values())
    assert len({row[0]["loss"] for row in rows.values()}) == len(names)


@pytest.mark.parametrize("what, names, held", [
    ("length", ["hybrid", "all-mla", "all-kda"], ["carried_last", "cut_last"]), ("qat", ["usual", "qat"], ["unrounded", "in_mxfp4"]),
    ("mtp", ["num_nextn_predict_layers=1", "num_nextn_predict_layers=0"], ["accepted_share", "tokens_per_call", "same"])])
def test_compare_measures(monkeypatch, capsys, tmp_path, text, what, names, held):
    """What only a finished run tells: in each log, in the table and in the figure."""
    monkeypatch.setitem(tt.MEASURES, "mtp", functools.partial(tt.drafting, prompts=2, tokens=6))
    assert tiny_run(monkeypatch, tmp_path, "--data", text, "--compare", what, "--steps", 1) == 0
    result, rows = comparison(tmp_path)
    assert list(rows) == names == result["drawn"] and held[0] in capsys.readouterr().out
    for name, run in result["runs"].items():
        assert set(held) <= run.keys() or name.endswith("layers=0")
    if what == "mtp":
        assert result["runs"][names[0]]["same"] == 1 and all("mtp_loss" in row for row in rows[names[0]])
    if what == "qat":      # each is judged during training as it computes there
        usual, qat = result["runs"].values()
        assert qat["val_bpb"] == qat["in_mxfp4"] != qat["unrounded"] and usual["val_bpb"] == usual["unrounded"] != usual["in_mxfp4"]
    assert (tmp_path / "compare.png").stat().st_size > 10000


def test_compare_all(monkeypatch, capsys, tmp_path, text):
    """Each experiment in its folder with its own keys and steps, and the time; --plot draws all of them again."""
    monkeypatch.setattr(tt, "TAUS", (1e6, 1e-4))
    monkeypatch.setattr(tt, "ALL", {"few": ("qk-clip", ["num_experts=8"], 6), "qat": ("qat", [], 3)})
    assert tiny_run(monkeypatch, tmp_path, "--data", text, "--compare", "all") == 0
    out = capsys.readouterr().out
    assert "==== few: 1 steps a run" in out and "==== qat: 2 steps a run" in out
    result, rows = comparison(tmp_path / "few")
    assert K3Config.from_json(result["header"]["config"]).num_experts == 8 and list(rows) == ["tau=1e+06", "tau=0.0001"]
    a, b = (line[0] for line in rows.values())
    assert a["loss"] == b["loss"] and a["largest_logit"] == b["largest_logit"] > 1e-4 and a["update_rms"] != b["update_rms"]
    for name in ("few", "qat"):
        (tmp_path / name / "compare.png").unlink()
    assert tt.main(["--plot", str(tmp_path)]) == 0 and all((tmp_path / name / "compare.png").exists() for name in ("few", "qat"))


def test_by_position():
    """Read through the state: the loss of one long forward pass; cut: that of windows of their own; state bytes by kind."""
    model, text = tiny(full_attn_layers=[2, 4]), some_ids(1, 300, 3)[0].byte().numpy()
    found = tt.by_position(model, text, dict(length=16), count=2)
    assert found["lengths"] == [16 * i for i in range(1, 17)] and found["ends"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    ids, labels = tt.windows(text, [0, 300 - 257], 256)
    with torch.no_grad():
        each = lambda i, l: F.cross_entropy(model(i).flatten(0, 1), l.flatten(), reduction="none") / math.log(2)
        whole, cut = each(ids, labels).view(2, 256), each(ids.reshape(-1, 16), labels.reshape(-1, 16)).view(2, 256)
    for name, line in (("carried", whole), ("cut", cut)):
        parts = line.mean(0).tensor_split(found["ends"][:-1])
        assert np.allclose(found[name], [part.mean().item() for part in parts], rtol=1e-4)
    assert found["carried"][:5] == found["cut"][:5] and not np.allclose(found["carried"][5:], found["cut"][5:], rtol=1e-3)
    kda = 3 * (2 * 32 * 32 + 3 * 3 * 64) * 4           # layers x (state + tails of q, k and v)
    assert found["kda_bytes"] == (kda,) * 16 and found["mla_bytes"] == tuple(2 * 48 * 4 * n for n in found["lengths"])


def test_qat_checkpoint_is_packed(monkeypatch, capsys, tmp_path, text):
    """--qat: the checkpoint holds MXFP4 experts and scores as the trained model; other widths and dense models are refused."""
    monkeypatch.setattr(tt, "plot", lambda out: [])
    assert tiny_run(monkeypatch, tmp_path, "--data", text, "--qat", steps=3) == 0
    names = k3.Checkpoint(tmp_path / "checkpoint").tensors
    assert sum(name.endswith("weight_packed") for name in names) == 3 * 16 * 3
    rows = tt.read_log(tmp_path)
    model, (_, held) = k3.load_model(tmp_path / "checkpoint"), tt.read_text(text)
    assert abs(tt.bits_per_byte(model, held, rows[0]["header"]) / [r["val_bpb"] for r in rows if "val_bpb" in r][-1] - 1) < 0.002
    capsys.readouterr()
    for over in ("moe_intermediate_size=48", "num_experts=null"):
        assert tiny_run(monkeypatch, tmp_path, "--data", text, "--qat", "--set", over) == 2
        assert "--qat needs" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graph_holds_the_step_with_rounded_experts():
    """--qat with an MTP layer: three steps as one graph give the eager steps' losses, bit for bit."""
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    ids, labels = (some_ids(4, 64, seed).cuda() for seed in (0, 1))
    losses = []
    for graph in (False, True):
        model = tiny_model().cuda().train()
        model.kernel, model.compute_dtype = "fast", torch.bfloat16
        for moe in model.moe_layers():
            moe.experts.rounded = True
        optimizer = tt.PerHeadMuon(tt.param_table(model), lr=1e-2, dtype=torch.bfloat16)
        step = tt.make_step(model, k3.Balancer(model), optimizer, ids, labels)
        step = tt.capture(step, [*model.state_dict().values(), *optimizer.state.values()]) if graph else step
        losses.append([step()[:2].tolist() for _ in range(3)])
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    assert losses[0] == losses[1] and losses[0][0] != losses[0][2], losses


@pytest.mark.parametrize("args", [
    ["--data", "EMPTY"], ["--data", "SHORT"], ["--data", "MISSING"], ["--data", "BINARY"], ["--steps", "0"],
    ["--set", "no_such_key=1"], ["--set", "num_experts_per_token=99"], ["--set", "hidden_act=relu"], ["--out", "FILE/x"],
    ["--set", "vocab_size=200"], ["--set", "pad_token_id=101"], ["--lr", "1e39"], ["--set", "initializer_range=-1"], ["--data", "/dev/zero"],
    ["--compare", "balance", "--plot", "MISSING"], ["--task", "shapes", "--set", "merge_kernel_size=[3,3]"], ["--compare", "all", "--resume"], ["--compare", "all", "--steps", "0"], ["--resume"], ["--plot", "MISSING"],
    ["--batch", "0"], ["--length", "-3"], ["--length", "8", "--task", "shapes"], ["--compare", "mtp", "--length", "1"],
    ["--lr", "0"], ["--gamma", "nan"], ["--qk-clip", "-1"], ["--compare", ""], ["--compare", "nothing"], ["--compare", "nothing=1,2"],
    ["--task", "shapes", "--batch", "2"], ["--qat", "--set", "first_k_dense_replace=99"], ["--compare", "hidden_act=situ"],
    ["--compare", "hidden_act=situ,relu"], ["--compare", "balance", "--resume"], ["--compare", "balance", "--task", "shapes"]])
def test_bad_input_is_one_sentence(monkeypatch, capsys, tmp_path, text, args):
    """Exit status 2, one line on stderr."""
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text("too short")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 50)
    names = {k: str(tmp_path / k.lower()) for k in ("EMPTY", "SHORT", "MISSING", "BINARY")} | {"FILE/x": str(text / "x")}
    args = [names.get(a, a) for a in args]
    if "--data" not in args:
        args += ["--data", str(text)]
    assert tiny_run(monkeypatch, tmp_path / "o", *args) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 400, err


def test_plot_refuses_damaged_logs(monkeypatch, capsys, tmp_path):
    """Cut, edited or of another kind: one sentence, status 2."""
    whole, header = {"step": 1, "loss": 2.0}, {"header": {"task": "text"}}
    for name, rows in (("metrics.jsonl", [header]), ("metrics.jsonl", [header, whole]),
                       ("metrics.jsonl", [{"header": {"task": "shapes"}}, whole]), ("metrics.jsonl", [header, {"loss": 1.0}]),
                       ("metrics.jsonl", [header, {"step": "1"}]), ("compare.json", [5]), ("compare.json", []), ("metrics.jsonl", [header, None]),
                       ("compare.json", [{"header": 1, "drawn": 2, "runs": 3}])):
        for old in tmp_path.iterdir():
            old.unlink()
        (tmp_path / name).write_text("".join((json.dumps(row) if row else "[" * 100000) + "\n" for row in rows))
        assert tt.main(["--plot", str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and str(tmp_path) in err, err


def test_resume_refuses_another_run(monkeypatch, capsys, tmp_path, text):
    tiny_run(monkeypatch, tmp_path / "a", "--data", text, steps=2)
    assert tiny_run(monkeypatch, tmp_path / "a", "--data", text, "--resume", "--seed", 1, steps=2) == 2
    assert "seed" in capsys.readouterr().err
    assert tiny_run(monkeypatch, tmp_path / "a", "--data", text, "--resume", "--set", "rms_norm_eps=1e-4", steps=2) == 2
    assert "rms_norm_eps 1e-05, this run 0.0001" in capsys.readouterr().err
    state, log = tmp_path / "a" / "state.pt", (tmp_path / "a" / "metrics.jsonl").read_bytes()
    good = state.read_bytes()
    other = torch.load(state, weights_only=True)
    other["model"] = {name: t.to(torch.float64) for name, t in other["model"].items()}
    torch.save(other, tmp_path / "other.pt")
    for content in (b"garbage", b"Q" + good[1:], good[:3000] + b"Q" + good[3001:], good[:-100], (tmp_path / "other.pt").read_bytes()):
        state.write_bytes(content)
        assert tiny_run(monkeypatch, tmp_path / "a", "--data", text, "--resume", steps=2) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == log


def test_two_runs_do_not_share_a_folder(monkeypatch, capsys, tmp_path, text):
    """The second is refused and changes nothing; a refused run leaves no folder behind and no log replaced."""
    with tt.claimed(tmp_path / "a"):
        (tmp_path / "a" / "metrics.jsonl").write_text("theirs")
        assert tiny_run(monkeypatch, tmp_path / "a", "--data", text) == 2
    assert "another run" in capsys.readouterr().err
    assert tiny_run(monkeypatch, tmp_path / "a", "--data", text, "--set", "hidden_act=relu") == 2
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == "theirs"
    assert tiny_run(monkeypatch, tmp_path / "b", "--data", text, "--steps", 0) == 2 and not (tmp_path / "b").exists()


def test_state_file_is_whole_or_old(tmp_path):
    """A write that fails leaves the old file."""
    path = tmp_path / "state.pt"
    tt.save_state(path, run='{"steps": 1}', step=1)
    with pytest.raises(TypeError):
        tt.write_whole(path, "not bytes")
    assert tt.load_state(path, {"steps": 1})["step"] == 1


def test_model_flops():
    """PyTorch's own counter on one token's forward pass, three times; it takes products of one summand (k u^T, p v) for elementwise."""
    for over in ({}, dict(q_lora_rank=None, num_shared_experts=0)):
        model = K3(K3Config.tiny(attn_res_block_size=None, **over))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long))
        uncounted = 3 * 2 * 32 * 32 + 2 * 2 * 32       # 3 KDA layers, 2 MLA layers
        assert tt.model_flops(model, 1) == 3 * counter.get_total_flops() + 6 * uncounted
    assert tt.model_flops(model, 101) - tt.model_flops(model, 1) == 6 * 2 * 2 * (48 + 32) * 50
    more = K3(K3Config.tiny(num_nextn_predict_layers=1))
    mtp = more.language_model.model.mtp
    layer = sum(p.numel() for name, p in mtp.named_parameters() if p.ndim == 2) + 2 * 80       # its attention at T 1
    layer += 4 * 3 * 32 * 32                           # chosen experts
    assert tt.model_flops(more, 1) - tt.model_flops(K3(K3Config.tiny()), 1) == 6 * (layer + 320 * 64)


def test_repeated_token_stays_finite():
    """Batches of one repeated token (collinear keys): 25 steps stay finite, the loss falls."""
    model = tiny_model(num_nextn_predict_layers=0)
    model.kernel = "fast"
    balancer, optimizer = k3.Balancer(model), tt.PerHeadMuon(tt.param_table(model), lr=1e-2)
    ids = torch.full((2, 24), 97)
    step = tt.make_step(model.train(), balancer, optimizer, ids, ids)
    losses = [step()[0].item() for _ in range(25)]
    assert np.isfinite(losses).all() and losses[-1] < 0.1 * losses[0], losses


def test_attn_res_weights():
    """A fresh model's mixes are means over their sources; source counts follow the blocks."""
    found = tt.attn_res_weights(tiny_model(num_nextn_predict_layers=0), torch.zeros(1, 8, dtype=torch.long))
    assert [len(w) for w in found.values()] == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]
    assert all(abs(x - 1 / len(w)) < 1e-6 for w in found.values() for x in w)


def test_attn_res_weights_are_the_models():
    """On one token the sources under the reported weights are what attention and feed-forward read."""
    model, ids, record = tiny_model(num_nextn_predict_layers=0), torch.tensor([[7]]), {}
    for name, p in model.named_parameters():
        if "res_proj" in name:
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(len(name)))
    found = tt.attn_res_weights(model, ids)
    model(ids, record=record)
    for name, weights in found.items():
        i, half = (name + " ").split(" ")[:2]
        if half:
            after = int(i) + (half != "attention")
            *stored, running = (record["embed" if j == 0 else f"layers.{j - 1}.prefix_sum"] for j in [*range(0, after, 2), after])
            running = running - (record[f"layers.{i}.ffn_out"] if half != "attention" else 0)
            want = record[f"layers.{i}.{'attn' if half == 'attention' else 'ffn'}_in"]
            got = sum(w * x for w, x in zip(weights, [*stored, running], strict=True))
            assert torch.allclose(got, want, atol=1e-5), name


# ---- the shapes task

def parts(mask):
    """The connected parts of a mask [H, W], each as its pixels [n, 2]."""
    found, left = [], {tuple(pixel) for pixel in np.argwhere(mask)}
    while left:
        part = [left.pop()]
        for y, x in part:
            near = {(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            part += near
        found.append(np.array(part))
    return found


def name_of(part):
    """The form, by the share of its box that it fills."""
    fill = len(part) / (np.ptp(part, 0) + 1).prod()
    return next(form for form, least in (
        ("square", 0.95), ("circle", 0.65), ("triangle", 0.42), ("cross", 0)) if fill > least)


@pytest.mark.parametrize("side", [56, 84])
@pytest.mark.parametrize("shape", tt.FORMS)
def test_pictures_show_what_the_answers_say(shape, side):
    """Colour by the bright pixels' channels, count by their connected parts, shape by each part."""
    rng = np.random.default_rng(0)
    for colour in tt.COLOURS:
        for count in "1234":
            picture = tt.picture(rng, side, colour, shape, count)
            bright = picture >= 192
            inside = bright.any(-1)
            assert (bright[inside] == np.array(tt.COLOURS[colour], bool)).all()
            assert picture.dtype == np.uint8 and picture[~bright].max() < 64
            assert [name_of(part) for part in parts(inside)] == [shape] * int(count)


def test_answers_are_drawn_equally_often():
    run = dict(side=56, classes=[3, 2, 4])
    said = [(q, a) for _, q, a in tt.examples(np.random.default_rng(1), run, 900)]
    for question, answers in tt.choices(run).items():
        share = [said.count((question, a)) / 300 for a in answers]
        assert np.allclose(share, 1 / len(answers), atol=0.1), (question, share)
        assert math.isclose(sum(share), 1)


def test_batch_is_what_the_command_line_makes():
    """Patches as preprocess_image's, ids begin as generate --image's, labels are in place."""
    run = dict(side=56, classes=[6, 4, 4], batch=6)
    config = k3.K3Config.tiny(vt_num_hidden_layers=1)
    pictures, questions, answers = zip(*tt.examples(np.random.default_rng(2), run, 6))
    _, ids, labels, media = tt.shapes_batch(np.random.default_rng(2), config, run, "cpu")
    pixels, grids = zip(*map(k3.preprocess_image, pictures))
    assert torch.equal(media["pixel_values"], torch.cat(pixels))
    assert torch.equal(media["grid_thws"], torch.stack(grids))
    full = k3.expand_placeholders(ids, [4] * 6, config.media_placeholder_token_id)
    assert full.shape == labels.shape
    for row, label, question, answer in zip(full, labels, questions, answers):
        n = int((label != -100).sum())
        at = int((label != -100).nonzero()[0])
        prompt = tt.BYTES.encode(k3.image_prompt(56, 56), control=True)
        prompt[(p := prompt.index(265)):p + 1] = [265] * 4
        assert row[:at + 1].tolist() == prompt + [*question.encode(), ord("?")]
        assert label[at:at + n].tolist() == [*answer.encode(), 257]
        assert row[at + 1:at + n].tolist() == [*answer.encode()] and (row[at + n:] == 266).all()


def test_shapes_run_beats_chance(tmp_path, capsys):
    """160 steps beat chance; log, figure and checkpoint are there; generating says the same."""
    tt.main(["--task", "shapes", "--preset", "cpu", "--steps", "160", "--out", str(tmp_path)])
    header, *rows = map(json.loads, open(tmp_path / "metrics.jsonl"))
    last = [row for row in rows if "accuracy" in row][-1]
    assert all(share > last["chance"][q] for q, share in last["accuracy"].items()), last
    assert last["accuracy"]["colour"] > 0.8 and last["accuracy"]["shape"] > 0.7, last
    assert all(0 < row["vision_grad_norm"] <= row["grad_norm"] for row in rows if "loss" in row)
    assert (tmp_path / "shapes.png").stat().st_size > 10000

    model, run = k3.load_model(tmp_path / "checkpoint"), {**header["header"], "batch": 12}
    batch = tt.shapes_batch(np.random.default_rng(9), model.config, run, "cpu")
    shares = tt.accuracy(model, [batch])
    model.eval()
    marks = {q: [] for q in shares}
    drawn = tt.examples(np.random.default_rng(9), run, 12)
    for pixels, (_, question, answer) in zip(batch[3]["pixel_values"].split(16), drawn):
        prompt, _ = tt.conversation(model.config, 56, question, "")
        said = "".join(k3.generate(model, tt.BYTES, prompt, 20, pixel_values=pixels,
                                   grid_thws=torch.tensor([[1, 4, 4]])))
        marks[question].append(said == answer)
    assert shares == {q: sum(m) / len(m) for q, m in marks.items()}
    capsys.readouterr()
    k3.main(["generate", str(tmp_path / "checkpoint"), "--image", str(tmp_path / "picture.png"),
             "--temperature", "0", "--prompt", "colour?"])
    assert capsys.readouterr().out == "yellow\n"


# ---- README.md

README = (Path(k3.__file__).parent / "README.md").read_text(encoding="utf-8")
SOURCE = Path(k3.__file__).read_text(encoding="utf-8")
MODULES = {"k3": k3, "kernels": kernels, "train_tiny": tt}


def tables():
    """Rows of every table as dicts, column title -> cell."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] if line.startswith("|") else None for line in README.splitlines()]
    head = None
    for cells, following in zip(lines, [*lines[1:], None]):
        if cells is None:
            head = None
        elif head is None:
            head = [cell.strip() for cell in cells] if following else None
        elif not set("".join(cells)) <= set(" :-"):
            assert len(cells) == len(head), f"{len(cells)} cells under {head}: {cells}"
            yield dict(zip(head, (cell.strip().replace(r"\|", "|") for cell in cells)))


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def named(name):
    """What a dotted name means: in k3 unless it starts with another module's name."""
    first, _, rest = name.partition(".")
    start, path = (MODULES[first], rest) if first in MODULES else (k3, name)
    return functools.reduce(getattr, path.split("."), start)


@functools.cache
def source(name):
    return inspect.getsource(named(name))


def tags(text):
    """Equation numbers of `Eq. 5` and `Eqs. 8-10`."""
    found = re.findall(r"Eqs?\. (\d+)(?:-(\d+))?", text)
    return {n for first, last in found for n in range(int(first), int(last or first) + 1)}


ROWS = [row for row in tables() if "code" in row]


def test_readme_names_exist():
    """Each name of a `code` column is defined; the maps are there and cover the 43 steps."""
    assert sum("report" in row for row in ROWS) >= 25
    steps = [int(n) for row in ROWS if "step" in row for n in row["step"].split(",")]
    assert steps == list(range(1, 44))
    for row in ROWS:
        assert quoted(row["code"]), row
        for name in quoted(row["code"]):
            try:
                named(name)
            except AttributeError:
                pytest.fail(f"README names {name}, which does not exist")


def test_readme_lines_exist():
    """Each code line that a map quotes stands in one of the functions named beside it."""
    squeeze = lambda text: re.sub(r"\s+", "", text)
    for row in ROWS:
        sources = [squeeze(source(name)) for name in quoted(row["code"])]
        for line in quoted(row.get("line", "")):
            assert any(squeeze(line) in source for source in sources), f"{row['code']} does not contain {line}"


def test_readme_equations_exist():
    """Each tag is in k3.py, and a row's single `Eq. N` in the source of what the row names."""
    assert tags(README) <= tags(SOURCE), f"not in k3.py: {sorted(tags(README) - tags(SOURCE))}"
    for row in ROWS:
        own = set().union(*(tags(source(name)) for name in quoted(row["code"])))
        for n in re.findall(r"Eq\. (\d+)", row.get("report", "")):
            assert int(n) in own, f"Eq. {n} does not stand in {row['code']}"


def test_readme_tests_exist():
    files = "".join(path.read_text(encoding="utf-8") for path in Path(k3.__file__).parent.glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", README):
        assert f"def {name}(" in files, f"README names {name}, which does not exist"


def test_readme_hooks_record_what_trace_reads(saved, tmp_path, monkeypatch, capsys):
    """The README's hooks, run on our own model: every tensor agrees, and one layer starts from the dump alone."""
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
    exec(code, {"model": saved[1], "input_ids": some_ids(1, 7)})
    status, out, _ = run(capsys, "trace", saved[0], "--against", "theirs.safetensors")
    assert status == 0 and "all 29 tensors agree" in out
    one = ("--layers", "3:4", "--from", "theirs.safetensors", "--against", "theirs.safetensors")
    assert "all 5 tensors agree" in run(capsys, "trace", saved[0], *one)[1]


class Parsed(Exception):
    """Raised in place of running a command."""


def test_readme_commands_parse(monkeypatch):
    """Each command of a sh block is one that the project's own parsers accept; none is run."""
    parse = k3.OneLine.parse_args

    def parse_only(self, *args):
        parse(self, *args)
        raise Parsed
    monkeypatch.setattr(k3.OneLine, "parse_args", parse_only)
    monkeypatch.setattr(k3, "device", str)             # a machine without a GPU can read `--device cuda`
    monkeypatch.setattr(tt.torch.cuda, "is_available", lambda: True)
    blocks, seen = re.findall(r"^```sh\n(.*?)^```", README, re.S | re.M), 0
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = [*lexer, "|"]                          # what follows a pipe or redirection is the shell's
        for at, word in enumerate(words):
            module = MODULES.get(Path(word).stem) if word.endswith(".py") else None
            if module in (k3, tt):
                end = next(i for i in range(at, len(words)) if set(words[i]) <= set("|&;<>"))
                try:
                    with pytest.raises(Parsed):
                        module.main(words[at + 1:end])
                except SystemExit:
                    pytest.fail(f"README's command does not parse: {line}")
                seen += 1
    assert seen, "README has no commands"


# ---- full size, when asked: python -m pytest -m large -s

def full_size_layer(folder, mla, moe):
    """One layer of the release with random weights, its experts slices of one random buffer; a small vocabulary."""
    config = K3Config(num_hidden_layers=1, full_attn_layers=[1] if mla else [], kda_layers=[] if mla else [1],
                      first_k_dense_replace=int(not moe), vocab_size=1024, vt_num_hidden_layers=0, bos_token_id=1,
                      eos_token_id=1, pad_token_id=1023, media_placeholder_token_id=1022)
    noise = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8)
    normal = torch.randn(1 << 24).mul_(0.02).to(torch.bfloat16)

    def make(name, shape, dtype, e):
        n = math.prod(shape)
        if dtype == "U8":
            at = e * 65536
            flat = noise[at:at + n] if name.endswith("packed") else noise[at:at + n] % 4 + 118
        elif name.endswith("norm.weight"):
            flat = torch.ones(n, dtype=torch.bfloat16)
        else:
            flat = normal.repeat(-(-n // len(normal)))[:n]
        flat = torch.zeros(n) if name.endswith("A_log") else flat
        return flat.to(k3.DTYPES[dtype]).view(shape)
    shards = {}
    for name, shape, dtype, shard, _, e in k3.inventory(config):
        shards.setdefault(shard, {})[name] = make(name, shape, dtype, e)
    k3.write_checkpoint(folder, shards.values(), config.to_json())


MEASURE = """
import json, os, resource, sys, time, torch, k3
folder, cold = sys.argv[1], sys.argv[2] == "cold"
for f in os.listdir(folder) if cold else ():
    fd = os.open(f"{folder}/{f}", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
checkpoint, lines = k3.Checkpoint(folder), []
began = time.time()
k3.trace(checkpoint, [[1, 2, 3, 4, 5, 6, 7, 8]], watch=lambda i, note, line: lines.append(line))
print(json.dumps(dict(seconds=time.time() - began, bytes=checkpoint.bytes_read, line=lines[1],
                      gigabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20)))
"""


def read_cold(folder, size):
    """Seconds to read `size` bytes of a folder's largest file that are not in the page cache."""
    path = max((os.path.join(folder, f) for f in os.listdir(folder)), key=os.path.getsize)
    with open(path, "rb", buffering=0) as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, buffer, left = time.time(), bytearray(1 << 24), min(size, os.path.getsize(path))
        while left > 0:
            left -= f.readinto(buffer)
        return time.time() - began


@pytest.mark.large
@pytest.mark.parametrize("mla, moe", [(False, False), (False, True), (True, True)], ids=["KDA+dense", "KDA+MoE", "MLA+MoE"])
def test_full_size_layer(tmp_path, request, mla, moe):
    """8 tokens through one released-size layer: under 8 GB, within 1.3 times reading the same bytes and computing."""
    if "large" not in request.config.option.markexpr:
        pytest.skip("17 GB on disk; python -m pytest -m large")
    full_size_layer(tmp_path / "layer", mla, moe)

    def measure(state):
        done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path / "layer"), state], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    cold, warm = measure("cold"), measure("warm")
    reading = read_cold(tmp_path / "layer", cold["bytes"])
    print(f"\n{cold['line']}\n{cold['bytes'] / 1e9:.2f} GB, cold {cold['seconds']:.1f} s, from memory {warm['seconds']:.1f} s, "
          f"reading alone {reading:.1f} s, peak {cold['gigabytes']:.2f} GB")
    shutil.rmtree(tmp_path / "layer")
    assert cold["gigabytes"] < 8 and cold["seconds"] < 1.3 * (warm["seconds"] + reading)
