from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from transformers import TrainerCallback

from csl_hf.arguments import ContrastiveTrainingArguments
from csl_hf.checkpoints import find_checkpoint
from csl_hf.data import tokenize_texts
from csl_hf.modeling import check_dropout, set_dropout
from csl_hf.trainer import ContrastiveTrainer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, tiny_tokenizer, sentences):
    texts = Dataset.from_dict({"text": sentences, "row": list(range(100, 100 + len(sentences)))})
    cache = tmp_path_factory.mktemp("cache")
    return tokenize_texts(texts, tiny_tokenizer, max_length=24, cache_dir=cache)[0]


class Steepness:
    """A metric that falls while training: the sum of the first embedding's absolute entries, negated step count."""

    primary_metric = "probe_value"
    greater_is_better = False

    def __init__(self, values=None):
        self.values = iter(values) if values is not None else None

    def __call__(self, encode):
        embedding = encode(["The cat saw a red boat."])[0]
        return {"probe_value": next(self.values) if self.values is not None else float(abs(embedding).sum())}


def arguments(folder, **options) -> ContrastiveTrainingArguments:
    defaults = dict(
        output_dir=str(folder),
        global_batch_size=8,
        max_steps=6,
        logging_steps=2,
        save_strategy="no",
        learning_rate=1e-3,
        disable_tqdm=True,
        use_cpu=True,
        report_to="none",
        dataloader_pin_memory=False,
        seed=3,
    )
    return ContrastiveTrainingArguments(**defaults | options)


@pytest.fixture()
def make_trainer(tmp_path, dataset, tiny_tokenizer):
    def make(folder="run", model=None, data=dataset, evaluators=None, callbacks=None, contrastive=None, **options):
        return ContrastiveTrainer(
            model=model or tiny_model(**(contrastive or {})),
            args=arguments(tmp_path / folder, **options),
            train_dataset=data,
            processing_class=tiny_tokenizer,
            evaluators=evaluators,
            callbacks=callbacks,
        )

    return make


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_equal_weights(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_training_lowers_the_loss_and_logs_every_component(make_trainer):
    trainer = make_trainer(max_steps=30, logging_steps=5)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = {"loss/nt_xent", "loss/neighborhood", "alignment", "uniformity", "mean_cosine", "effective_rank"}
    assert all(names <= entry.keys() for entry in logs) and len(logs) == 6
    assert logs[-1]["loss/nt_xent"] < 0.7 * logs[0]["loss/nt_xent"]
    for entry in logs:
        assert entry["loss"] == pytest.approx(entry["loss/nt_xent"] + entry["loss/neighborhood"], rel=1e-4)
        assert 1 <= entry["effective_rank"] <= 7 and -1 <= entry["mean_cosine"] <= 1


def test_neighborhood_weight_and_warmup_scale_the_second_term(make_trainer):
    for options, step, factor in (
        ({"neighborhood_weight": 0.25}, 0, 0.25),
        ({"neighborhood_warmup_steps": 10}, 4, 0.4),
        ({"neighborhood_warmup_steps": 10}, 50, 1.0),
    ):
        trainer = make_trainer(contrastive=options)
        trainer.state.global_step = step
        losses = {"nt_xent": torch.tensor(2.0), "neighborhood": torch.tensor(3.0)}
        assert trainer._weighted_sum(losses).item() == pytest.approx(2 + 3 * factor)


def test_head_has_its_own_learning_rate(make_trainer):
    trainer = make_trainer(learning_rate=1e-5, head_learning_rate=1e-2, weight_decay=0.1)
    optimizer = trainer.create_optimizer()
    rate = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    parameters = dict(trainer.model.named_parameters())
    assert len(rate) == len(parameters)
    for name, parameter in parameters.items():
        assert rate[id(parameter)] == (1e-2 if name.startswith("head.") else 1e-5), name
        assert decay[id(parameter)] == (0.0 if "bias" in name or "LayerNorm" in name else 0.1), name


def test_frozen_backbone_moves_the_head_only(make_trainer):
    trainer = make_trainer(learning_rate=0.0, head_learning_rate=1e-2, max_steps=2)
    before = weights(trainer)
    trainer.train()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name]) != name.startswith("head."), name


def views_without_dropout(dataset) -> Dataset:
    """Pairs of different texts as the two views, so that training is deterministic without dropout."""
    ids = dataset["input_ids"]
    views = [[ids[i], ids[(i + 17) % len(ids)]] for i in range(len(ids))]
    return Dataset.from_dict({"views": views, "text_id": dataset["text_id"], "row": dataset["row"]})


def test_two_accumulation_steps_are_the_mean_of_two_single_ones(make_trainer, dataset):
    data = views_without_dropout(dataset).select(range(16))
    contrastive = {"neighborhood_weight": 0.0}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            self.found = {name: p.grad.clone() for name, p in model.named_parameters()}

    def gradients(rows, accumulation):
        model = tiny_model(**contrastive)
        set_dropout(model.config, 0.0)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        probe = Gradients()
        make_trainer(
            model=model, data=data.select(rows), callbacks=[probe], max_steps=1, max_grad_norm=0.0,
            gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential",
        ).train()  # fmt: skip
        return probe.found

    both = gradients(range(16), 2)
    first, second = gradients(range(8), 1), gradients(range(8, 16), 1)
    largest = max((first[name] - second[name]).abs().max() for name in both)
    assert largest > 1e-3  # the halves differ, so their mean says something
    for name in both:
        torch.testing.assert_close(both[name], (first[name] + second[name]) / 2, atol=1e-6, rtol=1e-4)


def test_same_seed_same_run_and_other_seed_another(make_trainer):
    def run(seed):
        trainer = make_trainer(seed=seed, max_steps=3)
        trainer.train()
        return weights(trainer)

    first = run(1)
    assert_equal_weights(first, run(1))
    assert not torch.equal(first["head.dense.weight"], run(2)["head.dense.weight"])


class Killed(BaseException):
    """Ends a run as a signal would: no handler of the library catches it."""


class Kill(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


@pytest.mark.parametrize("accumulation", [1, 2])
def test_killed_and_resumed_run_equals_an_uninterrupted_one(make_trainer, accumulation):
    options = dict(
        save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=3, max_steps=9,
        gradient_accumulation_steps=accumulation, head_learning_rate=1e-2,
    )  # fmt: skip
    whole = make_trainer("whole", evaluators={"probe": Steepness()}, **options)
    whole.train()
    with pytest.raises(Killed):
        make_trainer("cut", evaluators={"probe": Steepness()}, callbacks=[Kill(5)], **options).train()
    resumed = make_trainer("cut", evaluators={"probe": Steepness()}, **options)
    fresh = weights(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 9
    assert not torch.equal(fresh["head.dense.weight"], weights(resumed)["head.dense.weight"])
    assert_equal_weights(weights(whole), weights(resumed))
    states = [t.optimizer.state_dict()["state"] for t in (whole, resumed)]
    for key in states[0]:
        assert torch.equal(states[0][key]["exp_avg_sq"], states[1][key]["exp_avg_sq"])


def test_every_checkpoint_is_a_sentence_transformer(make_trainer, sentences):
    trainer = make_trainer(save_strategy="steps", save_steps=3)
    trainer.train()
    folder = Path(trainer.args.output_dir) / "checkpoint-6"
    trainer.model.eval()
    tokens = trainer.processing_class(sentences[:8], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = trainer.model(tokens["input_ids"], tokens["attention_mask"]).embeddings
    found = SentenceTransformer(str(folder), device="cpu").encode(sentences[:8], convert_to_tensor=True)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert not list(Path(trainer.args.output_dir).glob(".*"))


@pytest.mark.parametrize(("greater", "best"), [(True, 4), (False, 6)])
def test_best_checkpoint_follows_the_stated_direction(make_trainer, greater, best):
    options = dict(save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    trainer = make_trainer(
        evaluators={"probe": Steepness([0.5, 0.9, 0.1])}, load_best_model_at_end=True,
        metric_for_best_model="probe_value", greater_is_better=greater, **options,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == best
    assert Path(trainer.state.best_model_checkpoint).name == f"checkpoint-{best}"
    from safetensors.torch import load_file

    saved = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    assert_equal_weights(saved, weights(trainer))


def test_best_metric_defaults_to_the_first_evaluators_own(make_trainer):
    trainer = make_trainer(
        evaluators={"probe": Steepness()}, load_best_model_at_end=True, save_strategy="steps", save_steps=2,
        eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    assert trainer.args.metric_for_best_model == "probe_value" and trainer.args.greater_is_better is False
    with pytest.raises(ValueError, match="no evaluator says which metric"):
        make_trainer(
            load_best_model_at_end=True,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
        )


def test_metric_without_direction_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'uniformity' was given without a direction"):
        arguments(tmp_path, metric_for_best_model="uniformity")


def test_evaluation_sees_the_live_weights_and_leaves_training_mode(make_trainer, sentences):
    scores = [1.0 - 0.1 * i for i in range(8)]
    official = EmbeddingSimilarityEvaluator(sentences[:8], sentences[8:16], scores, name="official")
    trainer = make_trainer(evaluators={"probe": Steepness(), "official": official})
    trainer.model.train()
    before = trainer.evaluate()
    assert trainer.model.training and trainer.model.roberta.encoder.training
    assert "eval_official_spearman_cosine" in before
    with torch.no_grad():
        trainer.model.roberta.encoder.layer[1].output.LayerNorm.weight.mul_(2)
    after = trainer.evaluate()
    assert after["eval_probe_value"] != pytest.approx(before["eval_probe_value"], rel=1e-2)
    assert trainer.state.log_history[-1]["eval_probe_value"] == after["eval_probe_value"]


class Poison(TrainerCallback):
    """Makes one weight NaN before step 4."""

    def __init__(self, name):
        self.name = name

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            with torch.no_grad():
                model.get_parameter(self.name).fill_(math.nan)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("head.dense.weight", r"The loss of step 4 became not finite \(nt_xent=nan"),
        ("roberta.encoder.layer.1.output.dense.weight", "The embeddings of step 4 became not finite"),
    ],
)
def test_values_that_are_not_finite_stop_with_step_and_rows(make_trainer, name, what):
    trainer = make_trainer(save_strategy="steps", save_steps=2, callbacks=[Poison(name)])
    with pytest.raises(FloatingPointError, match=what + r".*checkpoint-2, is whole.*Rows.*\[1\d\d, 1\d\d"):
        trainer.train()
    assert Path(find_checkpoint(trainer.args.output_dir, True)).name == "checkpoint-2"
    for other, value in trainer.model.named_parameters():
        assert torch.isfinite(value).all() or other == name


def test_weights_that_are_not_finite_replace_no_checkpoint(make_trainer):
    class PoisonAfterStep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 4:
                with torch.no_grad():
                    model.head.dense.weight[0, 0] = math.inf

    trainer = make_trainer(save_strategy="steps", save_steps=2, save_total_limit=1, callbacks=[PoisonAfterStep()])
    with pytest.raises(FloatingPointError, match="After step 4 the weight head.dense.weight is not finite"):
        trainer.train()
    assert [path.name for path in Path(trainer.args.output_dir).iterdir()] == ["checkpoint-2"]


def test_rotation_keeps_the_newest_checkpoint_not_the_highest_number(make_trainer):
    options = dict(save_strategy="steps", save_steps=2)
    trainer = make_trainer(**options)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    again = make_trainer(save_total_limit=2, callbacks=[Kill(5)], **options)
    with pytest.raises(Killed):
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert "checkpoint-4" in {path.name for path in folder.iterdir()}
    assert (folder / "checkpoint-4").stat().st_mtime > (folder / "checkpoint-6").stat().st_mtime


def test_checkpoint_that_was_being_replaced_is_put_back(make_trainer):
    """Killed between moving the old folder away and the new one in."""
    options = dict(save_strategy="steps", save_steps=2)
    whole = make_trainer(**options)
    whole.train()
    folder = Path(whole.args.output_dir)
    (folder / "checkpoint-6").rename(folder / ".replaced-checkpoint-6")
    (folder / ".saving-checkpoint-6").mkdir()
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=True)
    assert {path.name for path in folder.iterdir()} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert_equal_weights(weights(whole), weights(resumed))


def test_evaluating_does_not_disturb_training(make_trainer):
    plain = make_trainer("plain")
    plain.train()
    evaluated = make_trainer(
        "evaluated", evaluators={"probe": Steepness()}, eval_strategy="steps", eval_steps=1, save_strategy="steps"
    )
    evaluated.train()
    assert sum("eval_probe_value" in entry for entry in evaluated.state.log_history) == 6
    assert_equal_weights(weights(plain), weights(evaluated))


def test_full_disk_while_saving_keeps_the_last_checkpoint(make_trainer, monkeypatch):
    save, calls = torch.save, []

    def fail_later(value, path, *args, **kwargs):
        calls.append(path)
        if "checkpoint-4" in str(path) and "optimizer" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(value, path, *args, **kwargs)

    options = dict(save_strategy="steps", save_steps=2, save_total_limit=1)
    whole = make_trainer("whole", **options)
    whole.train()
    monkeypatch.setattr(torch, "save", fail_later)
    trainer = make_trainer("cut", **options)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    folder = Path(trainer.args.output_dir)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    assert find_checkpoint(folder, True) == str(folder / "checkpoint-2")
    monkeypatch.setattr(torch, "save", save)
    resumed = make_trainer("cut", **options)
    resumed.train(resume_from_checkpoint=True)
    assert_equal_weights(weights(whole), weights(resumed))
    assert [path.name for path in folder.iterdir()] == ["checkpoint-6"]


def test_resume_refuses_other_data_model_or_settings(make_trainer, dataset):
    options = dict(save_strategy="steps", save_steps=2)
    make_trainer(**options).train()
    for change, message in (
        (dict(data=dataset.select(range(40))), r"data: \{'texts': 64.*'texts': 40"),
        (dict(contrastive={"radius": 0.9}), "model: .*'radius': 0.1.*'radius': 0.9"),
        (dict(global_batch_size=16), "texts_per_batch: 8 then, 16 now"),
        (dict(global_batch_size=16, gradient_accumulation_steps=2), "gradient_accumulation_steps: 1 then, 2 now"),
        (dict(learning_rate=2e-3), r"learning_rates: \[0.001, None, 'linear'\] then, \[0.002"),
        (dict(bucket_size=0), "bucket_size: 32 then, 0 now"),
        (dict(bf16=True), "precision: fp32 then, bf16 now"),
        (dict(seed=4), r"seed: \[3, 3\] then, \[4, 4\] now"),
    ):
        trainer = make_trainer(**options | change)
        with pytest.raises(ValueError, match=message):
            trainer.train(resume_from_checkpoint=True)


def test_resume_from_nothing_is_an_error(make_trainer, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint-N folder"):
        make_trainer("empty").train(resume_from_checkpoint=True)
    with pytest.raises(FileNotFoundError, match="is no training checkpoint"):
        make_trainer("empty").train(resume_from_checkpoint=str(tmp_path))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", b"half", "model.safetensors is missing or damaged.*Name an earlier checkpoint-N"),
        ("optimizer.pt", b"half", "optimizer.pt is missing or damaged"),
        ("optimizer.pt", None, "has no optimizer.pt.*--save_only_model.*--model_name_or_path"),
        ("scheduler.pt", None, "scheduler.pt is missing or damaged"),
        ("rng_state.pth", b"", "rng_state.pth is missing or damaged"),
        ("trainer_state.json", b"", "trainer_state.json is missing or damaged"),
        ("csl_hf_run.json", b"[]", "csl_hf_run.json holds a list"),
        ("csl_hf_run.json", None, "was not written by a csl_hf training run.*--model_name_or_path"),
    ],
)
def test_damaged_checkpoint_is_refused_by_file(make_trainer, name, damage, message):
    options = dict(save_strategy="steps", save_steps=2, max_steps=2)
    trainer = make_trainer(**options)
    trainer.train()
    path = Path(trainer.args.output_dir) / "checkpoint-2" / name
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(ValueError, match=message):
        make_trainer(**options).train(resume_from_checkpoint=True)


def test_best_checkpoint_is_found_where_the_folder_was_moved_to(make_trainer):
    options = dict(
        save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="probe_value", greater_is_better=True,
    )  # fmt: skip
    first = make_trainer("first", evaluators={"probe": Steepness([0.9, 0.1, 0.2])}, **options)
    first.train()
    Path(first.args.output_dir).rename(Path(first.args.output_dir).with_name("moved"))
    moved = make_trainer("moved", evaluators={"probe": Steepness([0.3])}, **options)
    moved.train(resume_from_checkpoint=True)
    assert moved.loaded_step() == 2
    assert_equal_weights(weights(first), weights(moved))


def test_backbone_without_dropout_is_refused_with_a_remedy(make_trainer):
    model = tiny_model()
    set_dropout(model.config, 0.0)
    silent = type(model)(model.config)
    with pytest.raises(ValueError, match=r"drops nothing in training.*hidden_dropout_prob': 0\.0.*--dropout 0.1"):
        make_trainer(model=silent)
    state = torch.get_rng_state()
    check_dropout(tiny_model())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("batch", "neighbors", "message"),
    [(4, 4, "num_neighbors=4 needs at least 5; .* lower --num_neighbors to 3"), (1, 4, "at least 2")],
)
def test_batch_too_small_is_refused(make_trainer, batch, neighbors, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(global_batch_size=batch, contrastive={"num_neighbors": neighbors})


def test_several_gpus_in_one_process_are_refused(make_trainer, monkeypatch):
    monkeypatch.setattr(ContrastiveTrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match="2 GPUs.*accelerate launch --num_processes 2"):
        make_trainer()


def test_last_small_batch_uses_the_neighbors_it_has(make_trainer, dataset):
    trainer = make_trainer(data=dataset.select(range(11)), max_steps=-1, num_train_epochs=1)  # batches of 8 and 3
    before = weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 2
    assert not torch.equal(before["head.dense.weight"], trainer.model.head.dense.weight)


def test_equal_texts_in_a_batch_do_not_repel_each_other(make_trainer, dataset, monkeypatch):
    """Every text twice. Without the mask an anchor of this nearly collapsed model has 30 negatives instead of 28,
    and two of them are as similar as the positive: at least ln(31 / 29) = 0.067 more."""
    twice = dataset.select([i // 2 for i in range(16)])
    trainer = make_trainer(data=twice, global_batch_size=16, max_steps=1, logging_steps=1)
    trainer.train()
    masked = trainer.state.log_history[0]["loss/nt_xent"]
    distinct = twice.remove_columns("text_id").add_column("text_id", list(range(16)))
    trainer = make_trainer(data=distinct, global_batch_size=16, max_steps=1, logging_steps=1)
    trainer.train()
    assert masked < trainer.state.log_history[0]["loss/nt_xent"] - 0.05


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_checkpointing": True}])
def test_mixed_precision_and_activation_checkpointing_train(make_trainer, options):
    losses = []
    for settings in ({}, options):
        trainer = make_trainer(max_steps=4, logging_steps=1, **settings)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=0.3)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    if "bf16" in options:
        assert losses[0] != losses[1]
    else:
        assert losses[0] == losses[1] and trainer.model.is_gradient_checkpointing


def test_trainer_says_what_it_lacks(make_trainer, tmp_path):
    with pytest.raises(ValueError, match="processing_class is missing"):
        ContrastiveTrainer(tiny_model(), arguments(tmp_path))
    with pytest.raises(ValueError, match="takes no eval_dataset"):
        make_trainer().evaluate(eval_dataset=[1])
