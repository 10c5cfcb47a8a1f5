"""The page in a real headless Chromium: opened, used and misused as people do, with mouse and keyboard.

SAKIYOMI_SCREENSHOTS names a folder for pictures of every stage; SAKIYOMI_CHROMIUM the browser, if it has another name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from browser import Tab, chromium, tab
from sakiyomi.server.app import Server
from server_toys import running, toy_llm

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; apt-get install chromium-headless-shell")
IDLE = "card !== null && under === null"
TOKENS = "[...document.querySelectorAll('.lanes:last-of-type .lane:first-child .token')]"


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Server, str]]:
    with running(toy_llm(max_batch=4)) as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    assert PROGRAM is not None
    with tab(PROGRAM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(site: tuple[Server, str], browser: Tab) -> Iterator[Tab]:
    """A fresh page with few tokens, and at the end: nothing was complained of, nothing was kept."""
    browser.problems.clear()
    browser.size(1280, 860)
    browser.dark(False)
    browser.open(f"{site[1]}/")
    browser.until(IDLE)
    put(browser, max=12, temperature=0, gamma=3)
    yield browser
    assert [found for found in browser.problems if "status of 4" not in found] == []
    assert browser.run("document.cookie + sessionStorage.length + Object.keys(localStorage)") in (
        "0",
        "0language",
        "0theme",
    )
    browser.run("localStorage.clear()")


def put(page: Tab, **values: object) -> None:
    for name, value in values.items():
        page.run(f"void ($('{name}').value = '{value}')")


def send(page: Tab, message: str, *, wait: bool = True) -> None:
    page.click("#prompt")
    page.type(message)
    page.press("Enter")
    if wait:
        page.until("under === null", 120)


def shoot(page: Tab, name: str) -> None:
    if folder := os.environ.get("SAKIYOMI_SCREENSHOTS"):
        page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.picture(Path(folder) / f"{name}.png")


def test_it_opens_with_the_model_and_runs_no_foreign_script(page: Tab) -> None:
    assert page.run("$('model').textContent").startswith("toy · drafter: model")
    shoot(page, "open")
    broken = (
        "new Promise((done) => { document.addEventListener('securitypolicyviolation',"
        " (event) => done(event.effectiveDirective), {once: true}); void (%s); })"
    )
    script = (
        "(() => { const own = document.createElement('script');"
        " own.append('stolen = 1'); document.body.append(own); })()"
    )
    assert page.run(broken % script) in ("script-src-elem", "require-trusted-types-for")
    assert page.run("typeof stolen") == "undefined"
    assert page.run(broken % "fetch('http://127.0.0.2:9/').catch(() => 0)") == "connect-src"
    page.problems.clear()  # it told of them, as it should


@pytest.mark.alone
def test_its_first_paint_comes_within_a_second(page: Tab, site: tuple[Server, str]) -> None:
    """The best of five. Where others keep the machine from painting two words in time, three times as long as those."""
    script = "performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)[0]"
    found: dict[str, list[float]] = {"": [], "health": []}
    for lap in range(5):
        for path, paints in found.items():
            page.open(f"{site[1]}/{path}?{lap}")
            paints.append(page.until(script))
    print("first contentful paint, ms:", found)
    assert min(found[""]) <= max(1000, 3 * min(found["health"]))
    page.problems.clear()  # /health has no icon


def test_a_reply_comes_with_the_origin_of_every_token(page: Tab, site: tuple[Server, str]) -> None:
    send(page, "Once upon a time")
    asked = {"model": "toy", "messages": [{"role": "user", "content": "Once upon a time"}], "temperature": 0}
    asked |= {"max_tokens": 12, "trace": True, "speculation": {"gamma": 3}}
    wanted = httpx.post(f"{site[1]}/v1/chat/completions", json=asked, timeout=60).json()["choices"][0]
    trace = [token for entry in wanted["trace"] for token in entry["tokens"]]
    assert page.run(f"{TOKENS}.map((token) => token.textContent).join('')") == wanted["message"]["content"]
    kinds = page.run(f"{TOKENS}.map((token) => token.className.split(' ')[1])")
    assert kinds == [token["status"] for token in trace] and len(set(kinds)) > 2
    last = wanted["trace"][-1]["stats"]
    assert float(page.run("$('tau').textContent")) == pytest.approx(last["tau"], rel=0.01)
    assert page.run("$('tokens').textContent") == str(len(trace)) and page.run("$('rounds').textContent") == str(
        last["rounds"]
    )
    assert page.run("$('status').textContent").startswith("Done, 12 tokens: ")
    drawn = [entry["round"] for entry in wanted["trace"] if entry["round"] and entry["round"]["tokens"]][-1]
    label = page.run("$('tree').querySelector('svg').getAttribute('aria-label')")
    assert f"{len(drawn['tokens'])} proposed, {len(drawn['path'])} accepted" in label
    assert page.run("document.activeElement.id") == "prompt"
    # The keyboard: from the first token to the second, which says what it is.
    page.run(f"{TOKENS}[0].focus()")
    page.press("ArrowRight")
    assert page.run(f"document.activeElement === {TOKENS}[1]")
    told = page.run("$('tip').hidden ? '' : $('tip').textContent")
    assert trace[1]["source"] in told and f"round {trace[1]['round']}" in told
    assert f"p {trace[1]['target_prob']:.3g}" in told
    shoot(page, "reply")
    page.size(390, 800, phone=True)
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.run("$('tip').hidden || $('tip').getBoundingClientRect().right <= 390")
    page.size(1280, 860)
    page.press("Escape")
    assert page.run("$('tip').hidden")


def test_the_next_turn_knows_the_first(page: Tab, site: tuple[Server, str]) -> None:
    send(page, "One")
    send(page, "Two")
    assert page.run("turns.length") == 2
    messages = page.run("JSON.parse(JSON.stringify(body(null, {})[1].messages.map((message) => message.role)))")
    assert messages == ["user", "assistant", "user"]
    page.click("#clear")
    assert page.run("turns.length + document.querySelectorAll('#talk .token').length") == 0


def test_stop_ends_it_here_and_in_the_server(page: Tab, site: tuple[Server, str]) -> None:
    put(page, max=3500, drafter="off")
    send(page, "Go on", wait=False)
    # In one step: where the browser gets little time, the text is over before a click of the mouse arrives.
    page.until("current && current.tokens > 3 && under !== null && ($('stop').click(), true)")
    page.until("under === null")
    shoot(page, "stopped")
    assert page.run("$('status').textContent").startswith("Stopped after ")
    assert 3 < page.run("current.tokens") < 3500
    page.until("fetch('/health').then(() => true)")
    assert site[0].worker.load == 0


def test_settings_are_what_is_asked_for(page: Tab) -> None:
    put(page, drafter="off")
    send(page, "A fox")
    assert set(page.run(f"{TOKENS}.map((token) => token.className)")) == {"token plain"}
    plain = page.run("current.text")
    page.click("#clear")
    put(page, drafter="auto", gamma=2)
    send(page, "A fox")
    assert page.run("current.text") == plain
    assert page.run("Math.max(...[...current.rounds.values()].map((round) => round.tokens.length))") == 2
    put(page, temperature=5)
    send(page, "A fox")
    assert "out of its bounds" in page.run("$('problem').textContent") and page.run("turns.length") == 1


@pytest.mark.parametrize("race", ["once", "turn"])
def test_a_race_shows_both_and_judges(page: Tab, race: str) -> None:
    put(page, race=race, temperature=0.8, seed=7)
    if race == "once":
        put(page, seed="")  # then the page draws one for both
    send(page, "Two foxes")
    assert page.run("document.querySelectorAll('.lane').length") == 2
    verdict = page.run("document.querySelector('.verdict').textContent")
    assert verdict.endswith("Both wrote the same text.")
    assert verdict.startswith("Reading ahead took" if race == "once" else "After the first token")
    shoot(page, f"race-{race}")
    if race == "once":
        return  # that text may end with its first token
    figures = page.run("[...document.querySelectorAll('.lane h3 span')].map((line) => line.textContent)")
    assert "12 tokens · 11 passes" in figures[1] and int(figures[0].split(" ")[3]) < 11
    assert page.run("current.seconds") > 0


def test_errors_say_what_to_do_and_lose_nothing(page: Tab) -> None:
    put(page, max=5000)
    send(page, "Too much")
    assert page.run("$('problem').textContent").startswith("The conversation and the new tokens do not fit")
    assert "max_completion_tokens is 5000" in page.run("$('detail').textContent")
    assert page.run("$('prompt').value") == "Too much" and page.run("turns.length") == 0
    shoot(page, "error")
    put(page, max=5)
    page.click("#again")
    page.until("under === null && turns.length === 1")
    assert page.run("$('error').hidden")
    page.run("void (window.fetch = () => Promise.reject(new TypeError('gone')))")
    send(page, "Nobody there")
    assert "cannot be reached" in page.run("$('problem').textContent")


def test_a_key_is_asked_for(browser: Tab) -> None:
    with running(toy_llm("none"), api_key="open sesame".replace(" ", "-")) as (_, url):
        browser.size(1280, 860)
        browser.open(f"{url}/")
        browser.until("!$('keyform').hidden")
        assert "asks for an API key" in browser.run("$('problem').textContent")
        browser.type("wrong")
        browser.press("Enter")
        browser.until("key === 'wrong' && !$('error').hidden")
        browser.run("void ($('key').value = '')")
        browser.click("#key")
        browser.type("open-sesame")
        browser.press("Enter")
        browser.until("card !== null && $('keyform').hidden && $('error').hidden")
        assert browser.run("$('race').disabled")  # there is no drafter
        assert browser.run("Object.keys(localStorage).length") == 0


def test_dark_and_light_follow_the_system_or_the_choice(page: Tab) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.dark(True)
    dark = page.run(ground)
    assert light != dark
    send(page, "Night")
    shoot(page, "dark")
    page.run("$('theme').value = 'light'; $('theme').dispatchEvent(new Event('change'))")
    assert page.run(ground) == light


def test_it_speaks_japanese_and_fits_a_phone(page: Tab, site: tuple[Server, str]) -> None:
    page.call("Emulation.setUserAgentOverride", userAgent="Chromium", acceptLanguage="ja-JP")
    try:
        page.size(390, 800, phone=True)
        page.open(f"{site[1]}/?ja")
        page.until(IDLE)
        assert page.run("document.documentElement.lang") == "ja" and page.run("$('send').textContent") == "送信"
        put(page, max=12, race="turn")
        send(page, "むかしむかし")
        assert page.run("document.documentElement.scrollWidth") <= 390
        shoot(page, "phone")
        page.run("$('language').value = 'en'; $('language').dispatchEvent(new Event('change'))")
        assert page.run("$('send').textContent") == "Send"
    finally:
        page.call("Emulation.setUserAgentOverride", userAgent="", acceptLanguage="en-US")
