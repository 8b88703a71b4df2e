// Several photos: a table of photo, answer and test; a click shows one.

import * as api from "./api.js";
import { badgeText, badgeStyle } from "./answer.js";
import { contextOf } from "./colour.js";
import { element, plainMessage, valueText } from "./texts.js";

const table = document.getElementById("photos"), body = table.querySelector("tbody");
export const MAX_PHOTOS = 20;
let rows = [], work = new AbortController();

/** List files; `onSelect(file)` shows one, `onCompare(file)` compares it with the one that is shown. One file needs no list. */
export function listPhotos(files, onSelect, onCompare) {
  work.abort();
  work = new AbortController();
  table.hidden = files.length < 2;
  rows = files.map((file) => {
    const canvas = element("canvas", { width: 56, height: 56 }), button = element("button", { type: "button" }, canvas);
    button.setAttribute("aria-label", `Show ${file.name}`);
    button.addEventListener("click", () => onSelect(file));
    const second = element("button", { type: "button", className: "second", textContent: "+", title: "Compare with the photo that is shown" });
    second.setAttribute("aria-label", `Compare ${file.name} with the photo that is shown`);
    second.addEventListener("click", () => onCompare(file));
    const row = { file, canvas, button, second, answer: element("span", { textContent: "waiting…" }), trust: element("span", { className: "verdict" }), done: false, failed: false };
    const name = element("span", { className: "file", textContent: file.name, title: file.name });
    row.element = element("tr", {}, element("td", {}, element("div", { className: "photo-buttons" }, button, second)), element("td", {}, name, row.answer), element("td", {}, row.trust));
    return row;
  });
  body.replaceChildren(...rows.map((row) => row.element));
}

const rowOf = (file) => rows.find((row) => row.file === file);

/** Mark the photo that is shown, and the one that it is compared with. */
export function markShown(file, other) {
  for (const row of rows) {
    row.button.setAttribute("aria-pressed", row.file === file);
    row.second.setAttribute("aria-pressed", row.file === other);
    row.second.disabled = row.failed || row.file === file;
  }
}

export async function fillAnswer(file, reply, picture) {
  const row = rowOf(file);
  if (!row) return;
  row.done = true;
  const [first] = reply.top;
  if (first) row.answer.replaceChildren(`${first.name} `, element("span", { className: "nowrap", textContent: valueText(first.probability, first.score) }));
  else if (!reply.other) row.answer.textContent = "no classes";
  if (picture) contextOf(row.canvas).drawImage(picture, 0, 0, 56, 56);
}

export function fillCheck(file, check, hasCaution) {
  const row = rowOf(file);
  if (!row) return;
  row.trust.textContent = badgeText(check, hasCaution);
  row.trust.dataset.style = badgeStyle(check, hasCaution);
}

/** Answer and test the other photos one after another, in the background. */
export async function processRest(method, model, decode) {
  const { signal } = work;
  for (const row of rows) {
    if (row.done) continue;
    try {
      const reply = await api.explain({ image: row.file, method, model, picture: true }, { signal });
      if (signal.aborted) return;
      await fillAnswer(row.file, reply, await decode(reply.picture));
      const target = reply.classes[0] === null ? null : String(reply.classes[0]);
      fillCheck(row.file, await api.check({ photo: reply.photo, model, method: reply.explanations[0].method, target }, { signal }), reply.cautions.length > 0);
    } catch (error) {
      if (error.name === "AbortError") return;
      row.done = row.failed = row.second.disabled = true;
      row.answer.textContent = plainMessage(error);
    }
  }
}
