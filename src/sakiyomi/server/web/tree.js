const SVG = "http://www.w3.org/2000/svg";
function shape(name, values, parent) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(values)) found.setAttribute(key, value);
  parent.append(found);
  return found;
}
const short = (word) => {  // what a box has room for, where a character of Chinese or Japanese is nearly two
  let room = 8.5, found = "";
  for (const letter of word.replace(/\n/g, "⏎").replace(/\s/g, "␣")) {
    room -= letter > "\u2e7f" ? 1.7 : 1;
    if (room < 0) return found + "…";
    found += letter;
  }
  return found || "·";
};
const chance = (name, value) => typeof value === "number" ? `${name}\u2009${value.toFixed(2).replace(/^0|\.00$/g, "") || 0}` : "";

const WIDE = 74, HIGH = 42;  // of a place in the drawing, in pixels; a box leaves some of it free

// First children stay below their parents, so that the kept path is a line at the left. Branches hang to its right, the
// lower ones nearer: no lines cross, and branches at different heights share a column.
function arrange(nodes) {
  const free = [];  // for each depth, the first column that is
  (function place(node, depth) {
    const line = [];
    for (let next = node; next; next = nodes[next.kids[0]]) line.push(next);
    const column = Math.max(...line.map((_, i) => free[depth + i] ?? 0));
    line.forEach((each, i) => { each.x = column * WIDE + WIDE / 2; each.y = (depth + i) * HIGH + 18; free[depth + i] = column + 1; });
    for (let i = line.length - 1; i >= 0; i--) for (const kid of line[i].kids.slice(1)) place(nodes[kid], depth + i + 1);
  })(nodes[0], 0);
  return [Math.max(...free) * WIDE, free.length * HIGH];
}

function draw(round) {
  const box = $("tree");
  if (!round) { if (drawn || !box.firstElementChild) { box.replaceChildren(); say(make("p", "note", box), "treeNone"); drawn = null; } return; }
  if (round === drawn) return;
  drawn = round;
  // Nodes: 0 is the last committed token, i + 1 the proposed ones, the last the target's own behind the path.
  const kept = new Map(round.path.map((node, i) => [node, round.styles[i] ?? "accepted d0"])), end = round.path.length ? round.path.at(-1) + 1 : 0;
  const own = round.last.status !== "accepted";  // the text may have ended before the target's own token
  const nodes = [{text: round.before, kids: []}];
  round.tokens.forEach((token, i) => {
    const up = round.parents[i] + 1, kind = kept.get(i) ?? (up === end && token === round.refused ? "refused" : "");
    nodes.push({text: round.texts[i], kind, up, on: kept.has(i), kids: [], p: round.target_probs[i], q: round.draft_probs[i]});
    nodes[up].kids[kept.has(i) ? "unshift" : "push"](i + 1);
  });
  if (own) { nodes[end].kids.unshift(nodes.length); nodes.push({text: round.last.text, kind: round.kind, up: end, on: true, kids: [], p: round.last.target_prob}); }
  const [width, height] = arrange(nodes), svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({width, height, role: "img"})) svg.setAttribute(name, value);
  svg.setAttribute("aria-label", text(own ? "treeOf" : "treeEnd", {round: round.round, proposed: round.tokens.length, accepted: round.path.length, token: round.last.text, kind: text(round.kind)}));
  for (const on of [false, true]) {
    const lines = nodes.filter((node) => node.up !== undefined && Boolean(node.on) === on);
    shape("path", {class: on ? "kept" : "", d: lines.map((node) => `M${nodes[node.up].x} ${nodes[node.up].y + 16}v5H${node.x}v5`).join("")}, svg);
  }
  for (const node of nodes) {
    const group = shape("g", {class: node.kind ?? ""}, svg), known = typeof node.p === "number";
    shape("rect", {x: node.x - 35, y: node.y - 16, width: 70, height: 32, rx: 5}, group);
    shape("text", {x: node.x, y: node.y + (known ? -2 : 4)}, group).textContent = short(node.text);
    if (known) shape("text", {x: node.x, y: node.y + 11, class: "small"}, group).textContent = `${chance("p", node.p)} ${chance("q", node.q)}`;
  }
  box.replaceChildren(svg);
}

