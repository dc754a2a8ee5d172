"""The page of a search in a real browser: it sorts and filters, fits wide and narrow windows, light and dark.

Skipped where there is neither chromium nor Chrome. The page is opened from the disk, with a script at its end that acts
as a user does and writes what it sees into the page, and the browser prints that.
"""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from megatron.planner.search import Outcome
from megatron.planner.search.notes import sentences_on_weights
from megatron.planner.search.report import html_report
from tests.planner.search.helper import PAPER, a100, gpt3, planner, run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage
"""
MODEL, MACHINES = gpt3(16, 8192, 64), a100(1)
WRITE = "const result = document.createElement('pre'); result.id = 'seen'; result.textContent = JSON.stringify(seen); "
HELPERS = """
const table = document.getElementById("all");
const column = (name) => {
  const texts = [...table.tHead.rows[0].cells].map((each) => each.textContent.replaceAll("\\u00ad", ""));
  return texts.indexOf(name);
};
const visible = () => [...table.tBodies[0].rows].filter((row) => row.offsetHeight > 0);
const read = (name) => visible().map((row) => row.cells[column(name)].textContent);
const sort = (name) => table.tHead.rows[0].cells[column(name)].querySelector("button").click();
const channels = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
const luminance = (colour) => {
  const [r, g, b] = channels(colour).map((c) => (c <= 10 ? c / 3294 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (selector, property = "color") => {
  const paper = luminance(getComputedStyle(document.body).backgroundColor);
  const ink = luminance(getComputedStyle(document.querySelector(selector))[property]);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
};
"""


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run(MODEL, MACHINES, global_batch_size=16, num_simulated=2)


@pytest.fixture(scope="module")
def look(outcome, tmp_path_factory):
    """Opens the page in a window of this width, runs a script there, and returns its object `seen`."""
    text = html_report(
        outcome, lambda _: planner(MODEL, MACHINES, PAPER), title="A search", summary=["some models"],
        notes=sentences_on_weights(outcome.kept), docs="file:///docs", script="#!/bin/sh", num_timelines=2,
    )  # fmt: skip

    def look(script: str, *, width: int = 1280, flags: tuple[str, ...] = ()) -> dict:
        folder = tmp_path_factory.mktemp("browser")
        acting = (
            f"<script>{{\n{HELPERS}\nconst seen = {{}};\n{script}\n{WRITE} document.body.append(result);\n}}</script>"
        )
        page = folder / "report.html"
        page.write_text(text.replace("</body>", f"{acting}</body>"), encoding="utf-8")
        argv = [BROWSER, *FLAGS.split(), f"--user-data-dir={folder / 'user'}", f"--window-size={width},900", *flags]
        done = subprocess.run([*argv, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=240)
        found = re.search('<pre id="seen">(.*?)</pre>', done.stdout)
        assert found, f"the script did not end; the browser said {done.stderr[-2000:]}"
        return json.loads(unescape(found[1]))

    return look


def test_a_click_sorts(look, outcome):
    """By numbers as numbers and by words as words, up and then down; equals stay in the order of the ranking."""
    seen = look("""
        seen.before = read("rank");
        sort("rank"); seen.backwards = read("rank");
        sort("GiB"); seen.up = read("GiB"); seen.upRanks = read("rank");
        sort("GiB"); seen.down = read("GiB");
        seen.state = [...table.tHead.querySelectorAll("[aria-sort]")].map((each) => [each.textContent, each.ariaSort]);
        sort("s/iteration"); seen.seconds = read("s/iteration");
        sort("schedule"); seen.schedules = read("schedule");
        sort("rank"); seen.after = read("rank");
    """)
    ranks = [str(rank) for rank in range(1, len(outcome.kept) + 1)]
    assert seen["before"] == seen["after"] == ranks
    assert seen["backwards"] == ranks[::-1]
    memory = {rank: f"{each.memory_gib:.1f}" for rank, each in zip(ranks, outcome.kept, strict=True)}
    assert seen["upRanks"] == sorted(ranks, key=lambda rank: (float(memory[rank]), int(rank)))
    assert seen["up"] == [memory[rank] for rank in seen["upRanks"]]
    assert list(map(float, seen["down"])) == sorted(map(float, memory.values()), reverse=True)
    assert seen["state"] == [["GiB", "descending"]]
    seconds = [float(text.strip("~")) for text in seen["seconds"]]
    assert seconds == sorted(seconds) and any("~" in text for text in seen["seconds"])
    assert seen["schedules"] == sorted(each.choice.schedule for each in outcome.kept)


def test_schedules_are_chosen(look, outcome):
    """None, one, two, all: only their rows are shown, sorted as before, and their number is said."""
    seen = look("""
        const box = (name) => [...document.querySelectorAll("fieldset label")]
          .find((each) => each.textContent.trim().startsWith(name + " (")).querySelector("input");
        const button = (name) => [...document.querySelectorAll("fieldset button")]
          .find((each) => each.textContent === name);
        const look = (name) => { seen[name] = [read("schedule"), document.querySelector("output").textContent]; };
        look("all"); seen.labels = [...document.querySelectorAll("fieldset label")].map((e) => e.textContent.trim());
        sort("GiB"); button("none").click(); look("none");
        box("2bw").click(); look("one"); seen.memory = read("GiB").map(Number);
        box("flush").click(); look("two");
        button("all").click(); look("again");
    """)
    names = [each.choice.schedule for each in outcome.kept]
    assert sorted(seen["labels"]) == sorted(f"{name} ({names.count(name)})" for name in set(names))
    total = len(names)
    for key, chosen in {
        "all": set(names),
        "none": set(),
        "one": {"2bw"},
        "two": {"2bw", "flush"},
        "again": set(names),
    }.items():
        shown, said = seen[key]
        expected = [name for name in names if name in chosen]
        assert sorted(shown) == sorted(expected) and said == f"{len(expected)} of {total} rows"
    assert seen["memory"] == sorted(seen["memory"])


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_fits_its_window(look, outcome, width):
    """It does not scroll sideways: what is wider has a box of its own that does. No row is taller than two lines."""
    seen = look(
        """
        seen.width = innerWidth; seen.page = document.documentElement.scrollWidth;
        seen.boxes = [...document.querySelectorAll(".wide")].map((each) =>
          [each.getBoundingClientRect().right, each.scrollWidth, each.clientWidth, getComputedStyle(each).overflowX]);
        seen.table = [table.getBoundingClientRect().width, table.parentElement.scrollWidth];
        seen.heights = [...document.querySelectorAll("table.configurations tbody tr")].map((each) => each.offsetHeight);
        const last = table.tBodies[0].rows[0].cells[table.tHead.rows[0].cells.length - 1];
        table.parentElement.scrollLeft = 100000;
        seen.lastColumn = [last.getBoundingClientRect().right, table.parentElement.getBoundingClientRect().right];
        const box = table.parentElement.getBoundingClientRect();
        seen.schedule = [table.tBodies[0].rows[0].cells[column("schedule")].getBoundingClientRect().left, box.left];
        seen.resources = performance.getEntriesByType("resource").length;
        """,
        width=width,
    )
    assert seen["width"] == width and seen["page"] <= width
    assert len(seen["heights"]) > len(outcome.kept) and min(seen["heights"]) > 0 and max(seen["heights"]) <= 40
    assert all(right <= width and overflow == "auto" for right, _, _, overflow in seen["boxes"])
    if width == 500:
        assert any(inside > outside for _, inside, outside, _ in seen["boxes"])
    assert seen["table"][1] >= seen["table"][0] - 1
    assert seen["lastColumn"][0] <= seen["lastColumn"][1] + 1
    assert 0 <= seen["schedule"][0] - seen["schedule"][1] <= 60  # it stays while the rest scrolls
    assert seen["resources"] == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_writing_is_legible(look, dark):
    """Text, notes, links and the pictures' writing stand out from the page by 4.5 and more, in either scheme."""
    script = """
        seen.dark = matchMedia("(prefers-color-scheme: dark)").matches;
        seen.paper = luminance(getComputedStyle(document.body).backgroundColor);
        const inks = ["p", "tr.pressure td", "a", "output", "figcaption", "th button"];
        for (const each of inks) seen[each] = contrast(each);
        for (const each of [".picture svg text", ".drawing svg > text"]) seen[each] = contrast(each, "fill");
    """
    seen = look(script, flags=("--blink-settings=preferredColorScheme=0",) if dark else ())
    assert seen.pop("dark") is dark and (seen.pop("paper") < 0.1) is dark
    assert len(seen) == 8 and min(seen.values()) >= 4.5, seen


def test_the_pointer_says_what_it_is_on(look):
    """The box of a timeline with its microbatch, stage, weights and time; nothing beside the boxes."""
    seen = look("""
        const svg = document.querySelector(".drawing svg");
        svg.scrollIntoView();
        const place = svg.getBoundingClientRect();
        const unit = svg.viewBox.baseVal.width / place.width;
        const [top, pitch, left] = ["top", "pitch", "left"].map((name) => Number(svg.dataset[name]));
        const point = (x, y) => svg.dispatchEvent(new MouseEvent("mousemove", {
          clientX: place.left + x / unit, clientY: place.top + y / unit, bubbles: true,
        }));
        const hover = document.querySelector(".hover");
        seen.before = hover.hidden;
        const [kind, stage, microbatch] = svg.dataset.rows.split("|")[0].split(";")[0].split(",");
        seen.first = [svg.dataset.kinds.split(",")[kind], stage, microbatch];
        point(Number(svg.dataset.rows.split(",")[4]) + 12, top + pitch / 2);
        seen.text = hover.textContent; seen.shown = hover.offsetHeight > 0;
        point(left - 8, top + pitch / 2);
        seen.after = hover.hidden;
    """)
    kind, stage, microbatch = seen["first"]
    assert seen["before"] and seen["shown"] and seen["after"]
    assert re.fullmatch(
        rf"{kind} of microbatch {microbatch}, stage {stage}(, weights W\d+)?: [\d.e-]+ to [\d.e-]+ s", seen["text"]
    )


def test_pictures_show_their_points_and_boxes(look, outcome):
    """The legend stands below the axes with all their points; a picture for each of the best, with its boxes."""
    seen = look("""
        const legend = document.querySelector(".picture #legend_1").getBoundingClientRect();
        const axes = document.querySelector(".picture #patch_2").getBoundingClientRect();
        seen.below = legend.top >= axes.bottom;
        const drawings = [...document.querySelectorAll(".drawing svg")];
        seen.widths = drawings.map((each) => each.getBoundingClientRect().width);
        seen.boxes = drawings.map((each) =>
          [...each.querySelectorAll("path")].filter((path) => path.getTotalLength() > 0).length);
    """)
    assert seen["below"] and len(seen["widths"]) == 2 and all(width > 600 for width in seen["widths"])
    assert all(paths >= 4 for paths in seen["boxes"])
