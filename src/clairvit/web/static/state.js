// The settings of the page and its permalink: they are in the fragment of the URL.

export const DEFAULTS = { model: null, photo: "demo", method: "default", targets: [], text: "", other: "", otherModel: "", pair: "own", layer: 0, head: "mean", opacity: 0.8, cmap: "auto", signed: true, smooth: true, shared: true };
export const state = { ...DEFAULTS, ...read() };

function read() {
  const parameters = new URLSearchParams(location.hash.slice(1)), settings = {};
  for (const name of ["model", "photo", "method", "text", "other", "otherModel", "pair", "head", "cmap"]) if (parameters.has(name)) settings[name] = parameters.get(name);
  if (settings.photo && !/^(demo|[0-9a-f]{32})$/.test(settings.photo)) delete settings.photo;
  if (settings.other && !/^(demo|[0-9a-f]{32})$/.test(settings.other)) delete settings.other;
  if (settings.pair && !["own", "same", "alike"].includes(settings.pair)) delete settings.pair;
  if (settings.method && !/^[\w.,=+:()# -]{1,200}$/.test(settings.method)) settings.method = "default";
  if (parameters.has("target")) settings.targets = parameters.getAll("target").slice(0, 2).map(Number).filter(Number.isInteger);
  const number = (name) => parameters.has(name) && isFinite(parameters.get(name)) ? Number(parameters.get(name)) : DEFAULTS[name];
  settings.layer = Math.max(0, Math.trunc(number("layer")));
  settings.opacity = Math.min(1, Math.max(0, number("opacity")));
  for (const name of ["signed", "smooth", "shared"]) if (parameters.has(name)) settings[name] = parameters.get(name) === "1";
  return settings;
}

/** Put the settings that differ from the defaults into the URL. */
export function write() {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (name === "targets") value.forEach((target) => parameters.append("target", target));
    else if (value !== DEFAULTS[name] && value !== null) parameters.set(name, typeof value === "boolean" ? Number(value) : value);
  }
  const text = parameters.toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
}
