"""Opens every page of the site as built, from its folder, in a Chromium without a window.

`make test-docs` builds it before. Without Chromium and its driver: one line that says so.
"""

import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

SITE = Path(__file__).resolve().parent.parent / "_docs"
PAGES = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html") if p.name != "404.html")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


class Links(HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, page: str):
        super().__init__()
        self.links, self.loaded, self.ids = [], [], set()
        self.feed((SITE / page).read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.update({found["id"]} if "id" in found else ())
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(found["href"])
        elif "src" in found:
            self.loaded.append(found["src"])


@pytest.fixture(scope="module")
def parsed():
    return {page: Links(page) for page in PAGES}


@pytest.fixture(scope="module")
def browser():
    if not (CHROMIUM and DRIVER):
        pytest.skip("no page was looked at: there is no chromium with chromedriver here")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    # what a page asks the network for is an error in the console
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["http://*", "https://*"]})
    yield driver
    driver.quit()


def resize(browser, width):
    """Give the window a width in pixels."""
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


# the title, the width of all of it, pictures that are not there, pictures that are cut off
LOOK = """
const images = [...document.images]
images.forEach(image => image.loading = "eager")
return [document.querySelector("h1").innerText, document.documentElement.scrollWidth,
        images.filter(i => i.complete && !i.naturalWidth).map(i => i.src),
        [...document.querySelectorAll("article img")]
          .filter(i => i.getBoundingClientRect().right > innerWidth).map(i => i.src)]
"""


def test_all_kinds_of_pages_are_there():
    assert {"index.html", "scaler.html", "engine/flat.html", "api/scaler.html"} <= set(PAGES)
    assert any(page.startswith("tutorials/01") for page in PAGES)


def test_no_link_is_dead_and_nothing_comes_from_elsewhere(parsed):
    bad = []
    for page, found in parsed.items():
        bad += [f"{page} loads {url}" for url in found.loaded if urlsplit(url).netloc]
        for link in [*found.links, *found.loaded]:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            here = os.path.normpath(os.path.join(os.path.dirname(page), unquote(url.path)))
            target = here if url.path else page
            if not (SITE / target).exists():
                bad.append(f"{page} links to {link}")
            elif url.fragment and target in parsed and not link.startswith("#__"):
                if unquote(url.fragment) not in parsed[target].ids:
                    bad.append(f"{page} links to {link}: no such place there")
    assert not bad


def test_a_picture_opens_in_full_size(parsed):
    pages = [page for page in PAGES if "pictures/" in " ".join(parsed[page].loaded)]
    assert "index.html" in pages
    for page in pages:
        pictures = [url for url in parsed[page].loaded if "pictures/" in url]
        assert set(pictures) <= set(parsed[page].links), page


def test_the_reference_shows_what_stands_behind_parameters():
    text = (SITE / "api/callback.html").read_text(encoding="utf-8")
    assert 'id="learner.to_fp16"' in text and "the constant scale, or the initial one" in text
    assert "kwargs" not in text
    text = (SITE / "api/optimizer.html").read_text(encoding="utf-8")
    assert 'id="with_masters"' in text and "parameters in a few long vectors" in text


def test_every_page_is_readable_on_a_desk_and_on_a_phone(browser):
    bad = []
    widths = [1400, 400]
    for page in PAGES:
        browser.get((SITE / page).as_uri())
        widths.reverse()  # the next page begins as wide as this one ends: a layout less
        for width in widths:
            resize(browser, width)
            title, wide, missing, cut_off = browser.execute_script(LOOK)
            bad += [] if title else [f"{page}: no title"]
            bad += [f"{page} at {width}: {wide} pixels wide"] if wide > width else []
            bad += [f"{page} at {width}: {src} is cut off" for src in cut_off]
            bad += [f"{page}: {src} is not there" for src in missing]
        bad += [f"{page}: {entry['message']}" for entry in browser.get_log("browser")]
    assert not bad


def test_the_search_finds_a_method_of_the_reference(browser):
    resize(browser, 1400)
    browser.get((SITE / "index.html").as_uri())
    browser.find_element(By.CSS_SELECTOR, "input[name=query]").send_keys("to_fp16")
    found = (
        By.CSS_SELECTOR,
        ".md-search-result__link[href*='api/callback.html'][href$='#learner.to_fp16']",
    )
    WebDriverWait(browser, 20).until(lambda b: b.find_elements(*found))


QUERIES = ["gradient clipping", "huggingface", "torch.compile", "why not autocast"]


@pytest.mark.parametrize("query", QUERIES)
def test_the_search_finds_a_page_for_users_first(query, browser):
    resize(browser, 1400)
    browser.get((SITE / "index.html").as_uri())
    browser.find_element(By.CSS_SELECTOR, "input[name=query]").send_keys(query)
    links = (By.CSS_SELECTOR, ".md-search-result__link")
    WebDriverWait(browser, 20).until(lambda b: b.find_elements(*links))
    first = browser.find_element(*links).get_attribute("href").removeprefix(SITE.as_uri())
    assert first.startswith(("/index", "/tutorials/", "/guides/", "/trainers")), first


def test_the_search_excludes_internal_pages():
    found = json.loads((SITE / "search" / "search_index.json").read_text(encoding="utf-8"))
    pages = {place["location"].partition("#")[0] for place in found["docs"]}
    assert {"index.html", "api/callback.html", "scaler.html"} <= pages
    internal = "compare examples nested sharded testing".split()
    assert not [p for p in pages if p.startswith("engine") or p[:-5] in internal]


def test_the_first_page_is_short_on_a_phone(browser):
    resize(browser, 400)
    browser.get((SITE / "index.html").as_uri())
    assert browser.execute_script("return document.documentElement.scrollHeight") <= 5000
