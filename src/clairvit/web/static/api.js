// The server's five addresses. Arrays come as little-endian float32 in base64; a problem becomes an Error with a kind.

export class Trouble extends Error {
  constructor(problem) { super(problem.message || "The server did not answer as expected."); this.kind = problem.kind; this.retryAfter = problem.retry_after; }
}

/** {shape, float32} -> {shape, values}. */
export function unpack(numbers) {
  const text = atob(numbers.float32), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return { shape: numbers.shape, values: new Float32Array(bytes.buffer) };
}

/** A part of an array along its first axes: part(a, 3, 0) is a[3, 0]. */
export function part(array, ...places) {
  const shape = array.shape.slice(places.length), size = shape.reduce((a, b) => a * b, 1);
  let start = 0;
  places.forEach((place, k) => { start = start * array.shape[k] + place; });
  return { shape, values: array.values.subarray(start * size, (start + 1) * size) };
}

// The token comes after the # of the address, which browsers send to nobody, and is kept by this tab alone.
const TOKEN = "token", after = new URLSearchParams(location.hash.slice(1));
if (after.has(TOKEN)) {
  sessionStorage.setItem(TOKEN, after.get(TOKEN));
  after.delete(TOKEN);
  history.replaceState(null, "", `${location.pathname}#${after}`);
}

/** A token by hand; false: the visitor has none. Of two requests that were refused only the first asks. */
function enter(used, words) {
  if (sessionStorage.getItem(TOKEN) !== used) return true;
  const given = prompt(words)?.trim();
  if (given) sessionStorage.setItem(TOKEN, given);
  return Boolean(given);
}

const sleep = (seconds, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, seconds * 1000);
  signal?.addEventListener("abort", () => { clearTimeout(timer); reject(new DOMException("stopped", "AbortError")); });
});

let file = null; // the photo on show, for a server that has forgotten it

export function keep(photo) { file = photo; }

/** fetch; when all places are taken it comes again as often as `patience` says, and sends a forgotten photo once more. */
async function ask(path, options = {}, busy = () => {}, patience = 6) {
  let sent = file === null;
  for (let turn = 0; ; turn++) {
    const token = sessionStorage.getItem(TOKEN), key = token ? { authorization: `Bearer ${token}` } : {};
    const reply = await fetch(path, { ...options, headers: { ...options.headers, ...key } });
    if (reply.ok) return reply;
    const problem = await reply.json().catch(() => ({ message: `The server answered ${reply.status}.` }));
    if (reply.status === 401 && enter(token, problem.message)) continue;
    if (problem.kind === "forgotten-photo" && !sent) {
      sent = true;
      await ask("/api/explain", { method: "POST", body: form({ image: file, method: "random" }), signal: options.signal }, busy);
      continue;
    }
    if (reply.status !== 429 || turn >= patience) throw new Trouble(problem);
    const wait = Math.min(20, problem.retry_after ?? 1) * (1 + 0.5 * Math.random());
    busy(wait);
    await sleep(wait, options.signal);
  }
}

export const models = async () => (await ask("/api/models")).json();
export const methods = async () => (await ask("/api/methods")).json();

export async function trace(layer, { photo, model, head, patch }, signal) {
  const query = new URLSearchParams({ photo, model, head });
  if (patch !== undefined) query.set("patch", patch);
  return (await ask(`/api/trace/${layer}?${query}`, { signal })).json();
}

function form(asked) {
  const body = new FormData();
  for (const [name, value] of Object.entries(asked)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null) body.append(name, one);
  }
  return body;
}

/** Lines of JSON: progress until the reply comes. */
async function streamed(reply, progress) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += value ?? "";
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const told = JSON.parse(line);
      if (told.progress) progress(told.progress);
      if (told.problem) throw new Trouble(told.problem);
      if (told.reply) return told.reply;
    }
    if (done) throw new Trouble({ message: "The connection ended before the reply; try again." });
  }
}

export async function explain(asked, { signal, progress = () => {}, busy } = {}) {
  const reply = await ask("/api/explain", { method: "POST", body: form({ ...asked, stream: true }), signal }, busy);
  return streamed(reply, progress);
}

export async function keepsake(asked) {
  return (await ask("/api/explain", { method: "POST", body: form(asked) })).blob();
}

export async function curve(asked, { signal, progress = () => {}, busy } = {}) {
  const body = JSON.stringify({ ...asked, stream: true });
  const reply = await ask("/api/curve", { method: "POST", body, headers: { "content-type": "application/json" }, signal }, busy);
  return streamed(reply, progress);
}
