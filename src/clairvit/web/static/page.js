// The page: settings become requests, responses are drawn. All data comes from the six endpoints in api.js.

import * as api from "./api.js";
import { colourScale, drawColourBar, overlay } from "./colour.js";
import * as curves from "./curves.js";
import { element, filterMethods, showClasses, showMethods, showThumbs, valueText } from "./lists.js";
import * as patch from "./patch.js";
import { state, write } from "./state.js";
import { endWork, failWork, setStatus, startWork } from "./status.js";

const $ = (id) => document.getElementById(id);
let cards = [], methods = [], limits = null, photo = null, reply = null, map = null; // the last response, and its one explanation
let uploaded = null; // the file of the current photo, sent again if it expired on the server
let work = new AbortController(), curveWork = new AbortController(), checkWork = new AbortController(), thumbsFor = "";
let curveReply = null;
const NEEDS_MAP = ["check-map", "save-png", "save-json", "save-npz", "play-deletion", "play-insertion"];

const card = () => cards.find((entry) => entry.name === state.model);
const isSlow = (text) => methods.find((entry) => entry.name === text.split(/[+(]/)[0])?.slow ?? false;

async function start() {
  const [about, listed] = await Promise.all([api.models(), api.methods()]);
  cards = about.models;
  methods = listed.methods;
  limits = about.limits;
  if (!card()) state.model = cards[0].name;
  $("model").replaceChildren(...cards.map((entry) => element("option", { value: entry.name, textContent: entry.name, selected: entry.name === state.model })));
  showMethods($("methods"), listed, state.method, setMethod);
  $("methods").querySelector(":checked")?.closest("label").scrollIntoView({ block: "nearest" });
  window.scrollTo(0, 0);
  updateModelControls();
  for (const [id, name] of [["opacity", "value"], ["cmap", "value"], ["signed", "checked"], ["smooth", "checked"]]) $(id)[name] = state[id];
  if (!$("cmap").value) $("cmap").value = state.cmap = "auto"; // a link may contain anything
  await explain({ picture: true });
}

/** Fill the controls with the layers, heads and classes of the model. */
function updateModelControls() {
  const { layers, heads, labels, size } = card();
  $("layer").max = layers;
  $("layer").value = state.layer = Math.min(layers, state.layer);
  const allHeads = Array.from({ length: heads }, (_, k) => [String(k), `head ${k}`]);
  $("head").replaceChildren(...[["mean", "all heads"], ...allHeads].map(([value, textContent]) => element("option", { value, textContent })));
  if (![...$("head").options].some((option) => option.value === state.head)) state.head = "mean";
  $("head").value = state.head;
  $("any-class").replaceChildren(element("option", { value: "", textContent: "choose…" }), ...labels.map((textContent, value) => element("option", { value, textContent })));
  for (const id of ["map-0", "map-1", "perturbed", "attention"]) $(id).style.aspectRatio = `${size[1]} / ${size[0]}`;
}

/** Request the map of the settings; a newer request aborts the older one. */
async function explain({ picture = false, image } = {}) {
  work.abort();
  const controller = work = new AbortController(), slow = isSlow(state.method);
  const callbacks = startWork(state.method, controller);
  try {
    const fields = { image, photo: state.photo, model: state.model, method: state.method, target: state.targets, picture: picture || !photo, layers: !slow, heads: !slow && state.head !== "mean" };
    const response = await api.explain(fields, callbacks);
    if (controller !== work) return;
    if (response.picture) photo = await decodePicture(response.picture);
    if (controller !== work) return;
    reply = response;
    map = { ...response.explanations[0], maps: api.unpack(response.explanations[0].maps) };
    map.layers &&= api.unpack(map.layers);
    map.headMaps = map.heads && api.unpack(map.heads.maps);
    if (response.photo === "demo") uploaded = null;
    else if (image) uploaded = image;
    api.rememberUpload(uploaded);
    curveWork.abort(); // it belongs to the previous map
    curveReply = null;
    checkWork.abort();
    showCheck(null);
    adoptSettings(response);
    write();
    curves.clear(photo);
    patch.reset();
    render();
    endWork(controller, `${map.method}: ${map.forwards} forward${map.forwards === 1 ? "" : "s"}, ${map.backwards} backward${map.backwards === 1 ? "" : "s"}, ${map.seconds.toFixed(2)} s`);
    updateThumbs();
  } catch (error) {
    if (controller !== work) return; // a newer request is running
    if (error.kind === "photo-expired" && uploaded) return explain({ image: uploaded, picture: true });
    if (error.kind === "photo-expired" && !photo) {
      state.photo = "demo";
      await explain({ picture: true });
      setStatus("The server no longer has that photo; this is the demo. Upload yours again.", true);
      return;
    }
    failWork(controller, error);
    if (reply) restoreSettings();
  }
}

/** Set the settings to those of a response; a class-agnostic map has no target, so the selected classes stay. */
function adoptSettings(response) {
  const targets = response.classes.includes(null) ? state.targets : response.classes;
  Object.assign(state, { photo: response.photo, model: response.model, targets, method: response.explanations[0].method });
}

/** After a failure, set the controls to the map that is shown. */
function restoreSettings() {
  const changedModel = state.model !== reply.model;
  adoptSettings(reply);
  if (changedModel) { $("model").value = state.model; updateModelControls(); }
  render();
}

async function decodePicture(base64) {
  const text = atob(base64), bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
}

/** The values shown for a target: the whole method, one layer, or one head of a layer. */
function values(target) {
  const layer = state.layer - 1;
  let array = map.maps, indices = [target];
  if (layer >= 0 && state.head !== "mean" && map.headMaps) [array, indices] = [map.headMaps, [layer, Number(state.head), target]];
  else if (layer >= 0 && map.layers) [array, indices] = [map.layers, [layer, target]];
  const grid = api.slice(array, ...indices);
  return { values: grid.values, rows: grid.shape[0], cols: grid.shape[1] };
}

function render() {
  const both = reply.targets.length > 1, maps = reply.targets.map((_, k) => values(k));
  const negative = maps.some((grid) => grid.values.some((v) => v < 0)), signed = negative && state.signed;
  const clipped = negative && !state.signed ? maps.map((grid) => ({ ...grid, values: grid.values.map((v) => Math.max(0, v)) })) : maps;
  const scale = colourScale(clipped.flatMap((grid) => [...grid.values]), signed, state.cmap);
  clipped.forEach((grid, k) => {
    overlay($(`map-${k}`), photo, grid, scale, state.opacity, state.smooth, 448);
    const value = valueText(reply.probabilities[k], reply.class_scores[k]);
    const name = map.class_specific ? `${reply.targets[k]} ${value}`.trimEnd() : "∀ any class";
    $(`caption-${k}`).textContent = name;
    $(`map-${k}`).setAttribute("aria-label", `${map.method} map for ${name}; arrow keys move from patch to patch`);
  });
  $("second-map").hidden = !both;
  drawColourBar($("scale"), scale.cmap);
  $("low").textContent = (scale.beyond[0] ? "≤ " : "") + scale.low.toPrecision(3);
  $("high").textContent = (scale.beyond[1] ? "≥ " : "") + scale.high.toPrecision(3);
  $("signed").disabled = !negative;
  $("layer").disabled = !map.layers;
  $("layer-text").textContent = state.layer ? `${state.layer - 1}` : "all";
  $("head").disabled = !map.layers || !card().heads || state.layer === 0;
  $("head").title = $("head").disabled ? "Choose a layer first" : "";
  const headNote = state.layer && state.head !== "mean" && map.heads ? [`Head ${state.head} of layer ${state.layer - 1}, by ${map.heads.method}.`] : [];
  $("notes").textContent = [...headNote, ...map.notes].join(" ");
  for (const id of NEEDS_MAP) $(id).disabled = false;
  patch.draw({ maps, photo, reply, card: card() });
  updateLists();
}

function updateLists() {
  showClasses($("classes"), reply.top, state.targets, (index) => setTargets([index]), (index) => setTargets(state.targets[1] === index ? [state.targets[0]] : [state.targets[0], index]));
  $("any-class").value = reply.top.some((entry) => entry.index === state.targets[0]) ? "" : String(state.targets[0]);
  const radio = $("methods").querySelector(`input[value="${CSS.escape(map.method)}"]`);
  for (const input of $("methods").querySelectorAll("input")) input.checked = input === radio;
  for (const button of $("thumbs").querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.method === map.method);
}

function setTargets(targets) { state.targets = targets; explain(); }
function setMethod(method) { state.method = method; explain(); }

/** Thumbnails are computed when they become visible, once per photo and class. */
let thumbsVisible = false;
new IntersectionObserver(([entry]) => { thumbsVisible = entry.isIntersecting; updateThumbs(); }, { rootMargin: "100px" }).observe($("all"));
async function updateThumbs() {
  const key = reply && [reply.model, reply.photo, reply.classes[0]].join();
  if (!thumbsVisible || !reply || thumbsFor === key) return;
  thumbsFor = key;
  $("thumbs").setAttribute("aria-busy", "true");
  try {
    const response = await api.explain({ photo: reply.photo, model: reply.model, method: "all", target: reply.classes.slice(0, 1) });
    if (thumbsFor === key) showThumbs($("thumbs"), response, photo, map.method, setMethod);
  } catch (error) {
    if (thumbsFor === key) thumbsFor = "";
    setStatus(error.message, true);
  }
  $("thumbs").removeAttribute("aria-busy");
}

/** The verdict as a badge and the sentence under the map; nothing before it was asked for. */
function showCheck(response) {
  $("check").hidden = !response;
  $("check-verdict").textContent = response?.verdict ?? "not checked";
  $("check-verdict").dataset.verdict = response?.verdict ?? "";
  $("check-text").textContent = response ? [response.sentence, ...(response.verdict ? response.remarks : [])].join(" ") : "";
}

/** Ask how far to trust the map that is shown: its first target. */
async function checkMap() {
  checkWork.abort();
  const controller = checkWork = new AbortController(), target = reply.classes[0];
  const callbacks = startWork(`check of ${map.method}`, controller);
  try {
    const response = await api.check({ photo: reply.photo, model: reply.model, method: map.method, target: target === null ? null : String(target) }, callbacks);
    if (controller.signal.aborted) return;
    showCheck(response);
    endWork(controller, `check of ${map.method}: ${response.verdict ?? "not checked"}`);
  } catch (error) { failWork(controller, error); }
}

async function play(kind) {
  curveWork.abort();
  const controller = curveWork = new AbortController(), target = reply.classes[0];
  try {
    if (!curveReply) {
      const callbacks = startWork(`${kind} of ${map.method}`, controller);
      const response = await api.curve({ photo: reply.photo, model: reply.model, method: map.method, target: target === null ? null : String(target) }, callbacks);
      if (controller.signal.aborted) return;
      curveReply = response;
      endWork(controller, `${kind} of ${map.method}`);
    }
    curves.play(curveReply, kind, photo);
  } catch (error) { failWork(controller, error); }
}

function upload(file) {
  if (!file) return;
  const maxBytes = limits?.upload_bytes ?? Infinity, megabytes = (bytes) => (bytes / 2 ** 20).toFixed(1);
  if (file.size > maxBytes) return setStatus(`${file.name} has ${megabytes(file.size)} MB; expected at most ${megabytes(maxBytes)}: choose a smaller copy.`, true);
  state.targets = [];
  explain({ image: file, picture: true });
}

function saveBlob(blob, suffix) {
  const link = element("a", { href: URL.createObjectURL(blob), download: `clairvit-${map.method.replace(/[^\w-]+/g, "-")}.${suffix}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function saveResponse(kind, suffix) {
  try {
    saveBlob(await api.download({ photo: reply.photo, model: reply.model, method: map.method, target: reply.classes, reply: kind, layers: !isSlow(map.method) }), suffix);
  } catch (error) { setStatus(error.message, true); }
}

/** Save the maps side by side with their captions, as they are on the screen. */
function savePicture() {
  const shown = reply.targets.map((_, k) => $(`map-${k}`)), { width, height } = shown[0];
  const canvas = element("canvas", { width: width * shown.length, height: height + 28 }), context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = "#111";
  context.font = "15px sans-serif";
  shown.forEach((mapCanvas, k) => { context.drawImage(mapCanvas, k * width, 0); context.fillText(`${$(`caption-${k}`).textContent} · ${map.method}`, k * width + 8, height + 19, width - 16); });
  canvas.toBlob((blob) => saveBlob(blob, "png"));
}

const bindControl = (id, event, read) => $(id).addEventListener(event, () => { state[id] = read($(id)); write(); if (reply) render(); });
bindControl("opacity", "input", (control) => Number(control.value));
bindControl("cmap", "change", (control) => control.value);
bindControl("signed", "change", (control) => control.checked);
bindControl("smooth", "change", (control) => control.checked);
bindControl("layer", "input", (control) => Number(control.value));
$("head").addEventListener("change", () => {
  state.head = $("head").value;
  write();
  if (state.head === "mean" || map.headMaps) render();
  else explain();
});
$("filter").addEventListener("input", () => filterMethods($("methods"), $("filter").value));
$("any-class").addEventListener("change", () => { if ($("any-class").value !== "") setTargets([Number($("any-class").value)]); });
$("model").addEventListener("change", () => { Object.assign(state, { model: $("model").value, targets: [], head: "mean" }); updateModelControls(); explain({ picture: true }); });
$("file").addEventListener("change", () => { upload($("file").files[0]); $("file").value = ""; });
$("demo").addEventListener("click", () => { Object.assign(state, { photo: "demo", targets: [] }); explain({ picture: true }); });
$("play-deletion").addEventListener("click", () => play("deletion"));
$("play-insertion").addEventListener("click", () => play("insertion"));
$("check-map").addEventListener("click", checkMap);
$("save-png").addEventListener("click", savePicture);
$("save-json").addEventListener("click", () => saveResponse("record", "json"));
$("save-npz").addEventListener("click", () => saveResponse("npz", "npz"));
$("copy-link").addEventListener("click", async () => {
  write();
  try { await navigator.clipboard.writeText(location.href); setStatus("The link is in the clipboard."); } catch { setStatus(`The link: ${location.href}`); }
});
document.addEventListener("paste", (event) => upload([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));
document.addEventListener("dragover", (event) => { event.preventDefault(); $("drop-overlay").hidden = ![...event.dataTransfer.types].includes("Files"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop-overlay").hidden = true; });
document.addEventListener("drop", (event) => { event.preventDefault(); $("drop-overlay").hidden = true; upload(event.dataTransfer.files[0]); });
addEventListener("hashchange", () => location.reload()); // the user entered another link in this tab
start().catch((error) => setStatus(error.message, true));
