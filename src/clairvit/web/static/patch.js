// One patch: its score, its place among all patches, and where it attends.

import * as api from "./api.js";
import { overlay, penOf, scaleOf } from "./colour.js";
import { state } from "./state.js";

const text = document.getElementById("patch-text"), canvas = document.getElementById("attends");
const MANY = 600; // tokens above which single rows are asked for, not the whole matrix
let seen = null, chosen = null, cache = new Map(), turn = 0;

export function forget() { cache = new Map(); chosen = null; }

/** The maps on show; a patch that was chosen stays so. */
export function draw(what) {
  seen = what;
  if (chosen) pick(chosen.k, chosen.row, chosen.col);
  else { overlay(canvas, what.photo, { values: new Float32Array(1), rows: 1, cols: 1 }, scaleOf([0], false, "auto"), 0, true); text.textContent = "No patch chosen."; }
}

/** The mean of a map over one patch, where the map may be finer than the patches. */
function score(map, row, col, [rows, cols]) {
  const h = Math.max(1, Math.floor(map.rows / rows)), w = Math.max(1, Math.floor(map.cols / cols));
  let sum = 0;
  for (let r = row * h; r < (row + 1) * h; r++) for (let c = col * w; c < (col + 1) * w; c++) sum += map.values[r * map.cols + c];
  return sum / (h * w);
}

async function pick(k, row, col) {
  const { maps, reply, card, photo } = seen, grid = card.grid;
  if (row < 0 || col < 0 || row >= grid[0] || col >= grid[1] || !maps[k]) return;
  chosen = { k, row, col };
  frame(k, row, col, grid);
  const own = score(maps[k], row, col, grid);
  let place = 1;
  for (let r = 0; r < grid[0]; r++) for (let c = 0; c < grid[1]; c++) if (score(maps[k], r, c, grid) > own) place++;
  const words = `Row ${row + 1}, column ${col + 1}: score ${own.toPrecision(3)} for ${reply.targets[k]}, place ${place} of ${grid[0] * grid[1]}.`;
  if (!card.heads) { text.textContent = `${words} This model has no attention between patches.`; return; }
  const layer = state.layer ? state.layer - 1 : card.layers - 1, index = row * grid[1] + col, mine = ++turn;
  try {
    const looks = await attention(layer, index, reply, card);
    if (mine !== turn) return;
    const values = looks.subarray(card.prefix);
    overlay(canvas, photo, { values, rows: grid[0], cols: grid[1] }, scaleOf(values, false, "viridis"), 0.85, state.smooth);
    mark(canvas, row, col, grid);
    let best = 0, all = 0;
    values.forEach((v, n) => { all += v; if (v > values[best]) best = n; });
    const elsewhere = card.prefix ? `; ${Math.abs(100 * (1 - all)).toFixed(0)} % of the attention is on tokens that are no patches` : "";
    const head = state.head === "mean" ? "its heads look" : `head ${state.head} looks`;
    text.textContent = `${words} In layer ${layer}, ${head} most at row ${Math.floor(best / grid[1]) + 1}, column ${best % grid[1] + 1}${elsewhere}.`;
  } catch (error) { text.textContent = `${words} ${error.message}`; }
}

async function attention(layer, index, reply, card) {
  const tokens = card.prefix + card.grid[0] * card.grid[1], whole = tokens <= MANY;
  const key = [reply.photo, reply.model, layer, state.head, whole ? "" : index].join();
  if (!cache.has(key)) {
    const asked = { photo: reply.photo, model: reply.model, head: state.head, patch: whole ? undefined : index };
    const wanted = api.trace(layer, asked).then((found) => api.unpack(found.attention));
    wanted.catch(() => cache.delete(key));
    cache.set(key, wanted);
    if (cache.size > 64) cache.delete(cache.keys().next().value);
  }
  const found = await cache.get(key);
  return api.part(found, whole ? card.prefix + index : 0).values;
}

/** A square around the patch; the map below is kept so that the square can move. */
function mark(on, row, col, [rows, cols]) {
  const pen = penOf(on), w = on.width / cols, h = on.height / rows;
  pen.lineWidth = 3;
  pen.strokeStyle = "#000";
  pen.strokeRect(col * w, row * h, w, h);
  pen.lineWidth = 1.5;
  pen.strokeStyle = "#fff";
  pen.strokeRect(col * w, row * h, w, h);
}

const kept = new Map();
function frame(k, row, col, grid) {
  for (const n of [0, 1]) {
    const on = document.getElementById(`map-${n}`), pen = penOf(on), before = kept.get(n);
    if (before && before.of === seen) pen.putImageData(before.image, 0, 0);
    else kept.set(n, { of: seen, image: pen.getImageData(0, 0, on.width, on.height) });
    if (n === k) mark(on, row, col, grid);
  }
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
for (const k of [0, 1]) {
  const on = document.getElementById(`map-${k}`);
  const point = (event) => {
    if (!seen) return;
    const box = on.getBoundingClientRect(), [rows, cols] = seen.card.grid;
    const row = Math.floor((event.clientY - box.top) / box.height * rows), col = Math.floor((event.clientX - box.left) / box.width * cols);
    if (!chosen || chosen.k !== k || chosen.row !== row || chosen.col !== col) pick(k, row, col);
  };
  on.addEventListener("pointermove", point);
  on.addEventListener("pointerdown", point);
  on.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step || !seen) return;
    event.preventDefault();
    const [rows, cols] = seen.card.grid, at = chosen?.k === k ? chosen : { row: rows >> 1, col: (cols >> 1) - step[1] };
    pick(k, Math.min(rows - 1, Math.max(0, at.row + step[0])), Math.min(cols - 1, Math.max(0, at.col + step[1])));
  });
}
