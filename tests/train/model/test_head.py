"""The head swap trains the same function as the plain logits."""

import logging

import pytest
import torch
import transformers
from transformers.utils.logging import get_logger

from growkern import GrowthError, inherited_loss
from growkern.train.model.forward import check_causal
from growkern.train.model.head import check_head, head_swap
from testbed.models import GROUPED, random_model
from testbed.relatives import RELATIVES, TEXT
from testbed.tiny import FAMILIES, VOCAB, batch, build

SIZES = {**GROUPED, "vocab_size": VOCAB, "num_hidden_layers": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_swap_is_undone_after_an_exception(family):
    model, inputs = build(family), {"input_ids": batch()["input_ids"]}
    expected = model(**inputs).logits

    def fail(*_):
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), head_swap(model, fail):
        model(**inputs)
    assert torch.equal(model(**inputs).logits, expected)


def test_probe_refuses_logits_that_are_changed_otherwise():
    class Doubled(transformers.LlamaForCausalLM):
        def forward(self, *args, **options):
            output = super().forward(*args, **options)
            output.logits = output.logits * 2
            return output

    with pytest.raises(GrowthError, match=r"Doubled changes its logits .* not supported"):
        check_head(Doubled(transformers.LlamaConfig(**SIZES)))


def test_probe_refuses_a_model_without_a_head():
    with pytest.raises(GrowthError, match="no linear output projection"):
        check_head(build("bert").base_model)


def test_probes_say_nothing_of_padding(caplog, monkeypatch):
    """Their dummy tokens have ids of padding. transformers would warn of it once."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    type(get_logger()).warning_once.cache_clear()
    model = build("gpt2")
    model.config.pad_token_id = 0
    # other tests silence transformers
    with caplog.at_level("WARNING", logger="transformers"):
        check_head(model)
        check_causal(model)
        assert not caplog.messages
        model(model.dummy_inputs["input_ids"])
        assert "attention_mask" in caplog.text


# Command A Vision of transformers leaves out its config's logit_scale
NOT_TRAINED = {"esm": "changes its logits", "cohere2_vision": "changes its logits"}
NOT_TRAINED |= {"voxtral": "neither a masked nor a causal"}


@pytest.mark.parametrize("name", TEXT)
def test_the_loss_without_logits_is_the_own_loss_of_every_family(name):
    kind, sizes, _ = RELATIVES[name]
    model, inputs = random_model(kind, sizes), batch()
    if name in NOT_TRAINED:
        with pytest.raises(GrowthError, match=NOT_TRAINED[name]):
            check_head(model)
            inherited_loss(model, None, inputs)
        return
    check_head(model)
    if model.config.is_encoder_decoder:
        # tokens without a label are padding to T5Gemma, and none may be left in a window
        inputs["decoder_attention_mask"] = torch.ones_like(inputs["input_ids"])
    # transformers computes the loss of causal models in float32
    truth = model.eval()(**inputs).loss.item()
    assert inherited_loss(model, None, inputs).item() == pytest.approx(truth, rel=1e-6)


MIXTURES = {
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_of_experts_are_causal(family, dtype):
    """An expert's product rounds by the number of its tokens, so later tokens change a few bits."""
    sizes = {**SIZES, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(
        **{**sizes, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": None},
        **MIXTURES[family],
    )
    for seed in range(10):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).train()
        check_causal(model)
        assert model.training and all(p.grad is None for p in model.parameters())


def encoder_in_its_lm_class(**options):
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 24, "max_position_embeddings": 32}
    torch.manual_seed(0)
    return transformers.BertLMHeadModel(transformers.BertConfig(**sizes, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_encoder_in_a_causal_class_is_not_causal(dtype):
    check_causal(encoder_in_its_lm_class(is_decoder=True).to(dtype))
    with pytest.raises(GrowthError, match=r"tokens see the tokens after them: set .*is_decoder"):
        check_causal(encoder_in_its_lm_class(is_decoder=False).to(dtype))


def test_models_without_gradients_are_probed_by_their_outputs():
    trainable = build("llama")
    with torch.inference_mode():
        causal = encoder_in_its_lm_class(is_decoder=True)
        encoder = encoder_in_its_lm_class(is_decoder=False)
        check_causal(causal)
        # weights with gradients, in a loop of evaluation
        check_causal(trainable)
    check_causal(causal)
    with pytest.raises(GrowthError, match="tokens see the tokens after them"):
        check_causal(encoder)


def test_embeddings_that_are_scaled_in_place_can_be_probed():
    model = build("llama")
    inner = model.model.forward

    def scaled(input_ids=None, inputs_embeds=None, **options):
        return inner(inputs_embeds=model.model.embed_tokens(input_ids).mul_(3.0), **options)

    model.model.forward = scaled
    # a module of FSDP2 warns where it returns a view
    views = []
    model.register_forward_hook(lambda _, __, out: views.append(out.logits._is_view()))
    check_causal(model)
    assert views == [False]
