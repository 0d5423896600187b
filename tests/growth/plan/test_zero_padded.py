"""Units padded with zeros, in front of a norm: all norms have one kappa, and eps is scaled."""

import pytest
import torch

import growkern
from testbed.models import random_model, relative_error
from testbed.relatives import RELATIVES
from tests.growth.optimizer.test_optimizer import grown_states
from tests.growth.plan.test_matrix import EXACT, grown_on_disk

DEEPER = {"num_hidden_layers": 3, "depth": "identity"}
MIXER = {"mamba_d_head": 10, "mamba_d_state": 7}
# family, options, growth, the factor of eps
CASES = [
    ("qwen3_5_text", {}, {"linear_value_head_dim": 9, "hidden_size": 20, "head_dim": 16}, 6 / 9),
    ("qwen3_next", {}, {"linear_value_head_dim": 13, "linear_num_key_heads": 3}, 6 / 13),
    ("nemotron_h", {}, {"mamba_head_dim": 5, "ssm_state_size": 7, "hidden_size": 20}, 3 / 5),
    ("nemotron_h", {}, {"mamba_num_heads": 8, "mamba_head_dim": 5}, 3 / 5 * 3 / 4),
    ("mamba2", {}, {"hidden_size": 20, "num_heads": 4, "head_dim": 10, **DEEPER}, 6 / 10),
    ("bamba", {}, {"hidden_size": 18, "mamba_d_state": 7}, 2 / 3),
    ("granitemoehybrid", {}, {"hidden_size": 20, "mamba_n_heads": 4, **MIXER}, 6 / 10),
    ("falcon_h1", {"mamba_norm_before_gate": False}, {**MIXER, "hidden_size": 18, **DEEPER}, 2 / 5),
    ("falcon_h1", {"mamba_norm_before_gate": True}, {**MIXER, "mamba_n_heads": 6}, 6 / 10 * 2 / 3),
    ("falcon_h1", {"mamba_rms_norm": False}, {**MIXER, "mamba_n_heads": 6}, 1),
]


def source_of(family, options):
    return random_model(*RELATIVES[family][:2], **options)


@pytest.mark.parametrize("family, options, growth, factor", CASES)
def test_the_config_gets_the_eps_with_which_all_norms_are_exact(
    family, options, growth, factor, tmp_path, monkeypatch
):
    source = source_of(family, options)
    grown = grown_on_disk(tmp_path, source, growth)
    plan, field = grown.growth_plan, grown.growth_plan.small.family.norm.eps
    assert plan.exact
    assert relative_error(source, grown) <= EXACT
    assert getattr(grown.config, field) == pytest.approx(1e-2 * factor, rel=1e-14)
    assert (f"{field} 0.01 -> {1e-2 * factor:.3g}" in str(plan)) == (factor != 1)
    # a model of that config
    empty = type(source)._from_config(plan.target_config, dtype=torch.float64)
    growkern.grow_into(empty, source, depth=growth.get("depth", "auto"))
    assert all(torch.equal(x, grown.state_dict()[n]) for n, x in empty.state_dict().items())
    # with an eps, and a kappa, that stay
    monkeypatch.setattr("growkern.growth.plan.target.eps_factor", lambda small, large: 1.0)
    assert (relative_error(source, growkern.grow(source, **growth)) > 1e-3) == (factor != 1)


@pytest.mark.parametrize(
    "family, growth",
    [
        ("qwen3_5_text", {"linear_value_head_dim": 9, "hidden_size": 24, "stream": "copies"}),
        ("nemotron_h", {"mamba_head_dim": 5, "mamba_num_heads": 8, "ssm_state_size": 7}),
    ],
)
def test_moments_of_old_entries_are_those_of_their_gradients(family, growth):
    target, grown, own, _ = grown_states(source_of(family, {}), growth)
    findings = growkern.moment_findings(target.growth_plan)
    assert "units beyond whole copies" in [finding.what for finding in findings]
    for name, entry in grown.items():
        for key in ("exp_avg", "exp_avg_sq"):
            found, truth = entry[key], own[name][key]
            wrong = (found - truth).abs()[found != 0]
            assert wrong.max() <= 1e-9 * truth.abs().max(), (name, key)


def test_a_runtime_that_does_not_read_eps_is_named():
    source = source_of("mamba2", {})
    assert "layer_norm_epsilon changes: MLX" in str(growkern.plan(source, hidden_size=18))
    with pytest.raises(growkern.GrowthError, match="layer_norm_epsilon would change"):
        growkern.plan(source, hidden_size=18, portable=True)


def test_an_eps_that_is_no_field_cannot_follow(tmp_path):
    source, table = source_of("mamba2", {}), tmp_path / "own.toml"
    norm = 'kind = "rmsnorm"\nplacement = "pre"\neps = 0.01'
    table.write_text(f'extends = "mamba2"\nmodel_type = "mamba2"\n[norm]\n{norm}\n')
    source.save_pretrained(tmp_path / "small")
    assert growkern.plan(tmp_path / "small", family=table, hidden_size=24).exact
    with pytest.raises(growkern.GrowthError, match=r"needs eps=0\.00667, not 0\.01"):
        growkern.plan(tmp_path / "small", family=table, hidden_size=18)


def test_a_table_that_does_not_say_what_a_norm_lies_over_is_refused(tmp_path):
    source, table = source_of("mamba2", {}), tmp_path / "own.toml"
    row = '"layers.{l}.mixer.norm.weight" = { axes = ["factor:gates"] }'
    table.write_text(f'extends = "mamba2"\nmodel_type = "mamba2"\n[tensors.trunk]\n{row}\n')
    source.save_pretrained(tmp_path / "small")
    assert growkern.plan(tmp_path / "small", family=table, hidden_size=24).exact
    with pytest.raises(growkern.GrowthError, match=r"=\d+ is no multiple .* as `scale`"):
        growkern.plan(tmp_path / "small", family=table, hidden_size=18)
