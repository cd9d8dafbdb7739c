// Asks for the server's API key.

import { setApiKey } from "./api.js";

const dialog = document.getElementById("key-prompt");
const form = document.getElementById("key-form");
const field = document.getElementById("api-key");
const reason = document.getElementById("key-reason");

let open = null; // the promise of the prompt that is being shown
let asked = false;

/** True when the user gave a key, false when the prompt was dismissed. Two askers share one prompt. */
export function askForKey() {
  open ??= prompt().finally(() => {
    open = null;
  });
  return open;
}

function prompt() {
  reason.textContent = asked ? "The server did not accept that key." : "This server asks for an API key.";
  asked = true;
  field.value = "";
  return new Promise((resolve) => {
    const give = (event) => {
      event.preventDefault();
      setApiKey(field.value.trim());
      dialog.close("given");
    };
    form.addEventListener("submit", give);
    dialog.addEventListener(
      "close",
      () => {
        form.removeEventListener("submit", give);
        resolve(dialog.returnValue === "given");
      },
      { once: true },
    );
    dialog.returnValue = "";
    dialog.showModal();
    field.focus();
  });
}
