// Deletion and insertion: an animation of patches removed or inserted in order, and the curve of the score.

import { percent } from "./lists.js";

const perturbed = document.getElementById("perturbed"), chart = document.getElementById("chart");
const slider = document.getElementById("step"), description = document.getElementById("curve-text");
const stepText = document.getElementById("step-text");
const LEFT = 34, RIGHT = 302, TOP = 10, BOTTOM = 206, FRAME_MS = 260;
let shown = null, timer = 0, range = [0, 1]; // lowest and highest value on the vertical axis

const svgElement = (name, attributes, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
};
const x = (fraction) => LEFT + fraction * (RIGHT - LEFT);
const y = (value) => BOTTOM - (value - range[0]) / (range[1] - range[0]) * (BOTTOM - TOP);
const line = (xs, ys) => xs.map((value, k) => `${k ? "L" : "M"}${x(value).toFixed(1)} ${y(ys[k]).toFixed(1)}`).join(" ");

export function clear(photo) {
  stop();
  shown = null;
  slider.disabled = true;
  stepText.textContent = "–";
  range = [0, 1];
  description.textContent = "The highest patches are removed first; a faithful map makes the score fall fast.";
  drawAxes("fraction of the patches");
  if (photo) drawPhoto(photo, null);
}

export function stop() { clearInterval(timer); timer = 0; }

/** Show one of the two curves of a reply and play its animation. */
export function play(reply, kind, photo) {
  stop();
  shown = { reply, kind, photo, curve: reply[kind] };
  const { method, random } = shown.curve;
  if (method.area === null) {
    clear(photo);
    description.textContent = "The score with no patch left is that of the whole photo, so its curve cannot be normalised.";
    return;
  }
  const values = reply.meaning === "prob" ? [] : [...method.mean, ...random.low, ...random.high];
  range = [Math.min(0, ...values), Math.max(1, ...values)]; // raw scores may leave 0 … 1
  slider.max = shown.curve.counts.length - 1;
  slider.disabled = false;
  slider.value = 0;
  drawFrame(0);
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (reducedMotion) return drawFrame(Number(slider.max));
  timer = setInterval(() => {
    const next = Number(slider.value) + 1;
    slider.value = next;
    drawFrame(next);
    if (next >= Number(slider.max)) stop();
  }, FRAME_MS);
}

slider.addEventListener("input", () => { stop(); if (shown) drawFrame(Number(slider.value)); });

function drawFrame(k) {
  const { curve, kind, reply, photo } = shown, { method, random } = curve, middle = curve.x.length >> 1;
  drawPhoto(photo, { rank: reply.rank, grid: reply.grid, count: curve.counts[k], inserts: kind === "insertion" });
  drawAxes(kind === "deletion" ? "fraction of the patches removed" : "fraction of the patches inserted");
  const band = line(curve.x, random.high) + line([...curve.x].reverse(), [...random.low].reverse()).replace("M", "L") + "Z";
  chart.append(svgElement("path", { class: "band", d: band }), svgElement("path", { class: "random", d: line(curve.x, random.mean) }),
    svgElement("path", { class: "method", d: line(curve.x.slice(0, k + 1), method.mean) }),
    svgElement("circle", { class: "dot", cx: x(curve.x[k]), cy: y(method.mean[k]), r: 4 }),
    svgElement("text", { x: x(curve.x.at(middle)), y: y(random.high.at(middle)) - 5, "text-anchor": "middle" }, "random order"));
  const done = `${kind === "deletion" ? "removed" : "inserted"}: ${curve.counts[k]} of ${reply.rank.length} patches`;
  stepText.textContent = `${k} of ${curve.counts.length - 1}`;
  const better = kind === "deletion" ? method.area < random.area : method.area > random.area;
  const value = reply.meaning === "prob" ? percent(method.mean[k]) : `${reply.meaning} ${method.mean[k].toFixed(3)}`;
  description.textContent = `${reply.target} ${value}, ${done}. Area under the curve of ${curve.counts.length - 1} steps ${method.area.toFixed(3)}, in random order ${random.area.toFixed(3)}: `
    + (better ? "better than random on average." : "no better than random on average.");
  chart.setAttribute("aria-label", `${kind} curve of ${reply.method}: area ${method.area.toFixed(3)}, in random order ${random.area.toFixed(3)}`);
}

function drawAxes(label) {
  chart.replaceChildren(svgElement("path", { class: "axis", d: `M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}` }));
  for (const p of [0, 0.5, 1]) {
    const value = range[0] + p * (range[1] - range[0]);
    chart.append(svgElement("path", { class: "axis", d: `M${LEFT} ${y(value)}H${RIGHT}` }), svgElement("text", { x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, Number(value.toPrecision(2))),
      svgElement("text", { x: x(p), y: BOTTOM + 14, "text-anchor": "middle" }, `${100 * p} %`));
  }
  chart.append(svgElement("text", { x: (LEFT + RIGHT) / 2, y: BOTTOM + 29, "text-anchor": "middle" }, label));
}

/** Draw the photo with the removed patches in grey. */
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
