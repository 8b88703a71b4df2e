// One line at the top says what happens; long work has a bar and can be cancelled.

const box = document.getElementById("status"), text = document.getElementById("status-text");
const bar = document.getElementById("progress"), cancel = document.getElementById("cancel");
let working = null;

export function say(words, bad = false) {
  text.textContent = words;
  text.title = words;
  box.classList.toggle("bad", bad);
}

/** Begin work that can be stopped. Returns its signal and callbacks. */
export function begin(what, controller) {
  working = controller;
  say(`${what}…`);
  const started = performance.now();
  return {
    signal: controller.signal,
    busy: (wait) => { if (working === controller) say(`The server is busy; asking again in ${Math.ceil(wait)} s…`); },
    progress: ({ what: step, done, steps }) => {
      if (working !== controller) return;
      box.setAttribute("aria-live", "off"); // the bar says it; every per cent read aloud would be too much
      cancel.hidden = performance.now() - started < 400;
      bar.hidden = cancel.hidden;
      if (steps > 0) {
        const left = done > 0 ? (performance.now() - started) / 1000 * (steps - done) / done : NaN;
        bar.value = done / steps;
        say(`${what}: ${step} ${Math.round(100 * done / steps)} %${left > 1 ? `, about ${Math.ceil(left)} s left` : ""}`);
      } else {
        bar.removeAttribute("value");
        say(step === "waiting" ? `${what}: waiting for its turn…` : `${what}…`);
      }
    },
  };
}

export function end(controller, words) {
  if (working !== controller) return;
  working = null;
  bar.hidden = cancel.hidden = true;
  box.setAttribute("aria-live", "polite");
  if (words !== undefined) say(words);
}

/** An error in words; work that was cancelled by hand, or replaced by newer work, is no error. */
export function fail(controller, error) {
  if (error.name === "AbortError") {
    if (working === controller) end(controller, "Cancelled.");
    return;
  }
  end(controller);
  say(error.message, true);
}

cancel.addEventListener("click", () => working?.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !cancel.hidden) working?.abort(); });
