"""A model that growkern made keeps its weights where transformers initialises again.

Each case is compared with the same case of a model that `from_pretrained` loaded.
"""

import copy
import pickle

import pytest
import torch
import transformers
from transformers import BertConfig, EncoderDecoderModel, PreTrainedModel
from transformers.initialization import no_init_weights

import growkern
from growkern.train.loop.growing import grown_model, unfilled_model
from growkern.train.model.language_model import load_language_model
from growkern.train.sections import DistributedOptions
from testbed.models import BERT, GPT2, LLAMA, random_model


def stored(tmp_path, model):
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def wider(source):
    name = "n_embd" if source.config.model_type == "gpt2" else "hidden_size"
    return {name: 2 * source.config.hidden_size}


def loaded(source, tmp_path):
    return type(source).from_pretrained(stored(tmp_path, source))


def grown(source, tmp_path):
    return growkern.grow(source, **wider(source))


def grown_vocabulary(source, tmp_path):
    return growkern.grow(source, vocab_size=source.config.vocab_size + 7)


def grown_depth(source, tmp_path):
    return growkern.grow(source, num_hidden_layers=4)


def filled(source, tmp_path, device="meta"):
    config = growkern.plan(source, **wider(source)).target_config
    with torch.device(device), no_init_weights():
        model = type(source)._from_config(config, dtype=source.dtype)
    model.tie_weights()
    growkern.grow_into(model, source, device="cpu")
    return model


def filled_in_memory(source, tmp_path):
    return filled(source, tmp_path, "cpu")


def grown_in_a_run(source, tmp_path):
    planned = growkern.plan(stored(tmp_path, source), **wider(source))
    return grown_model(planned, DistributedOptions(), source.dtype)


def resumed_in_a_run(source, tmp_path):
    model = grown(source, tmp_path)
    empty = unfilled_model(
        type(source).__name__, model.config, None, DistributedOptions(), source.dtype
    )
    empty.load_state_dict(model.state_dict())
    return empty


def grown_again(source, tmp_path):
    return growkern.grow(grown(source, tmp_path), num_hidden_layers=3)


MAKERS = (
    loaded, grown, grown_vocabulary, grown_depth, grown_again, filled, filled_in_memory,
    grown_in_a_run, resumed_in_a_run,
)  # fmt: skip


def in_a_pair(body):
    decoder = {**BERT, "hidden_size": body.config.hidden_size, "is_decoder": True}
    decoder = transformers.BertLMHeadModel(BertConfig(**decoder, add_cross_attention=True))
    return EncoderDecoderModel(encoder=body, decoder=decoder).encoder


class OwnHead(transformers.BertPreTrainedModel):
    def __init__(self, body):
        super().__init__(body.config)
        self.bert, self.score = body, torch.nn.Linear(body.config.hidden_size, 2)
        self.post_init()


class OwnRoot(PreTrainedModel):
    config_class = BertConfig
    _supports_sdpa = True

    def __init__(self, body):
        super().__init__(body.config)
        self.inner = body
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_()


def replaced(body):
    whole = transformers.BertForSequenceClassification(copy.deepcopy(body.config))
    whole.bert = body
    whole.post_init()
    return whole.bert


def again(body):
    body.init_weights()
    body.initialize_weights()
    return body


def function_by_function(body):
    for module in body.modules():
        body._initialize_weights(module)
    return body


WAYS = {
    "pair": in_a_pair,
    "own head": lambda body: OwnHead(body).bert,
    "own root": lambda body: OwnRoot(body).inner,
    "replaced": replaced,
    "again": again,
    "modules": function_by_function,
    "copied": lambda body: OwnHead(copy.deepcopy(body)).bert,
    "pickled": lambda body: OwnHead(pickle.loads(pickle.dumps(body))).bert,
    "cast": lambda body: OwnHead(body.to(torch.float64)).bert.to(torch.float32),
}


def bert():
    return random_model("BertModel", BERT, dtype=torch.float32)


@torch.no_grad()
def hidden(model):
    ids = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    return model.eval()(input_ids=ids).last_hidden_state


@pytest.mark.parametrize("maker", MAKERS)
def test_a_part_of_another_model_keeps_its_weights(maker, tmp_path):
    model = maker(bert(), tmp_path)
    for name, way in WAYS.items():
        # the last way gets the model itself: copies of parameters have no marks
        one = model if name == "cast" else copy.deepcopy(model)
        before = {key: x.clone() for key, x in one.state_dict().items()}
        expected = hidden(one)
        after = way(one)
        assert torch.equal(hidden(after), expected), name
        assert all(torch.equal(after.state_dict()[key], x) for key, x in before.items()), name


@pytest.mark.parametrize("maker", [grown, filled])
@pytest.mark.parametrize("family", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_new_rows_alone_are_initialised(maker, family, tmp_path):
    sizes = {"GPT2LMHeadModel": GPT2, "LlamaForCausalLM": LLAMA}[family]
    model = maker(random_model(family, sizes, dtype=torch.float32), tmp_path)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for mean in (True, False):
        one = copy.deepcopy(model)
        one.resize_token_embeddings(61, mean_resizing=mean)
        for name, x in one.state_dict().items():
            assert torch.equal(x[: len(before[name])], before[name]), name
        new = one.get_input_embeddings().weight[50:]
        assert torch.isfinite(new).all() and new.abs().max() > 0


def test_adapters_and_saved_models_keep_the_weights(tmp_path):
    peft = pytest.importorskip("peft")
    model = grown(random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32), tmp_path)
    ids = torch.arange(3, 21)[None]
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "saved")
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(auto(ids).logits, expected)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert torch.equal(classifier.model.eval()(ids)[0], model.model(ids)[0])
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    # the second matrix of a new adapter is 0
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("family, sizes", [("BertForMaskedLM", BERT), ("GPT2LMHeadModel", GPT2)])
def test_marks_are_those_of_a_loaded_model(family, sizes, tmp_path):
    source = random_model(family, sizes, dtype=torch.float32)
    expected = marks(loaded(source, tmp_path))
    assert marks(grown(source, tmp_path)) == marks(filled(source, tmp_path)) == expected
    assert marks(load_language_model(tmp_path / "source")) == expected


def marks(model):
    named = (model.named_modules(), model.named_parameters(), model.named_buffers())
    return [[k for k, x in some if getattr(x, "_is_hf_initialized", False)] for some in named]
