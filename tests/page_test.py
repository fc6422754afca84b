#!/usr/bin/env python3
"""The page, in a headless Chromium: of a real job through a kill, a rejoin and a coordinator that stands still; and of
a made-up job of 1,024 replicas, with texts that would like to be HTML.

  page_test.py BIN [FOLDER]    FOLDER: for screenshots

Needs Debian's chromium and PyPI's playwright, which ./run page-test installs (into build/page-venv); skipped without."""
import json
import pathlib
import re
import shutil
import signal
import sys
import tempfile

from observed_job import Job, get, until

SKIPPED = 77
HOSTILE = "</script><img src=x onerror='window.hacked=1'><b>&amp;\"'"


def runs(states):
    return "".join(f"{len(one.group(0))}{one.group(1)}" for one in re.finditer(r"(.)\1*", states))


def large_job(real):
    """What a coordinator of 1,024 replicas would tell, in the form of what `real` has told."""
    replicas, first, committed = 1024, 5001, 5200
    job = json.loads(json.dumps(real))
    c = job["coordinator"]
    states, epochs = ["c"] * replicas, []
    for number in range(64):
        step, replica = first + 3 * number, (number * 37) % replicas
        states[replica] = "." if number % 2 else "s"
        if number >= 8:
            states[((number - 8) * 37) % replicas] = "j" if number % 3 else "c"
        epochs.append({"epoch": 100 + number, "step": step, "cause": "lost" if number % 2 else "silent",
                       "reason": f"without replica {replica}: {HOSTILE}", "states": runs("".join(states)),
                       "at_ms": 1000 * number})
    out = [{"replica": r, "reason": HOSTILE, "next": HOSTILE, "for_ms": 5000} for r, s in enumerate(states) if s in ".s"]
    listed = lambda rows: {"rows": rows[:32], "count": len(rows)}  # noqa: E731
    c.update(replicas=replicas, states=runs("".join(states)), epochs=epochs, committed=committed, out=listed(out),
             steps={"first": first, "seconds": [0.5 + (i % 7) / 50 for i in range(200)], "broken": [first + 3, first + 9]},
             alarms=listed([HOSTILE] * 40), waiting_for=listed([HOSTILE] * 2000),
             hops=listed([{"replica": r, "from": r - 1, "rank": r % 8, "node": HOSTILE, "gap_us": 9000 - r,
                           "bytes_per_second": 4000000000} for r in range(1, 1024)]),
             streams=listed([{"replica": r, "node": HOSTILE, "bytes": 3e10, "total_bytes": 5e10, "bytes_per_second": 2e9,
                              "slices": 4096, "verified": 77, "refetched": 0, "sources": 1000}
                             for r, s in enumerate(states) if s == "j"]),
             rails=[{"peers": 8000, "up": 7999}], rails_down=listed(
                 [{"replica": 5, "node": HOSTILE, "rail": 0, "peers": 9, "up": 8}]),
             locations=listed([{"replica": r, "catches_up": r > 1000, "location": f"{HOSTILE}/room{r % 2}/rack{r % 64}",
                             "round_trip_us": {"nearest": 128, "farthest": 2048}} for r in range(1024)]),
             neighbourhoods=listed([" ".join(str(r) for r in range(room, 128, 4)) for room in range(4)]))
    return job


class Browser:
    def __init__(self, playwright, shots):
        self.browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        self.shots, self.complaints = shots, []

    def open(self, address, overview=None, width=1280, scheme="light"):
        page = self.browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        page.on("pageerror", lambda error: self.complaints.append(f"{error}"))
        # That a request failed is no complaint: the page says so itself.
        page.on("console", lambda m: m.type == "error" and "Failed to load resource" not in m.text
                and self.complaints.append(m.text))
        if overview:
            page.route("**/overview", lambda route: route.fulfill(json=overview))
        page.goto(f"http://{address}/")
        page.wait_for_function("() => heardAt > 0")
        return page

    def shoot(self, page, name):
        if self.shots:
            page.screenshot(path=f"{self.shots}/{name}.png", full_page=True)


def text(page, what):
    return page.inner_text(what)


def says(page, what, words, seconds=60):
    page.wait_for_function("([what, words]) => document.querySelector(what).innerText.includes(words)",
                           arg=[what, words], timeout=1000 * seconds)


def has_color(page, name):
    """Whether the grid has a pixel of this colour of the style sheet."""
    return page.evaluate("""name => {
      const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1);
      const want = [0, 2, 4].map(i => parseInt(hex.slice(i, i + 2), 16)), canvas = document.getElementById('grid');
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      for (let i = 0; i < data.length; i += 4) if (want.every((v, k) => data[i + k] === v)) return true;
      return false;
    }""", name)


def fits(page):
    wide = page.evaluate("[document.scrollingElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1], f"the page is {wide[0]} wide in a window of {wide[1]}"


def real_job(browser, job):
    address = job.address("coordinator")
    page = browser.open(address)
    says(page, "#verdict", "3 of 3 replicas contribute")
    assert has_color(page, "--in") and not has_color(page, "--lost")
    # All daemons tell of themselves, the one behind a relay, too.
    page.wait_for_function("() => heard.coordinator.told === 3")
    assert not page.is_visible("#locations"), "nobody tells of a location"
    browser.shoot(page, "all")
    job.kill_trainer(1)
    says(page, "#verdict", "without replica 1")
    says(page, "#out", "its trainers have to be started again")
    says(page, "#epochs", "lost")
    says(page, "#figures", "lost at step")
    page.wait_for_function("() => grid.shown?.length > 20")
    browser.shoot(page, "lost")
    step = int(re.search(r"\"step\":(\d+)", page.evaluate("JSON.stringify(heard.coordinator.training.last_failure)"))[1])
    job.start_trainer(1)
    says(page, "#verdict", "3 of 3 replicas contribute")
    says(page, "#out", "Nobody")
    says(page, "#epochs", "promoted")
    page.evaluate("window.scrollTo(0, 0)")
    browser.shoot(page, "back")
    # Arrows read the grid.
    page.keyboard.press("g")
    page.keyboard.press("ArrowLeft")
    assert "Step " in text(page, "#cell") and "replica 0: " in text(page, "#cell"), text(page, "#cell")
    assert page.evaluate("step => grid.lost.get(step).has(1)", step)
    # Light and dark, by the key.
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    return page


def coordinator_away(browser, job, page):
    for stop, back in ((lambda: job.coordinator.send_signal(signal.SIGSTOP),
                        lambda: job.coordinator.send_signal(signal.SIGCONT)),
                       (lambda: (job.coordinator.kill(), job.coordinator.wait()), job.start_coordinator)):
        stop()
        says(page, "#gone", "has not answered since")
        assert page.evaluate("document.getElementById('main').className") == "old"
        assert "no answer" in page.title()
        browser.shoot(page, "away")
        back()
        page.wait_for_function("() => document.getElementById('gone').hidden && !document.querySelector('main.old')",
                               timeout=60000)
        says(page, "#verdict", "3 of 3 replicas contribute")
    # A coordinator that was started again knows the steps of its log, and who was in.
    assert page.evaluate("heard.coordinator.steps.seconds.length") > 100


def node_page(browser, job):
    page = browser.open(job.address("node0"))
    says(page, "#verdict", "Connected with the coordinator")
    says(page, "#trainers", "replica 0 rank 0")
    page.wait_for_selector("#because a")
    assert page.get_attribute("#because a", "href") == f"http://{job.address('coordinator')}/"
    browser.shoot(page, "node")


def large(browser, job):
    overview = large_job(json.loads(get(job.address("coordinator"), "/overview")))
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        page = browser.open(job.address("coordinator"), overview, width, scheme)
        says(page, "#out", "replica 0" if overview["coordinator"]["states"].startswith("1s") else "replica")
        assert HOSTILE in text(page, "#out") and HOSTILE in text(page, "#verdict"), text(page, "#out")
        assert "<128 µs to <2.0 ms" in text(page, "#locations") and "near each other" in text(page, "#locations")
        assert page.evaluate("window.hacked") is None and not page.query_selector("main img, main b")
        fits(page)
        rows, nodes = page.evaluate("[grid.rows.length, document.querySelectorAll('*').length]")
        assert 20 < rows <= 64 and nodes < 2500, (rows, nodes)
        browser.shoot(page, f"large-{width}-{scheme}")
        page.keyboard.press("a")
        assert page.evaluate("grid.rows.length") == 1024
        assert page.evaluate("parseInt(document.getElementById('grid').style.height)") < 4000
        fits(page)
        page.context.close()


def main(binaries, shots):
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("SKIPPED: the page's test: there is no playwright here; ./run page-test installs it, and chromium (410 MB)")
        return SKIPPED
    if not shutil.which("chromium"):
        print("SKIPPED: the page's test: there is no chromium here; ./run page-test installs it (410 MB)")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder, Job(binaries, folder) as job, sync_playwright() as playwright:
        job.until_all_contribute()
        browser = Browser(playwright, shots)
        page = real_job(browser, job)
        node_page(browser, job)
        large(browser, job)
        coordinator_away(browser, job, page)
        browser.browser.close()
        assert not browser.complaints, browser.complaints
    print("the page has shown what happened")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None))
