// The access token: from the fragment of the URL, which browsers never send, or from a field in the page; kept for this tab.

const TOKEN = "token", fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.has(TOKEN)) {
  sessionStorage.setItem(TOKEN, fragment.get(TOKEN));
  fragment.delete(TOKEN);
  history.replaceState(null, "", `${location.pathname}#${fragment}`);
}
const form = document.getElementById("token-form"), field = document.getElementById("token-field"), problem = document.getElementById("token-error");
let waiting = null; // one form for all requests that were refused

export const currentToken = () => sessionStorage.getItem(TOKEN);

/** Show the field until a token is entered. `refused` is the token that did not work, null if there was none. */
export function askToken(refused) {
  if (currentToken() !== refused) return Promise.resolve(); // another request has asked already
  waiting ??= new Promise((resolve) => {
    form.hidden = false;
    problem.textContent = refused === null ? "" : "That token was not accepted. Copy it once more.";
    field.value = "";
    field.focus();
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(TOKEN, field.value.trim());
      form.hidden = true;
      waiting = null;
      resolve();
    }, { once: true });
  });
  return waiting;
}
