// The status line at the top; long work has a progress bar and can be cancelled.

import { duration, plainMessage } from "./texts.js";

const box = document.getElementById("status"), text = document.getElementById("status-text");
const bar = document.getElementById("progress"), cancel = document.getElementById("cancel"), dismiss = document.getElementById("dismiss");
let active = null; // the controller of the work that the line is about

export function setStatus(message, isError = false) {
  text.textContent = message;
  box.classList.toggle("error", isError);
  dismiss.hidden = !isError;
}

/** Start work that can be cancelled. Returns its signal and callbacks. */
export function startWork(title, controller) {
  active = controller;
  setStatus(`${title}…`);
  const started = performance.now();
  return {
    signal: controller.signal,
    onBusy: (wait) => { if (active === controller) setStatus(`The server is busy; trying again in ${Math.ceil(wait)} s…`); },
    onProgress: ({ task, done, steps }) => {
      if (active !== controller) return;
      box.setAttribute("aria-live", "off"); // the bar shows it; reading every per cent aloud would be too much
      cancel.hidden = performance.now() - started < 400;
      bar.hidden = cancel.hidden;
      if (steps > 0) {
        const remaining = done > 0 ? (performance.now() - started) / 1000 * (steps - done) / done : NaN;
        bar.value = done / steps;
        setStatus(`${title}: ${Math.round(100 * done / steps)} %${remaining > 1 ? `, ${duration(remaining)} left` : ""}`);
      } else {
        bar.removeAttribute("value");
        setStatus(task === "waiting" ? `${title}: waiting for earlier requests…` : `${title}…`);
      }
    },
  };
}

export function endWork(controller, message) {
  if (active !== controller) return;
  active = null;
  bar.hidden = cancel.hidden = true;
  box.setAttribute("aria-live", "polite");
  if (message !== undefined) setStatus(message);
}

/** Show an error; cancelled or replaced work is no error. */
export function failWork(controller, error, about = "") {
  if (error.name === "AbortError") {
    if (active === controller) endWork(controller, "Cancelled.");
    return;
  }
  endWork(controller);
  setStatus(about + plainMessage(error), true);
}

cancel.addEventListener("click", () => active?.abort());
dismiss.addEventListener("click", () => setStatus(""));
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !cancel.hidden) active?.abort(); });
