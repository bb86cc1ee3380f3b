"""Make report.png: the report of a committed run, on a desk and on a phone. Needs playwright and Chromium.

python docs/images/report.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import doublehead as dh
from doublehead.calibrators import Head

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "experiments"))
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
HEIGHT = 1240


def main() -> None:
    """Write the report, look at it twice, put both pictures side by side."""
    from results import stored_runs

    run = next(run for run in stored_runs() if run.name == "cifar10-resnet50-cross_entropy-e80-s0")
    before = run.test.predictions
    after = Head().fit(run.calib.predictions).calibrate(before)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = dh.report(
            {"before": before, "after": after},
            Path(folder) / "report.html",
            title="ResNet-50 on CIFAR-10",
            classes=CLASSES,
        )
        chromium = next(
            filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
        )
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        shots = []
        for width, scheme in ((1120, "light"), (390, "dark")):
            context = browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
            page = context.new_page()
            page.goto(page_file.as_uri())
            shots.append(Image.open(BytesIO(page.screenshot())))
        browser.close()
    picture = Image.new("RGB", (sum(shot.width for shot in shots) + 30, HEIGHT), "white")
    picture.paste(shots[0], (0, 0))
    picture.paste(shots[1], (shots[0].width + 30, 0))
    picture.quantize(200).save(HERE / "report.png", optimize=True)


if __name__ == "__main__":
    main()
