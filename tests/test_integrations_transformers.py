"""The Trainer callback: tiny models from configs, trained on real sentences and real images."""

from __future__ import annotations

import copy
import json
import tarfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

from doublehead import Annealing, DoubleHead, HeadBank, HeadSpec, Predictions, metrics, refit
from doublehead.data.fashion import fashion_subset
from doublehead.data.trees import parse_tree
from doublehead.integrations.transformers import DoubleHeadTrainerCallback, attached_to, load_calibrated
from doublehead.optional import require

hf = require("transformers", extra="transformers")
SIZES = {"train": 160, "calib": 64, "test": 96}


@pytest.fixture(scope="module")
def sentences(shared: Path) -> dict[str, list[tuple[str, int]]]:
    """Sentences of the Stanford Sentiment Treebank that are clearly positive or negative."""
    found: dict[str, list[tuple[str, int]]] = {}
    with tarfile.open(shared / "data/sst/trees.tar.xz") as archive:
        for name, file in (("train", "train.txt"), ("calib", "dev.txt"), ("test", "test.txt")):
            member = archive.extractfile(file)
            assert member is not None
            trees = (parse_tree(member.readline().decode()) for _ in range(2 * SIZES[name]))
            some = [(tree.text.lower(), int(tree.labels[-1] > 2)) for tree in trees if tree.labels[-1] != 2]
            found[name] = some[: SIZES[name]]
    return found


@pytest.fixture(scope="module")
def tokenizer(sentences: dict[str, list[tuple[str, int]]]) -> Any:
    """Words between spaces, made on the fly."""
    tokenizers = require("tokenizers", extra="transformers")
    counts = Counter(word for text, _ in sentences["train"] for word in text.split())
    words = ["[PAD]", "[UNK]", *(word for word, _ in counts.most_common(500))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )


@pytest.fixture(scope="module")
def texts(sentences: dict[str, list[tuple[str, int]]], tokenizer: Any) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [{**tokenizer(text, truncation=True, max_length=32), "label": label} for text, label in part]
        for name, part in sentences.items()
    }


def tiny_bert() -> Any:
    torch.manual_seed(3)
    config = hf.BertConfig(
        vocab_size=502, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, num_labels=2, attn_implementation="eager",
    )  # fmt: skip
    return hf.BertForSequenceClassification(config)


def make_trainer(model: Any, data: Any, folder: Path, tokenizer: Any, *callbacks: Any, **options: Any) -> Any:
    defaults = {"num_train_epochs": 2, "save_strategy": "no", "learning_rate": 1e-3, "report_to": []}
    args = hf.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=16, per_device_eval_batch_size=32, logging_steps=1000,
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, **{**defaults, **options},
    )  # fmt: skip
    collator = hf.DataCollatorWithPadding(tokenizer) if tokenizer else None
    return hf.Trainer(
        model,
        args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=collator,
        callbacks=[*callbacks],
    )


def train(*args: Any, checkpoint: Any = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(*args, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def main_state(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: value for name, value in model.state_dict().items() if not name.startswith("calibration_head.")
    }


@pytest.mark.parametrize("how", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}])
def test_the_rest_of_the_model_is_bit_identical(
    texts: Any, tokenizer: Any, tmp_path: Path, how: dict[str, Any]
) -> None:
    alone = train(tiny_bert(), texts, tmp_path, tokenizer, **how)
    callback = DoubleHeadTrainerCallback(texts["calib"], every=2)
    beside = train(tiny_bert(), texts, tmp_path, tokenizer, callback, **how)
    mine, theirs = main_state(beside.model), main_state(alone.model)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(value, mine[name]), name
    assert callback.alternation is not None
    assert callback.alternation.calls == 20 // how.get("gradient_accumulation_steps", 1)
    fresh = DoubleHead(tiny_bert()).head
    assert any(not torch.equal(a, b) for a, b in zip(callback.model.head.parameters(), fresh.parameters()))
    assert all(p.grad is None for p in callback.model.head.parameters())


def test_beta_and_lr_follow_the_trainer(texts: Any, tokenizer: Any, tmp_path: Path) -> None:
    seen = []

    class Spy(DoubleHeadTrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_step_end(*args, **kwargs)
            assert self.alternation is not None
            seen.append((self.alternation.beta, self.alternation.optimizer.param_groups[0]["lr"]))

    callback = Spy(texts["calib"], every=1, annealing=Annealing(1.2), lr=0.2)
    train(tiny_bert(), texts, tmp_path, tokenizer, callback, num_train_epochs=1)
    assert [beta for beta, _ in seen] == pytest.approx([1 + 0.2 * (1 - step / 10) for step in range(1, 11)])
    assert [lr for _, lr in seen] == pytest.approx(
        [0.2 * (1 - step / 10) for step in range(1, 11)]
    )  # linear decay
    seen.clear()
    train(tiny_bert(), texts, tmp_path, tokenizer, Spy(texts["calib"], every=1), num_train_epochs=1)
    assert [beta for beta, _ in seen] == [1.0] * 10
    assert [lr for _, lr in seen] == pytest.approx([0.03 * (1 - step / 10) for step in range(1, 11)])


def test_evaluate_predict_and_pipeline_are_calibrated(
    texts: Any, sentences: Any, tokenizer: Any, tmp_path: Path
) -> None:
    callback = DoubleHeadTrainerCallback(texts["calib"], every=1)
    trainer = train(tiny_bert(), texts, tmp_path, tokenizer, callback)
    batch = dict(trainer.data_collator(texts["test"]))
    labels = batch.pop("labels")
    model = callback.model.eval()
    with torch.no_grad():
        main, calib = model.heads(**batch)
    assert not torch.allclose(main, calib)
    numbers = trainer.evaluate()
    for name, logits in (("main", main), ("calib", calib)):
        p = Predictions(logits, labels)
        assert numbers[f"eval_ece_{name}"] == pytest.approx(metrics.ece(p), abs=1e-4)
        assert numbers[f"eval_nll_{name}"] == pytest.approx(metrics.nll(p), abs=1e-5)
        assert numbers[f"eval_accuracy_{name}"] == pytest.approx(metrics.accuracy(p))
    assert numbers["eval_loss"] == pytest.approx(float(F.cross_entropy(main, labels)), abs=1e-5)
    assert trainer.state.log_history[-1]["eval_ece_calib"] == numbers["eval_ece_calib"]
    torch.testing.assert_close(
        torch.from_numpy(trainer.predict(texts["test"]).predictions), calib, atol=1e-5, rtol=1e-4
    )
    ask = hf.pipeline(
        "text-classification", model=trainer.model, tokenizer=tokenizer, device="cpu", top_k=None
    )
    answers = ask([text for text, _ in sentences["test"][:3]], truncation=True, max_length=32)
    for answer, probs in zip(answers, calib.softmax(1)):
        scores = {one["label"]: one["score"] for one in answer}
        assert [scores["LABEL_0"], scores["LABEL_1"]] == pytest.approx(probs.tolist(), abs=1e-5)


def test_the_saved_model_reloads_with_its_head(texts: Any, tokenizer: Any, tmp_path: Path) -> None:
    wrap = partial(DoubleHead, reads=("statistics", "features"))
    callback = DoubleHeadTrainerCallback(texts["calib"], every=1, wrap=wrap)
    trainer = train(tiny_bert(), texts, tmp_path, tokenizer, callback)
    trainer.save_model(tmp_path / "saved")
    batch = dict(trainer.data_collator(texts["test"][:8]))
    labels = batch.pop("labels")
    assert json.loads((tmp_path / "saved/config.json").read_text())["doublehead"]["layer"] == "classifier"
    again = load_calibrated(tmp_path / "saved")
    assert isinstance(again, hf.BertForSequenceClassification)
    with torch.no_grad():
        want = trainer.model.eval()(**batch).logits
        got = again(**batch)
        torch.testing.assert_close(got.logits, want)
        plain = (
            hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()(**batch).logits
        )
    torch.testing.assert_close(plain, callback.model.heads(**batch).main.detach())
    assert not torch.allclose(plain, want)
    attachment = attached_to(again)
    assert attachment is not None
    with attachment.resting(), torch.no_grad():
        torch.testing.assert_close(again(**batch, labels=labels).logits, plain)
    again.save_pretrained(tmp_path / "twice", max_shard_size="20KB")  # in shards
    assert (tmp_path / "twice/model.safetensors.index.json").exists()
    with torch.no_grad():
        torch.testing.assert_close(load_calibrated(tmp_path / "twice")(**batch).logits, want)
    tiny_bert().save_pretrained(tmp_path / "plain")
    with pytest.raises(
        ValueError, match="config.json must have an entry 'doublehead': this model was saved without"
    ):
        load_calibrated(tmp_path / "plain")


def test_the_head_is_fitted_anew_to_the_best_model_and_saved_with_it(
    texts: Any, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "transformers.doublehead")
    hf.logging.enable_propagation()
    best = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5,
            "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
            "log_level": "info"}  # fmt: skip
    callback = DoubleHeadTrainerCallback(texts["calib"], every=1, seed=3)
    trainer = train(tiny_bert(), texts, tmp_path, tokenizer, callback, **best)
    hf.logging.set_verbosity_warning()
    hf.logging.disable_propagation()
    assert callback.choice is not None
    assert f"calibration head: {callback.choice.in_words()}" in caplog.text
    checkpoint = Path(trainer.state.best_model_checkpoint)
    assert checkpoint.name == "checkpoint-5"  # the worst, so not the last
    same = {"attn_implementation": "eager"}  # which a config does not keep
    model = load_calibrated(checkpoint, **same)
    for name, value in main_state(trainer.model).items():
        assert torch.equal(value, main_state(model)[name]), name
    attachment = attached_to(model)
    assert attachment is not None
    double = attachment.double  # its head is that of mid-training
    loader = DataLoader(texts["calib"], 16, shuffle=True, collate_fn=trainer.data_collator)
    assert refit(double, loader, seed=3) == callback.choice
    for name, value in double.head.state_dict().items():
        assert torch.equal(value, callback.model.head.state_dict()[name]), name
    trainer.save_model(tmp_path / "saved")
    batch = dict(trainer.data_collator(texts["test"]))
    del batch["labels"]
    again = load_calibrated(tmp_path / "saved", **same)
    with torch.no_grad():
        want = trainer.model.eval()(**batch).logits
        assert torch.equal(again(**batch).logits, want)
        assert not torch.allclose(
            load_calibrated(checkpoint)(**batch).logits, want
        )  # its head is of mid-training


def test_another_wrap_or_augment_leaves_the_head_as_training_left_it(
    texts: Any, tokenizer: Any, tmp_path: Path
) -> None:
    class Notes(DoubleHeadTrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.before = {name: value.clone() for name, value in self.model.head.state_dict().items()}
            super().on_train_end(*args, **kwargs)

    paper = partial(DoubleHead, kind="mlp")
    for options in ({"augment": lambda inputs: inputs}, {"wrap": DoubleHead}, {"wrap": paper}):
        callback = Notes(texts["calib"], every=1, **options)
        trainer = train(tiny_bert(), texts, tmp_path, tokenizer, callback, num_train_epochs=1)
        assert callback.choice is None
        for name, value in callback.model.head.state_dict().items():
            assert torch.equal(value, callback.before[name]), name
    trainer.save_model(tmp_path / "saved")  # the paper's head, to be trained on
    callback = Notes(texts["calib"], every=1)
    train(load_calibrated(tmp_path / "saved"), texts, tmp_path, tokenizer, callback, num_train_epochs=1)
    assert callback.choice is None
    assert callback.model.head.kind == "mlp"


def test_a_classifier_without_a_last_layer(tmp_path: Path) -> None:
    """The default head reads logits alone, and the config states how many there are."""

    class Odd(hf.BertPreTrainedModel):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scores = nn.Embedding(50, config.num_labels)

        def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
            logits = self.scores(input_ids).mean(1)
            loss = None if labels is None else F.cross_entropy(logits, labels)
            return require("transformers.modeling_outputs", extra="transformers").SequenceClassifierOutput(
                loss, logits
            )

    rows = [{"input_ids": torch.randint(50, (6,)), "labels": i % 3} for i in range(96)]
    data = {"train": rows[:32], "test": rows[:32]}
    callback = DoubleHeadTrainerCallback(rows[32:], every=1)
    trainer = train(Odd(hf.BertConfig(num_labels=3)), data, tmp_path, None, callback, num_train_epochs=1)
    assert callback.choice is not None
    assert callback.choice.n == 64
    assert trainer.evaluate()["eval_nll_calib"] < 2


def test_resume_is_exact(texts: Any, tokenizer: Any, tmp_path: Path) -> None:
    def callback() -> DoubleHeadTrainerCallback:
        return DoubleHeadTrainerCallback(texts["calib"], every=3)

    first, second = callback(), callback()
    steps = {"save_strategy": "steps", "save_steps": 10}
    whole = train(tiny_bert(), texts, tmp_path, tokenizer, first, **steps)
    torch.manual_seed(99)
    resumed = train(
        tiny_bert(), texts, tmp_path, tokenizer, second, checkpoint=str(tmp_path / "checkpoint-10"), **steps
    )
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert first.alternation is not None
    assert second.alternation is not None
    assert second.alternation.calls == 20
    file = tmp_path / "checkpoint-10/doublehead.pt"
    state = torch.load(file, weights_only=True)
    assert (
        state["alternation"].pop("lr_scale") == first.alternation.rate.scale == second.alternation.rate.scale
    )
    del state["alternation"]["peak_lr"]
    torch.save({**state, "lr_scale": 7.0}, file)  # where it was kept before
    third = callback()
    train(tiny_bert(), texts, tmp_path, tokenizer, third, checkpoint=str(file.parent), **steps)
    assert third.alternation is not None
    assert third.alternation.rate.scale == 7.0
    (tmp_path / "checkpoint-10/doublehead.pt").unlink()
    trainer = make_trainer(tiny_bert(), texts, tmp_path, tokenizer, callback(), **steps)
    with pytest.warns(
        UserWarning, match="the calibration head goes on with its saved weights and a fresh optimizer"
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))


def test_images(tmp_path: Path) -> None:
    parts = fashion_subset().first(96, 64, 64)
    data = {
        name: [
            {"pixel_values": torch.from_numpy(image).permute(2, 0, 1).float() / 255, "labels": int(label)}
            for image, label in zip(samples.images, samples.labels)
        ]
        for name, samples in (("train", parts.train), ("calib", parts.calib), ("test", parts.test))
    }
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28, patch_size=7,
        num_channels=1, num_labels=10,
    )  # fmt: skip
    specs = [HeadSpec(beta0=beta0, lr=0.1) for beta0 in (1.0, 1.2)]
    wrap = partial(DoubleHead, head=partial(HeadBank, specs=specs))
    callback = DoubleHeadTrainerCallback(DataLoader(data["calib"], 32), every=1, wrap=wrap)
    trainer = train(hf.ViTForImageClassification(config), data, tmp_path, None, callback)
    assert trainer.evaluate()["eval_ece_calib"] >= 0
    trainer.save_model(tmp_path / "saved")
    pixels = torch.stack([one["pixel_values"] for one in data["test"][:5]])
    want = trainer.model.eval()(pixel_values=pixels).logits
    torch.testing.assert_close(load_calibrated(tmp_path / "saved")(pixel_values=pixels).logits, want)


def test_bad_use_is_named(texts: Any, tokenizer: Any, tmp_path: Path) -> None:
    same = texts["train"]
    data = {**texts, "train": same}
    with pytest.raises(ValueError, match="calibration data must not be training data: at least 160 of 160"):
        train(tiny_bert(), data, tmp_path, tokenizer, DoubleHeadTrainerCallback(same))
    with pytest.raises(ValueError, match="calibration data must not be training data"):
        train(tiny_bert(), data, tmp_path, tokenizer, DoubleHeadTrainerCallback(Subset(same, range(5))))
    with pytest.raises(RuntimeError, match="has no model yet: give it to a Trainer first"):
        DoubleHeadTrainerCallback(same).model  # noqa: B018

    class Own(nn.Module):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return features

    wrap = partial(DoubleHead, head=lambda n_features, n_classes: Own())
    with pytest.raises(
        TypeError, match="only a CalibrationHead or a HeadBank can be described in a file, got Own"
    ):
        make_trainer(
            tiny_bert(), texts, tmp_path, tokenizer, DoubleHeadTrainerCallback(texts["calib"], wrap=wrap)
        )
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be a classifier of transformers .* got Sequential"):
        make_trainer(net, texts, tmp_path, tokenizer, DoubleHeadTrainerCallback(texts["calib"]))


def test_a_model_that_brings_a_head_along(texts: Any, tokenizer: Any, tmp_path: Path) -> None:
    paper = partial(DoubleHead, kind="mlp", n_classes=2)
    first = train(
        tiny_bert(), texts, tmp_path, tokenizer, DoubleHeadTrainerCallback(texts["calib"], wrap=paper)
    )
    first.save_model(tmp_path / "saved")
    model = load_calibrated(tmp_path / "saved")
    again = DoubleHeadTrainerCallback(texts["calib"], every=2, wrap=paper)
    train(model, texts, tmp_path, tokenizer, again, num_train_epochs=1)
    assert again.model.head is model.calibration_head
    make_trainer(model, texts, tmp_path, tokenizer, DoubleHeadTrainerCallback(texts["calib"]))
    another = DoubleHeadTrainerCallback(texts["calib"], wrap=partial(DoubleHead, n_classes=2))
    with pytest.raises(
        ValueError, match="wrap must make the head that the model has brought along, .*'mlp'.*, got .*'temp"
    ):
        make_trainer(model, texts, tmp_path, tokenizer, another)
    assert "calibration_head.last.weight" in model.state_dict()


def test_a_copied_model_keeps_its_head(texts: Any, tokenizer: Any, tmp_path: Path) -> None:
    """While the Trainer that made it holds an open loader, which cannot be copied."""
    callback = DoubleHeadTrainerCallback(texts["calib"], every=3)
    model = train(tiny_bert(), texts, tmp_path, tokenizer, callback).model.eval()
    again, ids = copy.deepcopy(model), torch.arange(20).view(2, 10)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert attached_to(again).double.model is again
    assert attached_to(again).double.head is again.calibration_head
