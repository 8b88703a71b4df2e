// One patch: its score, its rank among all patches, and its attention.

import * as api from "./api.js";
import { colourScale, contextOf, overlay } from "./colour.js";
import { state } from "./state.js";

const text = document.getElementById("patch-text"), canvas = document.getElementById("attention");
const MAX_MATRIX_TOKENS = 600; // above it single rows are requested, not the whole matrix
let view = null, selected = null, cache = new Map(), latest = 0;

export function reset() { cache = new Map(); selected = null; }

/** Set the maps that are shown; the selected patch stays selected. */
export function draw(newView) {
  view = newView;
  if (selected) select(selected.k, selected.row, selected.col);
  else { overlay(canvas, newView.photo, { values: new Float32Array(1), rows: 1, cols: 1 }, colourScale([0], false, "auto"), 0, true); text.textContent = "No patch selected."; }
}

/** The mean of a map over one patch, where the map may be finer than the patches. */
function score(map, row, col, [rows, cols]) {
  const h = Math.max(1, Math.floor(map.rows / rows)), w = Math.max(1, Math.floor(map.cols / cols));
  let sum = 0;
  for (let r = row * h; r < (row + 1) * h; r++) for (let c = col * w; c < (col + 1) * w; c++) sum += map.values[r * map.cols + c];
  return sum / (h * w);
}

async function select(k, row, col) {
  const { maps, reply, card, photo } = view, grid = card.grid;
  if (row < 0 || col < 0 || row >= grid[0] || col >= grid[1] || !maps[k]) return;
  selected = { k, row, col };
  outline(k, row, col, grid);
  const patchScore = score(maps[k], row, col, grid);
  let rank = 1;
  for (let r = 0; r < grid[0]; r++) for (let c = 0; c < grid[1]; c++) if (score(maps[k], r, c, grid) > patchScore) rank++;
  const summary = `Row ${row + 1}, column ${col + 1}: score ${patchScore.toPrecision(3)} for ${reply.targets[k]}, rank ${rank} of ${grid[0] * grid[1]}.`;
  if (!card.heads) { text.textContent = `${summary} This model has no attention between patches.`; return; }
  const layer = state.layer ? state.layer - 1 : card.layers - 1, index = row * grid[1] + col, request = ++latest;
  try {
    const attentionValues = await attentionRow(layer, index, reply, card);
    if (request !== latest) return;
    const values = attentionValues.subarray(card.prefix, card.prefix + grid[0] * grid[1]);
    overlay(canvas, photo, { values, rows: grid[0], cols: grid[1] }, colourScale(values, false, "viridis"), 0.85, state.smooth);
    drawSquare(canvas, row, col, grid);
    let best = 0, total = 0;
    values.forEach((v, n) => { total += v; if (v > values[best]) best = n; });
    const elsewhere = attentionValues.length > values.length ? `; ${Math.abs(100 * (1 - total)).toFixed(0)} % of the attention is on tokens that are not patches` : "";
    const head = state.head === "mean" ? "its heads attend" : `head ${state.head} attends`;
    text.textContent = `${summary} In layer ${layer}, ${head} most to row ${Math.floor(best / grid[1]) + 1}, column ${best % grid[1] + 1}${elsewhere}.`;
  } catch (error) { text.textContent = `${summary} ${error.message}`; }
}

async function attentionRow(layer, index, reply, card) {
  const tokens = card.prefix + card.grid[0] * card.grid[1], whole = tokens <= MAX_MATRIX_TOKENS;
  const key = [reply.photo, reply.model, layer, state.head, whole ? "" : index].join();
  if (!cache.has(key)) {
    const query = { photo: reply.photo, model: reply.model, head: state.head, patch: whole ? undefined : index };
    const pending = api.trace(layer, query).then((response) => api.unpack(response.attention));
    pending.catch(() => cache.delete(key));
    cache.set(key, pending);
    if (cache.size > 64) cache.delete(cache.keys().next().value);
  }
  const matrix = await cache.get(key);
  return api.slice(matrix, whole ? card.prefix + index : 0).values;
}

/** Draw a square around a patch. */
function drawSquare(target, row, col, [rows, cols]) {
  const context = contextOf(target), w = target.width / cols, h = target.height / rows;
  context.lineWidth = 3;
  context.strokeStyle = "#000";
  context.strokeRect(col * w, row * h, w, h);
  context.lineWidth = 1.5;
  context.strokeStyle = "#fff";
  context.strokeRect(col * w, row * h, w, h);
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
    if (!view) return;
    const box = target.getBoundingClientRect(), [rows, cols] = view.card.grid;
    const row = Math.floor((event.clientY - box.top) / box.height * rows), col = Math.floor((event.clientX - box.left) / box.width * cols);
    if (!selected || selected.k !== k || selected.row !== row || selected.col !== col) select(k, row, col);
  };
  target.addEventListener("pointermove", selectAt);
  target.addEventListener("pointerdown", selectAt);
  target.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step || !view) return;
    event.preventDefault();
    const [rows, cols] = view.card.grid, current = selected?.k === k ? selected : { row: rows >> 1, col: (cols >> 1) - step[1] };
    select(k, Math.min(rows - 1, Math.max(0, current.row + step[0])), Math.min(cols - 1, Math.max(0, current.col + step[1])));
  });
}
