"""Kimi K3 in one readable file: the released model, exact, in plain PyTorch.

Read beside the technical report "Kimi K3: Open Frontier Intelligence" (Kimi Team, Moonshot AI,
July 2026); KDA comes from "Kimi Linear" (arXiv:2510.26692). Mechanisms stand in the report's order
(SiTU-GLU among the primitives before them); equation numbers beyond 1-4 and 14 are by order.
The hard ones are free functions of tensors, definition first; modules hold weights under the
released checkpoint's names and call them.

    §2.1.1  Kimi Delta Attention     kda_log_decay, kda_recurrent, KDA             Eqs. 1-6
    §2.1.2  Gated MLA, no positions  mla_full, mla_absorbed, MLA                   Eq. 7
    §2.2    Attention Residuals      attn_res, attn_res_blocks, attn_res_merge     Eqs. 8-10
    §2.3.1  Stable LatentMoE         Gate, Experts, LatentMoE                      Eq. 11
    §2.3.2  SiTU-GLU                 situ_glu                                      Eq. 12
    §2.3.3  Quantile Balancing       route, quantile_bias, QuantileHistogram       Eqs. 13-14
    §2.4    Vision: MoonViT-V2       MoonViT, Projector, preprocess_image
    model   layers, state, MTP       DecoderLayer, K3, State, MTP
    files   folders and URLs         Checkpoint, mxfp4_decode, load_model, save_checkpoint
    checks  one layer in memory      StreamedK3, trace
    text    tokenizer, chat          load_tokenizer, chat_prompt, generate
    shell   python k3.py --help      params, verify, trace, generate, figures

Symbols, some of which the report uses twice (where a function needs a letter anew, it says so):
    B batch   T tokens   D hidden width (7168)   H heads (96)   dk, dv head widths (128)
    S KDA state [dk, dv]   g log-decay   alpha = exp(g) retention   z decay logits
    beta write strength (the soft caps are `cap`)   C width of the KV latent (512)   V vocabulary
    n routed experts (896)   m tokens routed   k key (top-k is `k` only in the router)   q query
    b router bias   cutoff routing threshold   target = m k / n, an expert's balanced load

Numerics. Weights are what the checkpoint stores (BF16, a few F32) or fp32 masters in training;
activations have the dtype of the embedding's output. In fp32, whatever the model's dtype: norms,
decay and KDA state, short convolution, router, softmax, SiTU, AttnRes scores, losses. Each such
island goes up at its start (`f32`) and back to x.dtype as its last act. float64 stays float64, so
that any part can be held to a float64 run.

Not here: expert and context parallelism, post-training, serving. kernels.py holds fast twins of the
plain paths; without it everything works, slower.
"""
import argparse
import base64
import codecs
import copy
import dataclasses
import functools
import gc
import gzip
import hashlib
import http.client
import json
import math
import mmap
import os
import re
import shutil
import sys
import threading
import time
import typing
import urllib.parse
import urllib.request
import warnings
import zlib
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

os.environ.setdefault("GOMP_SPINCOUNT", "3000")    # waiting CPU threads soon yield a shared core
import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# ---- Config --------------------------------------------------------------------------------------


@dataclass
class K3Config:
    """The released config.json, flattened: K3Config() is the released model.

    Fields carry the released keys' names; linear_num_heads and linear_head_dim are `num_heads` and
    `head_dim` of linear_attn_config. Values marked "or" that are None, False or 0 are ablations.
    kda_layers and full_attn_layers count layers from 1, as the release does, everything else from
    0. Raises ValueError, naming the key, for values that are not built here.
    """
    vocab_size: int = 163840
    hidden_size: int = 7168                        # Table 1
    num_hidden_layers: int = 93                    # Table 1
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 1048576         # the context trained for; nothing depends on it
    # attention: which layer is which
    kda_layers: list | None = None                 # None: all that are not full_attn_layers (69)
    full_attn_layers: list | None = None           # None: every fourth and the last (24)
    # KDA, §2.1.1
    linear_num_heads: int = 96
    linear_head_dim: int = 128
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = -5.0          # g_min of Eq. 5; or None: unbounded softplus
    use_full_rank_gate: bool = True                # Eq. 6; or False: Kimi Linear's low-rank gate
    # gated MLA, §2.1.2
    num_attention_heads: int = 96
    q_lora_rank: int | None = 1536                 # or None: one full query projection
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64                     # named after DeepSeek's; K3 rotates nothing
    v_head_dim: int = 128
    # attention residuals, §2.2
    attn_res_block_size: int | None = 12           # 1: the full form; or None: plain residual
    # feed-forward, §2.3
    intermediate_size: int = 33792                 # of dense layers
    first_k_dense_replace: int = 1
    num_experts: int | None = 896                  # or None: every layer dense
    num_experts_per_token: int = 16
    num_shared_experts: int = 2                    # or 0
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int | None = 3584   # the latent's; or None: experts at full width
    latent_moe_use_norm: bool = True               # or False: the original LatentMoE
    routed_scaling_factor: float = 1.0
    hidden_act: str = "situ"                       # or "silu": SwiGLU
    activation_situ_beta: float = 4.0              # gate cap
    activation_situ_linear_beta: float = 25.0      # up cap
    num_nextn_predict_layers: int = 0              # or 1: the MTP layer, trained but not released
    dtype: str = "bfloat16"                        # of stored tensors, unless always F32 or packed
    # token ids with a meaning
    bos_token_id: int = 163584
    eos_token_id: int = 163586                     # <|end_of_msg|>
    pad_token_id: int = 163839
    media_placeholder_token_id: int = 163605
    # vision, §2.4: from here on the keys of vision_config
    vt_num_hidden_layers: int = 27                 # 0: a text-only model
    vt_hidden_size: int = 1024
    vt_intermediate_size: int = 4096
    vt_num_attention_heads: int = 12
    qkv_hidden_size: int = 1536
    patch_size: int = 14
    merge_kernel_size: tuple = (2, 2)
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    projector_ln_eps: float = 1e-5

    def __post_init__(self):
        for f in dataclasses.fields(self):      # before anything as long as they say is built
            check_kind(f.name, getattr(self, f.name), f.type)
        n, mla, kda = self.num_hidden_layers, self.full_attn_layers, self.kda_layers
        every = range(1, n + 1)
        if mla is None and kda is None:                # three KDA layers, then one MLA layer [§2.1]
            mla = [i for i in every if i % 4 == 0 or i == n]
        self.full_attn_layers = [i for i in every if i not in kda] if mla is None else list(mla)
        self.kda_layers = list(kda or [i for i in every if i not in self.full_attn_layers])
        if self.vt_num_hidden_layers == 0:             # one way of saying that nothing can be seen
            for key in VISION[1:]:
                setattr(self, key, getattr(K3Config, key))
        self.merge_kernel_size = tuple(self.merge_kernel_size)
        self._check_fit()

    def _check_fit(self):
        """Each value against the others, and against what is built here."""
        n, experts, merge = self.num_hidden_layers, self.num_experts, self.merge_kernel_size
        layers = sorted([*self.kda_layers, *self.full_attn_layers])
        floor, turns = self.gate_lower_bound, 4 * self.vt_num_attention_heads
        positive = ("activation_situ_beta", "activation_situ_linear_beta", "rms_norm_eps",
                    "projector_ln_eps")
        for good, key, wanted in (
                (layers == list(range(1, n + 1)), "kda_layers",
                 f"with full_attn_layers each of the layers 1 to {n} once"),
                (self.hidden_act in ("situ", "silu"), "hidden_act", "situ or silu"),
                (self.dtype in ("bfloat16", "float32"), "dtype", "bfloat16 or float32"),
                (floor is None or floor < 0, "gate_lower_bound", "below 0 or null"),
                *((getattr(self, key) > 0, key, "more than 0") for key in positive),
                (self.initializer_range >= 0, "initializer_range", "0 or more"),
                (experts is None or self.num_experts_per_token < experts, "num_experts_per_token",
                 f"less than num_experts = {experts}, since the cutoff is the next score"),
                (self.qkv_hidden_size % turns == 0, "qkv_hidden_size", "a multiple of "
                 "4 vt_num_attention_heads, since rotary pairs alternate between x and y"),
                (self.vt_hidden_size % 2 == 0, "vt_hidden_size", "even"),
                (len(merge) == 2 and max(merge) <= 16, "merge_kernel_size",
                 "two whole numbers up to 16")):
            need(good, key, getattr(self, key), wanted)

    @classmethod
    def tiny(cls, **over):
        """A few hundred thousand parameters, with two AttnRes blocks and a partial one."""
        small = dict(
            vocab_size=320, hidden_size=64, num_hidden_layers=5, linear_num_heads=2,
            linear_head_dim=32, num_attention_heads=2, q_lora_rank=32, kv_lora_rank=32,
            qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, attn_res_block_size=2,
            intermediate_size=128, num_experts=16, num_experts_per_token=4,
            moe_intermediate_size=32, routed_expert_hidden_size=32, bos_token_id=256,
            eos_token_id=257, pad_token_id=266, media_placeholder_token_id=265,
            max_position_embeddings=4096, vt_num_hidden_layers=0,
            vt_hidden_size=64, vt_intermediate_size=128, vt_num_attention_heads=2,
            qkv_hidden_size=64, init_pos_emb_height=8, init_pos_emb_width=8)
        return cls(**{**small, **over})

    @classmethod
    def from_json(cls, source):
        """A released config.json: a path or the parsed dict, nested (text_config) or bare text.

        Raises ValueError, naming the key, for one that is unknown, missing, or not built here.
        The development checkpoints (Kimi-K3-0.40B) know neither gate_lower_bound nor the
        activation_situ keys: without all three, decay is softplus, the caps the report's 4 and 25.
        """
        if not isinstance(source, dict):
            with open(source, "rb") as f:
                source = parse_json(f.read(MAX_JSON), source)
        flat, pairs = {}, [*flatten(source)]
        for key, value in pairs:
            if key in FIELDS:
                first = flat.setdefault(key, value)
                need(first is value or first == value, key, value,
                     f"{show(first)}, as elsewhere in the file")
            elif key in FIXED:
                need(value in FIXED[key], key, value, " or ".join(map(repr, FIXED[key])))
            elif key not in UNUSED and key not in MUST_EQUAL:
                raise ValueError(f"config: unknown key {show(key)}")
        if not SITU_KEYS & flat.keys():
            flat.update(gate_lower_bound=None, activation_situ_beta=4.0,
                        activation_situ_linear_beta=25.0)
        absent = set(FIELDS) - MAY_BE_MISSING - flat.keys()
        if absent.issuperset(VISION):
            flat["vt_num_hidden_layers"], absent = 0, absent.difference(VISION)
        if absent:
            raise ValueError(f"config: {min(absent)} is missing")
        config = cls(**flat)
        for key, value in pairs:
            if like := MUST_EQUAL.get(key):
                need(value == getattr(config, like), key, value, like)
        return config

    def to_json(self):
        """The released nested layout as a dict, which from_json reads back to an equal config."""
        text = dataclasses.asdict(self)
        text["merge_kernel_size"] = list(self.merge_kernel_size)
        vision = {k: text.pop(k) for k in VISION}
        linear = {theirs: text.pop(ours) for ours, theirs in LINEAR.items()}
        outer = {k: text[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        outer["media_placeholder_token_id"] = text.pop("media_placeholder_token_id")
        text.update(
            model_type="kimi_linear", num_key_value_heads=self.num_attention_heads,
            mla_use_nope=True, mla_use_output_gate=True, moe_renormalize=True,
            moe_router_activation_func="sigmoid", topk_method="noaux_tc",
            tie_word_embeddings=False, linear_attn_config=linear)
        out = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
               **outer, "text_config": text}
        if self.vt_num_hidden_layers:
            out["vision_config"] = {**vision, "mm_hidden_size": self.vt_hidden_size,
                                    "text_hidden_size": self.hidden_size}
        return out

    def is_mla(self, i):
        """Whether layer i (0-based) is a gated MLA layer; the config's lists are 1-based."""
        return i + 1 in self.full_attn_layers

    def is_moe(self, i):
        """Whether layer i (0-based) has routed experts."""
        return self.num_experts is not None and i >= self.first_k_dense_replace


def need(good, key, value, wanted):
    """ValueError naming the config's key unless good."""
    if not good:
        raise ValueError(f"config: {key} is {show(value)}, expected {wanted}")


def flatten(config, names={}):
    """(key, value) of a config.json and of the objects nested in it; `names` renames some keys."""
    for key, value in config.items():
        if key in NESTED:
            need(isinstance(value, dict | None), key, value, "an object or null")
            yield from flatten(value or {}, NESTED[key])
        else:
            yield names.get(key, key), value


def check_kind(key, value, kind):
    """One value by itself: its kind, `X | None` where null is a choice, and its range."""
    kind, *null = typing.get_args(kind) or [kind]
    if kind in (list, tuple):
        good = type(value) in (list, tuple) and all(type(i) is int and 0 < i <= 1024 for i in value)
        wanted = "a list of whole numbers from 1 to 1024"
    elif kind is float:
        good, wanted = type(value) in (int, float) and abs(value) < 1e15, "a number"
    elif kind is int:
        low = 0 if key in MAY_BE_ZERO or key.endswith("token_id") else 1
        most = MOST.get(key, 2 ** 24 if key.endswith("token_id") else 2 ** 18)
        good = type(value) is int and low <= value <= most
        wanted = f"a whole number from {low} to {most}"
    else:
        good, wanted = type(value) is kind, "true or false" if kind is bool else "a string"
    need(good or value is None and null, key, value, wanted)


# How from_json and to_json treat the released keys, and what check_kind lets by.
LINEAR = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim", **{key: key for key in (
    "kda_layers", "full_attn_layers", "short_conv_kernel_size", "gate_lower_bound",
    "use_full_rank_gate")}}                            # our field: key of linear_attn_config
NESTED = {"text_config": {}, "vision_config": {},
          "linear_attn_config": {theirs: ours for ours, theirs in LINEAR.items()}}
FIELDS = [f.name for f in dataclasses.fields(K3Config)]
VISION = FIELDS[FIELDS.index("vt_num_hidden_layers"):]
SITU_KEYS = {"gate_lower_bound", "activation_situ_beta", "activation_situ_linear_beta"}
MOST = {"num_hidden_layers": 1024, "vt_num_hidden_layers": 1024, "num_experts": 8192,
        "num_nextn_predict_layers": 1, "patch_size": 1024, "short_conv_kernel_size": 64,
        "vocab_size": 2 ** 24, "max_position_embeddings": 2 ** 40}
MAY_BE_ZERO = {"first_k_dense_replace", "num_shared_experts", "num_nextn_predict_layers",
               "vt_num_hidden_layers", "qk_rope_head_dim"}
MAY_BE_MISSING = {"media_placeholder_token_id", "initializer_range", "max_position_embeddings",
                  "routed_scaling_factor", "dtype"}
MUST_EQUAL = {"num_key_value_heads": "num_attention_heads", "mm_hidden_size": "vt_hidden_size",
              "text_hidden_size": "hidden_size"}
FIXED = {  # keys of the release that this file builds at one value (or several that mean the same)
    "model_type": ("kimi_k3", "kimi_linear"), "moe_layer_freq": (1,), "moe_renormalize": (True,),
    "moe_router_activation_func": ("sigmoid",), "topk_method": ("noaux_tc",),
    "num_expert_group": (1,), "topk_group": (1,), "mla_use_nope": (True,),
    "mla_use_output_gate": (True,), "tie_word_embeddings": (False,), "is_decoder": (False, True),
    "activation_func": ("gelu_pytorch_tanh",), "attn_bias": (False,), "linear_bias": (False,),
    "merge_type": ("sd2_tpool",), "mlp_type": ("mlp2",), "mm_projector_type": ("patchmergerv2",),
    "norm_type": ("rmsnorm",), "patch_embed_proj_bias": (False,),
    "pos_emb_interpolation_mode": ("bilinear",), "pos_emb_type": ("divided_fixed",),
    "projector_hidden_act": ("gelu",)}
UNUSED = set("""
    _attn_implementation _name_or_path add_cross_attention architectures auto_map bad_words_ids
    begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    head_dim id2label ignore_index image_placeholder is_encoder_decoder label2id length_penalty
    max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores prefix problem_type pruned_heads
    quantization_config remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    rope_parameters rope_scaling rope_theta sep_token_id suppress_tokens task_specific_params
    temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p use_bfloat16 use_cache use_grouped_topk""".split())

# ---- Primitives, among them §2.3.2 SiTU-GLU ------------------------------------------------------


def f32(x):
    """x in fp32 for an island of full precision; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x, weight, eps):
    """x / rms(x) over the last axis in fp32, times weight [d] in x's dtype, as released."""
    up = f32(x)
    up = up * torch.rsqrt(up.square().mean(-1, keepdim=True) + eps)
    return up.to(x.dtype) * weight.to(x.dtype)


def l2_norm(x, eps=1e-6):
    """x / |x| over the last axis in fp32; eps stands inside the root, so that zero stays zero."""
    up = f32(x)
    return (up * torch.rsqrt(up.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def situ_glu(gate, up, gate_cap=4.0, up_cap=25.0):
    """SwiGLU with both factors softly capped: |result| <= gate_cap * up_cap.  [§2.3.2, Eq. 12]

    gate, up  [..., I]  pre-activations of any size
    Computed in fp32, returned in gate's dtype. Near 0 it is SwiGLU up to the third order.
    """
    a, u = f32(gate), f32(up)
    capped_silu = gate_cap * torch.tanh(a / gate_cap) * torch.sigmoid(a)
    return (capped_silu * (up_cap * torch.tanh(u / up_cap))).to(gate.dtype)          # Eq. 12


def swiglu(gate, up):
    """SiLU(gate) * up in fp32, returned in gate's dtype."""
    return (F.silu(f32(gate)) * f32(up)).to(gate.dtype)


def twin(name):
    """A name of kernels.py, which is imported only by those who ask for it."""
    import kernels
    return getattr(kernels, name)


def activation(config, kernel="plain"):
    """The config's GLU as a function of (gate, up)."""
    if config.hidden_act == "silu":
        return swiglu
    glu = situ_glu if kernel == "plain" else twin("situ_glu")
    caps = config.activation_situ_beta, config.activation_situ_linear_beta
    return lambda gate, up: glu(gate, up, *caps)


class Module(nn.Module):
    """nn.Module whose tensors named in `fp32` never fall below fp32 when the model is cast."""
    fp32 = ()

    def _apply(self, fn, recurse=True):
        named = [*self.named_parameters(), *self.named_buffers()]
        held = [t for name, t in named if name in self.fp32]
        keep = {id(t) for t in held} | {id(t.grad) for t in held if t.grad is not None}

        def same_or_wider(t):
            new = fn(t)
            return t.to(new.device) if id(t) in keep and new.element_size() < 4 else new
        return super()._apply(same_or_wider, recurse)


class Linear(nn.Linear):
    """y = x W^T, no bias. The weight follows x's dtype: fp32 masters can serve bf16 activations."""

    def __init__(self, d_in, d_out):
        super().__init__(d_in, d_out, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """rms_norm with its weight."""
    kernel = "plain"

    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        norm = rms_norm if self.kernel == "plain" else twin("rms_norm")
        return norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """The dense feed-forward, and the shared experts: two of width 3072 are one of 6144."""

    def __init__(self, config, width):
        super().__init__()
        D, self.act = config.hidden_size, activation(config)
        self.gate_proj, self.up_proj = Linear(D, width), Linear(D, width)
        self.down_proj = Linear(width, D)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))

# ---- §2.1.1 Kimi Delta Attention -----------------------------------------------------------------


def short_conv(x, weight, tail=None):
    """Causal depthwise convolution over time, then SiLU, in fp32.  [§2.1.1]

    x       [B, T, C]    projections
    weight  [C, 1, W] or [C, W]   the last tap multiplies the current token
    tail    [B, W-1, C]  the projections (before convolution and SiLU) just before x; None: zeros
    Returns the activations in x's dtype, and the tail for what follows.
    """
    if weight.dim() != 2 and not (weight.dim() == 3 and weight.shape[1] == 1):
        raise ValueError(f"convolution weight has shape {list(weight.shape)}, "
                         "expected [C, W] or [C, 1, W]")
    T, taps = x.shape[1], f32(weight.flatten(1)).unbind(-1)
    if tail is None:
        tail = x.new_zeros(x.shape[0], len(taps) - 1, x.shape[2])
    assert tail.shape[1] == len(taps) - 1, f"tail {list(tail.shape)} of {len(taps)} taps"
    x = torch.cat([tail, x], 1)
    y = sum(f32(x[:, j:j + T]) * tap for j, tap in enumerate(taps))
    return F.silu(y).to(x.dtype), x[:, T:]


def kda_log_decay(z, A_log, dt_bias, g_min):
    """Decay logits to the log-decay of one step, g = log(alpha).  [§2.1.1, Eq. 5]

    z        [B, T, H, dk]   low-rank decay logits
    A_log    [H]             log of the logit's scale, one per head
    dt_bias  [H dk]          added before the scale
    g_min    the lower bound (-5): g in (g_min, 0); None: Kimi Linear's -exp(A_log) softplus(z),
             g in (-inf, 0)
    Returns g [B, T, H, dk] in fp32.
    """
    z = f32(z) + dt_bias.view(z.shape[-2:])
    A = A_log.to(z.dtype).clamp(max=80).exp().unsqueeze(-1)    # inf * 0 would be NaN
    return -A * F.softplus(z) if g_min is None else g_min * torch.sigmoid(A * z)     # Eq. 5


def kda_recurrent(q, k, v, g, beta, S=None, scale=None):
    """Kimi Delta Attention, token by token: the definition.  [§2.1.1, Eq. 1]

    q, k  [B, T, H, dk]   unit length along dk
    v     [B, T, H, dv]
    g     [B, T, H, dk]   log-decay, alpha = exp(g)
    beta  [B, T, H]       write strength in (0, 1), already through the sigmoid
    S     [B, H, dk, dv]  state before the first token, left as it is; None means zeros
    scale of the query; dk^-0.5 unless given (the released code has it, Eq. 1 does not show it)
    Returns o [B, T, H, dv] in v's dtype and the state after the last token in fp32 (float64 for
    float64). Eq. 1's (I - beta k k^T) Diag(alpha) S + beta k v^T is written here as the decayed
    state plus beta k times what it recalls wrongly: the same sum, without a dk x dk matrix.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    B, T, H, dk = q.shape
    dtype, q, k, v, alpha, beta = v.dtype, f32(q) * scale, f32(k), f32(v), f32(g).exp(), f32(beta)
    S = q.new_zeros(B, H, dk, v.shape[-1]) if S is None else f32(S).clone()
    o = []
    for t in range(T):
        S = alpha[:, t, :, :, None] * S                                    # forget: Diag(alpha) S
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])        # not recalled by k yet
        write = beta[:, t, :, None] * error
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], write)              # Eq. 1
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))                # read: S^T q
    return (torch.stack(o, 1) if o else v).to(dtype), S


class KDA(Module):
    """Kimi Delta Attention, x [B, T, D] after the layer's norm to [B, T, D].  [§2.1.1, Eqs. 1-6]"""
    fp32 = ("A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight",
            "o_norm.weight")
    kernel = "plain"

    def __init__(self, config):
        super().__init__()
        D, H, d = config.hidden_size, config.linear_num_heads, config.linear_head_dim
        P, W, self.H, self.d = H * d, config.short_conv_kernel_size, H, d
        for name in "qkv":
            setattr(self, f"{name}_proj", Linear(D, P))
            setattr(self, f"{name}_conv1d", nn.Conv1d(P, P, W, groups=P, bias=False))
        self.f_a_proj, self.f_b_proj = Linear(D, d), Linear(d, P)          # low-rank decay logits
        self.b_proj = Linear(D, H)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(H)), nn.Parameter(torch.empty(P))
        self.g_min = config.gate_lower_bound
        if config.use_full_rank_gate:
            self.g_proj = Linear(D, P)
        else:
            self.g_a_proj, self.g_b_proj = Linear(D, d), Linear(d, P)
        self.o_norm, self.o_proj = RMSNorm(d, config.rms_norm_eps), Linear(P, D)

    def forward(self, x, state=None):
        q, k, v = (self.heads(self.conv(name, x, state)) for name in "qkv")
        z = self.heads(self.f_b_proj(self.f_a_proj(x)))
        g = kda_log_decay(z, self.A_log, self.dt_bias, self.g_min)
        beta = torch.sigmoid(f32(self.b_proj(x)))
        unit = l2_norm if self.kernel == "plain" else twin("l2_norm")
        core = kda_recurrent if self.kernel == "plain" else twin("kda_chunk")
        o, S = core(unit(q), unit(k), v, g, beta, state and state["S"])
        if state is not None:
            state["S"] = S
        gate = self.g_proj(x) if hasattr(self, "g_proj") else self.g_b_proj(self.g_a_proj(x))
        gate = torch.sigmoid(f32(self.heads(gate)))
        o = self.o_norm(f32(o)) * gate                                     # Eq. 6
        return self.o_proj(o.flatten(2).to(x.dtype))

    def heads(self, y):
        return y.unflatten(-1, (self.H, self.d))

    def conv(self, name, x, state):
        proj, conv = getattr(self, f"{name}_proj"), getattr(self, f"{name}_conv1d")
        convolve = short_conv if self.kernel == "plain" else twin("short_conv")
        y, tail = convolve(proj(x), conv.weight, state and state[f"conv_{name}"])
        if state is not None:
            state[f"conv_{name}"] = tail.clone()       # a view would keep all of x
        return y

    def init_state(self, B, dtype, device, capacity=None):
        """S and, for q, k and v each, the convolution's last inputs: a size that never grows."""
        W, P = self.q_conv1d.weight.shape[-1], self.H * self.d
        tails = torch.zeros(3, B, W - 1, P, dtype=dtype, device=device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        S = torch.zeros(B, self.H, self.d, self.d, dtype=wide, device=device)
        return {"S": S, "conv_q": tails[0], "conv_k": tails[1], "conv_v": tails[2]}

# ---- §2.1.2 Gated MLA ----------------------------------------------------------------------------


def seen(T, S, past, device):
    """Which of S keys each of T queries sees, [T, S] bool: query t is position past + t.

    past None: S - T, the queries are the last. A tensor: a count that only the device knows.
    """
    past = S - T if past is None else past
    return torch.arange(S, device=device) <= past + torch.arange(T, device=device).unsqueeze(-1)


def causal_softmax(scores, past=None):
    """Softmax of fp32 scores [..., T, S] over the keys each query may see."""
    mask = seen(*scores.shape[-2:], past, scores.device)
    return scores.masked_fill(~mask, -math.inf).softmax(-1)


def keys_values(latent, W, H, v_dim):
    """k [B, S, H, nope + rope] and v [B, S, H, v_dim] of every head out of the cached latents."""
    C, width = W.shape[1], W.shape[0] // H
    c, k_rope = latent[..., :C], latent[..., C:]
    kv = F.linear(c, W.to(c.dtype)).unflatten(-1, (H, width))
    k_nope, v = kv.split([width - v_dim, v_dim], -1)
    return torch.cat([k_nope, k_rope.unsqueeze(2).expand(-1, -1, H, -1)], -1), v


def mla_full(q, latent, W, v_dim, past=None):
    """Attention with keys and values of every head written out: the definition.  [§2.1.2]

    q       [B, T, H, nope + rope]   queries
    latent  [B, S, C + rope]         normed KV latent, then the "rope" key that all heads share;
                                     nothing is rotated
    W       [H (nope + v_dim), C]    kv_b_proj: each head's key rows, then its value rows
    past    positions before the first query; None: S - T
    Returns o [B, T, H, v_dim] in fp32, as the report keeps the attention output in training.
    """
    k, v = keys_values(latent, W, q.shape[2], v_dim)
    scores = torch.einsum("bthd,bshd->bhts", f32(q), f32(k)) * q.shape[-1] ** -0.5
    return torch.einsum("bhts,bshv->bthv", causal_softmax(scores, past), f32(v))


def mla_absorbed(q, latent, W, v_dim, past=None):
    """mla_full without writing out a key or value: W moves onto query and output.  [§2.1.2]

    Per head, q . (W_k c) = (W_k^T q) . c and sum p (W_v c) = W_v sum p c, so attention runs over
    the 576-wide latents that the cache holds. A score costs C products instead of nope: for
    decoding, where reading the cache is the price.
    """
    H, C = q.shape[2], W.shape[1]
    nope, up = W.shape[0] // H - v_dim, f32(q)
    W_k, W_v = W.to(up.dtype).unflatten(0, (H, -1)).split([nope, v_dim], 1)    # [H, ., C]
    q_latent = torch.einsum("bthd,hdc->bthc", up[..., :nope], W_k)
    q_latent = torch.cat([q_latent, up[..., nope:]], -1)       # [B, T, H, C + rope], as the latents
    scores = torch.einsum("bthc,bsc->bhts", q_latent, f32(latent)) * q.shape[-1] ** -0.5
    p, c = causal_softmax(scores, past), f32(latent[..., :C])
    return torch.einsum("bhts,bsc,hvc->bthv", p, c, W_v)


def mla_fused(q, latent, W, v_dim, past=None):
    """mla_full through PyTorch's fused attention, which never holds the [T, S] scores.

    With gradients on, inputs go up first, so that the output is fp32 as the report asks.
    """
    k, v = keys_values(latent, W, q.shape[2], v_dim)
    q, k, v = ((f32(x) if torch.is_grad_enabled() else x).transpose(1, 2) for x in (q, k, v))
    T, S = q.shape[2], k.shape[2]
    whole = past is None and T == S
    mask = None if whole else seen(T, S, past, q.device)
    if not v.is_cuda:                  # where only values as wide as the keys take the fused way
        v = F.pad(v, (0, max(0, k.shape[-1] - v_dim)))
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=whole)
    return o[..., :v_dim].transpose(1, 2)


class MLA(nn.Module):
    """Multi-head latent attention with a full-rank output gate, no positions.  [§2.1.2, Eq. 7]

    x [B, T, D], after the layer's norm, to [B, T, D]. The cache holds C + rope = 576 values a
    position.
    """
    kernel = "plain"

    def __init__(self, config):
        super().__init__()
        D, H, C = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        nope, rope, v_dim, rank = (config.qk_nope_head_dim, config.qk_rope_head_dim,
                                   config.v_head_dim, config.q_lora_rank)
        self.H, self.C, self.v_dim, self.rope = H, C, v_dim, rope
        eps = 1e-6                                     # of these two norms, unlike all the others
        if rank is None:
            self.q_proj = Linear(D, H * (nope + rope))
        else:
            self.q_a_proj, self.q_b_proj = Linear(D, rank), Linear(rank, H * (nope + rope))
            self.q_a_layernorm = RMSNorm(rank, eps)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = Linear(D, C + rope), RMSNorm(C, eps)
        self.kv_b_proj = Linear(C, H * (nope + v_dim))
        self.g_proj, self.o_proj = Linear(D, H * v_dim), Linear(H * v_dim, D)

    def project(self, x):
        """Queries [B, T, H, nope + rope] and the latents [B, T, C + rope] of keys and values."""
        if hasattr(self, "q_proj"):
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        c, k_rope = self.kv_a_proj_with_mqa(x).split([self.C, self.rope], -1)
        return q.unflatten(-1, (self.H, -1)), torch.cat([self.kv_a_layernorm(c), k_rope], -1)

    def forward(self, x, state=None):
        (q, latent), W = self.project(x), self.kv_b_proj.weight
        past = state and state["at"]
        if state is not None:
            latent = self.remember(state, latent)
        decoding = state is not None and x.shape[1] == 1
        attend = mla_absorbed if decoding else mla_fused if self.kernel == "fast" else mla_full
        o = f32(attend(q, latent, W, self.v_dim, past).flatten(2))
        o = o * torch.sigmoid(f32(self.g_proj(x)))                              # Eq. 7
        return self.o_proj(o.to(x.dtype))

    def remember(self, state, latent):
        """All latents so far: the cache grows, or, if it has a fixed size, is written at `at`."""
        if state["at"] is None:
            state["latent"] = torch.cat([state["latent"], latent], 1)
        else:
            to = state["at"] + torch.arange(latent.shape[1], device=latent.device)
            state["latent"].index_copy_(1, to, latent)
            state["at"] = state["at"] + latent.shape[1]
        return state["latent"]

    def init_state(self, B, dtype, device, capacity=None):
        """An empty cache; `at`, where a fixed-size one ends, is on the device for CUDA graphs."""
        at = None if capacity is None else torch.zeros((), dtype=torch.int64, device=device)
        size = B, capacity or 0, self.C + self.rope
        return {"latent": torch.zeros(size, dtype=dtype, device=device), "at": at}

# ---- §2.2 Attention Residuals --------------------------------------------------------------------


def attn_res_scores(sources, query, norm_weight, eps):
    """w . RMSNorm(source): one score a source.  [§2.2, Eq. 8]

    sources [..., n, D]; query and norm_weight [D] give [..., n], of several mixes [mixes, D] give
    [..., n, mixes].
    """
    rms = torch.rsqrt(sources.square().mean(-1, keepdim=True) + eps)
    w = (f32(query) * f32(norm_weight)).to(sources.dtype)
    return (sources * rms) @ w.transpose(0, -1)                    # Eq. 8, in the exponent


def attn_res(sources, query, norm_weight, eps):
    """Softmax attention over depth: a position mixes what came before there.  [§2.2, Eqs. 8-9]

    sources      [..., n, D]  full form: the embedding and every earlier layer's output;
                              block form (Eq. 10): the stored blocks, then the running sum
    query        [D]          the layer's pseudo-query w; zeros give the mean
    norm_weight  [D]          of the RMSNorm that keeps large sources from winning by size
    Returns [..., D] in the sources' dtype: the values are the raw sources.
    """
    up = f32(sources)
    p = attn_res_scores(up, query, norm_weight, eps).softmax(-1)
    return (p.unsqueeze(-1) * up).sum(-2).to(sources.dtype)        # Eq. 9


def attn_res_blocks(blocks, queries, norm_weights, eps):
    """Phase one: the stored blocks' part of many mixes at once, each block read once.  [§2.2]

    blocks [..., n, D]; queries, norm_weights [mixes, D], those of the 24 mixes between storing one
    block and the next, which all see the same blocks. Returns each mix's largest score `top`
    [..., mixes], the `total` of exp(score - top) [..., mixes], and the sources' sum under these
    weights [..., mixes, D].
    """
    up = f32(blocks)
    scores = attn_res_scores(up, queries, norm_weights, eps).transpose(-1, -2)   # [..., mixes, n]
    top = scores.amax(-1)
    e = torch.exp(scores - top.unsqueeze(-1))
    return top, e.sum(-1), e @ up


def attn_res_merge(part, i, running, query, norm_weight, eps):
    """Phase two: mix i of `part` completed by the running sum [..., D]; equals attn_res.  [§2.2]

    By online softmax: both parts are rescaled to the larger of their top scores, then added.
    """
    top, total, value, up = part[0][..., i], part[1][..., i], part[2][..., i, :], f32(running)
    score = attn_res_scores(up.unsqueeze(-2), query, norm_weight, eps).squeeze(-1)
    new = torch.maximum(top, score)
    old, own = torch.exp(top - new), torch.exp(score - new)
    mixed = old.unsqueeze(-1) * value + own.unsqueeze(-1) * up
    return (mixed / (old * total + own).unsqueeze(-1)).to(running.dtype)

# ---- §2.3.1 Stable LatentMoE: router, experts ----------------------------------------------------


def route(scores, bias, k):
    """Top-k routing whose bias chooses but does not weigh.  [§2.3.3, Eq. 13]

    scores  [m, n]  sigmoid router scores in (0, 1), fp32
    bias    [n]     balancing bias b
    Returns experts [m, k] int64, weights [m, k] (the chosen raw scores over their sum) and cutoff
    [m]: the (k+1)-th largest biased score, which an expert must exceed to be chosen. Raises
    ValueError unless k < n.
    """
    if k >= scores.shape[-1]:
        raise ValueError(f"top-{k} of {scores.shape[-1]} experts leaves no cutoff: "
                         "k must be smaller")
    top = (scores + bias).topk(k + 1)
    experts = top.indices[:, :k]
    return experts, mixture_weights(scores, experts), top.values[:, k]


def mixture_weights(scores, experts):
    """p of Eq. 13: the chosen experts' raw scores over their sum; 0 if all underflowed."""
    chosen = scores.gather(-1, experts)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20)                      # Eq. 13


class Gate(Module):
    """The router's scores: sigmoid(W x) in fp32. Its bias is a buffer: balanced, not trained."""
    fp32 = ("weight", "e_score_correction_bias")

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x):
        x = f32(x)
        return torch.sigmoid(F.linear(x, self.weight.to(x.dtype)))


def experts_loop(x, experts, weights, w1, w3, w2, act=situ_glu):
    """The routed experts' weighted sum, one expert after another: the definition.  [§2.3.1]

    x [m, L] latents; experts, weights [m, k]; w1 (gate), w3 (up) [n, I, L]; w2 (down) [n, L, I]
    Returns [m, L] in x's dtype, summed in fp32. Only experts that some token chose are touched.
    """
    y = torch.zeros_like(f32(x))
    for e in experts.unique().tolist():
        token, slot = torch.where(experts == e)
        gate, up = F.linear(x[token], w1[e].to(x.dtype)), F.linear(x[token], w3[e].to(x.dtype))
        out = f32(F.linear(act(gate, up), w2[e].to(x.dtype)))
        y = y.index_add(0, token, out * weights[token, slot, None].to(y.dtype))
    return y.to(x.dtype)


class Experts(nn.Module):
    """All routed experts of a layer, stacked: w1 (gate), w3 (up) [n, I, L], w2 (down) [n, L, I].

    rounded  compute with what mxfp4_round makes of them: quantisation-aware training
    """
    kernel, rounded = "plain", False

    def __init__(self, config):
        super().__init__()
        n, I = config.num_experts, config.moe_intermediate_size
        L = config.routed_expert_hidden_size or config.hidden_size
        self.w1, self.w3 = nn.Parameter(torch.empty(n, I, L)), nn.Parameter(torch.empty(n, I, L))
        self.w2, self.act = nn.Parameter(torch.empty(n, L, I)), activation(config)

    def forward(self, x, experts, weights):
        run = experts_loop if self.kernel == "plain" else twin("experts_grouped")
        matrices = self.w1, self.w3, self.w2
        if self.rounded:
            matrices = map(mxfp4_round, matrices)
        return run(x, experts, weights, *matrices, self.act)


class LatentMoE(nn.Module):
    """Shared experts at full width plus routed ones in a latent space.  [§2.3.1, Eq. 11]

    x [B, T, D], after the layer's norm, to [B, T, D]. The norm between the routed sum and the
    up-projection, SiTU-GLU and Quantile Balancing are what makes it "stable". While training under
    a Balancer, `load` counts tokens per expert and `balance` collects what the next bias needs;
    nothing else ever feeds them.
    """

    def __init__(self, config):
        super().__init__()
        D, L = config.hidden_size, config.routed_expert_hidden_size
        self.k, self.scale = config.num_experts_per_token, config.routed_scaling_factor
        self.gate, self.experts, self.load, self.balance = Gate(config), Experts(config), None, None
        if L is not None:
            self.routed_expert_down_proj, self.routed_expert_up_proj = Linear(D, L), Linear(L, D)
            if config.latent_moe_use_norm:
                self.routed_expert_norm = RMSNorm(L, config.rms_norm_eps)
        if config.num_shared_experts:
            width = config.num_shared_experts * config.moe_intermediate_size
            self.shared_experts = MLP(config, width)

    def forward(self, x, valid=None, note=None, forced=None):
        """The routed sum, led back to full width, plus the shared experts' output.

        valid   [B, T] bool: tokens that count for balancing; None: all
        note    a dict for topk_idx, topk_weight and gap, by which the last chosen beat the next
        forced  [B, T, k]: expert ids instead of the router's own choice, under its weights
        """
        flat, bias = x.flatten(0, 1), self.gate.e_score_correction_bias
        scores = self.gate(flat)
        experts, weights, cutoff = route(scores, bias, self.k)
        if forced is not None:
            experts = forced.flatten(0, 1).to(x.device)
            weights = mixture_weights(scores, experts)
        if self.training and torch.is_grad_enabled() and self.load is not None:
            self.count(scores.detach(), experts, cutoff.detach(), valid)
        if note is not None:
            idx, order = experts.sort(-1)
            gap = (scores + bias).gather(-1, experts).amin(-1) - cutoff
            found = {"topk_idx": idx, "topk_weight": weights.gather(-1, order), "gap": gap}
            note.update({name: t.unflatten(0, x.shape[:2]) for name, t in found.items()})
        u = self.routed_expert_down_proj(flat) if hasattr(self, "routed_expert_down_proj") else flat
        u = self.experts(u, experts, weights * self.scale)
        if hasattr(self, "routed_expert_norm"):
            u = self.routed_expert_norm(u)
        if hasattr(self, "routed_expert_up_proj"):
            u = self.routed_expert_up_proj(u)
        y = u.view_as(x)
        return y + self.shared_experts(x) if hasattr(self, "shared_experts") else y     # Eq. 11

    def count(self, scores, experts, cutoff, valid):
        valid = torch.ones_like(cutoff) if valid is None else valid.flatten().to(cutoff.dtype)
        each = valid.to(self.load.dtype).unsqueeze(-1).expand_as(experts)
        self.load.scatter_add_(0, experts.flatten(), each.flatten())
        if self.balance is not None:
            self.balance.add(scores, cutoff, valid)

# ---- §2.3.3 Quantile Balancing -------------------------------------------------------------------


def quantile_bias(scores, cutoff, k, valid=None):
    """The bias that gives every expert its target load, cutoffs held fixed.  [§2.3.3, Eq. 14]

    scores [m, n], cutoff [m] as route uses and returns them, over the whole batch; valid [m]: 0
    leaves a token out. Returns b [n], mean-centred. An expert is chosen where its margin
    s_ij - cutoff_i exceeds -b_j, so with target = m k / n, -b_j before centring is the
    (floor(target) + 1)-th largest margin. No token at all gives zeros.
    """
    m, n = scores.shape
    if m == 0:
        return scores.new_zeros(n)
    valid = torch.ones_like(cutoff) if valid is None else valid
    margin = scores - cutoff.unsqueeze(-1)
    margin = torch.where(valid.unsqueeze(-1) > 0, margin, -math.inf)
    rank = (valid.sum() * k / n).floor().long()
    b = -margin.sort(0, descending=True).values.gather(0, rank.expand(1, n))[0]         # Eq. 14
    return torch.where(valid.sum() > 0, b - b.mean(), torch.zeros_like(b))


class QuantileHistogram:
    """Eq. 14 from counts, which add up over micro-batches and ranks.  [§2.3.3, App. D]

    r = cutoff - score is the bias at which an expert would just be chosen by a token. Each (token,
    expert) falls in one of `bins` bins over [min b - 1, max b + 1], b being the bias in use: scores
    lie in (0, 1), so no r can lie outside. finish() returns the target-th smallest r, interpolated
    inside its bin and mean-centred. (Eq. 14 proper is one order statistic further: the (target +
    1)-th largest margin is the (target + 1)-th smallest r.)
    ema > 0 averages the estimated quantiles over steps, newest with weight 1 - ema.
    """

    def __init__(self, num_experts, k, bins=1000, ema=0.0):
        self.n, self.k, self.bins, self.ema, self.average = num_experts, k, bins, ema, None

    def start(self, bias):
        """Before a step: empty bins around the bias [n] that the step will route with."""
        self.bias, self.low = bias.clone(), bias.min() - 1
        self.span = bias.max() - bias.min() + 2
        self.counts = torch.zeros(self.n, self.bins, dtype=torch.int32, device=bias.device)
        self.pooled = False

    def add(self, scores, cutoff, valid=None):
        """Count scores [m, n] against cutoff [m], once per micro-batch; valid [m]: 0 leaves out."""
        r = cutoff.unsqueeze(-1) - scores
        at = ((r - self.low) / self.span * self.bins).long()
        at = at.clamp(0, self.bins - 1)                # the upper edge belongs to the last bin
        at += torch.arange(self.n, device=at.device) * self.bins       # into the flattened counts
        one = torch.ones_like(cutoff) if valid is None else valid
        one = one.to(self.counts.dtype).unsqueeze(-1).expand_as(at)
        self.counts.view(-1).scatter_add_(0, at.flatten(), one.flatten())

    def finish(self):
        """After the step: pool the counts over ranks (unless Balancer did); the next bias [n]."""
        if not self.pooled:
            pool([self.counts])
        upto = self.counts.cumsum(-1)
        m = upto[:, -1:]                               # tokens, the same for every expert
        target = m.to(self.bias.dtype) * self.k / self.n
        at = torch.searchsorted(upto, target.ceil().to(upto.dtype)).clamp(max=self.bins - 1)
        inside = self.counts.gather(-1, at)
        before = upto.gather(-1, at) - inside
        fraction = ((target - before) / inside.clamp(min=1)).clamp(0, 1)
        b = (self.low + (at + fraction) / self.bins * self.span)[:, 0]          # App. D
        some = m[:, 0].amin() > 0                      # without a token all stays as it was
        if self.ema:
            old = b if self.average is None else self.average
            b = self.average = torch.where(some, old.lerp(b, 1 - self.ema), old)
        return torch.where(some, b - b.mean(), self.bias)


class ExactQuantile:
    """quantile_bias under QuantileHistogram's calls: keeps all scores, gathers them over ranks."""

    def __init__(self, num_experts, k):
        self.k = k

    def start(self, bias):
        self.bias, self.parts = bias.clone(), []

    def add(self, scores, cutoff, valid=None):
        valid = torch.ones_like(cutoff) if valid is None else valid
        self.parts.append(torch.cat([scores, cutoff.unsqueeze(-1), valid.unsqueeze(-1)], -1))

    def finish(self):
        if not self.parts:
            return self.bias
        mine = torch.cat(self.parts)
        if ranks() > 1:
            parts = [torch.empty_like(mine) for _ in range(ranks())]   # all of the same size
            dist.all_gather(parts, mine)
            mine = torch.cat(parts)
        scores, cutoff, valid = mine[:, :-2], mine[:, -2], mine[:, -1]
        new = quantile_bias(scores, cutoff, self.k, valid)
        return torch.where(valid.sum() > 0, new, self.bias)


def sign_bias(bias, load, gamma):
    """The fixed-step rule that Eq. 14 replaces: b + gamma sign(mean load - load).  [§2.3.3]"""
    return bias + gamma * torch.sign(load.mean() - load)


def balanced_assignment(scores, k, steps):
    """The balanced assignment of greatest total score, by its dual.  [§2.3.3, App. C, Alg. 1]

    scores [m, n]. Each step sets alpha to the (k+1)-th largest of s - beta per token, then beta to
    the (m k / n + 1)-th largest of s - alpha per expert: exact minimisation over each in turn.
    Returns experts [m, k], the top-k of s - beta, and beta [n], which is minus the router's bias.
    """
    m, n = scores.shape
    beta, rank = scores.new_zeros(n), min(m * k // n, m - 1)
    for _ in range(steps):
        alpha = (scores - beta).topk(k + 1).values[:, k]
        beta = (scores - alpha.unsqueeze(-1)).sort(0, descending=True).values[rank]
    return (scores - beta).topk(k).indices, beta


def ranks():
    """How many processes train together; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def pool(tensors):
    """Sum the tensors over ranks in place, with one all-reduce for all of them."""
    if ranks() > 1:
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(part.view_as(t))


class Balancer:
    """Runs one balancing rule over all MoE layers of a model while it trains.  [§2.3.3]

    start() before a step's forward passes, finish() after them: the new biases serve the next step,
    so no batch is routed by a bias made from itself. Evaluation and padding never count.
    method: "qb" (histogram), "qb-exact", "sign" (steps of gamma) or "none"; ValueError for others.
    """

    def __init__(self, model, method="qb", bins=1000, gamma=1e-3, ema=0.0):
        if method not in ("qb", "qb-exact", "sign", "none"):
            raise ValueError(f"balancing method {method!r}: there are qb, qb-exact, sign and none")
        self.layers, self.method, self.gamma = model.moe_layers(), method, gamma
        for moe in self.layers:
            bias = moe.gate.e_score_correction_bias
            moe.load = torch.zeros(len(bias), dtype=torch.int32, device=bias.device)
            moe.balance = (QuantileHistogram(len(bias), moe.k, bins, ema) if method == "qb" else
                           ExactQuantile(len(bias), moe.k) if method == "qb-exact" else None)

    def start(self):
        for moe in self.layers:
            moe.load.zero_()
            if moe.balance is not None:
                moe.balance.start(moe.gate.e_score_correction_bias)

    @torch.no_grad()
    def finish(self):
        counts = [moe.load for moe in self.layers]
        if self.method == "qb":
            counts += [moe.balance.counts for moe in self.layers]
        pool(counts)
        for moe in self.layers:
            bias = moe.gate.e_score_correction_bias
            if self.method == "sign":
                bias.copy_(sign_bias(bias, moe.load.to(bias.dtype), self.gamma))
            elif moe.balance is not None:
                moe.balance.pooled = True
                bias.copy_(moe.balance.finish())

    def imbalance(self):
        """Largest load over the mean, one number a MoE layer, as a tensor: 1 is perfect balance."""
        load = torch.stack([moe.load for moe in self.layers]).float()
        return load.amax(-1) / load.mean(-1)

# ---- §2.4 Vision: MoonViT-V2 ---------------------------------------------------------------------

VISION_EPS = 1.1920929e-07     # fp32's machine epsilon; the release leaves eps to torch's default
PATCH = 14                     # pixels, of preprocess_image; the tower itself asks its config
MAX_GRID = 512                 # patches along a side: the released rotary table ends there
MAX_PATCHES = 65536            # the released preprocessor's budget for one image


def resize_grid(grid, h, w):
    """Learned positions [H, W, D] at h x w: bilinear between half-pixel centres, no antialias."""
    if (h, w) == grid.shape[:2]:
        return grid
    channels_first = f32(grid).permute(2, 0, 1)[None]
    return F.interpolate(channels_first, (h, w), mode="bilinear")[0].permute(1, 2, 0)


def time_code(t, dim, device=None):
    """Fixed code of the frame number, [t, dim]: a sine half, then a cosine half."""
    rate = 10000.0 ** (-torch.arange(dim // 2, device=device) / (dim // 2))
    angle = torch.arange(t, device=device)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], -1)


def rotary_angles(t, h, w, dim, device=None):
    """Angles of the dim/2 channel pairs at each patch, [t*h*w, dim/2]; every frame has the same.

    Pairs 2i and 2i+1 share the rate 10000^(-4i/dim): the even one turns with x, the odd with y."""
    rate = 10000.0 ** (-torch.arange(0, dim, 4, device=device) / dim)
    y, x = (torch.arange(n, device=device) for n in (h, w))
    xy = torch.stack([x.expand(h, w), y[:, None].expand(h, w)], -1)
    angle = xy[:, :, None] * rate[:, None]                             # [h, w, dim/4, 2]
    return angle.reshape(h * w, dim // 2).repeat(t, 1)


def rotate(x, angle):
    """Turn neighbouring channels of x [n, heads, dim] by angle [n, dim/2], in fp32."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


def attend_items(q, k, v, lengths):
    """Full attention inside each item; q, k, v and result [sum of lengths, heads, dim].

    Neighbours of equal length share a call. Memory is at most the sum of squared lengths; a
    mask over everything would need the square of their sum."""
    runs = [(len(list(run)), n) for n, run in groupby(lengths)]
    pieces = zip(*(z.split([count * n for count, n in runs]) for z in (q, k, v)))
    out = []
    for run, qkv in zip(runs, pieces):
        o = F.scaled_dot_product_attention(*(z.unflatten(0, run).transpose(1, 2) for z in qkv))
        out.append(o.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)


class PatchEmbed(nn.Module):
    """Patches [N, 3, p, p] to [N, vt_hidden_size], plus where (in a video, also when) each is."""

    def __init__(self, c):
        super().__init__()
        shape = (c.init_pos_emb_height, c.init_pos_emb_width, c.vt_hidden_size)
        self.proj = nn.Conv2d(3, c.vt_hidden_size, c.patch_size, bias=False)
        self.pos_emb = nn.Module()
        self.pos_emb.weight = nn.Parameter(torch.empty(shape))

    def position(self, t, h, w):
        place = resize_grid(self.pos_emb.weight, h, w).flatten(0, 1)
        if t == 1:                                     # an image has no time code, not even of 0
            return place
        return (place + time_code(t, place.shape[-1], place.device)[:, None]).flatten(0, 1)

    def forward(self, pixel_values, grids):
        kernel = self.proj.weight.flatten(1).to(pixel_values.dtype)
        x = F.linear(pixel_values.flatten(1), kernel)  # the convolution: patches are already cut
        position = {grid: self.position(*grid) for grid in set(grids)}
        return x + torch.cat([position[grid] for grid in grids]).to(x.dtype)


class VisionBlock(nn.Module):
    """Pre-norm block without biases: attention with 2-D rotary positions, then an MLP."""

    def __init__(self, c):
        super().__init__()
        dim, inner, wide = c.vt_hidden_size, c.qkv_hidden_size, c.vt_intermediate_size
        self.heads = c.vt_num_attention_heads
        self.norm0, self.norm1 = RMSNorm(dim, VISION_EPS), RMSNorm(dim, VISION_EPS)
        self.wqkv, self.wo = Linear(dim, 3 * inner), Linear(inner, dim)
        self.mlp = nn.ModuleDict({"fc0": Linear(dim, wide), "fc1": Linear(wide, dim)})

    def forward(self, x, angle, lengths):
        qkv = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1))  # all q, all k, all v
        q, k, v = qkv.unbind(1)
        x = x + self.wo(attend_items(rotate(q, angle), rotate(k, angle), v, lengths).flatten(1))
        return x + self.mlp.fc1(F.gelu(self.mlp.fc0(self.norm1(x)), approximate="tanh"))


class MoonViT(nn.Module):
    """The vision tower.  [§2.4]

    pixel_values  (N, 3, p, p)  patches in [-1, 1], item after item, in each frame by frame, row
                                by row; computed in their dtype
    grids         list of (t, h, w) in patches, one an item, as check_grids returns it
    Returns (N, vt_hidden_size), after the final norm.
    Differs: the report factorises a video's attention into spatial and temporal; the released
    code, and this, lets all t*h*w patches of an item attend to each other. For images, t = 1,
    both are the same.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(
            VisionBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.encoder.final_layernorm = RMSNorm(config.vt_hidden_size, VISION_EPS)

    def forward(self, pixel_values, grids, record=None):
        record = {} if record is None else record
        x = record["patch_embed"] = self.patch_embed(pixel_values, grids)
        dim = self.config.qkv_hidden_size // self.config.vt_num_attention_heads
        angle = torch.cat([rotary_angles(*grid, dim, x.device) for grid in grids])
        for block in self.encoder.blocks:
            x = block(x, angle, [math.prod(grid) for grid in grids])
        x = record["encoder"] = self.encoder.final_layernorm(x)
        return x


class Projector(nn.Module):
    """Merged patches [tokens, 4, vt_hidden_size] to the text model's width [tokens, D].  [§2.4]"""

    def __init__(self, c):
        super().__init__()
        wide = c.vt_hidden_size * math.prod(c.merge_kernel_size)
        self.proj = nn.Sequential(Linear(wide, wide), nn.GELU(), Linear(wide, c.hidden_size))
        self.post_norm = RMSNorm(c.hidden_size, c.projector_ln_eps)

    def forward(self, x):
        return self.post_norm(self.proj(x.flatten(-2)))


def check_grids(pixel_values, grid_thws, config):
    """grid_thws [items, 3] as a list of (t, h, w); ValueError unless patches and config agree."""
    p, (kh, kw), frames = config.patch_size, config.merge_kernel_size, config.init_pos_emb_time
    if grid_thws is None or not isinstance(pixel_values, torch.Tensor):
        raise ValueError("pixel_values, a tensor, and grid_thws go together")
    grid_thws = torch.as_tensor(grid_thws)
    if grid_thws.dim() != 2 or grid_thws.shape[1] != 3 or grid_thws.is_floating_point():
        raise ValueError("grid_thws must be one row of whole numbers (t, h, w) an item, not "
                         f"{grid_thws.dtype} {list(grid_thws.shape)}")
    grids = [tuple(row) for row in grid_thws.tolist()]
    for t, h, w in grids:
        if not (0 < t <= frames and 0 < h <= MAX_GRID and 0 < w <= MAX_GRID) or h % kh or w % kw:
            raise ValueError(f"grid (t, h, w) = {t, h, w}: t must be 1 to {frames}, h and w at "
                             f"most {MAX_GRID} and multiples of {kh} and {kw}")
    total = sum(map(math.prod, grids))
    if total == 0 or pixel_values.shape != (total, 3, p, p):
        raise ValueError(f"grid_thws wants pixel_values [{total}, 3, {p}, {p}], found "
                         f"{list(pixel_values.shape)}")
    return grids


def merge_patches(x, grid, kernel):
    """Patches of items of one grid [n*t*h*w, D] to [n*tokens, 4, D]: mean over frames, then 2 x 2
    neighbours, the groups row by row and the four of a group too."""
    (t, h, w), (kh, kw) = grid, kernel
    x = x.unflatten(0, (-1, t, h // kh, kh, w // kw, kw)).mean(1)
    return x.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def expand_placeholders(input_ids, lengths, placeholder):
    """Repeat each media placeholder in input_ids [B, T] as often as its item has tokens: [B, T'].

    lengths, one an item, in reading order. Raises ValueError if their number is not that of the
    placeholders, or if rows grow to unequal lengths."""
    is_media = input_ids == placeholder
    if (found := int(is_media.sum())) != len(lengths):
        raise ValueError(f"{found} media placeholders in the text, but {len(lengths)} media items")
    times = torch.ones_like(input_ids)
    times[is_media] = torch.tensor(lengths, dtype=times.dtype, device=times.device)
    if len(rows := set(times.sum(1).tolist())) > 1:
        raise ValueError(f"rows of {sorted(rows)} tokens once their media are in: "
                         "they must be equal")
    return input_ids.flatten().repeat_interleave(times.flatten()).view(len(input_ids), -1)


def image_size(w, h):
    """The size to which a w x h image is scaled down to fit the tower; padding comes after.

    In the release's own floating point: exact arithmetic now and then gives a pixel more, but
    never another number of patches."""
    side, patches = MAX_GRID * PATCH, max(1, w // PATCH) * max(1, h // PATCH)
    scale = min(1, math.sqrt(MAX_PATCHES / patches), side / w, side / h)
    return min(max(1, int(w * scale)), side), min(max(1, int(h * scale)), side)


def image_prompt(w, h):
    """The prompt text for an image; w x h is its size before scaling."""
    return f"<|media_begin|>image {w}x{h}<|media_content|><|media_pad|><|media_end|>"


def open_image(path):
    """The file's picture; ValueError naming a file that is none, is cut short or is a bomb."""
    from matplotlib.image import PIL                   # the library matplotlib reads pictures with

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            with PIL.Image.open(path, formats=("PNG", "JPEG", "WEBP", "GIF", "BMP")) as image:
                image.load()
                return image
    except Exception as e:                             # decoders raise half a dozen unrelated types
        raise ValueError(f"cannot read {path} as an image: {e}") from e


def to_rgb(image):
    """8-bit RGB, transparency laid on white, of a Pillow image or an array: [H, W], [H, W, 3] or
    [H, W, 4], of uint8, uint16 or floats in [0, 1]; ValueError for others."""
    from matplotlib.image import PIL

    if getattr(image, "mode", "I")[0] in "IF":         # an array, or grey too deep for convert
        a = np.asarray(image)
        top = {"u1": 255, "u2": 65535, "f2": 1, "f4": 1, "f8": 1}.get(a.dtype.str[1:])
        known = top and a.size and (a.ndim == 2 or a.shape[2:] in ((3,), (4,)))
        if not known or not (0 <= a.min() and a.max() <= top):
            raise ValueError("an image array must be [H, W], [H, W, 3] or [H, W, 4] of uint8, "
                             f"uint16 or floats in [0, 1], not {list(a.shape)} of {a.dtype}")
        image = PIL.Image.fromarray(np.rint(a * (255 / top)).astype(np.uint8))
    image = image.convert("RGBA")
    white = PIL.Image.new("RGBA", image.size, "white")
    return PIL.Image.alpha_composite(white, image).convert("RGB")


def preprocess_image(image):
    """A path, array or Pillow image as patches [N, 3, 14, 14] in [-1, 1] and their (t, h, w).

    Scaled down (bicubic) if too large, then padded with black on the right and bottom to whole
    2 x 2 groups of patches, which are cut row by row."""
    image = to_rgb(open_image(image) if isinstance(image, (str, os.PathLike)) else image)
    w, h = image_size(*image.size)
    rows, cols = (2 * math.ceil(side / (2 * PATCH)) for side in (h, w))
    canvas = np.zeros((rows * PATCH, cols * PATCH, 3), np.uint8)
    canvas[:h, :w] = image.resize((w, h), 3)           # 3 is Pillow's bicubic
    x = torch.from_numpy(canvas).view(rows, PATCH, cols, PATCH, 3).permute(0, 2, 4, 1, 3)
    return (x.flatten(0, 1) / 255 - 0.5) / 0.5, torch.tensor([1, rows, cols])

# ---- §2.1 Layers and model, MTP ------------------------------------------------------------------


class DecoderLayer(nn.Module):
    """One backbone layer: attention, then feed-forward, each reading a mix over depth."""

    def __init__(self, config, mla, moe, starts_block):
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = (MLA if mla else KDA)(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(D, eps), RMSNorm(D, eps)
        if moe:
            self.block_sparse_moe = LatentMoE(config)
        else:
            self.mlp = MLP(config, config.intermediate_size)
        attn_res = config.attn_res_block_size is not None
        self.starts_block = attn_res and starts_block
        if attn_res:
            self.self_attention_res_proj = Linear(D, 1)
            self.self_attention_res_norm = RMSNorm(D, eps)
            self.mlp_res_proj, self.mlp_res_norm = Linear(D, 1), RMSNorm(D, eps)

    def forward(self, s, blocks, state=None, valid=None, note=None, forced=None):
        """s [B, T, D] the running sum, blocks the sums stored so far.  [§2.2, Eq. 10]

        A layer that starts a block reads the finished sum once more, as the last source of its
        mix; then it files the sum, and its attention's output starts the next. Layer 0 finds
        nothing stored: it reads the embedding as it is, files it as the first block, and its
        attention mix is unused. valid, note and forced are LatentMoE's. Returns s and blocks.
        """
        attn_in = self.mix("self_attention", blocks, s)
        if self.starts_block:
            blocks, s = [*blocks, s], 0                # a new list: the caller keeps its own
        attn_out = self.self_attn(self.input_layernorm(attn_in), state)
        s = s + attn_out
        ffn_in = self.mix("mlp", blocks, s)
        h = self.post_attention_layernorm(ffn_in)
        moe = hasattr(self, "block_sparse_moe")
        ffn_out = self.block_sparse_moe(h, valid, note, forced) if moe else self.mlp(h)
        s = s + ffn_out
        if note is not None:
            note.update(attn_in=attn_in, attn_out=attn_out, ffn_in=ffn_in, ffn_out=ffn_out,
                        prefix_sum=s)
        return s, blocks

    def mix(self, name, blocks, s):
        return mix_depth(blocks, s, *self.mixer(name)) if blocks else s

    def mixer(self, name):
        """Projection and norm of the mix before "self_attention" or "mlp"."""
        return getattr(self, f"{name}_res_proj"), getattr(self, f"{name}_res_norm")


def mix_depth(blocks, s, proj, norm):
    """attn_res over the stored blocks and the running sum, by a mix's weights.  [§2.2, Eq. 10]"""
    if norm.kernel == "fast":
        return twin("attn_res")([*blocks, s], proj.weight[0], norm.weight, norm.eps)
    sources = torch.stack([*blocks, s], -2)                        # Eq. 10
    return attn_res(sources, proj.weight[0], norm.weight, norm.eps)


def depth_weights(blocks, s, proj, norm):
    """The weights of mix_depth, averaged over batch and tokens: one number a source."""
    sources = f32(torch.stack([*blocks, s], -2))
    p = attn_res_scores(sources, proj.weight[0], norm.weight, norm.eps).softmax(-1)
    return p.flatten(0, -2).mean(0).tolist()


class TextModel(nn.Module):
    """Embedding, layers, final norm and the AttnRes mix before it; K3 runs them."""

    def __init__(self, config):
        super().__init__()
        D, eps, S = config.hidden_size, config.rms_norm_eps, config.attn_res_block_size
        self.embed_tokens = nn.Embedding(config.vocab_size, D)
        self.layers = nn.ModuleList(
            DecoderLayer(config, config.is_mla(i), config.is_moe(i), i % (S or 1) == 0)
            for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(D, eps)
        if S is not None:
            self.output_attn_res_proj, self.output_attn_res_norm = Linear(D, 1), RMSNorm(D, eps)
        if config.num_nextn_predict_layers:
            self.mtp = MTP(config)

    def output_mix(self, blocks, s):
        """One more mix after the last layer."""
        if not blocks:
            return s
        return mix_depth(blocks, s, self.output_attn_res_proj, self.output_attn_res_norm)


class MTP(nn.Module):
    """Multi-token prediction: one backbone-shaped layer that guesses one token further.

    It reads the backbone's normed hidden state at t joined with the embedding of token t + 1, and
    shares the backbone's output mix and head. Its layer starts a block of its own, so its input is
    the one stored block. Trained, not released; these names are ours.
    """

    def __init__(self, config):
        super().__init__()
        D, eps, moe = config.hidden_size, config.rms_norm_eps, config.num_experts is not None
        self.hnorm, self.enorm, self.norm = RMSNorm(D, eps), RMSNorm(D, eps), RMSNorm(D, eps)
        self.eh_proj = Linear(2 * D, D)
        self.layer = DecoderLayer(config, mla=True, moe=moe, starts_block=True)

    def forward(self, h, next_embed, output_mix, state=None, valid=None):
        """h, next_embed [B, T, D] -> the state that the head turns into logits for token t + 2."""
        x = self.eh_proj(torch.cat([self.hnorm(h), self.enorm(next_embed)], -1))
        s, blocks = self.layer(x, [], state, valid)
        return self.norm(output_mix(blocks, s))


class LanguageModel(nn.Module):
    """The text model and its head."""

    def __init__(self, config):
        super().__init__()
        self.model = TextModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)


RECORDED = ("attn_in", "attn_out", "ffn_in", "topk_idx", "topk_weight", "ffn_out", "prefix_sum")


def record_layer(record, i, note):
    """File what layer i noted of itself under the recorded names."""
    record.update({f"layers.{i}.{name}": note[name] for name in RECORDED if name in note})


class State:
    """What a model remembers of the tokens it has read, a dict of tensors a layer.

    Of fixed size per KDA layer, 576 values a token per MLA layer. A forward pass replaces the
    entries and does not write into them, so that copy() is cheap and safe; only caches of a fixed
    `capacity` (for CUDA graphs) are written in place. There is no cropping: a KDA state cannot
    forget its last tokens; keep a copy from the position to return to.
    """

    def __init__(self, layers, batch, length=0, capacity=None):
        self.layers, self.batch, self.length, self.capacity = layers, batch, length, capacity

    def copy(self):
        return State([dict(layer) for layer in self.layers], self.batch, self.length, self.capacity)

    def check_room(self, T):
        """ValueError unless T more tokens fit."""
        if self.capacity is not None and self.length + T > self.capacity:
            raise ValueError(f"the state holds {self.length} of at most {self.capacity} tokens, "
                             f"{T} more came")

    def tensors(self):
        return [t for layer in self.layers for t in layer.values() if t is not None]


class K3(nn.Module):
    """The whole model; state_dict names are the released checkpoint's, routed experts stacked.

    K3(config, seed) draws fresh weights that train; under torch.device("meta") it only has shapes.
    kernel         "plain": the definitions in this file; "fast": kernels.py
    compute_dtype  of activations; None: the weights'
    """
    _kernel = "plain"

    def __init__(self, config, seed=0):
        super().__init__()
        self.config, self.compute_dtype = config, None
        self.language_model = LanguageModel(config)
        if config.vt_num_hidden_layers:
            self.vision_tower, self.mm_projector = MoonViT(config), Projector(config)
        if self.language_model.lm_head.weight.device.type != "meta":
            init_weights(self, torch.Generator().manual_seed(seed))

    def forward(self, input_ids, state=None, pixel_values=None, grid_thws=None, record=None,
                last=False):
        """input_ids [B, T] int64 -> logits [B, T, V] in fp32; with media, T is after the merge.

        state    from init_state: continue from it and update it, so that prefill in any pieces and
                 decoding are this same call; None: a sequence of its own
        pixel_values, grid_thws   as preprocess_image makes them, a grid row a media placeholder
        record   a dict to fill with intermediate tensors: embed, of each layer `layers.i.` and
                 RECORDED, final_mixed, final_normed, logits; with media also those of encode_media
        last     only the last position's logits, [B, 1, V]: a million rows would be 687 GB
        Raises ValueError for another batch size than the state's and, on the CPU (elsewhere looking
        would wait for the device), for ids outside the vocabulary and for rows that start with
        padding: there is no mask, so pad on the right and read logits before it.
        """
        h = self.hidden(input_ids, state, pixel_values, grid_thws, record)
        logits = f32(self.head(h[:, -1:] if last else h))
        if record is not None:
            record["logits"] = logits
        return logits

    def hidden(self, input_ids, state=None, pixel_values=None, grid_thws=None, record=None):
        """forward without the head: the final normed hidden states [B, T, D]."""
        self.check_input(input_ids, state)
        text = self.language_model.model
        embed, valid = self.embed(input_ids, pixel_values, grid_thws, record)
        if state is not None:
            state.check_room(embed.shape[1])           # media make it longer than input_ids
        s, blocks = embed, []
        for i in range(len(text.layers)):
            note = None if record is None else {}
            s, blocks = self.layer(i)(s, blocks, state and state.layers[i], valid, note)
            if record is not None:
                record_layer(record, i, note)
        if state is not None:
            state.length += s.shape[1]
        mixed = text.output_mix(blocks, s)
        h = text.norm(mixed)
        if record is not None:
            record.update(embed=embed, final_mixed=mixed, final_normed=h)
        return h

    def layer(self, i):
        return self.language_model.model.layers[i]

    def embed_tokens(self, ids):
        return self.language_model.model.embed_tokens(ids)

    def head(self, h):
        return self.language_model.lm_head(h)

    @property
    def device(self):
        return self.language_model.model.embed_tokens.weight.device

    def embed(self, input_ids, pixel_values=None, grid_thws=None, record=None):
        """Token embeddings [B, T, D], media in place, and which positions are not padding."""
        placeholder = self.config.media_placeholder_token_id
        with_media = pixel_values is not None or grid_thws is not None
        if with_media:
            media = self.encode_media(pixel_values, grid_thws, record)
            input_ids = expand_placeholders(input_ids, [len(m) for m in media], placeholder)
        x = self.embed_tokens(input_ids)
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        if with_media:
            place = (input_ids == placeholder).unsqueeze(-1)
            x = x.masked_scatter(place, torch.cat(media).to(x.dtype))
        return x, input_ids != self.config.pad_token_id

    def encode_media(self, pixel_values, grid_thws, record=None):
        """Media as features of the text model's width: a list of [tokens, D], one an item.  [§2.4]

        Arguments as MoonViT and check_grids say, which raises ValueError; items do not see each
        other.
        """
        if not self.config.vt_num_hidden_layers:
            raise ValueError("this model has no vision tower")
        dtype = self.compute_dtype or self.mm_projector.post_norm.weight.dtype
        grids = check_grids(pixel_values, grid_thws, self.config)
        kernel = self.config.merge_kernel_size
        runs = [(grid, len(list(run))) for grid, run in groupby(grids)]   # alike: one call for all
        parts = self.vision_tower(pixel_values.to(dtype), grids, record)
        parts = parts.split([n * math.prod(grid) for grid, n in runs])
        merged = torch.cat([merge_patches(part, grid, kernel)
                            for part, (grid, _) in zip(parts, runs)])
        sizes = [h * w // math.prod(kernel) for _, h, w in grids]
        media, merged = self.mm_projector(merged).split(sizes), merged.split(sizes)
        if record is not None:
            record.update({f"item{j}.merged": m for j, m in enumerate(merged)})
            record.update({f"item{j}.projected": m for j, m in enumerate(media)})
        return media

    def loss(self, ids, labels, mtp_weight=0.3, **media):
        """Mean cross-entropy in nats, and its parts "main" and "mtp".

        labels  [B, T], the tokens after ids; -100 is ignored, and no label at all gives 0, not NaN
        media   pixel_values and grid_thws; labels then have the length after the merge
        With an MTP layer its own loss, one token further, is added times mtp_weight.
        """
        h, text = self.hidden(ids, **media), self.language_model.model
        loss = cross_entropy(self.head(h), labels)
        parts = {"main": loss.detach()}
        if hasattr(text, "mtp"):
            ahead, valid = self.embed(ids, **media)
            guess = text.mtp(h[:, :-1], ahead[:, 1:], text.output_mix, valid=valid[:, 1:])
            mtp = cross_entropy(self.head(guess), labels[:, 1:])   # labels are one ahead already
            loss, parts["mtp"] = loss + mtp_weight * mtp, mtp.detach()
        return loss, parts

    def init_state(self, batch, capacity=None):
        """An empty State for `batch` sequences; capacity: the most tokens it may ever hold."""
        text = self.language_model.model
        dtype = self.compute_dtype or text.embed_tokens.weight.dtype
        layers = [layer.self_attn.init_state(batch, dtype, self.device, capacity)
                  for layer in text.layers]
        return State(layers, batch, capacity=capacity)

    def check_input(self, ids, state):
        """ValueError for what forward refuses."""
        whole = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32)
        if not whole or ids.dim() != 2:
            raise ValueError(f"input_ids are {getattr(ids, 'dtype', type(ids))} "
                             f"{list(getattr(ids, 'shape', ()))}, expected whole numbers [B, T]")
        B, T = ids.shape
        if state is not None and state.batch != B:
            raise ValueError(f"the state is for {state.batch} sequences, input_ids hold {B}")
        if ids.device.type == "cpu" and ids.numel():   # elsewhere looking would wait for the device
            V, pad = self.config.vocab_size, self.config.pad_token_id
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= V:
                raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary "
                                 f"of {V}")
            if ((ids[:, 0] == pad) & (ids != pad).any(1)).any():
                raise ValueError(f"a row starts with padding (id {pad}): pad on the right, "
                                 "there is no mask")

    def moe_layers(self):
        return [m for m in self.modules() if isinstance(m, LatentMoE)]

    @property
    def kernel(self):
        return self._kernel

    @kernel.setter
    def kernel(self, value):
        if value not in ("plain", "fast"):
            raise ValueError(f"kernel {value!r}: there are plain and fast")
        self._kernel = value
        bound = self.config.gate_lower_bound
        unbounded = value == "fast" and (bound is None or bound < twin("G_MIN"))
        if unbounded and self.config.kda_layers:
            print("note: the chunk path needs a gate_lower_bound of at least -5; "
                  "KDA runs token by token", file=sys.stderr)
        for m in self.modules():
            if isinstance(m, (MLP, Experts)):
                m.act = activation(self.config, value)
            if isinstance(m, (KDA, MLA, Experts, RMSNorm)):
                m.kernel = "plain" if unbounded and isinstance(m, KDA) else value


def cross_entropy(logits, labels):
    """Mean over the labels that are not -100; 0 if all are."""
    logits, labels = f32(logits).flatten(0, 1), labels.flatten()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


@torch.no_grad()
def init_weights(model, generator):
    """Fresh weights that train: AttnRes starts as the mean (w = 0), A_log and router bias at 0.

    dt_bias is Kimi Linear's: the inverse softplus of a step drawn log-uniformly from [0.001, 0.1].
    Differs: the released module draws A_log from log U(1, 16); the report starts it at 0.
    """
    for name, p in model.named_parameters():
        if name.split(".")[-2].rstrip("01").endswith("norm"):
            p.fill_(1)
        elif name.endswith(("A_log", "res_proj.weight")):
            p.zero_()
        elif name.endswith("dt_bias"):
            low, high = math.log(1e-3), math.log(1e-1)
            step = torch.empty_like(p).uniform_(low, high, generator=generator).exp()
            p.copy_(step + torch.log(-torch.expm1(-step)))
        elif "conv1d" in name:
            p.uniform_(-p.shape[-1] ** -0.5, p.shape[-1] ** -0.5, generator=generator)
        else:
            p.normal_(0, model.config.initializer_range, generator=generator)

# ---- Checkpoint: MXFP4, safetensors, folders and byte ranges over http ---------------------------


class CheckpointError(ValueError):
    """A checkpoint that cannot be trusted, reached or written; one sentence naming the place."""


# MXFP4: 32 inputs share one power of two. Code bits s e e m; a byte holds two codes.
FP4 = [s * v for s in (1.0, -1.0) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]   # by code
FP4_PAIRS = torch.tensor([[FP4[b & 15], FP4[b >> 4]] for b in range(256)], dtype=torch.float64)
FP4_SCALES = torch.tensor([2.0 ** (e - 127) for e in range(255)] + [math.nan],
                          dtype=torch.float64)


def mxfp4_decode(packed, scale, dtype=torch.float32):
    """Exact values of MXFP4 codes, rounded once to dtype.

    packed (..., n/2)  uint8; byte j holds input 2j in its low nibble, 2j+1 in its high one
    scale  (..., n/32) uint8; e means 2^(e - 127), 255 means NaN whatever the codes
    Returns (..., n). bf16 loses nothing; fp32 and bf16 overflow for 4 and 6 under scale 253, from 2
    on under 254.
    """
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise ValueError(f"MXFP4 wants uint8 codes and scales, got {packed.dtype}, {scale.dtype}")
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] != 16 * scale.shape[-1]:
        raise ValueError(f"MXFP4 codes {list(packed.shape)} do not fit scales {list(scale.shape)}:"
                         f" each scale serves 32 inputs, that is 16 bytes")
    # A power of two times a 2-bit number is exact in bf16, subnormals included, and fp32 reaches no
    # further. Both values of a byte are moved as one `unit`.
    work, unit = torch.bfloat16, torch.int32
    if dtype == torch.float64:
        work, unit = torch.float64, torch.complex128
    pairs = FP4_PAIRS.to(packed.device, work).view(unit).flatten()
    values = pairs.index_select(0, packed.flatten().int()).view(work).view(*scale.shape, 32)
    scales = FP4_SCALES.to(packed.device, work).index_select(0, scale.flatten().int())
    return values.mul_(scales.view(*scale.shape, 1)).flatten(-2).to(dtype)


def mxfp4_encode(weight):
    """Nearest MXFP4 codes, ties to the even code.

    weight (..., n) finite floats, n a multiple of 32
    Returns packed (..., n/2) and scale (..., n/32), uint8. The scale is the smallest power of two,
    2^-127 at least, under which no value exceeds 6, the largest code: nothing is clipped (7.9
    becomes 8.0 = 4 * 2), and decoded values encode to themselves.
    """
    if weight.shape[-1] % 32:
        raise ValueError(f"MXFP4 wants a width that is a multiple of 32, got {weight.shape[-1]}")
    work = torch.float64 if weight.dtype == torch.float64 else torch.float32
    blocks = weight.detach().to(work).unflatten(-1, (-1, 32))                # (..., n/32, 32)
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1))     # max = m * 2^x with m in [0.5, 1)
    exponent = torch.where(mantissa > 0.75, exponent - 2, exponent - 3) + 127   # 6 = 0.75 * 2^3
    if not mantissa.isfinite().all() or (exponent > 254).any():
        raise ValueError("MXFP4 cannot hold NaN, infinity or values beyond 6 * 2^127")
    scale = exponent.clamp_(min=0).to(torch.uint8)
    a = blocks.div(FP4_SCALES.to(weight.device, work)[scale.int()].unsqueeze(-1)).abs_()
    # Codes lie 0.5 apart below 2, then 1, then 2 apart from 4 on. Rounding is to even, so ties are.
    codes = torch.minimum((2 * a).round_(), a.round().add_(2))
    codes = torch.minimum(codes, a.div_(2).round_().add_(4)).to(torch.uint8)
    codes = (codes | blocks.signbit().to(torch.uint8) << 3).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def mxfp4_round(weight):
    """weight (..., n), n a multiple of 32, as mxfp4_encode's codes hold it; in fp32 at least.

    The gradient passes straight through to the weight. Asks the device nothing and refuses nothing,
    so that a CUDA graph can hold it: infinity and NaN make their block NaN.
    """
    blocks = f32(weight.detach()).unflatten(-1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0 ** -127)
    mantissa, _ = torch.frexp(most)
    scale = most / mantissa / torch.where(mantissa > 0.75, 4, 8)    # a power of two: all is exact
    a = blocks / scale
    apart = torch.where(a.abs() < 2, 0.5, torch.where(a.abs() < 4, 1.0, 2.0))
    rounded = (a / apart).round() * apart * scale
    return rounded.flatten(-2) + (weight - weight.detach())


# safetensors: 8 bytes of header length, a JSON header, then the tensors end to end.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
          "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
          "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_JSON = 100_000_000      # bytes; the format's bound on a header, and enough for any index
INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
SHARD = "model-{:05d}-of-{:06d}.safetensors"        # five digits, then six, as released


# dtype as a key of DTYPES; span is the first byte in the shard file and one past the last
TensorInfo = namedtuple("TensorInfo", "dtype shape shard span")


def show(value):
    """repr, cut to a length that a sentence can hold."""
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:150]}...{text[-1]}"


def tensor_error(file, name, problem):
    """The CheckpointError of one tensor of a file."""
    return CheckpointError(f"{file}: tensor {show(name)}{problem}")


def parse_json(raw, where):
    """The JSON object in raw bytes, strictly: CheckpointError, also for a key twice."""
    def unique(pairs):
        if len(found := dict(pairs)) != len(pairs):
            raise ValueError("a key appears twice among " + show([key for key, _ in pairs]))
        return found
    try:
        data = json.loads(bytes(raw).decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from None
    if type(data) is not dict:
        raise CheckpointError(f"{where}: wanted a JSON object, found {type(data).__name__}")
    return data


def read_headers(files, heads):
    """(shard, parse_header of it) for each shard -> (length, first 8 bytes)."""
    spans = []
    for shard, (size, head) in heads.items():
        length = int.from_bytes(head, "little")
        if not 2 <= length <= min(size - 8, MAX_JSON):
            raise CheckpointError(f"{shard}: {size} bytes cannot hold a header of {length}")
        spans.append((shard, 8, 8 + length))
    for (shard, (size, _)), raw in zip(heads.items(), files.read(spans)):
        yield shard, parse_header(raw, size, shard)


def parse_header(raw, size, shard):
    """name -> TensorInfo of a safetensors file, from its JSON header and its length.

    The tensors must tile the rest of the file; nothing is allocated by what the header says.
    """
    entries = parse_json(raw, f"{shard}: header")
    notes = entries.pop("__metadata__", {})
    if type(notes) is not dict or any(type(v) is not str for v in notes.values()):
        raise CheckpointError(f"{shard}: __metadata__ must map strings to strings")
    for name, entry in entries.items():
        if not makes_sense(entry):
            raise tensor_error(shard, name, f": {show(entry)} is not a known dtype, a possible "
                               "shape, and data_offsets of as many bytes")
    infos, shapes, base, at = {}, {}, 8 + len(raw), 8 + len(raw)
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = (base + offset for offset in entry["data_offsets"])
        if start != at or end > size:
            raise tensor_error(shard, name, f" lies at bytes {start} to {end}, but what is before "
                               f"it ends at {at} and the file at {size}")
        dtype, shape, at = sys.intern(entry["dtype"]), tuple(entry["shape"]), end
        infos[name] = TensorInfo(dtype, shapes.setdefault(shape, shape), shard, (start, end))
    if at != size:
        raise CheckpointError(f"{shard}: the tensors end at byte {at}, the file at {size}")
    return infos


def makes_sense(entry):
    """Whether a header's entry is, by itself, that of a tensor that torch can hold."""
    try:
        dtype, shape, (start, end) = (entry[key] for key in ("dtype", "shape", "data_offsets"))
        return (len(entry) == 3 and len(shape) <= 32 and math.prod(n or 1 for n in shape) < 2 ** 60
                and all(type(n) is int and n >= 0 for n in (*shape, start, end))
                and math.prod(shape) * DTYPES[dtype].itemsize == end - start)
    except (TypeError, KeyError, ValueError):
        return False


def as_tensor(buffer, name, info):
    """View of the bytes of one tensor; a copy only where its offset is not aligned."""
    dtype = DTYPES[info.dtype]
    if len(buffer) != info.span[1] - info.span[0]:
        raise tensor_error(info.shard, name, ": the file has become shorter")
    if not len(buffer):                          # torch refuses an empty buffer
        return torch.empty(info.shape, dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    flat = flat.clone() if flat.data_ptr() % dtype.itemsize else flat
    return flat.view(dtype).view(info.shape)


def read_tensors(files, infos):
    """key -> tensor for key -> TensorInfo, fetched together; local ones are views."""
    buffers = files.read([(info.shard, *info.span) for info in infos.values()])
    return {key: as_tensor(buffer, key, infos[key]) for key, buffer in zip(infos, buffers)}


def read_safetensors(path):
    """One file's tensors, name -> view of the mapped file."""
    folder, file = os.path.split(path)
    files = Folder(folder or ".")
    heads = files.heads([file])
    if not heads[file]:
        raise CheckpointError(f"{path}: no such file")
    [(_, infos)] = read_headers(files, heads)
    return read_tensors(files, infos)


class Folder:
    """Files of a local folder; ranges are views of the mapped file, read when touched."""

    def __init__(self, path):
        if not os.path.isdir(path):
            _, old = beside(path)
            hint = f", but an interrupted save left the whole old one in {old}"
            raise CheckpointError(f"{path}: no such folder{hint * os.path.isdir(old)}")
        self.path = path

    def whole(self, name):
        """All bytes of a small file, None if it is absent; NAME.gz will do as well."""
        path = os.path.join(self.path, name)
        for path, reader in ((path, open), (f"{path}.gz", gzip.open)):
            if os.path.isfile(path):
                try:
                    with reader(path, "rb") as file:
                        return file.read(MAX_JSON)     # what is longer will not parse
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise CheckpointError(f"{path}: damaged gzip ({error})") from None
        return None

    def heads(self, files):
        """file -> (length, first 8 bytes), or None for an absent one."""
        found = dict.fromkeys(files)
        for file in files:
            path = os.path.join(self.path, file)
            if os.path.isfile(path):
                with open(path, "rb") as f:
                    found[file] = os.path.getsize(path), f.read(8)
        return found

    def read(self, spans):
        """A buffer for each (file, start, end). The map goes when the last view of it goes."""
        # Private, so that writing to a view never reaches the file. MAP_NORESERVE (a number, since
        # Python 3.11 lacks the name): Linux would not promise memory for a shard larger than RAM.
        flags, maps = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0), {}
        for file in {span[0] for span in spans}:
            with open(os.path.join(self.path, file), "rb") as f:
                maps[file] = mmap.mmap(f.fileno(), 0, flags=flags)
        for file, start, end in spans:                      # a page fault alone would bring 128 KB
            page = start - start % mmap.PAGESIZE
            if start < end <= len(maps[file]):
                maps[file].madvise(mmap.MADV_WILLNEED, page, end - page)
        return [memoryview(maps[file])[start:end] for file, start, end in spans]


@contextmanager
def threads(n):
    """A pool of threads whose end waits for none of them: the block takes the results it wants."""
    pool = ThreadPoolExecutor(n)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Redirect(urllib.request.HTTPRedirectHandler):
    """The token, which urllib never takes along, follows redirects within the first host."""

    def redirect_request(self, request, answer, code, message, headers, url):
        here, there = (urllib.parse.urlsplit(u)[:2] for u in (request.full_url, url))
        new = super().redirect_request(request, answer, code, message, headers, url)
        if here == there and (token := request.unredirected_hdrs.get("Authorization")):
            new.add_unredirected_header("Authorization", token)
        return new


class Web:
    """Folder's calls for files below a base URL, by byte ranges, a few in flight.

    A part is (file, start, end); versions: file -> (length, ETag or date). With a cache, parts are
    kept on disk under URL and version, if the server gives one: a changed file is fetched anew.
    """
    PIECE = 32 << 20                                    # bytes: what a cut connection may cost
    TRIES, PAUSE, TIMEOUT, IN_FLIGHT = 5, 0.5, 60, 6    # the pause (s) doubles after every try

    def __init__(self, base, cache=None):
        self.base, self.cache, self.versions = base, cache, {}
        self.token = os.environ.get("HF_TOKEN", "").strip()
        if not re.fullmatch("[!-~]*", self.token):
            raise CheckpointError("HF_TOKEN holds more than printable ASCII")
        self.open = urllib.request.build_opener(Redirect).open

    def whole(self, name):
        return self._get(name)

    def heads(self, files):
        with threads(self.IN_FLIGHT) as pool:
            heads = pool.map(lambda file: self._get(file, 0, 8), files)
            return {f: head and (self.versions[f][0], head) for f, head in zip(files, heads)}

    def read(self, spans):
        """Large spans in parts, touching parts in one request; from 100 MB on progress is shown."""
        cuts = [[(file, at, min(at + self.PIECE, end)) for at in range(start, end, self.PIECE)]
                for file, start, end in spans]
        parts = {part: self._kept(part) for part in sum(cuts, [])}
        groups = touching([part for part, body in parts.items() if body is None], self.PIECE)
        done, total = 0, sum(end - start for group in groups for _, start, end in group)
        with threads(self.IN_FLIGHT) as pool:
            answers = pool.map(lambda group: self._get(*group[0][:2], group[-1][2]), groups)
            for group, answer in zip(groups, answers):
                if answer is None:
                    raise CheckpointError(f"{self.base}/{group[0][0]}: it is gone")
                for part in group:
                    start, end = (at - group[0][1] for at in part[1:])
                    parts[part] = answer[start:end]
                    self._keep(part, parts[part])
                done += len(answer)
                if total > 100e6:
                    print(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB", end="\r", file=sys.stderr)
        return [bytearray().join(parts.pop(part) for part in some) for some in cuts]

    def _get(self, file, start=0, end=None):
        """Bytes start to end of a file, or all of it; None if there is no such file."""
        url = f"{self.base}/{file}"
        for failed in range(self.TRIES):
            time.sleep(self.PAUSE * 2 ** failed if failed else 0)
            try:
                return self._ask(url, file, start, end)
            except CheckpointError:
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem, never = error, isinstance(error, (http.client.InvalidURL, ValueError))
                status = getattr(error, "code", 400 if never else 500)
            if status in (404, 410):
                return None
            if status < 500 and status not in (408, 429):
                break
        raise CheckpointError(f"{url}: {problem}")

    def _ask(self, url, file, start, end):
        request, most = urllib.request.Request(url), MAX_JSON
        if self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        if end is not None:
            request.add_header("Range", f"bytes={start}-{end - 1}")
            most = end - start
        with self.open(request, timeout=self.TIMEOUT) as answer:
            if end is not None:
                self._check_range(url, file, f"bytes {start}-{end - 1}", answer)
            body, promised = bytearray(), answer.headers.get("Content-Length")
            while len(body) <= most and (chunk := answer.read(1 << 20)):    # no promise allocates
                body += chunk
        if len(body) > most:
            raise CheckpointError(f"{url}: the answer is longer than {most:,} bytes")
        if end is not None and len(body) < most or promised not in (None, str(len(body))):
            raise ConnectionError(f"the answer broke off after {len(body):,} bytes")
        return body

    def _check_range(self, url, file, wanted, answer):
        if answer.status != 206:
            raise CheckpointError(f"{url}: asked for {wanted}, but the server ignores byte ranges")
        found = answer.headers.get("Content-Range", "")
        size = found.removeprefix(f"{wanted}/")
        if size == found or not re.fullmatch(r"[0-9]{1,18}", size):
            raise CheckpointError(f"{url}: asked for {wanted}, got {show(found)}")
        version = int(size), answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
        if self.versions.setdefault(file, version) != version:
            raise CheckpointError(f"{url}: the file changed while it was being read")

    def _path(self, part):
        """Where a part is kept; None if it is not."""
        file, start, end = part
        if not self.cache or not self.versions[file][1]:
            return None
        key = hashlib.sha256(repr((self.base, self.versions[file])).encode()).hexdigest()[:16]
        return os.path.join(self.cache, f"{file}-{key}", f"{start}-{end}")

    def _kept(self, part):
        path, length = self._path(part), part[2] - part[1]
        if path and os.path.isfile(path) and os.path.getsize(path) == length:
            with open(path, "rb") as file:
                return file.read()
        return None

    def _keep(self, part, body):
        if path := self._path(part):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with replacing(path) as file:
                file.write(body)


def touching(spans, most):
    """Sorted (file, start, end), in groups without a gap and of at most `most` bytes."""
    groups = []
    for file, start, end in sorted(spans):
        if groups and groups[-1][-1][::2] == (file, start) and end - groups[-1][0][1] <= most:
            groups[-1].append((file, start, end))
        else:
            groups.append([(file, start, end)])
    return groups


def files_of(place, cache=None):
    """Web for an http(s) URL, Folder for anything else; both have whole, heads and read."""
    if not str(place):
        raise CheckpointError("the checkpoint's folder or URL is empty")
    return Web(place, cache) if re.match(r"(?i)https?://", str(place)) else Folder(place)


def released_names(names, file):
    """Stored name -> released name: the prefix `language_model.` is added if all lack it."""
    bare = next((n for n in names if n.startswith(("model.", "lm_head."))), None)
    full = next((n for n in names if n.startswith("language_model.")), None)
    if bare and full:
        raise CheckpointError(f"{file}: tensors {show(bare)} and {show(full)} mix two prefixes")
    return {name: "language_model." * name.startswith(("model.", "lm_head.")) + name
            for name in names}


class Checkpoint:
    """Tensors of a folder or an http(s) base URL, by name, none read before it is asked for.

    An index wins over a single model.safetensors. Every shard that it names must be there, unless
    index_only; a shard's header is read, and held against the index, when first needed.
    shard_of    released name -> shard
    total_size  what the index says; bytes_read: of tensors, so far
    _unread     shard -> (length, first 8 bytes), until its header is read
    _infos      name -> TensorInfo, of the headers read so far
    Anything malformed raises CheckpointError with the file and the tensor.
    """

    def __init__(self, path_or_url, cache=None, index_only=False):
        self.place = str(path_or_url).rstrip("/") or str(path_or_url)
        self.files, self.index_only = files_of(self.place, cache), index_only
        self.bytes_read, self.total_size, self._infos = 0, None, {}
        raw = self.files.whole(INDEX)
        if raw is None and index_only:
            raise CheckpointError(f"{self.place}: there is no {INDEX}")
        self.shard_of = {} if raw is None else self._read_index(parse_json(raw, INDEX))
        self._names_of = {} if self.shard_of else {SINGLE: None}    # None: whatever the header says
        for name, shard in self.shard_of.items():
            self._names_of.setdefault(shard, set()).add(name)
        self._unread = {} if index_only else self._find_shards()
        if raw is None:
            self.shard_of = dict.fromkeys(self.tensors, SINGLE)
        self._check_packed()

    def _read_index(self, index):
        """shard_of, by the index."""
        names, notes = index.get("weight_map"), index.get("metadata", {})
        if not (type(names) is type(notes) is dict and names):
            raise CheckpointError(f"{INDEX}: wanted objects weight_map, not empty, and metadata")
        self.total_size = notes.get("total_size")
        if type(self.total_size) not in (int, type(None)):
            raise CheckpointError(f"{INDEX}: total_size is {show(self.total_size)}")
        for name, shard in names.items():       # a shard's name holds no folder and no URL syntax
            if type(shard) is not str or not re.fullmatch(r"(?a)[\w-][\w.-]*\.safetensors", shard):
                raise tensor_error(INDEX, name, f": {show(shard)} is not a .safetensors file of "
                                   "the same folder")
        return {name: names[stored] for stored, name in released_names(names, INDEX).items()}

    def _find_shards(self):
        """_unread of all shards; refused if one is absent."""
        heads = self.files.heads(list(self._names_of))
        absent = sorted(shard for shard, head in heads.items() if head is None)
        if absent == [SINGLE]:
            raise CheckpointError(f"{self.place}: there is neither an index nor a {SINGLE}")
        if absent:
            raise CheckpointError(f"{self.place}: {len(absent)} of {len(heads)} files that the "
                                  f"index names are absent: {', '.join(absent)}")
        return heads

    def _check_packed(self):
        """Packed or not is decided by the stored names alone; an undecidable one is refused."""
        for name, shard in self.shard_of.items():
            stem, _, part = name.rpartition("_")
            if stem.endswith(".weight") and part in ("packed", "scale"):
                both = {f"{stem}_packed", f"{stem}_scale"} <= self.shard_of.keys()
                if not both or stem in self.shard_of:
                    raise tensor_error(shard, name, ": wanted weight_packed and weight_scale "
                                       "together, or weight alone")

    def _load(self, shards):
        """Read the headers of these shards and hold them against the index."""
        for shard, stored in read_headers(self.files, {s: self._unread[s] for s in shards}):
            infos = {name: stored[s] for s, name in released_names(stored, shard).items()}
            promised = self._names_of[shard] or infos.keys()
            if odd := infos.keys() ^ promised:
                place = "index" if min(odd) in promised else "header"
                raise tensor_error(shard, min(odd), f" is only in the {place}")
            self._infos.update(infos)
            del self._unread[shard]

    @functools.cached_property
    def config(self):
        """config.json as a K3Config."""
        raw = self.files.whole(CONFIG)
        if raw is None:
            raise CheckpointError(f"{self.place}: there is no {CONFIG}")
        try:
            return K3Config.from_json(parse_json(raw, CONFIG))
        except ValueError as error:
            raise CheckpointError(f"{self.place}/{CONFIG}: {error}") from None

    @property
    def tensors(self):
        """name -> TensorInfo of every tensor; reads all headers."""
        collecting = gc.isenabled()
        gc.disable()        # half a million records without a cycle: it would take half the time
        try:
            self._load(list(self._unread))
        finally:
            if collecting:
                gc.enable()
        return self._infos

    def info(self, name):
        """TensorInfo of a stored tensor; reads its shard's header if that was not read yet."""
        if name not in self.shard_of:
            raise CheckpointError(f"{self.place}: there is no tensor {show(name)}")
        if self.shard_of[name] in self._unread:
            self._load([self.shard_of[name]])
        return self._infos[name]

    def stored(self, name):
        """The names under which a weight is stored: its own, or those of its codes and scales."""
        packed = f"{name}_packed" in self.shard_of
        return [f"{name}_packed", f"{name}_scale"] if packed else [name]

    def fetch(self, names):
        """stored name -> tensor as stored, for many at once."""
        return self._read({name: self.info(name) for name in names})

    def _read(self, infos):
        self.bytes_read += sum(info.span[1] - info.span[0] for info in infos.values())
        return read_tensors(self.files, infos)

    def unpack(self, fetched, name, dtype=None):
        """A weight out of what fetch(stored(name)) gave, MXFP4 decoded (to fp32 by default)."""
        if name in fetched:
            return fetched[name] if dtype is None else fetched[name].to(dtype)
        packed, scale = self.stored(name)
        try:
            return mxfp4_decode(fetched[packed], fetched[scale], dtype or torch.float32)
        except ValueError as error:
            raise tensor_error(self.info(packed).shard, packed, f": {error}")

    def tensor(self, name, dtype=None):
        """One weight; a view of the mapped file where nothing has to be converted."""
        return self.unpack(self.fetch(self.stored(name)), name, dtype)

    def rows(self, name, index):
        """Rows `index` of a matrix as stored; over a network only these are read."""
        info = self.info(name)
        if len(info.shape) != 2 or not all(0 <= i < info.shape[0] for i in index):
            raise tensor_error(info.shard, name, f" of shape {list(info.shape)} lacks a row")
        dtype, columns, base = DTYPES[info.dtype], info.shape[1], info.span[0]
        width = columns * dtype.itemsize
        rows = self._read({i: info._replace(
            shape=(1, columns), span=(base + i * width, base + (i + 1) * width)) for i in index})
        return torch.cat([torch.empty(0, columns, dtype=dtype), *(rows[i] for i in index)])

    def verify(self):
        """Names, shapes, dtypes, shards and total size that the config wants otherwise, as lines.

        Reads headers only, or nothing but the index if it was opened so.
        """
        packed = any(name.endswith(".weight_packed") for name in self.shard_of)
        items = list(inventory(self.config, "mxfp4" if packed else "bf16"))
        count, one_file = max(item[3] for item in items), set(self.shard_of.values()) == {SINGLE}
        wanted = {name: (shape, dtype, SINGLE if one_file else SHARD.format(shard, count))
                  for name, shape, dtype, shard, *_ in items}
        heads = (self.config.linear_num_heads,)
        for name in wanted.keys() & self.tensors.keys():
            if name.endswith("A_log") and self.tensors[name].shape == heads:
                wanted[name] = (heads, *wanted[name][1:])      # without its padding: as good
        return compare_inventory(wanted, self)


def compare_inventory(expected, checkpoint):
    """Differences from name -> (shape, dtype as in DTYPES, shard or None for any), a line each.

    With index_only shapes and dtypes only serve for the total size.
    """
    shard_of, infos, lines = checkpoint.shard_of, checkpoint.tensors, []
    for name, (shape, dtype, shard) in expected.items():
        if name not in shard_of:
            lines.append(f"missing: {name}")
            continue
        info = infos.get(name)
        if info and info.shape != tuple(shape):
            lines.append(f"shape: {name} has {list(info.shape)}, wanted {list(shape)}")
        if info and info.dtype != dtype:
            lines.append(f"dtype: {name} has {info.dtype}, wanted {dtype}")
        if shard not in (None, shard_of[name]):
            lines.append(f"shard: {name} is in {shard_of[name]}, wanted {shard}")
    lines += [f"extra: {name} in {shard_of[name]}" for name in shard_of if name not in expected]
    kinds = expected.values() if checkpoint.index_only else [
        (info.shape, info.dtype, None) for info in infos.values()]
    total = sum(math.prod(shape) * DTYPES[dtype].itemsize for shape, dtype, _ in kinds)
    if checkpoint.total_size not in (None, total):
        lines.append(f"total size: {checkpoint.total_size:,} in the index, {total:,} in tensors")
    return lines


def group_findings(lines):
    """Findings that differ only in their numbers as one line: there are half a million tensors."""
    groups = {}
    for line in lines:
        groups.setdefault(re.sub(r"\d+", "#", line), []).append(line)
    return [first + f" (and {len(more):,} alike)" * bool(more) for first, *more in groups.values()]


@contextmanager
def replacing(path):
    """A file that takes path's place when the block ends well; until then path is left alone.

    Links are followed; what is there and is no file (a device, a folder) is refused.
    """
    target = os.path.realpath(path)
    temporary = f"{target}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            raise OSError("no regular file")
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror or error}); what was "
                              f"there before is untouched") from None
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def write_safetensors(path, tensors):
    """One safetensors file of name -> tensor, wide dtypes first so that every tensor is aligned."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in order:
        t = tensors[name]
        if t.dtype not in DTYPE_NAMES:
            raise tensor_error(path, name, f": {t.dtype} cannot be stored")
        header[name] = {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape),
                        "data_offsets": [at, at := at + t.nbytes]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with replacing(path) as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy())


def beside(folder):
    """Where a save puts the new checkpoint until it is whole, and then the old one."""
    parent, name = os.path.split(os.path.realpath(folder))
    return (os.path.join(parent, f".{name}.{which}") for which in ("new", "old"))


def write_checkpoint(folder, shards, config, files=None):
    """A checkpoint in the released layout; an old one stays whole until the new one is whole.

    shards  iterable of dicts name -> tensor; a generator keeps one shard in memory at a time
    config  dict for config.json; files: further name -> bytes, such as the tokenizer's
    Everything goes to .FOLDER.new; then FOLDER becomes .FOLDER.old, .FOLDER.new becomes FOLDER, and
    .FOLDER.old goes. After a kill between the renames the next save undoes the first.
    """
    folder, (new, old) = os.path.realpath(folder), beside(folder)
    files = {CONFIG: json.dumps(config, indent=2).encode(), **(files or {})}
    try:
        if os.path.isdir(old) and not os.path.exists(folder):
            os.rename(old, folder)
        for place in folder, new, old:
            refuse_strangers(place, files)
        for place in new, old:
            shutil.rmtree(place, ignore_errors=True)
        os.makedirs(new)
        try:
            write_files(new, shards, files)
            if os.path.isdir(folder):
                os.rename(folder, old)
            os.rename(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from None


def write_files(folder, shards, files):
    """The shards, then the other files and the index."""
    shard_of, total, count = {}, 0, 0
    for count, tensors in enumerate(shards, 1):
        if twice := shard_of.keys() & tensors.keys():
            raise tensor_error(folder, min(twice), " is in two shards")
        shard_of.update(dict.fromkeys(tensors, count))
        total += sum(tensor.nbytes for tensor in tensors.values())
        write_safetensors(os.path.join(folder, SHARD.format(count, 0)), tensors)
    for i in range(1, count + 1):                  # how many there are is known only now
        os.rename(*(os.path.join(folder, SHARD.format(i, of)) for of in (0, count)))
    index = {"metadata": {"total_size": total},
             "weight_map": {name: SHARD.format(i, count) for name, i in shard_of.items()}}
    for name, data in {**files, INDEX: json.dumps(index, indent=2).encode()}.items():
        with replacing(os.path.join(folder, name)) as file:
            file.write(data)


def refuse_strangers(folder, files):
    """A folder is replaced only if all that it holds, and would lose, is a checkpoint's."""
    for name in os.listdir(folder) if os.path.exists(folder) else []:
        plain = re.sub(r"\.\d+-\d+\.tmp$", "", name)           # what a killed save left
        shard = re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", plain)
        if not shard and plain not in (INDEX, *TOKENIZER, *files):
            raise CheckpointError(f"{folder}: not replaced, since it also holds {show(name)}")

# ---- The released layout -------------------------------------------------------------------------

STORED_F32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
HELD_F32 = (*STORED_F32, "block_sparse_moe.gate.weight")       # what Module.fp32 names


def inventory(config, experts="mxfp4"):
    """(name, shape, dtype, shard, source, e) of every tensor in the released layout, one by one.

    source is the state_dict entry it comes from, e the expert within it or None. Shard i + 1 holds
    layer i whole, then come one with the embedding, the head and the final norms, the projector's
    and the vision tower's. experts "mxfp4" packs routed experts, "bf16" stores them like the rest,
    in the config's dtype.
    """
    dtype = {"bfloat16": "BF16", "float32": "F32"}[config.dtype]
    with torch.device("meta"):
        entries = K3(config).state_dict()
    n = config.num_hidden_layers
    for source, t in entries.items():
        layer = re.match(r"language_model\.model\.layers\.(\d+)\.", source)
        shard = (int(layer[1]) + 1 if layer else n + 2 if source.startswith("mm_projector") else
                 n + 3 if source.startswith("vision_tower") else n + 1)
        prefix, dot, w = source.rpartition(".experts.")
        if not dot:
            shape = (max(128, len(t)),) if source.endswith("A_log") else tuple(t.shape)   # padded
            stored = "F32" if source.endswith(STORED_F32) else dtype
            yield source, shape, stored, shard, source, None
            continue
        count, out, width = t.shape
        for e in range(count):
            name = expert_name(prefix, e, w)
            if experts == "mxfp4":
                yield f"{name}_packed", (out, width // 2), "U8", shard, source, e
                yield f"{name}_scale", (out, width // 32), "U8", shard, source, e
            else:
                yield name, (out, width), dtype, shard, source, e


def expert_name(prefix, e, w):
    """The stored name of matrix w (w1, w2 or w3) of expert e."""
    return f"{prefix}.experts.{e}.{w}.weight"


def check_names(checkpoint):
    """CheckpointError unless exactly the weights that the config calls for are stored."""
    stored = {name.removesuffix("_packed") for name in checkpoint.shard_of
              if not name.endswith(".weight_scale")}
    for name, *_ in inventory(checkpoint.config, "bf16"):
        if name not in stored:
            raise CheckpointError(f"{checkpoint.place}: there is no tensor {show(name)}")
        stored.remove(name)
    if stored:
        name = min(stored)
        raise CheckpointError(f"{checkpoint.place}: {len(stored)} tensors that the config does not "
                              f"call for, the first {show(name)} in "
                              f"{checkpoint.shard_of[checkpoint.stored(name)[0]]}")


def load_model(path, dtype=torch.float32, device="cpu"):
    """The model of a checkpoint (folder, URL or Checkpoint), all weights in memory, in eval mode.

    dtype is the weights'; those that must be fp32 stay so. A tensor that is missing, left over or
    of another shape raises CheckpointError.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"{dtype} cannot hold weights")
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    check_names(checkpoint)
    with torch.device("meta"):
        model = K3(checkpoint.config)
    Reader(checkpoint, dtype, device).fill(model)
    return model


class Reader:
    """Weights out of a checkpoint, of the shape that the model wants; dtype None: as stored."""

    def __init__(self, checkpoint, dtype, device):
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device

    def fill(self, module, prefix=""):
        """Give a module of the meta device its weights, and set it to eval mode."""
        weights = {name: self.entry(prefix + name, t.shape)
                   for name, t in module.state_dict().items()}
        module.load_state_dict(weights, assign=True)
        module.eval()

    def entry(self, name, shape):
        """One entry of a state_dict: a weight, or a stack of all experts'."""
        dtype = self.dtype
        if dtype is not None and name.endswith(HELD_F32):
            dtype = torch.promote_types(dtype, torch.float32)
        prefix, dot, w = name.rpartition(".experts.")
        if not dot:
            return self.one(name, shape, dtype)
        return torch.stack([self.one(expert_name(prefix, e, w), shape[1:], dtype)
                            for e in range(shape[0])])

    def one(self, name, shape, dtype, fetched=None):
        """One stored weight, out of `fetched` if it is there already."""
        stored = self.checkpoint.stored(name)
        info = self.checkpoint.info(stored[0])
        if len(stored) == 1 and not DTYPES[info.dtype].is_floating_point:
            raise tensor_error(info.shard, name, f" is {info.dtype}, a weight is floating point")
        fetched = self.checkpoint.fetch(stored) if fetched is None else fetched
        t = self.checkpoint.unpack(fetched, name, dtype)
        if name.endswith("A_log") and t.dim() == 1 and not t[shape[0]:].any():
            t = t[:shape[0]]                           # 96 heads, then zeros up to 128
        self.fits(stored[0], t.shape, shape)
        return t.to(self.device)

    def fits(self, stored, found, wanted):
        """CheckpointError unless the weight has the shape that the config wants."""
        if found != wanted:
            wanted = f"{list(wanted)}{' and zeros' * stored.endswith('A_log')}"
            raise tensor_error(self.checkpoint.shard_of[stored], stored,
                               f" gives {list(found)}, the config wants {wanted}")


def save_checkpoint(model, folder, experts="mxfp4", files=None):
    """Write the model as a checkpoint in the released layout, with the dtypes of `inventory`.

    experts  "mxfp4": routed experts rounded to MXFP4 (loaded ones come out as they were);
             "bf16": kept as BF16
    config.json is the model's; files, and what happens to an old checkpoint: write_checkpoint.
    Raises CheckpointError if it cannot be written, ValueError for weights MXFP4 cannot hold.
    """
    if experts not in ("mxfp4", "bf16"):
        raise ValueError(f"experts {experts!r}: there are mxfp4 and bf16")
    entries, config = model.state_dict(), dataclasses.replace(model.config, dtype="bfloat16")

    def shards():
        by_shard = lambda item: item[3]
        for _, group in groupby(sorted(inventory(config, experts), key=by_shard), by_shard):
            tensors = {}
            for name, shape, dtype, _, source, e in group:
                t = entries[source] if e is None else entries[source][e]
                t = F.pad(t, (0, shape[0] - len(t))) if name.endswith("A_log") else t
                if name.endswith("_packed"):
                    tensors[name], tensors[name[:-6] + "scale"] = mxfp4_encode(t)
                elif not name.endswith("_scale"):      # written with its codes
                    tensors[name] = t.to(DTYPES[dtype])
            yield tensors
    file = config.to_json()
    if experts == "mxfp4":
        file["text_config"]["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    write_checkpoint(folder, shards(), file, files)

# ---- One layer at a time -------------------------------------------------------------------------


class StoredExperts(nn.Module):
    """Routed experts left in the checkpoint: only those that some token chose are read.

    They are fetched as stored, all at once (over a network, side by side), and decoded one matrix
    at a time, when experts_loop asks for it.
    """

    def __init__(self, checkpoint, prefix, experts):
        super().__init__()
        self.checkpoint, self.prefix, self.act, self.touched = checkpoint, prefix, experts.act, 0
        self.shapes = {w: getattr(experts, w).shape[1:] for w in ("w1", "w3", "w2")}

    def forward(self, x, experts, weights):
        chosen, read = experts.unique().tolist(), Reader(self.checkpoint, None, x.device)
        self.touched = len(chosen)
        names = [expert_name(self.prefix, e, w) for e in chosen for w in self.shapes]
        fetched = self.checkpoint.fetch(
            [part for name in names for part in self.checkpoint.stored(name)])

        def matrices(w):
            return Lazy(lambda e: read.one(expert_name(self.prefix, e, w), self.shapes[w], x.dtype,
                                           fetched))
        return experts_loop(x, experts, weights, *map(matrices, self.shapes), self.act)


class Lazy:
    """Something indexable whose items are made when asked for."""

    def __init__(self, make):
        self.make = make

    def __getitem__(self, i):
        return self.make(i)


class StreamedK3(K3):
    """K3 whose weights stay in the checkpoint: a layer's are read as it runs, then dropped.

    Modules stay on the meta device; a layer that runs is a copy, filled with views of the mapped
    files, which rise to the activations' dtype one matrix at a time. Of the embedding only the rows
    asked for are read, of the routed experts only the chosen.
    Raises CheckpointError, before anything runs, for a tensor too many or too few.
    """
    EMBED, HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    device = None                                      # K3's property would look at a weight

    def __init__(self, checkpoint, dtype=torch.float32, device="cpu"):
        check_names(checkpoint)
        with torch.device("meta"):
            super().__init__(checkpoint.config)
        self.checkpoint, self.compute_dtype, self.device = checkpoint, dtype, torch.device(device)
        self.read, c = Reader(checkpoint, None, self.device), self.config
        for name in (self.EMBED, self.HEAD):
            self.read.fits(name, checkpoint.info(name).shape, (c.vocab_size, c.hidden_size))
        for name, module in self.language_model.model.named_children():
            if name not in ("embed_tokens", "layers", "mtp"):
                self.read.fill(module, f"language_model.model.{name}.")
        self.eval()

    def layer(self, i):
        layer = copy.deepcopy(self.language_model.model.layers[i])
        prefix = f"language_model.model.layers.{i}."
        if moe := getattr(layer, "block_sparse_moe", None):
            moe.experts = StoredExperts(self.checkpoint, f"{prefix}block_sparse_moe", moe.experts)
        self.read.fill(layer, prefix)
        return layer

    def embed_tokens(self, ids):
        rows = self.checkpoint.rows(self.EMBED, ids.flatten().tolist())
        return rows.to(self.device).unflatten(0, ids.shape)

    def head(self, h):
        """In slices of the vocabulary: the whole matrix in fp32 would be 4.7 GB."""
        V, step = self.config.vocab_size, 16384
        slices = (self.checkpoint.rows(self.HEAD, range(a, min(a + step, V)))
                  for a in range(0, V, step))
        return torch.cat([F.linear(h, w.to(h.device, h.dtype)) for w in slices], -1)

    def encode_media(self, *args):
        if self.config.vt_num_hidden_layers:
            self.read.fill(self.vision_tower, "vision_tower.")
            self.read.fill(self.mm_projector, "mm_projector.")
        return super().encode_media(*args)


def trace(checkpoint, input_ids, layers=None, record=None, *, dtype=torch.float32, device="cpu",
          start=None, each=False, forced=None, pixel_values=None, grid_thws=None, kernel="plain",
          watch=lambda *_: None):
    """The forward pass, one layer in memory at a time: the real model on a small machine.

    checkpoint  a Checkpoint, folder or URL
    input_ids   [B, T], or a list of ids; not looked at where A > 0
    layers      (A, B): layers A to B - 1 only; None: all, and the logits
    start       recorded tensors, for A > 0: the running sum and stored blocks before it (`resume`)
    each        every half layer starts from those of `start`, so that no error is handed on
    forced      tensors with `layers.i.topk_idx`: expert ids to use instead of the router's
    record      a dict to fill, as in K3.forward
    watch       called as watch(i, note, line) after each layer i (None before the first and after
                the last): its tensors by their short names, and a line on what it was and cost
    Returns the logits [B, T, V], or the running sum [B, T, D] where B stops before the last layer.
    Raises ValueError for layers that are not there, and for tensors that do not fit.
    """
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    model, config = StreamedK3(checkpoint, dtype, device), checkpoint.config
    n = config.num_hidden_layers
    A, B = (0, n) if layers is None else layers
    if not 0 <= A < B <= n:
        raise ValueError(f"layers {A}:{B}: the model has layers 0 to {n - 1}")
    model.kernel, forced, start = kernel, forced or {}, start or {}
    keep = (lambda found: None) if record is None else record.update
    sums = lambda known: [x.to(device, dtype) for x in known.values()]

    def theirs(name, x):
        """What the next half goes on with: ours, or with `each` start's if it is there."""
        if not each or name not in start:
            return x
        if start[name].shape != x.shape:
            raise ValueError(f"{name} is {list(start[name].shape)}, to go on from it takes "
                             f"{list(x.shape)}")
        return start[name].to(device, dtype)

    with torch.no_grad():
        if A == 0:
            ids = torch.as_tensor(input_ids)
            ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
            model.check_input(ids, None)
            s, _ = model.embed(ids.to(device), pixel_values, grid_thws, record)
            known, blocks = {"embed": s}, []
            watch(None, known, "")
            s = theirs("embed", s)
        else:
            known = resume(start, A, config)
            *blocks, s = sums(known)
        keep(known)
        check_forced(forced, s.shape[:2], config)
        for i in range(A, B):
            if each and i > A:
                *blocks, s = sums(resume(start, i, config))
            began, read, before, note = time.time(), checkpoint.bytes_read, [*blocks, s], {}
            layer = model.layer(i)
            swap = lambda name, x: theirs(f"layers.{i}.{name}", x)
            ours = judge_apart(layer, swap) if each else {}
            s, blocks = layer(s, blocks, note=note, forced=forced.get(f"layers.{i}.topk_idx"))
            note.update(ours)
            if record is not None:
                record_layer(record, i, note)
            read, seconds = checkpoint.bytes_read - read, time.time() - began
            watch(i, note, layer_line(i, layer, before, blocks, note, read, seconds))
        if B < n:
            return s
        if each:
            *blocks, s = sums(resume(start, n, config))
        text = model.language_model.model
        mixed = text.output_mix(blocks, s)
        h = text.norm(theirs("final_mixed", mixed))
        logits = f32(model.head(theirs("final_normed", h)))
        note = {"final_mixed": mixed, "final_normed": h, "logits": logits}
        keep(note)
        watch(None, note, "")
    return note["logits"]


def judge_apart(layer, theirs):
    """Makes each half of a layer go on with theirs(name, ours); what was ours is in the result."""
    ours = {}

    def going_out(name):
        def hook(module, args, out):
            ours[name] = out
            return theirs(name, out)
        return hook
    layer.self_attn.register_forward_hook(going_out("attn_out"))
    getattr(layer, "block_sparse_moe", getattr(layer, "mlp", None)).register_forward_hook(
        going_out("ffn_out"))
    for norm, name in ((layer.input_layernorm, "attn_in"),
                       (layer.post_attention_layernorm, "ffn_in")):
        norm.register_forward_pre_hook(lambda _, args, name=name: (theirs(name, *args),))
    return ours


def layer_line(i, layer, before, blocks, note, size, seconds):
    """What layer i was and cost; before: sources at its start, blocks: those stored at its end."""
    moe = getattr(layer, "block_sparse_moe", None)
    kind = f"{type(layer.self_attn).__name__}+{'dense' if moe is None else 'MoE'}"
    rms = f32(note["prefix_sum"]).square().mean().sqrt()
    line = f"layer {i:2d} {kind:9s} {size / 1e6:9,.1f} MB {seconds:6.2f} s  rms {rms:.3g}"
    line += "" if moe is None else f"  experts {moe.experts.touched}/{moe.gate.weight.shape[0]}"
    after = note["attn_out"] if layer.starts_block else before[-1] + note["attn_out"]
    for name, (*stored, s) in (("self_attention", before), ("mlp", [*blocks, after])):
        if stored:
            weights = depth_weights(stored, s, *layer.mixer(name))
            line += "  mix " + " ".join(f"{x:.2f}" for x in weights)
    return line


def resume(tensors, A, config):
    """name -> [B, T, D] of recorded tensors: blocks stored before layer A, then the running sum."""
    S, D, known = config.attn_res_block_size, config.hidden_size, {}
    for i in [*(range(0, A, S) if S else ()), A]:      # every S-th layer stores the sum it finds
        name = "embed" if i == 0 else f"layers.{i - 1}.prefix_sum"
        if name not in tensors:
            raise ValueError(f"layers from {A} on need {name} of the file that they start from")
        x = known[name] = tensors[name]
        shape = next(iter(known.values())).shape               # the first one's
        if x.shape != shape or x.shape[2:] != (D,) or not (x.numel() and x.is_floating_point()):
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}, expected floats [B, T, {D}]")
    return known


def check_forced(tensors, shape, config):
    """ValueError unless each topk_idx is [*shape, k] of different experts for each token."""
    want, n = (*shape, config.num_experts_per_token), config.num_experts or 0
    for name, idx in tensors.items():
        if name.endswith(".topk_idx") and not (
                idx.dtype == torch.int64 and idx.shape == want
                and ((idx >= 0) & (idx < n)).all() and (idx.sort(-1).values.diff() > 0).all()):
            raise ValueError(f"{name} to force is {idx.dtype} {list(idx.shape)}, expected int64 "
                             f"{list(want)}, different experts below {n} for each token")

# ---- Text: tokenizer, chat framing, generation ---------------------------------------------------

TOKENIZER = ("tiktoken.model", "tokenizer_config.json")
NUM_SPECIAL = 256                  # control ids, after the ranks; those without a name are reserved
CUT, CUT_RUN = 400_000, 25_000     # characters; the matcher fails on longer texts and runs
CONTROL = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>",
           "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "[PAD]")

_before, _ending = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SPLIT = "|".join((r"[\p{Han}]+", f"{_before}{_upper}*{_lower}+{_ending}",
                  f"{_before}{_upper}+{_lower}*{_ending}", r"\p{N}{1,3}",
                  r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))


def cut_text(text):
    """Pieces of at most 400,000 characters, cut again inside runs of (non-)space over 25,000."""
    for start in range(0, len(text), CUT):
        piece, at = text[start:start + CUT], 0
        for run in re.finditer(r"\s+|\S+", piece):
            for end in range(run.start() + CUT_RUN, run.end(), CUT_RUN):
                yield piece[at:end]
                at = end
        yield piece[at:]


class Tokenizer:
    """Byte-pair encoding with control tokens that no text can spell.

    ranks    token bytes -> id, 0 to n - 1
    special  control token's name -> id, from n on
    stop     ids at which generation ends
    """

    def __init__(self, ranks, special):
        self.special = special
        self.stop = {special[name] for name in ("[EOS]", "<|end_of_msg|>") if name in special}
        self.bpe = tiktoken.Encoding("k3", pat_str=SPLIT, mergeable_ranks=ranks,
                                     special_tokens=special)

    def control(self, name):
        if name not in self.special:
            raise ValueError(f"the tokenizer has no control token {name}")
        return self.special[name]

    def encode(self, text, control=False):
        """Text to ids. With control=True, only for text of our own, names become control ids."""
        if control:
            return self.bpe.encode(text, allowed_special="all")
        text.encode()                  # raises where text is no Unicode: tiktoken would replace it
        return [i for piece in cut_text(text) for i in self.bpe.encode_ordinary(piece)]

    def token(self, i):
        """The bytes of one id."""
        if not 0 <= i < self.bpe.n_vocab:
            raise ValueError(f"token id {i} is not among the tokenizer's {self.bpe.n_vocab}")
        return self.bpe.decode_single_token_bytes(i)

    def decode(self, ids):
        return b"".join(map(self.token, ids)).decode("utf-8", "replace")

    def stream(self, ids):
        """Text as ids come, whole characters only: bytes of an unfinished one wait for the rest."""
        return codecs.iterdecode(map(self.token, ids), "utf-8", "replace")


def read_ranks(raw, count, where):
    """tiktoken.model, lines of a base64 token and its rank, as token -> rank; all below count."""
    try:
        lines = [line.split() for line in raw.splitlines()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise CheckpointError(f"{where}: not lines of a base64 token and its rank "
                              f"({error})") from None
    if len(lines) != count or sorted(ranks.values()) != list(range(count)):
        raise CheckpointError(f"{where}: expected ranks 0 to {count - 1}, each once, found "
                              f"{len(lines)} lines of {len(ranks)} tokens")
    if not all(bytes([b]) in ranks for b in range(256)):
        raise CheckpointError(f"{where}: some single bytes have no rank, so not every text has ids")
    return ranks


def load_tokenizer(place):
    """The tokenizer of a checkpoint (folder, URL or Checkpoint), out of its TOKENIZER files.

    The lowest special id says how many ranks there must be. CheckpointError names the file.
    """
    files = place.files if isinstance(place, Checkpoint) else files_of(place)
    raw, path = [files.whole(name) for name in TOKENIZER], TOKENIZER[1]
    if None in raw:
        raise CheckpointError(f"{getattr(place, 'place', place)}: there is no "
                              f"{TOKENIZER[raw.index(None)]}")
    try:
        table = parse_json(raw[1], path)["added_tokens_decoder"]
        names = {int(i): entry["content"] for i, entry in table.items()}
        first = min(names)
        ids = range(first, first + NUM_SPECIAL)
        special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path}: no added_tokens_decoder of ids and names ({e!r})") from None
    if first < 256 or max(names) not in ids or len(special) < NUM_SPECIAL or not all(
            isinstance(name, str) and name for name in special):
        raise CheckpointError(f"{path}: special tokens must have names of their own and ids within "
                              f"{NUM_SPECIAL} of the lowest, {first}, which is at least 256")
    return Tokenizer(read_ranks(raw[0], first, TOKENIZER[0]), special)


def byte_tokenizer():
    """TOKENIZER files, name -> bytes, for bytes as ids 0 to 255, then CONTROL's names."""
    table = {str(i): {"content": name, "special": True} for i, name in enumerate(CONTROL, 256)}
    ranks = "".join(f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(256))
    config = json.dumps({"added_tokens_decoder": table}, indent=1)
    return dict(zip(TOKENIZER, (ranks.encode(), config.encode())))


def tag(tokenizer, kind, name, **attributes):
    """<|open|>name key="value"<|sep|> or <|close|>name<|sep|>, encoded piece by piece."""
    pieces = [name]
    for key, value in attributes.items():
        pieces += [f" {key}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"']
    body = [i for piece in pieces for i in tokenizer.encode(piece)]
    return [tokenizer.control(kind), *body, tokenizer.control("<|sep|>")]


def encode_parts(tokenizer, parts):
    """Ids of a text, or of a list of texts and of images, each given by its (w, h)."""
    return [i for part in ([parts] if isinstance(parts, str) else parts) for i in (
        tokenizer.encode(part) if isinstance(part, str) else
        tokenizer.encode(image_prompt(*part), control=True))]


def chat_prompt(tokenizer, messages, thinking=True):
    """Ids of a conversation up to where the answer begins, inside its think or response channel.

    messages  dicts of role and content, an assistant's also of reasoning_content (thinking only);
              content is text, or a list of texts and of (w, h), each the size of an image
    """
    def inside(name, ids, **attributes):
        start = tag(tokenizer, "<|open|>", name, **attributes)
        return start + ids + tag(tokenizer, "<|close|>", name)

    ids = []
    for message in messages:
        body = encode_parts(tokenizer, message["content"])
        if message["role"] == "assistant":
            body = inside("response", body)
            if thinking:                               # then always, even with nothing in it
                thought = encode_parts(tokenizer, message.get("reasoning_content", ""))
                body = inside("think", thought) + body
        ids += inside("message", body, role=message["role"]) + [tokenizer.control("<|end_of_msg|>")]
    ids += tag(tokenizer, "<|open|>", "message", role="assistant")
    return ids + tag(tokenizer, "<|open|>", "think" if thinking else "response")


def chat_reply(tokenizer, ids, thinking=True):
    """(channel, id) of the answer's text as ids come, without its tags, up to a stop id.

    The first channel is the one that chat_prompt left open: no tag announces it.
    """
    channel, edge, name = "think" if thinking else "response", None, []
    opening, closing, sep = map(tokenizer.control, ("<|open|>", "<|close|>", "<|sep|>"))
    for i in ids:
        if i in tokenizer.stop:
            return
        if i in (opening, closing):
            edge, name = i, []
        elif edge is None:
            if channel:
                yield channel, i
        elif i != sep:
            name.append(i)
        else:
            channel, edge = tokenizer.decode(name) if edge == opening else None, None


def chat_text(tokenizer, ids, thinking=True):
    """chat_reply as text to read; with thinking, each channel below its name in brackets."""
    reply = chat_reply(tokenizer, ids, thinking)
    for n, (channel, pairs) in enumerate(groupby(reply, lambda pair: pair[0])):
        if thinking:
            yield "\n\n" * (n > 0) + f"[{channel}]\n"
        yield from tokenizer.stream(i for _, i in pairs)


def sample(logits, temperature, top_p, generator):
    """One id from logits [V], the largest at temperature 0; top_p: the fewest that reach it."""
    if not logits.isfinite().all():
        raise ValueError("the logits are not finite: the weights are damaged, "
                         "or the dtype too narrow")
    if temperature == 0:
        return int(logits.argmax())
    p, order = (logits.double() / temperature).softmax(-1).sort(descending=True)
    p = torch.where(p.cumsum(-1) - p < top_p, p, 0)
    return int(order[torch.multinomial(p.cpu(), 1, generator=generator)])


def capture(step, state, warm_up=3):
    """`step` as one CUDA graph: the same numbers from one launch.

    state  every tensor that a step changes, so that the warm-up can be undone
    """
    saved = [t.clone() for t in state]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):         # libraries set themselves up here, which a capture forbids
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):    # NCCL's watchdog may go on
        numbers = step()
    for t, old in zip(state, saved):
        t.copy_(old)
    return lambda: (graph.replay(), numbers)[1]


class DecodeGraph:
    """One decoding step as a CUDA graph: step(ids [B, 1]) -> logits [B, 1, V].

    A step works on a copy of the state, which must have a capacity, and stores the copy's tensors
    back, so that the graph always reads and writes the same memory.
    """

    def __init__(self, model, state):
        self.state = state
        self.ids = torch.zeros(state.batch, 1, dtype=torch.int64, device=model.device)
        # one step to warm up, which the state has room for; it is not counted in state.length
        self.replay = capture(lambda: self.run(model), state.tensors(), warm_up=1)

    def run(self, model):
        new = self.state.copy()
        logits = model(self.ids, state=new, last=True)
        for t, now in zip(self.state.tensors(), new.tensors()):
            if now is not t:
                t.copy_(now)
        return logits

    def __call__(self, ids):
        self.state.check_room(1)
        self.state.length += 1
        self.ids.copy_(ids)
        return self.replay()


def check_sampling(max_new_tokens, temperature, top_p, seed):
    """ValueError for what generate_ids refuses, before a model is loaded for it."""
    if not (temperature == 0 or 1e-6 <= temperature < math.inf) or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature} and top-p {top_p}: expected 0 or from 1e-6 "
                         "on, and more than 0 up to 1")
    if max_new_tokens < 0 or not 0 <= seed < 2 ** 63:
        raise ValueError(f"max-new-tokens {max_new_tokens} and seed {seed}: expected at least 0, "
                         "and below 2^63")


@torch.no_grad()
def generate_ids(model, ids, max_new_tokens, temperature=0.0, top_p=1.0, seed=0, stop=(), **media):
    """Continue ids one at a time, up to one in `stop` (not given out) or max_new_tokens."""
    if not ids:
        raise ValueError("the prompt is empty: there is nothing to continue")
    check_sampling(max_new_tokens, temperature, top_p, seed)
    generator = torch.Generator().manual_seed(seed)
    graph = (max_new_tokens > 1 and model.device.type == "cuda" and model.kernel == "fast"
             and not isinstance(model, StreamedK3))    # plain loops ask the device for numbers
    grids = media.get("grid_thws")
    media_tokens = 0 if grids is None else int(torch.as_tensor(grids).prod(-1).sum())
    state = model.init_state(1, len(ids) + media_tokens + max_new_tokens if graph else None)
    model.check_input(torch.tensor([ids]), state)
    logits = model(torch.tensor([ids], device=model.device), state=state, last=True, **media)
    step = DecodeGraph(model, state) if graph else lambda new: model(new, state=state, last=True)
    for n in range(max_new_tokens):
        new = sample(logits[0, -1], temperature, top_p, generator)
        if new in stop:
            return
        yield new
        if n + 1 < max_new_tokens:
            logits = step(torch.tensor([[new]], device=model.device))


def generate(model, tokenizer, prompt, max_new_tokens=256, temperature=0.0, top_p=1.0, seed=0,
             read=Tokenizer.stream, **media):
    """Text that continues `prompt` (text, or chat_prompt's ids), in whole characters as it comes.

    Ends at the tokenizer's or the config's end token, or after max_new_tokens. read(tokenizer, ids)
    makes the text; media: pixel_values, grid_thws.
    """
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    stop = {*tokenizer.stop, model.config.eos_token_id}
    ids = generate_ids(model, ids, max_new_tokens, temperature, top_p, seed, stop, **media)
    yield from read(tokenizer, ids)

# ---- Figures: drawn, and their numbers computed, by the functions above --------------------------

# Router scores of 8 tokens for 4 experts, in 64ths; with top-1 a balanced load is 2 tokens each.
EXAMPLE = [[22, 56, 52, 38], [61, 27, 7, 44], [59, 46, 29, 11], [49, 40, 27, 26],
           [60, 43, 32, 13], [46, 51, 20, 25], [9, 48, 54, 10], [20, 48, 3, 7]]


def draw_decay(fig, config):
    """Fig. 3: a logit's log-decay, and how far one over a tile's cumulative decay can reach."""
    left, right = fig.subplots(1, 2)
    z, tile, tokens = torch.linspace(-20, 20, 401), 16, torch.arange(25)
    top = math.log(torch.finfo(torch.bfloat16).max)            # e^88.7; fp32 ends there too
    for name, g_min, logits in (("Kimi Linear", None, (8, 12, 20)),
                                ("K3", config.gate_lower_bound, (20,))):
        g = kda_log_decay(z.view(1, 1, 1, -1), torch.zeros(1), torch.zeros(len(z)), g_min).flatten()
        [curve] = left.plot(z, g, label=name)
        for logit, style in zip(logits, ("-", "--", ":")):
            reach = -tokens * g[(z - logit).abs().argmin()]
            right.plot(tokens, reach, style, color=curve.get_color(), label=f"{name}, z = {logit}")
            yield (f"{name}, z = {logit}: 1/decay is e^{reach[tile]:.0f} after {tile} tokens, "
                   f"beyond bf16's e^{top:.1f} after {int((reach > top).int().argmax())}")
    left.axhline(config.gate_lower_bound, color="0.5", ls="--")
    left.set(title="§2.1.1, Eq. 5: decay of a token", xlabel="decay logit z",
             ylabel="log-decay g = ln alpha")
    right.axhspan(top, 115, color="0.9", label="overflows in bf16 and fp32")
    right.plot(tile, reach[tile], "o", color=curve.get_color())
    right.text(tile + 0.5, 65, f"e^{reach[tile]:.0f}: a tile of {tile}\nis a dense matmul")
    right.set(title="One over the cumulative decay", xlabel="tokens since the tile began",
              ylabel="natural logarithm of 1/decay", xlim=(0, 24), ylim=(0, 115))
    left.legend()
    right.legend(loc="lower right")


def draw_glu(fig, config):
    """Fig. 4: SwiGLU grows without bound, SiTU-GLU does not; near 0 they are the same."""
    near, far = fig.subplots(1, 2)
    caps = config.activation_situ_beta, config.activation_situ_linear_beta
    situ, bound = lambda gate, up: situ_glu(gate, up, *caps), math.prod(caps)
    x, wide = torch.linspace(-8, 8, 401), torch.linspace(-20, 60, 401)
    for name, act in (("GLU", lambda gate, up: F.glu(torch.cat([up, gate]))),
                      ("SwiGLU", swiglu), ("SiTU-GLU", situ)):
        near.plot(x, act(x, torch.ones_like(x)), label=name)
        far.plot(wide, act(wide, wide), label=name)
    far.axhline(bound, color="0.5", ls="--")
    far.text(-19, bound + 2, f"bound {caps[0]:g} x {caps[1]:g} = {bound:g}")
    near.set(title="§2.3.2, Eq. 12: up = 1", xlabel="gate (pre-activation)", ylabel="value")
    far.set(title="up = gate", xlabel="gate (pre-activation)", ylabel="value", ylim=(-5, 125))
    near.legend()
    for gate, up in torch.tensor([(0.1, 0.1), (1, 1), (4, 25), (-2, 3), (8, 1), (1000, 1000)]):
        yield (f"gate {gate:g}, up {up:g}: "
               f"SwiGLU {swiglu(gate, up):.6g}, SiTU-GLU {situ(gate, up):.6g}")


def draw_balancing(fig, config):
    """Fig. 5: one step of Quantile Balancing by hand, in 64ths."""
    before, step, after = fig.subplots(1, 3)
    s, b, k, binned = torch.tensor(EXAMPLE) / 64, torch.zeros(4), 1, QuantileHistogram(4, 1)
    cutoff, old = draw_routing(before, "Before: scores, b = 0", s, k)
    binned.start(b)
    binned.add(s, cutoff)
    b, margin = quantile_bias(s, cutoff, k), s - cutoff.unsqueeze(-1)
    edge = margin.topk(len(s) * k // 4 + 1, 0).values[-1]      # minus b before centring
    draw_table(step, "§2.3.3, Eq. 14: scores - cutoff", margin, margin > edge,
               {"above edge": (margin > edge).sum(0), "edge": edge * 64, "b": b * 64})
    _, new = draw_routing(after, "After: scores + b", s + b, k)
    text = lambda x, digits=0: " ".join(f"{v:.{digits}f}" for v in x.tolist())
    yield f"loads {text(old)}, cutoffs {text(cutoff * 64)} (/64)"
    yield f"b {text(-edge * 64)}, centred {text(b * 64)} (/64), loads {text(new)}"
    yield f"by App. D's histogram: b centred {text(binned.finish() * 64, 2)} (/64)"


def draw_routing(ax, title, s, k):
    """draw_table of scores [m, n], the chosen ones shaded; returns cutoffs [m] and loads [n]."""
    experts, _, cutoff = route(s, torch.zeros(s.shape[1]), k)
    chosen = torch.zeros_like(s).scatter(1, experts, 1)
    draw_table(ax, title, torch.cat([s, cutoff.unsqueeze(-1)], 1), chosen, {"load": chosen.sum(0)})
    return cutoff, chosen.sum(0)


def draw_table(ax, title, cells, dark, below):
    """cells [m, n or n + 1] in 64ths, those of dark [m, n] shaded, and named rows below them."""
    m, n = dark.shape
    ax.imshow(dark.float().numpy(), cmap="Oranges", vmax=2, aspect="auto")
    for i, row in enumerate([*(cells * 64), *below.values()]):
        for j, x in enumerate(row):
            edge = i >= m or j == n
            ax.text(j, i, f"{x:g}", ha="center", va="center", weight="bold" if edge else None)
    names = [*(f"expert {j}" for j in range(n)), "cutoff"][:cells.shape[1]]
    ax.set_xticks(range(len(names)), names, fontsize=8)
    ax.set_yticks(range(m + len(below)), [*(f"token {i}" for i in range(m)), *below], fontsize=8)
    ax.set(title=title, xlabel="in 64ths; counts in tokens", xlim=(-0.5, len(names) - 0.5),
           ylim=(m + len(below) - 0.5, -0.5))
    ax.tick_params(length=0, labeltop=True, labelbottom=False)


def draw_cost(fig, config):
    """What one sequence keeps in memory: why most layers are KDA and MLA keeps latents."""
    c, table, ax, tokens = config, parameter_table(config), fig.subplots(), 2.0 ** np.arange(10, 21)
    L, mla = c.num_hidden_layers, len(c.full_attn_layers)
    full = 2 * c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    for name, fixed, each in (
            (f"keys and values, all {L} layers", 0, full * L),
            (f"keys and values, {mla} MLA layers", 0, full * mla),
            (f"K3: latents, {mla} MLA layers", 0, table["cache bytes per token"]),
            (f"K3: KDA state, {L - mla} layers", table["state bytes per sequence"], 0)):
        size = (fixed + each * tokens) / 1e9
        ax.loglog(tokens, size, label=f"{name}: {size[-1]:,.4g} GB at 1M")
        yield f"{name}: {fixed:,} + {each:,} T bytes, {size[-1]:,.2f} GB at T = {tokens[-1]:,.0f}"
    ax.set_xticks(tokens[::2], ["1K", "4K", "16K", "64K", "256K", "1M"])
    ax.minorticks_off()
    ax.set(title="§2.1: memory of one sequence (BF16, KDA's S in fp32)", xlabel="tokens",
           ylabel="GB", ylim=(0.01, 1e6))
    ax.legend(loc="upper left")


def figures_command(args):
    """k3.py figures: each drawing as a PNG, and the numbers in it as lines."""
    from matplotlib.figure import Figure           # by itself it draws with Agg, without a display
    os.makedirs(args.out, exist_ok=True)
    for name, draw, size in (("fig3", draw_decay, (10, 4)), ("fig4", draw_glu, (10, 4)),
                             ("fig5", draw_balancing, (10, 4)), ("cost", draw_cost, (8, 4.5))):
        fig, path = Figure(size, layout="constrained"), os.path.join(args.out, f"{name}.png")
        for line in draw(fig, K3Config()):
            print(f"{name}  {line}")
        fig.supxlabel("drawn by: python k3.py figures", fontsize=8, color="0.4")
        with replacing(path) as file:
            fig.savefig(file, format="png", dpi=150)
        print(path)

# ---- Command line --------------------------------------------------------------------------------


def parameter_table(config):
    """Counts by part as the release stores them (A_log at its 128), active ones, and bytes."""
    def size(module):
        return sum(max(128, t.numel()) if name.endswith("A_log") else t.numel()
                   for name, t in module.state_dict().items())

    with torch.device("meta"):
        model = K3(config)
    c, text, layers = config, model.language_model.model, {}
    parts = dict.fromkeys(("gated MLA", "KDA", "latent MoE", "dense MLP"))
    for layer in text.layers:
        attn, moe = layer.self_attn, getattr(layer, "block_sparse_moe", None)
        parts["gated MLA" if isinstance(attn, MLA) else "KDA"] = attn
        parts["dense MLP" if moe is None else "latent MoE"] = layer.mlp if moe is None else moe
        kind = f"{type(attn).__name__} + {'dense' if moe is None else 'MoE'}"
        layers.setdefault(kind, []).append(layer)
    table = {"vocabulary embedding": size(text.embed_tokens),
             "output head": size(model.language_model.lm_head),
             **{name: size(part) for name, part in parts.items() if part is not None}}
    if c.attn_res_block_size is not None:
        table["each AttnRes mix"] = 2 * c.hidden_size
    table["each layer RMSNorm"] = c.hidden_size
    for kind, alike in layers.items():
        each, count = size(alike[0]), len(alike)
        table[f"{kind} layer"], table[f"{kind} layers, {count}"] = each, each * count
    table["text model"] = size(model.language_model)
    for name in ("vision_tower", "mm_projector"):
        table[name.replace("_", " ")] = size(getattr(model, name)) if hasattr(model, name) else 0
    table["everything"] = size(model)
    idle = sum((c.num_experts - c.num_experts_per_token) * 3 * m.w1[0].numel()
               for m in text.layers.modules() if isinstance(m, Experts))
    table["active per token"] = table["text model"] - size(text.embed_tokens) - idle
    table["bytes on disk"] = sum(math.prod(shape) * DTYPES[dtype].itemsize
                                 for _, shape, dtype, *_ in inventory(c))
    latent, tails = c.kv_lora_rank + c.qk_rope_head_dim, 3 * (c.short_conv_kernel_size - 1)
    table["cache bytes per token"] = 2 * len(c.full_attn_layers) * latent
    table["state bytes per sequence"] = (len(c.kda_layers) * c.linear_num_heads * c.linear_head_dim
                                         * (4 * c.linear_head_dim + 2 * tails))
    return table


def params_command(args):
    """k3.py params: parameter_table, printed."""
    table = parameter_table(K3Config() if args.config is None else K3Config.from_json(args.config))
    if args.json:
        key = lambda name: name.replace(" ", "_").replace(",", "").replace("_+_", "_")
        print(json.dumps({key(name): n for name, n in table.items()}, indent=1))
    else:
        print("\n".join(f"{name:26s}{n:>22,}" for name, n in table.items()))


def verify_command(args):
    """k3.py verify: 1 if anything differs from the config."""
    checkpoint = Checkpoint(args.checkpoint, cache=args.cache, index_only=args.index_only)
    found, count, size = checkpoint.verify(), len(checkpoint.shard_of), checkpoint.total_size
    if args.json:
        print(json.dumps({"tensors": count, "total_size": size, "findings": found}, indent=1))
    elif found:
        print("\n".join(group_findings(found)))
    else:
        print(f"all {count:,} tensors are as the config wants them" + " by name" * args.index_only
              + (f", {size:,} bytes" if size else ""))
    return bool(found)


class TraceReport:
    """trace's watch: prints its lines and each tensor's relative error against a reference."""

    def __init__(self, reference, rtol):
        self.reference, self.rtol, self.bad, self.seen, self.cut = reference, rtol, [], 0, 0
        self.broken = None                             # the first running sum that is not finite

    def __call__(self, i, note, line):
        if line:
            print(line, flush=True)
            if self.broken is None and not note["prefix_sum"].isfinite().all():
                self.broken = f"layers.{i}.prefix_sum"
        for name in note if i is None else RECORDED:               # in the order of computing
            full = name if i is None else f"layers.{i}.{name}"
            if name in note and full in self.reference:
                good, text = self.compare(note, name, self.reference[full])
                print(f"  {'ok  ' if good else 'DIFF'} {full:28s} {text}", flush=True)
                self.seen += 1
                self.bad += [] if good else [full]

    def compare(self, note, name, want):
        """Whether a tensor agrees, and how far it is off."""
        got, part = note[name].cpu(), ""
        if got.shape[:1] + got.shape[2:] == want.shape[:1] + want.shape[2:]:
            common = tuple(map(slice, map(min, got.shape, want.shape)))
            got, want = got[common], want[common]      # a file may hold the first positions only
            if got.shape != note[name].shape:
                part, self.cut = f"of its first {want.shape[1]} positions: ", self.cut + 1
        if not want.numel():
            return False, "is empty in the reference, or here"
        if got.shape != want.shape:
            return False, f"has shape {list(got.shape)}, the reference {list(want.shape)}"
        if name == "topk_idx":
            flipped = (got != want).any(-1)
            text = f"{part}{int(flipped.sum())} of {flipped.numel()} tokens route differently"
            gap = note["gap"].cpu()[tuple(map(slice, flipped.shape))][flipped]
            if not len(gap) or gap.max() >= 1e-3:
                return not len(gap), text
            return True, f"{text}, by a gap of at most {gap.max():.1e}: near-ties"
        want, off = want.double(), got.double() - want.double()
        error = (off.norm() / want.norm().clamp_min(1e-300)).item()
        text = f"{part}relative error {error:.2e}, largest {off.abs().max():.2e}"
        return error <= self.rtol, text


def trace_command(args):
    """k3.py trace: 1 if a tensor differs from the reference, or a running sum is not finite."""
    checkpoint = Checkpoint(args.checkpoint, cache=args.cache)
    config = checkpoint.config
    start, reference = (read_safetensors(path) if path is not None else {}
                        for path in (args.start, args.against))
    if args.text == "":
        raise ValueError("the text is empty")
    if not 0 <= args.rtol < math.inf:
        raise ValueError(f"--rtol {args.rtol} is not a finite number from 0 on")
    span, moe = range(*args.layers or (0, config.num_hidden_layers)), config.is_moe
    names = [f"layers.{i}.topk_idx" for i in span if moe(i)] if args.force_routing else []
    if absent := [name for name in names if name not in reference]:
        raise ValueError(f"--force-routing needs --against with a file that holds {absent[0]}")
    if args.dump is not None and (os.path.isdir(args.dump) or
                                  not os.access(os.path.dirname(args.dump) or ".", os.W_OK)):
        raise ValueError(f"--dump {args.dump}: cannot be written")
    if args.each and (args.start or not reference):
        raise ValueError("--each needs --against, whose tensors each half layer starts from, and "
                         "no --from")
    start = reference if args.each else start
    if args.layers and args.layers[0]:
        if args.ids is not None or args.text is not None or args.image:
            raise ValueError(f"layers from {args.layers[0]} on start from --from; "
                             "text, ids or pictures change nothing there")
        ids, media = None, {}
    else:
        ids, media = prompt_ids(args, checkpoint, {**reference, **start})
    theirs = reference.get("input_ids", ids)
    if ids is not None and theirs.tolist() != ids.tolist():
        raise ValueError(f"{args.against} was recorded with other input_ids")
    report, record = TraceReport(reference, args.rtol), {}
    trace(checkpoint, ids, args.layers, None if args.dump is None else record,
          dtype=getattr(torch, args.dtype), device=args.device, start=start, each=args.each,
          kernel=args.kernel, forced=reference if args.force_routing else None, watch=report,
          **media)
    if args.dump is not None:
        read = {} if ids is None else {"input_ids": ids}
        write_safetensors(args.dump, {**read, **record})
    if args.against and not report.seen:
        raise ValueError(f"{args.against} holds none of the tensors that were computed")
    if report.bad:
        print(f"{len(report.bad)} of {report.seen} tensors differ; the first is {report.bad[0]}")
    elif args.against:
        cut = f", {report.cut} of them over part of the positions" * bool(report.cut)
        print(f"all {report.seen} tensors agree within {args.rtol:g}{cut}")
    if report.broken:
        print(f"{report.broken} is not finite")
    return bool(report.bad or report.broken)


def prompt_ids(args, checkpoint, tensors):
    """input_ids [1, T] of --ids, of --image and --text, or of a file; and the media arguments."""
    sizes, media = open_pictures(args)
    if len({args.ids, args.text, args.start} - {None}) > 1:
        raise ValueError("--text, --ids and --from each say what to read: give one")
    ids, config = None, checkpoint.config
    if args.ids is not None:
        try:
            ids = [int(i) for i in args.ids.split(",")]
        except ValueError:
            raise ValueError(f"--ids {show(args.ids)}: expected whole numbers "
                             "between commas") from None
    elif args.text is not None:
        ids = encode_parts(load_tokenizer(checkpoint), [*sizes, args.text])
    elif "input_ids" not in tensors:
        raise ValueError("give --text or --ids (or a reference file that holds input_ids)")
    if odd := [i for i in ids or () if not 0 <= i < config.vocab_size]:
        raise ValueError(f"token id {odd[0]} is outside the vocabulary of {config.vocab_size}")
    ids = tensors["input_ids"] if ids is None else torch.tensor([ids])
    if not ids.numel():
        raise ValueError("there is no token to read")
    placeholder = config.media_placeholder_token_id
    if not sizes and config.vt_num_hidden_layers and (ids == placeholder).any():
        raise ValueError(f"id {placeholder} stands for a picture: give one with --image")
    return ids, media


def open_pictures(args):
    """The (w, h) of each picture of --image, and pixel_values and grid_thws of them all."""
    pictures = [open_image(path) for path in args.image or ()]
    if not pictures:
        return [], {}
    pixels, grids = zip(*map(preprocess_image, pictures))
    return [picture.size for picture in pictures], {
        "pixel_values": torch.cat(pixels).to(args.device), "grid_thws": torch.stack(grids)}


def generate_command(args):
    """k3.py generate: the text, as it comes."""
    if not args.prompt:
        raise ValueError("the prompt is empty: there is nothing to continue")
    if not args.chat and (args.system is not None or not args.think):
        raise ValueError("--system and --no-think belong to --chat")
    sampling = args.max_new_tokens, args.temperature, args.top_p, args.seed
    check_sampling(*sampling)
    checkpoint = Checkpoint(args.checkpoint, cache=args.cache)
    tokenizer, (sizes, media) = load_tokenizer(checkpoint), open_pictures(args)
    content, read = [*sizes, args.prompt], Tokenizer.stream
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        messages = [*system, {"role": "user", "content": content}]
        prompt = chat_prompt(tokenizer, messages, args.think)
        read = functools.partial(chat_text, thinking=args.think)
    else:
        prompt = encode_parts(tokenizer, content)
    model = (StreamedK3 if args.layers_on_demand else load_model)(
        checkpoint, getattr(torch, args.dtype), args.device)
    model.kernel = args.kernel
    for text in generate(model, tokenizer, prompt, *sampling, read, **media):
        print(text, end="", flush=True)
    print()


def layer_range(text):
    """A:B, or one layer, as (first, one past the last)."""
    match = re.fullmatch(r"(\d+):(\d+)|(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: expected A:B, or one layer")
    return (int(match[1]), int(match[2])) if match[1] else (int(match[3]), int(match[3]) + 1)


def device(text):
    """A device that can hold values here and now."""
    try:
        torch.zeros(1, device=text).item()                         # "meta" holds none
    except (RuntimeError, AssertionError, ImportError) as e:       # unknown, or lacking here
        reason = str(e).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used ({reason})") from None
    return torch.device(text)


def refused(error):
    """Whether one_sentence is all there is to say: bad input, or a full disk or memory."""
    return (isinstance(error, (ValueError, OSError, MemoryError, torch.OutOfMemoryError))
            or isinstance(error, RuntimeError) and "allocate memory" in str(error))


def one_sentence(error):
    """What an exception says, in one line and with the file's name."""
    named = isinstance(error, OSError) and error.filename
    text = f"{error.filename}: {error.strerror}" if named else str(error) or "out of memory"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))


class OneLine(argparse.ArgumentParser):
    """argparse whose errors are one line, without the usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def build_parser():
    """The command line; each command's function is `run` in what it parses to."""
    parser = OneLine(prog="k3.py", description="Kimi K3: counts, checks, single layers and text "
                     "from a checkpoint.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLine)

    def command(name, run, help):
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub.add_argument

    def common(add):
        add("checkpoint", metavar="CKPT", help="a folder, or an http(s) base URL")
        add("--cache", metavar="DIR", help="keep what is read over the network here")

    def running(add):
        common(add)
        add("--image", action="append", metavar="F", help="a picture before the text; repeatable")
        add("--device", type=device, default="cpu", help="cpu, cuda, cuda:1, ...")
        add("--dtype", choices=["float32", "bfloat16", "float64"], default="float32",
            help="of activations (%(default)s)")
        add("--kernel", choices=["plain", "fast"], default="plain", help="fast: kernels.py")

    add = command("params", params_command,
                  "parameters by part, bytes in the cache and, with experts in MXFP4, on disk")
    add("--config", metavar="F", help="a config.json; without it the released model's numbers")
    add("--json", action="store_true")
    add = command("verify", verify_command,
                  "every tensor's name, dtype and shape against the config; reads no weights")
    common(add)
    add("--index-only", action="store_true", help="names, shards and total size, by the index")
    add("--json", action="store_true")
    add = command("trace", trace_command,
                  "the forward pass a layer at a time, each against a reference if there is one")
    running(add)
    add("--text", help="text to read")
    add("--ids", help="token ids to read, between commas")
    add("--layers", type=layer_range, metavar="A:B", help="layers A to B - 1 only, or A; from 0")
    add("--from", dest="start", metavar="F", help="recorded sums that layer A starts from")
    add("--dump", metavar="F", help="write all recorded tensors to this safetensors file")
    add("--against", metavar="F", help="compare with such a file, as far as it goes")
    add("--each", action="store_true", help="start every half layer from the tensors of --against")
    add("--force-routing", action="store_true", help="use the expert ids of --against")
    add("--rtol", type=float, default=1e-3, help="relative error accepted (%(default)s)")
    add = command("generate", generate_command, "text that continues a prompt, as it comes")
    running(add)
    add("--prompt", required=True)
    add("--max-new-tokens", type=int, default=256, metavar="N", help="at most (%(default)s)")
    add("--temperature", type=float, default=1.0, help="0: the likeliest (%(default)s)")
    add("--top-p", type=float, default=1.0, help="only the likeliest of this sum (%(default)s)")
    add("--seed", type=int, default=0, help="of the draws (%(default)s)")
    add("--chat", action="store_true", help="wrap the prompt in the released chat framing")
    add("--system", help="with --chat: a system message before it")
    add("--no-think", dest="think", action="store_false", help="with --chat: no thinking first")
    add("--layers-on-demand", action="store_true", help="stream layers of models beyond memory")
    add = command("figures", figures_command,
                  "the report's Figs. 3, 4 and 5, and the cost of context, drawn by this code")
    add("--out", default="out", metavar="DIR", help="for the PNGs (%(default)s)")
    return parser


def guarded(prog, run, speaks=lambda error: True):
    """run()'s exit status: 0 good, 1 a check found a difference, 2 bad input, said in one line."""
    try:
        status = int(run() or 0)
        sys.stdout.flush()
    except Exception as e:
        if not refused(e):
            raise
        status = 2
        if speaks(e):
            print(f"{prog}: {one_sentence(e)}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
        print(f"{prog}: interrupted", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:                    # full or closed: Python would try, and complain, once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return status


def main(argv=None):
    """The command line; returns `guarded`'s status."""
    args = build_parser().parse_args(argv)
    return guarded("k3.py", lambda: args.run(args))


def leave(status):
    """Ends the program; what failed or was interrupted does not wait for a server's answers."""
    os._exit(status) if status > 1 else sys.exit(status)


if __name__ == "__main__":
    leave(main())
