// The layers as a film strip: one small map per layer under the slider, to be scrubbed by pointer.

import { slice } from "./api.js";
import { colourScale, contextOf, overlay } from "./colour.js";

const strip = document.getElementById("layer-strip"), slider = document.getElementById("layer");
const TILE = 64, GAP = 4;
let tiles = 0;

/** Draw the whole map and each layer's, for the first target; the selected one is framed. */
export function drawStrip(map, photo, selected, style) {
  const maps = [slice(map.maps, 0), ...Array.from({ length: map.layers?.shape[0] ?? 0 }, (_, layer) => slice(map.layers, layer, 0))];
  strip.hidden = !map.layers;
  tiles = maps.length;
  document.getElementById("layer-control").style.setProperty("--tiles", tiles);
  if (!map.layers) return;
  const small = document.createElement("canvas"), height = Math.round(TILE * photo.height / photo.width);
  strip.width = tiles * (TILE + GAP) - GAP;
  strip.height = height;
  const context = contextOf(strip);
  maps.forEach((grid, k) => {
    const values = style.signed ? grid.values : grid.values.map((v) => Math.max(0, v)), signed = style.signed && grid.values.some((v) => v < 0);
    overlay(small, photo, { values, rows: grid.shape[0], cols: grid.shape[1] }, colourScale(values, signed, style.cmap), style.opacity, style.smooth, TILE);
    context.drawImage(small, k * (TILE + GAP), 0);
  });
  context.lineWidth = 4;
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  context.strokeRect(selected * (TILE + GAP) + 2, 2, TILE - 4, height - 4);
}

function scrub(event) {
  if (event.type === "pointermove" && !event.buttons) return;
  const box = strip.getBoundingClientRect(), layer = Math.min(tiles - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * tiles)));
  if (Number(slider.value) === layer) return;
  slider.value = layer;
  slider.dispatchEvent(new Event("input"));
}
strip.addEventListener("pointerdown", scrub);
strip.addEventListener("pointermove", scrub);
