"""Every forward pass makes no cache, and keeps the documents of a packed row apart or refuses."""

import copy

import pytest
import torch
import transformers

from growkern import GrowthError, InheritanceSchedule, TwoStageTrainer, inherited_loss
from growkern.train.model.forward import head_inputs, run_model
from growkern.train.model.head import check_head
from growkern.train.topk_teacher.computed import ModelTeacher
from testbed.models import BERT, GPT2, LLAMA, random_model
from testbed.relatives import RELATIVES
from testbed.tiny import VOCAB, build

TEXTS = [[7, 6, 5, 9, 11], [3, 8, 2], [12, 4, 4, 6, 10, 9, 3]]
CLASSES = {
    **{name: (kind, sizes) for name, (kind, sizes, _) in RELATIVES.items()},
    "bert": ("BertForMaskedLM", BERT),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", LLAMA),
}
for _name in ("deepseek_v32", "glm_moe_dsa"):
    # equal scores of their indexers are chosen by place, so that a document alone may differ
    CLASSES[_name] = (CLASSES[_name][0], {**CLASSES[_name][1], "index_topk": 16})
# ESM adds a bias behind its projection, which the trainer refuses; Whisper reads sound
LEFT_OUT = ("esm", "whisper")
TEXT_ONLY = [
    name
    for name, (kind, _) in CLASSES.items()
    if ("LM" in kind or "Generation" in kind) and name not in LEFT_OUT
]


def test_a_bias_behind_the_projection_is_refused():
    model = random_model(*CLASSES["esm"], dtype=torch.float32)
    for bias in (model.lm_head.bias.detach(), torch.zeros_like(model.lm_head.bias)):
        model.lm_head.bias.data = bias
        with pytest.raises(GrowthError, match="EsmForMaskedLM changes its logits"):
            check_head(model)


def packed(texts=TEXTS, labels=False):
    batch = transformers.DataCollatorWithFlattening()([{"input_ids": x} for x in texts])
    names = ("input_ids", "position_ids", *(("labels",) if labels else ()))
    return {name: batch[name] for name in names}


def configs_of(model):
    """The configs of all modules: some have a copy of their own."""
    return {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()


def caching(model):
    """The model, all of whose configs ask for a cache."""
    for config in configs_of(model):
        config.use_cache = True
    return model


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_documents_are_apart_or_refused_and_no_cache_is_made(name):
    kind, sizes = CLASSES[name]
    model = caching(random_model(kind, sizes, dtype=torch.float32))
    ids = torch.tensor([TEXTS[0]])
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        outputs = run_model("model", model, inputs)
        assert getattr(outputs, "past_key_values", None) is None
        assert all(config.use_cache for config in configs_of(model))
        if model.config.is_encoder_decoder:
            return
        alone = [model(input_ids=torch.tensor([x]), use_cache=False).logits for x in TEXTS]
        together = model(**packed(), use_cache=False).logits
        scale = together.abs().max()
        meet = bool((torch.cat(alone, 1) - together).abs().max() > 1e-4 * scale)
        if meet:
            with pytest.raises(GrowthError, match="position_ids begin anew"):
                run_model("model", model, packed())
            # one document that says where its tokens stand is no packed row
            run_model("model", model, packed(TEXTS[:1]))
        else:
            assert torch.equal(run_model("model", model, packed()).logits, together)
    assert all(config.use_cache for config in configs_of(model))


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "llama"])
def test_positions_of_several_axes_keep_documents_apart_or_are_refused(name, axes):
    kind, sizes = CLASSES[name]
    model = random_model(kind, sizes, dtype=torch.float32).eval()
    places = packed()["position_ids"].expand(axes, 1, -1)
    rows = {**packed(), "position_ids": places}
    if name == "llama":
        # a model of one's own that takes the first axis
        inner = model.model.forward
        model.model.forward = lambda position_ids=None, **how: inner(
            position_ids=position_ids[0] if position_ids.ndim == 3 else position_ids, **how
        )
    with torch.no_grad():
        alone = [
            model(input_ids=torch.tensor([x]), position_ids=torch.arange(len(x))[None]).logits
            for x in TEXTS
        ]
        found = model(**rows, use_cache=False).logits
        if (torch.cat(alone, 1) - found).abs().max() > 1e-4 * found.abs().max():
            assert axes == 3
            with pytest.raises(GrowthError, match="position_ids begin anew"):
                run_model("model", model, rows)
        else:
            assert torch.equal(run_model("model", model, rows).logits, found)
        ones = torch.ones_like(rows["input_ids"])
        with pytest.raises(GrowthError, match="attention_mask"):
            run_model("model", model, {**rows, "attention_mask": ones})
        # one document: a word, an image of 2 x 3, a word
        time = torch.tensor([0, 1, 1, 1, 1, 1, 1, 4])
        down, right = torch.tensor([0, 1, 1, 1, 2, 2, 2, 4]), torch.tensor([0, 1, 2, 3, 1, 2, 3, 4])
        image = torch.stack([torch.arange(8), time, down, right][-axes:])[:, None]
        ids = torch.arange(8)[None] + 2
        for masks in ({}, {"attention_mask": torch.ones_like(ids)}):
            run_model("model", model, {"input_ids": ids, "position_ids": image, **masks})


@pytest.mark.parametrize("zero", ["conv.out_proj", "conv.in_proj", "operator_norm"])
def test_a_part_that_adds_nothing_yet_counts_as_trained(zero):
    """As those of a layer grown to change nothing. Else documents would meet after training."""
    model = random_model(*CLASSES["lfm2"], dtype=torch.float32)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(zero not in name)
    zeroed = copy.deepcopy(model.state_dict())
    with pytest.raises(GrowthError, match="position_ids begin anew"):
        run_model("model", model, packed())
    torch.testing.assert_close(model.state_dict(), zeroed, rtol=0, atol=0)
    model.load_state_dict(before)
    with pytest.raises(GrowthError, match="position_ids begin anew"):
        run_model("model", model, packed())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma3", "olmo3"])
def test_a_model_of_zeros_that_keeps_documents_apart_runs(name):
    model = random_model(*CLASSES[name], dtype=torch.float32)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.mul_("embed" in key or "wte" in key)
    run_model("model", model, packed())


def test_nan_is_no_proof_and_is_asked_again():
    model = random_model(*CLASSES["opt"], dtype=torch.float32)
    weight = model.model.decoder.layers[0].fc1.weight.data
    before = weight.clone()
    weight[0, 0] = float("nan")
    with pytest.raises(GrowthError, match="NaN"):
        run_model("model", model, packed())
    run_model("model", model, packed(TEXTS[:1]))
    weight.copy_(before)
    with pytest.raises(GrowthError, match="documents would see each other"):
        run_model("model", model, packed())


def test_a_part_that_gets_another_attention_is_asked_again():
    model = random_model(*CLASSES["llama"], dtype=torch.float32)
    run_model("model", model, packed())
    # no mask is made for an attention without a name
    model.model.config = transformers.LlamaConfig(**LLAMA)
    with pytest.raises(GrowthError, match="position_ids begin anew"):
        run_model("model", model, packed())


@pytest.mark.parametrize("name", ["past_key_values", "cache_params"])
def test_a_cache_in_a_batch_is_refused(name):
    model = random_model(*CLASSES["llama"], dtype=torch.float32)
    with pytest.raises(GrowthError, match=name):
        run_model("model", model, {**packed(), name: transformers.DynamicCache()})
    run_model("model", model, {**packed(), name: None})


def test_flash_attention_of_several_packed_rows_is_probed_by_itself():
    """A kind of input is known only once it was tried: this model mixes rows from two on."""
    model = build("llama")
    inner = model.model.forward

    def forward(input_ids=None, position_ids=None, **options):
        places = None if len(input_ids) > 1 else position_ids
        return inner(input_ids=input_ids, position_ids=places, **options)

    model.model.forward = forward
    run_model("model", model, packed())
    two = {name: x.repeat(2, 1) for name, x in packed().items()}
    with pytest.raises(GrowthError, match="position_ids begin anew"):
        run_model("model", model, two)


def test_ends_of_documents_are_probed_in_one_row():
    """Two rows of them are no batch: the kernels of flash attention would read beyond the end."""
    model, seen = build("llama"), []
    model.model.register_forward_pre_hook(
        lambda _module, _args, given: seen.append(given["input_ids"].shape[0]), with_kwargs=True
    )
    texts = [{"input_ids": x} for x in TEXTS]
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(texts)
    run_model("model", model, {name: x for name, x in batch.items() if name != "labels"})
    assert len(seen) > 1 and set(seen) == {1}


@pytest.mark.parametrize("fails", [False, True])
def test_configs_and_modes_are_as_before_also_after_an_error(fails):
    kind, sizes = CLASSES["qwen3_vl"]
    model = caching(random_model(kind, sizes, dtype=torch.float32)).train()
    model.model.language_model.layers[0].eval()
    modes = [module.training for module in model.modules()]

    def look(module, *_):
        assert not any(m.training for m in model.modules())
        assert not any(getattr(config, "use_cache", False) for config in configs_of(model))
        if fails:
            raise RuntimeError("stop")

    model.model.language_model.layers[1].register_forward_hook(look)
    inputs = {"input_ids": torch.tensor([TEXTS[0]])}
    if fails:
        with pytest.raises(RuntimeError, match="stop"):
            head_inputs(model, inputs)
    else:
        head_inputs(model, inputs)
    assert [module.training for module in model.modules()] == modes
    assert all(config.use_cache for config in configs_of(model))


# ------------------------------------------------------------------- every caller

STUDENT = {"layers": 2}
TEACHER = {"layers": 1, "width": 8, "seed": 3}


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("options", [{}, {"kl_rows": "all", "divergence": "jsd"}])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_inherited_loss_of_a_packed_row_is_that_of_its_documents(family, options):
    student, teacher = (caching(build(family, **how).double()) for how in (STUDENT, TEACHER))
    if family == "mixtral":
        # its router's loss is one of the whole batch
        student.config.output_router_logits = False
    rows = sum(len(x) - 1 for x in TEXTS)
    whole = gradient(student, inherited_loss(student, teacher, packed(labels=True), **options))
    total = 0.0
    for x in TEXTS:
        ids = torch.tensor([x])
        loss = inherited_loss(student, teacher, {"input_ids": ids, "labels": ids}, **options)
        total = total + loss * (len(x) - 1) / rows
    torch.testing.assert_close(whole, gradient(student, total), rtol=1e-9, atol=1e-11)


def test_the_trainer_and_its_evaluation_read_documents_apart(tmp_path):
    student, teacher = (caching(build("llama", **how)) for how in (STUDENT, TEACHER))
    truth = copy.deepcopy(student)
    labels = sum(len(x) - 1 for x in TEXTS)
    losses = [truth(input_ids=(x := torch.tensor([text])), labels=x).loss for text in TEXTS]
    expected = sum(loss * (len(x) - 1) / labels for loss, x in zip(losses, TEXTS, strict=True))
    data = [{"input_ids": x, "labels": x} for x in TEXTS]
    trainer = TwoStageTrainer(
        student,
        transformers.TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=3, use_cpu=True, optim="sgd",
            per_device_eval_batch_size=3, learning_rate=0.1, report_to="none", save_strategy="no",
            disable_tqdm=True, max_grad_norm=0.0,
        ),
        train_dataset=data, eval_dataset=data,
        data_collator=transformers.DataCollatorWithFlattening(),
        teacher=teacher, inheritance=InheritanceSchedule(decay="constant"),
    )  # fmt: skip
    torch.testing.assert_close(trainer.evaluate()["eval_loss"], expected.item())
    taught = 0.0
    for x in TEXTS:
        ids = torch.tensor([x])
        loss = inherited_loss(truth, teacher, {"input_ids": ids, "labels": ids})
        taught = taught + loss * (len(x) - 1) / labels
    gradient(truth, taught)
    trainer.train()
    for p, q in zip(student.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.1 * q.grad, rtol=1e-4, atol=1e-6)


def test_a_cached_teacher_keeps_documents_apart():
    teacher = ModelTeacher(caching(build("gpt2", layers=2)), k=4, rows="all")
    ids, logprobs = teacher.batch(packed(labels=True))
    at = 0
    for x in TEXTS:
        alone = torch.tensor([x])
        own_ids, own = teacher.batch({"input_ids": alone, "labels": alone})
        place = slice(at, at := at + len(x))
        assert torch.equal(ids[:, place], own_ids)
        torch.testing.assert_close(logprobs[:, place], own, equal_nan=True)


@pytest.mark.parametrize("kind", ["ids", "embeddings"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt", "gemma3"])
def test_a_mask_beside_positions_that_begin_anew_is_refused(name, kind):
    model = random_model(*CLASSES[name], dtype=torch.float32)
    batch = packed()
    ids, places = batch["input_ids"], batch["position_ids"]
    if kind == "embeddings":
        batch = {"inputs_embeds": model.get_input_embeddings()(ids), "position_ids": places}
    ones = torch.ones_like(ids)
    padded = ones.masked_fill(torch.arange(ids.shape[1]) > ids.shape[1] - 3, 0)
    # a hole in the middle of the row, between two documents
    hole = ones.masked_fill(torch.arange(ids.shape[1]) == len(TEXTS[0]), 0)
    for mask in (ones, ones.bool(), ones.float(), padded, hole):
        with pytest.raises(GrowthError, match="attention_mask"):
            run_model("model", model, {**batch, "attention_mask": mask})


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_rows_with_padding_and_positions_run_as_in_transformers(name):
    model = random_model(*CLASSES[name], dtype=torch.float32).eval()
    masks = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]])
    counted = (masks.cumsum(1) - 1).masked_fill(masks == 0, 1)
    ids = torch.arange(18).view(3, 6) % 10 + 2
    skipping = torch.tensor([[0, 1, 4, 5, 6, 7]])
    for places in (counted, torch.arange(6)[None], skipping):
        for mask in (masks, masks.bool()):
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
            with torch.no_grad():
                found = run_model("model", model, inputs).logits
                assert torch.equal(found, model(**inputs, use_cache=False).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_mask_of_all_pairs_is_the_callers_word(name):
    model = random_model(*CLASSES[name], dtype=torch.float32).eval()
    batch = packed()
    document_S = (batch["position_ids"][0] == 0).cumsum(0)
    pairs = document_S[:, None] == document_S
    if name != "bert":
        pairs = pairs.tril()
    with torch.no_grad():
        found = run_model("model", model, {**batch, "attention_mask": pairs[None, None]}).logits
        alone = [model(input_ids=torch.tensor([x])).logits for x in TEXTS]
    torch.testing.assert_close(found, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("asked", [{"use_cache": True}, {"use_cache": None}, {"flat": True}])
def test_a_batch_that_asks_for_a_cache_or_has_flat_positions_is_read_alike(family, asked):
    student, teacher = (build(family, **how).double() for how in (STUDENT, TEACHER))
    batch = packed(labels=True)
    other = {**batch, **asked}
    if other.pop("flat", False):
        other["position_ids"] = batch["position_ids"][0]
    whole = gradient(student, inherited_loss(student, teacher, batch, kl_rows="all"))
    found = gradient(student, inherited_loss(student, teacher, other, kl_rows="all"))
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-11)


def test_flat_positions_are_refused_where_documents_meet():
    model = random_model(*CLASSES["opt"], dtype=torch.float32)
    batch = packed()
    with pytest.raises(GrowthError, match="position_ids begin anew"):
        run_model("model", model, {**batch, "position_ids": batch["position_ids"][0]})


def test_an_error_names_the_teacher_whose_documents_meet():
    student = build("llama", **STUDENT)
    kind, sizes = CLASSES["opt"]
    teacher = random_model(kind, {**sizes, "vocab_size": VOCAB}, dtype=torch.float32)
    with pytest.raises(GrowthError, match=r"teacher \(OPTForCausalLM"):
        inherited_loss(student, teacher, packed(labels=True), vocab_size=VOCAB)
    assert inherited_loss(student, teacher, packed(labels=True), vocab_size=VOCAB, alpha=0.0) > 0
