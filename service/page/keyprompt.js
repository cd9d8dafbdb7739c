// Asks for the server's API key.

import { setApiKey } from "./api.js";

const dialog = document.getElementById("key-prompt");
const form = document.getElementById("key-form");
const field = document.getElementById("api-key");
const reason = document.getElementById("key-reason");

const BLANK_ENDS = /^[\s\u200b-\u200d\u2060\ufeff]+|[\s\u200b-\u200d\u2060\ufeff]+$/g; // copied with it, often unseen
const KEY = /^[ -~]+$/; // a header carries no other characters

let open = null; // the promise of the prompt that is being shown
let given = false; // a key, which then was not accepted if there is another prompt

/** True when the user gave a key, false when the prompt was dismissed. Two askers share one prompt. */
export function askForKey() {
  open ??= prompt().finally(() => {
    open = null;
  });
  return open;
}

function prompt() {
  reason.textContent = given ? "The server did not accept that key." : "This server asks for an API key.";
  field.value = "";
  return new Promise((resolve) => {
    const give = (event) => {
      event.preventDefault();
      const key = field.value.replace(BLANK_ENDS, "");
      if (!KEY.test(key)) {
        reason.textContent = "That is no API key: one has only letters, digits and signs of ASCII. Copy it anew.";
        field.select();
        return;
      }
      given = true;
      setApiKey(key);
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
