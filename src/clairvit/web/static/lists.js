// The lists: classes with bars, methods by family, thumbnails of all one-trace methods.

import { colourScale, overlay } from "./colour.js";
import { slice, unpack } from "./api.js";

export function element(name, properties = {}, ...children) {
  const created = Object.assign(document.createElement(name), properties);
  created.append(...children);
  return created;
}

export const percent = (p) => p === null ? "" : p < 0.0005 ? "<0.1 %" : p < 0.0995 ? `${(100 * p).toFixed(1)} %` : `${Math.round(100 * p)} %`;

/** A probability, or the score itself where the model has no probabilities. */
export const valueText = (probability, score) => probability !== null ? percent(probability) : score === null ? "" : `score ${score.toPrecision(3)}`;

/** Top classes; a click makes one the target, "+" the second target. */
export function showClasses(list, top, targets, onSelect, onSelectSecond) {
  const focused = document.activeElement?.dataset?.key;
  list.replaceChildren(...top.map((entry) => {
    const name = element("button", { type: "button", className: "name" },
      element("span", { textContent: entry.name, title: entry.name }), element("span", { textContent: valueText(entry.probability, entry.score) }));
    if (entry.probability !== null) name.append(element("meter", { min: 0, max: 1, value: entry.probability, ariaHidden: "true" }));
    name.dataset.key = `class-${entry.index}`;
    name.setAttribute("aria-pressed", targets[0] === entry.index);
    name.addEventListener("click", () => onSelect(entry.index));
    const second = element("button", { type: "button", className: "second", textContent: targets[1] === entry.index ? "−" : "+", title: "Side by side", disabled: targets[0] === entry.index });
    second.dataset.key = `second-${entry.index}`;
    second.setAttribute("aria-label", `Show ${entry.name} side by side`);
    second.setAttribute("aria-pressed", targets[1] === entry.index);
    second.addEventListener("click", () => onSelectSecond(entry.index));
    return element("li", {}, name, second);
  }));
  if (focused) list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

/** Radio buttons by family, each with its summary. */
export function showMethods(box, reply, selected, onSelect) {
  const recommended = element("fieldset", {}, element("legend", { textContent: "recommended" }));
  for (const entry of reply.recommended) {
    const radio = element("input", { type: "radio", name: "method", value: entry.method, checked: entry.method === selected });
    radio.addEventListener("change", () => onSelect(entry.method));
    const name = element("span", {}, element("b", { textContent: entry.method }), element("i", { textContent: entry.purpose }));
    const label = element("label", { title: entry.evidence }, radio, name, element("small", { textContent: entry.reason }));
    label.dataset.search = `${entry.method} ${entry.purpose} ${entry.reason}`.toLowerCase();
    recommended.append(label);
  }
  box.replaceChildren(recommended, ...reply.families.map((family) => {
    const set = element("fieldset", {}, element("legend", { textContent: family }));
    for (const entry of reply.methods.filter((method) => method.family === family)) {
      const radio = element("input", { type: "radio", name: "method", value: entry.name, checked: entry.name === selected && !recommended.querySelector(":checked") });
      radio.addEventListener("change", () => onSelect(entry.name));
      const name = element("span", {}, element("b", { textContent: entry.name }));
      if (entry.signed) name.append(element("i", { textContent: "±", title: "signed: evidence for and against" }));
      if (!entry.class_specific) name.append(element("i", { textContent: "any class", title: "the same map for all classes" }));
      if (entry.slow) name.append(element("i", { textContent: "slow", title: `${entry.forwards} forwards, ${entry.backwards} backwards` }));
      const label = element("label", { title: entry.paper }, radio, name, element("small", { textContent: entry.summary }));
      label.dataset.search = `${entry.name} ${entry.summary} ${entry.paper} ${family}`.toLowerCase();
      set.append(label);
    }
    return set;
  }));
}

export function filterMethods(box, query) {
  for (const set of box.children) {
    let anyVisible = false;
    for (const label of set.querySelectorAll("label")) {
      label.hidden = !label.dataset.search.includes(query.trim().toLowerCase());
      anyVisible ||= !label.hidden;
    }
    set.hidden = !anyVisible;
  }
}

export function showThumbs(box, reply, photo, selected, onSelect) {
  box.replaceChildren(...reply.explanations.map((entry) => {
    const map = slice(unpack(entry.maps), 0), canvas = element("canvas", { ariaHidden: "true" });
    overlay(canvas, photo, { values: map.values, rows: map.shape[0], cols: map.shape[1] }, colourScale(map.values, entry.signed, "auto"), 0.85, true, 112);
    const button = element("button", { type: "button", title: entry.notes.join(" ") || entry.method }, canvas, element("span", { textContent: entry.method }));
    button.setAttribute("aria-pressed", entry.method === selected);
    button.dataset.method = entry.method;
    button.addEventListener("click", () => onSelect(entry.method));
    return button;
  }));
}
