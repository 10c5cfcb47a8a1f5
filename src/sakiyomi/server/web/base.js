"use strict";
// A client of the server that it came from. Texts become text nodes only; conversations and settings stay in this browser.

const $ = (id) => document.getElementById(id);
const make = (name, classes, parent) => {
  const found = document.createElement(name);
  if (classes) found.className = classes;
  if (parent) parent.append(found);
  return found;
};
const stored = (name, value) => {
  try { if (value === undefined) return localStorage.getItem(name); localStorage.setItem(name, value); } catch { /* forbidden: it is not kept */ }
  return null;
};
function button(parent, key, act, values) {
  const found = make("button", "", parent);
  found.type = "button";
  say(found, key, values);
  found.addEventListener("click", () => act(found));
  return found;
}
async function copy(words) {
  try { await navigator.clipboard.writeText(words); } catch {  // no permission, or no https
    const box = make("textarea", "hidden-text", document.body);
    box.value = words;
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  say($("status"), "copied");
}
function download(name, kind, words) {
  const link = make("a");
  link.href = `data:${kind};charset=utf-8,${encodeURIComponent(words)}`;
  link.download = name;
  link.click();
}

// ------------------------------------------------------------ languages

const TEXTS = JSON.parse($("texts").textContent), LANGUAGES = ["en", "ja"];  // of each text, in this order
const filled = new WeakMap();  // values in the texts of elements, for another language
let language = "en";

function text(key, values = {}) {
  return TEXTS[key][LANGUAGES.indexOf(language)].replace(/\{(\w+)\}/g, (_, name) => {
    const value = values[name];
    return Array.isArray(value) ? text(...value) : typeof value === "number" ? value.toLocaleString(language, {maximumFractionDigits: 2}) : value ?? "";
  });
}
function say(element, key, values) {
  element.dataset.t = key;
  filled.set(element, values);
  element.textContent = text(key, values);
}
function hush(element) {
  delete element.dataset.t;
  element.textContent = "";
}
function speak(name) {
  language = name;
  document.documentElement.lang = $("language").value = name;
  for (const element of document.querySelectorAll("[data-t]")) element.textContent = text(element.dataset.t, filled.get(element));
  for (const element of document.querySelectorAll("[data-l]")) element.setAttribute("aria-label", text(element.dataset.l, filled.get(element)));
  for (const element of document.querySelectorAll("[data-p]")) element.placeholder = text(element.dataset.p);
  welcome();
  drawn = listed = null;
  redraw();
}
function dress(name) {
  $("theme").value = name;
  if (name) document.documentElement.dataset.theme = name; else delete document.documentElement.dataset.theme;
}
const number = (value, digits = 3) => value === null || value === undefined ? text("unknown") : value.toLocaleString(language, {maximumSignificantDigits: digits});

// ------------------------------------------------------------ errors

class Failure extends Error {
  constructor(key, values = {}, detail = "") { super(key); Object.assign(this, {key, values, detail}); }
}
function ofServer(status, error, wait) {
  const known = [400, 401, 404, 413, 429, 503, 504].includes(status) ? `e${status}` : "eOther";
  const name = error?.code === "context_length_exceeded" ? "eContext" : status === 401 && key ? "eKey" : known;
  return new Failure(name, {status, wait: wait || "5"}, error?.message ?? "");
}
function show(failure) {
  const locked = ["e401", "eKey"].includes(failure.key);
  say($("problem"), failure.key, failure.values);
  $("detail").textContent = locked ? "" : failure.detail;  // which tells programs how to send a key
  $("again").hidden = locked || ["eSettings", "eTools", "eFile", "eImage", "eMicrophone"].includes(failure.key);
  $("error").hidden = false;
  if (locked) { $("keyform").hidden = false; $("key").focus(); $("key").select(); } else $("error").scrollIntoView({block: "nearest"});
}
const failed = (error) => error instanceof Failure ? error : new Failure("eOther", {status: error.name}, error.message);

// ------------------------------------------------------------ the server

let card = null, key = "", under = null, compiling = false;  // the model's card; the controller of the request that is under way; kernels are being built

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, {...options, headers: {...(key && {authorization: `Bearer ${key}`}), ...(typeof options.body === "string" && {"content-type": "application/json"})}});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("eNetwork");
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  throw ofServer(response.status, found.error, response.headers.get("retry-after"));
}
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try { read = await reader.read(); } catch (error) { throw error.name === "AbortError" ? error : new Failure("eCut"); }
    if (read.done) throw new Failure("eCut");
    const parts = (rest + read.value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      const value = JSON.parse(part.slice(6));
      if (value.error) throw ofServer({timeout: 504, out_of_memory: 503, stopping: 503, invalid_value: 400}[value.error.code] ?? 500, value.error);
      yield value;
    }
  }
}
