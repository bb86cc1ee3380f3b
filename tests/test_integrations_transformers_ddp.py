"""The Trainer callback in two real processes, started by torchrun: this file is also what they run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from doublehead import PAPER
from doublehead.integrations.transformers import DoubleHeadTrainerCallback, attached_to, load_calibrated
from doublehead.system import require
from processes import leave
from tiny_networks import assert_same

hf = require("transformers", extra="transformers")
pytestmark = pytest.mark.slow
Ranks = list[dict[str, Any]]
N_CALIB = 241  # enough for all stages of the calibration
N_TEST = 41  # two processes and batches of 16: the last batches are filled up with samples seen before


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    ids = torch.randint(1, 50, (n, 6), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int(row[0] > 25)} for row in ids]


class Recorded(DoubleHeadTrainerCallback):
    """Notes the calibration batches that this process draws, and the heads as training left them."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.drawn: list[dict[str, torch.Tensor]] = []
        super().on_train_begin(*args, **kwargs)

    def _batches(self, args: Any, train_dataloader: Any) -> Any:
        inner, noted = super()._batches(args, train_dataloader), self.drawn

        class Noting:
            def __iter__(self) -> Iterator[Any]:
                for batch in inner:
                    noted.append(dict(batch))
                    yield batch

        return Noting()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.trained, n_drawn = self.double.bank.state_dict(), len(self.drawn)
        if torch.distributed.is_initialized() and len(self.double.bank.specs) > 1:
            # Each process reads and splits the data in another way.
            self.double.finish = partial(self.double.finish, seed=torch.distributed.get_rank())
        super().on_train_end(*args, **kwargs)
        del self.drawn[n_drawn:]


def train(folder: Path, callback: Any, n_processes: int, checkpoint: Any = None, save: str = "no") -> Any:
    torch.manual_seed(3)
    config = hf.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    args = hf.TrainingArguments(
        str(folder), num_train_epochs=2, learning_rate=3e-3, per_device_train_batch_size=16 // n_processes,
        per_device_eval_batch_size=16, save_strategy=save, save_steps=10, report_to=[], use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, average_tokens_across_devices=False,
    )  # fmt: skip
    sets = {"train_dataset": rows(160, 1), "eval_dataset": rows(N_TEST, 2)}
    network, callbacks = hf.BertForSequenceClassification(config), [callback] if callback else []
    trainer = hf.Trainer(network, args, **sets, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer


def one_of_two(folder: Path) -> None:
    """What each process does; the files it writes carry its rank."""
    # Transformers 5.17 resumes the optimizer onto "cpu:0", a place that torch.load does not know; 5.22 onto "cpu".
    onto = lambda storage, place: storage if place.startswith("cpu:") else None  # noqa: E731
    torch.serialization.register_package(50, lambda _: None, onto)
    plain = train(folder / "plain", None, 2)
    callback = Recorded(rows(N_CALIB, 3), every=3)
    whole = train(folder / "two", callback, 2, save="steps")
    rank = torch.distributed.get_rank()
    paper = Recorded(rows(N_CALIB, 3), every=3, heads=PAPER)
    train(folder / "paper", paper, 2)
    states = {"plain": plain.model.state_dict(), "whole": whole.model.state_dict()}
    states |= {"whole heads": callback.trained, "paper heads": paper.trained}
    found = {"evaluate": whole.evaluate(), "predict": whole.predict(rows(N_TEST, 2)).predictions.tolist()}
    found["log"] = whole.state.log_history
    whole.save_model(str(folder / "saved"))
    for name, saved in (("resumed", "two"), ("joined", "one")):  # the second was saved by a single process
        again = Recorded(rows(N_CALIB, 3), every=3)
        trainer = train(folder / saved, again, 2, folder / saved / "checkpoint-10")
        states[name] = trainer.model.state_dict()
        states[f"{name} heads"] = again.trained
        found[name] = [batch["input_ids"].tolist() for batch in again.drawn]
        found[f"{name} calls"] = again.double.calls
    drawn = {"drawn": callback.drawn, "paper drawn": paper.drawn}
    choice = str(callback.model.head.choice)
    torch.save({"states": states, "choice": choice, **drawn}, folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes, and before them one, have trained."""
    folder = tmp_path_factory.mktemp("trainer")
    train(folder / "one", DoubleHeadTrainerCallback(rows(N_CALIB, 3), every=3), 1, save="steps")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Ranks:
    """What both processes ended with."""
    return [
        {**torch.load(folder / f"{rank}.pt", weights_only=True), **json.loads((folder / f"{rank}.json").read_text())}
        for rank in range(2)
    ]  # fmt: skip


def test_all_processes_end_with_the_same_model_and_the_network_does_not_notice(ranks: Ranks) -> None:
    first, second = (rank["states"] for rank in ranks)
    for name in first:
        assert_same(first[name], second[name])
    part = {name for name in first["whole"] if name.startswith("calibration_head.")}
    assert part
    assert ranks[0]["choice"] == ranks[1]["choice"]
    assert f"on {N_CALIB} samples" in ranks[0]["choice"]
    assert_same({k: v for k, v in first["whole"].items() if k not in part}, first["plain"])


def test_each_process_draws_batches_of_its_own_and_the_heads_learn_from_all(
    ranks: Ranks, tmp_path: Path
) -> None:
    # One to look at, then 20 steps, every third.
    assert [len(rank["paper drawn"]) for rank in ranks] == [7, 7]
    drawn = [rank["paper drawn"][1:] for rank in ranks]
    both = []
    for one, other in zip(*drawn):
        assert one["labels"].shape == other["labels"].shape
        assert not torch.equal(one["input_ids"], other["input_ids"])
        both.append({key: torch.cat([one[key], other[key]]) for key in one})
    alone = Recorded(DataLoader(both, batch_size=None), every=3, heads=PAPER)
    train(tmp_path, alone, 1)
    torch.testing.assert_close(ranks[0]["states"]["paper heads"], alone.trained, rtol=1e-3, atol=1e-4)


def test_every_test_sample_counts_once(folder: Path, ranks: Ranks) -> None:
    from test_integrations_transformers import assert_numbers

    model = load_calibrated(folder / "saved")
    test = rows(N_TEST, 2)
    with torch.no_grad():
        inputs = {"input_ids": torch.stack([row["input_ids"] for row in test])}
        calib = model(**inputs).logits
        with attached_to(model).resting():
            main = model(**inputs).logits
    labels = torch.tensor([row["labels"] for row in test])
    for rank in ranks:
        torch.testing.assert_close(torch.tensor(rank["predict"]), calib, rtol=1e-4, atol=1e-5)
        assert_numbers(rank["evaluate"], (main, calib), labels)
        assert rank["log"][-1]["eval_ece_calib"] == rank["evaluate"]["eval_ece_calib"]


def test_one_file_holds_the_state_of_all_and_resuming_is_exact(folder: Path, ranks: Ranks) -> None:
    names = [file.name for file in (folder / "two/checkpoint-10").iterdir()]
    assert [name for name in names if "doublehead" in name] == ["doublehead.pt"]
    for rank in ranks:
        assert rank["resumed calls"] == 20
        assert_same(rank["states"]["resumed"], rank["states"]["whole"])
        assert_same(rank["states"]["resumed heads"], rank["states"]["whole heads"])
        late = [batch["input_ids"].tolist() for batch in rank["drawn"][-3:]]
        assert rank["resumed"][-3:] == late


def test_more_processes_than_the_checkpoint_had(ranks: Ranks) -> None:
    """The new one takes over the steps, which must fall together, but draws batches of its own."""
    first, second = ranks
    assert first["joined calls"] == second["joined calls"] == 20
    late = list(zip(first["joined"][-3:], second["joined"][-3:], strict=True))  # steps 12, 15 and 18
    assert len(late) == 3
    assert all(one != other for one, other in late)


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]))
    leave()
