"""Run a trained network over clean, shifted and unknown inputs, and keep logits and stage distances.

    python experiments/shift_sets.py RUN_FOLDER --root data   # seen/RUN.pt

Images need a GPU: 150,000 of them. Texts take a few minutes on a CPU. `shift.py` measures on what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import arguments
from run import reopened

from doublehead import ShiftGuard
from doublehead.data import FAMILIES, Images, Texts, load_test
from doublehead.data.text import tokens_of
from doublehead.guard import Observed
from doublehead.training.evaluation import corrupted
from doublehead.training.run import Run
from doublehead.training.run_folder import RunFolder

N_EACH, N_TEXTS = 1000, 500  # images and texts of a family at a severity
UNKNOWN = 255  # label of what belongs to no class
KINDS = {
    "noises": ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    "blurs": ("gaussian_blur", "defocus_blur", "motion_blur"),
    "colours": ("contrast", "brightness", "saturate"),
    "digital": ("jpeg_compression", "pixelate", "elastic_transform"),
    "missing words": ("drop", "cut"),
    "other words": ("replace",),
    "word order": ("shuffle",),
    "letters": ("typo",),
}
SHARES = (0.1, 0.2, 0.3, 0.45, 0.6)  # of words that are changed, by severity

Words = list[str]
# Name, batches (inputs, labels), labels (N,) and sample numbers (N,).
Set = tuple[str, Iterable[Any], Any, Any]
# What was seen of each set, by name: calib/clean, test/contrast/5, unknown/svhn, ... The stages are distances (N, D).
Sets = dict[str, Observed]


@torch.no_grad()
def observe(folder: RunFolder, root: str) -> Sets:
    """Run the network of a finished run over all sets of inputs."""
    run = reopened(folder, root)
    guard, sets = ShiftGuard(run.net.eval()), {}
    of_images = isinstance(run.inputs.splits.test, Images)
    for name, batches, labels, rows in (image_sets if of_images else text_sets)(run, root):
        found, _ = guard.observe((x, torch.zeros(len(x)).long()) for x, _ in batches)
        stages, distances = found.stages.cpu(), guard.guard.distances.cpu()
        far = distances(stages) if sets else distances.set_usual(stages)  # type: ignore[operator]
        known = torch.as_tensor(labels), torch.zeros(len(rows)).long(), torch.as_tensor(rows)
        sets[name] = Observed(far, found.logits.cpu(), *known)
        print(name, len(rows), flush=True)
    return sets


def write(file: Path, sets: Sets) -> None:
    """Store the sets, numbers in half precision."""
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {name: (z.half(), far.half(), y, rows) for name, (far, z, y, _, rows) in sets.items()}
    torch.save(kept, file)


def read(file: Path) -> Sets:
    """What `write` stored."""
    kept = torch.load(file).items()
    return {name: Observed(far.float(), z.float(), y, 0 * y, rows) for name, (z, far, y, rows) in kept}


def some_rows(n: int, split: str, wanted: int) -> Any:
    """The samples of a split that are perturbed."""
    return np.sort(np.random.default_rng(split == "test").permutation(n)[:wanted])


def image_sets(run: Run, root: str) -> Iterator[Set]:
    """Clean images, thirteen corruptions at five severities, and images of other data sets."""
    splits = {split: getattr(run.inputs.splits, split) for split in ("calib", "test")}
    for split, part in splits.items():
        yield f"{split}/clean", run.inputs.whole(part), part.labels, np.arange(len(part))
    for split, part in splits.items():
        rows = some_rows(len(part), split, N_EACH)
        some = part.take(rows)
        for family, level in product(FAMILIES, range(1, 6)):
            yield f"{split}/{family}/{level}", corrupted(run, some, family, level), some.labels, rows
    for other in sorted({"svhn", "cifar10", "cifar100"} - {run.config.data}):
        rows = np.arange(2 * N_EACH)
        images = run.inputs.whole(load_test(other, root).take(rows))
        yield f"unknown/{other}", images, np.full(len(rows), UNKNOWN), rows


def text_sets(run: Run, root: str) -> Iterator[Set]:
    """Clean texts, five ways to change words at five severities, and texts of other classes and data sets."""

    def text_set(name: str, words: list[Words], labels: Any, rows: Any = None) -> Set:
        texts = Texts(tuple(map(" ".join, words)), np.zeros(len(words), np.int64))
        alone = run.inputs.whole(texts, batch_size=1)  # layers of transformers see padding, which would count
        return name, alone, labels, np.arange(len(words)) if rows is None else rows

    texts: dict[str, tuple[list[Words], Any]] = {}
    for split in ("calib", "test"):
        part = getattr(run.inputs.splits, split)
        part = part.take(np.random.default_rng(0).permutation(len(part)))  # files are sorted by class
        texts[split] = list(tokens_of(part)), part.labels
        yield text_set(f"{split}/clean", *texts[split])
    pool = [word for words in texts["calib"][0] for word in words]
    for split, (words, labels) in texts.items():
        rows = some_rows(len(words), split, N_TEXTS)
        for number, family in enumerate(family for kind in list(KINDS)[4:] for family in KINDS[kind]):
            for level in range(1, 6):
                rng = np.random.default_rng([level, number, split == "test"])
                changed = [change(words[row], family, SHARES[level - 1], pool, rng) for row in rows]
                yield text_set(f"{split}/{family}/{level}", changed, labels[rows], rows)
    unknown = {}  # posts or sentences of the other data set; neutral sentences for a network of good and bad ones
    if not run.config.data.startswith("20newsgroups"):
        posts = load_test("20newsgroups-bydate", root)
        unknown["20newsgroups"] = posts.take(np.random.default_rng(0).permutation(len(posts))[: 2 * N_TEXTS])
    if run.config.data != "sst-fine":
        sentences = load_test("sst-fine", root)
        unknown["sst-neutral"] = sentences.take(np.flatnonzero(sentences.labels == 2))
    for name, samples in unknown.items():
        words = [words[:50] for words in tokens_of(samples) if words][:N_TEXTS]
        yield text_set(f"unknown/{name}", words, np.full(len(words), UNKNOWN))


def change(words: Words, family: str, share: float, pool: Sequence[str], rng: np.random.Generator) -> Words:
    """A text with about this share of its words left out, replaced, moved or misspelt; one word stays at least.

    >>> change(["a", "b", "c", "d"], "cut", 0.5, [], np.random.default_rng(0))
    ['a', 'b']
    """
    if family == "cut":
        return words[: max(1, round((1 - share) * len(words)))]
    places, new = np.flatnonzero(rng.random(len(words)) < share), list(words)
    if family == "drop":
        return [word for place, word in enumerate(words) if place not in places] or words[:1]
    for place, other in zip(places, rng.permutation(places)):
        word = words[place]
        if family == "shuffle":
            new[place] = words[other]
        elif family == "replace":
            new[place] = pool[rng.integers(len(pool))]
        elif len(word) > 1:  # two letters change places
            at = int(rng.integers(len(word) - 1))
            new[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return new


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--root")
    options = parser.parse_args()
    for folder in map(RunFolder, options.folders):
        write(Path("seen") / f"{folder.config.name}.pt", observe(folder, options.root))
