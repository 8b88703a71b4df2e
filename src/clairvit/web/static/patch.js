// One patch: a tooltip at the pointer with its rank among all patches and where it looks.

import * as api from "./api.js";
import { colourScale, contextOf, overlay } from "./colour.js";
import { state } from "./state.js";
import { number, plainMessage } from "./texts.js";

const tooltip = document.getElementById("tooltip"), text = document.getElementById("patch-text"), canvas = document.getElementById("attention");
const MAX_MATRIX_TOKENS = 600; // above it single rows are requested, not the whole matrix
let view = null, selected = null, cache = new Map(), latest = 0;

export function reset() { cache = new Map(); hide(); }

/** Set the maps that are shown; the selected patch stays selected. */
export function draw(newView) {
  view = newView;
  if (selected) select(selected.k, selected.row, selected.col);
}

/** Close the tooltip and take the square off the map. */
export function hide() {
  latest++;
  tooltip.hidden = true;
  if (selected && view) outline(-1, 0, 0, [1, 1]);
  selected = null;
}

/** The mean of a map over one patch, where the map may be finer than the patches. */
export function score(map, row, col, [rows, cols]) {
  const h = Math.max(1, Math.floor(map.rows / rows)), w = Math.max(1, Math.floor(map.cols / cols));
  let sum = 0;
  for (let r = row * h; r < (row + 1) * h; r++) for (let c = col * w; c < (col + 1) * w; c++) sum += map.values[r * map.cols + c];
  return sum / (h * w);
}

/** The rank of each patch, 0 the brightest, row by row. */
export function rankPatches(map, grid) {
  const scores = Array.from({ length: grid[0] * grid[1] }, (_, k) => score(map, Math.floor(k / grid[1]), k % grid[1], grid));
  const order = [...scores.keys()].sort((a, b) => scores[b] - scores[a]), rank = new Array(scores.length);
  order.forEach((patch, place) => { rank[patch] = place; });
  return rank;
}

/** Where another patch lies, seen from this one: "3 to the left and 2 up". */
function direction(rows, cols) {
  const parts = [];
  if (cols) parts.push(`${Math.abs(cols)} to the ${cols < 0 ? "left" : "right"}`);
  if (rows) parts.push(`${Math.abs(rows)} ${rows < 0 ? "up" : "down"}`);
  return parts.join(" and ");
}

async function select(k, row, col) {
  if (!view.panes[k]) return;
  const { shownMap, reply, card, photo, about, layer: shownLayer } = view.panes[k], grid = card.grid;
  if (row < 0 || col < 0 || row >= grid[0] || col >= grid[1]) return;
  selected = { k, row, col };
  outline(k, row, col, grid);
  const patchScore = score(shownMap, row, col, grid);
  let rank = 1;
  for (let r = 0; r < grid[0]; r++) for (let c = 0; c < grid[1]; c++) if (score(shownMap, r, c, grid) > patchScore) rank++;
  const summary = `Number ${rank} of ${grid[0] * grid[1]} parts${about ? ` for ${about}` : ""} (value ${number(patchScore)}${about && patchScore < 0 ? ", which speaks against" : ""}).`;
  Object.assign(tooltip.dataset, { row, col, rank, value: patchScore, most: "" });
  text.textContent = summary;
  tooltip.classList.toggle("wordy", !card.heads);
  tooltip.hidden = false;
  place(k, row, col, grid);
  if (!card.heads) return;
  const layer = shownLayer ? shownLayer - 1 : card.layers - 1, index = row * grid[1] + col, request = ++latest;
  try {
    const attentionValues = await attentionRow(layer, index, reply, card);
    if (request !== latest) return;
    const values = attentionValues.subarray(card.prefix, card.prefix + grid[0] * grid[1]);
    overlay(canvas, photo, { values, rows: grid[0], cols: grid[1] }, colourScale(values, false, "viridis"), 0.9, state.smooth, 184);
    drawSquare(canvas, row, col, grid);
    let best = 0;
    values.forEach((v, n) => { if (v > values[best]) best = n; });
    const away = direction(Math.floor(best / grid[1]) - row, best % grid[1] - col), which = layer === card.layers - 1 ? "the last layer" : `layer ${layer}`;
    tooltip.dataset.most = best;
    text.textContent = `${summary} In ${which} it looks most ${away ? `${away}` : "at itself"}.`;
    place(k, row, col, grid);
  } catch (error) { if (request === latest) text.textContent = `${summary} ${plainMessage(error)}`; }
}

/** Put the tooltip next to the patch, inside the window. */
function place(k, row, col, [rows, cols]) {
  const box = document.getElementById(`map-${k}`).getBoundingClientRect(), own = tooltip.getBoundingClientRect();
  const x = box.left + (col + 1) * box.width / cols + 10, y = box.top + (row + 1) * box.height / rows + 10;
  const left = x + own.width < innerWidth ? x : box.left + col * box.width / cols - own.width - 10;
  const top = y + own.height < innerHeight ? y : box.top + row * box.height / rows - own.height - 10;
  tooltip.style.left = `${Math.max(4, Math.min(left, innerWidth - own.width - 4))}px`;
  tooltip.style.top = `${Math.max(4, top)}px`;
}

async function attentionRow(layer, index, reply, card) {
  const tokens = card.prefix + card.grid[0] * card.grid[1], whole = tokens <= MAX_MATRIX_TOKENS;
  const head = state.head === "mean" || Number(state.head) < card.heads ? state.head : "mean";
  const key = [reply.photo, reply.model, layer, head, whole ? "" : index].join();
  if (!cache.has(key)) {
    const query = { photo: reply.photo, model: reply.model, head, patch: whole ? undefined : index };
    const pending = api.trace(layer, query).then((response) => api.unpack(response.attention));
    pending.catch(() => cache.delete(key));
    cache.set(key, pending);
    if (cache.size > 64) cache.delete(cache.keys().next().value);
  }
  const matrix = await cache.get(key);
  return api.slice(matrix, whole ? card.prefix + index : 0).values;
}

/** Draw a square around a patch. */
export function drawSquare(target, row, col, [rows, cols]) {
  const context = contextOf(target), w = target.width / cols, h = target.height / rows;
  for (const [lineWidth, strokeStyle] of [[4, "#000"], [2, "#fff"]]) {
    Object.assign(context, { lineWidth, strokeStyle });
    context.strokeRect(col * w, row * h, w, h);
  }
}

const savedMaps = new Map(); // the maps without a square, so that the square can move
function outline(k, row, col, grid) {
  for (const n of [0, 1]) {
    const target = document.getElementById(`map-${n}`), context = contextOf(target), saved = savedMaps.get(n);
    if (saved && saved.view === view) context.putImageData(saved.image, 0, 0);
    else savedMaps.set(n, { view, image: context.getImageData(0, 0, target.width, target.height) });
    if (n === k) drawSquare(target, row, col, grid);
  }
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
for (const k of [0, 1]) {
  const target = document.getElementById(`map-${k}`);
  const selectAt = (event) => {
    if (!view?.panes[k] || view.isHeld()) return;
    const box = target.getBoundingClientRect(), [rows, cols] = view.panes[k].card.grid;
    const row = Math.floor((event.clientY - box.top) / box.height * rows), col = Math.floor((event.clientX - box.left) / box.width * cols);
    if (!selected || selected.k !== k || selected.row !== row || selected.col !== col) select(k, row, col);
  };
  target.addEventListener("pointermove", selectAt);
  target.addEventListener("pointerdown", selectAt);
  target.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
  target.addEventListener("blur", hide);
  target.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const step = STEPS[event.key];
    if (!step || !view?.panes[k]) return;
    event.preventDefault();
    const [rows, cols] = view.panes[k].card.grid, current = selected?.k === k ? selected : { row: rows >> 1, col: (cols >> 1) - step[1] };
    select(k, Math.min(rows - 1, Math.max(0, current.row + step[0])), Math.min(cols - 1, Math.max(0, current.col + step[1])));
  });
}
document.addEventListener("pointerdown", (event) => { if (selected && !event.target.closest?.("#map-0, #map-1")) hide(); });
addEventListener("scroll", () => { if (selected) place(selected.k, selected.row, selected.col, view.panes[selected.k].card.grid); }, { passive: true });
