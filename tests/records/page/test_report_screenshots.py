"""Pages as Chromium draws them, where it is installed: nothing blank, nothing outside of its place, in any window."""

from __future__ import annotations

import html as html_library
import json
import re
import subprocess

import pytest
import study_examples
from optional_programs import needs, program

from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.planner.answers.advise import advise
from scaleray.planner.answers.outlook import outlook
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.models.names import find_model
from scaleray.planner.report.plan_page import plan_page
from scaleray.records.page.page import render
from scaleray.studies.study_page import study_page
from scaleray.sweeps.sweep_page import sweep_page

CHROMIUM = "chromium|chromium-browser|google-chrome"
pytestmark = needs(CHROMIUM)

MEASURE = """
<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const found = {width: document.documentElement.clientWidth, scroll: document.documentElement.scrollWidth,
  h1: parseFloat(getComputedStyle(document.querySelector("h1")).fontSize),
  others: Math.max(...[...document.querySelectorAll("p, dd, td, h2, h3")].map(e => parseFloat(getComputedStyle(e).fontSize))),
  figures: [...document.querySelectorAll("svg")].map(svg => ({box: box(svg), texts: [...svg.querySelectorAll("text")].map(box),
    scrolls: svg.parentElement.scrollWidth > svg.parentElement.clientWidth}))};
document.body.innerHTML = "<pre id=found></pre>"; document.getElementById("found").textContent = JSON.stringify(found);
</script>
"""


def chromium(*arguments, folder):
    command = [
        next(filter(None, map(program, CHROMIUM.split("|")))),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def measured(html, width, folder):
    """Where a browser puts everything. The page itself allows no script, so that a copy without that rule is asked."""
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html).replace("</body>", MEASURE + "</body>")
    (folder / "measure.html").write_text(html)
    done = chromium(f"--window-size={width},1000", "--dump-dom", f"file://{folder / 'measure.html'}", folder=folder)
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert text, done.stderr[-2000:]
    return json.loads(html_library.unescape(text.group(1)))


@pytest.fixture(scope="module")
def pages():
    study = study_examples.study(modes=("strong",), sizes=(1, 2, 4, 8, 16), marks=("oversubscribed",))
    question = Question(model=find_model("gpt2"), cluster=parse_cluster("h100:4x2"), global_batch=64)
    advice = advise(question)
    return {
        "study": render(study_page(study)),
        "sweep": render(sweep_page(study_examples.sweep())),
        "plan": plan_page(advice, outlook(advice), rows=5),
    }


@pytest.mark.parametrize(("name", "width"), [("study", 1280), ("study", 500), ("sweep", 1280), ("plan", 1280)])
def test_figures_have_their_place_and_no_words_overlap_or_leave_them(pages, name, width, tmp_path):
    found = measured(pages[name], width, tmp_path)
    assert found["scroll"] <= found["width"]  # only tables and wide figures scroll, each by itself
    assert found["h1"] > found["others"]
    assert len(found["figures"]) == pages[name].count("<svg ")
    for figure in found["figures"]:
        left, top, right, bottom = figure["box"]
        assert right - left > 300 and bottom - top > 180
        assert left >= 0 and (right <= found["width"] or figure["scrolls"])
        for x0, y0, x1, y1 in figure["texts"]:
            assert x0 >= left - 1 and x1 <= right + 1 and y0 >= top - 1 and y1 <= bottom + 1
        pairs = [(a, b) for i, a in enumerate(figure["texts"]) for b in figure["texts"][:i]]
        assert not [pair for pair in pairs if overlap(*pair) > 0.3]


def overlap(a, b):
    """Share of the smaller of two boxes that the other covers."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    return width * height / min((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))


def picture(html, height, folder):
    """The page as pixels (height, 1280, 3) between 0 and 1."""
    import matplotlib.image

    (folder / "report.html").write_text(html)
    path = folder / "report.png"
    address = f"file://{folder / 'report.html'}"
    done = chromium(f"--window-size=1280,{height}", f"--screenshot={path}", address, folder=folder)
    assert path.exists(), done.stderr[-2000:]
    pixels = matplotlib.image.imread(path)[:, :, :3]
    assert pixels.shape[:2] == (height, 1280)
    return pixels


def blank_figures(html, folder):
    """Numbers of the figures in whose frame next to nothing is drawn in colour."""
    html = html.replace("</style>", "svg text { visibility: hidden }</style>", 1)  # words are coloured too
    boxes = [figure["box"] for figure in measured(html, 1280, folder)["figures"]]
    pixels = picture(html, int(boxes[-1][3]) + 40, folder)
    found = []
    for number, (left, top, right, bottom) in enumerate(boxes):
        part = pixels[int(top) : int(bottom), int(left) : int(right)]
        colour = part.max(axis=2) - part.min(axis=2) > 0.25
        if colour.mean() < 0.0008:
            found.append(number)
    return found


@pytest.mark.parametrize("name", ["study", "sweep", "plan"])
def test_every_figure_of_a_page_has_something_drawn_in_it(pages, name, tmp_path):
    html = pages[name]
    figures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    # a figure whose lines were lost must be found, and no other
    emptied = re.sub(r"<(path|use)\b[^>]*?/>|<image\b[^>]*?/>", "", figures[1])
    assert emptied != figures[1]
    assert blank_figures(html.replace(figures[1], emptied), tmp_path) == [1]


def test_the_picture_of_a_page_is_not_blank(pages, tmp_path):
    pixels = picture(pages["study"], 2400, tmp_path)
    parts = [pixels[top : top + 400] for top in range(0, 2400, 400)]
    assert all(0.005 < (part < 0.9).any(axis=2).mean() < 0.6 for part in parts)
    blue = (abs(pixels - (0.0, 0.447, 0.698)) < 0.05).all(axis=2)  # that of the curves and bars
    assert blue.sum() > 5000
