"""`widen` on models of other classes: what is exact, and what `inputs` find before it writes."""

import json
import re
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

import growkern
from growkern import GrowthError
from growkern.errors import FunctionChangedWarning


class Vit(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.zeros(1, 5, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 4, hidden, 0.1, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 7)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.layers(x))[:, 0])


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.past = nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.past(x) + self.norm2(self.conv2(y)))


class Resnet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding="same", padding_mode="reflect"),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.stages = nn.Sequential(Residual(width, width, 1), Residual(width, 2 * width, 2))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(2 * width, 7)

    def forward(self, images):
        return self.head(self.pool(self.stages(self.stem(images))).flatten(1))


class Unet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down1 = nn.Conv2d(3, width, 3, 1, 1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, 2, 1)
        # one by one, then all together
        self.depth = nn.Conv2d(2 * width, 2 * width, 3, 1, 1, groups=2 * width)
        self.norm = nn.GroupNorm(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.join, self.out = nn.Conv2d(2 * width, width, 3, 1, 1), nn.Conv2d(width, 3, 1)

    def forward(self, images):
        first = F.silu(self.down1(images))
        x = F.silu(self.norm(self.depth(self.down2(first))))
        return self.out(F.silu(self.join(torch.cat([first, self.up(x)], 1))))


def trained(model):
    """Parameters and statistics that are all random, and no two alike."""
    torch.manual_seed(1)
    for x in model.parameters():
        nn.init.normal_(x, std=0.4)
    for name, x in model.named_buffers():
        if x.is_floating_point():
            nn.init.uniform_(x, 0.5 if "var" in name else -1, 1.5)
    return model


def same(small, large, x):
    """The largest difference of outputs in float64, relative to the largest output."""
    with torch.no_grad():
        ours, theirs = (model.double().eval()(x.double()) for model in (small, large))
    return ((ours - theirs).abs().max() / ours.abs().max()).item()


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "sizes", "copies"),
    [
        (Vit, ((8, 16), (24, 41)), ("cls", "pos")),
        (Vit, ((8, 16), (16, 16)), ["pos", "cls"]),
        (Resnet, ((4,), (8,)), ()),
        # a batch norm treats each channel by itself
        (Resnet, ((4,), (9,)), ()),
    ],
)
def test_models_of_other_classes_stay_exact(make, sizes, copies):
    small, large = (make(*size) for size in sizes)
    trained(small)
    state = torch.random.get_rng_state()
    assert growkern.widen(small, large, copies=copies, inputs=(IMAGES,)) is large
    assert torch.equal(torch.random.get_rng_state(), state)
    assert small.training and large.training and torch.get_default_dtype() == torch.float32
    assert all(x.dtype == torch.float32 for x in large.parameters())
    assert not any(m._forward_hooks for m in (*small.modules(), *large.modules()))
    # rounded to float32 only where weights are stored
    assert same(small, large, IMAGES) < 1e-12
    # copies of one channel learn different things
    large.train()(IMAGES.double()).square().sum().backward()
    first = (large.patch if make is Vit else large.stem[0]).weight.grad.flatten(1)
    assert (torch.cdist(first, first) + torch.eye(len(first))).min() > 1e-6


@pytest.mark.parametrize("kind", ["resnet", "vision_transformer"])
def test_models_of_timm_stay_exact(kind):
    """Nightly tests install it."""
    module = getattr(pytest.importorskip("timm.models"), kind)
    if kind == "resnet":
        sizes, how = [(4, 8, 8, 12), (9, 17, 17, 25)], {}
        models = (module.ResNet(module.BasicBlock, (1, 1, 1, 1), 7, channels=n) for n in sizes)
    else:
        how = {"copies": ("cls_token", "pos_embed"), "fused": {"qkv": 3}}
        models = (module.VisionTransformer(8, 4, 3, 7, "token", n, 2, n // 8) for n in (16, 32))
    small, large = models
    growkern.widen(trained(small), large, inputs=(IMAGES,), **how)
    assert same(small, large, IMAGES) < 1e-12


def test_channels_that_are_joined_are_filled_by_hand():
    small, large = trained(Unet(4)), Unet(8)
    before = {name: x.clone() for name, x in large.state_dict().items()}
    message = r"differ by 1\..* join \(Conv2d\): already its input"
    # it has no attention whose heads could have other sizes
    with pytest.raises(GrowthError, match=f"{message} mixes what grows. `fused`.*`skip`"):
        growkern.widen(small, large, inputs={"images": IMAGES})
    assert all(torch.equal(x, before[name]) for name, x in large.state_dict().items())
    with torch.no_grad():
        for part, out in zip(*(x.join.weight.chunk(2, 1) for x in (small, large)), strict=True):
            how = growkern.widening(part.shape, out.shape)
            out.copy_(growkern.expand(part.flatten(1), **how).view(out.shape))
    by_hand = large.join.weight.clone()
    growkern.widen(small, large, inputs=(IMAGES,), skip=["join.weight"])
    assert torch.equal(large.join.weight, by_hand)
    assert same(small, large, IMAGES) < 1e-12


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (nn.Conv1d(4, 6, 3, groups=2), nn.Conv1d(8, 12, 3, groups=4)),
        (nn.Conv1d(4, 6, 3, dilation=2), nn.Conv1d(8, 12, 3, dilation=2)),
        (nn.ConvTranspose1d(4, 6, 3, 2), nn.ConvTranspose1d(8, 12, 3, 2)),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), nn.ConvTranspose1d(8, 12, 3, groups=4)),
        # each group reads one copy of everything
        (nn.Conv1d(4, 6, 3), nn.Conv1d(8, 12, 3, groups=2)),
        (nn.GroupNorm(1, 4), nn.GroupNorm(2, 8)),
        (nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm1d(8, affine=True)),
        (nn.BatchNorm1d(4), nn.BatchNorm1d(8)),
        (nn.PReLU(4), nn.PReLU(8)),
    ],
)
def test_single_layers_write_copies_and_read_them(small, large):
    trained(small)
    growkern.widen(small.eval(), large.eval())
    x = torch.randn(3, 4, 9)
    expected = small(x)
    torch.testing.assert_close(large(x.repeat(1, 2, 1)), expected.repeat(1, 2, 1))


class Between(nn.Module):
    """Two linear layers, and a function between them."""

    def __init__(self, h, function):
        super().__init__()
        self.up, self.down, self.function = nn.Linear(6, h), nn.Linear(h, 4), function

    def forward(self, x):
        return self.down(self.function(self.up(x)))


@pytest.mark.parametrize(
    ("kind", "is_split"),
    [
        *((nn.Softmax(-1), False), (nn.LogSoftmax(-1), False), (nn.Softmin(-1), False)),
        *((nn.AvgPool1d(3, 1, 1), False), (nn.Softmax(-1), True), (nn.ReLU(), True)),
    ],
)
def test_layers_that_mix_entries(kind, is_split):
    """By name without `inputs`, by the outputs with them; what stays exact is let through."""

    def made(h):
        middle = [nn.Unflatten(-1, (2, h // 2)), kind, nn.Flatten(-2)] if is_split else [kind]
        return nn.Sequential(nn.Linear(6, h), *middle, nn.Linear(h, 4))

    small, large = made(8), made(16)
    trained(small)
    x = torch.randn(2, 5, 6)
    with pytest.raises(GrowthError, match=r"1 \(.*inputs=\(x,\)"):
        growkern.widen(small, large)
    if isinstance(small[2], nn.ReLU):
        growkern.widen(small, large, inputs=(x,))
        assert same(small, large, x) < 1e-12
        return
    with pytest.raises(GrowthError, match=r"(output of|is) \d \("):
        growkern.widen(small, large, inputs=(x,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1),
        lambda x: F.normalize(x, dim=-1),
        lambda x: x.cumsum(-1),
        lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
        lambda x: x.sort(-1).values,
        lambda x: x / x.new_tensor(x.shape[-1]),
        lambda x: x.unflatten(-1, (2, -1)).softmax(-1).flatten(-2),
        # not a number, where the small module has numbers
        lambda x: x if x.shape[-1] == 8 else x * float("nan"),
    ],
)
def test_code_between_layers_is_measured(function):
    small, large, x = trained(Between(8, function)), Between(16, function), torch.randn(5, 6)
    before = {name: y.clone() for name, y in large.state_dict().items()}
    with pytest.raises(GrowthError, match=r"down \(Linear\)"):
        growkern.widen(small, large, inputs=(x,))
    assert all(torch.equal(y, before[name]) for name, y in large.state_dict().items())
    with pytest.warns(growkern.errors.GrowthWarning, match="inputs="):
        growkern.widen(small, large)


@pytest.mark.parametrize(
    ("function", "scale"),
    [
        (F.gelu, 1),
        # parts in float32, and random numbers
        (lambda x: x.float().tanh().to(x), 1),
        (lambda x: x * torch.rand(()), 1),
        (lambda x: x + torch.zeros(1), 1),
        # to whole numbers of copies
        (lambda x: F.layer_norm(x, x.shape[-1:]), 2),
        (lambda x: F.normalize(x, dim=-1) * x.shape[-1] ** 0.5, 2),
        # with the rounding of float32
        (lambda x: (F.normalize(x.float(), dim=-1) * x.shape[-1] ** 0.5).to(x), 2),
    ],
)
def test_code_that_is_exact_is_let_through(function, scale):
    small, large, x = trained(Between(8, function)), Between(16, function), torch.randn(5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        growkern.widen(small, large, inputs=(x,))
    large = Between(20, function)
    if scale == 1:
        growkern.widen(small, large, inputs=[x])
    else:
        with pytest.raises(GrowthError, match=r"down \(Linear\)"):
            growkern.widen(small, large, inputs=[x])


class Scaled(nn.Linear):
    def forward(self, x):
        return F.softmax(super().forward(x), -1)


class Counted(nn.Module):
    """Nothing of it grows but a buffer or a setting."""

    def __init__(self, size, count):
        super().__init__()
        self.inner, self.count = nn.Linear(6, 4), count
        self.register_buffer("sums", torch.ones(size))

    def forward(self, x):
        return self.inner(x) * self.count * self.sums.sum()


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (Scaled(6, 8), Scaled(6, 16)),
        (Counted(4, 1), Counted(8, 1)),
        (Counted(4, 1), Counted(4, 3)),
        (nn.Softmax(-1), nn.Softmax(-1)),
    ],
)
def test_own_code_that_is_not_run_is_warned_of(small, large):
    with pytest.warns(growkern.errors.GrowthWarning, match="inputs="):
        growkern.widen(small, large)


class Aside(Between):
    """Its other outputs are a hundred thousand times as large."""

    def forward(self, x):
        return torch.cat([1e5 * x, super().forward(x)], -1)


@pytest.mark.parametrize("function", [lambda x: F.softmax(x, -1), lambda x: F.normalize(x, dim=-1)])
def test_a_difference_beside_large_outputs_is_seen(function):
    small, large = trained(Aside(8, function)), Aside(16, function)
    with pytest.raises(GrowthError, match=r"down \(Linear\)"):
        growkern.widen(small, large, inputs=(torch.randn(5, 6),))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_small_difference_of_a_norm_over_neighbours_is_seen(size):
    small, large = (
        nn.Sequential(
            nn.Conv2d(6, h, 1), nn.LocalResponseNorm(size, alpha=1e-6), nn.Conv2d(h, 4, 1)
        )
        for h in (8, 16)
    )
    with pytest.raises(GrowthError, match=r"1 \(LocalResponseNorm\)"):
        growkern.widen(small, large, inputs=(torch.randn(2, 6, 3, 3),))


# these keep both parts of a channel axis in place
KEEPING = (nn.BatchNorm1d, lambda n: nn.Conv1d(n, n, 1, groups=n))


@pytest.mark.parametrize("between", [(), KEEPING])
def test_gated_layers_need_fused(between):
    fused = dict.fromkeys("012"[: len(between) + 1], 2)
    small, large = (
        nn.Sequential(
            *(nn.Conv1d(6, 2 * h, 1), *(x(2 * h) for x in between)), nn.GLU(1), nn.Conv1d(h, 4, 1)
        )
        for h in (8, 12)
    )
    x, line = torch.randn(5, 6, 3), re.escape(f"pass fused={json.dumps(fused)}")
    with pytest.raises(GrowthError, match=rf"output of \d \(GLU\).*{line}$"):
        growkern.widen(trained(small), large, inputs=(x,))
    growkern.widen(small, large, inputs=(x,), fused=fused)
    assert same(small, large, x) < 1e-12


@pytest.mark.parametrize("fused", [{"a.proj": 2}, {"proj": 2, "b.proj": 1}])
def test_the_longer_name_of_fused_tells_layers_apart(fused):
    small, large = (
        nn.Sequential(
            OrderedDict(
                a=nn.Sequential(OrderedDict(proj=nn.Linear(6, 2 * h), gate=nn.GLU())),
                b=nn.Sequential(OrderedDict(proj=nn.Linear(h, h), out=nn.Linear(h, 4))),
            )
        )
        for h in (8, 12)
    )
    x = torch.randn(5, 6)
    with pytest.raises(GrowthError, match="would differ"):
        growkern.widen(small, large, inputs=(x,), fused={"proj": 2})
    growkern.widen(small, large, inputs=(x,), fused=fused)
    assert same(small, large, x) < 1e-12


@pytest.mark.parametrize("make", [weight_norm, parametrizations.weight_norm])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_computed_weights_are_refused_with_the_call_that_undoes_it(make, dim):
    small, large = (
        nn.Sequential(nn.Linear(6, h), nn.ReLU(), make(nn.Linear(h, 4), dim=dim)) for h in (8, 16)
    )
    with pytest.raises(GrowthError, match=r"2\.weight .*remove_"):
        growkern.widen(small, large, inputs=(torch.randn(5, 6),))


@pytest.mark.parametrize(
    ("small", "large", "message"),
    [
        (nn.Conv1d(4, 4, 3, groups=2), nn.Conv1d(8, 8, 3, groups=2), "groups=in_channels / 2"),
        (nn.Conv1d(4, 4, 3, groups=4), nn.Conv1d(8, 8, 3), "groups=in_channels / 1"),
        (nn.Conv1d(4, 4, 3), nn.Conv1d(8, 8, 5), "kernel_size"),
        (nn.Conv1d(4, 4, 3), nn.Conv1d(8, 8, 3, 2), "stride"),
        (nn.Conv1d(4, 4, 3), nn.Conv1d(8, 8, 3, padding_mode="circular"), "padding_mode"),
        (nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(8, 8, 3), "padding"),
        (nn.GroupNorm(1, 8), nn.GroupNorm(4, 16), "4 entries are no multiple of 8"),
        (nn.GroupNorm(1, 8, affine=False), nn.GroupNorm(1, 12, affine=False), "12 entries"),
        (nn.GroupNorm(2, 8, affine=False), nn.GroupNorm(2, 16, affine=False), "=num_channels / 4"),
        (nn.LayerNorm((3, 8), 1, False), nn.LayerNorm((3, 12), 1, False), "12 entries are no mul"),
        (nn.Threshold(0, 5), nn.Threshold(0, 6), "value is 5, but 6"),
        (nn.LSTM(4, 4), nn.LSTM(8, 8), "weight_ih_l0 of LSTM|LSTM.: it may mix"),
    ],
)
@pytest.mark.parametrize("inputs", [None, (torch.zeros(1),)])
def test_settings_and_groups_are_always_compared(small, large, message, inputs):
    with pytest.raises(GrowthError, match=message):
        growkern.widen(small, large, inputs=inputs)


class Own(nn.Module):
    """A table, a matrix and a buffer of its own; shared layers; outputs in a dict."""

    def __init__(self, width, is_tied=True):
        super().__init__()
        self.put, self.table = nn.Linear(6, width), nn.Parameter(torch.randn(5, width))
        self.block = self.again = nn.Linear(width, width)
        self.mix = nn.Parameter(torch.randn(width, 4))
        self.register_buffer("waves", torch.randn(width))

    def forward(self, x):
        hidden = self.again(self.block(self.put(x) + self.table + self.waves).tanh())
        return {"hidden": (hidden, None), "out": hidden @ self.mix, "size": 3}


def test_tensors_of_its_own_by_name():
    small, large, x = Own(8), Own(16), torch.randn(5, 6)
    with pytest.raises(GrowthError, match=r"table of Own.*copies=\('table',\).*skip=\('table',\)"):
        growkern.widen(small, large, inputs=(x,))
    given = {"copies": ("table", "waves"), "inputs": (x,)}
    with pytest.raises(GrowthError, match=r"mix of Own: how \(8, 4\) grows to \(16, 4\)"):
        growkern.widen(small, large, **given)
    # random numbers in `large` are not what the matrix has to hold
    with pytest.raises(GrowthError, match="the Own itself"):
        growkern.widen(small, large, skip="mix", **given)
    with torch.no_grad():
        how = growkern.widening((4, 8), (4, 16))
        large.mix.copy_(growkern.expand(small.mix.T, **how).T)
    with pytest.warns(FunctionChangedWarning, match=r"outputs are wider \(8 -> 16\)"):
        growkern.widen(small, large, skip="mix", **given)
    ours, theirs = small(x), large(x)
    torch.testing.assert_close(theirs["out"], ours["out"])
    torch.testing.assert_close(theirs["hidden"][0], ours["hidden"][0].repeat(1, 2))


def test_a_table_that_the_caller_has_filled_is_left():
    small, large = trained(Vit(8, 16)), Vit(16, 16)
    with torch.no_grad():
        large.cls.copy_(small.cls.repeat(1, 1, 2))
        large.pos.copy_(small.pos.repeat(1, 1, 2))
    growkern.widen(small, large, inputs=(IMAGES,))
    assert same(small, large, IMAGES) < 1e-12


class Deep(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.put, self.out = nn.Linear(6, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)
        )

    def forward(self, x):
        x = self.put(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def test_new_layers_are_the_callers():
    small, large, given = trained(Deep(8, 1)), Deep(12, 4), {"inputs": (torch.randn(5, 6),)}
    blocks = ("layers.1", "layers.2", "layers.3")
    with pytest.raises(GrowthError, match="bias and 1 more: .*skip=" + re.escape(f"{blocks}")):
        growkern.widen(small, large, **given)
    with pytest.raises(GrowthError, match=r"out \(Linear\)\. layers\.1, .* it must add 0$"):
        growkern.widen(small, large, skip=blocks, **given)
    new = {name: x for name, x in large.named_parameters() if name.startswith(blocks)}
    for x in new.values():
        nn.init.zeros_(x)
    # by the blocks, or by all that they hold
    for skip in (blocks, new):
        growkern.widen(small, large, skip=skip, **given)
        assert same(small, large, *given["inputs"]) < 1e-12
    with pytest.raises(GrowthError, match="only one of small and large has"):
        growkern.widen(small, large, skip=[*new][1:], **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"copies": ("tabel",)}, "'tabel' .* did you mean 'table'"),
        ({"skip": ("again.wieght",)}, "'again.wieght'"),
        ({"inputs": torch.zeros(5, 6)}, "inputs is a Tensor"),
        ({"inputs": (torch.zeros(5, 7),), "copies": ("table", "waves"), "skip": "mix"}, "`small`"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(GrowthError, match=message):
        growkern.widen(Own(8), Own(16), **arguments)


def test_outputs_that_compare_nothing():
    small, large = (nn.Sequential(nn.Linear(6, h), nn.Linear(h, 4)) for h in (8, 16))
    nn.init.zeros_(small[1].weight), nn.init.zeros_(small[1].bias)
    with pytest.raises(GrowthError, match="all outputs of `small` are 0"):
        growkern.widen(small, large, inputs=(torch.randn(5, 6),))
