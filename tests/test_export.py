from __future__ import annotations

import json
import logging
import os
import warnings

import pytest
import sentence_transformers
import torch
from safetensors import safe_open
from transformers import (
    AutoModel,
    BertConfig,
    BertTokenizer,
    RobertaConfig,
    RobertaTokenizer,
)
from transformers.utils import logging as transformers_logging

from csl_hf.configuration import POOLINGS
from csl_hf.export import (
    SentenceTransformer,
    add_sentence_transformer_files,
    default_max_seq_length,
    live_sentence_transformer,
    save_sentence_transformer,
    to_sentence_transformer,
)
from csl_hf.modeling import BertForContrastiveLearning, RobertaForContrastiveLearning

LETTERS = "abcdefghijklmnopqrstuvwxyz"
POSITIONS = 34
# Lengths differ, also within the batches of two that encode makes; the last text is longer than the backbone.
TEXTS = ["a quiet morning", "no", "the river bends south", "yes sir", "x", "far too long " * 6]


def tiny_roberta(pooling: str) -> tuple[RobertaForContrastiveLearning, RobertaTokenizer]:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "\u0120", *LETTERS]
    tokenizer = RobertaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    config = RobertaConfig(pad_token_id=1, type_vocab_size=1, **tiny_settings(len(tokens), pooling))
    return randomized(RobertaForContrastiveLearning(config)), tokenizer


def tiny_bert(pooling: str) -> tuple[BertForContrastiveLearning, BertTokenizer]:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + letter for letter in LETTERS)]
    tokenizer = BertTokenizer(vocab={token: i for i, token in enumerate(tokens)})
    config = BertConfig(**tiny_settings(len(tokens), pooling))
    return randomized(BertForContrastiveLearning(config)), tokenizer


def tiny_settings(vocab_size: int, pooling: str) -> dict:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": POSITIONS,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "contrastive": {"pooling": pooling},
    }


def randomized(model):
    """Fixed weights with which texts, layers and tokens differ clearly, embeddings below 1; training mode."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.4 if parameter.ndim == 2 else 0.05, generator=generator)
            if name.endswith("LayerNorm.weight"):
                parameter.add_(0.25)
    return model.train()


BACKBONES = {"roberta": tiny_roberta, "bert": tiny_bert}
every_backbone = pytest.mark.parametrize("backbone", BACKBONES)
every_pooling = pytest.mark.parametrize("pooling", POOLINGS)


def encode(sentence_transformer, texts=TEXTS, batch_size=2) -> torch.Tensor:
    return sentence_transformer.encode(texts, batch_size=batch_size, convert_to_tensor=True)


def by_hand(model, tokenizer, pooling: str, texts=TEXTS) -> torch.Tensor:
    """e of each text from its hidden states, one text at a time: no padding, no mask."""
    backbone = model.base_model
    modes = {module: module.training for module in backbone.modules()}
    backbone.eval()
    rows = []
    for text in texts:
        longest = default_max_seq_length(model.config, tokenizer)
        batch = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
        with torch.no_grad():
            states = backbone(**batch, output_hidden_states=True).hidden_states
        first, last = states[1][0], states[-1][0]  # (L, d)
        rows.append(
            {
                "mean": last.mean(0),
                "cls": last[0],
                "cls_before_pooler": last[0],
                "max": last.max(0).values,
                "avg_first_last": (0.5 * (first + last)).mean(0),
            }[pooling]
        )
    for module, mode in modes.items():
        module.training = mode
    return torch.stack(rows)


def assert_equal_embeddings(actual: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    """Equal within ``atol``, and of texts that the embeddings tell apart: constant ones are always equal."""
    assert actual.shape == expected.shape == (len(TEXTS), 16)
    assert torch.isfinite(expected).all()
    assert torch.pdist(expected).min() > 1e-2, "two texts have the same embedding: the comparison shows nothing"
    assert (actual - expected).abs().max().item() <= atol


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small are slower with more, by far on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def log(caplog):
    """What is logged from WARNING on, transformers' loading reports included."""
    transformers_logging.enable_propagation()
    yield caplog
    transformers_logging.disable_propagation()


def test_the_comparison_refuses_constant_embeddings():
    constant = torch.ones(len(TEXTS), 16)
    with pytest.raises(AssertionError, match="shows nothing"):
        assert_equal_embeddings(constant, constant, atol=0.0)
    different = torch.randn(len(TEXTS), 16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError):
        assert_equal_embeddings(different + 1e-3, different, atol=1e-6)


# The live view


@every_backbone
@every_pooling
def test_live_view_gives_the_embeddings_computed_by_hand(backbone, pooling):
    model, tokenizer = BACKBONES[backbone](pooling)
    with live_sentence_transformer(model, tokenizer) as view:
        assert_equal_embeddings(encode(view), by_hand(model, tokenizer, pooling), atol=1e-6)


@every_backbone
@every_pooling
def test_live_view_gives_the_embeddings_of_the_models_forward(backbone, pooling):
    model, tokenizer = BACKBONES[backbone](pooling)
    longest = default_max_seq_length(model.config, tokenizer)
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    with live_sentence_transformer(model, tokenizer) as view:
        embeddings = encode(view)
        model.eval()
        with torch.no_grad():
            expected = model(**batch, project=False).embeddings
    assert_equal_embeddings(embeddings, expected, atol=1e-6)


@every_pooling
def test_order_and_batch_size_do_not_matter(pooling):
    model, tokenizer = tiny_roberta(pooling)
    view = to_sentence_transformer(model, tokenizer)
    expected = encode(view)
    assert_equal_embeddings(encode(view, batch_size=len(TEXTS)), expected, atol=1e-6)
    assert_equal_embeddings(encode(view, TEXTS[::-1], batch_size=3).flip(0), expected, atol=1e-6)


def test_view_sees_an_optimizer_step_and_copies_no_weight():
    model, tokenizer = tiny_bert("mean")
    addresses = {parameter.data_ptr() for parameter in model.base_model.parameters()}
    with live_sentence_transformer(model, tokenizer) as view:
        before = encode(view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt", truncation=True, max_length=POSITIONS)
    (model(**batch).embeddings ** 2).mean().backward()
    optimizer.step()
    after = encode(view)
    assert (after - before).abs().max() > 1e-2
    assert_equal_embeddings(after, by_hand(model, tokenizer, "mean"), atol=1e-6)
    assert {parameter.data_ptr() for parameter in view.parameters()} == addresses
    assert {parameter.data_ptr() for parameter in model.base_model.parameters()} == addresses


def test_view_can_be_left_without_a_trace():
    model, tokenizer = tiny_roberta("avg_first_last")
    model.base_model.embeddings.eval()  # one module is in another mode than the rest
    modes = [module.training for module in model.modules()]
    config, random_state = model.config.to_dict(), torch.get_rng_state()
    tokenizer_length = tokenizer.model_max_length
    with live_sentence_transformer(model, tokenizer, max_seq_length=12) as view:
        encode(view)
        assert not any(module.training for module in model.base_model.modules())
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(RuntimeError), live_sentence_transformer(model, tokenizer) as view:
        view.eval()
        raise RuntimeError
    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), random_state)
    assert tokenizer.model_max_length == tokenizer_length
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_view_has_the_models_dtype_and_plain_settings():
    model, tokenizer = tiny_roberta("mean")
    view = to_sentence_transformer(model.to(torch.bfloat16), tokenizer)
    assert encode(view).dtype == view.dtype == torch.bfloat16
    assert view.device == model.device
    assert view.similarity_fn_name == "cosine"
    assert view.default_prompt_name is None
    assert not any(view.prompts.values())
    assert {type(module).__module__.split(".")[0] for module in view} == {"sentence_transformers"}


def test_unknown_pooling_is_refused():
    model, tokenizer = tiny_roberta("mean")
    model.config.contrastive["pooling"] = "median"
    with pytest.raises(ValueError, match="'median'.*known are mean, cls"):
        to_sentence_transformer(model, tokenizer)


# Lengths


def test_default_length_is_what_the_positions_allow():
    roberta, tokenizer = tiny_roberta("mean")
    assert default_max_seq_length(roberta.config, tokenizer) == POSITIONS - 2  # positions start at pad_token_id + 1
    bert, tokenizer = tiny_bert("mean")
    assert default_max_seq_length(bert.config, tokenizer) == POSITIONS
    tokenizer.model_max_length = 20
    assert default_max_seq_length(bert.config, tokenizer) == 20


def test_longer_texts_are_cut_to_the_length_given():
    model, tokenizer = tiny_roberta("mean")
    view = to_sentence_transformer(model, tokenizer, max_seq_length=6)  # four letters and two special tokens
    assert view.max_seq_length == 6
    letters = encode(view, ["abcd", "abcdefgh", "abce"])
    assert torch.allclose(letters[0], letters[1], atol=1e-6)
    assert (letters[0] - letters[2]).abs().max() > 1e-2


@pytest.mark.parametrize("length", [2, POSITIONS - 1])
def test_length_out_of_range_is_refused(length, tmp_path):
    model, tokenizer = tiny_roberta("mean")
    with pytest.raises(ValueError, match=f"max_seq_length={length} .* take 3 to 32 tokens"):
        to_sentence_transformer(model, tokenizer, max_seq_length=length)
    with pytest.raises(ValueError, match=f"max_seq_length={length} "):
        save_sentence_transformer(model, tokenizer, tmp_path / "out", max_seq_length=length)
    assert not list(tmp_path.iterdir())


# Folders


@every_backbone
@every_pooling
def test_saved_folder_gives_exactly_the_live_embeddings(backbone, pooling, tmp_path, log):
    model, tokenizer = BACKBONES[backbone](pooling)
    with live_sentence_transformer(model, tokenizer) as view:
        expected = encode(view)
    save_sentence_transformer(model, tokenizer, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert [record.getMessage() for record in log.records if record.levelno >= logging.WARNING] == []
    assert_equal_embeddings(encode(loaded), expected, atol=0.0)
    assert loaded.max_seq_length == view.max_seq_length
    assert loaded.similarity_fn_name == "cosine"
    assert not any(loaded.prompts.values())


@every_backbone
@every_pooling
def test_checkpoint_is_a_sentence_transformer_and_keeps_its_head(backbone, pooling, tmp_path):
    model, tokenizer = BACKBONES[backbone](pooling)
    with live_sentence_transformer(model, tokenizer) as view:
        expected = encode(view)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    add_sentence_transformer_files(tmp_path, model, tokenizer)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert_equal_embeddings(encode(SentenceTransformer.from_pretrained(tmp_path)), expected, atol=0.0)
    weights = type(model).from_pretrained(tmp_path).state_dict()
    assert any(name.startswith("head.") for name in weights)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_checkpoint_loading_reports_nothing_but_the_head(tmp_path, log):
    model, tokenizer = tiny_roberta("mean")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    add_sentence_transformer_files(tmp_path, model, tokenizer)
    sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    (report,) = [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]
    rows = [line for line in report.splitlines() if "|" in line]
    unexpected = sorted(row.split()[0] for row in rows if "UNEXPECTED" in row)
    assert unexpected == ["head.dense.weight", "head.projection.weight"]
    assert "MISSING" not in report


def test_saved_folder_is_the_bare_backbone_in_modules_that_everybody_has(tmp_path):
    model, tokenizer = tiny_roberta("avg_first_last")
    config = model.config.to_dict()
    save_sentence_transformer(model, tokenizer, tmp_path / "out")
    assert model.config.to_dict() == config
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == set(model.base_model.state_dict())
        assert not any("head" in name or "pooler" in name for name in weights.keys())  # noqa: SIM118
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["RobertaModel"]
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["type"] for module in modules] == [
        "sentence_transformers.models.Transformer",
        "sentence_transformers.models.WeightedLayerPooling",
        "sentence_transformers.models.Pooling",
    ]
    assert [module["path"] for module in modules] == ["", "1_WeightedLayerPooling", "2_Pooling"]
    assert not (tmp_path / "out" / "README.md").exists()
    assert b"csl_hf" not in b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*.json"))
    backbone = AutoModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(backbone.state_dict()[n], t) for n, t in model.base_model.state_dict().items())


@pytest.mark.parametrize(("pooling", "mode"), [("mean", "mean"), ("cls", "cls"), ("max", "max")])
def test_pooling_is_written_for_new_and_old_readers(pooling, mode, tmp_path):
    model, tokenizer = tiny_bert(pooling)
    save_sentence_transformer(model, tokenizer, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert written["pooling_mode"] == mode
    assert written["word_embedding_dimension"] == 16
    flags = {name for name, value in written.items() if value is True}
    assert flags == {f"pooling_mode_{mode}_{'token' if mode == 'cls' else 'tokens'}"}


def test_saving_replaces_its_own_files_and_leaves_others(tmp_path):
    folder = tmp_path / "out"
    (folder / "checkpoint-1").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    model, tokenizer = tiny_roberta("mean")
    save_sentence_transformer(model, tokenizer, folder)
    other, _ = tiny_roberta("max")
    with torch.no_grad():
        other.base_model.embeddings.word_embeddings.weight.neg_()
    save_sentence_transformer(other, tokenizer, folder, max_seq_length=20)
    loaded = SentenceTransformer.from_pretrained(folder, device="cpu")
    assert loaded.max_seq_length == 20
    assert_equal_embeddings(encode(loaded), encode(to_sentence_transformer(other, tokenizer, 20)), atol=0.0)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "checkpoint-1").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failure_while_writing_leaves_the_old_folder_whole(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    model, tokenizer = tiny_roberta("mean")
    save_sentence_transformer(model, tokenizer, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    model, _ = tiny_roberta("cls")

    def full_disk(*args, **kwargs):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(json, "dumps", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_sentence_transformer(model, tokenizer, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_kill_while_moving_leaves_a_folder_that_does_not_load(overwrite, tmp_path, monkeypatch):
    """At each point of the move, what is there either does not load or is complete."""
    model, tokenizer = tiny_roberta("max")
    if overwrite:
        old, _ = tiny_roberta("mean")
        for limit in range(20):
            save_sentence_transformer(old, tokenizer, tmp_path / str(limit))
    replace, moved = os.replace, []

    def killed_after(source, target):
        if str(source).endswith(".tmp"):  # a file that takes its name within the scratch folder
            return replace(source, target)
        if len(moved) == limit:
            raise KeyboardInterrupt
        return moved.append(replace(source, target))

    monkeypatch.setattr(os, "replace", killed_after)
    for limit in range(20):
        moved.clear()
        folder = tmp_path / str(limit)
        try:
            save_sentence_transformer(model, tokenizer, folder)
        except KeyboardInterrupt:
            assert not (folder / "config.json").exists()
        else:
            break
    assert limit > 5
    assert_equal_embeddings(
        encode(SentenceTransformer.from_pretrained(folder, device="cpu")),
        by_hand(model, tokenizer, "max"),
        atol=1e-6,
    )


@pytest.mark.parametrize("present", ["model", "tokenizer"])
def test_folder_that_is_no_checkpoint_is_refused(present, tmp_path):
    model, tokenizer = tiny_roberta("mean")
    {"model": model, "tokenizer": tokenizer}[present].save_pretrained(tmp_path)
    missing = {"model": "tokenizer_config.json", "tokenizer": "config.json"}[present]
    with pytest.raises(FileNotFoundError, match=f"has no {missing}.*save_pretrained"):
        add_sentence_transformer_files(tmp_path, model, tokenizer)
    assert not (tmp_path / "modules.json").exists()


def test_what_our_class_saves_again_names_no_class_of_ours(tmp_path):
    model, tokenizer = tiny_bert("avg_first_last")
    view = to_sentence_transformer(model, tokenizer)
    expected = encode(view)
    view.save_pretrained(str(tmp_path), create_model_card=False)
    assert "csl_hf" not in (tmp_path / "modules.json").read_text()
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    assert_equal_embeddings(encode(loaded), expected, atol=0.0)
