from __future__ import annotations

from pathlib import Path

import pytest

from csl_hf.arguments import ContrastiveTrainingArguments, DataArguments, ModelArguments, parse_arguments
from csl_hf.configuration import ContrastiveConfig

TYPES = (ModelArguments, DataArguments, ContrastiveConfig, ContrastiveTrainingArguments)
CONFIGS = Path(__file__).resolve().parents[1] / "examples" / "configs"


def test_yaml_is_read_and_the_command_line_wins(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("learning_rate: 5e-6\ntrain_file: [a.txt, b.txt]\nradius: 15\nradius_is_absolute: true\n")
    for arguments in (["--config", str(config)], [str(config)]):
        model, data, objective, training = parse_arguments(
            TYPES, [*arguments, "--radius", "3", "--output_dir", str(tmp_path), "--global_batch_size", "64"]
        )
        assert data.train_file == ["a.txt", "b.txt"]
        assert (objective.radius, objective.radius_is_absolute) == (3.0, True)
        # PyYAML reads 5e-6 as a string
        assert training.learning_rate == 5e-6
        assert training.per_device_train_batch_size == 64


def test_yaml_habits_mean_what_they_say(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("eval_strategy: no\ntrain_file: my.txt\nbf16: false\ntext_column: null\nradius: 2\n")
    _, data, objective, training = parse_arguments(TYPES, [str(config), "--output_dir", str(tmp_path)])
    assert training.eval_strategy == "no" and data.train_file == ["my.txt"]
    assert isinstance(objective.radius, float) and data.text_column is None


def test_json_and_default_config(tmp_path):
    default = tmp_path / "default.json"
    default.write_text('{"max_length": 48, "num_neighbors": 5}')
    _, data, objective, _ = parse_arguments(TYPES, ["--num_neighbors", "7"], default_config=default)
    assert (data.max_length, objective.num_neighbors) == (48, 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("learnin_rate: 1\nradius: 2\n", "unknown arguments: learnin_rate"),
        ("- a\n", "holds a list"),
        ("radius: [1\n", "cannot be read"),
        ("num_neighbors:\n", "num_neighbors: the value is empty"),
        ("max_length: true\n", "max_length: True is a truth value; expected int"),
        ("temperature: [1]\n", r"temperature: got the list \[1\]; expected float"),
        ("train_file: []\n", "train_file: got the list"),
        ("1: 2\nconfig: x\n", "unknown arguments: 1, config"),
    ],
)
def test_unusable_config_is_named(tmp_path, content, message):
    config = tmp_path / "run.yaml"
    config.write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_arguments(TYPES, ["--config", str(config)])
    with pytest.raises(FileNotFoundError, match="missing.yaml does not exist"):
        parse_arguments(TYPES, ["--config", str(tmp_path / "missing.yaml")])


def test_unknown_argument_is_named():
    with pytest.raises(ValueError, match="--raduis"):
        parse_arguments(TYPES, ["--raduis", "3"])


def test_repeated_argument_is_refused():
    with pytest.raises(ValueError, match="--train_file is given twice"):
        parse_arguments(TYPES, ["--train_file", "a.txt", "--train_file", "b.txt"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_find_batch_size": True}, "would change the number of negatives"),
        ({"greater_is_better": True}, "without metric_for_best_model"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1"),
        ({"bucket_size": -1}, "bucket_size=-1 must be at least 0"),
    ],
)
def test_training_arguments_out_of_range_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        ContrastiveTrainingArguments(output_dir=str(tmp_path), **options)


def test_help_names_equations_and_groups(capsys):
    with pytest.raises(SystemExit) as end:
        parse_arguments(TYPES, ["--help"], description="What this script does.")
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert text.startswith("usage:") and "What this script does." in text
    for part in ("contrastive objective:", "model:", "data:", "Delta of Eq. 3", "does not add negatives"):
        assert part in " ".join(text.split()), part


@pytest.mark.parametrize(
    ("name", "backbone", "radius"),
    [("distilroberta", "distilroberta-base", 15), ("roberta-base", "roberta-base", 15),
     ("roberta-large", "roberta-large", 30)],
)  # fmt: skip
def test_shipped_configs_are_the_papers(name, backbone, radius, tmp_path):
    """Appendix A of the paper: batch 1024, 5 epochs, Adam 5e-4 / 5e-6 constant, Delta 15 / 30, every 500 steps."""
    model, data, objective, training = parse_arguments(
        TYPES, ["--config", str(CONFIGS / f"vascl-{name}.yaml"), "--output_dir", str(tmp_path)]
    )
    assert model.model_name_or_path == backbone
    assert (objective.radius, objective.radius_is_absolute, objective.num_neighbors) == (radius, True, 16)
    assert (objective.pooling, objective.loss, objective.temperature) == ("mean", "nt_xent", 0.05)
    assert (objective.neighborhood_gradient, objective.perturbation_steps) == ("reference", 1)
    assert (training.learning_rate, training.head_learning_rate, training.weight_decay) == (5e-6, 5e-4, 0)
    assert (training.global_batch_size, training.num_train_epochs, data.max_length) == (1024, 5, 32)
    assert (training.lr_scheduler_type, training.eval_steps, training.load_best_model_at_end) == ("constant", 500, True)


def test_every_shipped_config_parses(tmp_path):
    configs = sorted(CONFIGS.glob("*.yaml"))
    assert len(configs) >= 4
    for config in configs:
        parse_arguments(TYPES, ["--config", str(config), "--output_dir", str(tmp_path)])


def test_arguments_that_contradict_each_other_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="remove_unused_columns=True would hide"):
        ContrastiveTrainingArguments(output_dir=str(tmp_path), remove_unused_columns=True)
    monkeypatch.setattr(ContrastiveTrainingArguments, "world_size", property(lambda self: 3))
    with pytest.raises(ValueError, match="global_batch_size=64 cannot be divided among 3 processes"):
        ContrastiveTrainingArguments(output_dir=str(tmp_path), global_batch_size=64)
    divided = ContrastiveTrainingArguments(output_dir=str(tmp_path), global_batch_size=66)
    assert divided.per_device_train_batch_size == 22 and divided.texts_per_batch == 66
    assert divided.data_seed == divided.seed
