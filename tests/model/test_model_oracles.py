"""The closed forms of Transformer against real torch modules on the meta device, which are written here anew."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from simpar.model.transformer import Transformer
from simpar.model.work import Attention, Gemm

BATCH, SEQ = 2, 24


class GptBlock(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x):
        batch, seq, hidden = x.shape
        q, k, v = (
            t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, layers, hidden, heads, vocab, positions):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.blocks = nn.Sequential(*(GptBlock(hidden, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class LlamaBlock(nn.Module):
    def __init__(self, hidden, *, heads, kv_heads, head_dim, ffn, qkv_bias, qk_norm):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])
        self.q = nn.Linear(hidden, heads * head_dim, bias=qkv_bias)
        self.k = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        self.v = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        self.out = nn.Linear(heads * head_dim, hidden, bias=False)
        self.qk_norms = nn.ModuleList([nn.RMSNorm(head_dim) if qk_norm else nn.Identity() for _ in range(2)])
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        batch, seq, _ = x.shape
        y = self.norms[0](x)
        q = self.qk_norms[0](self.q(y).view(batch, seq, self.heads, -1)).transpose(1, 2)
        k = self.qk_norms[1](self.k(y).view(batch, seq, self.kv_heads, -1)).transpose(1, 2)
        v = self.v(y).view(batch, seq, self.kv_heads, -1).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers, vocab, hidden, **block):
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.blocks = nn.Sequential(*(LlamaBlock(hidden, **block) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.tokens(ids))))


def gpt():
    biases = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    model = Transformer(
        name="gpt",
        layers=3,
        hidden=32,
        heads=4,
        gated_mlp=False,
        vocab=100,
        tied_embeddings=True,
        position="learned",
        max_positions=40,
        norm="layernorm",
        **biases,
    )
    return model, Gpt(3, 32, 4, 100, 40)


def llama_like(**block):
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "qkv_bias": False, "qk_norm": False, **block}
    fixed = {"name": "llama", "layers": 3, "gated_mlp": True, "vocab": 100, "tied_embeddings": False}
    return Transformer(**fixed, ffn_hidden=56, **sizes), Llama(3, 100, ffn=56, **sizes)


MODELS = {
    "gpt": gpt,
    "llama": llama_like,
    "llama, equal widths": lambda: llama_like(kv_heads=4, head_dim=8),
    "qwen2": lambda: llama_like(qkv_bias=True),
    "qwen3": lambda: llama_like(qk_norm=True, head_dim=24),
}


@pytest.fixture(params=MODELS)
def pair(request):
    with torch.device("meta"):
        return MODELS[request.param]()


def measured_flop(module):
    """FLOP of forward, and of forward and backward, as torch counts them: attention as plain products, mask ignored."""
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as forward:
        module(ids)
    with FlopCounterMode(display=False) as both:
        module(ids).sum().backward()
    return forward.get_total_flops(), both.get_total_flops()


def layer_gemms(model, tokens):
    """The forward products of one layer, as a lowering would emit them."""
    mlp_in = [Gemm(tokens, model.ffn_hidden, model.hidden)] * (model.mlp_matrices - 1)
    return [
        Gemm(tokens, model.query_width + 2 * model.kv_width, model.hidden),
        Gemm(tokens, model.hidden, model.query_width),
        *mlp_in,
        Gemm(tokens, model.hidden, model.ffn_hidden),
    ]


def test_parameters_equal_the_modules(pair):
    model, module = pair
    assert model.parameters == sum(p.numel() for p in module.parameters())  # parameters() gives a shared one once
    block = module.blocks[0]
    assert model.layer_parameters(model.layer_kind(0)) == sum(p.numel() for p in block.parameters())


def test_model_flop_equal_torchs_counter(pair):
    model, module = pair
    forward, both = measured_flop(module)
    assert model.flop_per_token(SEQ, "full").total * BATCH * SEQ == forward
    assert model.step_flop(BATCH * SEQ, SEQ, "full").total == both


def test_kernels_of_the_same_shapes_do_the_same_work(pair):
    model, module = pair
    tokens = BATCH * SEQ
    attention = Attention(BATCH, SEQ, SEQ, model.heads, model.kv_heads, model.head_dim, causal=False)
    layer = sum(gemm.work.flop for gemm in layer_gemms(model, tokens)) + attention.work.flop
    head = Gemm(tokens, model.vocab, model.hidden).work.flop
    assert model.layers * layer + head == measured_flop(module)[0]


@pytest.mark.parametrize(("seq_q", "seq_kv", "kv_heads"), [(24, 24, 4), (24, 48, 4), (24, 24, 2)])
def test_attention_kernels_count_as_torchs_flash_formulas(seq_q, seq_kv, kv_heads):
    q, kv = (BATCH, 4, seq_q, 16), (BATCH, 4, seq_kv, 16)  # torch's formula wants the heads expanded
    forward = Attention(BATCH, seq_q, seq_kv, 4, kv_heads, 16, causal=False)
    backward = Attention(BATCH, seq_q, seq_kv, 4, kv_heads, 16, causal=False, backward=True)
    assert forward.work.flop == sdpa_flop_count(q, kv, kv)
    assert backward.work.flop == sdpa_backward_flop_count(q, q, kv, kv)
