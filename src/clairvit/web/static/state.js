// What the page shows, and its permalink: everything that matters is in the address after the #.

const USUAL = { model: null, photo: "demo", method: "legrad", targets: [], layer: 0, head: "mean", opacity: 0.8, cmap: "auto", signed: true, smooth: true };
export const state = { ...USUAL, ...read() };

function read() {
  const given = new URLSearchParams(location.hash.slice(1)), found = {};
  for (const name of ["model", "photo", "method", "head", "cmap"]) if (given.has(name)) found[name] = given.get(name);
  if (given.has("target")) found.targets = given.getAll("target").slice(0, 2).map(Number).filter(Number.isInteger);
  const number = (name) => given.has(name) && isFinite(given.get(name)) ? Number(given.get(name)) : USUAL[name];
  found.layer = Math.max(0, Math.trunc(number("layer")));
  found.opacity = Math.min(1, Math.max(0, number("opacity")));
  for (const name of ["signed", "smooth"]) if (given.has(name)) found[name] = given.get(name) === "1";
  return found;
}

/** Put the settings into the address; those that are as usual are left out. */
export function write() {
  const told = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (name === "targets") value.forEach((one) => told.append("target", one));
    else if (value !== USUAL[name] && value !== null) told.set(name, typeof value === "boolean" ? Number(value) : value);
  }
  const text = told.toString();
  history.replaceState(null, "", text ? `#${text}` : location.pathname);
}
