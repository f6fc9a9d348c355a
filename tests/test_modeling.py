from __future__ import annotations

import pytest
import torch
from conftest import tiny_config, tiny_model
from transformers import AutoModel, RobertaForMaskedLM, XLMRobertaConfig, XLMRobertaModel
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaPreTrainedModel

from csl_hf.configuration import POOLINGS, ContrastiveConfig
from csl_hf.modeling import (
    AutoModelForContrastiveLearning,
    BertForContrastiveLearning,
    ContrastiveLearningMixin,
    RobertaForContrastiveLearning,
    pool,
    set_dropout,
)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Three texts of 6, 4 and 2 tokens."""
    ids = torch.tensor([[0, 9, 8, 7, 6, 2], [0, 5, 9, 2, 1, 1], [0, 2, 1, 1, 1, 1]])
    return ids, (ids != 1).long()


@pytest.mark.parametrize("model_type", ["roberta", "bert"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_by_hand(model_type, pooling):
    """Each text alone, without padding, pooled with plain loops."""
    model = tiny_model(model_type, pooling=pooling).eval()
    ids, mask = batch()
    embeddings = model(ids, mask).embeddings
    for row, length in enumerate((6, 4, 2)):
        with torch.no_grad():
            states = model.base_model(ids[row : row + 1, :length], output_hidden_states=True).hidden_states
        last = states[-1][0]
        expected = {
            "mean": last.mean(dim=0),
            "cls": last[0],
            "cls_before_pooler": last[0],
            "max": last.amax(dim=0),
            "avg_first_last": ((states[1][0] + last) / 2).mean(dim=0),
        }[pooling]
        torch.testing.assert_close(embeddings[row], expected, atol=1e-5, rtol=1e-4)
    assert (embeddings[0] - embeddings[1]).abs().max() > 1e-3


def test_views_are_rows_of_one_pass_and_the_head_gives_unit_norm():
    model = tiny_model().eval()
    ids, mask = batch()
    views_ids, views_mask = torch.stack([ids, ids.flip(0)], dim=1), torch.stack([mask, mask.flip(0)], dim=1)
    output = model(views_ids, views_mask)
    assert output.embeddings.shape == (3, 2, 32) and output.projections.shape == (3, 2, 16)
    flat = model(ids, mask)
    torch.testing.assert_close(output.embeddings[:, 0], flat.embeddings)
    torch.testing.assert_close(output.embeddings[:, 1], flat.embeddings.flip(0))
    torch.testing.assert_close(flat.projections.norm(dim=-1), torch.ones(3))
    assert model(ids, mask, project=False).projections is None


def test_dropout_makes_the_views_differ_in_training_only():
    model = tiny_model()
    ids, mask = batch()
    views = torch.stack([ids, ids], dim=1), torch.stack([mask, mask], dim=1)
    first, second = model.train()(*views).embeddings.unbind(dim=1)
    assert (first - second).abs().max() > 1e-3
    first, second = model.eval()(*views).embeddings.unbind(dim=1)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["dense.weight", "projection.weight"]),
        ({"head": "none"}, []),
        ({"pooling": "cls", "head": "none"}, ["pooler.weight", "pooler.bias"]),
        ({"pooling": "cls"}, ["pooler.weight", "pooler.bias", "dense.weight", "projection.weight"]),
    ],
)
def test_head_has_the_layers_of_the_recipe(options, names):
    model = tiny_model(**options)
    assert [name for name, _ in model.head.named_parameters()] == names
    assert not any(name.startswith("roberta.pooler") for name in model.state_dict())


@pytest.fixture()
def masked_lm(tmp_path):
    """A plain backbone as it is found in the wild: with a masked-LM head, without any of our settings."""
    config = tiny_config()
    del config.contrastive
    model = RobertaForMaskedLM(config)
    model.save_pretrained(tmp_path / "mlm")
    return tmp_path / "mlm", model


def test_plain_backbone_gets_a_fresh_and_reproducible_head(masked_lm):
    folder, plain = masked_lm
    torch.manual_seed(1)
    first = AutoModelForContrastiveLearning.from_pretrained(folder)
    torch.manual_seed(2)
    second = AutoModelForContrastiveLearning.from_pretrained(folder)
    other = AutoModelForContrastiveLearning.from_pretrained(folder, contrastive={"head_seed": 7})
    assert isinstance(first, RobertaForContrastiveLearning) and first.dtype == torch.float32
    for name, weight in plain.roberta.state_dict().items():
        assert torch.equal(first.roberta.state_dict()[name], weight), name
    for (name, a), b, c in zip(
        first.head.named_parameters(), second.head.parameters(), other.head.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert a.std() > 0.05


def test_unknown_setting_is_named(masked_lm):
    with pytest.raises(ValueError, match="Unknown contrastive settings poolin; known are pooling"):
        RobertaForContrastiveLearning.from_pretrained(masked_lm[0], contrastive={"poolin": "max"})


def test_saved_model_keeps_weights_and_settings(tmp_path):
    model = tiny_model(pooling="max", radius=0.7, num_neighbors=3)
    with torch.no_grad():
        model.head.dense.weight.mul_(3)
    model.save_pretrained(tmp_path)
    again = AutoModelForContrastiveLearning.from_pretrained(tmp_path)
    assert again.contrastive_config == model.contrastive_config
    assert again.contrastive_config.radius == 0.7
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    changed = AutoModelForContrastiveLearning.from_pretrained(tmp_path, contrastive={"radius": 0.1})
    assert changed.contrastive_config.radius == 0.1 and changed.contrastive_config.pooling == "max"
    replaced = AutoModelForContrastiveLearning.from_pretrained(
        tmp_path, contrastive=ContrastiveConfig(projection_dim=16)
    )
    assert replaced.contrastive_config == ContrastiveConfig(projection_dim=16)


def test_half_precision_checkpoint_is_trained_in_float32(tmp_path):
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    assert AutoModelForContrastiveLearning.from_pretrained(tmp_path).dtype == torch.float32
    assert AutoModelForContrastiveLearning.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_class_is_chosen_by_model_type_not_by_path(tmp_path):
    folder = tmp_path / "roberta-base"
    tiny_model("bert").save_pretrained(folder)
    assert isinstance(AutoModelForContrastiveLearning.from_pretrained(folder), BertForContrastiveLearning)


def test_transformers_reads_the_backbone_of_a_saved_model(tmp_path):
    model = tiny_model().eval()
    model.save_pretrained(tmp_path)
    backbone = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    ids, mask = batch()
    torch.testing.assert_close(
        pool((backbone(ids, mask).last_hidden_state,), mask, "mean"), model(ids, mask).embeddings
    )


def test_further_backbone_is_two_lines_and_a_registration(monkeypatch):
    class XLMRobertaForContrastiveLearning(ContrastiveLearningMixin, XLMRobertaPreTrainedModel):
        backbone_class = XLMRobertaModel

    config = XLMRobertaConfig(**{k: v for k, v in tiny_config().to_dict().items() if k != "model_type"})
    with pytest.raises(ValueError, match="'xlm-roberta' model.*bert, roberta.*register"):
        AutoModelForContrastiveLearning.from_config(config)
    monkeypatch.setattr(AutoModelForContrastiveLearning, "_classes", dict(AutoModelForContrastiveLearning._classes))
    AutoModelForContrastiveLearning.register("xlm-roberta", XLMRobertaForContrastiveLearning)
    model = AutoModelForContrastiveLearning.from_config(config)
    assert model(*batch()).embeddings.shape == (3, 32)


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_buckets_change_nothing_but_the_padding(padding_side):
    model = tiny_model().eval()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (24,), generator=generator)
    ids = torch.full((24, 20), 1)
    for row, length in enumerate(lengths):
        place = slice(0, length) if padding_side == "right" else slice(20 - length, 20)
        ids[row, place] = torch.randint(5, 300, (int(length),), generator=generator)
    mask = (ids != 1).long()
    whole = model(ids.view(12, 2, 20), mask.view(12, 2, 20))
    widths = []
    hook = model.roberta.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    bucketed = model(ids.view(12, 2, 20), mask.view(12, 2, 20), bucket_size=5)
    hook.remove()
    assert len(widths) == 5 and (padding_side == "left" or widths[0] < widths[-1])
    torch.testing.assert_close(bucketed.embeddings, whole.embeddings, atol=1e-5, rtol=1e-4)
    assert (whole.embeddings[0] - whole.embeddings[1]).abs().max() > 1e-3


def test_dropout_can_be_set():
    config = tiny_config()
    set_dropout(config, 0.25)
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.25
    with pytest.raises(ValueError, match="dropout=1"):
        set_dropout(config, 1)


def test_activation_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            # renamed in transformers 5.24
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        torch.manual_seed(0)
        ids, mask = batch()
        model(ids, mask).projections[:, 0].sum().backward()
        gradients.append(model.roberta.embeddings.word_embeddings.weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "sum"}, "pooling='sum' is unknown; choose one of mean"),
        ({"temperature": 0}, "temperature=0 must be greater than 0"),
        ({"num_neighbors": 0}, "num_neighbors=0 must be at least 1"),
        ({"radius": -1}, "radius=-1 must be greater"),
        ({"radius": float("inf")}, "radius=inf must be greater"),
        ({"neighborhood_weight": float("nan")}, "neighborhood_weight=nan must be at least 0"),
        ({"neighborhood_gradient": "both"}, "reference, paper"),
    ],
)
def test_settings_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ContrastiveConfig(**options)
