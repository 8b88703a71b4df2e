// Words for numbers, durations and errors: what visitors read.

export function element(name, properties = {}, ...children) {
  const created = Object.assign(document.createElement(name), properties);
  created.append(...children);
  return created;
}

/** A number and its per cent sign stay on one line. */
export const unbroken = (text) => text.replace(/(\d) %/g, "$1\u00a0%");

export const percent = (p) => p === null ? "" : unbroken(p < 0.0005 ? "<0.1 %" : p > 0.9995 ? ">99.9 %" : p < 0.0995 || p >= 0.995 ? `${(100 * p).toFixed(1)} %` : `${Math.round(100 * p)} %`);

/** A number with a proper minus sign. */
export const number = (value, digits = null) => (digits === null ? Number(value.toPrecision(3)).toString() : value.toFixed(digits)).replace("-", "−");

/** A probability, or the score itself where the model has no probabilities. */
export const valueText = (probability, score) => probability !== null ? percent(probability) : score === null ? "" : `score ${number(score)}`;

/** "under 1 s", "about 15 s", "about 2 min". */
export const duration = (seconds) => seconds < 1 ? "under 1 s" : seconds < 55 ? `about ${Math.ceil(seconds)} s` : `about ${Math.ceil(seconds / 60)} min`;

// Words of the library, the command line and the validator: true, but nothing that a visitor can use.
const TECHNICAL = /\bcv\.|--\w|`|\bbody\.|\bpattern\b|\w=|\btarget function\b|\bAuthorization\b/;

/** An error as a sentence for a visitor. */
export function plainMessage(error) {
  if (error instanceof TypeError) return "The server does not answer. It may have been stopped: start it again, then reload this page.";
  if (error.kind === "too-slow") return "This took longer than the server allows. Choose a quicker method.";
  if (error.kind === "internal-error") return "The server could not do this. Try another method or photo.";
  const sentences = error.message.split(/(?<=[.?!])\s+/).filter((sentence) => !TECHNICAL.test(sentence));
  return sentences.join(" ") || "This is not possible here. Choose another method or another photo.";
}

/** The notes of a method without what only users of the library and the command line can do. */
export const plainNotes = (notes) => notes.map((note) => note.split(/(?<=[.?!;])\s+/).filter((part) => !TECHNICAL.test(part)).join(" ").replace(/;$/, "")).filter(Boolean);

/** A part of a file name: letters, digits and hyphens. */
export const slug = (text) => text.replace(/\.[^.]*$/, "").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "photo";

/** How alike a photo and a text are, from -1 to 1. */
export const cosineText = (cosine) => `cosine ${cosine.toFixed(3).replace("-", "−")}`;
