// Asks for the server's API key.

import { isKeptUnfit, keepKey, keptKey, keyIn } from "./key.js";

const dialog = document.getElementById("key-prompt");
const form = document.getElementById("key-form");
const field = document.getElementById("api-key");
const reason = document.getElementById("key-reason");

const KIND = "one has only letters, digits and signs of ASCII. Copy it anew.";

let open = null; // the promise of the prompt that is being shown

/** True when the user gave a key, false when the prompt was dismissed. Two askers share one prompt. */
export function askForKey() {
  open ??= prompt().finally(() => {
    open = null;
  });
  return open;
}

function prompt() {
  reason.textContent = whyAsked();
  field.value = "";
  return new Promise((resolve) => {
    const give = (event) => {
      event.preventDefault();
      const key = keyIn(field.value);
      if (key === "") {
        reason.textContent = `That is no API key: ${KIND}`;
        field.select();
        return;
      }
      keepKey(key);
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

function whyAsked() {
  if (isKeptUnfit()) return `What this tab kept is no API key: ${KIND}`;
  return keptKey() === "" ? "This server asks for an API key." : "The server did not accept that key.";
}
