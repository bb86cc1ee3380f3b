"""CPU time and peak memory of the calibration error of segmentations: `Stream` beside torchmetrics.

    python benchmarks/segmentation.py          # 100 images; three minutes and 7 GB
    python benchmarks/segmentation.py --save   # also writes benchmarks/results/segmentation.json

Images are 1024 x 2048 with 19 classes, as in Cityscapes. Two are drawn and take turns. Each library runs in a process
of its own with one thread. Both take time in proportion to the images. The memory of torchmetrics grows with them: it
keeps the confidence of every pixel.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import records

HEIGHT, WIDTH, CLASSES, IGNORED = 1024, 2048, 19, 255


def main() -> None:
    """Print a table, or with --library one row of it as JSON."""
    parser = records.arguments(__doc__)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--library", choices=LIBRARIES)
    options = parser.parse_args()
    if options.library:
        print(json.dumps(measure(options.library, options.images)))
        return
    print("| library | images | CPU seconds per image | memory beside the images, MiB | ECE |")
    print("|---|---|---|---|---|")
    rows = {}
    for library in LIBRARIES:
        command = [sys.executable, __file__, "--library", library, "--images", str(options.images)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows[library] = row = json.loads(out.splitlines()[-1])
        cells = f"{row['seconds']:.2f} | {row['mib']:.0f} | {row['ece']:.5f}"
        print(f"| {library} | {options.images} | {cells} |", flush=True)
    if options.save:
        facts = {"images": options.images, "rows": rows}
        records.save("segmentation", facts | records.about(["torchmetrics"]))


def measure(library: str, n_images: int) -> dict[str, float]:
    """CPU seconds per image and growth of the peak memory over that of the images."""
    import torch

    torch.set_num_threads(1)
    add, ece = LIBRARIES[library]()
    images = [draw(0), draw(1)]
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, counts from here on (Linux)
    base, start = held("VmRSS"), time.process_time()
    for i in range(n_images):
        add(*images[i % 2])
    value = ece()
    spent = time.process_time() - start
    return {"seconds": spent / n_images, "mib": held("VmHWM") - base, "ece": value}


def draw(i: int) -> tuple:
    """Logits (1, K, H, W) of an overconfident model and labels (1, H, W); a tenth of the pixels does not count."""
    import torch

    generator = torch.Generator().manual_seed(i)
    logits = torch.randn(1, CLASSES, HEIGHT, WIDTH, generator=generator).mul_(2)
    noise = torch.rand(1, CLASSES, HEIGHT, WIDTH, generator=generator).log_().neg_().log_()
    labels = (logits / 2 - noise).argmax(1)  # a draw from the softmax at temperature 2
    labels[torch.rand(labels.shape, generator=generator) < 0.1] = IGNORED
    return logits, labels


def held(entry: str) -> float:
    """An entry of the kernel's account of this process's memory, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(entry))


def with_stream():
    """Everything in a `Summary`, floor and intervals among it."""
    from doublehead import Stream

    stream = Stream(ignore_index=IGNORED)
    return stream.add, lambda: stream.summary().values["ece"]


def with_torchmetrics():
    """The ECE alone."""
    from doublehead.system import require

    metric = require("torchmetrics.classification", extra="train").MulticlassCalibrationError(
        CLASSES, n_bins=15, norm="l1", ignore_index=IGNORED
    )
    return metric.update, lambda: float(metric.compute())


LIBRARIES = {"doublehead": with_stream, "torchmetrics": with_torchmetrics}

if __name__ == "__main__":
    main()
