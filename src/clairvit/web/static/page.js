// The page: settings become requests, responses are drawn. All data comes from the seven endpoints in api.js.

import * as api from "./api.js";
import { sentenceNodes, showAnswer, showCheck, showCheckFailed } from "./answer.js";
import { colourScale, drawColourBar, drawPhoto, legendWords, overlay } from "./colour.js";
import * as curves from "./curves.js";
import { fileName, pictureCanvas, reportHtml, saveBlob } from "./download.js";
import * as features from "./features.js";
import { drawStrip } from "./layers.js";
import { baseName, estimate, filterMethods, rateThumbs, selectMethod, showClasses, showMethodFacts, showMethods, showThumbs } from "./lists.js";
import * as pair from "./pair.js";
import * as patch from "./patch.js";
import * as photos from "./photos.js";
import { DEFAULTS, state, write } from "./state.js";
import { endWork, failWork, setStatus, startWork } from "./status.js";
import { cosineText, duration, element, number, plainMessage, plainNotes, valueText } from "./texts.js";

const $ = (id) => document.getElementById(id);
let cards = [], listed = null, limits = null, version = "";
let photo = null, reply = null, map = null, shown = null; // the photo, the last response, its one explanation, and what is drawn of it
let second = null; // the map that it is compared with: { photo, reply, map, file, settings }
let uploaded = null; // the file of the current photo, sent again if it expired on the server
let checks = [], curveReply = null, checking = Promise.resolve(); // a check per map, and when they are there
let work = new AbortController(), curveWork = new AbortController(), checkWork = new AbortController(), thumbsFor = "";
const NEEDS_MAP = ["save-report", "save-png", "save-json", "save-npz", "play-deletion", "play-insertion"];

const REFINE_STEPS = [16, 32, 64, 128, 256]; // passes in all; each step goes on from the one before

const cardOf = (name) => cards.find((entry) => entry.name === name), card = () => cardOf(state.model);
/** The method whose map is refined: "genatt" of "refine(genatt,passes=64)"; any other method is its own. */
const innerOf = (text) => text.replace(/^refine\((.*?)(,passes=\d+)?\)$/, "$1");
const methodCard = (text) => listed.methods.find((entry) => entry.name === baseName(innerOf(text)) || entry.name === text);
const isSlow = (text) => methodCard(text)?.slow ?? false;
const titleOf = (text) => listed.recommended.find((entry) => entry.method === text)?.title ?? methodCard(text)?.title ?? text;
const photoName = () => uploaded?.name ?? (state.photo === "demo" ? "example" : "photo");

/** The maps that are shown: of one or two answers, or of two photos or models. */
function panes() {
  const first = { photo, reply, map, name: photoName(), card: cardOf(reply.model) };
  if (second) return [{ ...first, k: 0 }, { ...second, name: second.reply.photo === reply.photo ? photoName() : pair.otherName(), card: cardOf(second.reply.model), k: 0 }];
  return reply.targets.map((_, k) => ({ ...first, k }));
}

/** What a map is about, as fields of a request. */
function aboutOf({ reply: { text, other, classes }, k }) {
  if (text) return { text };
  return other ? { similar_to: other } : { target: classes[k] === null ? null : String(classes[k]) };
}
const canPlay = () => card().labels.length > 0 || Boolean(reply.text || reply.other);

async function start() {
  let about;
  [about, listed] = await Promise.all([api.models(), api.methods()]);
  ({ models: cards, limits, version } = about);
  $("version").textContent = `ClairViT ${version}.`;
  if (!card()) state.model = cards[0].name;
  if (state.otherModel && (!cardOf(state.otherModel) || state.otherModel === state.model)) state.otherModel = "";
  if (limits.heic) for (const id of ["file", "other-file"]) $(id).accept += ",.heic,.heif";
  $("model").replaceChildren(...cards.map((entry) => element("option", { value: entry.name, textContent: entry.name, selected: entry.name === state.model })));
  updateModelControls();
  const unknown = state.method !== "default" && !methodCard(state.method) ? state.method : null;
  if (unknown || state.method === "default") state.method = card().default_method;
  showMethods($("methods"), listed, state.method, card(), limits.seconds, setMethod);
  for (const [id, name] of [["opacity", "value"], ["cmap", "value"], ["signed", "checked"], ["smooth", "checked"], ["shared", "checked"]]) $(id)[name] = state[id];
  if (!$("cmap").value) $("cmap").value = state.cmap = "auto"; // a link may contain anything
  if (isSlow(state.method) && state.method !== card().default_method) askFirst();
  await explain({ picture: true });
  if (unknown && reply) setStatus(`The link names a method that is not here (“${unknown}”); this is ${map.title}.`, true);
}

/** A link to a slow method does not start it by itself: the default method is shown, and a button runs the other. */
function askFirst() {
  const wanted = state.method, seconds = estimate(methodCard(wanted), card());
  state.method = card().default_method;
  $("ask-text").textContent = `This link asks for ${titleOf(wanted)}, which takes ${duration(seconds)}${wanted.includes("(") ? " or more" : ""} here.`;
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
  const allHeads = Array.from({ length: heads }, (_, k) => [String(k), String(k)]);
  $("head").replaceChildren(...[["mean", "all"], ...allHeads].map(([value, textContent]) => element("option", { value, textContent })));
  if (![...$("head").options].some((option) => option.value === state.head)) state.head = "mean";
  $("head").value = state.head;
  $("prompt-form").hidden = !reads_prompts;
  $("prompt").value = state.text = reads_prompts ? state.text : "";
  $("other-class").hidden = !labels.length;
  $("any-class").replaceChildren(element("option", { value: "", textContent: "choose…" }), ...labels.map((textContent, value) => element("option", { value, textContent })));
  for (const id of ["photo", "map-0", "map-1", "perturbed"]) $(id).style.aspectRatio = `${size[1]} / ${size[0]}`;
}

/** What is explained: what makes two photos alike, the prompt, or else classes; of two photos or models one class each. */
const asked = (most = 2) => pair.firstFields(methodCard(state.method)?.class_specific ?? true) ?? (state.text ? { text: state.text } : { target: state.targets.slice(0, pair.isPair() ? 1 : most) });

/** Request the maps of the settings; a newer request aborts the older one. A step of a refinement is not tested. Returns whether a map came. */
async function explain({ picture = false, image, isStep = false } = {}) {
  work.abort();
  const controller = work = new AbortController(), slow = isSlow(state.method), wanted = titleOf(state.method);
  const callbacks = startWork(image ? `Looking at ${image.name}` : wanted, controller);
  if (!state.method.startsWith("refine(")) markStale(controller, image ? null : wanted);
  try {
    const common = { method: state.method, layers: !slow, heads: !slow && state.head !== "mean" };
    const request = async (fields, known) => {
      const response = await api.explain({ ...common, ...fields, picture: picture || !known }, callbacks);
      response.text = fields.text ?? "";
      return { reply: response, photo: response.picture ? await decodePicture(response.picture) : known, map: unpackMap(response.explanations[0]) };
    };
    const first = await request({ image, photo: state.photo, model: state.model, ...asked() }, photo);
    const isComparing = controller === work && pair.isPair();
    const fields = isComparing ? pair.secondFields(first.reply, cards) : null;
    const isSame = second && fields && second.reply.photo === fields.photo && second.reply.model === fields.model;
    const other = fields ? await request(fields, isSame ? second.photo : null) : null;
    if (controller !== work) return;
    adoptResponse(first, other, image);
    endWork(controller, `${map.title}: done in ${map.seconds.toFixed(2)} s.`);
    if (isStep) showCheck(0, null, ownerOf(panes()[0])); // the test before was of another map
    else checking = runChecks();
    return true;
  } catch (error) {
    if (controller !== work) return; // a newer request is running
    if (error.kind === "photo-expired" && uploaded && !image) return explain({ image: uploaded, picture: true });
    if (!reply && await followLinkInPart(error)) return;
    failWork(controller, error, image ? `${image.name}: ` : "");
    $("map-panel").classList.remove("stale");
    $("map-panel").setAttribute("aria-busy", "false");
    if (reply) restoreSettings();
  }
}

/** Show what is possible of a link that cannot be followed, and say what is not. Returns whether there was anything to leave out. */
async function followLinkInPart(error) {
  const isExpired = error.kind === "photo-expired", asksMore = state.method !== card().default_method || state.targets.length || state.text || pair.isPair();
  let message = "This link asks for something that is not possible here, so this is the usual map.";
  if (isExpired && state.other) {
    message = "The server no longer has the second photo. Choose it again.";
    pair.end();
  } else if (isExpired && state.photo !== "demo") {
    message = "The server no longer has that photo; this is the example. Choose yours again.";
    pair.end();
    Object.assign(state, { photo: "demo", targets: [] }); // the classes of the link belong to the other photo
  } else if (["bad-request", "not-found", "too-slow", "internal-error"].includes(error.kind) && asksMore) {
    pair.end();
    Object.assign(state, { method: card().default_method, targets: [], text: "" });
    $("prompt").value = "";
  } else return false;
  await explain({ picture: true });
  if (reply && !$("status").classList.contains("error")) setStatus(message, true);
  return true;
}

function unpackMap(explanation) {
  const unpacked = { ...explanation, maps: api.unpack(explanation.maps) };
  unpacked.layers &&= api.unpack(unpacked.layers);
  unpacked.headMaps = unpacked.heads && api.unpack(unpacked.heads.maps);
  return unpacked;
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

/** Show a response, and the one that it is compared with; what belonged to the map before is dropped. */
function adoptResponse(first, other, image) {
  const response = first.reply;
  if (reply && (reply.photo !== response.photo || reply.model !== response.model || reply.other !== response.other)) clearThumbs();
  ({ photo, reply, map } = first);
  if (!map.layers) Object.assign(state, { layer: 0, head: "mean" }); // there is one map only
  if (response.photo === "demo") uploaded = null;
  else if (image) uploaded = image;
  second = other;
  if (second) {
    if (!state.otherModel) state.other = second.reply.photo;
    Object.assign(second, { file: pair.otherFile(), settings: { other: state.other, otherModel: state.otherModel, pair: state.pair } });
  }
  api.rememberUploads([uploaded, pair.otherFile()]);
  for (const controller of [curveWork, checkWork]) controller.abort();
  curveReply = null;
  checks = [];
  adoptSettings(response);
  write();
  curves.clear(photo);
  patch.reset();
  $("map-panel").classList.remove("stale");
  render();
  $("map-panel").setAttribute("aria-busy", "false");
  Object.assign($("map-panel").dataset, { method: map.method, pair: second ? state.pair : "" });
  if (uploaded) { photos.fillAnswer(uploaded, reply, photo); photos.markShown(uploaded, pair.otherFile()); }
  if ($("compare").open) updateThumbs();
  features.setPhoto({ photo, reply, card: card(), other: second && !state.otherModel ? second : null });
}

/** Set the settings to those of a response; a class-agnostic map has no target, so the selected classes stay. */
function adoptSettings(response) {
  const targets = response.classes.includes(null) ? state.targets : response.classes;
  Object.assign(state, { photo: response.photo, model: response.model, targets, text: response.text, method: response.explanations[0].method });
}

/** After a failure, set the controls to the map that is shown. */
function restoreSettings() {
  const changedModel = state.model !== reply.model;
  pair.restore(second);
  adoptSettings(reply);
  $("prompt").value = state.text;
  if (changedModel) { $("model").value = state.model; updateModelControls(); }
  render();
}

async function decodePicture(base64) {
  const text = atob(base64), bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
}

/** The layer of a map, 0: all; where models differ in depth, the one at the same share of it. */
const layerOf = (pane) => state.layer && pane.map.layers ? Math.max(1, Math.round(state.layer * pane.card.layers / card().layers)) : 0;
const isOfHead = (pane) => layerOf(pane) > 0 && Number(state.head) < pane.card.heads && Boolean(pane.map.headMaps);

/** The method of the values that are shown: that of the heads where one of them is shown, which may be raw attention. */
const shownMethod = (pane) => isOfHead(pane) ? pane.map.heads.method : pane.map.method;
/** Whether the map shown has heads of another method: these are explained in its words. */
const isBorrowed = (pane) => shownMethod(pane) !== pane.map.method;
const isSpecific = (pane) => isBorrowed(pane) ? methodCard(shownMethod(pane))?.class_specific ?? false : pane.map.class_specific;
const isControl = (pane) => methodCard(shownMethod(pane))?.control ?? false;
/** The title of what is shown: of a single layer without "all layers". */
const shownTitle = (pane) => layerOf(pane) ? methodCard(shownMethod(pane))?.title ?? pane.map.title : pane.map.title;

/** The maps on the screen: heads of a method that gives the same map for every answer are shown once. */
function shownPanes() {
  const list = panes();
  return second || isSpecific(list[0]) ? list : list.slice(0, 1);
}

/** The values shown: the whole method, one layer, or one head of a layer. */
function values(pane) {
  const layer = layerOf(pane) - 1;
  let array = pane.map.maps, indices = [pane.k];
  if (isOfHead(pane)) [array, indices] = [pane.map.headMaps, [layer, Number(state.head), pane.k]];
  else if (layer >= 0) [array, indices] = [pane.map.layers, [layer, pane.k]];
  const grid = api.slice(array, ...indices);
  return { values: grid.values, rows: grid.shape[0], cols: grid.shape[1] };
}

/** The name of a map next to another one: its photo or its model. */
const ownerOf = (pane) => !second ? "" : state.otherModel ? pane.reply.model : pane.name;

/** What to take care of; with the name of the map where it is not about all of them. */
function cautionsOf(list) {
  return [...new Set(list.flatMap((pane) => pane.reply.cautions))].map((text) => {
    const owners = list.filter((pane) => pane.reply.cautions.includes(text));
    return owners.length === list.length ? text : `${owners.map(ownerOf).join(", ")}: ${text}`;
  });
}

/** ", layer 4, head 2": which part of the method is shown; both are counted from 0, as in the library. */
function layerText(pane = panes()[0]) {
  if (!layerOf(pane)) return "";
  return `, layer ${layerOf(pane) - 1}${isOfHead(pane) ? `, head ${state.head}` : ""}`;
}

/** "Bengal 68 %", "dog.jpg: Pug 91 %", "cosine 0.61": what a map is about; under its own photo without the name of that. */
function nameOfMap(pane, isUnderPhoto = false) {
  const { reply: response, k, name } = pane;
  const owner = !second ? "" : state.otherModel ? `${response.model}: ` : isUnderPhoto ? "" : `${name}: `;
  if (!isSpecific(pane)) return `${owner}${cardOf(response.model).labels.length ? "any answer" : "where the model looks"}`;
  if (response.other) return `${owner}like the other photo`;
  const value = response.text ? cosineText(response.target_scores[k]) : valueText(response.probabilities[k], response.class_scores[k]);
  return `${owner}${response.targets[k]} ${value}`.trimEnd();
}

function render() {
  const list = shownPanes(), maps = list.map(values), negative = maps.some((grid) => grid.values.some((v) => v < 0)), signed = negative && state.signed;
  const clipped = negative && !state.signed ? maps.map((grid) => ({ ...grid, values: grid.values.map((v) => Math.max(0, v)) })) : maps;
  const common = colourScale(clipped.flatMap((grid) => [...grid.values]), signed, state.cmap);
  const scales = clipped.map((grid) => state.shared ? common : colourScale(grid.values, signed, state.cmap));
  const names = list.map((pane) => nameOfMap(pane)), hasTwoPhotos = Boolean(second && !state.otherModel);
  shown = { clipped, scale: scales[0], scales, names };
  $("maps").classList.toggle("two-photos", hasTwoPhotos);
  drawPhoto($("photo"), photo, 448);
  $("photo-caption").textContent = uploaded ? uploaded.name : state.photo === "demo" ? "example photo" : "your photo";
  $("other-figure").hidden = !hasTwoPhotos;
  if (hasTwoPhotos) { drawPhoto($("other-photo"), second.photo, 448); $("other-caption").textContent = pair.otherName(); }
  list.forEach((pane, k) => {
    overlay($(`map-${k}`), pane.photo, clipped[k], scales[k], state.opacity, state.smooth, 448);
    $(`caption-${k}`).textContent = `${nameOfMap(pane, true)} · ${shownTitle(pane)}${layerText(pane)}`;
    $(`map-${k}`).setAttribute("aria-label", `${shownTitle(pane)} map for ${names[k]}; arrow keys move from part to part`);
  });
  $("second-map").hidden = list.length < 2;
  $("shared").parentElement.hidden = list.length < 2;
  showLegend(scales[0]);
  showLayerControls(negative, list[0]);
  for (const id of NEEDS_MAP) $(id).disabled = id.startsWith("play") && !canPlay();
  $("curves").hidden = !canPlay(); // a model that names nothing loses no answer
  $("badge").title = canPlay() ? "Show the test as a film" : "";
  $("curves-of").hidden = list.length < 2;
  patch.draw({ panes: list.map((pane, k) => ({ ...pane, shownMap: maps[k], about: !isSpecific(pane) ? "" : pane.reply.other ? "the likeness" : pane.reply.targets[pane.k], layer: layerOf(pane) })), isHeld: () => held });
  showAnswer(second ? pair.pairSentence(list.map(asShown)) : sentenceNodes(reply, isSpecific(list[0]), isControl(list[0])), cautionsOf(list));
  pair.showPair(cards, reply, Boolean(second));
  updateLists();
}

/** A map as it is shown, for sentences about it. */
const asShown = (pane) => ({ ...pane, map: { ...pane.map, class_specific: isSpecific(pane) } });

function legendAbout(scale) {
  const list = shownPanes(), specific = isSpecific(list[0]);
  return [scale, specific, [...new Set(list.map(({ reply: response, k }) => response.targets[k]))], { isControl: isControl(list[0]), isAlike: Boolean(reply.other) && specific }];
}

function showLegend(scale) {
  const isFlat = !(scale.high > scale.low), [low, high] = legendWords(...legendAbout(scale));
  drawColourBar($("scale"), scale, state.opacity);
  $("scale").hidden = isFlat;
  for (const [id, text, value, beyond] of [["low", low, scale.low, scale.beyond[0] ? "≤ " : ""], ["high", high, scale.high, scale.beyond[1] ? "≥ " : ""]]) {
    $(id).textContent = isFlat ? (id === "low" ? "This map is the same everywhere:" : "it says nothing about this photo.") : text;
    $(id).title = beyond + number(value);
    $(id).dataset.value = value;
  }
}

function showLayerControls(negative, first) {
  $("signed").disabled = !negative;
  $("layer").disabled = !map.layers;
  $("layer").value = state.layer;
  $("head").value = state.head;
  $("layer-control").hidden = !map.layers;
  $("layer-text").textContent = state.layer ? `${state.layer - 1} (0 to ${card().layers - 1})` : "all together";
  $("layer").setAttribute("aria-valuetext", state.layer ? `layer ${state.layer - 1}` : "all layers together");
  $("head").disabled = !map.layers || !card().heads || state.layer === 0;
  $("head").title = $("head").disabled ? "Choose a layer first" : "";
  drawStrip(map, photo, state.layer, state);
  const notes = []; // in the words of this page; the method's own are among its details
  if (layerText(first)) notes.unshift("The test at the top is of all layers together, not of this one.");
  if (isBorrowed(first)) notes.unshift(`${map.title} has no heads of its own: this is head ${state.head} of ${titleOf(map.heads.method)}.`);
  if (second && state.layer && second.reply.model !== reply.model) notes.unshift("Of the second model the layer at the same depth is shown.");
  if (!isSpecific(first) && state.targets.length > 1 && !second) notes.unshift(`${titleOf(shownMethod(first))} gives the same map for every answer, so one is shown.`);
  $("notes").textContent = notes.join(" ");
}

function updateLists() {
  $("classes").hidden = $("classes-title").hidden = !reply.top.length;
  showClasses($("classes"), reply.top, state.targets, (index) => setTargets([index]), (index) => setTargets(state.targets[1] === index ? [state.targets[0]] : [state.targets[0], index]));
  const isListed = reply.top.some((entry) => entry.index === state.targets[0]);
  $("any-class").value = isListed || reply.text || reply.other ? "" : String(state.targets[0] ?? "");
  selectMethod($("methods"), innerOf(map.method));
  showRefine();
  showMethodFacts($("method-facts"), methodCard(map.method), map);
  rateThumbs(map.method, api.slice(map.maps, 0).values);
}

/** Correct the map by hiding random parts again and again; each step is shown as it arrives. */
async function refineMap() {
  const inner = innerOf(map.method), most = REFINE_STEPS.at(-1);
  $("refine").disabled = true;
  $("refine-bar").hidden = false;
  for (const passes of REFINE_STEPS) {
    state.method = `refine(${inner},passes=${passes})`;
    if (!await explain({ isStep: passes < most })) break; // cancelled, refused, or another map was asked for
    $("refine-bar").value = passes / most;
    $("refine-text").textContent = `${passes} of ${most} passes`;
  }
  if ($("refine-bar").value < 1 && map.method !== innerOf(map.method)) checking = runChecks(); // of the last step that came
  $("refine-bar").hidden = true;
  $("refine-bar").value = 0;
  showRefine();
}

/** The button that refines the map: of one photo, by a method that makes no passes of its own. */
function showRefine() {
  const entry = methodCard(map.method), isRefined = map.method !== innerOf(map.method), running = !$("refine-bar").hidden;
  $("refine-row").hidden = Boolean(second) || !entry || entry.slow || entry.control;
  $("refine").hidden = isRefined && !running;
  if (running) return;
  $("refine").disabled = false;
  $("refine-text").textContent = isRefined ? (map.refinement ?? [])[0] ?? "" : "";
}

function setTargets(targets) {
  if (targets.length > 1) pair.end(); // two answers of one photo
  else if (pair.isPair()) state.pair = "same";
  Object.assign(state, { targets, text: "" });
  $("prompt").value = "";
  explain();
}
function setPrompt(text) { state.text = text; if (text) needTarget(); if (pair.isAlike()) state.pair = "own"; explain(); }
/** A method that gives one map for every answer says nothing of a prompt or of another photo. */
function needTarget() { if (map && !map.class_specific) state.method = listed.recommended[0].method; }
function setPair(kind) { state.pair = kind; if (pair.isAlike()) needTarget(); explain(); }
function comparePhoto(photoOrFile) { pair.comparePhoto(photoOrFile, card().labels.length > 0); setPair(state.pair); }
function setMethod(method, options) { state.method = method; explain(options); }

/** How far to trust each map that is shown, in the background. */
async function runChecks() {
  checkWork.abort();
  const controller = checkWork = new AbortController(), files = [uploaded, pair.otherFile()], list = map.class_specific || second ? panes() : panes().slice(0, 1);
  list.forEach((pane, k) => showCheck(k, null, ownerOf(pane)));
  $("check-1").hidden = list.length < 2;
  for (const [k, pane] of list.entries()) {
    try {
      const response = await api.check({ photo: pane.reply.photo, model: pane.reply.model, method: map.method, ...aboutOf(pane) }, { signal: controller.signal });
      if (controller !== checkWork) return;
      showCheck(k, checks[k] = response, ownerOf(pane), pane.reply.cautions.length > 0);
      const file = k === 0 ? files[0] : second && !state.otherModel ? files[1] : null;
      if (file && !pane.reply.other) photos.fillCheck(file, response, pane.reply.cautions.length > 0);
    } catch (error) {
      if (controller !== checkWork || error.name === "AbortError") return;
      showCheckFailed(k, error, ownerOf(pane));
    }
  }
  photos.processRest(state.method, state.model, decodePicture);
}

/** Thumbnails of all quick methods, when they are asked for; once per photo and class. */
function clearThumbs() { thumbsFor = ""; $("thumbs").replaceChildren(); }
async function updateThumbs() {
  const key = reply && [reply.model, reply.photo, state.text || reply.other || (reply.classes[0] ?? state.targets[0])].join();
  if (!reply || thumbsFor === key) return;
  clearThumbs();
  thumbsFor = key;
  $("thumbs").textContent = "Working…";
  try {
    const response = await api.explain({ photo: reply.photo, model: reply.model, method: "all", ...asked(1) });
    if (thumbsFor !== key) return;
    showThumbs($("thumbs"), response, photo, (method) => { setMethod(method); $("map-panel").scrollIntoView({ block: "nearest" }); });
    rateThumbs(map.method, api.slice(map.maps, 0).values);
  } catch (error) {
    if (thumbsFor === key) clearThumbs();
    setStatus(plainMessage(error), true);
  }
}

/** The curve of the map that is shown, measured once. */
async function measureCurve(controller, title) {
  if (curveReply) return curveReply;
  const callbacks = startWork(title, controller);
  const response = await api.curve({ photo: reply.photo, model: reply.model, method: map.method, ...aboutOf(panes()[0]) }, callbacks);
  if (controller.signal.aborted) throw new DOMException("aborted", "AbortError");
  endWork(controller, "");
  return curveReply = response;
}

async function play(kind) {
  curveWork.abort();
  const controller = curveWork = new AbortController(), grid = card().grid, whole = api.slice(map.maps, 0);
  const rank = patch.rankPatches({ values: whole.values, rows: whole.shape[0], cols: whole.shape[1] }, grid);
  curves.play({ kind, rank, grid, photo, title: map.title, reply: curveReply });
  $("curves").scrollIntoView({ block: $("curves").offsetHeight < innerHeight ? "nearest" : "start" });
  if (curveReply) return;
  try { curves.receive(await measureCurve(controller, "Measuring the test")); } catch (error) {
    if (error.name !== "AbortError") curves.clear(photo);
    failWork(controller, error);
  }
}

/** Photos that were chosen, dropped or pasted: the first is shown, several are listed. */
function upload(files) {
  const chosen = [...files].slice(0, photos.MAX_PHOTOS);
  if (!chosen.length || !isSmallEnough(chosen)) return;
  photos.listPhotos(chosen, showFile, comparePhoto);
  if (files.length > chosen.length) setStatus(`${files.length} photos were given; the first ${photos.MAX_PHOTOS} are listed.`, true);
  showFile(chosen[0]);
}
function isSmallEnough(files) {
  const maxBytes = limits?.upload_bytes ?? Infinity, megabytes = (bytes) => (bytes / 2 ** 20).toFixed(1), large = files.find((file) => file.size > maxBytes);
  if (large) setStatus(`${large.name} has ${megabytes(large.size)} MB; expected at most ${megabytes(maxBytes)} MB: choose a smaller copy.`, true);
  return !large;
}
function endPair() { pair.end(); explain(); }
function showFile(file) { state.targets = []; explain({ image: file, picture: true }); }

/** All that a picture or a report says of the maps on the screen. */
function view() {
  const list = shownPanes(), nodes = second ? pair.pairSentence(list.map(asShown)) : sentenceNodes(reply, isSpecific(list[0]), isControl(list[0]));
  const about = !isSpecific(list[0]) ? "where the model looks, for every answer" : reply.other ? "what makes the two photos alike" : [...new Set(list.map((pane) => pane.reply.targets[pane.k]))].join(", ");
  const testName = (pane) => [ownerOf(pane), ...(layerOf(pane) ? [`${pane.map.title} as a whole`] : [])].filter(Boolean).join(", ");
  const tests = list.flatMap((pane, k) => checks[k] ? [{ check: checks[k], name: testName(pane), hasCaution: pane.reply.cautions.length > 0 }] : []);
  const title = shownTitle(list[0]), methodText = shownMethod(list[0]);
  return { photo, reply, map, title, methodText, tests, cautions: cautionsOf(list), legend: legendAbout(shown.scale), curve: curveReply, sentence: element("p", {}, ...nodes).textContent.trim(), version, style: state, photoName: photoName(), layerText: layerText(), scale: shown.scale,
    maps: list.map((pane, k) => ({ photo: pane.photo, grid: shown.clipped[k], scale: shown.scales[k], name: shown.names[k] })),
    photos: second && !state.otherModel ? [[photo, photoName()], [second.photo, pair.otherName()]] : [[photo, "the photo, as the model sees it"]],
    models: [...new Set(list.map((pane) => pane.reply.model))].join(" and "),
    value: (entry) => valueText(entry.probability, entry.score),
    settings: { photo: [...new Set(list.map((pane) => pane.name))].join(" and "), model: [...new Set(list.map((pane) => pane.reply.model))].join(" and "), method: `${title} (${methodText})`, explains: about, shown: layerText().slice(2) || "all layers together", cost: `${map.forwards} forward and ${map.backwards} backward passes, ${map.seconds.toFixed(2)} s`, ...(plainNotes(map.notes).length ? { notes: plainNotes(map.notes).join(" ") } : {}), version: `ClairViT ${version}`, made: new Date().toISOString().slice(0, 16).replace("T", " ") + " UTC" } };
}

const nameOf = (suffix, pane) => fileName(pane?.name ?? photoName(), [map.method, ...(pane && state.otherModel ? [pane.reply.model] : [])].join("-"), suffix);

/** The numbers of each photo and model that is shown, one file each. */
async function saveNumbers(kind, suffix) {
  const controller = new AbortController(), callbacks = startWork("Preparing the file", controller), list = second ? panes() : [panes()[0]], names = [];
  try {
    for (const pane of list) {
      const response = pane.reply, name = nameOf(suffix, pane), about = response.text || response.other ? aboutOf(pane) : { target: response.classes.includes(null) ? [] : response.classes };
      const bytes = await api.download({ photo: response.photo, model: response.model, method: map.method, ...about, reply: kind, layers: Boolean(pane.map.layers) }, callbacks);
      saveBlob(new Blob([kind === "record" ? withPage(bytes, pane) : bytes]), name);
      names.push(name);
    }
    endWork(controller, `Saved ${names.join(" and ")}.`);
  } catch (error) { failWork(controller, error); }
}

/** The record of a map with what the page knows of it and the server does not: the photo's name, and the tests that were made. */
function withPage(bytes, pane) {
  const record = JSON.parse(new TextDecoder().decode(bytes)), all = panes();
  const tests = all.flatMap((each, k) => checks[k] && (!second || each.reply === pane.reply) ? [{ name: pane.name, target: each.reply.targets[each.k], ...checks[k] }] : []);
  return JSON.stringify({ ...record, names: record.names.map(() => pane.name), check: tests.length ? { checks: tests } : null }, null, 1);
}

/** Wait for the tests of the maps on the screen; whether these are still on it. */
async function isTested() {
  const current = map;
  await checking;
  return current === map;
}

async function savePicture() {
  const controller = new AbortController();
  startWork("Preparing the picture", controller);
  if (!await isTested()) return endWork(controller, "");
  const name = nameOf("png"), canvas = pictureCanvas(view());
  canvas.toBlob((blob) => { saveBlob(blob, name); endWork(controller, `Saved ${name}.`); });
}

async function saveReport() {
  const controller = curveWork = new AbortController(), name = nameOf("html");
  startWork("Preparing the report", controller);
  try {
    if (!await isTested()) return endWork(controller, "");
    const measured = canPlay() ? await measureCurve(controller, "Preparing the report") : null;
    const charts = measured ? ["deletion", "insertion"].map((kind) => [kind, curves.wholeChart(measured, kind, map.title)]).filter(([, chart]) => chart) : [];
    saveBlob(new Blob([await reportHtml(view(), charts, map.layers && $("layer-strip"))], { type: "text/html" }), name);
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
  if (on) panes().forEach((pane, k) => drawPhoto($(`map-${k}`), pane.photo, 448));
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
$("refine").addEventListener("click", refineMap);
bindControl("opacity", "input", (control) => Number(control.value));
bindControl("cmap", "change", (control) => control.value);
bindControl("signed", "change", (control) => control.checked);
bindControl("smooth", "change", (control) => control.checked);
bindControl("shared", "change", (control) => control.checked);
bindControl("layer", "input", (control) => {
  if (control.value === "0") state.head = "mean"; // all layers together have no single head
  return Number(control.value);
});
$("head").addEventListener("change", () => {
  state.head = $("head").value;
  write();
  if (state.head === "mean" || (map.headMaps && (!second || second.map.headMaps))) render();
  else explain();
});
$("methods").addEventListener("focusout", (event) => { if (map && !$("methods").contains(event.relatedTarget)) selectMethod($("methods"), innerOf(state.method)); });
$("filter").addEventListener("input", () => filterMethods($("methods"), $("filter").value));
$("any-class").addEventListener("change", () => { if ($("any-class").value !== "") setTargets([Number($("any-class").value)]); });
$("prompt-form").addEventListener("submit", (event) => { event.preventDefault(); setPrompt($("prompt").value.trim()); });
$("model").addEventListener("change", () => {
  const wasDefault = state.method === card().default_method;
  if (state.otherModel === $("model").value) pair.end();
  Object.assign(state, { model: $("model").value, targets: [], head: "mean" });
  if (wasDefault) state.method = card().default_method;
  updateModelControls();
  explain({ picture: true });
});
$("file").addEventListener("change", () => { upload([...$("file").files]); $("file").value = ""; });
$("other-file").addEventListener("change", () => { const [file] = $("other-file").files; $("other-file").value = ""; if (file && isSmallEnough([file])) comparePhoto(file); });
$("other-model").addEventListener("change", () => { if ($("other-model").value) { pair.compareModel($("other-model").value); explain(); } else endPair(); });
for (const radio of document.querySelectorAll("input[name=pair]")) radio.addEventListener("change", () => setPair(radio.value));
$("pair-end").addEventListener("click", endPair);
$("demo").addEventListener("click", () => { photos.listPhotos([], showFile, comparePhoto); Object.assign(state, { photo: "demo", targets: [] }); explain({ picture: true }); });
$("play-deletion").addEventListener("click", () => play("deletion"));
$("play-insertion").addEventListener("click", () => play("insertion"));
$("badge").addEventListener("click", () => { if (canPlay()) play("deletion"); });
$("compare").addEventListener("toggle", () => { if ($("compare").open) updateThumbs(); });
$("save-report").addEventListener("click", saveReport);
$("save-png").addEventListener("click", savePicture);
$("save-json").addEventListener("click", () => saveNumbers("record", "json"));
$("save-npz").addEventListener("click", () => saveNumbers("npz", "npz"));
$("copy-link").addEventListener("click", async () => {
  write();
  try { await navigator.clipboard.writeText(location.href); setStatus("The link is in the clipboard."); } catch { setStatus(`The link: ${location.href}`); }
});
$("help-open").addEventListener("click", () => $("help").showModal());
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("maps").focus(); }); // the fragment holds the settings
document.addEventListener("paste", (event) => upload([...event.clipboardData.files].filter((file) => file.type.startsWith("image/"))));
/** A dropped photo is shown on the left half of the window, and compared with the one on the page on the right half. */
const isRightHalf = (event) => event.clientX > innerWidth / 2;
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  $("drop-overlay").hidden = ![...event.dataTransfer.types].includes("Files");
  $("drop-overlay").dataset.half = isRightHalf(event) ? "compare" : "show";
});
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop-overlay").hidden = true; });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop-overlay").hidden = true;
  const files = [...event.dataTransfer.files];
  if (files.length !== 1 || !reply || !isRightHalf(event)) upload(files);
  else if (isSmallEnough(files)) comparePhoto(files[0]);
});
addEventListener("hashchange", () => { if (!location.hash || location.hash.includes("=")) location.reload(); }); // another link was entered in this tab
start().catch((error) => setStatus(plainMessage(error), true));
