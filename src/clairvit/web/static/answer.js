// The answer card: what the model says, and whether the test supports the map.

import { cosineText, element, plainMessage, unbroken, valueText } from "./texts.js";

const $ = (id) => document.getElementById(id);

const named = (entry) => [element("b", { textContent: entry.name }), ` (${valueText(entry.probability, entry.score)})`];

/** What the model says, as nodes: "The model says X (83 %), then Y (16 %). The map is for Y." */
export function sentenceNodes(reply, classSpecific, isControl) {
  const [first, second] = reply.top;
  if (reply.text && classSpecific) return ["The map shows what makes the photo like the words ", element("b", { textContent: reply.text }), ` (${cosineText(reply.target_scores[0])}; 1 is the same, 0 unrelated).`];
  if (!first) return ["This model names nothing: it turns a photo into numbers that can be compared. The map shows where it looks."];
  const nodes = first.probability === null ? ["The model's answer: ", ...named(first)] : ["The model says ", ...named(first)];
  if (second) nodes.push(first.probability === null ? "; next: " : ", then ", ...named(second));
  nodes.push(". ");
  if (isControl) nodes.push("The map is a control: it knows nothing of the model.");
  else if (!classSpecific) nodes.push("The map shows where the model looks; it is the same for every answer.");
  else if (reply.targets.length > 1) nodes.push("The maps are for ", element("b", { textContent: reply.targets[0] }), " and ", element("b", { textContent: reply.targets[1] }), ", on one colour scale.");
  else if (reply.classes[0] !== first.index) nodes.push("The map is for ", element("b", { textContent: reply.targets[0] }), ` (${valueText(reply.probabilities[0], reply.class_scores[0])}).`);
  return nodes;
}

export function showAnswer(sentence, cautions) {
  $("answer-says").replaceChildren(...sentence);
  $("caution").hidden = !cautions.length;
  $("caution").textContent = cautions.length ? `Take care: ${cautions.join(" ")}` : "";
}

const isDoubtful = (check, hasCaution) => hasCaution && check?.badge_style === "supported"; // no green next to a warning about the photo
/** The verdict of a test in words. */
export const badgeText = (check, hasCaution = false) => (check?.badge ?? "Could not be tested") + (isDoubtful(check, hasCaution) ? ", but take care" : "");
/** What gives a badge its colour. */
export const badgeStyle = (check, hasCaution = false) => isDoubtful(check, hasCaution) ? "weak" : check?.badge_style ?? "unknown";
/** The sentences of a test in the words of the page: its patches are parts, and correlations are for the numbers. */
const plainSentence = (text) => unbroken(text).replace(/\bpatch(es)?\b/g, (_, many) => many ? "parts" : "part").replace(/ \(rank correlation [^)]*\)/g, "").replace(/(?<=\s)-(?=\d)/g, "−");
/** What hiding the marked parts did, in one sentence; the verdict is on the badge. */
const shortCheckText = (check) => plainSentence(`${check.sentence.split(/\.\s+(?=[A-Z])/)[0].replace(/\.$/, "")}.`);
/** What the test says of the map, then of the answer. */
export const checkText = (check) => plainSentence([check.sentence, ...(check.verdict ? check.remarks : []), `Answer: ${check.answer.sentence}`].join(" "));

const badges = [[$("badge"), $("answer-text")], [$("badge-1"), $("answer-text-1")]]; // one per map

/** The badge of a map and its sentence, with the map's name where there are two; null: the test is running. */
export function showCheck(k, check, name = "", hasCaution = false) {
  const [badge, text] = badges[k];
  badge.textContent = check ? badgeText(check, hasCaution) : "Testing this map…";
  badge.dataset.style = check ? badgeStyle(check, hasCaution) : "";
  if (k === 0) badge.disabled = !check;
  text.textContent = name ? `${name}: ${check ? shortCheckText(check) : ""}` : check ? checkText(check) : "";
}

export function showCheckFailed(k, error, name = "") {
  const [badge, text] = badges[k];
  badge.textContent = "Could not be tested";
  badge.dataset.style = "";
  if (k === 0) badge.disabled = true;
  text.textContent = [name && `${name}:`, plainMessage(error)].filter(Boolean).join(" ");
}
