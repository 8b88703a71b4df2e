// The lists: classes with bars, methods by family, thumbnails of all one-trace methods.

import { overlay, scaleOf } from "./colour.js";
import { unpack, part } from "./api.js";

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export const percent = (p) => p === null ? "" : p < 0.0005 ? "<0.1 %" : p < 0.0995 ? `${(100 * p).toFixed(1)} %` : `${Math.round(100 * p)} %`;

/** A probability, or the score itself where the model has no probabilities. */
export const valueText = (probability, score) => probability !== null ? percent(probability) : score === null ? "" : `score ${score.toPrecision(3)}`;

/** Top classes; a click makes one the target, "+" puts it beside. */
export function showClasses(list, top, targets, choose, beside) {
  const again = document.activeElement?.dataset?.key;
  list.replaceChildren(...top.map((one) => {
    const name = element("button", { type: "button", className: "name" },
      element("span", { textContent: one.name, title: one.name }), element("span", { textContent: valueText(one.probability, one.score) }));
    if (one.probability !== null) name.append(element("meter", { min: 0, max: 1, value: one.probability, ariaHidden: "true" }));
    name.dataset.key = `class-${one.index}`;
    name.setAttribute("aria-pressed", targets[0] === one.index);
    name.addEventListener("click", () => choose(one.index));
    const also = element("button", { type: "button", className: "also", textContent: targets[1] === one.index ? "−" : "+", title: "Side by side", disabled: targets[0] === one.index });
    also.dataset.key = `also-${one.index}`;
    also.setAttribute("aria-label", `Show ${one.name} beside`);
    also.setAttribute("aria-pressed", targets[1] === one.index);
    also.addEventListener("click", () => beside(one.index));
    return element("li", {}, name, also);
  }));
  if (again) list.querySelector(`[data-key="${CSS.escape(again)}"]`)?.focus();
}

/** Radio buttons by family, each with its line. */
export function showMethods(box, reply, chosen, choose) {
  box.replaceChildren(...reply.families.map((family) => {
    const set = element("fieldset", {}, element("legend", { textContent: family }));
    for (const one of reply.methods.filter((method) => method.family === family)) {
      const radio = element("input", { type: "radio", name: "method", value: one.name, checked: one.name === chosen });
      radio.addEventListener("change", () => choose(one.name));
      const name = element("span", {}, element("b", { textContent: one.name }));
      if (one.signed) name.append(element("i", { textContent: "±", title: "signed: evidence for and against" }));
      if (!one.class_specific) name.append(element("i", { textContent: "any class", title: "the same map for all classes" }));
      if (one.slow) name.append(element("i", { textContent: "slow", title: `${one.forwards} forwards, ${one.backwards} backwards` }));
      const label = element("label", { title: one.paper }, radio, name, element("small", { textContent: one.summary }));
      label.dataset.words = `${one.name} ${one.summary} ${one.paper} ${family}`.toLowerCase();
      set.append(label);
    }
    return set;
  }));
}

export function filterMethods(box, words) {
  for (const set of box.children) {
    let any = false;
    for (const label of set.querySelectorAll("label")) {
      label.hidden = !label.dataset.words.includes(words.trim().toLowerCase());
      any ||= !label.hidden;
    }
    set.hidden = !any;
  }
}

export function showThumbs(box, reply, photo, chosen, choose) {
  box.replaceChildren(...reply.explanations.map((one) => {
    const map = part(unpack(one.maps), 0), canvas = element("canvas", { ariaHidden: "true" });
    overlay(canvas, photo, { values: map.values, rows: map.shape[0], cols: map.shape[1] }, scaleOf(map.values, one.signed, "auto"), 0.85, true, 112);
    const button = element("button", { type: "button", title: one.notes.join(" ") || one.method }, canvas, element("span", { textContent: one.method }));
    button.setAttribute("aria-pressed", one.method === chosen);
    button.dataset.method = one.method;
    button.addEventListener("click", () => choose(one.method));
    return button;
  }));
}
