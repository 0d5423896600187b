"""`widen`: a wider module of any class computes what the small one does, and its copies part."""

import json
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import growkern
from growkern import GrowthError


class Block(nn.Module):
    """Attention of heads of 4 with fused projections, and a gated FFN."""

    def __init__(self, width, heads, hidden):
        super().__init__()
        self.norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-6), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 12 * heads), nn.Linear(4 * heads, width)
        self.gate_up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(-2, -3) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(-2, -3).flatten(-2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, width, heads, hidden, is_tied=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 11)
        self.block, self.norm = Block(width, heads, hidden), nn.LayerNorm(width)
        # PyTorch's own layer, behind norms, with 2 heads of 4 in 8
        self.theirs = nn.TransformerEncoderLayer(width, width // 4, hidden, 0.0, batch_first=True)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.theirs(self.block(self.embed(tokens)))))


FUSED = {"qkv": 3, "gate_up": 2}


def made(*sizes, **options):
    torch.manual_seed(sum(sizes))
    model = Model(*sizes, **options).double()
    for x in model.parameters():
        nn.init.normal_(x, std=0.5)
    return model


def test_a_wider_model_computes_the_same_and_its_copies_learn_apart():
    small, large = made(8, 2, 10), made(16, 3, 17)
    assert growkern.widen(small, large, fused=FUSED) is large
    tokens = torch.arange(20).view(2, 10) % 11
    logits = large(tokens)
    torch.testing.assert_close(logits, small(tokens), rtol=1e-12, atol=1e-12)
    # 2 of 3 heads, and 7 of 17 hidden units, are copies of others
    F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1).flatten()).backward()
    for layer, units in ((large.block.qkv, 12), (large.block.gate_up, 17)):
        gradient = layer.weight.grad[:units]
        apart = (gradient[:, None] - gradient).norm(dim=-1) + torch.eye(units)
        assert apart.min() > 1e-9
    for moved in (large.embed, large.norm):
        assert (moved.weight.grad[..., :8] != moved.weight.grad[..., 8:]).any()


@pytest.mark.parametrize("told", [{}, {"qkv": 3}, {"gate_up": 2}])
def test_what_fused_lacks_is_named(told):
    """`qkv` and `gate_up` hold several matrices; all other layers hold one."""
    small, large = made(8, 2, 10), made(16, 3, 17)
    line = re.escape(f"pass fused={json.dumps({**told, **FUSED})}")
    before = [x.clone() for x in large.parameters()]
    with pytest.raises(GrowthError, match=f"would differ by .* several matrices.*{line}$"):
        growkern.widen(small, large, fused=told, inputs=(torch.arange(6)[None],))
    assert all(map(torch.equal, before, large.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_from_sizes_keep_sums_exactly(dtype):
    weight = torch.randn(6, 5).to(dtype)
    given = growkern.widening((6, 5), (9, 12), fused=3)
    wide = growkern.expand(weight, **given)
    assert given["rows"].tolist() == [0, 1, 0, 2, 3, 2, 4, 5, 4]
    summed = torch.zeros(9, 5, dtype=torch.float64)
    summed.index_add_(1, torch.arange(12) % 5, wide.double())
    assert torch.equal(summed, weight.double()[given["rows"]])
    assert growkern.widening((4,), (4,)) == {}
    assert growkern.widening((7, 4), (7, 8), reads=False).keys() == {"cols"}


@pytest.mark.parametrize(
    ("sizes", "fused", "message"),
    [
        ((12, 3, 10), FUSED, r"norm \(.*Norm\): 12 entries are no multiple of 8"),
        ((16, 2, 8), FUSED, r"gate_up\.weight of Linear: .* no size may fall"),
        ((16, 4, 10), {"gkv": 3}, "did you mean 'qkv'"),
        ((16, 4, 10), {"qkv": 5}, "fused=5 does not divide"),
        ((16, 4, 10), {"qkv": "3"}, "fused='3': expected how many matrices"),
        ((16, 4, 10), 3, "fused is an int: give numbers by the names of layers"),
    ],
)
def test_what_cannot_be_exact_is_refused_before_writing(sizes, fused, message):
    small, large = made(8, 2, 10), made(*sizes)
    before = {name: x.clone() for name, x in large.state_dict().items()}
    with pytest.raises(GrowthError, match=message):
        growkern.widen(small, large, fused=fused)
    assert all(torch.equal(x, before[name]) for name, x in large.state_dict().items())


def test_a_tied_head_cannot_read_what_the_embedding_writes():
    with pytest.raises(GrowthError, match=r"embed\.weight and head\.weight are one parameter"):
        growkern.widen(made(8, 2, 10, is_tied=True), made(16, 4, 10, is_tied=True), fused=FUSED)


def test_other_modules_are_refused_by_name():
    small = nn.Sequential(nn.Bilinear(2, 2, 2))
    with pytest.raises(GrowthError, match=r"0\.weight of Bilinear.*growkern\.widening"):
        growkern.widen(small, nn.Sequential(nn.Bilinear(4, 4, 4)))
    with pytest.raises(GrowthError, match=r"only one of .* skip=\('1',\)"):
        growkern.widen(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(*2 * [nn.Linear(2, 2)]))
    with pytest.raises(GrowthError, match="only one of small and large has 1"):
        growkern.widen(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 4)))
    with pytest.raises(GrowthError, match="1 rows cannot become 2"):
        growkern.widen(nn.Embedding(1, 2), nn.Embedding(2, 2))


@pytest.mark.parametrize(
    ("small", "large", "message"),
    [
        (
            nn.MultiheadAttention(8, 2),
            nn.MultiheadAttention(16, 2),
            "heads of 4 entries cannot become heads of 8: .* num_heads=embed_dim / 4",
        ),
        (
            nn.TransformerEncoderLayer(8, 2, 8, activation=F.gelu),
            nn.TransformerEncoderLayer(16, 4, 8, activation=F.relu),
            "activation is gelu, but relu in `large`",
        ),
        (nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(16), "eps is 1e-06, but None in `large`"),
        (nn.Embedding(3, 8, max_norm=1.0), nn.Embedding(3, 16, max_norm=1.0), "max_norm also"),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU()), "`large` has a GELU here"),
        (nn.Linear(8, 8), nn.Linear(16, 16, device="meta"), "of `large` has no values"),
        (nn.Linear(8, 8, device="meta"), nn.Linear(16, 16), "of `small` has no values"),
        (nn.LazyLinear(8), nn.LazyLinear(16), "of `small` has no values"),
        (
            torch.ao.nn.quantized.dynamic.Linear(8, 8),
            torch.ao.nn.quantized.dynamic.Linear(16, 16),
            "is a quantised Linear",
        ),
    ],
)
def test_layers_that_compute_something_else_are_refused(small, large, message):
    with pytest.raises(GrowthError, match=message):
        growkern.widen(small, large)


def test_modules_in_two_places():
    """`large` may have two modules where `small` has one, and not the other way round."""
    inner, two = nn.Linear(4, 4), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    growkern.widen(nn.Sequential(inner, inner), two)
    x = torch.randn(3, 4)
    torch.testing.assert_close(two(x.repeat(1, 2))[:, :4], inner(inner(x)))
    inner = nn.Linear(8, 8)
    with pytest.raises(GrowthError, match=r"are one parameter in `large`, but two in `small`"):
        growkern.widen(two, nn.Sequential(inner, inner))


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (nn.GroupNorm(2, 8), nn.GroupNorm(4, 16)),
        (nn.GroupNorm(1, 8), nn.GroupNorm(1, 16)),
        (nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(16, elementwise_affine=False)),
        (nn.Sequential(nn.Dropout(0.1)), nn.Sequential(nn.Identity())),
    ],
)
def test_norms_of_groups_and_without_weights_stay_exact(small, large):
    growkern.widen(small.eval(), large.eval())
    x = torch.randn(3, 8)
    torch.testing.assert_close(large(x.repeat(1, 2)), small(x).repeat(1, 2))


def test_a_transformer_that_chooses_another_fast_path():
    """With an odd number of heads PyTorch does not take its nested tensors."""
    small, large = (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(d, d // 4, d, batch_first=True), 2)
        for d in (4, 8)
    )
    growkern.widen(small.eval(), large.eval())
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(large(x.repeat(1, 1, 2))[..., :4], small(x))


def test_buffers_of_the_same_shape_are_copied():
    """The outputs depend on them too."""
    small, large = (
        nn.Sequential(nn.Linear(3, n), nn.Linear(n, 6), nn.BatchNorm1d(6)) for n in (4, 9)
    )
    small(torch.randn(20, 3) + 2)
    growkern.widen(small, large)
    x = torch.randn(5, 3)
    torch.testing.assert_close(large.eval()(x), small.eval()(x))


def test_expand_says_what_to_pass():
    with pytest.raises(GrowthError, match=r"got Linear: use expand\(layer\.weight"):
        growkern.expand(nn.Linear(2, 2))
    with pytest.raises(GrowthError, match=r"routing must be a .*Routing, got True"):
        growkern.expand(torch.zeros(2, 2), routing=True)
