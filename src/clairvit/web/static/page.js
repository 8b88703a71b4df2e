// The page: settings become requests, responses are drawn. All data comes from the seven endpoints in api.js.

import * as api from "./api.js";
import { sentenceNodes, showAnswer, showCheck, showCheckFailed } from "./answer.js";
import { colourScale, drawColourBar, drawPhoto, legendWords, overlay } from "./colour.js";
import * as curves from "./curves.js";
import { fileName, pictureCanvas, reportHtml, saveBlob } from "./download.js";
import { drawStrip } from "./layers.js";
import { baseName, estimate, filterMethods, showClasses, showMethodFacts, showMethods, showThumbs } from "./lists.js";
import * as patch from "./patch.js";
import * as photos from "./photos.js";
import * as similar from "./similar.js";
import { DEFAULTS, state, write } from "./state.js";
import { endWork, failWork, setStatus, startWork } from "./status.js";
import { cosineText, duration, element, number, plainMessage, valueText } from "./texts.js";

const $ = (id) => document.getElementById(id);
let cards = [], listed = null, limits = null, version = "";
let photo = null, reply = null, map = null, shown = null; // the photo, the last response, its one explanation, and what is drawn of it
let uploaded = null; // the file of the current photo, sent again if it expired on the server
let check = null, curveReply = null;
let work = new AbortController(), curveWork = new AbortController(), checkWork = new AbortController(), thumbsFor = "";
const NEEDS_MAP = ["save-report", "save-png", "save-json", "save-npz", "play-deletion", "play-insertion"];

const card = () => cards.find((entry) => entry.name === state.model);
const methodCard = (text) => listed.methods.find((entry) => entry.name === baseName(text) || entry.name === text);
const isSlow = (text) => methodCard(text)?.slow ?? false;
const titleOf = (text) => listed.recommended.find((entry) => entry.method === text)?.title ?? methodCard(text)?.title ?? text;
const photoName = () => uploaded?.name ?? (state.photo === "demo" ? "example" : "photo");
const firstTarget = () => reply.classes[0] === null ? null : String(reply.classes[0]);

async function start() {
  let about;
  [about, listed] = await Promise.all([api.models(), api.methods()]);
  ({ models: cards, limits, version } = about);
  $("version").textContent = `ClairViT ${version}.`;
  if (!card()) state.model = cards[0].name;
  $("model").replaceChildren(...cards.map((entry) => element("option", { value: entry.name, textContent: entry.name, selected: entry.name === state.model })));
  updateModelControls();
  const unknown = state.method !== "default" && !methodCard(state.method) ? state.method : null;
  if (unknown || state.method === "default") state.method = card().default_method;
  showMethods($("methods"), listed, state.method, card(), setMethod);
  for (const [id, name] of [["opacity", "value"], ["cmap", "value"], ["signed", "checked"], ["smooth", "checked"]]) $(id)[name] = state[id];
  if (!$("cmap").value) $("cmap").value = state.cmap = "auto"; // a link may contain anything
  if (isSlow(state.method) && state.method !== card().default_method) askFirst();
  await explain({ picture: true });
  if (unknown && reply) setStatus(`The link names a method that is not here (“${unknown}”); this is ${map.title}.`, true);
}

/** A link to a slow method does not start it by itself: the default method is shown, and a button runs the other. */
function askFirst() {
  const wanted = state.method, seconds = estimate(methodCard(wanted), card());
  state.method = card().default_method;
  $("ask-text").textContent = `This link asks for ${titleOf(wanted)}, which takes ${duration(seconds)} here.`;
  $("ask-first").hidden = false;
  $("ask-run").onclick = () => { $("ask-first").hidden = true; setMethod(wanted); };
  $("ask-default").onclick = () => { $("ask-first").hidden = true; };
}

/** Fill the controls with the layers, heads and classes of the model. */
function updateModelControls() {
  const { layers, heads, labels, size, default_method, reads_prompts } = card();
  DEFAULTS.method = default_method;
  $("layer").max = layers;
  $("layer").value = state.layer = Math.min(layers, state.layer);
  const allHeads = Array.from({ length: heads }, (_, k) => [String(k), `${k + 1} of ${heads}`]);
  $("head").replaceChildren(...[["mean", "all"], ...allHeads].map(([value, textContent]) => element("option", { value, textContent })));
  if (![...$("head").options].some((option) => option.value === state.head)) state.head = "mean";
  $("head").value = state.head;
  $("prompt-form").hidden = !reads_prompts;
  $("prompt").value = state.text = reads_prompts ? state.text : "";
  $("other-class").hidden = $("classes-title").hidden = !labels.length;
  $("any-class").replaceChildren(element("option", { value: "", textContent: "choose…" }), ...labels.map((textContent, value) => element("option", { value, textContent })));
  for (const id of ["photo", "map-0", "map-1", "perturbed"]) $(id).style.aspectRatio = `${size[1]} / ${size[0]}`;
}

/** What is explained: the prompt, or else classes. */
const asked = (most = 2) => state.text ? { text: state.text } : { target: state.targets.slice(0, most) };

/** Request the map of the settings; a newer request aborts the older one. */
async function explain({ picture = false, image } = {}) {
  work.abort();
  const controller = work = new AbortController(), slow = isSlow(state.method), wanted = titleOf(state.method);
  const callbacks = startWork(image ? `Looking at ${image.name}` : wanted, controller);
  markStale(controller, image ? null : wanted);
  try {
    const fields = { image, photo: state.photo, model: state.model, method: state.method, ...asked(), picture: picture || !photo, layers: !slow, heads: !slow && state.head !== "mean" };
    const response = await api.explain(fields, callbacks);
    response.text = fields.text ?? "";
    if (controller !== work) return;
    const newPhoto = response.picture ? await decodePicture(response.picture) : photo;
    if (controller !== work) return;
    adoptResponse(response, newPhoto, image);
    endWork(controller, `${map.title}: done in ${map.seconds.toFixed(2)} s.`);
    runCheck();
  } catch (error) {
    if (controller !== work) return; // a newer request is running
    if (error.kind === "photo-expired" && uploaded) return explain({ image: uploaded, picture: true });
    if (error.kind === "photo-expired" && !photo) {
      Object.assign(state, { photo: "demo", targets: [] }); // the classes of the link belong to the other photo
      await explain({ picture: true });
      setStatus("The server no longer has that photo; this is the example. Choose yours again.", true);
      return;
    }
    failWork(controller, error, image ? `${image.name}: ` : "");
    $("map-panel").classList.remove("stale");
    $("map-panel").setAttribute("aria-busy", "false");
    if (reply) restoreSettings();
  }
}

/** While a map takes long, the former one is dimmed and its caption says so. */
function markStale(controller, wanted) {
  $("map-panel").setAttribute("aria-busy", "true");
  setTimeout(() => {
    if (controller !== work || $("map-panel").getAttribute("aria-busy") === "false" || !map) return;
    $("map-panel").classList.add("stale");
    $("caption-0").textContent = wanted ? `${map.title} (old); ${wanted} is being made…` : "the map before; a new one is being made…";
  }, 350);
}

/** Show a response; what belonged to the map before is dropped. */
function adoptResponse(response, newPhoto, image) {
  if (reply && (reply.photo !== response.photo || reply.model !== response.model)) clearThumbs();
  photo = newPhoto;
  reply = response;
  map = { ...response.explanations[0], maps: api.unpack(response.explanations[0].maps) };
  map.layers &&= api.unpack(map.layers);
  map.headMaps = map.heads && api.unpack(map.heads.maps);
  if (!map.layers) Object.assign(state, { layer: 0, head: "mean" }); // there is one map only
  if (!map.class_specific) Object.assign(reply, { targets: reply.targets.slice(0, 1), classes: reply.classes.slice(0, 1) });
  if (response.photo === "demo") uploaded = null;
  else if (image) uploaded = image;
  api.rememberUpload(uploaded);
  for (const controller of [curveWork, checkWork]) controller.abort();
  curveReply = check = null;
  adoptSettings(response);
  write();
  curves.clear(photo);
  patch.reset();
  $("map-panel").classList.remove("stale");
  render();
  $("map-panel").setAttribute("aria-busy", "false");
  $("map-panel").dataset.method = map.method;
  if (uploaded) { photos.fillAnswer(uploaded, reply, photo); photos.markShown(uploaded); }
  if ($("compare").open) updateThumbs();
  similar.setPhoto({ photo, reply, card: card() });
}

/** Set the settings to those of a response; a class-agnostic map has no target, so the selected classes stay. */
function adoptSettings(response) {
  const targets = response.classes.includes(null) ? state.targets : response.classes;
  Object.assign(state, { photo: response.photo, model: response.model, targets, text: response.text, method: response.explanations[0].method });
}

/** After a failure, set the controls to the map that is shown. */
function restoreSettings() {
  const changedModel = state.model !== reply.model;
  adoptSettings(reply);
  $("prompt").value = state.text;
  if (changedModel) { $("model").value = state.model; updateModelControls(); }
  render();
}

async function decodePicture(base64) {
  const text = atob(base64), bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
}

const isControl = () => methodCard(map.method)?.control ?? false;
const isOfHead = () => state.layer > 0 && state.head !== "mean" && Boolean(map.layers && map.headMaps);

/** The values shown for a target: the whole method, one layer, or one head of a layer. */
function values(target) {
  const layer = state.layer - 1;
  let array = map.maps, indices = [target];
  if (isOfHead()) [array, indices] = [map.headMaps, [layer, Number(state.head), target]];
  else if (layer >= 0 && map.layers) [array, indices] = [map.layers, [layer, target]];
  const grid = api.slice(array, ...indices);
  return { values: grid.values, rows: grid.shape[0], cols: grid.shape[1] };
}

/** ", layer 4, head 2 of raw attention": which part of the method is shown. */
function layerText() {
  if (!state.layer || !map.layers) return "";
  const owner = isOfHead() && map.heads.method !== map.method ? ` of ${titleOf(map.heads.method)}` : "";
  return `, layer ${state.layer} of ${card().layers}${isOfHead() ? `, head ${Number(state.head) + 1}${owner}` : ""}`;
}

function render() {
  const maps = reply.targets.map((_, k) => values(k)), negative = maps.some((grid) => grid.values.some((v) => v < 0)), signed = negative && state.signed;
  const clipped = negative && !state.signed ? maps.map((grid) => ({ ...grid, values: grid.values.map((v) => Math.max(0, v)) })) : maps;
  const scale = colourScale(clipped.flatMap((grid) => [...grid.values]), signed, state.cmap);
  const names = reply.targets.map((name, k) => map.class_specific ? `${name} ${reply.text ? cosineText(reply.target_scores[k]) : valueText(reply.probabilities[k], reply.class_scores[k])}`.trimEnd() : "any answer");
  shown = { clipped, scale, names };
  drawPhoto($("photo"), photo, 448);
  $("photo-caption").textContent = uploaded ? uploaded.name : state.photo === "demo" ? "example photo" : "your photo";
  clipped.forEach((grid, k) => {
    overlay($(`map-${k}`), photo, grid, scale, state.opacity, state.smooth, 448);
    $(`caption-${k}`).textContent = `${names[k]} · ${map.title}${layerText()}`;
    $(`map-${k}`).setAttribute("aria-label", `${map.title} map for ${names[k]}; arrow keys move from part to part`);
  });
  $("second-map").hidden = reply.targets.length < 2;
  showLegend(scale);
  showLayerControls(negative);
  for (const id of NEEDS_MAP) $(id).disabled = id.startsWith("play") && !card().labels.length;
  patch.draw({ maps, photo, reply, card: card(), classSpecific: map.class_specific, isHeld: () => held });
  showAnswer(reply, map.class_specific, isControl());
  updateLists();
}

function showLegend(scale) {
  const isFlat = !(scale.high > scale.low), [low, high] = legendWords(scale, map.class_specific, reply.targets, isControl());
  drawColourBar($("scale"), scale, state.opacity);
  $("scale").hidden = isFlat;
  for (const [id, text, value, beyond] of [["low", low, scale.low, scale.beyond[0] ? "≤ " : ""], ["high", high, scale.high, scale.beyond[1] ? "≥ " : ""]]) {
    $(id).textContent = isFlat ? (id === "low" ? "This map is the same everywhere:" : "it says nothing about this photo.") : text;
    $(id).title = beyond + number(value);
    $(id).dataset.value = value;
  }
}

function showLayerControls(negative) {
  $("signed").disabled = !negative;
  $("layer").disabled = !map.layers;
  $("layer").value = state.layer;
  $("head").value = state.head;
  $("layer-control").hidden = !map.layers;
  $("layer-text").textContent = state.layer ? `${state.layer} of ${card().layers}` : "all together";
  $("head").disabled = !map.layers || !card().heads || state.layer === 0;
  $("head").title = $("head").disabled ? "Choose a layer first" : "";
  drawStrip(map, photo, state.layer, state);
  const notes = [...map.notes];
  if (layerText()) notes.unshift("The test at the top is of all layers together, not of this one.");
  if (isOfHead() && map.heads.method !== map.method) notes.unshift(`${map.title} has no heads of its own: this is head ${Number(state.head) + 1} of ${titleOf(map.heads.method)}.`);
  if (!map.class_specific && state.targets.length > 1) notes.unshift(`${map.title} gives the same map for every answer, so one is shown.`);
  $("notes").textContent = notes.join(" ");
}

function updateLists() {
  showClasses($("classes"), reply.top, state.targets, (index) => setTargets([index]), (index) => setTargets(state.targets[1] === index ? [state.targets[0]] : [state.targets[0], index]));
  $("any-class").value = reply.top.some((entry) => entry.index === state.targets[0]) ? "" : String(state.targets[0] ?? "");
  const radio = $("methods").querySelector(`input[value="${CSS.escape(map.method)}"]`);
  for (const input of $("methods").querySelectorAll("input")) input.checked = input === radio;
  showMethodFacts($("method-facts"), methodCard(map.method), map);
  for (const button of $("thumbs").querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.method === map.method);
}

function setTargets(targets) { Object.assign(state, { targets, text: "" }); $("prompt").value = ""; explain(); }
function setPrompt(text) { state.text = text; if (text && map && !map.class_specific) state.method = "attnlrp+plus"; explain(); }
function setMethod(method, options) { state.method = method; explain(options); }

/** How far to trust the map that is shown: its first target, in the background after each map. */
async function runCheck() {
  checkWork.abort();
  const controller = checkWork = new AbortController(), file = uploaded;
  showCheck(null);
  try {
    const response = await api.check({ photo: reply.photo, model: reply.model, method: map.method, ...(reply.text ? { text: reply.text } : { target: firstTarget() }) }, { signal: controller.signal });
    if (controller !== checkWork) return;
    check = response;
    showCheck(check);
    if (file) photos.fillCheck(file, check);
  } catch (error) { if (controller === checkWork && error.name !== "AbortError") showCheckFailed(error); }
  if (controller === checkWork) photos.processRest(state.method, state.model, decodePicture);
}

/** Thumbnails of all quick methods, when they are asked for; once per photo and class. */
function clearThumbs() { thumbsFor = ""; $("thumbs").replaceChildren(); }
async function updateThumbs() {
  const key = reply && [reply.model, reply.photo, state.text || (reply.classes[0] ?? state.targets[0])].join();
  if (!reply || thumbsFor === key) return;
  clearThumbs();
  thumbsFor = key;
  $("thumbs").textContent = "Working…";
  try {
    const response = await api.explain({ photo: reply.photo, model: reply.model, method: "all", ...asked(1) });
    if (thumbsFor === key) showThumbs($("thumbs"), response, photo, map.method, api.slice(map.maps, 0).values, (method) => { setMethod(method); $("map-panel").scrollIntoView({ block: "nearest" }); });
  } catch (error) {
    if (thumbsFor === key) clearThumbs();
    setStatus(plainMessage(error), true);
  }
}

/** The curve of the map that is shown, measured once. */
async function measureCurve(controller, title) {
  if (curveReply) return curveReply;
  const callbacks = startWork(title, controller);
  const response = await api.curve({ photo: reply.photo, model: reply.model, method: map.method, ...(reply.text ? { text: reply.text } : { target: firstTarget() }) }, callbacks);
  if (controller.signal.aborted) throw new DOMException("aborted", "AbortError");
  endWork(controller, "");
  return curveReply = response;
}

async function play(kind) {
  curveWork.abort();
  const controller = curveWork = new AbortController(), grid = card().grid, whole = api.slice(map.maps, 0);
  const rank = patch.rankPatches({ values: whole.values, rows: whole.shape[0], cols: whole.shape[1] }, grid);
  curves.play({ kind, rank, grid, photo, reply: curveReply });
  if (curveReply) return;
  try { curves.receive(await measureCurve(controller, "Measuring the test")); } catch (error) {
    if (error.name !== "AbortError") curves.clear(photo);
    failWork(controller, error);
  }
}

/** Photos that were chosen, dropped or pasted: the first is shown, several are listed. */
function upload(files) {
  const maxBytes = limits?.upload_bytes ?? Infinity, megabytes = (bytes) => (bytes / 2 ** 20).toFixed(1);
  const chosen = [...files].slice(0, photos.MAX_PHOTOS);
  if (!chosen.length) return;
  const large = chosen.find((file) => file.size > maxBytes);
  if (large) return setStatus(`${large.name} has ${megabytes(large.size)} MB; expected at most ${megabytes(maxBytes)} MB: choose a smaller copy.`, true);
  photos.listPhotos(chosen, showFile);
  if (files.length > chosen.length) setStatus(`${files.length} photos were given; the first ${photos.MAX_PHOTOS} are listed.`, true);
  showFile(chosen[0]);
}
function showFile(file) { state.targets = []; explain({ image: file, picture: true }); }

/** All that a picture or a report says of the map on the screen. */
function view() {
  const sentence = element("p", {}, ...sentenceNodes(reply, map.class_specific, isControl())).textContent.trim();
  return { photo, reply, map, check, isControl: isControl(), curve: curveReply, sentence, version, style: state, shownMaps: shown.clipped, scale: shown.scale, names: shown.names, layerText: layerText(), photoName: photoName(),
    value: (entry) => valueText(entry.probability, entry.score),
    settings: { photo: photoName(), model: reply.model, method: `${map.title} (${map.method})`, explains: reply.targets.join(", "), shown: layerText().slice(2) || "all layers together", cost: `${map.forwards} forward and ${map.backwards} backward passes, ${map.seconds.toFixed(2)} s`, notes: map.notes.join(" ") || "none", version: `ClairViT ${version}`, made: new Date().toISOString().slice(0, 16).replace("T", " ") + " UTC" } };
}

const nameOf = (suffix) => fileName(photoName(), map.method, suffix);

async function saveNumbers(kind, suffix) {
  const controller = new AbortController(), callbacks = startWork("Preparing the file", controller), name = nameOf(suffix);
  try {
    const bytes = await api.download({ photo: reply.photo, model: reply.model, method: map.method, target: reply.classes.includes(null) ? [] : reply.classes, text: reply.text || null, reply: kind, layers: Boolean(map.layers) }, callbacks);
    saveBlob(new Blob([bytes]), name);
    endWork(controller, `Saved ${name}.`);
  } catch (error) { failWork(controller, error); }
}

async function saveReport() {
  const controller = curveWork = new AbortController(), name = nameOf("html");
  try {
    if (card().labels.length) {
      const measured = await measureCurve(controller, "Preparing the report");
      if (!$("chart").querySelector(".method")) { curves.play({ kind: "deletion", rank: measured.rank, grid: measured.grid, photo, reply: measured }); curves.stop(); $("step").value = $("step").max; $("step").dispatchEvent(new Event("input")); }
    }
    saveBlob(new Blob([reportHtml(view(), curveReply && $("chart"), map.layers && $("layer-strip"))], { type: "text/html" }), name);
    endWork(controller, `Saved ${name}.`);
  } catch (error) { failWork(controller, error); }
}

/** Press and hold: the photo in place of the maps. */
let held = false, holdTimer = 0;
function hold(on) {
  clearTimeout(holdTimer);
  if (!reply || held === on) return;
  held = on;
  $("hold").setAttribute("aria-pressed", on);
  patch.hide();
  if (on) reply.targets.forEach((_, k) => drawPhoto($(`map-${k}`), photo, 448));
  else render();
}
$("hold").addEventListener("pointerdown", () => hold(true));
$("hold").addEventListener("keydown", (event) => { if ([" ", "Enter"].includes(event.key)) { event.preventDefault(); hold(true); } });
for (const type of ["keyup", "blur"]) $("hold").addEventListener(type, () => hold(false));
for (const id of ["map-0", "map-1"]) {
  $(id).addEventListener("pointerdown", () => { clearTimeout(holdTimer); holdTimer = setTimeout(() => hold(true), 350); });
  $(id).addEventListener("contextmenu", (event) => { if (held) event.preventDefault(); });
}
for (const type of ["pointerup", "pointercancel"]) document.addEventListener(type, () => hold(false));

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
$("prompt-form").addEventListener("submit", (event) => { event.preventDefault(); setPrompt($("prompt").value.trim()); });
$("model").addEventListener("change", () => {
  const wasDefault = state.method === card().default_method;
  Object.assign(state, { model: $("model").value, targets: [], head: "mean" });
  if (wasDefault) state.method = card().default_method;
  updateModelControls();
  explain({ picture: true });
});
$("file").addEventListener("change", () => { upload([...$("file").files]); $("file").value = ""; });
$("demo").addEventListener("click", () => { photos.listPhotos([], showFile); Object.assign(state, { photo: "demo", targets: [] }); explain({ picture: true }); });
$("play-deletion").addEventListener("click", () => play("deletion"));
$("play-insertion").addEventListener("click", () => play("insertion"));
$("badge").addEventListener("click", () => { $("curves").scrollIntoView({ block: "nearest" }); if (card().labels.length) play("deletion"); });
$("compare").addEventListener("toggle", () => { if ($("compare").open) updateThumbs(); });
$("save-report").addEventListener("click", saveReport);
$("save-png").addEventListener("click", () => pictureCanvas(view()).toBlob((blob) => saveBlob(blob, nameOf("png"))));
$("save-json").addEventListener("click", () => saveNumbers("record", "json"));
$("save-npz").addEventListener("click", () => saveNumbers("npz", "npz"));
$("copy-link").addEventListener("click", async () => {
  write();
  try { await navigator.clipboard.writeText(location.href); setStatus("The link is in the clipboard."); } catch { setStatus(`The link: ${location.href}`); }
});
$("help-open").addEventListener("click", () => $("help").showModal());
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("maps").focus(); }); // the fragment holds the settings
document.addEventListener("paste", (event) => upload([...event.clipboardData.files].filter((file) => file.type.startsWith("image/"))));
document.addEventListener("dragover", (event) => { event.preventDefault(); $("drop-overlay").hidden = ![...event.dataTransfer.types].includes("Files"); });
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop-overlay").hidden = true; });
document.addEventListener("drop", (event) => { event.preventDefault(); $("drop-overlay").hidden = true; upload([...event.dataTransfer.files]); });
addEventListener("hashchange", () => { if (!location.hash || location.hash.includes("=")) location.reload(); }); // another link was entered in this tab
start().catch((error) => setStatus(plainMessage(error), true));
