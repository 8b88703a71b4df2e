import { askToken, currentToken } from "./token.js";

// The seven endpoints of the server. Arrays are little-endian float32 in base64; a problem becomes an ApiError with a kind.

export class ApiError extends Error {
  constructor(problem) { super(problem.message || "The server did not answer as expected."); this.kind = problem.kind; this.retryAfter = problem.retry_after; }
}

/** {shape, float32} -> {shape, values}. */
export function unpack(numbers) {
  const text = atob(numbers.float32), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return { shape: numbers.shape, values: new Float32Array(bytes.buffer) };
}

/** A slice of an array along its first axes: slice(a, 3, 0) is a[3, 0]. */
export function slice(array, ...indices) {
  const shape = array.shape.slice(indices.length), size = shape.reduce((a, b) => a * b, 1);
  let start = 0;
  indices.forEach((index, k) => { start = start * array.shape[k] + index; });
  return { shape, values: array.values.subarray(start * size, (start + 1) * size) };
}

const sleep = (seconds, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, seconds * 1000);
  signal?.addEventListener("abort", () => { clearTimeout(timer); reject(new DOMException("aborted", "AbortError")); });
});

let uploaded = []; // the files of the photos that are shown, sent again if they expired on the server

export function rememberUploads(files) { uploaded = files.filter(Boolean); }

/** fetch; retries while the server is busy, and uploads expired photos once more. */
async function request(path, options = {}, onBusy = () => {}, maxRetries = 6) {
  let resent = uploaded.length === 0;
  for (let attempt = 0; ; attempt++) {
    const token = currentToken(), authorization = token ? { authorization: `Bearer ${token}` } : {};
    const reply = await fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
    if (reply.ok) return reply;
    const problem = await reply.json().catch(() => ({ message: `The server answered ${reply.status}.` }));
    if (reply.status === 401) { await askToken(token); continue; }
    if (problem.kind === "photo-expired" && !resent) {
      resent = true;
      for (const image of uploaded) await request("/api/explain", { method: "POST", body: form({ image, method: "random" }), signal: options.signal }, onBusy);
      continue;
    }
    if (reply.status !== 429 || attempt >= maxRetries) throw new ApiError(problem);
    const wait = Math.min(20, problem.retry_after ?? 1) * (1 + 0.5 * Math.random());
    onBusy(wait);
    await sleep(wait, options.signal);
  }
}

export const models = async () => (await request("/api/models")).json();
export const methods = async () => (await request("/api/methods")).json();

export async function trace(layer, { photo, model, head, patch }, signal) {
  const query = new URLSearchParams({ photo, model, head });
  if (patch !== undefined) query.set("patch", patch);
  return (await request(`/api/trace/${layer}?${query}`, { signal })).json();
}

/** Components, norms and cosines of the parts of one or two photos in one layer. */
export async function features(layer, fields, signal) {
  const query = new URLSearchParams(Object.entries(fields).filter(([, value]) => value !== undefined));
  return (await request(`/api/features/${layer}?${query}`, { signal })).json();
}

function form(fields) {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    for (const item of Array.isArray(value) ? value : [value]) if (item !== undefined && item !== null) body.append(name, item);
  }
  return body;
}

/** JSON lines: progress until the reply arrives. */
async function readStream(reply, onProgress) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    rest += value ?? "";
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const message = JSON.parse(line);
      if (message.progress) onProgress(message.progress);
      if (message.problem) throw new ApiError(message.problem);
      if (message.reply) return message.reply;
    }
    if (done) throw new ApiError({ message: "The connection ended before the reply; try again." });
  }
}

export async function explain(fields, { signal, onProgress = () => {}, onBusy } = {}) {
  const reply = await request("/api/explain", { method: "POST", body: form({ ...fields, stream: true }), signal }, onBusy);
  return readStream(reply, onProgress);
}

/** A file of the map: computed before, or now with progress. */
export async function download(fields, callbacks) {
  const { base64 } = await explain(fields, callbacks);
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

async function postJson(path, fields, { signal, onProgress = () => {}, onBusy } = {}) {
  const body = JSON.stringify({ ...fields, stream: true });
  const reply = await request(path, { method: "POST", body, headers: { "content-type": "application/json" }, signal }, onBusy);
  return readStream(reply, onProgress);
}

export const curve = (fields, callbacks) => postJson("/api/curve", fields, callbacks);
export const check = (fields, callbacks) => postJson("/api/check", fields, callbacks);
