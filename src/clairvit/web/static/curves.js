// Deletion and insertion: the patches go or come in order while the curve of the probability, or of the raw score, grows.

import { percent } from "./lists.js";

const film = document.getElementById("film"), chart = document.getElementById("chart");
const slider = document.getElementById("step"), words = document.getElementById("curve-text");
const stepText = document.getElementById("step-text");
const LEFT = 34, RIGHT = 302, TOP = 10, BOTTOM = 206, FRAME = 260;
let shown = null, timer = 0, range = [0, 1]; // lowest and highest value on the vertical axis

const drawn = (name, attributes, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
};
const x = (part) => LEFT + part * (RIGHT - LEFT);
const y = (value) => BOTTOM - (value - range[0]) / (range[1] - range[0]) * (BOTTOM - TOP);
const line = (xs, ys) => xs.map((one, k) => `${k ? "L" : "M"}${x(one).toFixed(1)} ${y(ys[k]).toFixed(1)}`).join(" ");

export function clear(photo) {
  stop();
  shown = null;
  slider.disabled = true;
  stepText.textContent = "–";
  range = [0, 1];
  words.textContent = "The best patches go first; a good map makes the score fall fast.";
  axes("part of the patches");
  if (photo) picture(photo, null);
}

export function stop() { clearInterval(timer); timer = 0; }

/** Show one of the two walks of a reply and play it. */
export function play(reply, kind, photo) {
  stop();
  shown = { reply, kind, photo, walk: reply[kind] };
  const { method, random } = shown.walk;
  if (method.area === null) {
    clear(photo);
    words.textContent = "The score with no patch left is that of the whole photo, so its curve cannot be normalised.";
    return;
  }
  const values = reply.meaning === "prob" ? [] : [...method.mean, ...random.low, ...random.high];
  range = [Math.min(0, ...values), Math.max(1, ...values)]; // raw scores may leave 0 … 1
  slider.max = shown.walk.counts.length - 1;
  slider.disabled = false;
  slider.value = 0;
  frame(0);
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (calm) return frame(Number(slider.max));
  timer = setInterval(() => {
    const next = Number(slider.value) + 1;
    slider.value = next;
    frame(next);
    if (next >= Number(slider.max)) stop();
  }, FRAME);
}

slider.addEventListener("input", () => { stop(); if (shown) frame(Number(slider.value)); });

function frame(k) {
  const { walk, kind, reply, photo } = shown, { method, random } = walk, middle = walk.x.length >> 1;
  picture(photo, { rank: reply.rank, grid: reply.grid, count: walk.counts[k], shows: kind === "insertion" });
  axes(kind === "deletion" ? "part of the patches taken away" : "part of the patches shown");
  const band = line(walk.x, random.high) + line([...walk.x].reverse(), [...random.low].reverse()).replace("M", "L") + "Z";
  chart.append(drawn("path", { class: "band", d: band }), drawn("path", { class: "random", d: line(walk.x, random.mean) }),
    drawn("path", { class: "method", d: line(walk.x.slice(0, k + 1), method.mean) }),
    drawn("circle", { class: "dot", cx: x(walk.x[k]), cy: y(method.mean[k]), r: 4 }),
    drawn("text", { x: x(walk.x.at(middle)), y: y(random.high.at(middle)) - 5, "text-anchor": "middle" }, "random order"));
  const done = `${kind === "deletion" ? "gone" : "shown"}: ${walk.counts[k]} of ${reply.rank.length} patches`;
  stepText.textContent = `${k} of ${walk.counts.length - 1}`;
  const better = kind === "deletion" ? method.area < random.area : method.area > random.area;
  const value = reply.meaning === "prob" ? percent(method.mean[k]) : `${reply.meaning} ${method.mean[k].toFixed(3)}`;
  words.textContent = `${reply.target} ${value}, ${done}. Area under the curve of ${walk.counts.length - 1} steps ${method.area.toFixed(3)}, in random order ${random.area.toFixed(3)}: `
    + (better ? "better than random on average." : "no better than random on average.");
  chart.setAttribute("aria-label", `${kind} curve of ${reply.method}: area ${method.area.toFixed(3)}, in random order ${random.area.toFixed(3)}`);
}

function axes(label) {
  chart.replaceChildren(drawn("path", { class: "axis", d: `M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}` }));
  for (const p of [0, 0.5, 1]) {
    const value = range[0] + p * (range[1] - range[0]);
    chart.append(drawn("path", { class: "axis", d: `M${LEFT} ${y(value)}H${RIGHT}` }), drawn("text", { x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, Number(value.toPrecision(2))),
      drawn("text", { x: x(p), y: BOTTOM + 14, "text-anchor": "middle" }, `${100 * p} %`));
  }
  chart.append(drawn("text", { x: (LEFT + RIGHT) / 2, y: BOTTOM + 29, "text-anchor": "middle" }, label));
}

/** The photo with the patches that are left. */
function picture(photo, left) {
  film.width = photo.width;
  film.height = photo.height;
  const pen = film.getContext("2d");
  pen.drawImage(photo, 0, 0);
  if (!left) return;
  const [rows, cols] = left.grid, h = photo.height / rows, w = photo.width / cols;
  pen.fillStyle = "#808080";
  left.rank.forEach((rank, patch) => {
    if ((rank < left.count) === left.shows) return;
    pen.fillRect((patch % cols) * w, Math.floor(patch / cols) * h, w + 0.5, h + 0.5);
  });
}
