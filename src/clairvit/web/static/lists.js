// The lists: classes with bars, methods, thumbnails of all quick methods.

import { colourScale, overlay } from "./colour.js";
import { slice, unpack } from "./api.js";
import { setStatus } from "./status.js";
import { duration, element, number, plainNotes, valueText } from "./texts.js";

/** Top classes; a click makes one the target, "+" the second target. */
export function showClasses(list, top, targets, onSelect, onSelectSecond) {
  const focused = document.activeElement?.dataset?.key;
  list.replaceChildren(...top.map((entry) => {
    const name = element("button", { type: "button", className: "name" },
      element("span", { textContent: entry.name }), element("span", { textContent: valueText(entry.probability, entry.score) }));
    if (entry.probability !== null) name.append(element("meter", { min: 0, max: 1, value: entry.probability, ariaHidden: "true" }));
    name.dataset.key = `class-${entry.index}`;
    name.setAttribute("aria-pressed", targets[0] === entry.index);
    name.addEventListener("click", () => onSelect(entry.index));
    const second = element("button", { type: "button", className: "second", textContent: targets[1] === entry.index ? "−" : "+", title: "Compare with the first", disabled: targets[0] === entry.index });
    second.dataset.key = `second-${entry.index}`;
    second.setAttribute("aria-label", `Show ${entry.name} next to it`);
    second.setAttribute("aria-pressed", targets[1] === entry.index);
    second.addEventListener("click", () => onSelectSecond(entry.index));
    return element("li", {}, name, second);
  }));
  if (focused) list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

const PURPOSES = { "faithful": "recommended", "localising": "covers the object", "cheap": "quickest", "black box": "asks the model only" };
export const baseName = (text) => text.split(/[+(]/)[0];

/** The seconds that a method takes on this machine. */
export const estimate = (entry, card) => card.seconds * (entry.forwards + 2 * entry.backwards);

const KEY_DELAY_MS = 500; // arrow keys pass through methods on the way to another
let keyTimer = 0, byKey = false;
addEventListener("keydown", (event) => { byKey = event.key.startsWith("Arrow"); }, true);
addEventListener("pointerdown", () => { byKey = false; }, true);

/** A method to choose; arrow keys pass over slow ones, which Enter starts. */
function methodLabel(value, title, tags, sentence, search, selected, isSlow, onSelect) {
  const radio = element("input", { type: "radio", name: "method", value, checked: selected });
  radio.addEventListener("change", () => {
    clearTimeout(keyTimer);
    if (byKey && isSlow) setStatus(`Press Enter to start ${title}, which is slow.`);
    else if (byKey) keyTimer = setTimeout(() => onSelect(value), KEY_DELAY_MS);
    else onSelect(value);
  });
  radio.addEventListener("keydown", (event) => { if (isSlow && event.key === "Enter") { event.preventDefault(); onSelect(value); } });
  const label = element("label", {}, radio, element("b", { textContent: title }), element("small", { textContent: sentence }), element("span", { className: "tags" }, ...tags));
  label.dataset.search = search;
  return label;
}

const tag = (textContent, title = "") => element("i", { textContent, title });
const words = (text) => text.toLowerCase().normalize("NFKD").replace(/[^\p{L}\p{N}+]+/gu, " ").trim();
const compact = (text) => words(text).replace(/ /g, "");

/** The time that a method takes here, and whether the server allows it. */
const timeTag = (entry, card, limit) => tag(duration(estimate(entry, card)) + (estimate(entry, card) > limit ? ", more than is allowed here" : ""));

/** Recommended methods, then all of them by family in a closed list; `limit`: the seconds that the server allows. */
export function showMethods(box, reply, selected, card, limit, onSelect) {
  const byName = new Map(reply.methods.map((entry) => [entry.name, entry]));
  const recommended = element("fieldset", {}, element("legend", { textContent: "Start with one of these" }));
  for (const entry of reply.recommended) {
    const method = byName.get(baseName(entry.method)), tags = [tag(PURPOSES[entry.purpose] ?? entry.purpose, entry.reason), timeTag(method, card, limit)];
    if (!method.class_specific) tags.push(tag("same for every answer"));
    const search = [entry.method, entry.title, entry.purpose, method.sentence, ...method.also].join(" | ");
    recommended.append(methodLabel(entry.method, entry.title, tags, entry.sentence, search, entry.method === selected, method.slow, onSelect));
  }
  const all = element("details", { id: "all-methods" }, element("summary", { textContent: `All ${reply.methods.length} methods` }));
  const isListed = reply.recommended.some((entry) => entry.method === selected);
  for (const family of reply.families) {
    const set = element("fieldset", {}, element("legend", { textContent: family === "baseline" ? "controls" : family }));
    for (const entry of reply.methods.filter((method) => method.family === family)) {
      const tags = [];
      if (entry.control) tags.push(tag("control", "knows nothing of the model"));
      if (!entry.class_specific && !entry.control) tags.push(tag("same for every answer"));
      if (entry.slow) tags.push(timeTag(entry, card, limit));
      const search = [entry.name, entry.title, entry.sentence, entry.paper, family, ...entry.also].join(" | ");
      set.append(methodLabel(entry.name, entry.title, tags, entry.sentence, search, entry.name === selected && !isListed, entry.slow, onSelect));
    }
    all.append(set);
  }
  all.open = !isListed;
  box.replaceChildren(recommended, all, element("p", { id: "nothing-found", className: "hint", hidden: true }));
}

let revealed = ""; // the method that was last brought into view: the list is scrolled once for each

/** Select a method in the list, and bring it into view unless the visitor is in the list. */
export function selectMethod(box, method) {
  const radio = box.querySelector(`input[value="${CSS.escape(method)}"]`);
  for (const input of box.querySelectorAll("input")) input.checked = input === radio;
  const label = radio?.parentElement, all = radio?.closest("details");
  if (!label || label.hidden || revealed === method || box.contains(document.activeElement)) return;
  revealed = method;
  if (all) all.open = true;
  const bounds = box.getBoundingClientRect(), { top, bottom } = label.getBoundingClientRect();
  if (top < bounds.top || bottom > bounds.bottom) box.scrollTop += top - bounds.top - 40;
}

/** Show the methods that a query names: all of its words, or its letters without hyphens and spaces. */
export function filterMethods(box, query) {
  const parts = words(query).split(" "), joined = compact(query), all = box.querySelector("#all-methods");
  const matches = (text) => parts.every((part) => words(text).includes(part)) || compact(text).includes(joined);
  let count = 0;
  for (const set of box.querySelectorAll("fieldset")) {
    let anyVisible = false;
    for (const label of set.querySelectorAll("label")) {
      label.hidden = !matches(label.dataset.search);
      anyVisible ||= !label.hidden;
      count += !label.hidden;
    }
    set.hidden = !anyVisible;
  }
  if (joined) all.open = true;
  const nothing = box.querySelector("#nothing-found");
  nothing.hidden = count > 0;
  nothing.textContent = `No method matches “${query.trim()}”.`;
}

/** Formula, paper and cost of the method that is shown. */
export function showMethodFacts(box, entry, map) {
  if (!entry) return box.replaceChildren();
  const passes = `${map.forwards} forward and ${map.backwards} backward passes of the model, ${map.seconds.toFixed(2)} s.`, notes = plainNotes(map.notes);
  box.replaceChildren(element("code", { textContent: map.method }), element("code", { textContent: entry.summary }), element("p", { textContent: `Paper: ${entry.paper}. Cost: ${passes}` }), ...notes.map((textContent) => element("p", { textContent })));
}

const ranks = (values) => { const order = Array.from(values.keys()).sort((a, b) => values[a] - values[b]), rank = new Float64Array(values.length); order.forEach((index, place) => { rank[index] = place; }); return rank; };

/** Spearman's rank correlation of two maps; null where their sizes differ. */
function rankCorrelation(a, b) {
  if (a.length !== b.length) return null;
  const x = ranks(a), y = ranks(b), middle = (a.length - 1) / 2;
  let xy = 0, xx = 0;
  for (let k = 0; k < x.length; k++) { xy += (x[k] - middle) * (y[k] - middle); xx += (x[k] - middle) ** 2; }
  return xx ? xy / xx : null;
}

let thumbs = []; // the button of each method, its map, and where its agreement is written

export function showThumbs(box, reply, photo, onSelect) {
  thumbs = reply.explanations.map((entry) => {
    const map = slice(unpack(entry.maps), 0), canvas = element("canvas", { ariaHidden: "true" }), score = element("small");
    overlay(canvas, photo, { values: map.values, rows: map.shape[0], cols: map.shape[1] }, colourScale(map.values, entry.signed, "auto"), 0.85, true, 112);
    const button = element("button", { type: "button" }, canvas, entry.title, score);
    button.dataset.method = entry.method;
    button.addEventListener("click", () => onSelect(entry.method));
    return { button, values: map.values, score };
  });
  box.replaceChildren(...thumbs.map(({ button }) => button));
}

/** Mark the method that is shown, and write how far each other one ranks the parts as its map does. */
export function rateThumbs(method, shown) {
  for (const { button, values, score } of thumbs) {
    const agreement = rankCorrelation(values, shown);
    score.textContent = agreement === null ? "–" : number(agreement, 2);
    button.setAttribute("aria-pressed", button.dataset.method === method);
  }
}
