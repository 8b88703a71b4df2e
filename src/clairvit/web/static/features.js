// The features of a layer, without an answer: which parts are alike, the main directions as colours, and the lengths.

import * as api from "./api.js";
import { colourScale, contextOf, drawPhoto, enlarge, overlay, sizeCanvas } from "./colour.js";
import { drawSquare } from "./patch.js";
import { state } from "./state.js";
import { element, number, percent, plainMessage } from "./texts.js";

const $ = (id) => document.getElementById(id);
const panel = $("features"), text = $("alike-text"), slider = $("features-layer"), box = $("features-grid");
const WIDTH = 384, MAX_PAIRED_PARTS = 600; // above it single rows are requested, not all pairs
const KINDS = { alike: "alike to the part under the pointer", colours: "main directions of the features as colours", lengths: "lengths of the features" };
let view = null, place = null, grid = null, layerReply = null, cache = new Map(), latest = 0; // place: {image, y, x} of the selected part, y and x in 0…1
let canvases = []; // per photo: { alike, colours, lengths }

const photos = () => view.other ? [view, view.other] : [view];

/** Set the photos and the model; what was selected on another photo is not. */
export function setPhoto(newView) {
  const otherModel = view?.reply.model !== newView.reply.model, ids = ({ reply, other }) => [reply.photo, other?.reply.photo].join();
  const changed = otherModel || ids(view) !== ids(newView);
  view = newView;
  if (!changed) return;
  cache = new Map();
  place = null;
  grid = view.card.grid;
  if (otherModel) Object.assign(slider, { max: view.card.layers, value: view.card.layers });
  if (panel.open) show();
}

/** One row of canvases per photo. */
function layOut() {
  if (canvases.length === photos().length) return;
  canvases = photos().map((_, image) => Object.fromEntries(Object.keys(KINDS).map((kind) => {
    const canvas = element("canvas", { id: image ? `${kind}-map-1` : `${kind}-map` });
    canvas.setAttribute("role", "img");
    if (kind === "alike") { canvas.tabIndex = 0; canvas.setAttribute("aria-describedby", "alike-text"); canvas.addEventListener("keydown", (event) => step(event, image)); }
    for (const type of ["pointermove", "pointerdown"]) canvas.addEventListener(type, (event) => selectAt(event, canvas, image));
    return [kind, canvas];
  })));
  for (const kind of Object.keys(KINDS)) $(`${kind}-column`).querySelector(".canvases").replaceChildren(...canvases.map((row) => row[kind]));
}

async function show() {
  $("features-layer-text").textContent = `${slider.value - 1} (0 to ${slider.max - 1})`; // counted from 0, as in the library
  slider.setAttribute("aria-valuetext", `layer ${slider.value - 1}`);
  if (!view) return;
  const request = ++latest;
  layOut();
  canvases.forEach((row, image) => { for (const [kind, canvas] of Object.entries(row)) canvas.setAttribute("aria-label", `${image ? "the second photo" : "the photo"}: ${KINDS[kind]}`); });
  if (!place) canvases.forEach((row, image) => drawPhoto(row.alike, photos()[image].photo, WIDTH));
  text.textContent = "Point at a part of a picture, or move with the arrow keys.";
  try {
    layerReply = await featuresOf(Number(slider.value) - 1, place ?? { image: 0, y: 0.5, x: 0.5 });
    if (request !== latest) return;
    grid = layerReply.grid; // later stages of some models are coarser
    box.dataset.layer = slider.value;
    drawColours();
    drawLengths();
    if (place) drawAlike();
  } catch (error) { if (request === latest) text.textContent = plainMessage(error); }
}

/** Three principal components as red, green and blue, on one scale for all photos. */
function drawColours() {
  const [rows, cols] = grid, { pca, limits, explained_variance_ratio: ratios } = layerReply;
  canvases.forEach(({ colours }, image) => {
    const { width, height } = sizeCanvas(colours, photos()[image].photo, WIDTH), context = contextOf(colours), picture = context.createImageData(width, height), part = api.slice(pca, image).values;
    for (let c = 0; c < 3; c++) {
      const low = limits.values[c], high = limits.values[3 + c];
      const scaled = Float64Array.from({ length: rows * cols }, (_, k) => high > low ? Math.min(1, Math.max(0, (part[3 * k + c] - low) / (high - low))) : 0.5);
      enlarge(scaled, rows, cols, height, width, state.smooth).forEach((value, pixel) => { picture.data[4 * pixel + c] = 255 * value; });
    }
    for (let pixel = 0; pixel < width * height; pixel++) picture.data[4 * pixel + 3] = 255;
    context.putImageData(picture, 0, 0);
  });
  $("colours-text").textContent = `Parts of the same colour are alike${view.other ? ", in both photos" : ""}. The three main directions hold ${percent(ratios.reduce((a, b) => a + b, 0))} of the differences between parts.`;
}

function drawLengths() {
  const [rows, cols] = grid, { norms, outliers } = layerReply, scale = colourScale(norms.values, false, "viridis");
  canvases.forEach(({ lengths }, image) => overlay(lengths, photos()[image].photo, { values: api.slice(norms, image).values, rows, cols }, scale, 0.9, state.smooth, WIDTH));
  const [low, high] = [Math.min(...norms.values), Math.max(...norms.values)];
  $("lengths-text").textContent = `The length of what it holds: from ${number(low)} (no colour) to ${number(high)} (yellow).${outliers ? ` ${outliers} stand out: models often keep notes about the whole photo in such parts.` : outliers === 0 ? " No part stands out." : ""}`;
}

const partAt = ({ image, y, x }, [rows, cols]) => (image * rows + Math.floor(y * rows)) * cols + Math.floor(x * cols);
const placeOf = (image, row, col, [rows, cols]) => ({ image, y: (row + 0.5) / rows, x: (col + 0.5) / cols });

async function select(newPlace) {
  const request = ++latest;
  place = newPlace;
  try {
    layerReply = await featuresOf(Number(slider.value) - 1, place);
    if (request === latest) drawAlike();
  } catch (error) { if (request === latest) text.textContent = plainMessage(error); }
}

/** Colour all parts of all photos by their cosine to the selected one. */
function drawAlike() {
  const [rows, cols] = grid, part = partAt(place, grid), count = rows * cols;
  const values = api.slice(layerReply.cosine, layerReply.patch === null ? part : 0).values;
  const others = [...values.keys()].filter((other) => other !== part).sort((a, b) => values[b] - values[a]), best = others[0];
  const scale = { low: Math.min(values[others.at(-1)], values[best] - 1e-6), high: values[best], signed: false, beyond: [false, true], cmap: "viridis" };
  canvases.forEach(({ alike }, image) => {
    overlay(alike, photos()[image].photo, { values: values.subarray(image * count, (image + 1) * count), rows, cols }, scale, 0.9, state.smooth, WIDTH);
    if (image === place.image) drawSquare(alike, Math.floor(part / cols) - image * rows, part % cols, grid);
  });
  Object.assign(canvases[0].alike.dataset, { part, best, cosine: values[best] });
  const where = view.other ? ` in ${best < count ? "the first" : "the second"} photo` : "", row = Math.floor(best / cols) % rows;
  text.textContent = `Yellow is most alike: row ${row + 1}, column ${best % cols + 1}${where} (cosine ${number(values[best])}, where 1 is the same). No colour is least (${number(scale.low)}); ${others.filter((other) => values[other] > 0.5).length} of ${others.length} other parts are above 0.5.`;
}

/** The features of a layer; cosines of all pairs where there are few parts, so that pointing needs no request. */
function featuresOf(layer, at) {
  const { reply, card, other } = view, isPaired = photos().length * card.grid[0] * card.grid[1] <= MAX_PAIRED_PARTS;
  const key = isPaired ? layer : [layer, at.image, at.y, at.x].join();
  if (!cache.has(key)) {
    const fields = { photo: reply.photo, model: reply.model, other: other?.reply.photo, ...(isPaired ? {} : { y: at.y, x: at.x, of_other: at.image === 1 }) };
    const unpacked = api.features(layer, fields).then((response) => ({ ...response, ...Object.fromEntries(["pca", "limits", "norms", "cosine"].map((name) => [name, api.unpack(response[name])])) }));
    unpacked.catch(() => cache.delete(key));
    cache.set(key, unpacked);
    if (cache.size > 64) cache.delete(cache.keys().next().value);
  }
  return cache.get(key);
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
function selectAt(event, canvas, image) {
  if (!view) return;
  const bounds = canvas.getBoundingClientRect(), at = { image, y: (event.clientY - bounds.top) / bounds.height, x: (event.clientX - bounds.left) / bounds.width };
  if (at.y < 0 || at.x < 0 || at.y >= 1 || at.x >= 1) return;
  const part = partAt(at, grid), [rows, cols] = grid;
  if (!place || partAt(place, grid) !== part) select(placeOf(image, Math.floor(part / cols) - image * rows, part % cols, grid));
}
function step(event, image) {
  const move = STEPS[event.key];
  if (!move || !view) return;
  event.preventDefault();
  const [rows, cols] = grid, isHere = place?.image === image;
  const [row, col] = isHere ? [Math.floor(place.y * rows) + move[0], Math.floor(place.x * cols) + move[1]] : [rows >> 1, cols >> 1];
  select(placeOf(image, Math.min(rows - 1, Math.max(0, row)), Math.min(cols - 1, Math.max(0, col)), grid));
}
slider.addEventListener("input", show);
panel.addEventListener("toggle", () => { if (panel.open) show(); });
