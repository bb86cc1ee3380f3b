"""The Trainer callback: tiny models from configs, trained on real sentences and real images."""

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

from doublehead import PAPER, DoubleHead, HeadSpec, Predictions, calibrate, load, metrics
from doublehead.calibration_data import fold_of, unpack
from doublehead.data.trees import parse_tree
from doublehead.integrations import transformers as integration
from doublehead.integrations.transformers import DoubleHeadTrainerCallback, attach, load_calibrated
from doublehead.system import require
from samples import refused
from tiny_networks import assert_same

hf = require("transformers", extra="transformers")
pytestmark = pytest.mark.usefixtures("few_fits")
SIZES = {"train": 160, "calib": 320, "test": 96}
Sentences = dict[str, list[tuple[str, int]]]


@pytest.fixture(scope="module")
def sentences(treebank: Path) -> Sentences:
    """Sentences that are clearly positive or negative."""
    found: Sentences = {}
    for name, file in (("train", "train.txt"), ("calib", "dev.txt"), ("test", "test.txt")):
        lines = (treebank / file).read_text(encoding="utf-8").splitlines()[: 2 * SIZES[name]]
        trees = map(parse_tree, lines)
        some = [(tree.text.lower(), int(tree.labels[-1] > 2)) for tree in trees if tree.labels[-1] != 2]
        found[name] = some[: SIZES[name]]
    return found


@pytest.fixture(scope="module")
def tokenizer(sentences: Sentences) -> Any:
    """Words between spaces, made on the fly."""
    tokenizers = require("tokenizers", extra="transformers")
    counts = Counter(word for text, _ in sentences["train"] for word in text.split())
    words = ["[PAD]", "[UNK]", *(word for word, _ in counts.most_common(500))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 32}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.fixture(scope="module")
def texts(sentences: Sentences, tokenizer: Any) -> dict[str, list[dict[str, Any]]]:
    def row(text: str, label: int) -> dict[str, Any]:
        return {**tokenizer(text, truncation=True, max_length=32), "label": label}

    return {name: [row(*pair) for pair in part] for name, part in sentences.items()}


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
    sets = {"train_dataset": data["train"], "eval_dataset": data["test"]}
    return hf.Trainer(model, args, **sets, data_collator=collator, callbacks=[*callbacks])


@pytest.fixture
def train(texts: Any, tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    """Train a model on the sentences, in a folder of this test; its Trainer."""

    def train(model: Any, *callbacks: Any, folder: str = "", data: Any = texts, **options: Any) -> Any:
        checkpoint = options.pop("checkpoint", None)
        trainer = make_trainer(model, data, tmp_path / folder, tokenizer, *callbacks, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    return train


def own_state(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights without its calibration."""
    state = model.state_dict()
    return {name: value for name, value in state.items() if not name.startswith("calibration_head.")}


@pytest.fixture(scope="module")
def trained(texts: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A Trainer that has trained and its callback, for tests that leave the model as it is."""
    callback = DoubleHeadTrainerCallback(texts["calib"], every=1)
    trainer = make_trainer(tiny_bert(), texts, tmp_path_factory.mktemp("trained"), tokenizer, callback)
    trainer.train()
    return trainer, callback


@pytest.fixture(scope="module")
def test_batch(texts: Any, tokenizer: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """All test samples: inputs and labels."""
    batch = dict(hf.DataCollatorWithPadding(tokenizer)(texts["test"]))
    return batch, batch.pop("labels")


def logits(model: Any, inputs: Any) -> Any:
    with torch.no_grad():
        return model.eval()(**inputs).logits


def assert_numbers(numbers: Any, heads: Any, labels: torch.Tensor) -> None:
    """That `evaluate` reported what both heads say."""
    for name, values in zip(("main", "calib"), heads):
        p = Predictions(values, labels)
        assert numbers[f"eval_ece_{name}"] == pytest.approx(metrics.ece(p), abs=1e-4)
        assert numbers[f"eval_nll_{name}"] == pytest.approx(metrics.nll(p), abs=1e-5)
        assert numbers[f"eval_accuracy_{name}"] == pytest.approx(metrics.accuracy(p))


@pytest.mark.parametrize("how", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}])
def test_the_model_is_bit_identical_and_untouched(texts: Any, train: Any, tmp_path: Path, how: Any) -> None:
    often = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 3, **how}
    often["num_train_epochs"] = 1
    alone = train(tiny_bert(), folder="alone", **often)
    callback = DoubleHeadTrainerCallback(texts["calib"], every=2)
    beside = train(tiny_bert(), callback, folder="beside", **often)
    assert_same(own_state(beside.model), alone.model.state_dict())
    one, other = (tmp_path / name / "checkpoint-5" for name in ("alone", "beside"))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (one / "config.json").read_text() == (other / "config.json").read_text()
    losses = [[entry.get("eval_loss") for entry in run.state.log_history] for run in (alone, beside)]
    assert losses[0] == losses[1]
    double = callback.double
    assert double.calls == 10 // how.get("gradient_accumulation_steps", 1)
    assert double.skipped == 0
    fresh = DoubleHead(tiny_bert(), double.calib_data)
    trained, initial = (one.bank.state_dict()["stacks.0.last_bias"] for one in (double, fresh))
    assert not torch.equal(trained, initial)


def test_beta_and_lr_follow_the_trainer(texts: Any, train: Any) -> None:
    seen = []

    class Spy(DoubleHeadTrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_step_end(*args, **kwargs)
            training = self.double.training
            seen.append((float(training.beta), training.schedule.now()))

    train(tiny_bert(), Spy(texts["calib"], every=1, heads=PAPER), num_train_epochs=1)
    left = [1 - step / 10 for step in range(1, 11)]
    assert [beta for beta, _ in seen] == pytest.approx([1 + 0.2 * share for share in left])
    assert [lr for _, lr in seen] == pytest.approx(left)  # linear decay


def test_evaluate_while_training_reports_both_heads(texts: Any, train: Any, test_batch: Any) -> None:
    inputs, labels = test_batch
    seen = []

    class Spy(DoubleHeadTrainerCallback):
        def on_evaluate(self, *args: Any, model: Any, metrics: Any, **kwargs: Any) -> None:
            super().on_evaluate(*args, model=model, metrics=metrics, **kwargs)
            with torch.no_grad():
                answer = self.double.reader.run((), inputs)
                calib = self.double.answer(answer.logits, answer.features)
            assert not torch.allclose(answer.logits.softmax(1), calib.softmax(1))
            assert torch.equal(logits(model, inputs), answer.logits)
            assert_numbers(metrics, (answer.logits, calib), labels)
            seen.append(metrics)

    how = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    how |= {"metric_for_best_model": "eval_nll_calib", "greater_is_better": False}
    trainer = train(tiny_bert(), Spy(texts["calib"], every=1), **how)
    assert len(seen) == 2
    assert trainer.state.best_metric == min(numbers["eval_nll_calib"] for numbers in seen)


def test_after_training_evaluate_predict_and_pipeline_are_calibrated(
    texts: Any, sentences: Any, tokenizer: Any, trained: Any, test_batch: Any
) -> None:
    (trainer, callback), (inputs, labels) = trained, test_batch
    with torch.no_grad():
        main, calib = callback.model.heads(**inputs)
    assert not torch.allclose(main, calib)
    numbers = trainer.evaluate()
    assert_numbers(numbers, (main, calib), labels)
    assert numbers["eval_loss"] == pytest.approx(float(F.cross_entropy(main, labels)), abs=1e-5)
    assert trainer.state.log_history[-1]["eval_ece_calib"] == numbers["eval_ece_calib"]
    predicted = torch.from_numpy(trainer.predict(texts["test"]).predictions)
    torch.testing.assert_close(predicted, calib, atol=1e-5, rtol=1e-4)
    how = {"tokenizer": tokenizer, "device": "cpu", "top_k": None}
    ask = hf.pipeline("text-classification", model=trainer.model, **how)
    answers = ask([text for text, _ in sentences["test"][:3]], truncation=True, max_length=32)
    for answer, probs in zip(answers, calib.exp()):
        scores = {one["label"]: one["score"] for one in answer}
        assert [scores["LABEL_0"], scores["LABEL_1"]] == pytest.approx(probs.tolist(), abs=1e-5)


@pytest.mark.parametrize("paper", [False, True])
def test_the_saved_model_reloads_with_its_calibration(
    texts: Any, train: Any, tmp_path: Path, trained: Any, test_batch: Any, paper: bool
) -> None:
    trainer, callback = trained
    if paper:
        callback = DoubleHeadTrainerCallback(texts["calib"], every=1, heads=PAPER)
        trainer = train(tiny_bert(), callback, num_train_epochs=1)
        assert callback.model.opinion is None
        assert_same(callback.model.head.state_dict(), callback.double.bank.take(0).state_dict())
    trainer.save_model(tmp_path / "saved")
    inputs, _ = test_batch
    want = logits(trainer.model, inputs)
    torch.testing.assert_close(want.exp().sum(1), torch.ones(len(want)))
    assert json.loads((tmp_path / "saved/config.json").read_text())["doublehead"]["layer"] == "classifier"
    again = load_calibrated(tmp_path / "saved")
    assert type(again) is hf.BertForSequenceClassification
    assert_same(again.state_dict(), trainer.model.state_dict())
    assert not any(p.requires_grad for p in again.calibration_head.parameters())
    torch.testing.assert_close(logits(again, inputs), want)
    plain = logits(hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved"), inputs)
    assert not torch.allclose(plain.log_softmax(1), want)
    attachment = integration.attached_to(again)
    with attachment.resting():
        torch.testing.assert_close(logits(again, inputs), plain)
    again.save_pretrained(tmp_path / "twice", max_shard_size="20KB")
    assert (tmp_path / "twice/model.safetensors.index.json").exists()  # in shards
    torch.testing.assert_close(logits(load_calibrated(tmp_path / "twice"), inputs), want)
    callback.model.save(tmp_path / "whole")  # the other format: network and calibration as one module
    torch.testing.assert_close(logits(load(tmp_path / "whole", tiny_bert()), inputs), want)


def test_an_attached_calibration_can_be_detached(texts: Any, tokenizer: Any, test_batch: Any) -> None:
    """Of a model that was trained already, without the callback; it stays in float32."""
    inputs, _ = test_batch
    model, plain = tiny_bert().eval(), tiny_bert()
    loader = DataLoader(texts["calib"], 16, collate_fn=hf.DataCollatorWithPadding(tokenizer))
    calibrated = calibrate(model, loader)
    attach(model, calibrated)
    want = logits(calibrated, inputs)
    torch.testing.assert_close(logits(model, inputs), want)
    assert not torch.allclose(logits(plain, inputs).log_softmax(1), want)
    model.bfloat16()
    kept = model.calibration_head.state_dict().values()
    assert {value.dtype for value in kept if value.is_floating_point()} == {torch.float32}
    assert logits(model, inputs).dtype == torch.float32
    integration.detach(model.float())
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model.config.to_dict() == plain.config.to_dict()
    assert logits(model, inputs).exp().sum() != pytest.approx(len(want))


def test_the_best_model_is_calibrated_with_the_heads_of_the_whole_training(
    texts: Any, train: Any, tmp_path: Path, test_batch: Any, caplog: Any, request: Any
) -> None:
    caplog.set_level("INFO", "transformers.doublehead")
    hf.logging.enable_propagation()
    request.addfinalizer(hf.logging.disable_propagation)
    request.addfinalizer(hf.logging.set_verbosity_warning)
    best = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5,
            "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
            "log_level": "info"}  # fmt: skip
    callback = DoubleHeadTrainerCallback(texts["calib"], every=1)
    trainer = train(tiny_bert(), callback, **best)
    assert f"calibration: {callback.choice}" in caplog.text
    checkpoint = Path(trainer.state.best_model_checkpoint)
    assert checkpoint.name == "checkpoint-5"  # the worst, so not the last
    same = {"attn_implementation": "eager"}  # which a config does not keep
    model = hf.BertForSequenceClassification.from_pretrained(checkpoint, **same)
    assert_same(own_state(trainer.model), model.state_dict())
    double = callback.double
    expected = calibrate(model, double.calib_data, beside=double)
    assert expected.head.choice == callback.model.head.choice
    assert_same(expected.head.state_dict(), callback.model.head.state_dict())
    trainer.save_model(tmp_path / "saved")
    inputs, _ = test_batch
    again = load_calibrated(tmp_path / "saved", **same)
    assert torch.equal(logits(again, inputs), logits(trainer.model, inputs))
    with pytest.raises(ValueError, match="must hold a model that was saved with its calibration"):
        load_calibrated(checkpoint)  # a checkpoint is from the middle of training


def test_a_classifier_of_ones_own_without_a_last_layer(tmp_path: Path) -> None:
    """There are no features; a head that reads the logits alone is trained, and its state has empty tensors."""

    class Odd(hf.BertPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scores = nn.Embedding(50, config.num_labels)
            self.post_init()

        def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
            logits = self.scores(input_ids).mean(1)
            loss = None if labels is None else F.cross_entropy(logits, labels)
            return hf.modeling_outputs.SequenceClassifierOutput(loss, logits)

    rows = [{"input_ids": torch.randint(50, (6,)), "labels": i % 3} for i in range(232)]
    data = {"train": rows[:32], "test": rows[:32]}
    callback = DoubleHeadTrainerCallback(rows[32:], every=1, heads=HeadSpec(kind="temperature"))
    model, loader = Odd(hf.BertConfig(num_labels=3)), DataLoader(rows[32:], 16)
    trainer = make_trainer(model, data, tmp_path, None, callback, num_train_epochs=1)
    trainer.train()
    assert trainer.evaluate()["eval_nll_calib"] < 2
    scaled = calibrate(model, loader, method="temperature")
    for calibrated in (callback.model, calibrate(model, loader), scaled):
        attach(model, calibrated)
        model.save_pretrained(tmp_path / "saved")
        inputs = {"input_ids": torch.stack([row["input_ids"] for row in rows])}
        again = load_calibrated(tmp_path / "saved", Odd)
        torch.testing.assert_close(logits(again, inputs), logits(model, inputs))


def test_resume_is_exact(texts: Any, train: Any, tmp_path: Path) -> None:
    def callback() -> DoubleHeadTrainerCallback:
        return DoubleHeadTrainerCallback(texts["calib"], every=3)

    first, second = callback(), callback()
    steps = {"save_strategy": "steps", "save_steps": 10}
    whole = train(tiny_bert(), first, **steps)
    torch.manual_seed(99)
    middle = tmp_path / "checkpoint-10"
    resumed = train(tiny_bert(), second, checkpoint=str(middle), **steps)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    assert second.double.calls == 20
    assert_same(first.double.bank.state_dict(), second.double.bank.state_dict())
    (middle / "doublehead.pt").unlink()
    with pytest.warns(UserWarning, match="is not there: the calibration heads start from scratch"):
        train(tiny_bert(), callback(), checkpoint=str(middle), **steps)


def test_training_again_starts_without_the_old_calibration(
    texts: Any, tokenizer: Any, tmp_path: Path, trained: Any, test_batch: Any
) -> None:
    inputs, labels = test_batch
    trained[0].save_model(tmp_path / "saved")
    plain = hf.BertForSequenceClassification.from_pretrained(tmp_path / "saved")  # its config has the entry
    results = []
    for number, model in enumerate((load_calibrated(tmp_path / "saved"), plain)):
        callback = DoubleHeadTrainerCallback(texts["calib"], every=2)
        how = {"save_strategy": "epoch", "num_train_epochs": 1}
        trainer = make_trainer(model, texts, tmp_path / str(number), tokenizer, callback, **how)
        before = trainer.evaluate()
        if number == 0:  # the calibration that it came with
            nll = float(F.nll_loss(logits(model, inputs), labels))
            assert before["eval_nll_calib"] == pytest.approx(nll, abs=1e-5)
        for _ in range(2):
            trainer.train()
        checkpoint = tmp_path / str(number) / "checkpoint-10"
        assert "doublehead" not in json.loads((checkpoint / "config.json").read_text())
        again = hf.BertForSequenceClassification.from_pretrained(checkpoint, attn_implementation="eager")
        assert_same(again.state_dict(), own_state(model))
        results.append(model.state_dict())
    assert_same(*results)


def test_folds_do_not_depend_on_padding() -> None:
    ids = torch.randint(2, 50, (40, 8))
    mask = (torch.arange(8) < torch.randint(1, 9, (40, 1))).long()
    folds = []
    for n_pad, pad, left in ((0, 1, False), (3, 1, False), (3, 7, False), (3, 1, True)):
        fill = torch.zeros(40, n_pad, dtype=torch.int64)
        masks = torch.cat([mask, fill], 1)
        tokens = torch.cat([ids, fill], 1) * masks + pad * (1 - masks)
        if left:
            order = masks.argsort(dim=1, stable=True)
            tokens, masks = tokens.gather(1, order), masks.gather(1, order)
        batch = {"input_ids": tokens, "attention_mask": masks, "labels": torch.zeros(40, dtype=torch.int64)}
        folds.append(fold_of(unpack(batch, torch.device("cpu"))).tolist())
    assert folds[0] == folds[1] == folds[2] == folds[3]
    assert set(folds[0]) == set(range(5))


@pytest.mark.parametrize("remove", [True, False])
def test_calibration_data_keeps_the_columns_of_the_trainer(
    texts: Any, tokenizer: Any, trained: Any, remove: bool
) -> None:
    """A transform makes columns that `column_names` does not list; the Trainer removes none then."""

    class Columns(list):
        column_names = ("input_ids", "attention_mask", "label") if remove else ("text", "label")

    collate = hf.DataCollatorWithPadding(tokenizer)
    train_batches = DataLoader(Columns(texts["train"]), 16, collate_fn=collate)
    rows = [{**row, "text": "which no tensor can hold"} if remove else row for row in texts["calib"]]
    args = copy.copy(trained[0].args)  # new ones would reset what all Accelerators of the process share
    args.remove_unused_columns = remove
    batches = DoubleHeadTrainerCallback(rows)._batches(args, train_batches)
    assert set(next(iter(batches))) == {"input_ids", "attention_mask", "labels"}


def test_an_adapter_carries_its_calibration(texts: Any, train: Any, tmp_path: Path, test_batch: Any) -> None:
    """Saved beside the adapter, and part of what merge_and_unload returns."""
    peft = pytest.importorskip("peft")
    tiny_bert().save_pretrained(tmp_path / "base")
    base = hf.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"])
    callback = DoubleHeadTrainerCallback(texts["calib"], every=1)
    trainer = train(peft.get_peft_model(base, lora), callback, folder="run")
    inputs, _ = test_batch
    want = logits(trainer.model, inputs)
    torch.testing.assert_close(logits(callback.model, inputs), want)
    torch.testing.assert_close(want.exp().sum(1), torch.ones(len(want)))
    trainer.save_model(tmp_path / "adapter")
    again = load_calibrated(tmp_path / "adapter")
    torch.testing.assert_close(logits(again, inputs), want, rtol=1e-3, atol=1e-4)
    merged = trainer.model.merge_and_unload()
    torch.testing.assert_close(logits(merged, inputs), want, rtol=1e-3, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load_calibrated(tmp_path / "merged"), inputs), logits(merged, inputs))


@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_adapters_of_other_tasks_are_loaded_too(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options: dict[str, Any] = {"modules_to_save": ["classifier"]}  # as an adapter of images has it
    if kind == "tokens":
        options = {"task_type": "TOKEN_CLS"}
        base: Any = hf.BertForTokenClassification(tiny_bert().config)
        inputs = {"input_ids": torch.randint(5, 50, (40, 8))}
        labels = torch.randint(base.config.num_labels, (40, 8))
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        base = hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes))
        inputs, labels = {"pixel_values": torch.randn(40, 3, 8, 8)}, torch.randint(3, (40,))
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    attention = [name for name, _ in base.named_modules() if name.endswith(("query", "q_proj"))]
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=attention, **options))
    attach(model, calibrate(model, [{**inputs, "labels": labels}]))
    want = logits(model.eval(), inputs)
    model.save_pretrained(tmp_path / "adapter")
    again = logits(load_calibrated(tmp_path / "adapter"), inputs)
    torch.testing.assert_close(again, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("adapter", [False, True])
def test_several_labels(sentences: Any, tokenizer: Any, train: Any, tmp_path: Path, adapter: bool) -> None:
    """Is a sentence positive, is it long, has it a comma? Three labels of a model with BCEWithLogitsLoss."""

    def row(text: str, label: int) -> dict[str, Any]:
        labels = [float(label), float(len(text.split()) > 18), float("," in text)]
        return {**tokenizer(text, truncation=True, max_length=32), "labels": labels}

    data = {name: [row(*pair) for pair in part] for name, part in sentences.items()}

    def model() -> Any:
        torch.manual_seed(3)
        config = tiny_bert().config
        config.problem_type, config.num_labels = "multi_label_classification", 3
        made = hf.BertForSequenceClassification(config)
        made.save_pretrained(tmp_path / "base")
        made = hf.BertForSequenceClassification.from_pretrained(tmp_path / "base")
        if not adapter:
            return made
        peft = pytest.importorskip("peft")
        torch.manual_seed(4)
        return peft.get_peft_model(made, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))

    alone = train(model(), folder="alone", data=data)
    callback = DoubleHeadTrainerCallback(data["calib"], every=1)
    beside = train(model(), callback, folder="beside", data=data)
    if not adapter:
        assert_same(own_state(beside.model), alone.model.state_dict())
    batch = dict(hf.DataCollatorWithPadding(tokenizer)(data["test"]))
    labels = batch.pop("labels")
    want = logits(beside.model, batch)
    torch.testing.assert_close(want, logits(callback.model, batch))
    numbers = beside.evaluate()
    loss = float(F.binary_cross_entropy_with_logits(want, labels))
    assert numbers["eval_nll_calib"] == pytest.approx(loss, abs=1e-5)
    assert numbers["eval_loss"] == pytest.approx(numbers["eval_nll_main"], abs=1e-5)
    beside.save_model(tmp_path / "saved")
    again = load_calibrated(tmp_path / "saved")
    torch.testing.assert_close(logits(again, batch), want, rtol=1e-3, atol=1e-4)


def test_bad_use_is_named(texts: Any, tokenizer: Any, train: Any, tmp_path: Path) -> None:
    same = texts["train"]
    for data, share in ((same, ": at least 160 of 160"), (Subset(same, range(5)), "")):
        with pytest.raises(ValueError, match=f"calibration data must not be training data{share}"):
            train(tiny_bert(), DoubleHeadTrainerCallback(data))
    with pytest.raises(RuntimeError, match="has no model yet"):
        DoubleHeadTrainerCallback(same).model  # noqa: B018
    for options, message in (
        ({"evry": 3}, "'evry'"),
        ({"logits_of": lambda output: output.logits}, "logits_of must not be given"),
        ({"heads": [PAPER, PAPER]}, "heads must be None or one HeadSpec, got 2"),
    ):
        refused(message, DoubleHeadTrainerCallback, same, error=(TypeError, ValueError), **options)
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be a classifier of transformers .* got Sequential"):
        make_trainer(net, texts, tmp_path, tokenizer, DoubleHeadTrainerCallback(texts["calib"]))
    loader = DataLoader(texts["calib"], 16, collate_fn=hf.DataCollatorWithPadding(tokenizer))
    with pytest.raises(ValueError, match="calibrated must be a Calibrated of this very Bert"):
        attach(tiny_bert(), calibrate(tiny_bert(), loader))
    tiny_bert().save_pretrained(tmp_path / "plain")
    refused("no entry 'doublehead' in its config.json", load_calibrated, tmp_path / "plain")


def test_a_copied_model_keeps_its_calibration(trained: Any) -> None:
    """While the Trainer that made it holds an open loader, which cannot be copied."""
    model = trained[0].model.eval()
    again, inputs = copy.deepcopy(model), {"input_ids": torch.arange(20).view(2, 10)}
    assert torch.equal(logits(again, inputs), logits(model, inputs))
    attachment = integration.attached_to(again)
    assert attachment.network is again
    assert attachment.answer.__self__.head is again.calibration_head.head
    nn.init.zeros_(again.classifier.weight)
    assert not torch.equal(logits(again, inputs), logits(model, inputs))
