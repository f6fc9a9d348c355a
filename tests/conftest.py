"""Tiny random models and a tiny tokenizer, made offline; paths beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, PreTrainedTokenizerFast, RobertaConfig

from csl_hf.configuration import ContrastiveConfig
from csl_hf.modeling import BertForContrastiveLearning, RobertaForContrastiveLearning

# Tiny models gain nothing from threads, and lose much where other programs use the cores.
torch.set_num_threads(1)

REPOSITORY = Path(__file__).resolve().parents[1]
SENTENCES = [
    f"{subject} {verb} {thing}."
    for subject in ("The cat", "A teacher", "Our neighbour", "The old captain")
    for verb in ("saw", "bought", "forgot", "painted")
    for thing in ("a red boat", "the long letter", "nine apples", "her brother's clock")
]


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """64 distinct English sentences."""
    return list(SENTENCES)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of about 300 tokens with RoBERTa's special tokens, at most 62 tokens long."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=62,
    )


def tiny_config(model_type: str = "roberta", vocab_size: int = 320, **contrastive):
    """A two-layer configuration with 32 hidden units; keyword arguments are settings of the objective."""
    sizes = dict(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        type_vocab_size=1,
    )
    if model_type == "roberta":
        config = RobertaConfig(**sizes, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    else:
        config = BertConfig(**sizes, pad_token_id=1)
    config.contrastive = ContrastiveConfig(**{"projection_dim": 16, "num_neighbors": 4, **contrastive}).to_dict()
    return config


def tiny_model(model_type: str = "roberta", seed: int = 0, **contrastive):
    """A tiny random model; the same seed gives the same weights."""
    classes = {"roberta": RobertaForContrastiveLearning, "bert": BertForContrastiveLearning}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return classes[model_type](tiny_config(model_type, **contrastive))


@pytest.fixture(scope="session")
def tiny_backbone(tmp_path_factory, tiny_tokenizer) -> Path:
    """Folder of a plain tiny RoBERTa (no head, no settings) with its tokenizer."""
    folder = tmp_path_factory.mktemp("backbone")
    model = tiny_model()
    backbone = model.base_model
    backbone.config.__dict__.pop("contrastive", None)
    backbone.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The shared data folder beside the checkout."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return folder
