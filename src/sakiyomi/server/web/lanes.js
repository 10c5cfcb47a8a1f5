// One reply: its tokens, where each of them comes from, and what its rounds looked like.

const drafters = new Map();  // name -> colour
// A drafter as people know it: a draft model by its own name.
const named = (drafter) => drafter?.replace(/\bmodel\b/, card?.draft ?? text("draftModel"));
const origin = (token) => token.status === "accepted" ? `accepted ${token.source}` : token.status;
const about = new WeakMap();  // element of a token -> {token, lane, at}
const style = (token) => token.status === "accepted" ? `accepted d${drafters.get(token.source) % 4}` : token.status;
const sourced = ({status, source}) => text(status, {source: named(source)});

class Lane {
  static of = new WeakMap();  // by its element
  constructor(parent, title) {
    const box = make("div", "lane", parent), head = make("div", "head", box);
    const heading = make("h3", title ? "" : "hidden-text", head);
    say(heading, title || "replyTitle");
    this.line = make("span", "", head);
    if (title) this.bar = Object.assign(make("progress", "", box), {max: $("max").value, value: 0, ariaHidden: "true"});
    this.body = make("div", "reply", box);
    this.box = box;
    Lane.of.set(box, this);
    this.body.setAttribute("role", "group");
    this.body.dataset.l = "reply";
    this.body.setAttribute("aria-label", text("reply"));
    // For each token: its entry, its place in the text, its element (none where Markdown shows nothing of it).
    Object.assign(this, {text: "", tokens: 0, entries: [], places: [], elements: [], blocks: []});
    // Thoughts, calls and text, as places in the whole; how far it is sorted; boxes that the reader has opened or closed.
    Object.assign(this, {parts: [], calls: [], sorted: 0, folds: new Map()});
    Object.assign(this, {begun: performance.now(), first: 0, start: null, stats: null, usage: null, rounds: new Map(), counts: new Map(), before: "…", plain: 0});
  }
  // After the first token, by the server's clock: events may reach a busy page several at once.
  get seconds() { return this.start ? this.stats.seconds - this.start.seconds : 0; }
  get speed() { return this.seconds > 0 ? (this.stats.tokens - this.start.tokens) / this.seconds : null; }
  take(token) {
    if (token.status === "accepted" && !drafters.has(token.source)) drafters.set(token.source, drafters.size);
    this.entries.push(token);
    this.places.push(this.text.length);
    this.counts.set(origin(token), (this.counts.get(origin(token)) ?? 0) + 1);
    this.text += token.text;
    this.tokens += 1;
    if (token.text) this.before = token.text;
  }
  add(entry) {
    this.first ||= performance.now();
    this.start ??= entry.stats;
    for (const {status, source} of entry.tokens) if (status === "accepted" && !drafters.has(source)) drafters.set(source, drafters.size);
    const drafted = entry.round?.tokens.length;
    this.plain = drafted ? 0 : this.plain + entry.tokens.length;  // tokens since the last draft
    if (drafted) {
      this.shown = {...entry.round, before: this.before, last: entry.tokens.at(-1), styles: entry.tokens.map(style)};
      this.rounds.set(entry.round.round, this.shown);
    }
    for (const token of entry.tokens) this.take(token);
    this.stats = entry.stats;
  }
  // The server separates thoughts, text and calls: its pieces are found again in the text of the tokens.
  sort({reasoning_content: thoughts, content, tool_calls: calls = []}) {
    for (const [kind, piece] of [["think", thoughts], ["text", content]]) {
      if (!piece) continue;
      const found = this.text.lastIndexOf(piece), from = found < this.sorted ? this.sorted : found, last = this.parts.at(-1);
      const to = Math.min(this.text.length, from + piece.length);
      if (last?.kind === kind) last.to = to; else { this.close(); this.parts.push({kind, from, to, ...(kind === "think" && {open: true, begun: performance.now()})}); }
      this.sorted = to;
    }
    for (const {index, ...call} of calls) {
      this.close();
      this.calls.push(call);
      this.parts.push({kind: "call", from: this.sorted, to: this.text.length, call});
      this.sorted = this.text.length;
    }
  }
  close() {  // thoughts, with their time
    const last = this.parts.at(-1);
    if (last?.open) this.parts.splice(-1, 1, {kind: "think", from: last.from, to: last.to, seconds: Math.max(0.1, Math.round((performance.now() - last.begun) / 100) / 10)});
  }
  // With what is not sorted yet: a long piece is a call that is being written.
  get layout() {
    const rest = this.text.length - this.sorted, last = this.parts.at(-1);
    if (!rest || this.reason) return this.parts;
    if (this.tools && rest > 16 && !last?.open) return [...this.parts, {kind: "call", from: this.sorted, to: this.text.length, open: true}];
    if (last && last.kind !== "call") return [...this.parts.slice(0, -1), {...last, to: this.text.length}];
    return [...this.parts, {kind: "text", from: this.sorted, to: this.text.length}];
  }
  said(kind) { return this.parts.filter((part) => part.kind === kind).map(({from, to}) => this.text.slice(from, to)).join(""); }
  // Blocks that are as they were keep their elements: while a text is written it is the last ones that change.
  write() {
    const formatted = $("view").value === "formatted", found = formatted ? blocks(this.text, this.layout) : plainBlocks(this.text);
    const same = (a, b) => a && a.kind === b.kind && a.from === b.from && a.to === b.to && a.open === b.open;
    let kept = 0;
    while (kept < found.length && same(this.blocks[kept], found[kept]) && (found[kept].to < this.text.length || this.drawn === this.tokens)) kept++;
    if (this.drawn === this.tokens && kept === found.length && kept === this.blocks.length) return;
    const last = this.blocks[kept], next = found[kept];
    if (next?.kind === "plain" && last?.kind === "plain" && last.from === next.from && kept === found.length - 1 && kept === this.blocks.length - 1) {
      const line = this.body.lastElementChild;  // a long one grows at its end alone
      while (line.lastElementChild && !line.lastElementChild.textContent) line.lastElementChild.remove();  // parts of a character: once more
      this.put(line, last.to, next.to, "");
      Object.assign(this, {blocks: found, drawn: this.tokens});
      return;
    }
    const focus = about.get(document.activeElement), at = document.activeElement?.parentElement?.dataset.at;
    while (this.body.children.length > kept) this.body.lastElementChild.remove();
    for (const each of found.slice(kept)) this.body.append(block(each, this.text, (parent, from, to, classes = "") => this.put(parent, from, to, classes)));
    if (!found.length && this.tokens) this.put(make("p", "", this.body), 0, 0, "");
    for (const box of [...this.body.querySelectorAll("details")].slice(-8)) {
      const chosen = this.folds.get(box.dataset.at);
      if (chosen !== undefined) box.open = chosen;
      box.firstElementChild.onclick = () => { this.folds.set(box.dataset.at, !box.open); };
      if (box.dataset.at === at && document.activeElement === document.body) box.firstElementChild.focus();
    }
    this.blocks = found;
    this.drawn = this.tokens;
    this.elements.find(Boolean)?.setAttribute("tabindex", "0");
    if (focus?.lane === this && !document.activeElement?.classList.contains("token")) this.elements[focus.at]?.focus();
  }
  put(parent, from, to, classes) {
    if (!this.tokens) { parent.append(this.text.slice(from, to)); return; }
    let low = 0, high = this.tokens - 1;  // the last token that begins at or before this place
    while (low < high) { const middle = (low + high + 1) >> 1; if (this.places[middle] <= from) low = middle; else high = middle - 1; }
    while (low > 0 && this.places[low - 1] === from) low--;  // of several without a text, the first
    for (let at = low; at < this.tokens; at++) {
      const start = this.places[at], end = this.places[at + 1] ?? this.text.length;
      if (start > to || (start === to && (end > start || to < this.text.length))) break;
      if (end <= from && end > start) continue;
      const token = this.entries[at], element = make("span", `token ${style(token)} ${classes}`.trim(), parent);
      element.textContent = this.text.slice(Math.max(start, from), Math.min(end, to));
      element.tabIndex = -1;
      about.set(element, {token, lane: this, at});
      this.elements[at] = element;
    }
  }
  async run(path, body, signal) {
    Object.assign(this, {begun: performance.now(), tools: Boolean(body.tools)});
    this.box.classList.add("busy");
    say(this.line, "waits");
    try {
      for await (const event of events(await ask(path, {method: "POST", body: JSON.stringify(body), signal}))) {
        if (event.usage) this.usage = event.usage;
        const choice = event.choices[0];
        if (!choice) continue;
        for (const entry of choice.trace ?? []) this.add(entry);
        this.sort(choice.delta ?? {content: choice.text});
        if (choice.finish_reason) { this.reason = choice.finish_reason; this.close(); }
        soon(this);
      }
      if (this.bar) this.bar.value = this.bar.max;
    } finally { this.close(); this.reason ||= "stopped"; this.box.classList.remove("busy"); soon(this); }
  }
}

// ------------------------------------------------------------ what is drawn

let current = null, waiting = 0, drawn = null, listed = null;
const stale = new Set();

function soon(lane) {
  if (lane.main) current = lane;
  stale.add(lane);
  waiting ||= requestAnimationFrame(redraw);
}

// At most once a frame, and only what has changed: the token tree is drawn when another round is to be seen.
function redraw() {
  if (waiting) cancelAnimationFrame(waiting);
  waiting = 0;
  for (const lane of stale) {
    if (lane.stats) say(lane.line, "laneFigures", {tokens: lane.tokens, rounds: lane.stats.rounds, speed: lane.speed ? Math.round(lane.speed * 10) / 10 : ["unknown"]});
    if (lane.bar) lane.bar.value = lane.tokens;
    lane.write();
  }
  stale.clear();
  const stats = current?.stats;
  $("tau").textContent = stats ? number(stats.tau) : "–";
  $("rate").textContent = stats && stats.drafted ? stats.acceptance_rate.toLocaleString(language, {style: "percent"}) : "–";
  $("speed").textContent = current?.speed ? number(current.speed) : "–";
  $("tokens").textContent = current ? current.tokens.toLocaleString(language) : "–";
  $("rounds").textContent = stats ? stats.rounds.toLocaleString(language) : "–";
  $("first").textContent = current?.first ? `${Math.round(current.first - current.begun)} ms` : "–";
  idle();
  meter();
  legend();
  draw(current?.shown);
  if (under && follows) $("end").scrollIntoView({block: "nearest"});
}
// Why nothing is drafted, where nothing is.
function idle() {
  const why = !card ? "" : compiling ? "compiling" : !card.drafter ? "idleNone" : $("drafter").value === "off" ? "idleOff" : current?.stats && current.plain > 24 ? "idleSlow" : "";
  $("idle").hidden = !why;
  if (why) say($("idle"), why);
}
// How much of the context the conversation takes, as far as the server has counted it.
function meter() {
  const used = current?.usage ? current.usage.prompt_tokens + Math.max(current.usage.completion_tokens, current.tokens) : null;
  $("context").hidden = !card || used === null;
  if ($("context").hidden) return;
  Object.assign($("context-bar"), {max: card.max_model_len, value: used});
  say($("context-text"), "context", {used, all: card.max_model_len});
}
// The end of a text is followed until its reader scrolls up, and again from where he is back at the end.
let follows = true, before = 0;
addEventListener("scroll", ({target}) => {
  const box = target === document ? document.documentElement : target;
  if (box !== document.documentElement && box !== $("talk")) return;
  if (box.scrollTop < before - 2) follows = false;
  else if ($("end").getBoundingClientRect().bottom < $("ask").getBoundingClientRect().top + 60) follows = true;
  before = box.scrollTop;
}, {capture: true, passive: true});

function legend() {
  if (listed?.size !== drafters.size + 3) {
    const rows = [...drafters.keys()].map((source) => ({status: "accepted", source}));
    listed = new Map();
    $("legend").replaceChildren(...[...rows, ...["recovered", "bonus", "plain"].map((status) => ({status}))].map((token) => {
      const row = make("li");
      make("span", `token ${style(token)}`, row).textContent = sourced(token);
      row.append(" ");
      listed.set(origin(token), make("span", "", row));
      return row;
    }));
  }
  for (const [name, place] of listed) place.textContent = current?.counts.get(name) ?? 0;
}

// ------------------------------------------------------------ what a token is

function explain(element) {
  const {token, lane} = about.get(element), tip = $("tip"), place = element.getClientRects()[0] ?? element.getBoundingClientRect();
  tip.textContent = text("tip", {text: token.text || text("part"), origin: sourced(token), p: number(token.target_prob), q: number(token.draft_prob), round: String(token.round)});
  tip.hidden = false;
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  tip.style.left = "0";  // where its own width does not depend on the window's edge
  element.setAttribute("aria-describedby", "tip");
  const left = Math.max(4, Math.min(place.left, innerWidth - tip.offsetWidth - 4)), above = place.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 0 ? above : place.bottom + 6}px`;
  if (!under && lane.rounds.has(token.round)) draw(lane.rounds.get(token.round));
}
function hide() {
  $("tip").hidden = true;
  document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
}
const tokenAt = (event) => about.has(event.target) ? event.target : null;
for (const [name, act] of [["mouseover", explain], ["focusin", explain], ["mouseout", hide], ["focusout", hide]]) {
  $("talk").addEventListener(name, (event) => { const found = tokenAt(event); if (found) act(found); });
}
$("talk").addEventListener("click", (event) => { if (!event.target.closest("a")) tokenAt(event)?.focus(); });
// A token with the focus takes its explanation along.
const move = () => {
  const found = document.activeElement, place = about.has(found) && !$("tip").hidden ? found.getBoundingClientRect() : null;
  if (place && place.bottom > 0 && place.top < innerHeight) explain(found); else hide();
};
addEventListener("scroll", move, {capture: true, passive: true});
addEventListener("resize", move);
$("talk").addEventListener("keydown", (event) => {
  const from = tokenAt(event);
  if (!from) return;
  const {lane, at} = about.get(from), seen = lane.elements.filter(Boolean), here = seen.indexOf(lane.elements[at]);
  const to = seen.at({ArrowRight: here + 1, ArrowLeft: Math.max(0, here - 1), Home: 0, End: -1}[event.key] ?? Infinity);
  if (!to) return;
  event.preventDefault();
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
});
