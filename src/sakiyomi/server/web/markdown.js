// Markdown as models write it. A text is parsed into blocks that say where they lie in it; what is shown of a block is
// handed out as pieces of the text, so that the caller can make elements of them that begin where tokens do.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/, HEADING = /^ {0,3}(#{1,6})\s+\S/, RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/, QUOTE = /^ {0,3}>\s?/, DELIMITER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MARK = /\\([!-/:-@[-`{-~])|(`+)([^`]|[^`][\s\S]*?[^`])\2(?!`)|(\*\*|__)(?=\S)([\s\S]*?\S)\4|(\*|_)(?=[^\s*_])([^*_]*?[^\s*_])\6(?![\w*_])|~~(?=\S)([\s\S]*?\S)~~|\[([^\]\n]+)\]\(((?:https?:|mailto:)[^\s)]+)\)|https?:\/\/[^\s<>()]*[^\s<>().,;:!?"'”’]/;
const COMMENTS = {hash: /^(py|python|sh|bash|shell|zsh|ruby|rb|yaml|yml|toml|r|perl|make|makefile|dockerfile|elixir|julia|nix)$/, dashes: /^(sql|lua|haskell|hs|ada|elm)$/};
const KEYWORDS = new Set(("abstract and as assert async await begin bool boolean break case catch char class const constexpr continue def default defer del delete do double " +
  "elif else end enum except export extends extern false False finally float fn for foreach from func function global go goto if impl implements import in include " +
  "instanceof int interface is lambda let local long loop match mod module mut namespace new nil None nonlocal not null or package pass private protected pub public raise " +
  "ref require return self short static struct super switch template then this throw trait true True try type typedef typeof undefined union unless unsafe unsigned until use " +
  "using var virtual void volatile when where while with yield SELECT FROM WHERE INSERT UPDATE DELETE CREATE TABLE JOIN LEFT ON GROUP ORDER BY AND OR NOT NULL INTO VALUES SET LIMIT AS").split(" "));

function lines(text, from = 0, until = text.length) {
  const found = [];
  while (from < until) {
    const end = text.indexOf("\n", from), to = end < 0 || end >= until ? until : end + 1;
    found.push({from, to, text: text.slice(from, to).replace(/\n$/, "")});
    from = to;
  }
  return found;
}

// As it was written: a block for each line, so that the browser lays out only the last one when a token comes.
const plainBlocks = (text) => lines(text).map(({from, to}) => ({kind: "plain", from, to}));

// Parts of a reply are thoughts, calls, and text, which is Markdown. Marks of thoughts that the server leaves in a text fold, too.
const blocks = (text, parts) => parts.flatMap((part) => part.kind === "text" ? textBlocks(text, part.from, part.to) : [part]);

function textBlocks(whole, start, until) {
  const found = [], text = whole.slice(0, until), all = lines(text, start);
  const opened = /^\s*<think>/.exec(text), closed = start ? -1 : text.indexOf("</think>");
  let i = 0;
  if (!start && (opened || closed >= 0)) {
    const end = closed < 0 ? text.length : closed;
    found.push({kind: "think", from: opened ? opened[0].length : 0, to: end, open: closed < 0});
    while (i < all.length && all[i].to <= (closed < 0 ? end : closed + 8)) i++;
    if (i < all.length && all[i].from < closed + 8) all[i] = {...all[i], from: closed + 8, text: all[i].text.slice(closed + 8 - all[i].from)};
  }
  while (i < all.length) {
    const line = all[i], fence = FENCE.exec(line.text), begin = i++;
    const take = (kind, more = {}) => found.push({kind, from: line.from, to: all[i - 1].to, lines: all.slice(begin, i), ...more});
    if (!line.text.trim()) continue;
    if (fence) {
      const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
      while (i < all.length && !close.test(all[i].text)) i++;
      const end = i < all.length ? all[i].from : text.length;
      if (i < all.length) i++;
      take("code", {name: fence[2], inner: [Math.min(line.to, end), end]});
    } else if (HEADING.test(line.text)) take("heading", {level: HEADING.exec(line.text)[1].length});
    else if (RULE.test(line.text)) take("rule");
    else if (QUOTE.test(line.text)) { while (i < all.length && QUOTE.test(all[i].text)) i++; take("quote"); }
    else if (line.text.includes("|") && i < all.length && all[i].text.includes("-") && DELIMITER.test(all[i].text)) {
      while (i < all.length && all[i].text.includes("|")) i++;
      take("table");
    } else if (ITEM.test(line.text)) {
      while (i < all.length && (ITEM.test(all[i].text) || /^\s{2,}\S/.test(all[i].text) || (!all[i].text.trim() && i + 1 < all.length && (ITEM.test(all[i + 1].text) || /^\s{2,}\S/.test(all[i + 1].text))))) i++;
      take("list");
    } else {
      const stops = (next) => !next.text.trim() || [FENCE, HEADING, QUOTE, RULE].some((mark) => mark.test(next.text)) || ITEM.test(next.text);
      while (i < all.length && !stops(all[i])) i++;
      take("paragraph");
    }
  }
  return found;
}

// `put(parent, from, to, classes)` makes the elements of a piece of the text.
function block(found, text, put) {
  const inside = (parent, from, to) => inline(parent, text, from, to, put), last = (line) => line.from + line.text.length;
  const trimmed = ({from, to}) => to - /\s*$/.exec(text.slice(from, to))[0].length;
  switch (found.kind) {
    case "plain": { const box = make("p"); put(box, found.from, found.to); return box; }
    case "think": {
      const box = folded("think", found), words = make("p", "", box);
      if (found.open) say(box.firstElementChild, "thinking");
      else if (found.seconds === undefined) say(box.firstElementChild, "thought");
      else say(box.firstElementChild, "thoughtFor", {seconds: found.seconds});
      put(words, found.from, found.to);
      return box;
    }
    case "call": {  // as the server reads it, and as the model writes it
      const box = folded("call", found);
      if (found.open) say(box.firstElementChild, "calling"); else box.firstElementChild.textContent = calledAs(found.call);
      if (found.call) make("code", "", Object.assign(make("pre", "", box), {tabIndex: 0})).textContent = indented(found.call.function.arguments);
      if (found.to > found.from) put(make("p", "", box), found.from, found.to);
      return box;
    }
    case "code": {
      const box = make("div", "code"), head = make("div", "head", box), [from, to] = found.inner;
      make("span", "", head).textContent = found.name;
      button(head, "copy", () => copy(text.slice(from, to)));
      const code = make("code", "", make("pre", "", box));
      code.parentElement.tabIndex = 0;
      highlight(found.name, text.slice(from, to), (start, end, classes) => put(code, from + start, from + end, classes));
      return box;
    }
    case "heading": {
      const box = make("h4", `level${found.level}`), mark = /^\s*#+\s+/.exec(found.lines[0].text)[0].length;
      inside(box, found.from + mark, found.from + found.lines[0].text.replace(/\s+#+\s*$/, "").length);
      return box;
    }
    case "rule": return make("hr");
    case "quote": {
      const box = make("blockquote");
      for (const line of found.lines) inside(make("p", "", box), line.from + QUOTE.exec(line.text)[0].length, last(line));
      return box;
    }
    case "table": {
      const scroll = make("div", "table"), box = make("table", "", scroll);
      found.lines.forEach((line, i) => {
        if (i === 1) return;
        const row = make("tr", "", box);
        for (const cell of line.text.matchAll(/(?:^\s*\|?|\|)((?:\\\||`[^`]*`|[^|])+)/g)) {
          const start = cell.index + cell[0].length - cell[1].length, words = cell[1].trim();
          if (!words && start + cell[1].length >= line.text.trimEnd().length) continue;
          const from = line.from + start + cell[1].indexOf(words);
          inside(make(i ? "td" : "th", "", row), from, from + words.length);
        }
      });
      return scroll;
    }
    case "list": return list(found, inside, last);
    default: { const box = make("p"); inside(box, found.from, trimmed(found)); return box; }
  }
}

// Open while it is written.
function folded(kind, found) {
  const box = make("details", kind);
  box.dataset.at = `${kind} ${found.from}`;
  box.open = Boolean(found.open);
  make("summary", found.open ? "open" : "", box);
  return box;
}
const indented = (text) => { try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; } };
function calledAs({function: {name, arguments: given}}) {
  let values;
  try { values = JSON.parse(given); } catch { values = null; }
  if (!values || typeof values !== "object") return `${name}(${given})`;
  const words = Object.entries(values).map(([key, value]) => `${key}=${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
  return `${name}(${words.length > 120 ? `${words.slice(0, 119)}…` : words})`;
}

function list(found, inside, last) {
  const root = make("div"), open = [];  // {deep, box, item}, outermost first
  for (const line of found.lines) {
    const mark = ITEM.exec(line.text);
    if (!mark) {
      if (line.text.trim()) { make("br", "", open.at(-1).item); inside(open.at(-1).item, line.from + line.text.search(/\S/), last(line)); }
      continue;
    }
    const deep = mark[1].length, kind = /\d/.test(mark[2]) ? "ol" : "ul";
    while (open.length && open.at(-1).deep > deep) open.pop();
    if (open.length && open.at(-1).deep >= deep - 1 && open.at(-1).box.localName !== kind) open.pop();
    if (!open.length || open.at(-1).deep < deep - 1) {
      const box = make(kind);
      (open.at(-1)?.item ?? root).append(box);
      open.push({deep, box});
      if (kind === "ol") box.start = parseInt(mark[2], 10);
    }
    open.at(-1).item = make("li", "", open.at(-1).box);
    inside(open.at(-1).item, line.from + mark[0].length, last(line));
  }
  return root;
}

function inline(parent, text, from, to, put, depth = 0) {
  while (from < to) {
    const mark = depth < 8 ? MARK.exec(text.slice(from, to)) : null;
    if (!mark) { put(parent, from, to); return; }
    const start = from + mark.index, end = start + mark[0].length;
    if (start > from) put(parent, from, start);
    const [whole, escaped, ticks, code, strong, bold, slant, italic, struck, name, url] = mark;
    const inner = (element, skip, words) => inline(element, text, start + skip, start + skip + words.length, put, depth + 1);
    if (escaped) put(parent, start + 1, end);
    else if (ticks) put(make("code", "", parent), start + ticks.length, end - ticks.length);
    else if (strong) inner(make("strong", "", parent), 2, bold);
    else if (slant) inner(make("em", "", parent), 1, italic);
    else if (struck) inner(make("s", "", parent), 2, struck);
    else {
      const link = Object.assign(make("a", "", parent), {href: url ?? whole, target: "_blank", rel: "noopener noreferrer"});
      if (name) inner(link, 1, name); else put(link, start, end);
    }
    from = end;
  }
}

// Pieces of a program: comments, strings, numbers and the words that most languages share.
function highlight(name, code, piece) {
  const comment = COMMENTS.hash.test(name) ? "#[^\\n]*" : COMMENTS.dashes.test(name) ? "--[^\\n]*" : name === "html" || name === "xml" ? "<!--[\\s\\S]*?-->" : "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
  const parts = new RegExp(`(${comment})|("""[\\s\\S]*?(?:"""|$)|"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?|\`(?:\\\\.|[^\`\\\\])*\`?)|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  let from = 0;
  for (const found of code.matchAll(parts)) {
    const classes = found[1] ? "c-comment" : found[2] ? "c-string" : found[3] ? "c-number" : KEYWORDS.has(found[4]) ? "c-word" : "";
    if (!classes) continue;
    if (found.index > from) piece(from, found.index, "");
    from = found.index + found[0].length;
    piece(found.index, from, classes);
  }
  if (from < code.length) piece(from, code.length, "");
}
