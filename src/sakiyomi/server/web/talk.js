// Asking: what a message becomes, how a turn looks, the race, and what happens to it when something fails.

const SETTINGS = ["drafter", "gamma", "race", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stops", "seed", "max", "view", "tools"];
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];
const THOUGHT = /^\s*(?:<think>)?[\s\S]*?<\/think>\s*/;

function body(seed, speculation, turns = chat.turns) {
  const common = {model: card.id, stream: true, stream_options: {include_usage: true, continuous_usage_stats: true}, trace: true, max_tokens: Number($("max").value), speculation};
  for (const name of SAMPLING) common[name] = Number($(name).value);
  const stops = $("stops").value.split("\n").filter(Boolean);
  if (stops.length) common.stop = stops;
  if (seed !== null) common.seed = seed;
  if (!card.chat_template) return ["/v1/completions", {...common, prompt: turns.map((turn) => content(turn) + turn.reply).join("\n")}];
  const system = chat.system.trim() ? [{role: "system", content: chat.system}] : [];
  const messages = turns.flatMap((turn, i) => [...asked(turn, turns[i - 1]), answered(turn)]).slice(0, -1), tools = toolsGiven();
  return ["/v1/chat/completions", {...common, messages: [...system, ...messages], ...(tools.length && {tools})}];
}
// What precedes a reply: results of calls, which a user may have left without any, or a message.
function asked(turn, before) {
  const result = (id, content) => ({role: "tool", tool_call_id: id, content});
  if (turn.results.length) return turn.results.map(({id, text}) => result(id, text));
  return [...(before?.calls ?? []).map(({id}) => result(id, "The user gave no result.")), {role: "user", content: content(turn)}];
}
function answered({reply, parts, calls}) {
  const said = (kind) => parts.filter((part) => part.kind === kind).map(({from, to}) => reply.slice(from, to)).join("");
  const words = said("text").replace(THOUGHT, ""), thoughts = said("think");
  return {role: "assistant", content: words || !calls.length ? words : null, ...(thoughts && {reasoning_content: thoughts}), ...(calls.length && {tool_calls: calls})};
}
function toolsGiven() {
  const given = card?.tools ? $("tools").value.trim() : "";
  let found;
  try { found = given ? JSON.parse(given) : []; } catch (error) { throw new Failure("eTools", {}, error.message); }
  if (!Array.isArray(found) || !found.every((tool) => typeof tool?.function?.name === "string")) throw new Failure("eTools");
  return found;
}
function content(turn) {
  const said = [...turn.files.map((file) => `${file.name}:\n${file.text}\n`), turn.user].join("\n");
  if (!turn.images.length) return said;
  return [...turn.images.map((url) => ({type: "image_url", image_url: {url}})), {type: "text", text: said}];
}

class TurnView {
  constructor(turn) {
    this.turn = turn;
    this.said = make("div", "user", $("turns"));
    say(make("h2", "", this.said), turn.results.length ? "results" : "you");
    for (const {call, text: words} of turn.results) {
      const box = make("details", "", this.said);
      make("summary", "", box).textContent = `${call} → ${words.length > 60 ? `${words.slice(0, 59)}…` : words}`;
      make("pre", "", box).textContent = words;
    }
    for (const url of turn.images) Object.assign(make("img", "", this.said), {src: url, alt: text("image")});
    for (const file of turn.files) {
      const box = make("details", "", this.said);
      make("summary", "", box).textContent = file.name;
      make("p", "", box).textContent = file.text;
    }
    if (!turn.results.length) {
      make("p", "", this.said).textContent = turn.user;
      const acts = make("div", "acts", this.said);
      button(acts, "edit", () => this.edit());
      button(acts, "copy", () => copy(turn.user));
    }
    this.lanes = make("div", "lanes", $("turns"));
  }
  lane(title) { return new Lane(this.lanes, title); }
  end() {  // the reply is complete
    const acts = this.acts = make("div", "acts", $("turns"));
    button(acts, "regenerate", () => { if (!under) again(this.turn, this.turn.user); });
    button(acts, "copy", () => copy(this.turn.reply));
  }
  wait() {  // for the results of its calls
    if (!this.turn.calls.length) return;
    const form = make("form", "results", $("turns")), calls = this.turn.calls.map((call) => ({id: call.id, call: calledAs(call)}));
    const fields = calls.map(({call}, i) => {
      const box = make("div", "", form), label = make("label", "", box), words = make("textarea", "", box);
      say(label, "resultOf", {call});
      label.htmlFor = words.id = `result-${i}`;
      words.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
      });
      return words;
    });
    say(make("button", "main", form), "giveResults");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send("", {results: calls.map((one, i) => ({...one, text: fields[i].value}))});
    });
    if ([document.body, $("prompt"), $("stop")].includes(document.activeElement)) fields[0].focus();
  }
  edit() {
    if (under || this.editor) return;
    const editor = this.editor = make("form", "edit"), words = make("textarea", "", editor);
    words.value = this.turn.user;
    words.dataset.l = "prompt";
    words.setAttribute("aria-label", text("prompt"));
    const leave = () => { editor.remove(); this.editor = null; this.said.hidden = false; };
    say(make("button", "main", editor), "send");
    button(editor, "cancel", leave);
    editor.addEventListener("submit", (event) => { event.preventDefault(); if (words.value.trim() && !under) { leave(); again(this.turn, words.value); } });
    words.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); editor.requestSubmit(); }
    });
    this.said.hidden = true;
    this.said.after(editor);
    words.focus();
  }
}
// Ask once more from this turn on; what follows it is back if nothing comes of it.
function again(turn, message) {
  const at = chat.turns.indexOf(turn);
  return send(message, {at, images: turn.images, files: turn.files, results: turn.results});
}

function busy(on) {
  const lost = !on && document.activeElement === $("stop");
  $("send").hidden = on;
  $("sound-stop").hidden = !on;
  $("sound-choose").disabled = $("record").disabled = on;
  $("stop").hidden = !on;
  $("clear").disabled = $("new").disabled = on;
  $("talk").setAttribute("aria-busy", on);
  if (lost) $("prompt").focus();
}
async function send(message = $("prompt").value, {at = chat.turns.length, images = null, files = null, results = []} = {}) {
  if (under || !(message.trim() || attached.length || results.length)) return;
  $("error").hidden = true;
  if (!card) await meet();
  if (!card || under) return;
  if (!$("settings").checkValidity()) {
    $("settings-box").open = true;
    for (const box of $("settings").querySelectorAll("details")) box.open = true;
    show(new Failure("eSettings"));
    $("settings").reportValidity();
    return;
  }
  try { toolsGiven(); } catch (failure) {
    $("settings-box").open = true;
    show(failure);
    $("tools").focus();
    return;
  }
  const race = $("race").disabled || $("drafter").value === "off" ? "" : $("race").value;
  const given = $("seed").value === "" ? null : Number($("seed").value);
  const seed = race && given === null ? crypto.getRandomValues(new Uint32Array(1))[0] : given;  // both draw the same
  const gamma = $("gamma").value, deep = /^\d+$/.test(gamma) ? Number(gamma) : gamma;
  const ahead = $("drafter").value === "off" || !card.drafter ? {drafter: "off"} : {drafter: $("drafter").value, gamma: deep};
  const mine = images === null && !results.length, taken = mine ? attached.splice(0) : [];
  const turn = turnOf({user: message, results, images: images ?? taken.filter((file) => file.image).map((file) => file.image), files: files ?? taken.filter((file) => file.text !== undefined)});
  const dropped = chat.turns.splice(at), old = dropped.length ? [...$("turns").children].slice([...$("turns").children].indexOf($("turns").querySelectorAll(".user")[at])) : [];
  for (const element of old) element.remove();
  listFiles();
  chat.turns.push(turn);
  chat.system = $("system").value;
  chat.title ||= (message.trim() || taken[0]?.name || "").split("\n")[0].slice(0, 60);
  $("welcome").hidden = true;
  const forms = $("turns").querySelectorAll("form.results");
  for (const form of forms) form.hidden = true;
  const view = new TurnView(turn), main = view.lane(race ? "ahead" : ""), other = race ? view.lane("plainLane") : null, one = chat;
  const earlier = current, takeBack = () => {
    one.turns.splice(one.turns.indexOf(turn), 1, ...dropped);
    for (const element of [view.said, view.lanes, view.acts]) element?.remove();
    $("turns").append(...old);
    for (const form of forms) form.hidden = false;
    current = earlier;
    $("welcome").hidden = one.turns.length > 0;
    if (dropped.length) return;
    attached.unshift(...taken);
    listFiles();
    $("prompt").value = [message, $("prompt").value].filter(Boolean).join("\n");
  };
  main.main = true;
  current = main;
  follows = true;
  unfinished = null;
  under = new AbortController();
  if ($("prompt").value === message) $("prompt").value = "";
  busy(true);
  say($("status"), "writing");
  redraw();
  try {
    const runs = [() => main.run(...body(seed, ahead), under.signal)];
    if (other) runs.push(() => other.run(...body(seed, {drafter: "off"}), under.signal));
    if (race === "turn") for (const run of runs) await run();
    else await Promise.all(runs.map((run) => run()));
    if (main.calls.length) say($("status"), "callsWait", {calls: main.calls.map(calledAs).join(", ")});
    else say($("status"), "done", {tokens: main.tokens, text: main.said("text")});
    if (other) $("status").append(" ", judge(main, other, race).textContent);
  } catch (error) {
    if (error.name === "AbortError") say($("status"), "stopped", {tokens: main.tokens});
    else {
      under.abort();  // the other one too
      show(failed(error));
      unfinished = main.tokens ? takeBack : null;
    }
    if (!main.tokens) takeBack();
  } finally {
    turn.reply = main.text;
    Object.assign(turn, {entries: main.entries, parts: main.parts, calls: main.calls});
    if (main.tokens) view.end();
    if (main.reason === "length") say(make("p", "note", view.acts), "cut");
    redraw();
    under = null;
    busy(false);
    if (main.tokens) { for (const form of forms) form.remove(); view.wait(); }
    one.time = Date.now();
    keep(one);
  }
}
let unfinished = null;  // takes back the reply that failed on its way, so that its message can be sent again

function judge(main, other, race) {
  const box = make("div", "verdict", $("turns")), timed = race === "turn";
  const [a, b] = timed ? [main.seconds, other.seconds] : [main.stats.rounds, other.stats.rounds];
  // For each token, as texts may differ; the first one comes with the prompt.
  if (a && b) say(make("p", "", box), timed ? "raceTimes" : "raceRounds", {a, b, x: (main.tokens - 1) / a / ((other.tokens - 1) / b)});
  const at = [...main.text].findIndex((letter, i) => letter !== [...other.text][i]);
  if (main.text === other.text) say(make("p", "", box), "same");
  else say(make("p", "", box), "differ", {at: (at < 0 ? [...main.text].length : at) + 1});
  return box;
}
// The last request as a program would send it.
function asCode(kind) {
  if (!card) return "";
  const said = chat.turns.length ? chat.turns : [turnOf({user: $("prompt").value || text(card.chat_template ? "chat1" : "plain1")})];
  const [path, {trace, stream, stream_options, ...asked}] = body($("seed").value === "" ? null : Number($("seed").value), {drafter: $("drafter").value}, said);
  if (kind === "curl") return `curl ${location.origin}${path} ${key ? '-H "Authorization: Bearer $API_KEY" ' : ""}-H 'Content-Type: application/json' -d '${JSON.stringify(asked).replace(/'/g, "'\\''")}'`;
  const python = (value) => JSON.stringify(value, null, 4).replace(/\btrue\b/g, "True").replace(/\bfalse\b/g, "False").replace(/\bnull\b/g, "None");
  const own = ["top_k", "min_p", "repetition_penalty", "speculation"], extra = Object.fromEntries(own.map((name) => [name, asked[name]]));
  const rest = Object.entries(asked).filter(([name]) => !own.includes(name)).map(([name, value]) => `    ${name}=${python(value)},\n`).join("");
  const call = path.includes("chat") ? "client.chat.completions.create" : "client.completions.create";
  return `from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=${key ? 'os.environ["API_KEY"]' : '"none"'})\nreply = ${call}(\n${rest}    extra_body=${python(extra)},\n)\nprint(reply.choices[0].${path.includes("chat") ? "message.content" : "text"})\n`.replace(/^/, key ? "import os\n\n" : "");
}
for (const kind of ["curl", "python"]) $(`as-${kind}`).addEventListener("click", () => { try { copy(asCode(kind)); } catch (failure) { show(failed(failure)); } });

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("settings").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("keyform").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  await meet();
  if (card && $("keyform").hidden) $("prompt").focus();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
// Send and stop share a place: the second click of a double one does nothing.
$("stop").addEventListener("click", (event) => { if (event.detail < 2) under?.abort(); });
$("send").addEventListener("click", (event) => { if (event.detail > 1) event.preventDefault(); });
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (!$("tip").hidden) hide(); else under?.abort();
});
$("again").addEventListener("click", () => {
  $("error").hidden = true;
  unfinished?.();
  if (card && $("prompt").value.trim()) send(); else meet();
});

function welcome() {
  const kind = card?.audio ? "Speech" : card?.chat_template ? "Chat" : "Plain";
  say($("hello"), card?.audio ? "helloSpeech" : "hello");
  say($("how"), `how${kind}`);
  $("starts").replaceChildren(...(card?.audio ? [] : [1, 2, 3]).map((i) => {
    const found = make("button");
    found.type = "button";
    found.textContent = text(`${kind.toLowerCase()}${i}`);
    found.addEventListener("click", () => send(found.textContent));
    return found;
  }));
}
let meeting = 0;  // the last one counts
async function meet(name = $("choice").value) {
  const mine = ++meeting;
  $("error").hidden = true;
  say($("model"), "loading");
  try {
    const known = (await (await ask("/v1/models")).json()).data, found = known.find((one) => one.id === name) ?? known[0];
    $("choice").replaceChildren(...known.map((one) => new Option(one.id, one.id, false, one === found)));
    $("choice-box").hidden = known.length < 2;
    if (found.loaded === false) say($("model"), "fetching", {name: found.id});
    const loaded = found.loaded === false ? await (await ask("/models/load", {method: "POST", body: JSON.stringify({model: found.id})})).json() : found;
    if (mine !== meeting) return;
    card = loaded;
  } catch (error) { if (mine === meeting) { say($("model"), "unknown"); show(error); } return; }
  $("keyform").hidden = true;
  listen();
  $("system-box").hidden = !card.chat_template;
  $("tools-box").hidden = !card.tools;
  say($("model"), card.drafter ? "model" : "modelPlain", {name: card.id, drafter: named(card.drafter), context: card.max_model_len});
  if (stored("settings") === null) $("view").value = card.chat_template ? "formatted" : "written";
  welcome();
  for (const name of card.drafter?.split("+") ?? []) if (!drafters.has(name)) drafters.set(name, drafters.size);
  redraw();
  offer();
  settle();
  places();
}
// How many requests the server works on; asked for while somebody looks.
let places_due = 0;
async function places() {
  clearTimeout(places_due);
  if (card && !document.hidden) {
    try {
      const found = await (await ask("/metrics")).text(), own = found.split("\n").filter((line) => line.includes(`model_name="${card.id}"`));
      const value = (name) => Number(own.find((line) => line.startsWith(`${name}{`))?.split(" ").at(-1) ?? 0);
      const running = value("vllm:num_requests_running"), waits = value("vllm:num_requests_waiting");
      compiling = value("sakiyomi:compiling") > 0;
      idle();
      say($("slots"), "slots", {running, waiting: waits});
      if (under && current && !current.tokens) {
        const away = own.some((line) => line.startsWith("sakiyomi:model_loaded{") && line.endsWith(" 0"));  // given up meanwhile
        say(current.line, away ? "fetching" : waits ? "queued" : "reading", {waiting: waits, name: card.id});
      }
    } catch { hush($("slots")); }
  }
  places_due = setTimeout(places, under ? 2000 : 15000);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) places(); });

// The drafts that are loaded: all, each alone where there are several, none.
function offer() {
  const list = $("drafter"), wished = list.dataset.wished ?? list.value, parts = card.drafters ?? [];
  for (const option of [...list.options]) if (!["auto", "off"].includes(option.value)) option.remove();
  if (card.drafter) say(list.options[0], parts.length ? "onAll" : "onOne", {drafter: named(card.drafter)});
  for (const part of parts) {
    const option = new Option("", part);
    list.options[list.length - 1].before(option);
    say(option, "only", {drafter: named(part)});
  }
  delete list.dataset.wished;
  list.value = [...list.options].some((option) => option.value === wished) ? wished : "auto";
}
function settle() {  // settings that have no meaning beside others
  $("drafter").disabled = card !== null && !card.drafter;
  $("gamma").disabled = $("race").disabled = $("drafter").disabled || $("drafter").value === "off";
  $("race-note").hidden = $("race").disabled || !$("race").value;
  idle();
}
function remember() { stored("settings", JSON.stringify(Object.fromEntries(SETTINGS.map((name) => [name, $(name).value])))); }
$("settings").addEventListener("change", () => { settle(); remember(); });
$("view").addEventListener("change", () => { for (const element of document.querySelectorAll(".lane")) { const lane = Lane.of.get(element); if (lane) stale.add(lane); } redraw(); });
$("defaults").addEventListener("click", () => { $("settings").reset(); try { localStorage.removeItem("settings"); } catch { /* forbidden */ } settle(); });
$("choice").addEventListener("change", () => { card = null; meet(); });
$("language").addEventListener("change", (event) => { stored("language", event.target.value); speak(event.target.value); });
$("theme").addEventListener("change", (event) => { stored("theme", event.target.value); dress(event.target.value); });

const wished = stored("language") ?? navigator.languages.map((name) => name.slice(0, 2)).find((name) => LANGUAGES.includes(name));
try {
  const known = JSON.parse(stored("settings") ?? "{}");
  for (const name of SETTINGS) if (typeof known[name] === "string") $(name).value = known[name];
  if (typeof known.drafter === "string") $("drafter").dataset.wished = known.drafter;  // it is offered when the server is known
} catch { /* of another version: the defaults */ }
$("keep").checked = stored("keep") !== "no";
chat = fresh();
dress(["light", "dark"].includes(stored("theme")) ? stored("theme") : "");
speak(LANGUAGES.includes(wished) ? wished : "en");
const wide = matchMedia("(min-width: 78rem)");
wide.addEventListener("change", () => shelf(wide.matches));
shelf(wide.matches);
recall();
meet();
