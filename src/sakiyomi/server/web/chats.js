// Conversations: kept in this browser (IndexedDB) unless that is switched off, listed, searched, given out and taken in.

const FORM = "sakiyomi-conversations", KEPT = ["id", "title", "time", "system", "turns"];
let chat = null, chats = new Map();  // the one that is seen; all that are known by id, newest last
const fresh = () => ({id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", time: Date.now(), system: "", turns: []});
// A turn is a message, or results of the calls before it, and the reply, whose parts are places in it.
const turnOf = ({user = "", images = [], files = [], results = [], reply = "", entries = [], parts = null, calls = []}) => ({user, images, files, results, reply, entries, parts: parts ?? [{kind: "text", from: 0, to: reply.length}], calls});

const base = new Promise((done) => {
  let asked;
  try { asked = indexedDB.open("sakiyomi", 1); } catch { done(null); return; }
  asked.onupgradeneeded = () => asked.result.createObjectStore("conversations", {keyPath: "id"});
  asked.onsuccess = () => done(asked.result);
  asked.onerror = asked.onblocked = () => done(null);
});
async function store(mode, act) {
  const found = await base;
  if (!found) return undefined;
  return new Promise((done, failed) => {
    const moved = found.transaction("conversations", mode), asked = act(moved.objectStore("conversations"));
    moved.oncomplete = () => done(asked.result);
    moved.onerror = moved.onabort = () => failed(moved.error);
  });
}
const keeps = () => $("keep").checked;
async function keep(one) {
  if (!one.turns.length) return;
  chats.delete(one.id);
  chats.set(one.id, one);
  listChats();
  if (!keeps()) return;
  const plain = Object.fromEntries(KEPT.map((name) => [name, one[name]]));
  plain.turns = one.turns.map(turnOf);
  try { await store("readwrite", (place) => place.put(plain)); } catch (error) { show(new Failure("eKeep", {}, String(error?.message ?? error))); }
}
async function forget(one) {
  chats.delete(one.id);
  listChats();
  await store("readwrite", (place) => place.delete(one.id));
  if (one === chat) begin();
}
async function recall() {
  const found = (await store("readonly", (place) => place.getAll()).catch(() => [])) ?? [];
  for (const one of found.sort((a, b) => a.time - b.time)) if (!chats.has(one.id)) chats.set(one.id, {...fresh(), ...one, turns: one.turns.map(turnOf)});
  listChats();
}

function listChats() {
  const sought = $("search").value.trim().toLowerCase();
  const has = (one) => !sought || [one.title, ...one.turns.flatMap((turn) => [turn.user, turn.reply])].some((words) => words.toLowerCase().includes(sought));
  $("chats").replaceChildren(...[...chats.values()].reverse().filter(has).map((one) => {
    const row = make("li"), open = make("button", "", row), drop = make("button", "drop", row);
    open.type = drop.type = "button";
    open.textContent = one.title;
    open.title = new Date(one.time).toLocaleString(language);
    if (one === chat) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => { if (!under) enter(one); });
    drop.textContent = "×";
    drop.dataset.l = "forget";
    filled.set(drop, {title: one.title});
    drop.setAttribute("aria-label", text("forget", {title: one.title}));
    drop.addEventListener("click", () => { if (!under && confirm(text("forgetSure", {title: one.title}))) forget(one); });
    return row;
  }));
  $("chats-none").hidden = chats.size > 0;
}
// Show a conversation; what cannot be drawn again (the trees of its rounds) is not kept.
function enter(one) {
  chat = one;
  current = unfinished = null;
  $("turns").replaceChildren();
  $("system").value = one.system;
  $("error").hidden = true;
  for (const turn of one.turns) {
    const drawnTurn = new TurnView(turn), lane = drawnTurn.lane("");
    turn.entries.forEach((token) => lane.take(token));
    if (lane.text !== turn.reply) Object.assign(lane, {text: turn.reply, tokens: 0});
    Object.assign(lane, {parts: turn.parts, calls: turn.calls, sorted: lane.text.length});
    drawnTurn.end();
    stale.add(lane);
    if (turn === one.turns.at(-1)) drawnTurn.wait();
  }
  $("welcome").hidden = one.turns.length > 0;
  follows = true;
  listChats();
  redraw();
  if (one.turns.length) $("end").scrollIntoView({block: "nearest"});
  if (!wide.matches) shelf(false);
}
function begin() {
  enter(fresh());
  $("prompt").focus();
}
function give() {
  const all = [...chats.values()].map((one) => ({...Object.fromEntries(KEPT.map((name) => [name, one[name]])), turns: one.turns.map(turnOf)}));
  download("sakiyomi-conversations.json", "application/json", JSON.stringify({form: FORM, conversations: all}, null, 1));
}
async function takeIn(file) {
  let found;
  try { found = JSON.parse(await file.text()); } catch (error) { show(new Failure("eImport", {name: file.name}, error.message)); return; }
  const list = found?.form === FORM && Array.isArray(found.conversations) ? found.conversations : null;
  const words = (value) => typeof value === "string", sound = (one) => words(one?.id) && words(one.title) && Array.isArray(one.turns) &&
    one.turns.every((turn) => words(turn?.user) && words(turn.reply) && (turn.calls ?? []).every((call) => words(call?.id) && words(call.function?.name) && words(call.function.arguments)) &&
      (turn.results ?? []).every((result) => words(result?.id) && words(result.call) && words(result.text)) && (turn.parts ?? []).every((part) => ["text", "think", "call"].includes(part?.kind) && part.from >= 0 && part.to >= part.from && (part.kind !== "call" || words(part.call?.function?.arguments))) && (turn.images ?? []).every((url) => words(url) && url.startsWith("data:image/")));
  if (!list?.every(sound)) { show(new Failure("eImport", {name: file.name})); return; }
  for (const one of list) await keep({...fresh(), ...Object.fromEntries(KEPT.filter((name) => name in one).map((name) => [name, one[name]])), turns: one.turns.map(turnOf)});
  say($("status"), "imported", {count: list.length});
}
function shelf(open) {
  $("shelf").hidden = !open;
  $("shelf-toggle").setAttribute("aria-expanded", String(open));
}
$("shelf-toggle").addEventListener("click", () => { shelf($("shelf").hidden); if (!$("shelf").hidden) $("search").focus(); });
$("shelf-close").addEventListener("click", () => { shelf(false); $("shelf-toggle").focus(); });
$("shelf").addEventListener("keydown", (event) => { if (event.key === "Escape" && !wide.matches) { event.stopPropagation(); shelf(false); $("shelf-toggle").focus(); } });
$("search").addEventListener("input", listChats);
$("clear").addEventListener("click", begin);
$("new").addEventListener("click", () => { if (!under) begin(); });
$("export").addEventListener("click", give);
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async ({target}) => { for (const file of target.files) await takeIn(file); target.value = ""; });
$("keep").addEventListener("change", async () => {
  stored("keep", $("keep").checked ? "" : "no");
  if (keeps()) for (const one of [...chats.values()]) await keep(one);
  else await store("readwrite", (place) => place.clear());
});

// ------------------------------------------------------------ files

const attached = [];  // {name, image} or {name, text}: they go with the next message
const MOST = 2 ** 20;
const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const dataUrl = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => done(reader.result));
  reader.addEventListener("error", () => failed(reader.error));
  reader.readAsDataURL(file);
});
async function attach(file) {
  $("error").hidden = true;
  try {
    if (IMAGES.includes(file.type)) {
      if (!card?.images) throw new Failure("eImage", {name: file.name, model: card?.id});
      attached.push({name: file.name, image: await dataUrl(file)});
    } else if (file.type === "application/pdf" || /\.pdf$/i.test(file.name)) {
      const found = await (await ask("/extract", {method: "POST", body: file})).json();
      attached.push({name: file.name, text: found.text});
    } else {
      if (file.size > MOST) throw new Failure("eFile", {name: file.name}, text("tooLong", {size: MOST}));
      const words = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
      if (words.includes("\0")) throw new TypeError("\\0");
      attached.push({name: file.name, text: words});
    }
  } catch (error) { show(error instanceof Failure ? error : new Failure("eFile", {name: file.name}, error.message)); }
  listFiles();
}
function listFiles() {
  $("files").replaceChildren(...attached.map((file, i) => {
    const row = make("li");
    if (file.image) Object.assign(make("img", "", row), {src: file.image, alt: ""});
    make("span", "", row).textContent = file.name;
    const drop = button(row, "drop", () => { attached.splice(i, 1); listFiles(); }, {name: file.name});
    drop.className = "drop";
    return row;
  }));
}
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async ({target}) => { for (const file of [...target.files]) await attach(file); target.value = ""; });
$("ask").addEventListener("dragover", (event) => event.preventDefault());
$("ask").addEventListener("drop", async (event) => { event.preventDefault(); for (const file of [...event.dataTransfer.files]) await attach(file); });
$("prompt").addEventListener("paste", async (event) => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); for (const file of files) await attach(file); }
});
