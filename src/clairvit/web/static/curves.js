// The film: parts are hidden or shown in the order of the map, next to the curve of the score and the range of random orders.

import { number, percent } from "./texts.js";

const perturbed = document.getElementById("perturbed"), chart = document.getElementById("chart");
const slider = document.getElementById("step"), description = document.getElementById("curve-text"), areas = document.getElementById("curve-areas");
const stepText = document.getElementById("step-text"), section = document.getElementById("curves");
const LEFT = 64, RIGHT = 388, TOP = 14, BOTTOM = 214, FRAME_MS = 260, STEPS = 14;
let film = null, timer = 0;

const svgElement = (name, attributes, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
};
const x = (fraction) => LEFT + fraction * (RIGHT - LEFT);
const inside = (value) => Math.min(BOTTOM - 6, Math.max(TOP + 12, value));
/** Below or above a line, whichever was asked for and has room. */
const beside = (lineY, below) => (below ? lineY + 34 < BOTTOM : lineY - 22 < TOP) ? lineY + 20 : lineY - 10;

export function clear(photo) {
  stop();
  film = null;
  section.dataset.film = "none";
  slider.disabled = true;
  stepText.textContent = "–";
  description.textContent = areas.textContent = "";
  chart.setAttribute("aria-label", "no film yet");
  drawAxes(chart, "parts of the photo", "", [0, 1]);
  if (photo) drawPhoto(photo, null);
}

export function stop() { clearInterval(timer); timer = 0; }

/** Start the film at once, in the order of the page's own map; `receive` adds the curve when it has been measured. */
export function play({ kind, rank, grid, photo, title, reply }) {
  stop();
  const counts = reply?.[kind].counts ?? Array.from({ length: STEPS + 1 }, (_, k) => Math.round(k * rank.length / STEPS));
  film = { kind, rank: reply?.rank ?? rank, grid, photo, title, reply: null, counts };
  section.dataset.film = "playing";
  Object.assign(slider, { max: counts.length - 1, disabled: false, value: 0 });
  areas.textContent = "";
  if (reply) receive(reply);
  drawFrame(0);
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) { slider.value = slider.max; return end(); }
  timer = setInterval(() => {
    const next = Number(slider.value) + 1;
    slider.value = next;
    drawFrame(next);
    if (next >= Number(slider.max)) { stop(); end(); }
  }, FRAME_MS);
}

/** Add the measured curves of both directions. */
export function receive(reply) {
  if (!film) return;
  const curve = reply[film.kind];
  if (curve.method.area === null) {
    clear(film.photo);
    description.textContent = "The score with nothing left is that of the whole photo, so there is no curve to show.";
    return;
  }
  Object.assign(film, { reply, curve, rank: reply.rank, counts: curve.counts });
  slider.max = curve.counts.length - 1;
  areas.textContent = areaText(reply);
  drawFrame(Number(slider.value));
  if (!timer && section.dataset.film === "waiting") end();
}

/** The areas of both directions. Whether the map is better than chance is for its test to say, on the badge. */
export function areaText(reply) {
  const part = (kind, words, wanted) => {
    const { method, random } = reply[kind];
    return method.area === null || random.area === null ? "" : `${words}: area under its line ${number(method.area, 2)}, under random orders ${number(random.area, 2)}; ${wanted} is better.`;
  };
  return [part("deletion", "Hiding the brightest first", "smaller"), part("insertion", "Showing them first", "larger")].join(" ").trim();
}

/** The frame that says most: the score has crossed half of the whole photo's. */
function tellingStep({ kind, curve }) {
  const values = curve.method.mean, half = (values[0] + values.at(-1)) / 2;
  const step = kind === "deletion" ? values.findIndex((v) => v <= half) : values.findIndex((v) => v >= half);
  return step < 0 ? values.length - 1 : step;
}

/** End on the telling frame, once the curve has been measured. */
function end() {
  section.dataset.film = film.reply ? "ended" : "waiting";
  if (!film.reply) return;
  slider.value = tellingStep(film);
  drawFrame(Number(slider.value));
}

slider.addEventListener("input", () => { stop(); if (film) { section.dataset.film = "ended"; drawFrame(Number(slider.value)); } });

function drawFrame(k) {
  const { curve, kind, reply, photo, rank, counts, title } = film, hides = kind === "deletion";
  drawPhoto(photo, { rank, grid: film.grid, count: counts[k], inserts: !hides });
  perturbed.setAttribute("aria-label", `the photo with ${counts[k]} of ${rank.length} parts ${hides ? "hidden" : "shown"}`);
  drawChart(chart, kind, reply, k, title);
  stepText.textContent = `${k} of ${counts.length - 1}`;
  const done = `${counts[k]} of ${rank.length} parts ${hides ? "hidden" : "shown"}`;
  if (!reply) { description.textContent = `${done}; measuring the score…`; return; }
  const { method, random } = curve, value = reply.meaning === "prob" ? percent(method.mean[k]) : `${reply.meaning} ${number(method.mean[k])}`;
  const chance = reply.meaning === "prob" ? percent(random.mean[k]) : number(random.mean[k]);
  description.textContent = `${done}: ${reply.target} ${value}; in random orders ${chance}.`;
}

/** The lowest and highest value on the vertical axis; raw scores may leave 0 … 1. */
function rangeOf(reply, kind) {
  if (!reply || reply.meaning === "prob") return [0, 1];
  const { method, random } = reply[kind], values = [...method.mean, ...random.low, ...random.high];
  return [Math.min(0, ...values), Math.max(1, ...values)];
}

const height = ([low, high]) => (value) => BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP);

/** Draw a curve up to a step, what follows of it, and the range of random orders; without a reply, the axes. */
function drawChart(svg, kind, reply, k, title) {
  const hides = kind === "deletion", range = rangeOf(reply, kind), y = height(range);
  drawAxes(svg, `share of the photo ${hides ? "hidden" : "shown"}`, reply ? (reply.meaning === "prob" ? `probability of ${reply.target}` : reply.meaning) : "", range);
  if (!reply) return;
  const curve = reply[kind], { method, random } = curve;
  const line = (xs, ys) => xs.map((value, step) => `${step ? "L" : "M"}${x(value).toFixed(1)} ${y(ys[step]).toFixed(1)}`).join(" ");
  const band = line(curve.x, random.high) + line([...curve.x].reverse(), [...random.low].reverse()).replace("M", "L") + "Z";
  const near = Math.round(curve.x.length * 0.3), far = Math.round(curve.x.length * 0.65), above = method.mean[far] > random.mean[far];
  const randomY = inside(above ? y(random.low[far]) + 16 : y(random.high[far]) - 6);
  svg.append(svgElement("path", { class: "band", d: band }), svgElement("path", { class: "random", d: line(curve.x, random.mean) }),
    svgElement("path", { class: "method-rest", d: line(curve.x, method.mean) }),
    svgElement("path", { class: "method", d: line(curve.x.slice(0, k + 1), method.mean) }),
    svgElement("circle", { class: "dot", cx: x(curve.x[k]), cy: y(method.mean[k]), r: 5 }),
    svgElement("text", { class: "random-label", x: x(curve.x[far]), y: randomY, "text-anchor": "middle" }, "random orders"),
    svgElement("text", { class: "label", x: x(curve.x[near]) + (hides ? -4 : 0), y: beside(y(method.mean[near]), hides), "text-anchor": "middle" }, "this map"));
  svg.setAttribute("aria-label", `${reply.target} while parts are ${hides ? "hidden" : "shown"} in the order of ${title}, and in random orders. ${areaText(reply)}`);
}

/** The whole curve of one direction as an SVG of its own; null where it could not be measured. */
export function wholeChart(reply, kind, title) {
  if (reply[kind].method.area === null) return null;
  const svg = svgElement("svg", { viewBox: chart.getAttribute("viewBox"), role: "img" });
  drawChart(svg, kind, reply, reply[kind].counts.length - 1, title);
  return svg;
}

function drawAxes(svg, label, vertical, range) {
  const y = height(range), isShare = vertical.startsWith("probability") || !vertical;
  svg.replaceChildren(svgElement("path", { class: "axis", d: `M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}` }));
  for (const p of [0, 0.5, 1]) {
    const value = range[0] + p * (range[1] - range[0]);
    svg.append(svgElement("path", { class: "axis", d: `M${LEFT} ${y(value)}H${RIGHT}` }), svgElement("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, isShare ? `${100 * value} %` : number(value)),
      svgElement("text", { x: x(p), y: BOTTOM + 17, "text-anchor": p === 1 ? "end" : "middle" }, `${100 * p} %`));
  }
  svg.append(svgElement("text", { x: (LEFT + RIGHT) / 2, y: BOTTOM + 36, "text-anchor": "middle" }, label));
  if (vertical) svg.append(svgElement("text", { transform: `translate(12 ${(TOP + BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, vertical.length > 34 ? "probability" : vertical));
}

/** Draw the photo with the hidden parts in grey. */
function drawPhoto(photo, step) {
  perturbed.width = photo.width;
  perturbed.height = photo.height;
  const context = perturbed.getContext("2d");
  context.drawImage(photo, 0, 0);
  if (!step) return;
  const [rows, cols] = step.grid, h = photo.height / rows, w = photo.width / cols;
  context.fillStyle = "#808080";
  step.rank.forEach((rank, patch) => {
    if ((rank < step.count) === step.inserts) return;
    context.fillRect((patch % cols) * w, Math.floor(patch / cols) * h, w + 0.5, h + 0.5);
  });
}
