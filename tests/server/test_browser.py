"""The page in a real headless Chromium: opened, used and misused as people do, with mouse and keyboard.

SAKIYOMI_SCREENSHOTS names a folder for pictures of every stage; SAKIYOMI_CHROMIUM the browser, if it has another name.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from browser import Tab, chromium, tab
from model_toys import SIZE, Shop
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.models import ModelTable, make_models_app
from sakiyomi.server.app import Server
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.schema import ChatRequest
from scripted import script
from server_toys import CHATML, listening, running, small_pdf, toy_llm

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; apt-get install chromium-headless-shell")
IDLE = "card !== null && under === null"
CONTRASTS = """window.contrasts = () => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((value) => value / 255);
  const light = (colour) => numbers(colour).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
  const probe = make("span", "", $("turns")), found = {};
  for (const kind of ["accepted d0", "accepted d1", "accepted d2", "accepted d3", "recovered", "bonus"]) {
    probe.className = `token ${kind}`;
    const {color, backgroundColor: back, borderBottomColor: line, borderStyle} = getComputedStyle(probe);
    found[kind] = [ratio(color, back), ratio(line, back), borderStyle];
  }
  probe.remove();
  return found;
}; void 0"""
# In place of the server's: one token, and then the reply breaks off, or, with a signal, waits to be aborted.
HALF = """window.real = fetch; window.half = (signal) => new Response(new ReadableStream({start(stream) {
  const stats = {tokens: 1, seconds: 0, rounds: 0, drafted: 0, acceptance_rate: 0, tau: 0};
  const trace = [{tokens: [{text: "Half", status: "plain", round: 0}], round: null, stats}];
  stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify({choices: [{trace}]})}\\n\\n`));
  if (signal) signal.onabort = () => stream.error(signal.reason); else stream.close();
}})); void 0"""
TOKENS = "[...[...document.querySelectorAll('.lanes')].at(-1).firstElementChild.querySelectorAll('.token')]"


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
    put(browser, max=12, temperature=0, gamma=3, view="written")
    yield browser
    assert [found for found in browser.problems if "status of 4" not in found] == []
    assert browser.run("document.cookie + sessionStorage.length") == "0"
    assert set(browser.run("Object.keys(localStorage)")) <= {"language", "theme", "settings", "keep"}
    browser.run("localStorage.clear(); window.store?.('readwrite', (place) => place.clear())")


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
    assert page.run("$('model').textContent").startswith("toy · drafted by draft model · context of ")
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
    assert page.run("chat.turns.length") == 2
    messages = page.run("JSON.parse(JSON.stringify(body(null, {})[1].messages.map((message) => message.role)))")
    assert messages == ["user", "assistant", "user"]
    page.click("#clear")
    assert page.run("chat.turns.length + document.querySelectorAll('#talk .token').length") == 0


def test_stop_ends_it_here_and_in_the_server(
    page: Tab, site: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = site[0].llm.engine
    step = engine.step
    # The text is not to be over, by itself or by a token that ends it, before a slow browser comes to its click.
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())
    monkeypatch.setattr(engine, "stop_ids", frozenset())
    put(page, max=3500, drafter="off")
    send(page, "Go on", wait=False)
    page.until("current && current.tokens > 3")
    page.click("#stop")
    page.until("under === null")
    shoot(page, "stopped")
    assert page.run("$('status').textContent").startswith("Stopped after ")
    assert 3 < page.run("current.tokens") < 3500
    end = time.monotonic() + 20
    while site[0].worker.load and time.monotonic() < end:  # the whole text would take a minute
        time.sleep(0.01)
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
    assert "out of range" in page.run("$('problem').textContent") and page.run("chat.turns.length") == 1


def test_the_draft_is_chosen_among_those_that_are_loaded(browser: Tab) -> None:
    with running(toy_llm("suffix+prompt-lookup")) as (_, url):
        browser.open(url)
        browser.until(IDLE)
        put(browser, max=60, temperature=0, gamma=3, view="written")
        offered = "[...$('drafter').options].map((option) => option.textContent)"
        assert browser.run(offered) == ["All: suffix+prompt-lookup", "Only suffix", "Only prompt-lookup", "None"]
        texts = []
        for choice in ("auto", "prompt-lookup", "suffix", "off"):
            put(browser, drafter=choice)
            browser.run("$('settings').dispatchEvent(new Event('change'))")
            send(browser, "A fox saw a fox saw a fox saw")
            texts.append(browser.run("current.text"))
            sources = set(browser.run("current.entries.filter((e) => e.status === 'accepted').map((e) => e.source)"))
            assert sources <= ({"prompt-lookup", "suffix"} if choice == "auto" else {choice})
            assert bool(sources) == (choice != "off")
            browser.click("#clear")
        assert len(set(texts)) == 1
        put(browser, drafter="suffix")
        browser.run("$('settings').dispatchEvent(new Event('change'))")
        browser.open(url)
        browser.until(IDLE)
        assert browser.run("$('drafter').value") == "suffix"
        browser.run("localStorage.clear()")


def test_a_model_is_chosen_and_loaded(browser: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two models, one of which has room: who is chosen is loaded, and writes; the other one has gone."""
    monkeypatch.setattr("sakiyomi.scale.models.likely_bytes", lambda model: SIZE)
    shop, config = Shop(), ServerConfig(max_body=1 << 20)
    table = ModelTable({name: LLMConfig(target=name) for name in ("first", "second")}, config, SIZE, shop.start)
    with listening(make_models_app(table, config), config) as url:
        browser.open(url)
        browser.until(IDLE)
        assert browser.run("card.id") == "first" and not browser.run("$('choice-box').hidden")
        put(browser, max=6, temperature=0)
        browser.run("$('choice').value = 'second'; $('choice').dispatchEvent(new Event('change'))")
        browser.until(IDLE)
        assert browser.run("$('model').textContent").startswith("second · no draft · context of ")
        send(browser, "A fox")
        assert browser.run("current.tokens") == 6 and shop.events == ["first", "second"]
        browser.until("$('slots').textContent !== ''")
        shoot(browser, "models")
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
        boxes = [node for node in tree if node["role"]["value"] == "combobox" and node["name"]["value"] == "Model"]
        assert [box["value"]["value"] for box in boxes] == ["second"]
        browser.size(320, 640, phone=True)
        assert browser.run("document.documentElement.scrollWidth") <= 320
        shoot(browser, "models-phone")
    browser.run("localStorage.clear(); store('readwrite', (place) => place.clear())")


def test_a_reply_that_breaks_off_stays_and_is_asked_for_again(page: Tab) -> None:
    put(page, max=5)
    page.run(HALF)
    page.run("void (window.fetch = async () => half())")
    send(page, "A whole one")
    assert "ended before the reply was complete" in page.run("$('problem').textContent")
    assert page.run("current.text + chat.turns.length") == "Half1"
    page.run("void (window.fetch = real)")
    page.click("#again")
    page.until("under === null && current.tokens === 5")
    assert page.run("chat.turns.length + document.querySelectorAll('.user').length") == 2


def test_a_race_ends_with_the_first_that_fails(page: Tab) -> None:
    page.run(HALF)
    page.run(
        "window.fetch = async (path, {body, signal}) => { if (!body.includes('off')) return half(signal);"
        " while (!current.tokens) await new Promise(requestAnimationFrame);"
        " return new Response('', {status: 500}); }; void 0"
    )
    put(page, race="once")
    send(page, "A race of one")
    assert "The server failed (500)" in page.run("$('problem').textContent")
    page.until("!current.box.classList.contains('busy')")
    assert page.run("current.text + chat.turns.length") == "Half1"


def test_clicks_and_keys_that_come_too_early_do_no_harm(page: Tab) -> None:
    page.run(HALF)
    page.run("void (window.fetch = async (path, {signal}) => half(signal))")
    page.click("#prompt")
    page.type("Twice")
    page.click("#send", times=2)
    page.until("current && current.tokens === 1")
    page.click("#prompt")
    page.type("The next one")
    page.press("Enter")
    assert page.run("under !== null && chat.turns.length === 1 && $('prompt').value === 'The next one'")
    page.press("Escape")
    page.until("under === null")
    assert page.run("$('status').textContent === 'Stopped after 1 tokens.' && $('prompt').value === 'The next one'")


def test_a_reader_who_scrolls_up_is_left_there(
    page: Tab, site: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site[0].llm.engine, "stop_ids", frozenset())
    put(page, max=3500)
    page.size(390, 600, phone=True)
    send(page, "Go on", wait=False)
    page.until("current && current.tokens > 250 && scrollY > 50", 120)
    page.run("new Promise((done) => { onscroll = done; scrollTo(0, 0); })")
    found = page.run("current.tokens")
    page.until(f"current.tokens > {found} + 100 || under === null", 120)
    assert page.run("scrollY") == 0
    page.run("under?.abort()")
    page.until("under === null")


def test_the_tree_is_drawn_without_overlaps_and_only_when_it_changes(page: Tab) -> None:
    send(page, "A fox")
    assert page.run("(() => { const svg = $('tree').firstChild; redraw(); return svg === $('tree').firstChild; })()")
    script = """(() => {
      for (let lap = 0; lap < 50; lap++) {
        const nodes = [{kids: []}];
        for (let i = 1; i < 60; i++) {
          const up = Math.floor(Math.random() * i);
          nodes.push({kids: [], up});
          nodes[up].kids.push(i);
        }
        const [width, height] = arrange(nodes);
        if (new Set(nodes.map((node) => `${node.x} ${node.y}`)).size !== 60) return "two share a place";
        for (const node of nodes) {
          if (node.x + WIDE / 2 > width || node.y + HIGH / 2 > height) return "outside";
          if (node.kids.length && nodes[node.kids[0]].x !== node.x) return "the first child is not below";
          if (node.kids.some((kid) => nodes[kid].y !== node.y + HIGH)) return "a child is not a row below";
        }
      }
      return "";
    })()"""
    assert page.run(script) == ""


def test_a_screen_reader_hears_two_things_of_a_reply(page: Tab) -> None:
    """That it begins, and then all of it; figures and tokens that change meanwhile are no live regions."""
    page.run("window.heard = []; void new MutationObserver(() => heard.push($('status').textContent))"
             ".observe($('status'), {childList: true})")  # fmt: skip
    send(page, "A fox")
    heard = page.run("heard")
    assert heard[0] == "The model is writing." and heard[-1].startswith("Done, 12 tokens: ") and len(heard) == 2
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    values = [
        {found["name"]: found["value"].get("value") for found in node.get("properties", ())}
        | {key: node.get(key, {}).get("value") for key in ("role", "name")}
        for node in nodes
        if not node["ignored"]
    ]
    assert [node["role"] for node in values if node.get("live") in ("polite", "assertive")] == ["status"]
    controls = [node for node in values if node.get("focusable") and node["role"] not in ("generic", "RootWebArea")]
    assert len(controls) > 12 and all(node["name"] for node in controls)
    assert {"banner", "main", "complementary", "log", "form"} <= {node["role"] for node in values}
    page.run("$('language').focus()")
    order = []
    for _ in range(27):
        page.press("Tab")
        order.append(page.run("document.activeElement.id || document.activeElement.className.split(' ')[0]"))
    shelf = ["new", "search", "", "drop", "export", "import", "keep"]
    start = ["theme", *shelf, "talk", "", "", "token", "", "", "prompt", "send", "attach", "clear", "tree"]
    assert order == [
        *start,
        "",
        "drafter",
        "gamma",
        "race",
        "temperature",
        "max",
        "seed",
        "system",
    ]


@pytest.mark.parametrize("race", ["once", "turn"])
def test_a_race_shows_both_and_judges(page: Tab, race: str) -> None:
    put(page, race=race, temperature=0.8, seed=7)
    if race == "once":
        put(page, seed="")  # then the page draws one for both
    send(page, "Two foxes")
    assert page.run("document.querySelectorAll('.lane').length") == 2
    verdict = page.run("document.querySelector('.verdict').textContent")
    assert verdict.endswith("Both wrote the same text.")
    assert verdict.startswith("Speculative decoding took" if race == "once" else "After the first token")
    shoot(page, f"race-{race}")
    if race == "once":
        return  # that text may end with its first token
    figures = page.run("[...document.querySelectorAll('.head span')].map((line) => line.textContent)")
    assert "12 tokens · 11 passes" in figures[1] and int(figures[0].split(" ")[3]) < 11
    assert page.run("current.seconds") > 0


def test_errors_say_what_to_do_and_lose_nothing(page: Tab) -> None:
    put(page, max=5000)
    send(page, "Too much")
    assert page.run("$('problem').textContent").startswith("The conversation and the new tokens do not fit")
    assert "max_tokens is 5000" in page.run("$('detail').textContent")
    assert page.run("$('prompt').value") == "Too much" and page.run("chat.turns.length") == 0
    shoot(page, "error")
    put(page, max=5)
    page.click("#again")
    page.until("under === null && chat.turns.length === 1")
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
        browser.until("$('problem').textContent.startsWith('The server does not know this key')")
        browser.run("void ($('key').value = '')")
        browser.click("#key")
        browser.type("open-sesame")
        browser.press("Enter")
        browser.until("card !== null && $('keyform').hidden && $('error').hidden")
        assert browser.run("$('race').disabled")  # there is no drafter
        assert browser.run("Object.keys(localStorage).length") == 0  # the key least of all


def test_dark_and_light_follow_the_system_or_the_choice(page: Tab) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.run(CONTRASTS)
    for theme in ("light", "dark"):
        page.dark(theme == "dark")
        # WCAG AA, for text and for the second mark of a colour.
        for kind, (text, line, _) in page.run("contrasts()").items():
            assert text >= 4.5 and line >= 3, (theme, kind, text, line)
        assert len({form for _, _, form in page.run("contrasts()").values()}) == 6  # each can be told without colours
    dark = page.run(ground)
    assert light != dark
    send(page, "Night")
    shoot(page, "dark")
    page.run("$('theme').value = 'light'; $('theme').dispatchEvent(new Event('change'))")
    assert page.run(ground) == light


def test_it_speaks_japanese_and_fits_a_phone(page: Tab, site: tuple[Server, str]) -> None:
    page.call("Emulation.setUserAgentOverride", userAgent="Chromium", acceptLanguage="ja-JP")
    try:
        page.size(320, 640, phone=True)
        page.open(f"{site[1]}/?ja")
        page.until(IDLE)
        assert page.run("document.documentElement.lang") == "ja" and page.run("$('send').textContent") == "送信"
        put(page, max=12, race="turn")
        send(page, "むかしむかし")
        assert page.run("document.documentElement.scrollWidth") <= 320
        small = (
            "[...document.querySelectorAll('button, select, input, textarea, summary, .jump')].filter((found) => {"
            "const {width, height} = found.getBoundingClientRect(); return height && Math.min(width, height) < 44; })"
        )
        assert page.run(f"{small}.map((found) => found.id)") == []
        shoot(page, "phone")
        page.run("$('language').value = 'en'; $('language').dispatchEvent(new Event('change'))")
        assert page.run("$('send').textContent") == "Send"
    finally:
        page.call("Emulation.setUserAgentOverride", userAgent="", acceptLanguage="en-US")


MARKDOWN = """<think>First, *think*.</think>## A title

Some **bold** words, `code`, [a link](https://example.org/) and 2*3*4.

- one
  - inner
1. first

> said

| a | b |
|---|---|
| 1 | `x|y` |

```python
def f():  # why
    return "s"
```
"""


def restore(page: Tab, reply: str, user: str = "Show") -> None:
    """A conversation of one turn, as it would be read from the browser's store, with tokens of five characters."""
    entries = [
        {"text": reply[i : i + 5], "status": "accepted" if i % 2 else "plain", "source": "model", "round": i}
        for i in range(0, len(reply), 5)
    ]
    turn = {"user": user, "reply": reply, "entries": entries}
    page.run(
        f"(async () => {{ const one = {{...fresh(), title: {json.dumps(user)}, turns: [turnOf({json.dumps(turn)})]}};"
        " await keep(one); $('view').value = 'formatted'; enter(one); })()"
    )


def test_markdown_is_formatted_and_every_token_keeps_its_origin(page: Tab) -> None:
    restore(page, MARKDOWN)
    names = ["details", "h4", "strong", "p code", "li li", "ol li", "blockquote", "td code", "pre"]
    names += [".c-word", ".c-comment", ".c-string"]
    texts = "document.querySelector('.reply ' + name)?.textContent"
    found = page.run(f"Object.fromEntries({names}.map((name) => [name, {texts}]))")
    assert found == {
        "details": "ThoughtsFirst, *think*.", "h4": "A title", "strong": "bold", "p code": "code", "li li": "inner",
        "ol li": "first", "blockquote": "said", "td code": "x|y", "pre": 'def f():  # why\n    return "s"\n',
        ".c-word": found[".c-word"], ".c-comment": found[".c-comment"], ".c-string": found[".c-string"],
    }  # fmt: skip
    assert found[".c-word"] and found[".c-comment"] and found[".c-string"]
    assert page.run("document.querySelector('.reply a').rel") == "noopener noreferrer"
    shown = "[...document.querySelectorAll('.reply .token')]"
    assert page.run(f"{shown}.every((token) => about.get(token).token.text.includes(token.textContent))")
    assert len(set(page.run(f"{shown}.map((token) => token.classList[1])"))) == 2
    shoot(page, "markdown")
    page.run("$('view').value = 'written'; $('view').dispatchEvent(new Event('change'))")
    assert page.run("document.querySelector('.reply').textContent") == MARKDOWN
    assert page.run("current === null && chat.turns[0].reply.replace(THOUGHT, '').startsWith('## A title')")


def test_blocks_that_are_done_are_not_made_again(page: Tab) -> None:
    """While a text is written only its last blocks change, and the outcome is that of the whole text."""
    script = f"""(() => {{
      const text = {json.dumps(MARKDOWN)}, lane = new Lane($("turns"), ""), whole = new Lane($("turns"), "");
      $("view").value = "formatted";
      let kept = null, made = 0;
      for (let i = 0; i < text.length; i += 3) {{
        lane.take({{text: text.slice(i, i + 3), status: "plain", round: i}});
        whole.take({{text: text.slice(i, i + 3), status: "plain", round: i}});
        lane.write();
        const title = lane.body.children[1];
        if (i > 100 && title !== kept) {{ kept = title; made++; }}
      }}
      whole.write();
      return [made, lane.body.textContent === whole.body.textContent, lane.body.children.length];
    }})()"""
    assert page.run(script) == [1, True, 7]


def test_conversations_are_kept_found_and_deleted(page: Tab, site: tuple[Server, str]) -> None:
    send(page, "A fox")
    words = page.run("chat.turns[0].reply")
    page.click("#new")
    send(page, "An owl")
    titles = "[...document.querySelectorAll('#chats li button:first-child')].map((each) => each.textContent)"
    assert page.run(titles) == ["An owl", "A fox"]
    page.open(f"{site[1]}/?again")
    page.until(IDLE)
    page.until(f"{titles}.length === 2")
    page.run("document.querySelectorAll('#chats li button')[2].click()")
    assert page.run("document.querySelector('.reply').textContent") == words
    kinds = page.run("[...document.querySelectorAll('.reply .token')].map((token) => token.classList[1])")
    assert "accepted" in kinds  # colours and probabilities are kept, too
    put(page, max=12, temperature=0)
    send(page, "And then?")
    assert (
        page.run("JSON.stringify(body(null, {})[1].messages.map((each) => each.role))") == '["user","assistant","user"]'
    )
    page.run("$('search').value = 'owl'; $('search').dispatchEvent(new Event('input'))")
    assert page.run(titles) == ["An owl"]
    page.run("window.confirm = () => true; document.querySelector('#chats .drop').click()")
    page.until("chats.size === 1")
    page.run("$('search').value = ''; $('search').dispatchEvent(new Event('input'))")
    assert page.run(titles) == ["A fox"]
    page.run("$('keep').click()")
    assert (
        page.run("new Promise((done) => setTimeout(done, 50)).then(() => store('readonly', (place) => place.count()))")
        == 0
    )
    page.run("$('keep').click()")
    page.until("store('readonly', (place) => place.count()).then((count) => count === 1)")


def test_conversations_go_out_and_come_back(page: Tab) -> None:
    restore(page, "A **reply**", user="Kept")
    page.run("window.given = ''; download = (name, kind, words) => { given = words; }; give()")
    page.run("window.confirm = () => true; document.querySelector('#chats .drop').click()")
    page.until("chats.size === 0")
    page.run("takeIn(new File([given], 'kept.json'))")
    assert page.run("[...chats.values()].map((one) => one.turns[0].reply)") == ["A **reply**"]
    for wrong in ("{", "[]", '{"form": "sakiyomi-conversations", "conversations": [{"id": 1}]}'):
        page.run(f"takeIn(new File([{json.dumps(wrong)}], 'wrong.json'))")
        assert page.run("$('problem').textContent").startswith("wrong.json holds no conversations")
    assert page.run("chats.size") == 1


def test_messages_are_edited_and_replies_made_again(page: Tab) -> None:
    send(page, "One")
    send(page, "Two")
    page.run("document.querySelectorAll('.user .acts button')[0].click()")
    page.run("document.querySelector('.edit textarea').select()")
    page.type("Three")
    page.press("Enter")
    page.until("under === null && chat.turns.length === 1")
    assert page.run("chat.turns[0].user + document.querySelectorAll('.user').length") == "Three1"
    first = page.run("chat.turns[0].reply")
    page.run("document.querySelector('#turns > .acts button').click()")
    page.until("under === null")
    assert page.run("chat.turns.length") == 1 and page.run("chat.turns[0].reply") == first  # greedy: the same
    send(page, "Four")
    page.run("window.real = fetch; window.fetch = () => Promise.reject(new TypeError('gone'))")
    page.run("document.querySelectorAll('.user .acts button')[0].click()")
    page.press("Enter")
    page.until("under === null && !$('error').hidden")
    page.run("window.fetch = real; void 0")
    # Nothing came of it: what was there is there again.
    assert page.run("chat.turns.map((turn) => turn.user)") == ["Three", "Four"]
    assert page.run("[...document.querySelectorAll('.user > p')].map((each) => each.textContent)") == ["Three", "Four"]


def test_files_go_with_a_message(page: Tab) -> None:
    page.run("attach(new File(['red and blue'], 'colours.txt', {type: 'text/plain'}))")
    pdf = base64.b64encode(small_pdf("Words of a PDF")).decode()
    data = f"Uint8Array.from(atob('{pdf}'), (each) => each.charCodeAt(0))"
    page.run(f"attach(new File([{data}], 'a.pdf', {{type: 'application/pdf'}}))")
    assert page.run("attached.map((file) => file.text.trim())") == ["red and blue", "Words of a PDF"]
    page.run("attach(new File([new Uint8Array([0, 255, 254])], 'noise.bin'))")
    assert page.run("$('problem').textContent") == "noise.bin cannot be read as text."
    page.run("attach(new File(['x'], 'cat.png', {type: 'image/png'}))")
    assert page.run("$('problem').textContent").startswith("toy reads no images")
    page.run("attach(new File(['%PDF-1.4 broken'], 'b.pdf'))")
    assert "this PDF cannot be read" in page.run("$('detail').textContent")
    assert page.run("document.querySelectorAll('#files li').length") == 2
    page.run("document.querySelectorAll('#files button')[1].click()")
    send(page, "Which colours?")
    assert page.run("attached.length") == 0
    said = page.run("body(null, {})[1].messages[0].content")
    assert said == "colours.txt:\nred and blue\n\nWhich colours?"
    shoot(page, "files")


def test_samplers_and_system_prompt_are_sent(page: Tab, site: tuple[Server, str]) -> None:
    put(page, system="Be brief.", top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, stops="END", temperature=0.5)  # fmt: skip
    send(page, "A fox")
    asked = json.loads(page.run("JSON.stringify(body(3, {})[1])"))
    wanted = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
              "frequency_penalty": 0.3, "stop": ["END"], "temperature": 0.5, "seed": 3}  # fmt: skip
    assert wanted.items() <= asked.items()
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert page.run("$('context-text').textContent").endswith("of 4,096 tokens of the context")
    page.until("$('slots').textContent === '0 running, 0 waiting'")
    command = page.run("asCode('curl')")
    found = json.loads(subprocess.run([*shlex.split(command), "-s"], capture_output=True, check=True).stdout)
    assert found["choices"][0]["message"]["role"] == "assistant"
    compile(page.run("asCode('python')"), "copied", "exec")
    put(page, drafter="off")
    page.run("$('settings').dispatchEvent(new Event('change'))")
    assert page.run("$('idle').textContent").startswith("Nothing is drafted: the draft is switched off")
    page.open(f"{site[1]}/?settings")
    page.until(IDLE)
    assert page.run("$('top_k').value + $('stops').value") == "5END"  # settings stay in the browser
    page.run("$('defaults').click()")
    assert page.run("$('top_k').value + $('stops').value + $('drafter').value") == "0auto"


def test_the_list_is_a_drawer_on_a_phone(page: Tab, site: tuple[Server, str]) -> None:
    page.size(390, 800, phone=True)
    page.open(f"{site[1]}/?phone")
    page.until(IDLE)
    assert page.run("$('shelf').hidden")
    page.click("#shelf-toggle")
    assert page.run("document.activeElement.id") == "search"
    shoot(page, "drawer")
    page.press("Escape")
    assert page.run("$('shelf').hidden && document.activeElement.id === 'shelf-toggle'")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = [{"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip


@pytest.fixture
def caller(page: Tab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tab]:
    """The page of a model that thinks, calls a tool if there is one, and says what it was told."""

    def said(body: ChatRequest) -> str:
        results = [str(message.content) for message in body.messages if message.role == "tool"]
        if body.tools and not results:
            return f"<think>\nI need the weather.\n</think>\n\nLet me **see**.\n{CALL}"
        return f"<think>\nEasy.\n</think>\n\nIt is {results[-1] if results else 'late'}."

    script(monkeypatch, said, 0)
    with running(toy_llm("none", template=CHATML + "{# <think></think> #}")) as (_, url):
        page.open(f"{url}/")
        page.until(IDLE)
        put(page, max=300, temperature=0, view="formatted")
        yield page


def summaries(page: Tab, where: str = "#turns") -> list[str]:
    return page.run(f"[...document.querySelectorAll('{where} summary')].map((each) => each.textContent)")


def test_calls_and_thoughts_are_folded_and_a_result_continues_the_turn(caller: Tab) -> None:
    page = caller
    put(page, tools=json.dumps(WEATHER))
    send(page, "How is it?")
    thought, call = summaries(page)
    assert thought.startswith("Thought for ") and call == "weather(city=Paris)"
    assert page.run("[...document.querySelectorAll('#turns details')].some((each) => each.open)") is False
    assert page.run("document.querySelector('.reply p strong').textContent") == "see"
    assert "tool_call" not in page.run(
        "[...document.querySelectorAll('.reply > p')].map((each) => each.textContent)[0]"
    )
    assert page.run("$('status').textContent") == "The model calls weather(city=Paris) and waits for the result."
    # The field of the result has the focus and a label.
    assert page.run("document.activeElement.labels[0].textContent") == "Result of weather(city=Paris)"
    shoot(page, "call")
    page.type("sunny")
    page.press("Enter")
    page.until("under === null && chat.turns.length === 2")
    assert page.run("chat.turns[1].parts.filter((part) => part.kind === 'text').length") == 1
    assert page.run("[...document.querySelectorAll('.reply')].at(-1).lastElementChild.textContent") == "It is sunny."
    assert page.run("document.querySelectorAll('form.results').length") == 0
    roles = page.run("body(null, {})[1].messages.map((each) => each.role)")
    assert roles == ["user", "assistant", "tool"]
    sent = page.run("body(null, {})[1].messages[1]")
    assert sent["content"].strip() == "Let me **see**." and sent["reasoning_content"].strip() == "I need the weather."
    assert sent["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    # By keyboard: a summary opens with Enter, and stays open.
    page.run("[...document.querySelectorAll('#turns .call summary')][0].focus()")
    page.press("Enter")
    assert page.run("document.querySelector('.call').open") is True
    assert json.loads(page.run("document.querySelector('.call pre').textContent")) == {"city": "Paris"}
    shoot(page, "result")
    before = summaries(page)
    assert before[2] == "weather(city=Paris) → sunny"
    page.run("enter(chat)")  # as when it is read from the browser's store
    assert summaries(page) == before
    tokens = page.run("document.querySelectorAll('.call .token').length")
    assert tokens > 5  # the call's tokens have their colours, too


def test_a_message_in_place_of_a_result_says_so_to_the_model(caller: Tab) -> None:
    page = caller
    put(page, tools=json.dumps(WEATHER))
    send(page, "How is it?")
    send(page, "Never mind")
    sent = page.run("body(null, {})[1].messages.map((each) => [each.role, each.content])")
    assert sent[2:4] == [["tool", "The user gave no result."], ["user", "Never mind"]]
    assert page.run("document.querySelectorAll('form.results').length") == 0


def test_thoughts_are_open_while_they_are_written(caller: Tab) -> None:
    """And are folded then, unless the reader has opened them."""
    script_ = """(() => {
      const lane = new Lane($("turns"), ""), seen = [];
      const add = (text, delta) => { lane.take({text, status: "plain", round: 0}); lane.sort(delta); lane.write(); };
      const box = () => lane.body.querySelector("details");
      add("<think>Hm", {reasoning_content: "Hm"});
      seen.push([box().open, box().querySelector("summary").textContent]);
      add(", yes.</think>So", {reasoning_content: ", yes.", content: "So"});
      seen.push([box().open, box().querySelector("p").textContent]);
      box().firstElementChild.click();
      add(" it is.", {content: " it is."});
      seen.push([box().open, lane.body.lastElementChild.textContent]);
      lane.tools = true;
      add('<tool_call>{"name": "weather"', {});
      seen.push([lane.body.lastElementChild.open, lane.body.lastElementChild.firstElementChild.textContent]);
      return seen;
    })()"""
    assert caller.run(script_) == [
        [True, "Thinking …"], [False, "Hm, yes."], [True, "So it is."], [True, "Writing a call …"],
    ]  # fmt: skip


def test_tools_that_are_none_are_said_before_anything_is_sent(caller: Tab) -> None:
    page = caller
    for wrong in ("{", "[1]", '{"name": "weather"}'):
        put(page, tools=wrong)
        send(page, "Hello")
        assert page.run("$('problem').textContent").startswith("The tools are no JSON list of functions")
        assert page.run("document.activeElement.id") == "tools" and page.run("chat.turns.length") == 0
    put(page, tools="")
    send(page, "Hello")
    assert "tools" not in page.run("body(null, {})[1]") and summaries(page)[0].startswith("Thought for")
