// Two maps side by side: two photos, or one photo and two models. What is compared, what is asked of the second, and its controls.

import { state } from "./state.js";
import { cosineText, element, valueText } from "./texts.js";

const $ = (id) => document.getElementById(id);
let file = null; // the second photo, until the server has it and if it must be sent again

export const isPair = () => Boolean(state.otherModel || state.other || file);
export const isAlike = () => state.pair === "alike" && !state.otherModel && isPair();
export const otherFile = () => file;
export const otherName = () => file?.name ?? (state.other === "demo" ? "example" : "the other photo");

/** Compare with another photo: a file, or the id of one that the server has. */
export function comparePhoto(photo, hasClasses) {
  file = photo instanceof File ? photo : null;
  const pair = isPairOfPhotos() ? state.pair : hasClasses ? "own" : "alike";
  Object.assign(state, { other: file ? "" : photo, otherModel: "", pair });
}
const isPairOfPhotos = () => Boolean(state.other);

export function compareModel(name) {
  file = null;
  Object.assign(state, { other: "", otherModel: name, pair: "same" });
}

export function end() {
  file = null;
  Object.assign(state, { other: "", otherModel: "", pair: "own" });
}

/** Set the comparison back to the one that is shown; null: there is none. */
export function restore(second) {
  if (!second) return end();
  file = second.file;
  Object.assign(state, second.settings);
}

/** What the first map is asked about where the question is what makes two photos alike; null: classes or a prompt. */
export const firstFields = (isClassSpecific) => !isAlike() || !isClassSpecific ? null : state.other ? { similar_to: state.other } : { other: file };

/** The request of the second map, after the response to the first. */
export function secondFields(first, cards) {
  const model = state.otherModel || state.model, photo = state.otherModel ? first.photo : state.other || first.other;
  const base = { image: photo ? undefined : file, photo: photo || undefined, model };
  if (first.other) return { ...base, similar_to: first.photo };
  const card = cards.find((entry) => entry.name === model);
  if (first.text) return card.reads_prompts ? { ...base, text: first.text } : base;
  const index = state.pair === "same" ? sharedClass(first, card, cards) : -1;
  return index < 0 ? base : { ...base, target: [index] };
}

/** The number of the first map's class in another model, by its name; −1 where there is none. */
export function sharedClass(first, card, cards) {
  const name = first.classes[0] !== null ? first.targets[0] : cards.find((entry) => entry.name === first.model).labels[state.targets[0]];
  return name === undefined ? -1 : card.labels.indexOf(name);
}

const bold = (textContent) => element("b", { textContent });
const answer = ({ reply }) => reply.top[0] ? [bold(reply.top[0].name), ` (${valueText(reply.top[0].probability, reply.top[0].score)})`] : ["nothing"];

/** What the model says of two photos, or two models of one photo, as nodes. */
export function pairSentence([first, second]) {
  if (first.reply.other) {
    return ["To the model these two photos are alike by ", bold(cosineText(first.reply.target_scores[0])), " (1: the same, 0: unrelated). The maps show which parts of each photo make them alike."];
  }
  if (first.reply.text && first.map.class_specific) {
    const cosines = [first, second].map(({ reply }) => reply.text ? cosineText(reply.target_scores[0]) : "no words");
    return ["The maps show what makes each photo like the words ", bold(first.reply.text), ` (${cosines.join(", ")}).`];
  }
  if (!first.reply.top.length && !second.reply.top.length) return ["This model names nothing: it turns a photo into numbers that can be compared. The maps show where it looks."];
  const says = state.otherModel ? [bold(first.reply.model), " says ", ...answer(first), "; ", bold(second.reply.model), " says ", ...answer(second), ". "]
    : ["The model says ", ...answer(first), ` for ${first.name} and `, ...answer(second), ` for ${second.name}. `];
  if (!first.map.class_specific) return [...says, "The maps show where the model looks; they are the same for every answer."];
  const [one, two] = [first.reply.targets[0], second.reply.targets[0]];
  return [...says, ...(one === two ? ["Both maps are for ", bold(one), "."] : ["The maps are for ", bold(one), " and ", bold(two), "."])];
}

/** The controls of the comparison: what can be chosen, and what is shown. */
export function showPair(cards, first, shown) {
  $("other-model-label").hidden = cards.length < 2;
  $("other-model").replaceChildren(element("option", { value: "", textContent: "choose…" }), ...cards.filter((entry) => entry.name !== state.model).map((entry) => element("option", { value: entry.name, textContent: entry.name })));
  $("other-model").value = state.otherModel;
  $("pair-options").hidden = !shown;
  if (!shown) return;
  $("pair-name").textContent = state.otherModel || otherName();
  const card = cards.find((entry) => entry.name === (state.otherModel || state.model)), hasClass = sharedClass(first, card, cards) >= 0;
  const possible = { own: card.labels.length > 0, same: hasClass || Boolean(first.text), alike: !state.otherModel };
  for (const radio of document.querySelectorAll("input[name=pair]")) {
    radio.parentElement.hidden = !possible[radio.value] || Object.values(possible).filter(Boolean).length < 2;
    radio.checked = radio.value === (state.pair === "same" && !possible.same ? "own" : state.pair);
  }
}
