"""Counted FLOPs against `torch.utils.flop_counter`, on real steps."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from growkern import InheritanceSchedule, TwoStageConfig, TwoStageTrainer
from growkern.train.loss.batch_rows import count_rows
from growkern.train.model.flops import ModelCost, TokenCounts
from growkern.train.model.sub_model import ModelPart, layer_stacks, sub_model
from testbed.models import random_model
from testbed.relatives import RELATIVES, TEXT
from testbed.tiny import FAMILIES, Batches, arguments, batch, build
from tests.shared.delta import by_products

ROWS, LENGTH = 3, 10
SIZES = TokenCounts.of_rows(ROWS, LENGTH)


class MatrixProducts(FlopCounterMode):
    """Without the outer product by which older transformers make rotary angles: (D, 1) (1, S)."""

    def _count_flops(self, func_packet, out, args, kwargs):
        is_product = func_packet is torch.ops.aten.bmm
        if is_product and args[0].shape[-1] == 1 and args[1].shape[-1] == LENGTH:
            return out
        return super()._count_flops(func_packet, out, args, kwargs)


def counted(work) -> int:
    counter = MatrixProducts(display=False)
    with counter:
        work()
    return counter.get_total_flops()


def eager(family, **options):
    # the counter sees eager attention as two matrix products; CPU kernels it does not know
    return build(family, attn_implementation="eager", **options)


# one of each kind of layer: fused, gated and parallel products, mixtures, linear attention
KINDS = ("xlm-roberta", "distilbert", "modernbert-decoder", "gpt_neo", "gpt_bigcode", "falcon")
KINDS += ("phi", "stablelm", "glm4", "olmo3", "gemma3", "qwen2_moe", "qwen3_next", "deepseek_v3")
KINDS += ("gpt_oss", "mt5", "mbart")


def model_of(name, **sizes):
    if name in FAMILIES:
        return eager(name)
    kind, given, _ = RELATIVES[name]
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = random_model(kind, {**given, **sizes}, **how)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("name", [*FAMILIES, *KINDS])
def test_every_family_and_stage_agrees_with_the_counter(name, monkeypatch):
    """A forward pass, a full step, steps of stage 1 at all depths with both kinds of embeddings."""
    by_products(monkeypatch)
    model, inputs = model_of(name), batch(ROWS, LENGTH)
    stacks = layer_stacks(model)
    cost = ModelCost(model, stacks)
    rows = ROWS * LENGTH

    def check(work, layers, *, train):
        assert layers + rows * cost.head_row(train=train) == pytest.approx(counted(work), rel=2e-3)

    with torch.no_grad():
        forward = cost.forward(SIZES)
        check(lambda: model(**inputs), forward, train=False)
    check(lambda: model(**inputs).loss.backward(), cost.train(SIZES), train=True)

    def step(part):
        with sub_model(stacks, part):
            loss = model(**inputs).loss
        loss.backward()

    for part in (ModelPart(1, 1), ModelPart(2, 1), ModelPart(2, 2), ModelPart(1, 1, "bottom")):
        check(lambda part=part: step(part), cost.train(SIZES, part), train=True)


# the definition leaves out products with positions, windows, the choice of tokens and chunks of a
# recurrence; torch counts rows of padding of a convolution
COARSE = {"deberta-v2": 0.06, "longformer": 0.09, "deepseek_v32": 0.05, "glm_moe_dsa": 0.05}
COARSE |= {"nemotron_h": 0.06, "granitemoehybrid": 0.04, "bamba": 0.05, "falcon_h1": 0.21}
COARSE |= {"mamba2": 0.11, "lfm2": 0.004, "lfm2_vl": 0.004, "lfm2_moe": 0.003}
# without a list of layers of their own; or towers of images beside the text
NOT_COUNTED = {"mpnet", "albert", "clip", "siglip"}


@pytest.mark.parametrize("name", sorted({*TEXT} - {*KINDS} - NOT_COUNTED))
def test_a_forward_pass_of_every_text_family_agrees_with_the_counter(name, monkeypatch):
    by_products(monkeypatch)
    model = model_of(name)
    cost, inputs = ModelCost(model, layer_stacks(model)), batch(ROWS, LENGTH)
    with torch.no_grad():
        truth = counted(lambda: model(**inputs))
    expected = cost.forward(SIZES) + ROWS * LENGTH * cost.head_row(train=False)
    assert expected == pytest.approx(truth, rel=COARSE.get(name, 2e-3))


PARTS = [
    *(
        ModelPart(2, 2),
        ModelPart(4, 1),
        ModelPart(4, 2),
        ModelPart(4, 2, "bottom"),
        ModelPart(4, (1, 3)),
    ),
    # the encoder has no new layers
    *(ModelPart(4, (0, 2)), ModelPart(4, (0, 4))),
]


@pytest.mark.parametrize(
    "name, sizes", [("mt5", {"num_decoder_layers": 4}), ("mbart", {"decoder_layers": 4})]
)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_stacks_of_unequal_depth_agree_with_the_counter(name, sizes, part):
    model, inputs = model_of(name, **sizes), batch(ROWS, LENGTH)
    stacks = layer_stacks(model)
    assert [len(stack) for stack in stacks] == [2, 4]

    def step():
        with sub_model(stacks, part):
            loss = model(**inputs).loss
        loss.backward()

    cost = ModelCost(model, stacks)
    expected = cost.train(SIZES, part) + ROWS * LENGTH * cost.head_row(train=True)
    assert expected == pytest.approx(counted(step), rel=2e-3)
    for stack, (n, frozen) in zip(stacks, part.of(stacks), strict=True):
        moves = [any(p.grad is not None for p in layer.parameters()) for layer in stack]
        assert moves == [frozen <= i < n for i in range(len(stack))]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_count_as_the_attention_runs_them(family):
    model, lengths = eager(family), (7, 3, 5)
    with torch.no_grad():
        alone = [counted(lambda n=n: model(batch(1, n)["input_ids"])) for n in lengths]
        together = counted(lambda: model(batch(1, sum(lengths))["input_ids"]))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = {**batch(1, sum(lengths)), "position_ids": positions}
    pairs = count_rows(packed, causal=True).pairs
    sizes = TokenCounts.of_rows(1, sum(lengths))._replace(apart=pairs)
    cost = ModelCost(model, layer_stacks(model))
    head = sum(lengths) * cost.head_row(train=False)
    assert cost.forward(sizes) + head == together
    # FlashAttention runs on GPUs alone
    cost._keeps_apart = True
    assert cost.forward(sizes) + head == sum(alone)


def test_shared_layers_count_every_time_they_run():
    model = model_of("albert")
    inputs = {"input_ids": batch(ROWS, LENGTH)["input_ids"]}
    cost = ModelCost(model, [])
    with torch.no_grad():
        expected = counted(lambda: model(**inputs))
    assert cost.forward(SIZES) + ROWS * LENGTH * cost.head_row(train=False) == expected


def test_log_lines_carry_the_sum_of_all_that_ran(tmp_path):
    """Student, frozen prefix, teacher while it runs, labelled head rows; evaluation not."""
    model, teacher, data = build("bert"), build("bert", layers=2, width=8, seed=9), Batches(8)
    stages = TwoStageConfig(layers_per_block=2, stage1_steps=2)
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    trainer = TwoStageTrainer(
        model, arguments(tmp_path, max_steps=4, **often), two_stage=stages, teacher=teacher,
        inheritance=InheritanceSchedule(end_step=3), train_dataset=data, eval_dataset=data,
    )  # fmt: skip
    trainer.train()
    student, old = (ModelCost(m, layer_stacks(m)) for m in (model, teacher))
    expected, lines = 0.0, [line for line in trainer.state.log_history if "loss" in line]
    for step in range(4):
        rows = sum(int((row["labels"] != -100).sum()) for row in data.rows[2 * step : 2 * step + 2])
        expected += student.train(TokenCounts.of_rows(2, 8), stages.part(step, 5))
        expected += rows * student.head_row(train=True)
        if step < 3:
            expected += old.forward(TokenCounts.of_rows(2, 8)) + rows * old.head_row(train=False)
        assert lines[step]["flops"] == expected
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [line["flops"] for line in evaluations] == [line["flops"] for line in lines]
    assert trainer.state.total_flos == expected


def test_a_mixture_logs_the_experts_that_its_tokens_use(tmp_path):
    """Truth: the products of a forward pass, in which each token meets 2 of the experts."""
    model, data = model_of("qwen2_moe"), Batches(2)
    inputs = {key: torch.cat([row[key] for row in data.rows]) for key in data.rows[0]}
    with torch.no_grad():
        layers = counted(lambda: model.model(inputs["input_ids"]))
    trainer = TwoStageTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=data)
    trainer.train()
    rows = int((inputs["labels"][:, 1:] != -100).sum())
    assert trainer.state.log_history[0]["flops"] == 3 * (layers + rows * 2 * 12 * 50)


class Ragged(torch.utils.data.Dataset):
    """Rows of unequal numbers of tokens and labels."""

    lengths = ((3, 7), (9, 2), (5, 5), (12, 3), (4, 8), (7, 6), (2, 4), (11, 9))

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return [batch(1, n, seed=i)["input_ids"][0] for n in self.lengths[i]]


def padded(rows):
    """A batch for an encoder and a decoder. The decoder has no mask."""
    ids, labels = (
        torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in zip(*rows, strict=True)
    )
    lengths = [torch.tensor([len(row[k]) for row in rows]) for k in range(2)]
    real, labelled = (
        torch.arange(x.shape[1]) < n[:, None] for x, n in zip((ids, labels), lengths, strict=True)
    )
    return {
        "input_ids": ids,
        "attention_mask": real.long(),
        "labels": labels.masked_fill(~labelled, -100),
    }


@pytest.mark.parametrize(("size", "accumulation"), [(8, 1), (4, 2), (1, 8)])
def test_flops_do_not_depend_on_the_rows_that_share_a_batch(tmp_path, size, accumulation):
    """So they are those of one process on any number. They are those of each row alone."""
    model, teacher = build("t5", layers=2), build("t5", layers=1, width=8, seed=9)
    how = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    trainer = TwoStageTrainer(
        model, arguments(tmp_path, max_steps=1, remove_unused_columns=False, **how),
        inheritance=InheritanceSchedule(end_step=1), teacher=teacher, train_dataset=Ragged(),
        data_collator=padded,
    )  # fmt: skip
    trainer.train()
    student, old = (ModelCost(m, layer_stacks(m)) for m in (model, teacher))
    head = student.head_row(train=True) + old.head_row(train=False)
    expected = sum(
        student.train(sizes) + old.forward(sizes) + sizes.decoder_tokens * head
        for n, m in Ragged.lengths
        for sizes in [TokenCounts.of_rows(1, n, decoder_length=m)]
    )
    assert trainer.state.total_flos == pytest.approx(expected, rel=1e-6)
