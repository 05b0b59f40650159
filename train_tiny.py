"""Train a toy Kimi K3 on real text: Per-Head Muon, Quantile Balancing, figures, a checkpoint.

    python train_tiny.py                 on the GPU if there is one, else the smaller CPU preset
    python train_tiny.py --preset cpu    2 CPU cores: 79 s, 2.13 bits per held-out byte
    python train_tiny.py --preset gpu    one H200: 70 s, 1.13 bits per held-out byte
    python train_tiny.py --task shapes   learns to see: colour, shape and number of drawn shapes
    python train_tiny.py --plot out      the figures again, from out/metrics.jsonl
    python train_tiny.py --compare balance         every choice from the same start, drawn together
    python train_tiny.py --compare all             every experiment
    torchrun --nproc-per-node 2 train_tiny.py      data parallel: the same batches, shared out

A run leaves in --out (default out/): metrics.jsonl (a header, then one object a step), the figures,
state.pt (what --resume continues from) and checkpoint/ in the released layout.
"""
import argparse
import contextlib
import fcntl
import functools
import gc
import io
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "3000")    # waiting CPU threads soon yield a shared core
import numpy as np
import torch
import torch.distributed as dist

from k3 import (Balancer, byte_tokenizer, capture, CONTROL, depth_weights, Experts, f32, Gate,
                generate, generate_ids, guarded, image_prompt, K3, K3Config, KDA, keys_values,
                LatentMoE, leave, load_model, load_tokenizer, MLA, MLP, OneLine, parse_json, pool,
                preprocess_image, quantile_bias, QuantileHistogram, ranks, replacing, route,
                save_checkpoint, sign_bias, Tokenizer)

# ---- Settings ------------------------------------------------------------------------------------

PRESETS = {     # what `model` leaves out is K3Config.tiny's
    "cpu": dict(
        steps=120, batch=72, length=64, lr=5e-3,                    # 4608 tokens a step
        log_every=10, val_every=40, save_every=40, val_windows=216, sample=200,
        model=dict(hidden_size=96, num_hidden_layers=6, intermediate_size=256,
                   linear_num_heads=3, num_attention_heads=3, q_lora_rank=64,
                   moe_intermediate_size=64, routed_expert_hidden_size=64)),
    "gpu": dict(
        steps=1000, batch=64, length=256, lr=4e-3,                  # 16,384 tokens a step
        log_every=50, val_every=250, save_every=250, val_windows=512, sample=400,
        model=dict(hidden_size=256, num_hidden_layers=8, intermediate_size=768,
                   attn_res_block_size=4, linear_num_heads=4, linear_head_dim=64,
                   num_attention_heads=4, q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=64,
                   qk_rope_head_dim=32, v_head_dim=64, num_experts=64, num_experts_per_token=8,
                   moe_intermediate_size=64, routed_expert_hidden_size=128)),
}
FLOOR = 0.1           # the cosine ends at this share of the peak learning rate
HELD_OUT = 20         # every 20th file, or the last 20th of a text, is for validation
OPTIMIZERS = "per-head-muon", "muon", "adamw"
ADAMW_SIZE = 0.2      # usual RMS of AdamW's updates, to which Muon's are scaled
CACHED = 2 ** 18      # numbers (1 MB) that stay in a CPU's cache from one product to the next

# ---- Data: bytes are tokens, with the ids that byte_tokenizer's encoding gives them --------------


@functools.lru_cache(1)       # a comparison reads it for every run
def read_text(path=None):
    """The bytes to train on and the bytes held out, two uint8 arrays.

    path  a UTF-8 file, a folder (such files below it, sorted), None: the standard library's source
    """
    root = Path(path or os.path.dirname(os.__file__))
    files = [root]
    if root.exists() and not (root.is_file() or root.is_dir()):
        raise ValueError(f"--data {root} is no file and no folder")
    if root.is_dir():
        files = sorted(f for f in root.rglob("*" if path else "*.py")
                       if f.is_file() and "site-packages" not in f.relative_to(root).parts)
    texts = [f.read_bytes() for f in files]
    texts = [t for t in texts if t.decode(errors="ignore").encode() == t != b""]
    if len(texts) < HELD_OUT:     # too few to hold out whole files
        whole = b"".join(texts)
        cuts = [len(whole) * i // HELD_OUT for i in range(HELD_OUT + 1)]
        texts = [whole[a:b] for a, b in zip(cuts, cuts[1:])]
    held = texts[HELD_OUT - 1::HELD_OUT]
    del texts[HELD_OUT - 1::HELD_OUT]
    return tuple(np.frombuffer(b"".join(part), np.uint8) for part in (texts, held))


def unigram_bits(text):
    """Entropy of the bytes, in bits: the loss of the best model that sees no context."""
    p = np.bincount(text) / len(text)
    return float(0 - (p[p > 0] * np.log2(p[p > 0])).sum())


def windows(text, starts, length):
    """ids and labels [n, length] int64; a label is the next byte."""
    both = torch.from_numpy(np.stack([text[s:s + length + 1] for s in starts]).astype(np.int64))
    return both[:, :-1], both[:, 1:]


def batch(text, seed, step, size, length):
    """The windows of one step, a function of (seed, step) alone: a resumed run reads the same."""
    starts = np.random.default_rng([seed, step]).integers(len(text) - length, size=size)
    return windows(text, starts, length)


@torch.no_grad()
def bits_per_byte(model, text, run):
    """Loss over evenly spaced windows, in bits per byte."""
    model.eval()
    parts = -(-run["val_windows"] // run["batch"])
    starts = np.linspace(0, len(text) - run["length"] - 1, parts * run["batch"]).astype(int)
    losses = []
    for part in starts.reshape(-1, run["batch"]):
        ids, labels = windows(text, part, run["length"])
        losses.append(model.loss(ids.to(model.device), labels.to(model.device))[1]["main"])
    model.train()
    return torch.stack(losses).mean().item() / math.log(2)

# ---- Per-Head Muon  [§2.5] -----------------------------------------------------------------------


class Row(NamedTuple):
    """A line of the parameter table; param's rows are heads x (rows[0] + rows[1] + ...)."""
    name: str
    param: torch.Tensor
    group: str      # "muon" or "adamw"
    heads: int
    rows: tuple


def head_split(name, names, c):
    """(heads, rows of each block in a head) of the tensors that are split, None for all others.

    By exact name: o_proj would divide as well, but its heads are columns.
    """
    path, leaf = name.removesuffix(".weight").rsplit(".", 1)
    if path.endswith(".block_sparse_moe.experts"):
        return c.num_experts, (names[name].shape[1],)
    if not path.endswith(".self_attn"):
        return None
    one = c.linear_num_heads, (c.linear_head_dim,)
    query = c.num_attention_heads, (c.qk_nope_head_dim + c.qk_rope_head_dim,)
    pair = c.num_attention_heads, (c.qk_nope_head_dim, c.v_head_dim)
    kda = {"q_proj": one, "k_proj": one, "v_proj": one}
    mla = {"q_b_proj": query, "q_proj": query, "kv_b_proj": pair}     # q_proj: without q_lora_rank
    return (kda if f"{path}.A_log" in names else mla).get(leaf)


def is_matrix(p):
    """Not a vector, a convolution [C, 1, 4] or an AttnRes query [1, D]."""
    return p.ndim > 1 and min(p.shape[-2:]) > 1


def param_table(model, optimizer="per-head-muon"):
    """Every trainable tensor once: Muon for matrices, AdamW for the rest; no router bias.

    optimizer  "muon" leaves the attention's matrices whole, "adamw" takes all tensors
    """
    names, table = dict(model.named_parameters()), []
    for name, p in names.items():
        split = head_split(name, names, model.config)
        if split and split[0] * sum(split[1]) != p.shape[:-1].numel():
            raise ValueError(f"{name} {list(p.shape)} is not {split[0]} heads of {split[1]} rows")
        lookup = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        muon = optimizer != "adamw" and is_matrix(p) and (split or p.ndim == 2) and not lookup
        whole = not split or optimizer == "muon" and p.ndim == 2
        heads, rows = (1, p.shape[:1]) if whole else split
        table.append(Row(name, p, "muon" if muon else "adamw", heads, tuple(rows)))
    return table


def head_blocks(tensor, row):
    """Views [heads, r, columns] of a tensor with row.param's shape, one for each r of row.rows."""
    return tensor.view(row.heads, sum(row.rows), tensor.shape[-1]).split(row.rows, dim=1)


def newton_schulz(G, steps=5, dtype=None):
    """Moves the singular values of each matrix of G [..., rows, cols] to about 0.68 ... 1.14.

    Each has its own norm, so that the result does not depend on its scale; zero gives zero.
    dtype  of the iteration; None: G's
    """
    parts = 1 if G.is_cuda or G.ndim != 3 else min(len(G), math.ceil(G.numel() / CACHED))
    if parts > 1:
        return torch.cat([newton_schulz(part, steps, dtype) for part in G.tensor_split(parts)])
    X = G / G.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(G.dtype).tiny)
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1)       # below 1 only where G is zero
    tall = G.shape[-2] > G.shape[-1]
    X = (X.mT if tall else X).to(dtype or G.dtype)
    shape, X = X.shape, X.reshape(-1, *X.shape[-2:])
    for _ in range(steps):             # 3.4445 X + (-4.7750 A + 2.0315 A A) X, sums in the products
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315), X, beta=3.4445)
    X = X.view(shape)
    return (X.mT if tall else X).to(G.dtype)


def muon_dtype(device):
    """bfloat16, which is enough for newton_schulz, where products are faster in it; None: fp32."""
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)      # not public yet
    return torch.bfloat16 if device == "cuda" or native() else None


class PerHeadMuon:
    """Muon on the blocks of the table's "muon" rows, AdamW on its others; gradients are only read.

    Blocks of one shape are orthogonalised together, on a CPU as many as its cache holds. Nothing
    waits for the device: lr is a tensor, and where the gradient is not finite every change is
    multiplied by 0: weights and momenta stay.
    clip   of the gradient's norm, all tensors together
    dtype  of newton_schulz
    state  name -> tensor, all that a resumed run needs
    """

    def __init__(self, table, lr, momentum=0.95, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
                 clip=1.0, dtype=None):
        self.table, self.momentum, self.betas, self.eps = table, momentum, betas, eps
        self.weight_decay, self.clip, self.dtype = weight_decay, clip, dtype
        device = table[0].param.device
        self.lr = torch.tensor(float(lr), device=device)
        self.others = [row for row in table if row.group == "adamw"]
        self.muon = {}       # (rows, cols, batch) -> [(table row, which of its blocks)]
        most, sizes = CACHED if device.type == "cpu" else math.inf, Counter()
        for row in table:
            for i, r in enumerate(row.rows if row.group == "muon" else ()):
                shape = r, row.param.shape[-1]
                self.muon.setdefault((*shape, int(sizes[shape] // most)), []).append((row, i))
                sizes[shape] += row.heads * math.prod(shape)
        size = sum(row.param.numel() for row in self.others)
        shapes = {"steps": (), "mean": (size,), "square": (size,)}
        for (r, cols, n), members in self.muon.items():
            shapes[f"momentum {r}x{cols} {n}"] = sum(row.heads for row, _ in members), r, cols
        self.state = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}

    def zero_grad(self):
        for row in self.table:
            row.param.grad = None

    @torch.no_grad()
    def step(self):
        """One update from the .grad of the table's tensors (None: zero); returns their norm."""
        grads = {row.name: torch.zeros_like(row.param) if row.param.grad is None else row.param.grad
                 for row in self.table}
        norm = torch.nn.utils.get_total_norm(list(grads.values()))
        on, share = norm.isfinite().float(), self.clip / norm.clamp(min=self.clip)
        # of a norm that is not finite the share is 0 or NaN, and all that it multiplies becomes 0
        clean = lambda parts: torch.cat(parts).mul_(share).nan_to_num_(0, 0, 0)
        rate = self.lr * on
        decay = 1 - rate * self.weight_decay
        for (r, cols, n), members in self.muon.items():
            M = self.state[f"momentum {r}x{cols} {n}"]
            G = clean([head_blocks(grads[row.name], row)[i] for row, i in members])
            M.lerp_(G, (1 - self.momentum) * on)
            U = newton_schulz(G.lerp(M, self.momentum), dtype=self.dtype)             # Nesterov
            U *= rate * ADAMW_SIZE * max(r, cols) ** 0.5
            for (row, i), u in zip(members, U.split([row.heads for row, _ in members])):
                head_blocks(row.param, row)[i].mul_(decay).sub_(u)
        if self.others:
            self.adamw(clean([grads[row.name].flatten() for row in self.others]), on, rate, decay)
        return norm

    def adamw(self, g, on, rate, decay):
        """AdamW on the other tensors, laid end to end as g; vectors do not decay."""
        steps, mean, square = (self.state[name] for name in ("steps", "mean", "square"))
        steps += on
        mean.lerp_(g, (1 - self.betas[0]) * on)
        square.lerp_(g * g, (1 - self.betas[1]) * on)
        c1, c2 = (1 - beta ** steps.clamp(min=1) for beta in self.betas)
        U = rate * mean / c1 / ((square / c2).sqrt() + self.eps)
        for row, u in zip(self.others, U.split([row.param.numel() for row in self.others])):
            if is_matrix(row.param):
                row.param.mul_(decay)
            row.param.sub_(u.view_as(row.param))


def schedule(step, steps):
    """Share of the peak learning rate at step 1 ... steps: 1% warm-up, then a cosine to FLOOR."""
    warm = max(1, steps // 100)
    if step <= warm:
        return step / warm
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2

# ---- One step, as a function or as a CUDA graph; data parallel -----------------------------------


def rank():
    """Which of the ranks() processes this is: 0 is the one that writes and prints."""
    return dist.get_rank() if ranks() > 1 else 0


def join_ranks(device):
    """Meets the other processes that torchrun started, each with a GPU of its own."""
    if device == "cuda":
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"process {local} of this machine has no GPU: there are {gpus}")
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def average(tensors):
    """Means over ranks in place, with one all-reduce. Sums are the same bits on every rank."""
    if ranks() > 1:
        torch._foreach_div_(tensors, ranks())
        pool(tensors)


class Peaks:
    """A step's largest magnitudes, which hooks take on the way and keep on the device.

    record  largest_activation, out of any GLU, and largest_routed, out of the routed experts'
            up-projection before the shared experts join
    tau     largest_logit of the MLA heads, which finish() clips by qk_clip where it passed tau
    """

    def __init__(self, model, record=False, tau=None):
        self.values, self.tau, self.mla = {}, tau, {}
        for m in model.modules():
            if record and isinstance(m, (MLP, Experts)):
                m.act = self.after(m.act, "largest_activation", model.device)
            elif record and isinstance(m, LatentMoE) and hasattr(m, "routed_expert_up_proj"):
                up = m.routed_expert_up_proj
                up.forward = self.after(up.forward, "largest_routed", model.device)
            elif tau and isinstance(m, MLA):
                self.mla[m] = torch.zeros(m.H, device=model.device)
                m.register_forward_hook(self.look)
        self.names = [*self.values, *["largest_logit"] * bool(self.mla)]

    def after(self, function, name, device):
        """The function, with the largest magnitude of its result noted."""
        most = self.values.setdefault(name, torch.zeros((), device=device))

        def noted(*args):
            result = function(*args)
            torch.maximum(most, result.detach().abs().amax().to(most.dtype), out=most)
            return result
        return noted

    @torch.no_grad()
    def look(self, mla, args, out):
        if mla.training:
            torch.maximum(self.mla[mla], largest_logits(mla, args[0]), out=self.mla[mla])

    def start(self):
        for most in (*self.values.values(), *self.mla.values()):
            most.zero_()

    def finish(self):
        """Clips; returns the values that `names` names. All are over all ranks."""
        if ranks() > 1:
            for most in (*self.values.values(), *self.mla.values()):
                dist.all_reduce(most, dist.ReduceOp.MAX)
        for mla, most in self.mla.items():
            qk_clip(mla, most, self.tau)
        logit = [torch.cat([*self.mla.values()]).amax()] if self.mla else []
        return [*self.values.values(), *logit]


def largest_logits(mla, x):
    """Each head's largest causal logit [H], or 0 if all are below, for the layer's input x."""
    q, latent = mla.project(x)
    k, _ = keys_values(latent, mla.kv_b_proj.weight, mla.H, mla.v_dim)
    logits = torch.einsum("bthd,bshd->hbts", f32(q), f32(k)) * q.shape[-1] ** -0.5
    return logits.tril().amax((1, 2, 3)).to(torch.float32)


@torch.no_grad()
def qk_clip(mla, largest, tau):
    """Scales queries and keys of the heads whose largest logit [H] passed tau, so that it is tau.

    Each side takes the root of tau / largest, but for the "rope" part: all heads share its key, so
    that the queries take the whole. Other heads are multiplied by 1: they stay bit-identical.
    """
    share = torch.where((largest > tau) & largest.isfinite(), tau / largest, 1.0).view(-1, 1, 1)
    q = (mla.q_proj if hasattr(mla, "q_proj") else mla.q_b_proj).weight.unflatten(0, (mla.H, -1))
    q_nope, q_rope = q.split([q.shape[1] - mla.rope, mla.rope], 1)
    k_nope = mla.kv_b_proj.weight.unflatten(0, (mla.H, -1))[:, :-mla.v_dim]
    q_nope.mul_(share.sqrt()), k_nope.mul_(share.sqrt()), q_rope.mul_(share)


def make_step(model, balancer, optimizer, ids, labels, peaks=None, **media):
    """A function that trains on whatever the tensors ids and labels hold when it is called.

    They are this rank's share of the batch: losses, gradients and counts are pooled over ranks.
    It returns one vector on the device: [losses, gradient norm, peaks, each MoE layer's imbalance].
    """
    peaks = peaks or Peaks(model)

    def step():
        optimizer.zero_grad()
        balancer.start()
        peaks.start()
        loss, parts = model.loss(ids, labels, **media)
        loss.backward()
        average([*parts.values(), *(p.grad for p in model.parameters() if p.grad is not None)])
        balancer.finish()
        norm = optimizer.step()
        numbers = torch.stack([*parts.values(), norm, *peaks.finish()])
        return torch.cat([numbers, balancer.imbalance()]) if balancer.layers else numbers
    return step

# ---- Log and saved state -------------------------------------------------------------------------


def write_whole(path, data):
    """The file is the old one or the new one at every moment, never a part."""
    with replacing(path) as file:
        file.write(data)


def save_state(path, **state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_whole(path, buffer.getbuffer())


def flat(tree, before=""):
    """The leaves of nested dicts, by the path of keys that leads there."""
    leaves = {}
    for key, value in tree.items():
        nested = isinstance(value, dict)
        leaves |= flat(value, f"{before}{key}.") if nested else {before + key: value}
    return leaves


def load_state(path, run, **own):
    """What save_state wrote, read without running code from the file. Refused if `run` differs.

    own  this run's tensors by name: model and optimizer, whose names and shapes must be the file's
    """
    if not path.exists():
        raise ValueError(f"--resume: no {path}: the first is saved at step {run['save_every']}, "
                         f"or at the end")
    kinds = lambda named: {name: (t.shape, t.dtype, t.layout, t.is_meta)
                           for name, t in named.items()}
    try:
        with zipfile.ZipFile(path) as parts:
            if parts.testzip() or any(part.is_dir() or part.compress_type or part.external_attr
                                      for part in parts.infolist()):
                raise ValueError
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved, step = dict(json.loads(state["run"])), state["step"]
        if not (isinstance(step, int) and 0 < step <= saved["steps"]):
            raise ValueError
        found = {key: kinds(state[key]) for key in own}
    except Exception:                  # zipfile and torch.load raise a dozen unrelated types
        raise ValueError(f"--resume: {path} is damaged, or no training state") from None
    old, new = flat(saved), flat(run)
    for key in new | old:
        if old.get(key) != new.get(key):
            raise ValueError(f"--resume: {path} has {key} {old.get(key)}, this run {new.get(key)}")
    if found != {key: kinds(named) for key, named in own.items()}:
        raise ValueError(f"--resume: {path} holds other tensors than this model trains")
    return state


def write_log(folder, rows):
    """Rows that begin with a header replace what an earlier run left; others are added."""
    lines, path = "".join(json.dumps(row) + "\n" for row in rows), folder / "metrics.jsonl"
    if "header" not in rows[0]:
        with open(path, "a") as f:
            f.write(lines)
        return
    write_whole(path, lines.encode())
    for name in ("compare.json", "compare.png"):       # --plot would go by the old comparison
        (folder / name).unlink(missing_ok=True)


def read_log(folder):
    """The rows of folder/metrics.jsonl, header first; the last line of a killed run may be torn."""
    try:
        with open(Path(folder) / "metrics.jsonl") as f:
            rows = [dict(json.loads(line)) for line in f if line.endswith("\n")]
        rows[0]["header"]["task"]
        sum(row.get("step", 0) for row in rows)                # numbers, all of them
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{folder}/metrics.jsonl is damaged, or no log of train_tiny.py") from None
    return rows


@functools.cache               # the code that runs is the one that the process started with
def circumstances(device):
    """What a figure's caption says beside the run's settings."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    cpu = f"CPU, {torch.get_num_threads()} threads"
    one = torch.cuda.get_device_name() if device == "cuda" else cpu
    start = f"torchrun --nproc-per-node {ranks()}" if ranks() > 1 else "python"
    return dict(command=" ".join([start, "train_tiny.py", *sys.argv[1:]]), commit=commit,
                hardware=f"{ranks()} x {one}" if ranks() > 1 else one,
                python=platform.python_version(), torch=torch.__version__)

# ---- Diagnostics ---------------------------------------------------------------------------------


@torch.no_grad()
def update_rms(rows, before, lr):
    """RMS of one step's change of every head's block, in units of lr: name -> [blocks x heads]."""
    rms = lambda change, row: [b.square().mean((1, 2)).sqrt() for b in head_blocks(change, row)]
    return {row.name: torch.cat(rms((row.param - old) / lr, row)).tolist()
            for row, old in zip(rows, before)}


def seconds(run, cuda, times=5):
    """Seconds of one call, mean of several after a first."""
    wait = torch.cuda.synchronize if cuda else lambda: None
    run(), wait()
    began = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - began) / times


def optimizer_ms(optimizer):
    """Milliseconds of one optimizer step; lr 0 keeps the weights, the momenta move."""
    optimizer.lr.zero_()
    cuda = optimizer.lr.device.type == "cuda"
    return seconds(capture(optimizer.step, []) if cuda else optimizer.step, cuda) * 1e3


def model_flops(model, length):
    """Floating-point operations of training on one token: three times the forward products.

    A weight that a token meets costs 2 forward (k of n experts, the head again for the MTP layer),
    a KDA head three products of dk x dv (recall, write, read), an MLA head queries with the keys
    and weights with the values of the half window that a token sees on average.
    """
    c, products = model.config, 0
    for m in model.language_model.modules():
        if isinstance(m, (torch.nn.Linear, Gate)):
            products += m.weight.numel()
        elif isinstance(m, Experts):
            products += 3 * c.num_experts_per_token * m.w1[0].numel()
        elif isinstance(m, KDA):
            products += 3 * m.H * m.d ** 2
        elif isinstance(m, MLA):
            products += m.H * (c.qk_nope_head_dim + m.rope + m.v_dim) * (length + 1) / 2
    again = c.num_nextn_predict_layers * model.language_model.lm_head.weight.numel()
    return 6 * (products + again)


def matmul_flops(device, dtype):
    """Floating-point operations a second of one large square matmul, the machine's yardstick."""
    cuda = device == "cuda"
    n = 4096 if cuda else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n ** 3 / seconds(lambda: a @ a, cuda, 20 if cuda else 2)


@torch.no_grad()
def attn_res_weights(model, ids):
    """Weights of every AttnRes mix, averaged over ids: mix -> [stored blocks..., running sum]."""
    record, text, found, stored = {}, model.language_model.model, {}, []
    model.eval()(ids, record=record)
    model.train()

    running = record["embed"]
    for i, layer in enumerate(text.layers):
        if stored:
            found[f"{i} attention"] = depth_weights(
                stored, running, layer.self_attention_res_proj, layer.self_attention_res_norm)
        stored += [running] * layer.starts_block
        running = record[f"layers.{i}.prefix_sum"]
        after_attention = running - record[f"layers.{i}.ffn_out"]
        found[f"{i} feed-forward"] = depth_weights(stored, after_attention, layer.mlp_res_proj,
                                                   layer.mlp_res_norm)
    found["final"] = depth_weights(stored, running, text.output_attn_res_proj,
                                   text.output_attn_res_norm)
    return found


@torch.no_grad()
def by_position(model, text, run, times=64, count=8):
    """What a trained model does far beyond the length it was trained at, with nothing changed.

    count windows of up to `times` that length, evenly spaced, are read in pieces through the state.
    carried, cut   bits per byte of the positions up to each of `ends`, from the one before it;
                   cut: of the same bytes, read with an empty state every `length` bytes
    kda_bytes, mla_bytes   what the state of one sequence holds after each of `lengths`
    """
    T = run["length"]
    times = min(times, 1 << ((len(text) - 1) // T).bit_length() - 1)      # the text may be short
    starts = np.linspace(0, len(text) - times * T - 1, count).astype(int)
    state, bits, sizes = model.eval().init_state(count), [], []
    for ids, labels in zip(*(part.to(model.device).split(T, 1)
                             for part in windows(text, starts, times * T))):
        bits.append([torch.nn.functional.cross_entropy(model(ids, memory).mT, labels,
                                                       reduction="none").mean(0) / math.log(2)
                     for memory in (state, None)])
        sizes.append([sum(t.nbytes for layer in state.layers if ("latent" in layer) == mla
                          for t in layer.values() if t is not None) // count
                      for mla in (False, True)])
    model.train()
    carried, cut = map(torch.cat, zip(*bits))
    ends = [T >> i for i in (4, 3, 2, 1) if T >> i] + [T << i for i in range(times.bit_length())]
    carried, cut = ([x[a:b].mean().item() for a, b in zip([0, *ends], ends)]
                    for x in (carried, cut))
    kda, mla = zip(*sizes)
    return dict(ends=ends, carried=carried, cut=cut, carried_last=carried[-1], cut_last=cut[-1],
                lengths=[T * i for i in range(1, times + 1)], kda_bytes=kda, mla_bytes=mla)


@torch.no_grad()
def generate_drafted(model, ids, max_new_tokens):
    """generate_ids at temperature 0, with the MTP layer guessing one token ahead.

    A call of the main model reads the known tokens that it has not read yet, then the guess: two
    tokens are settled if the guess is what it says itself, else one. Yields a list of those, once a
    call. A KDA state cannot forget a wrong guess, so the state before it is kept and the tokens
    since are read again by the next call; when more than four have gathered, by one of their own.
    Raises ValueError for an empty prompt and for a model without an MTP layer.
    """
    text = model.language_model.model
    if not ids or not hasattr(text, "mtp"):
        raise ValueError("drafting needs a prompt and an MTP layer (num_nextn_predict_layers 1)")
    tensor = lambda row: torch.tensor([row], device=model.device)
    likeliest = lambda h: model.head(h).argmax(-1)[0].tolist()
    state, known, read, guess = model.init_state(1), list(ids), 0, []
    pairs, paired = None, 0                            # what the MTP layer has read
    while max_new_tokens > 0:
        after, start = state.copy(), read
        h = model.hidden(tensor(known[read:] + guess), after)
        new = likeliest(h[:, len(known) - read - 1:])  # after the last known token, after the guess
        if new[:1] == guess or not guess:
            state, read = after, len(known) + len(guess)
        else:
            new = new[:1]
            if len(known) - read > 4:
                model.hidden(tensor(known[read:]), state)
                read = len(known)
        yield new[:max_new_tokens]
        max_new_tokens -= len(new)
        known += new
        h = h[:, paired - start:len(known) - start - 1]
        follow, _ = model.embed(tensor(known[paired + 1:]))
        pairs = pairs or text.mtp.layer.self_attn.init_state(1, h.dtype, h.device)
        guess = likeliest(text.mtp(h, follow, text.output_mix, pairs)[:, -1:])
        paired = len(known) - 1


@torch.no_grad()
def drafting(model, text, run, prompts=4, tokens=64):
    """How often the MTP layer's one-token draft is what the main model would have said.

    Greedy continuations of evenly spaced pieces of the text, in fp32: a call of two tokens then
    rounds so much like a call of one that both decode alike, which `same` counts.
    accepted   share of the drafts, one number a prompt; greedy text repeats itself, which is easy
    on_text    the same share where all that was read is held-out text, over a batch of windows
    """
    if not model.config.num_nextn_predict_layers:
        return {}
    dtype, model.compute_dtype = model.eval().compute_dtype, None
    accepted, same = [], 0
    for start in np.linspace(0, len(text) - run["length"], prompts).astype(int):
        ids = text[start:start + run["length"] // 2].tolist()
        first, *parts, last = generate_drafted(model, ids, tokens)     # last: may be cut
        accepted.append(sum(len(part) == 2 for part in parts) / len(parts))
        same += sum([first, *parts, last], []) == [*generate_ids(model, ids, tokens)]
    starts = np.linspace(0, len(text) - run["length"] - 1, run["batch"]).astype(int)
    inner = model.language_model.model
    ids = windows(text, starts, run["length"])[0].to(model.device)
    h, (follow, _) = model.hidden(ids), model.embed(ids[:, 1:])
    drafts = model.head(inner.mtp(h[:, :-1], follow, inner.output_mix)).argmax(-1)
    on_text = (drafts == model.head(h[:, 1:]).argmax(-1)).float().mean().item()
    model.train().compute_dtype = dtype
    share = float(np.mean(accepted))
    return dict(accepted=accepted, accepted_share=share, tokens_per_call=1 + share,
                same=same / prompts, on_text=on_text)


def rounding(model, text, run):
    """Held-out bits per byte with the routed experts as they are, and as MXFP4 rounds them."""
    experts, found = [m for m in model.modules() if isinstance(m, Experts)], {}
    was = experts[0].rounded
    for name, on in (("unrounded", False), ("in_mxfp4", True), ("", was)):
        for m in experts:
            m.rounded = on
        if name:
            found[name] = bits_per_byte(model, text, run)
    return found

# ---- Figures, drawn from metrics.jsonl -----------------------------------------------------------


def figure(width, height, panels=1):
    """An empty figure and its axes, side by side."""
    from matplotlib.figure import Figure
    fig = Figure((width, height), layout="constrained")
    return fig, fig.subplots(1, panels, squeeze=False)[0]


def save_figure(fig, path, header):
    """Writes the figure under a caption that says what made it; returns the path."""
    fig.supxlabel("{command}\n{hardware}, seed {seed}, commit {commit}".format(**header),
                  fontsize=6, parse_math=False)
    with replacing(path) as file:
        fig.savefig(file, format="png", dpi=150)
    return path


def plot(folder):
    """Draws every figure that the log has numbers for; returns their paths."""
    rows, paths = read_log(folder), []
    header = rows[0]["header"]
    if header.get("task") == "shapes":
        return [plot_shapes(folder)]
    for draw, key, title, xlabel, ylabel in (
            (draw_loss, "loss", "Loss", "step", "bits per byte"),
            (draw_imbalance, "imbalance", "Load of the MoE layers", "step", "largest load / mean"),
            (draw_logits, "largest_logit", "Largest attention logit", "step", "logit"),
            (draw_heads, "update_rms", "Update of a head's block", "step", "RMS / learning rate"),
            (draw_sources, "attn_res", "AttnRes after training", "source", "mix before")):
        data = [row for row in rows if row.get(key)]
        if data:
            fig, [ax] = figure(7, 4.5)
            draw(ax, [row["step"] for row in data], [row[key] for row in data], header, rows)
            ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
            paths.append(save_figure(fig, Path(folder) / f"{key}.png", header))
    return paths


def draw_again(folder):
    """The figures of a finished run or comparison, from what it wrote."""
    draw = plot_compare if Path(folder, "compare.json").exists() else plot
    try:
        paths = draw(folder)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as e:
        raise ValueError(f"{folder}: metrics.jsonl or compare.json is damaged, or not of "
                         f"train_tiny.py ({e})") from None
    if not paths:
        raise ValueError(f"{folder}/metrics.jsonl holds nothing to draw")
    return paths


def draw_loss(ax, steps, losses, header, rows):
    checks = [(row["step"], row["val_bpb"]) for row in rows if "val_bpb" in row]
    ax.plot(steps, np.array(losses) / math.log(2), lw=0.8, label="training")
    ax.plot(*zip(*checks), "o-", label="held out")
    ax.axhline(header["unigram_bits"], color="0.5", ls="--", label="entropy of single bytes")
    ax.set_ylim(bottom=0)
    ax.legend()


def draw_imbalance(ax, steps, loads, header, rows):
    for name, line in zip(header["moe"], zip(*loads)):
        ax.plot(steps, line, lw=0.8, label=name)
    ax.axhline(1, color="0.5", ls="--", label="balanced")
    ax.axhline(1.5, color="0.5", ls=":", label="1.5")
    ax.set_ylim(bottom=0.9)
    ax.legend(title=f"--balance {header['balance']}", fontsize=7, ncols=2)


def draw_logits(ax, steps, logits, header, rows):
    ax.plot(steps, logits, lw=0.8, label="largest of all MLA heads, before clipping")
    ax.axhline(header["qk_clip"], color="0.5", ls="--", label="--qk-clip")
    ax.set_ylim(bottom=0)
    ax.legend()


def draw_heads(ax, steps, updates, header, rows):
    kinds = sorted({name.split(".")[-2] for name in updates[0]})
    for kind in kinds:
        lines = np.array([[x for name, heads in update.items() if name.split(".")[-2] == kind
                           for x in heads] for update in updates])
        ax.plot(steps, lines.mean(1), label=kind)
        ax.fill_between(steps, lines.min(1), lines.max(1), alpha=0.2)
    ax.axhline(ADAMW_SIZE, color="0.5", ls="--", label="AdamW's usual size")
    ax.set_ylim(bottom=0)
    ax.legend(title=f"--optimizer {header['optimizer']}; mean and range of heads", fontsize=7)


def draw_sources(ax, steps, mixes, header, rows):
    names, lines = zip(*mixes[-1].items())
    grid = np.full((len(lines), max(map(len, lines))), np.nan)
    for row, weights in zip(grid, lines):
        row[:len(weights) - 1], row[-1] = weights[:-1], weights[-1]
    image = ax.imshow(grid, vmin=0, vmax=1, aspect="auto")
    ax.figure.colorbar(image, label="weight, mean over tokens")
    stored = ["embedding", *(f"block {i}" for i in range(1, grid.shape[1] - 1))]
    ax.set_xticks(range(grid.shape[1]), [*stored, "running sum"])
    ax.set_yticks(range(len(names)), names, fontsize=7)

# ---- The run -------------------------------------------------------------------------------------


def settings(args):
    """(config, run): the model, and everything a resumed run must have in common with the first."""
    preset = (SHAPES if args.task == "shapes" else PRESETS)[args.preset]
    run = dict(task=args.task, preset=args.preset, **preset, seed=args.seed, balance=args.balance,
               optimizer=args.optimizer, gamma=args.gamma, qk_clip=args.qk_clip, qat=args.qat)
    run |= {key: value for key in ("lr", "steps", "batch", "length")
            if (value := getattr(args, key)) is not None}
    if args.compare:
        run["log_every"] = max(1, run["steps"] // 20)                 # its figures need points
    config = K3Config.tiny(**{**run.pop("model"), **dict(map(key_value, args.set))})
    if min(run[key] for key in ("steps", "batch", "length") if key in run) < 1:
        raise ValueError("--steps, --batch and --length are numbers from 1 on")
    if config.num_nextn_predict_layers and run.get("length") == 1:
        raise ValueError("--length 1 leaves an MTP layer nothing to predict: from 2 on")
    if not 0 <= args.seed < 2 ** 63:
        raise ValueError(f"--seed {args.seed}: from 0 to 2^63 - 1")
    for key in ("lr", "gamma", "qk_clip"):
        if run[key] is not None and not 0 < run[key] < 1e30:
            raise ValueError(f"--{key.replace('_', '-')} {run[key]}: a number above 0")
    for key in ("eos_token_id", "pad_token_id"):
        if not 255 < getattr(config, key) < config.vocab_size:
            raise ValueError(f"{key} {getattr(config, key)} is one of the 256 bytes, or not below "
                             f"vocab_size {config.vocab_size}")
    widths = config.moe_intermediate_size, config.routed_expert_hidden_size or config.hidden_size
    dense = config.num_experts is None or config.first_k_dense_replace >= config.num_hidden_layers
    if args.qat and (dense or any(width % 32 for width in widths)):
        raise ValueError("--qat needs routed experts whose widths are multiples of 32, since that "
                         "many share a scale in MXFP4")
    if args.preset == "gpu" and not torch.cuda.is_available():
        raise ValueError("--preset gpu: there is no CUDA device; --preset cpu needs none")
    return config, {**run, "config": config.to_json()}


def key_value(pair):
    """--set's "KEY=VALUE" as (key, value); VALUE is JSON, or a bare word."""
    key, _, value = pair.partition("=")
    if key not in K3Config.__dataclass_fields__:
        raise ValueError(f"--set {pair}: {key} is not a key of the config")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def train(args):
    """One run, from data to checkpoint and figures; under torchrun, rank 0's part and the others'.

    All ranks draw the same batch and take their share of it. Only rank 0 looks, writes and prints.
    Of a compared run, returns the last held-out bits per byte.
    """
    (config, run), out, began = settings(args), Path(args.out), time.perf_counter()
    device = "cuda" if args.preset == "gpu" else "cpu"
    size, length, steps = run["batch"], run["length"], run["steps"]
    text, held = read_text(args.data)
    if len(text) <= size * length or len(held) <= length:
        raise ValueError(f"--data {args.data}: {len(text) + len(held)} bytes of text are too few, "
                         f"a batch takes {size} x {length} and a {HELD_OUT}th is held out")
    if size % ranks():
        raise ValueError(f"a batch of {size} windows cannot be shared out to {ranks()} processes")
    run["data"] = f"{len(text)} bytes, CRC {zlib.crc32(text):08x}"
    share = size // ranks()
    mine = slice(rank() * share, (rank() + 1) * share)
    out.mkdir(parents=True, exist_ok=True)

    if device == "cuda":       # its backward adds in no fixed order: no two runs would agree
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    model = K3(config, seed=args.seed).to(device).train()
    model.kernel, model.compute_dtype = "fast", torch.bfloat16 if device == "cuda" else None
    for module in model.modules():
        if isinstance(module, Experts):
            module.rounded = args.qat
    balancer = Balancer(model, args.balance, gamma=args.gamma)
    peaks = Peaks(model, record=bool(args.compare), tau=args.qk_clip)
    table = param_table(model, args.optimizer)
    optimizer = PerHeadMuon(table, run["lr"], dtype=muon_dtype(device))
    heads = [row for row in param_table(model) if row.heads > 1 and ".self_attn." in row.name]
    moe = [name.removeprefix("language_model.model.").removesuffix(".block_sparse_moe")
           for name, module in model.named_modules() if module in balancer.layers]

    header = {**circumstances(device), **run, "unigram_bits": unigram_bits(text), "moe": moe}
    start, rows = 0, [{"header": header}]
    if args.resume:
        state = load_state(out / "state.pt", run, model=model.state_dict(),
                           optimizer=optimizer.state)
        start = state["step"]
        rows = [row for row in read_log(out) if row.get("step", 0) <= start]
        whole = [row["step"] for row in rows if "grad_norm" in row] == [*range(1, start + 1)]
        if not whole or rows[0]["header"]["task"] != run["task"]:
            raise ValueError(f"--resume: {out}/metrics.jsonl is not the log of the {start} steps "
                             f"that led to state.pt")
        model.load_state_dict(state["model"])
        for name, t in state["optimizer"].items():
            optimizer.state[name].copy_(t)
    if rank() == 0:
        print(f"{sum(t.numel() for t in model.parameters()):,} parameters, {header['hardware']}; "
              f"{len(text):,} bytes to train on, entropy of a byte "
              f"{header['unigram_bits']:.3f} bits")

    ids, labels = (torch.zeros(share, length, dtype=torch.long, device=device) for _ in range(2))
    run_step = make_step(model, balancer, optimizer, ids, labels, peaks)
    if device == "cuda" and not args.no_cuda_graph:
        run_step = capture(run_step, [*model.state_dict().values(), *optimizer.state.values()])
    names = ["loss", *["mtp_loss"] * config.num_nextn_predict_layers, "grad_norm",
             *peaks.names]
    bits = torch.zeros((), dtype=torch.float64, device=device)
    numbers, speeds, clock = [], [], time.perf_counter()
    for step in range(start + 1, steps + 1):
        for static, new in zip((ids, labels), batch(text, args.seed, step, size, length)):
            static.copy_(new[mine])
        lr = run["lr"] * schedule(step, steps)
        optimizer.lr.fill_(lr)
        look = rank() == 0 and (step % run["log_every"] == 0 or step == steps)
        before = [row.param.detach().clone() for row in heads] if look else None
        numbers.append(run_step().clone())
        if not look:
            continue

        numbers = torch.stack(numbers).tolist()                    # the only wait for the device
        speed = max(1, round(len(numbers) * size * length / (time.perf_counter() - clock)))
        speeds.append(speed)
        rows += [dict(step=step - len(numbers) + i, **dict(zip(names, line)), tokens_per_s=speed,
                      imbalance=line[len(names):]) for i, line in enumerate(numbers, 1)]
        rows[-1].update(lr=lr, update_rms=update_rms(heads, before, lr))
        left = (steps - step) * size * length // speed
        report = (f"step {step:4d}/{steps}  loss {numbers[-1][0]:.3f}  {speed:,} tokens/s  "
                  f"imbalance {max(rows[-1]['imbalance'], default=1):.2f}  "
                  f"left {left // 60}:{left % 60:02d}")
        if step % run["val_every"] == 0 or step == steps:
            bits.fill_(bits_per_byte(model, held, run))
            rows.append({"step": step, "val_bpb": bits.item()})
            report += f"  held out {bits:.3f} bits per byte"
        if step == steps and config.attn_res_block_size:
            rows.append({"step": step, "attn_res": attn_res_weights(model, ids)})
        if step == steps and not args.compare:
            rows.append({"step": step,
                         "flops_per_s": float(np.median(speeds)) * model_flops(model, length),
                         "matmul_flops_per_s": ranks() * matmul_flops(device,
                                                                      model.compute_dtype)})
        if step == steps and args.compare:
            rows.append({"step": step, "optimizer_ms": optimizer_ms(optimizer)})
            if args.compare in MEASURES:
                rows.append({"step": step, "measured": MEASURES[args.compare](model, held, run)})
        write_log(out, rows)
        rows = []
        if not args.compare and (step % run["save_every"] == 0 or step == steps):
            save_state(out / "state.pt", run=json.dumps(run), step=step, model=model.state_dict(),
                       optimizer=optimizer.state)
        print(report, flush=True)
        numbers, clock = [], time.perf_counter()

    if args.compare and ranks() > 1:
        dist.broadcast(bits, 0)
    if rank() or args.compare:
        return bits.item()
    middle = len(held) // 2
    prompt = bytes(held[middle:middle + 64]).decode(errors="ignore").strip()
    finish(model.eval(), out, prompt or "def", run)
    print(f"{time.perf_counter() - began:.0f} s in all")


def settled(values, limit):
    """The step, from 1, after which all values are below the limit; None if the last is not."""
    first = max((i for i, x in enumerate(values, 1) if not x < limit), default=0) + 1
    return first if first <= len(values) else None


def finish(model, out, prompt, run):
    """Checkpoint, sample, figures, and the numbers that sum the run up."""
    folder = out / "checkpoint"
    experts = "mxfp4" if run["qat"] else "bf16"        # as it was trained for
    save_checkpoint(model, folder, experts, byte_tokenizer())
    sample = "".join(generate(model, load_tokenizer(folder), prompt, run["sample"], temperature=0.8,
                              seed=run["seed"]))
    print(f"---- held-out text, | and a sample that continues it ----\n{prompt}|{sample}\n----")
    print("figures", *plot(out), "\ncheckpoint", folder)
    rows = read_log(out)
    worst = [max(row["imbalance"]) for row in rows if row.get("imbalance")]
    late = worst[len(worst) // 2:]
    if late:
        print(f"largest load over mean of the worst MoE layer, second half of the steps: "
              f"{np.median(late):.2f} in the median, {max(late):.2f} at most")
    own, most = [(row["flops_per_s"], row["matmul_flops_per_s"])
                 for row in rows if "flops_per_s" in row][-1]
    print(f"model FLOPs: {own / 1e9:,.0f} billion a second, {own / most:.1%} of the "
          f"{most / 1e9:,.0f} that one large matmul reaches here")
    bits = [row["val_bpb"] for row in rows if "val_bpb" in row][-1]
    print(f"validation {bits:.3f} bits per byte; entropy of single bytes "
          f"{rows[0]['header']['unigram_bits']:.3f}")

# ---- Comparisons: the same weights and batches, one thing different ------------------------------

RULES = {"qb": {}, "qb-exact": {}, "none": {},      # --compare balance: choice -> other arguments
         **{f"sign-{g:g}": dict(balance="sign", gamma=g) for g in (1e-2, 1e-3, 1e-4)}}
SWITCHES = {"attn-res": "attn_res_block_size=2,4,null", "situ": "hidden_act=situ,silu",
            "latent-norm": "latent_moe_use_norm=true,false", "decay": "gate_lower_bound=-5,null",
            "mtp": "num_nextn_predict_layers=1,0"}
TAUS = 1e6, 3, 1, 0.3, 0.1 # --compare qk-clip; the first is never reached, a toy's logits are small
SWEEP, SWEEP_MOST = 3, 7   # factor from one learning rate to the next, and the most rates tried
MEASURES = {"length": by_position, "mtp": drafting, "qat": rounding}     # after the last step
PANELS = {"balance": ["imbalance", "loss"], "optimizer": ["loss", "head_rms", "head_spread"],
          "latent-norm": ["loss", "largest_routed"], "situ": ["loss", "largest_activation"],
          "decay": ["loss", "tokens_per_s"], "length": [], "mtp": ["loss"], "qat": ["loss"],
          "qk-clip": ["loss", "largest_logit"]}
COMPARED = ("balance", "optimizer", *SWITCHES, "length", "qat", "qk-clip")

# --compare all: folder -> what, config keys, and the part of the preset's steps that a run takes.
ALL = {"balance": ("balance", [], 10),
       "balance-896": ("balance", ["num_experts=896", "num_experts_per_token=16"], 10),
       "optimizer": ("optimizer", [], 10), "attn-res": ("attn-res", [], 10),
       "latent-norm": ("latent-norm", [], 10), "situ": ("situ", [], 10),
       "decay": ("decay", [], 20), "length": ("length", [], 5), "qk-clip": ("qk-clip", [], 10),
       "mtp": ("mtp", [], 5), "qat": ("qat", [], 5)}


def alternatives(args):
    """choice -> the arguments that --compare changes for it."""
    key, _, values = SWITCHES.get(args.compare, args.compare).partition("=")
    if key == "balance":
        return {name: {"balance": name, **change} for name, change in RULES.items()}
    if key == "optimizer":
        lr = PRESETS[args.preset]["lr"] if args.lr is None else args.lr
        return dict(at_rate(name, lr * share) for name in OPTIMIZERS for share in (1, SWEEP))
    if key == "length":
        every = [*range(1, settings(args)[0].num_hidden_layers + 1)]
        return {name: dict(set=[*args.set, f"full_attn_layers={json.dumps(mla)}"])
                for name, mla in (("hybrid", None), ("all-mla", every), ("all-kda", []))}
    if key == "qat":
        return {"usual": dict(qat=False), "qat": dict(qat=True)}
    if key == "qk-clip":
        return {f"tau={tau:g}": dict(qk_clip=tau) for tau in TAUS}
    words = re.split(r",(?![^[]*])", values)           # at commas outside of a list
    pairs = dict.fromkeys(f"{key}={word}" for word in words)
    if len(pairs) < 2:
        raise ValueError(f"--compare {args.compare}: there are {', '.join(COMPARED)}, all, and "
                         "KEY=V1,V2 with two values or more")
    return {pair: dict(set=[*args.set, pair]) for pair in pairs}


def at_rate(optimizer, lr):
    """A choice of the sweep and what it changes."""
    return f"{optimizer}@{lr:.2g}", dict(optimizer=optimizer, lr=lr)


def best_of(bits, group):
    """group(name) -> its name with the fewest held-out bits; a run that diverged is the worst."""
    best = {}
    for name in sorted(bits, key=lambda name: np.nan_to_num(bits[name], nan=np.inf)):
        best.setdefault(group(name), name)
    return best


def beyond(runs, bits):
    """The sweep's next choices: one rate further where an optimizer's best is its first or last."""
    more = {}
    for optimizer, best in best_of(bits, lambda name: runs[name].optimizer).items():
        rates = sorted(one.lr for one in runs.values() if one.optimizer == optimizer)
        at = rates.index(runs[best].lr)
        if len(rates) < SWEEP_MOST and at in (0, len(rates) - 1):
            lr = rates[at] * SWEEP if at else rates[at] / SWEEP
            more.update([at_rate(optimizer, lr)])
    return more


def compare(args):
    """Trains every choice in a folder of its own, then draws them together beside their table."""
    if args.resume:
        raise ValueError("--compare runs every choice from its start: no --resume")
    steps = PRESETS[args.preset]["steps"] // 4 if args.steps is None else args.steps
    out, sweep, more = Path(args.out), args.compare == "optimizer", alternatives(args)
    runs, bits = {}, {}
    while more:
        fresh = {name: argparse.Namespace(**{**vars(args), "steps": steps, "out": out / name,
                                             **change}) for name, change in more.items()}
        for one in fresh.values():
            settings(one)                              # all are refused before the first runs
        for name, one in fresh.items():
            if rank() == 0:
                print(f"---- {name}", flush=True)
            bits[name] = train(one)
            gc.collect()                               # its graph, before the next is captured
        runs.update(fresh)
        more = beyond(runs, bits) if sweep else {}
    if rank():
        return
    if sweep:
        place = lambda item: (OPTIMIZERS.index(item[1].optimizer), item[1].lr)
        runs = dict(sorted(runs.items(), key=place))
    found = {name: summary(out / name) for name in runs}
    best = best_of(bits, lambda name: runs[name].optimizer if sweep else name)
    first, *others = (read_log(out / name)[0]["header"] for name in runs)
    common = {k: v for k, v in first.items() if all(other[k] == v for other in others)}
    result = dict(header={**common, "compare": args.compare, "set": args.set},
                  drawn=[name for name in runs if name in best.values()], runs=found)
    if args.compare == "balance":
        result["fixed_scores"] = fixed_scores()
    write_whole(out / "compare.json", json.dumps(result, indent=1).encode())
    paths = plot_compare(out)
    print("\n".join(table_lines(found, result["drawn"])))
    for name in beyond(runs, bits) if sweep else ():
        print(f"the sweep ended before {name}: its optimizer may do better there")
    print("figures", *paths)


def compare_all(args):
    """Every experiment in a folder of its own; on one H200 all take 7 minutes."""
    began = time.perf_counter()
    for name, (what, keys, part) in ALL.items():
        steps = PRESETS[args.preset]["steps"] // part if args.steps is None else args.steps
        start = time.perf_counter()
        compare(argparse.Namespace(**{**vars(args), "compare": what, "set": [*args.set, *keys],
                                      "steps": steps, "out": Path(args.out) / name}))
        if rank() == 0:
            now = time.perf_counter()
            print(f"==== {name}: {steps} steps a run, {now - start:.0f} s; "
                  f"{now - began:.0f} s so far", flush=True)


# What a compared run is judged by: name -> (its axis, the row's entry, the number made of that).
per_matrix = lambda number: lambda update: float(np.mean([number(h) for h in update.values()]))
SERIES = {
    "loss": ("training loss, bits per byte", "loss", lambda loss: loss / math.log(2)),
    "imbalance": ("largest load / mean, worst layer", "imbalance", max),
    "head_rms": ("update of a head, RMS / learning rate", "update_rms", per_matrix(np.mean)),
    "head_spread": ("update of a head, largest / smallest", "update_rms",
                    per_matrix(lambda heads: max(heads) / max(min(heads), 1e-30))),
    "largest_activation": ("largest activation", "largest_activation", float),
    "largest_routed": ("largest routed activation", "largest_routed", float),
    "largest_logit": ("largest attention logit", "largest_logit", float),
    "mtp_loss": ("MTP training loss, bits per byte", "mtp_loss", lambda loss: loss / math.log(2)),
    "tokens_per_s": ("tokens / s", "tokens_per_s", float),
}


def series(rows, name):
    """Steps and values of what SERIES names."""
    _, key, value = SERIES[name]
    pairs = [(row["step"], value(row[key])) for row in rows if row.get(key)]
    return zip(*pairs) if pairs else ((), ())


def measured(rows):
    """What MEASURES noted of a run, or an empty dict."""
    return next((row["measured"] for row in rows if "measured" in row), {})


def summary(folder):
    """The numbers of a run's line in the table; those of steps are means of the last tenth."""
    rows = read_log(folder)
    found = {"val_bpb": [row["val_bpb"] for row in rows if "val_bpb" in row][-1]}
    for name in SERIES:
        _, values = map(list, series(rows, name))
        if values and name.startswith("largest"):
            found[name] = max(values)
        elif values:
            found[name] = float(np.mean(values[-max(1, len(values) // 10):]))
        if name == "imbalance":
            found["below_1.5_from"] = settled(values, 1.5)
    found["optimizer_ms"] = [row["optimizer_ms"] for row in rows if "optimizer_ms" in row][-1]
    return found | {k: v for k, v in measured(rows).items() if not isinstance(v, list)}


def table_lines(found, drawn):
    """The summaries as aligned text; * marks those that the figure draws if not all are."""
    heads = [*dict.fromkeys(head for numbers in found.values() for head in numbers)]
    cell = lambda x: "-" if x is None else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"
    lines = [["", *heads], *([name + " *" * (name in drawn and len(drawn) < len(found)),
                              *(cell(numbers.get(head)) for head in heads)]
                             for name, numbers in found.items())]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(line, widths)))
            for line in lines]


def plot_compare(folder):
    """compare.png, and fixed_scores.png if it was computed, from compare.json and the logs."""
    folder = Path(folder)
    result = parse_json((folder / "compare.json").read_bytes(), folder / "compare.json")
    if not {"header", "drawn", "runs"} <= {*result}:
        raise ValueError(f"{folder}/compare.json is not a comparison of train_tiny.py")
    header, what = result["header"], result["header"]["compare"]
    panels, extra = PANELS.get(what, ["loss", "imbalance"]), EXTRA.get(what, ())
    logs = {name: read_log(folder / name) for name in result["drawn"]}
    n = len(panels) + len(extra)
    fig, axes = figure(5 * n, 4.5, n)
    base = {"loss": (header["unigram_bits"], "entropy of single bytes"), "imbalance": (1, "even"),
            "head_rms": (ADAMW_SIZE, "AdamW's usual size"), "head_spread": (1, "heads alike")}
    for ax, panel in zip(axes, panels):
        for i, (name, rows) in enumerate(logs.items()):
            ax.plot(*series(rows, panel), "--" if i > 2 else "-", lw=0.9, color=f"C{i}", label=name)
            if panel == "loss" and any("mtp_loss" in row for row in rows):
                ax.plot(*series(rows, "mtp_loss"), "--", lw=0.9, color=f"C{i}",
                        label="its MTP layer, one byte further")
        ax.set(xlabel="step", ylabel=SERIES[panel][0],
               yscale="linear" if panel in ("loss", "tokens_per_s", "head_rms") else "log")
        if panel in base:
            ax.axhline(base[panel][0], color="0.5", ls=":", label=base[panel][1])
    for ax, draw in zip(axes[len(panels):], extra):
        draw(ax, result, {name: measured(rows) for name, rows in logs.items()})
    for ax in axes:
        ax.legend(fontsize=7)
    keys = "".join(f" --set {pair}" for pair in header.get("set", ()))
    fig.suptitle(f"--compare {what}{keys}, {header['steps']} steps of {header['batch']} x "
                 f"{header['length']} bytes")
    paths = [save_figure(fig, folder / "compare.png", header)]
    if "fixed_scores" in result:
        paths.append(plot_fixed_scores(result["fixed_scores"], folder, header))
    return paths


def draw_sweep(ax, result, found):
    for best in result["drawn"]:
        optimizer = best.split("@")[0]
        points = [(float(name.split("@")[1]), numbers["val_bpb"])
                  for name, numbers in result["runs"].items() if name.split("@")[0] == optimizer]
        ax.semilogx(*zip(*points), "o-", label=optimizer)
    ax.set(xlabel="peak learning rate", ylabel="held out, bits per byte")


def draw_positions(ax, result, found):
    for i, (name, of) in enumerate(found.items()):
        ax.semilogx(of["ends"], of["carried"], "o-", base=2, color=f"C{i}", label=name)
        ax.semilogx(of["ends"], of["cut"], ":", base=2, color=f"C{i}",
                    label="same bytes, context cut")
    ax.axvline(of["lengths"][0], color="0.5", ls="--", label="length in training")
    ax.set(xlabel="position (to each mark from the one before)", ylabel="held out, bits per byte")


def draw_gain(ax, result, found):
    for name, of in found.items():
        T = of["lengths"][0]
        gain = [(end, a - b) for end, a, b in zip(of["ends"], of["carried"], of["cut"]) if end > T]
        if gain:
            ax.semilogx(*zip(*gain), "o-", base=2, label=name)
    ax.axhline(0, color="0.5", ls=":", label="context cut")
    ax.set(xlabel="position (to each mark from the one before)",
           ylabel="held out, carried less cut, bits per byte")


def draw_bytes(ax, result, found):
    for i, (name, of) in enumerate(found.items()):
        for kind, line in (("kda", "-"), ("mla", "--")):
            if max(of[f"{kind}_bytes"]):
                ax.loglog(of["lengths"], of[f"{kind}_bytes"], line, base=2,
                          color=f"C{i}", label=f"{name}, {kind.upper()} layers")
    ax.set(xlabel="tokens read", ylabel="state of one sequence, bytes")


def draw_accepted(ax, result, found):
    for name, of in found.items():
        if of:
            ax.bar(range(1, 1 + len(of["accepted"])), of["accepted"], label=name)
            ax.axhline(of["accepted_share"], color="0.5", ls="--",
                       label=f"mean: {of['tokens_per_call']:.2f} tokens a call")
            ax.axhline(of["on_text"], color="0.5", ls=":", label="after held-out text")
            ax.set_xticks(range(1, 1 + len(of["accepted"])))
    ax.set(xlabel="prompt continued greedily", ylabel="drafts accepted, share", ylim=(0, 1.3))


def draw_rounding(ax, result, found):
    for name, of in found.items():
        ax.plot(["unrounded experts", "in MXFP4"], [of["unrounded"], of["in_mxfp4"]], "o-",
                label=name)
    ax.set(ylabel="held out, bits per byte", xlim=(-0.5, 1.5),
           xlabel="--qat rounds from the first step on, the report after pre-training")


# What --compare draws beside the PANELS.
EXTRA = {"optimizer": [draw_sweep], "length": [draw_positions, draw_gain, draw_bytes],
         "mtp": [draw_accepted], "qat": [draw_rounding]}


# ---- Fixed scores: the balancing rules alone  [§2.3.3] -------------------------------------------


def random_scores(m, favour, generator):
    """Scores [m, n] of a router that likes expert j by 0.26 favour_j, and 0.1 of chance."""
    noise = torch.randn(m, len(favour), generator=generator)
    return torch.sigmoid(0.26 * favour + 0.1 * noise)


def balance_scores(scores, k, rule, updates):
    """Largest load over mean before and after each update of b = rule(scores, b, cutoff, load)."""
    n = scores.shape[1]
    bias, found = torch.zeros(n), []
    for i in range(updates + 1):
        experts, _, cutoff = route(scores, bias, k)
        load = torch.bincount(experts.flatten(), minlength=n).float()
        found.append((load.max() / load.mean()).item())
        bias = rule(scores, bias, cutoff, load)
    return found


def fixed_scores(m=1024, n=896, k=16, shards=4, seed=0, bins=(100, 300, 1000, 3000)):
    """Balancing rules on scores that never change, from zero bias: a dict of numbers to draw.

    curves  largest load over mean, after each update
    shards  the same where each rank's tokens like other experts: quantiles of all tokens, or the
            mean of the ranks' own quantiles
    bins    [B, bin width, largest error against the exact quantile]
    """
    generator = torch.Generator().manual_seed(seed)
    favour = torch.randn(1 + shards, n, generator=generator)
    scores = random_scores(m, favour[0], generator)

    def histogram(s, b, cutoff, load, B=1000):
        h = QuantileHistogram(n, k, B)
        h.start(b), h.add(s, cutoff)
        h.pooled = True                                # rank 0 is alone here
        return h.finish()
    exact = lambda s, b, cutoff, load: quantile_bias(s, cutoff, k)
    sign = lambda gamma: lambda s, b, cutoff, load: sign_bias(b, load, gamma)
    averaged = lambda s, b, cutoff, load: torch.stack([
        quantile_bias(part, alpha, k)
        for part, alpha in zip(s.chunk(shards), cutoff.chunk(shards))]).mean(0)

    rules = {"exact": (exact, 10), "histogram": (histogram, 10), "sign 1e-2": (sign(1e-2), 50),
             "sign 1e-3": (sign(1e-3), 200)}
    curves = {name: balance_scores(scores, k, *rule) for name, rule in rules.items()}
    skewed = torch.cat([random_scores(m // shards, own, generator) for own in favour[1:]])
    pooled = {name: balance_scores(skewed, k, rule, 10)
              for name, rule in (("pooled", exact), ("averaged", averaged))}
    zero = torch.zeros(n)
    cutoff = route(scores, zero, k)[2]
    errors = [[B, 2 / B, (histogram(scores, zero, cutoff, None, B) -
                          quantile_bias(scores, cutoff, k)).abs().max().item()] for B in bins]
    return dict(tokens=m, experts=n, k=k, curves=curves, shards=pooled, bins=errors)


def plot_fixed_scores(found, folder, header):
    fig, (rules, shards, bins) = figure(15, 4.5, 3)
    for ax, part, title in ((rules, "curves", "same scores every update"),
                            (shards, "shards", "ranks whose tokens like other experts")):
        for name, line in found[part].items():
            ax.plot(line, ".-" if len(line) < 20 else "-", lw=0.9, label=name)
        ax.axhline(1.4, color="0.5", ls=":", label="1.4")
        ax.set_xscale("symlog", linthresh=10)
        ax.set(title=title, xlabel="update", ylabel="largest load / mean", yscale="log",
               xlim=(0, None))
    B, width, error = zip(*found["bins"])
    bins.loglog(B, width, "--", color="0.5", label="bin width")
    bins.loglog(B, error, "o-", label="largest error of a bias")
    bins.set(title="histogram against exact quantile", xlabel="bins", ylabel="score")
    for ax in (rules, shards, bins):
        ax.legend(fontsize=7)
    fig.suptitle("{tokens} tokens, {experts} experts, top {k}".format(**found))
    return save_figure(fig, folder / "fixed_scores.png", header)

# ---- Shapes: a toy that learns to see  [§2.4] ----------------------------------------------------

SHAPES = {      # what `model` leaves out is K3Config.tiny's
    "cpu": dict(
        steps=500, batch=30, lr=2e-3, side=56, classes=[4, 2, 3],      # colours, shapes, counts
        log_every=10, val_every=50, val_batches=10,
        model=dict(num_hidden_layers=2, num_experts=8, num_experts_per_token=2,
                   vt_num_hidden_layers=2)),
    "gpu": dict(
        steps=1100, batch=96, lr=2e-3, side=84, classes=[6, 4, 4],
        log_every=25, val_every=100, val_batches=20,
        model=dict(hidden_size=128, num_hidden_layers=3, intermediate_size=384,
                   linear_num_heads=4, num_attention_heads=4, q_lora_rank=64,
                   moe_intermediate_size=64, routed_expert_hidden_size=64,
                   vt_num_hidden_layers=3, vt_hidden_size=128, vt_intermediate_size=512,
                   vt_num_attention_heads=4, qkv_hidden_size=128)),
}
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0),
           "purple": (1, 0, 1), "white": (1, 1, 1)}
FORMS = {       # whether x (to the right), y (down) in -1 ... 1 is inside
    "square": lambda x, y: (abs(x) < 1) & (abs(y) < 1),
    "cross": lambda x, y: (abs(x) < 0.15) | (abs(y) < 0.15),
    "circle": lambda x, y: x * x + y * y < 1,
    "triangle": lambda x, y: 2 * abs(x) < y + 1}
BYTES = Tokenizer({bytes([b]): b for b in range(256)}, {n: i for i, n in enumerate(CONTROL, 256)})


def choices(run):
    """The possible answers to each question; they are drawn equally often."""
    every = {"colour": list(COLOURS), "shape": list(FORMS), "count": list("1234")}
    return {question: answers[:n] for (question, answers), n in zip(every.items(), run["classes"])}


def picture(rng, side, colour, shape, count):
    """A picture [side, side, 3] uint8: noise below 64, shapes 192 brighter that do not touch.

    They are so small (radius side/8 ... side/7) that three always leave room for a fourth.
    """
    noise = np.frombuffer(rng.bytes(side * side * 3), np.uint8) & 63
    picture, placed = noise.reshape(side, side, 3), []
    paint = np.uint8(192) * np.array(COLOURS[colour], np.uint8)
    while len(placed) < int(count):
        r = rng.uniform(side / 8, side / 7)
        x, y = rng.uniform(r, side - 1 - r, 2)
        if all(max(abs(x - a), abs(y - b)) > r + s + 2 for a, b, s in placed):
            placed.append((x, y, r))
            part = picture[int(y - r):int(y + r) + 1, int(x - r):int(x + r) + 1]     # a view
            v, u = (np.arange(n) + int(c - r) - c for n, c in zip(part.shape, (y, x)))
            part[FORMS[shape](u / r, v[:, None] / r)] += paint
    return picture


def examples(rng, run, n):
    """n pictures, with the questions in turn and their answers."""
    every = choices(run)
    for i in range(n):
        truth = {kind: answers[rng.integers(len(answers))] for kind, answers in every.items()}
        question = list(every)[i % len(every)]
        yield picture(rng, run["side"], **truth), question, truth[question]


def conversation(config, side, question, answer):
    """ids that begin as `k3.py generate --image` has them, and labels with the picture merged in.

    Only the answer and the end token have labels.
    """
    ids = BYTES.encode(image_prompt(side, side), control=True) + BYTES.encode(question + "?")
    labels = [*BYTES.encode(answer), config.eos_token_id]
    grown = (side // config.patch_size) ** 2 // math.prod(config.merge_kernel_size) - 1
    return ids + labels[:-1], [-100] * (len(ids) + grown - 1) + labels


def cut_patches(pictures, p):
    """pixel_values and grid_thws of [n, side, side, 3] uint8, each as preprocess_image cuts it."""
    n, g = len(pictures), pictures.shape[1] // p
    x = pictures.view(n, g, p, g, p, 3).permute(0, 1, 3, 5, 2, 4).reshape(-1, 3, p, p)
    return {"pixel_values": (x / 255 - 0.5) / 0.5, "grid_thws": torch.tensor([[1, g, g]] * n)}


def shapes_batch(rng, config, run, device):
    """Questions, ids, labels and media of run["batch"] new examples; padding is on the right."""
    pictures, questions, answers = zip(*examples(rng, run, run["batch"]))
    rows = zip(*(conversation(config, run["side"], *qa) for qa in zip(questions, answers)))
    pad = lambda part, fill: torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in part], batch_first=True, padding_value=fill).to(device)
    ids, labels = map(pad, rows, (config.pad_token_id, -100))
    pictures = torch.from_numpy(np.stack(pictures)).to(device)
    return questions, ids, labels, cut_patches(pictures, config.patch_size)


@torch.no_grad()
def accuracy(model, batches):
    """Share of each question's greedy answers that are right to the last byte, and end there.

    They are where each byte is the likeliest after the right ones before it: one forward pass over
    prompt and answer tells, without generating.
    """
    marks = {}
    model.eval()
    for questions, ids, labels, media in batches:
        right = (model(ids, **media).argmax(-1) == labels) | (labels == -100)
        for question, mark in zip(questions, right.all(1).tolist()):
            marks.setdefault(question, []).append(mark)
    model.train()
    return {question: sum(given) / len(given) for question, given in marks.items()}


def train_shapes(args):
    """One run, from drawing to a checkpoint that answers questions about a picture."""
    if (args.data or args.length or args.resume or args.compare or args.qk_clip or args.qat
            or ranks() > 1):
        raise ValueError("--task shapes draws its data and runs in one go and in one process: no "
                         "--data, no --length, no --resume, no --compare, no --qk-clip, no --qat, "
                         "no torchrun")
    (config, run), out, began = settings(args), Path(args.out), time.perf_counter()
    if run["batch"] < len(choices(run)):
        raise ValueError(f"--batch {run['batch']}: each question needs an example, so that "
                         f"--task shapes takes {len(choices(run))} or more")
    drawn = config.patch_size, config.merge_kernel_size, config.media_placeholder_token_id
    if not config.vt_num_hidden_layers or drawn != (14, (2, 2), BYTES.control("<|media_pad|>")):
        raise ValueError("--task shapes needs a vision tower, with patches of 14 pixels of which "
                         "2 x 2 are merged, and the byte tokenizer's placeholder id")
    device, steps = "cuda" if args.preset == "gpu" else "cpu", run["steps"]
    out.mkdir(parents=True, exist_ok=True)

    model = K3(config, seed=args.seed).to(device).train()
    model.kernel, model.compute_dtype = "fast", torch.bfloat16 if device == "cuda" else None
    balancer = Balancer(model, args.balance, gamma=args.gamma)
    table = param_table(model, args.optimizer)
    optimizer = PerHeadMuon(table, run["lr"], dtype=muon_dtype(device))
    fresh = lambda *seed: np.random.default_rng([args.seed, *seed])
    held = [shapes_batch(fresh(0, i), config, run, device) for i in range(run["val_batches"])]
    chance = {question: 1 / len(answers) for question, answers in choices(run).items()}
    header = {**circumstances(device), **run, "chance": chance}
    rows = [{"header": header}]
    size = lambda module: sum(t.numel() for t in module.parameters())
    print(f"{size(model):,} parameters, {size(model.vision_tower):,} of them in the vision tower; "
          f"{header['hardware']}")

    names = ["vision_grad_norm", "loss", *["mtp_loss"] * config.num_nextn_predict_layers,
             "grad_norm"]
    numbers, clock = [], time.perf_counter()
    for step in range(1, steps + 1):
        _, ids, labels, media = shapes_batch(fresh(step), config, run, device)
        lr = run["lr"] * schedule(step, steps)
        optimizer.lr.fill_(lr)
        line = make_step(model, balancer, optimizer, ids, labels, **media)()
        vision = torch.nn.utils.get_total_norm([p.grad for p in model.vision_tower.parameters()])
        numbers.append(torch.cat([vision.view(1), line]))
        if step % run["log_every"] and step != steps:
            continue

        numbers = torch.stack(numbers).tolist()
        speed = round(len(numbers) * run["batch"] / (time.perf_counter() - clock))
        rows += [dict(step=step - len(numbers) + i, **dict(zip(names, line)), pictures_per_s=speed,
                      imbalance=line[len(names):]) for i, line in enumerate(numbers, 1)]
        rows[-1]["lr"] = lr
        report = f"step {step:4d}/{steps}  loss {rows[-1]['loss']:.3f}  {speed:,} pictures/s"
        if step % run["val_every"] == 0 or step == steps:
            shares = accuracy(model, held)
            rows.append({"step": step, "accuracy": shares, "chance": chance})
            report += "  held out" + "".join(f"  {q} {a:.1%}" for q, a in shares.items())
        write_log(out, rows)
        print(report, flush=True)
        rows = []
        numbers, clock = [], time.perf_counter()
    finish_shapes(model, run, out)
    print(f"{time.perf_counter() - began:.0f} s in all")


def finish_shapes(model, run, out):
    """Checkpoint, figure, a picture with what the saved model says about it, and the accuracy."""
    from matplotlib.image import imsave
    folder, file = out / "checkpoint", out / "picture.png"
    save_checkpoint(model, folder, "bf16", byte_tokenizer())
    truth = {question: answers[-1] for question, answers in choices(run).items()}
    with replacing(file) as f:
        imsave(f, picture(np.random.default_rng(run["seed"]), run["side"], **truth), format="png")
    saved, tokenizer = load_model(folder), load_tokenizer(folder)
    pixels, grid = preprocess_image(file)
    last = [row for row in read_log(out) if "accuracy" in row][-1]
    print(f"figure {plot_shapes(out)}\ncheckpoint {folder}, which says about {file}:")
    for question, drawn in truth.items():
        prompt, _ = conversation(model.config, run["side"], question, "")
        said = generate(saved, tokenizer, prompt, 20, pixel_values=pixels, grid_thws=grid[None])
        print(f"  {question}? {''.join(said)!r}, drawn as {drawn!r}; of held-out answers "
              f"{last['accuracy'][question]:.1%} right, by chance {last['chance'][question]:.1%}")


def plot_shapes(folder):
    """Accuracy and chance, the loss, and the vision tower's gradient norm, from metrics.jsonl."""
    rows = read_log(folder)
    header, checks = rows[0]["header"], [row for row in rows if "accuracy" in row]
    fig, (share, *others) = figure(13, 4, 3)
    for i, (question, chance) in enumerate(header["chance"].items()):
        share.plot([row["step"] for row in checks], [row["accuracy"][question] for row in checks],
                   "o-", color=f"C{i}", label=f"{question}?")
        share.axhline(chance, color=f"C{i}", ls="--", lw=0.8)
    share.set(title="Right answers", xlabel="step", ylabel="share, held out (dashed: chance)",
              ylim=(0, 1.02))
    share.legend()
    for ax, key, title, ylabel in (
            (others[0], "loss", "Loss on the answers", "nats per byte"),
            (others[1], "vision_grad_norm", "Vision tower's gradient", "norm")):
        ax.semilogy(*zip(*((row["step"], row[key]) for row in rows if key in row)), lw=0.7)
        ax.set(title=title, xlabel="step", ylabel=ylabel)
    return save_figure(fig, Path(folder) / "shapes.png", header)


def main(argv=None):
    ap = OneLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = ap.add_argument
    add("--task", choices=("text", "shapes"), default="text",
        help="text: predict the next byte; shapes: answer questions about drawn pictures")
    add("--preset", choices=PRESETS, default="gpu" if torch.cuda.is_available() else "cpu")
    add("--steps", type=int, metavar="N", help="optimizer steps (default: the preset's)")
    add("--batch", type=int, metavar="N", help="windows of a step (default: the preset's)")
    add("--length", type=int, metavar="N", help="bytes of a window (default: the preset's)")
    add("--data", metavar="PATH", help="UTF-8 file or folder (default: Python's standard library)")
    add("--out", metavar="DIR",
        help="for log, figures, checkpoint (default: out; for shapes out/shapes); what an earlier "
        "run left there is replaced")
    add("--seed", type=int, default=0, help="of weights, batches and the sample")
    add("--resume", action="store_true", help="continue from DIR/state.pt")
    add("--balance", choices=("qb", "qb-exact", "sign", "none"), default="qb")
    add("--gamma", type=float, default=1e-3, metavar="X", help="step of --balance sign")
    add("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    add("--lr", type=float, metavar="X", help="peak learning rate (default: the preset's)")
    add("--qk-clip", type=float, metavar="TAU", help="clip MLA heads whose largest logit passes it")
    add("--qat", action="store_true", help="compute with routed experts as MXFP4 rounds them, from "
        "the first step on (the report: after pre-training); the checkpoint holds them so")
    add("--no-cuda-graph", action="store_true", help="launch every kernel by itself")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="config key; repeatable")
    add("--compare", metavar="WHAT", help=f"{', '.join(COMPARED)}, all, or "
        "KEY=V1,V2: each choice a run in DIR/, a quarter of the preset's steps unless --steps "
        "(all: a 20th to a 5th of them)")
    add("--plot", metavar="DIR", help="only draw the figures of DIR/metrics.jsonl again")
    args = ap.parse_args(argv)
    if args.out is None:
        args.out = "out/shapes" if args.task == "shapes" else "out"
    try:       # a wrong argument is wrong on every rank, a file may fail on one
        return guarded("train_tiny.py", lambda: run(args),
                       lambda error: rank() == 0 or isinstance(error, OSError))
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def run(args):
    """What the arguments ask for."""
    if "" in (args.plot, args.data, args.out, args.compare):
        raise ValueError("--plot, --data, --out and --compare take no empty word")
    if args.plot and args.compare:
        raise ValueError("--plot draws what a --compare has left: give one")
    if args.plot:
        own = any(Path(args.plot, name).exists() for name in ("compare.json", "metrics.jsonl"))
        below = sorted(path.parent for path in Path(args.plot).glob("*/compare.json"))
        for folder in below if below and not own else [args.plot]:
            print(*draw_again(folder))
        return
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        join_ranks("cuda" if args.preset == "gpu" else "cpu")
    with claimed(args.out) if rank() == 0 else contextlib.nullcontext():
        (train_shapes if args.task == "shapes" else compare_all if args.compare == "all" else
         compare if args.compare else train)(args)


@contextlib.contextmanager
def claimed(folder):
    """Keeps other runs out of the folder meanwhile; one that stays empty goes."""
    os.makedirs(folder, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"--out {folder}: another run is writing there") from None
    finally:
        os.close(lock)
        with contextlib.suppress(OSError):
            os.rmdir(folder)


if __name__ == "__main__":
    leave(main())
