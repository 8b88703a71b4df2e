// Which parts are alike: point at one, and the others are coloured by the cosine of their features in a layer.

import * as api from "./api.js";
import { drawPhoto, overlay } from "./colour.js";
import { drawSquare } from "./patch.js";
import { state } from "./state.js";
import { number, plainMessage } from "./texts.js";

const $ = (id) => document.getElementById(id);
const panel = $("similar"), canvas = $("similar-map"), text = $("similar-text"), slider = $("similar-layer");
const WIDTH = 448, MAX_PAIRED_PARTS = 600; // above it single rows are requested, not all pairs
let view = null, place = null, grid = null, cache = new Map(), latest = 0; // place: {y, x} of the selected part, in 0…1

/** Set the photo and the model; what was selected on another photo is not. */
export function setPhoto(newView) {
  const otherModel = view?.reply.model !== newView.reply.model, changed = otherModel || view.reply.photo !== newView.reply.photo;
  view = newView;
  if (!changed) return;
  cache = new Map();
  place = null;
  grid = view.card.grid;
  if (otherModel) Object.assign(slider, { max: view.card.layers, value: view.card.layers });
  if (panel.open) show();
}

function show() {
  $("similar-layer-text").textContent = `${slider.value} of ${slider.max}`;
  latest++;
  if (!view) return;
  if (place) return select(place);
  drawPhoto(canvas, view.photo, WIDTH);
  text.textContent = "Point at a part.";
}

const partAt = ({ y, x }, [rows, cols]) => Math.floor(y * rows) * cols + Math.floor(x * cols);
const placeOf = (row, col, [rows, cols]) => ({ y: (row + 0.5) / rows, x: (col + 0.5) / cols });

async function select(newPlace) {
  const request = ++latest;
  place = newPlace;
  try {
    const { values, shape } = await cosinesAt(Number(slider.value) - 1, place);
    if (request !== latest) return;
    grid = shape; // of this layer: later stages of some models are coarser
    const [rows, cols] = grid, part = partAt(place, grid);
    const others = [...values.keys()].filter((other) => other !== part).sort((a, b) => values[b] - values[a]), best = others[0];
    const scale = { low: Math.min(values[others.at(-1)], values[best] - 1e-6), high: values[best], signed: false, beyond: [false, true], cmap: "viridis" };
    overlay(canvas, view.photo, { values, rows, cols }, scale, 0.9, state.smooth, WIDTH);
    drawSquare(canvas, Math.floor(part / cols), part % cols, grid);
    Object.assign(canvas.dataset, { part, best, cosine: values[best] });
    text.textContent = `Most alike: row ${Math.floor(best / cols) + 1}, column ${best % cols + 1} (cosine ${number(values[best])}); ${others.filter((other) => values[other] > 0.5).length} of ${others.length} other parts are above 0.5. Least alike: cosine ${number(scale.low)}.`;
  } catch (error) { if (request === latest) text.textContent = plainMessage(error); }
}

/** The cosines of the part at a place to all parts; of all pairs where there are few parts, so that pointing needs no request. */
async function cosinesAt(layer, at) {
  const { reply, card } = view, paired = card.grid[0] * card.grid[1] <= MAX_PAIRED_PARTS, key = paired ? layer : [layer, at.y, at.x].join();
  if (!cache.has(key)) {
    const pending = api.similarity(layer, { photo: reply.photo, model: reply.model, place: paired ? {} : at });
    const unpacked = pending.then((response) => ({ shape: response.grid, cosine: api.unpack(response.cosine) }));
    unpacked.catch(() => cache.delete(key));
    cache.set(key, unpacked);
    if (cache.size > 64) cache.delete(cache.keys().next().value);
  }
  const { shape, cosine } = await cache.get(key);
  return { values: api.slice(cosine, paired ? partAt(at, shape) : 0).values, shape };
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
function selectAt(event) {
  if (!view) return;
  const box = canvas.getBoundingClientRect(), at = { y: (event.clientY - box.top) / box.height, x: (event.clientX - box.left) / box.width };
  if (at.y < 0 || at.x < 0 || at.y >= 1 || at.x >= 1) return;
  const part = partAt(at, grid), [, cols] = grid;
  if (!place || partAt(place, grid) !== part) select(placeOf(Math.floor(part / cols), part % cols, grid));
}
canvas.addEventListener("pointermove", selectAt);
canvas.addEventListener("pointerdown", selectAt);
canvas.addEventListener("keydown", (event) => {
  const step = STEPS[event.key];
  if (!step || !view) return;
  event.preventDefault();
  const [rows, cols] = grid, part = place ? partAt(place, grid) : null;
  const [row, col] = part === null ? [rows >> 1, cols >> 1] : [Math.floor(part / cols) + step[0], part % cols + step[1]];
  select(placeOf(Math.min(rows - 1, Math.max(0, row)), Math.min(cols - 1, Math.max(0, col)), grid));
});
slider.addEventListener("input", show);
panel.addEventListener("toggle", () => { if (panel.open) show(); });
