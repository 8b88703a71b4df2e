// The page: settings in, requests out, replies drawn. All that is shown comes from the five addresses in api.js.

import * as api from "./api.js";
import { bar, overlay, scaleOf } from "./colour.js";
import * as curves from "./curves.js";
import { element, filterMethods, showClasses, showMethods, showThumbs, valueText } from "./lists.js";
import * as patch from "./patch.js";
import { state, write } from "./state.js";
import { begin, end, fail, say } from "./status.js";

const $ = (id) => document.getElementById(id);
let cards = [], methods = [], limits = null, photo = null, reply = null, map = null; // the last reply, and its one explanation
let sent = null; // the file on show, should the server forget it
let work = new AbortController(), curveWork = new AbortController(), thumbsFor = "";
const seen = { curve: null };
const NEED_A_MAP = ["save-png", "save-json", "save-npz", "play-deletion", "play-insertion"];

const card = () => cards.find((one) => one.name === state.model);
const isSlow = (text) => methods.find((one) => one.name === text.split(/[+(]/)[0])?.slow ?? false;

async function open() {
  const [about, listed] = await Promise.all([api.models(), api.methods()]);
  cards = about.models;
  methods = listed.methods;
  limits = about.limits;
  if (!card()) state.model = cards[0].name;
  $("model").replaceChildren(...cards.map((one) => element("option", { value: one.name, textContent: one.name, selected: one.name === state.model })));
  showMethods($("methods"), listed, state.method, choose);
  $("methods").querySelector(":checked")?.closest("label").scrollIntoView({ block: "nearest" });
  window.scrollTo(0, 0);
  fitModel();
  for (const [id, name] of [["opacity", "value"], ["cmap", "value"], ["signed", "checked"], ["smooth", "checked"]]) $(id)[name] = state[id];
  if (!$("cmap").value) $("cmap").value = state.cmap = "auto"; // a link from elsewhere may say anything
  await explain({ picture: true });
}

/** Layers, heads and classes of the chosen model. */
function fitModel() {
  const { layers, heads, labels, size } = card();
  $("layer").max = layers;
  $("layer").value = state.layer = Math.min(layers, state.layer);
  const every = Array.from({ length: heads }, (_, k) => [String(k), `head ${k}`]);
  $("head").replaceChildren(...[["mean", "all heads"], ...every].map(([value, textContent]) => element("option", { value, textContent })));
  if (![...$("head").options].some((one) => one.value === state.head)) state.head = "mean";
  $("head").value = state.head;
  $("any-class").replaceChildren(element("option", { value: "", textContent: "choose…" }), ...labels.map((textContent, value) => element("option", { value, textContent })));
  for (const id of ["map-0", "map-1", "film", "attends"]) $(id).style.aspectRatio = `${size[1]} / ${size[0]}`;
}

/** Ask for the map of the settings; a newer question ends the older one. */
async function explain({ picture = false, image } = {}) {
  work.abort();
  const own = work = new AbortController(), slow = isSlow(state.method);
  const told = begin(state.method, own);
  try {
    const asked = { image, photo: state.photo, model: state.model, method: state.method, target: state.targets, picture: picture || !photo, layers: !slow, heads: !slow && state.head !== "mean" };
    const found = await api.explain(asked, told);
    if (own !== work) return;
    if (found.picture) photo = await pictureOf(found.picture);
    if (own !== work) return;
    reply = found;
    map = { ...found.explanations[0], maps: api.unpack(found.explanations[0].maps) };
    map.layers &&= api.unpack(map.layers);
    map.headMaps = map.heads && api.unpack(map.heads.maps);
    if (found.photo === "demo") sent = null;
    else if (image) sent = image;
    api.keep(sent);
    curveWork.abort(); // it would be of the map before
    seen.curve = null;
    settle(found);
    write();
    curves.clear(photo);
    patch.forget();
    show();
    end(own, `${map.method}: ${map.forwards} forward${map.forwards === 1 ? "" : "s"}, ${map.backwards} backward${map.backwards === 1 ? "" : "s"}, ${map.seconds.toFixed(2)} s`);
    look();
  } catch (error) {
    if (own !== work) return; // newer work says what there is to say
    if (error.kind === "forgotten-photo" && sent) return explain({ image: sent, picture: true });
    if (error.kind === "forgotten-photo" && !photo) {
      state.photo = "demo";
      await explain({ picture: true });
      say("The server no longer has that photo; here is the demo. Drop yours again.", true);
      return;
    }
    fail(own, error);
    if (reply) again();
  }
}

/** The settings are those of a reply; a class-agnostic map has no target, and then the chosen classes stay. */
function settle(found) {
  const targets = found.classes.includes(null) ? state.targets : found.classes;
  Object.assign(state, { photo: found.photo, model: found.model, targets, method: found.explanations[0].method });
}

/** After a failure the controls say again what is shown. */
function again() {
  const moved = state.model !== reply.model;
  settle(reply);
  if (moved) { $("model").value = state.model; fitModel(); }
  show();
}

async function pictureOf(base64) {
  const text = atob(base64), bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
}

/** The values on show for a target: the whole method, one layer, or one head of a layer. */
function values(target) {
  const layer = state.layer - 1;
  let array = map.maps, places = [target];
  if (layer >= 0 && state.head !== "mean" && map.headMaps) [array, places] = [map.headMaps, [layer, Number(state.head), target]];
  else if (layer >= 0 && map.layers) [array, places] = [map.layers, [layer, target]];
  const one = api.part(array, ...places);
  return { values: one.values, rows: one.shape[0], cols: one.shape[1] };
}

function show() {
  const both = reply.targets.length > 1, maps = reply.targets.map((_, k) => values(k));
  const negative = maps.some((one) => one.values.some((v) => v < 0)), signed = negative && state.signed;
  const clipped = negative && !state.signed ? maps.map((one) => ({ ...one, values: one.values.map((v) => Math.max(0, v)) })) : maps;
  const scale = scaleOf(clipped.flatMap((one) => [...one.values]), signed, state.cmap);
  clipped.forEach((one, k) => {
    overlay($(`map-${k}`), photo, one, scale, state.opacity, state.smooth, 448);
    const value = valueText(reply.probabilities[k], reply.class_scores[k]);
    const name = map.class_specific ? `${reply.targets[k]} ${value}`.trimEnd() : "∀ any class";
    $(`caption-${k}`).textContent = name;
    $(`map-${k}`).setAttribute("aria-label", `${map.method} map for ${name}; arrow keys move from patch to patch`);
  });
  $("beside").hidden = !both;
  bar($("scale"), scale.cmap);
  $("low").textContent = (scale.beyond[0] ? "≤ " : "") + scale.low.toPrecision(3);
  $("high").textContent = (scale.beyond[1] ? "≥ " : "") + scale.high.toPrecision(3);
  $("signed").disabled = !negative;
  $("layer").disabled = !map.layers;
  $("layer-text").textContent = state.layer ? `${state.layer - 1}` : "all";
  $("head").disabled = !map.layers || !card().heads || state.layer === 0;
  $("head").title = $("head").disabled ? "Choose a layer first" : "";
  const whose = state.layer && state.head !== "mean" && map.heads ? [`Head ${state.head} of layer ${state.layer - 1}, by ${map.heads.method}.`] : [];
  $("notes").textContent = [...whose, ...map.notes].join(" ");
  for (const id of NEED_A_MAP) $(id).disabled = false;
  patch.draw({ maps, photo, reply, card: card() });
  lists();
}

function lists() {
  showClasses($("classes"), reply.top, state.targets, (index) => aim([index]), (index) => aim(state.targets[1] === index ? [state.targets[0]] : [state.targets[0], index]));
  $("any-class").value = reply.top.some((one) => one.index === state.targets[0]) ? "" : String(state.targets[0]);
  const radio = $("methods").querySelector(`input[value="${CSS.escape(map.method)}"]`);
  for (const one of $("methods").querySelectorAll("input")) one.checked = one === radio;
  for (const one of $("thumbs").querySelectorAll("button")) one.setAttribute("aria-pressed", one.dataset.method === map.method);
}

function aim(targets) { state.targets = targets; explain(); }
function choose(method) { state.method = method; explain(); }

/** Thumbnails are made when they come into sight, once for each photo and class. */
let inSight = false;
new IntersectionObserver(([entry]) => { inSight = entry.isIntersecting; look(); }, { rootMargin: "100px" }).observe($("all"));
async function look() {
  const key = reply && [reply.model, reply.photo, reply.classes[0]].join();
  if (!inSight || !reply || thumbsFor === key) return;
  thumbsFor = key;
  $("thumbs").setAttribute("aria-busy", "true");
  try {
    const found = await api.explain({ photo: reply.photo, model: reply.model, method: "all", target: reply.classes.slice(0, 1) });
    if (thumbsFor === key) showThumbs($("thumbs"), found, photo, map.method, choose);
  } catch (error) {
    if (thumbsFor === key) thumbsFor = "";
    say(error.message, true);
  }
  $("thumbs").removeAttribute("aria-busy");
}

async function play(kind) {
  curveWork.abort();
  const own = curveWork = new AbortController(), target = reply.classes[0];
  try {
    if (!seen.curve) {
      const told = begin(`${kind} of ${map.method}`, own);
      const found = await api.curve({ photo: reply.photo, model: reply.model, method: map.method, target: target === null ? null : String(target) }, told);
      if (own.signal.aborted) return;
      seen.curve = found;
      end(own, `${kind} of ${map.method}`);
    }
    curves.play(seen.curve, kind, photo);
  } catch (error) { fail(own, error); }
}

function send(file) {
  if (!file) return;
  const most = limits?.upload_bytes ?? Infinity, megabytes = (bytes) => (bytes / 2 ** 20).toFixed(1);
  if (file.size > most) return say(`${file.name} has ${megabytes(file.size)} MB; expected at most ${megabytes(most)}: choose a smaller copy.`, true);
  state.targets = [];
  explain({ image: file, picture: true });
}

function keep(blob, suffix) {
  const link = element("a", { href: URL.createObjectURL(blob), download: `clairvit-${map.method.replace(/[^\w-]+/g, "-")}.${suffix}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function keepReply(kind, suffix) {
  try {
    keep(await api.keepsake({ photo: reply.photo, model: reply.model, method: map.method, target: reply.classes, reply: kind, layers: !isSlow(map.method) }), suffix);
  } catch (error) { say(error.message, true); }
}

/** Both maps side by side, with their captions, as they are on the screen. */
function keepPicture() {
  const shown = reply.targets.map((_, k) => $(`map-${k}`)), { width, height } = shown[0];
  const paper = element("canvas", { width: width * shown.length, height: height + 28 }), pen = paper.getContext("2d");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, paper.width, paper.height);
  pen.fillStyle = "#111";
  pen.font = "15px sans-serif";
  shown.forEach((canvas, k) => { pen.drawImage(canvas, k * width, 0); pen.fillText(`${$(`caption-${k}`).textContent} · ${map.method}`, k * width + 8, height + 19, width - 16); });
  paper.toBlob((blob) => keep(blob, "png"));
}

const drawn = (id, event, read) => $(id).addEventListener(event, () => { state[id] = read($(id)); write(); if (reply) show(); });
drawn("opacity", "input", (one) => Number(one.value));
drawn("cmap", "change", (one) => one.value);
drawn("signed", "change", (one) => one.checked);
drawn("smooth", "change", (one) => one.checked);
drawn("layer", "input", (one) => Number(one.value));
$("head").addEventListener("change", () => {
  state.head = $("head").value;
  write();
  if (state.head === "mean" || map.headMaps) show();
  else explain();
});
$("filter").addEventListener("input", () => filterMethods($("methods"), $("filter").value));
$("any-class").addEventListener("change", () => { if ($("any-class").value !== "") aim([Number($("any-class").value)]); });
$("model").addEventListener("change", () => { Object.assign(state, { model: $("model").value, targets: [], head: "mean" }); fitModel(); explain({ picture: true }); });
$("file").addEventListener("change", () => { send($("file").files[0]); $("file").value = ""; });
$("demo").addEventListener("click", () => { Object.assign(state, { photo: "demo", targets: [] }); explain({ picture: true }); });
$("play-deletion").addEventListener("click", () => play("deletion"));
$("play-insertion").addEventListener("click", () => play("insertion"));
$("save-png").addEventListener("click", keepPicture);
$("save-json").addEventListener("click", () => keepReply("record", "json"));
$("save-npz").addEventListener("click", () => keepReply("npz", "npz"));
$("copy-link").addEventListener("click", async () => {
  write();
  try { await navigator.clipboard.writeText(location.href); say("The link is in the clipboard."); } catch { say(`The link: ${location.href}`); }
});
document.addEventListener("paste", (event) => send([...event.clipboardData.files].find((one) => one.type.startsWith("image/"))));
document.addEventListener("dragover", (event) => { event.preventDefault(); $("drop-here").hidden = ![...event.dataTransfer.types].includes("Files"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop-here").hidden = true; });
document.addEventListener("drop", (event) => { event.preventDefault(); $("drop-here").hidden = true; send(event.dataTransfer.files[0]); });
addEventListener("hashchange", () => location.reload()); // another link was put into this tab
open().catch((error) => say(error.message, true));
